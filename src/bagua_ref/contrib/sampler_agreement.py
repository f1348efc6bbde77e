"""Comparison of samplers across ranks."""

from __future__ import annotations

import json
import math
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import format_ranks
from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.rendezvous import ask

__all__ = ["call_stack", "callers", "comparison", "difference", "same_share"]


def difference(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the setting in which the ranks' samplers differ; "" if there is none."""
    first, *others = sorted(states)
    for name, value in states[first].items():
        different = [rank for rank in others if states[rank].get(name) != value]
        if different and name != "rank":
            theirs = states[different[0]].get(name)
            return (
                f"the ranks' samplers differ, so samples would repeat and others be left out:"
                f" {format_ranks(different)} {'have' if len(different) > 1 else 'has'}"
                f" {name}={theirs!r}, and rank {first} has {name}={value!r}; give all the same"
            )
    return ""


def same_share(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe ranks whose samplers draw the same share of the samples; "" if there are none."""
    drawn_by: dict[int, int] = {}
    for rank, state in sorted(states.items()):
        if (other := drawn_by.setdefault(state["rank"], rank)) != rank:
            return (
                f"the samplers of ranks {other} and {rank} both have rank={state['rank']} of"
                f" {state['num_replicas']}, so they draw the same samples, and others are never"
                " drawn; leave out rank=, or pass torch.distributed.get_rank()"
            )
    return ""


def call_stack(frame: FrameType | None) -> int:
    """Return a checksum of the functions and lines in the call stack of ``frame``, equal on all
    ranks that run the same statement.
    """
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return zlib.crc32(repr(lines).encode())


def callers(frame: FrameType | None) -> Iterator[Any]:
    """Yield the objects whose methods are in the call stack of ``frame``, innermost first."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def drawn_ahead() -> int:
    """Return the number of items that the calling DataLoader, if any, prefetches before the first
    step.
    """
    in_batch, batches = 1, 1
    for caller in callers(sys._getframe()):
        if type(caller).__module__.startswith(("torch.utils.data.", "torchdata.")):
            in_batch = max(in_batch, getattr(caller, "batch_size", None) or 1)
            if workers := getattr(caller, "_num_workers", 0):
                batches = 1 + workers * caller._prefetch_factor
    return in_batch * batches


def comparison(kind: str, state: dict[str, Any]) -> Callable[[float], None] | None:
    """Start comparing a sampler with those of the other ranks; return a function of the number of
    items drawn, which checks at intervals and raises ValueError if samplers differ.

    This goes through the store of torch's default process group, or that of a simulated world;
    without them, None is returned. Ranks never wait for each other here: a sampler may be drawn on
    one rank alone. The first rank that begins to draw publishes its settings, and every other one
    compares its own. All ranks check after a step whether any rank has found a difference, so that
    none ends while others are in the step.

    Args:
        kind: kind of the sampler; the n-th samplers of a kind on all ranks are compared.
        state: the settings and the share of the sampler.
    """
    world = current_world()
    store, rank, ranks = world.board, world.identity.rank, world.identity.world_size
    simulated = store is not None
    if not simulated and dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        rank, ranks = dist.get_rank(), dist.get_world_size()
    if store is None or ranks == 1:
        return None

    def asked(use: Callable[[Store], Any], otherwise: Any) -> Any:
        # The store of a simulated world is in memory, and its threads are no real ones.
        return use(store) if simulated else ask(store, use, otherwise)

    def set_first(name: str, value: str) -> Any:
        """Publish a value unless another rank did so first; return the value of the first rank."""
        return asked(lambda store: store.compare_set(prefix + name, "", value), value)

    world.names[kind] += 1
    prefix = f"bagua_ref/{kind}/{world.names[kind]}/"
    own = json.dumps([rank, state])
    publisher, settings = json.loads(set_first("settings", own))
    # Samplers of fewer replicas than ranks may be those of several trainings.
    if ranks in (state["num_replicas"], settings["num_replicas"]):
        wrong = difference({publisher: settings, rank: json.loads(own)[1]})
        other = int(set_first(f"share {state['rank']}", str(rank)))
        if said := wrong or same_share({other: state, rank: state}):
            set_first("difference", json.dumps([bool(wrong), said]))
    elif state["num_replicas"] > ranks:
        warnings.warn(
            f"num_replicas={state['num_replicas']} of the sampler is more than the {ranks} ranks,"
            " so some samples are never drawn unless ranks draw several shares",
            stacklevel=4,
        )
    look_at: float = drawn_ahead() + 1

    def look(drawn: float) -> None:
        nonlocal look_at
        if drawn < look_at:
            return
        look_at, key = 2 * drawn, f"{prefix}difference"
        found = asked(lambda store: store.get(key) if store.check([key]) else "", "")
        if found:
            look_at = math.inf
            wrong, said = json.loads(found)
            if wrong:
                raise ValueError(said)
            # A program may draw the shares of all ranks on every rank, one after the other.
            warnings.warn(said, stacklevel=3)

    return look
