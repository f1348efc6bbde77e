"""Tests of the communication hooks for torch's DDP: equal to with_bagua, in every mode of DDP, over
gloo.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, on_every_process
from tests.trainings import wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.errors import CommunicationError, NotInitializedError

pytestmark = pytest.mark.slow

NAMES = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "bytegrad with memory": {
        "hierarchical": False,
        "compression": "OneBit",
        "error_feedback": True,
    },
    "powersgd": {"warmup_steps": 2, "matrix_approximation_rank": 2, "min_compression_rate": 1.0},
    "topk": {"ratio": 0.1, "warmup_steps": 2},
}
ONE = 1e-6
"""MiB of a DDP bucket that holds one parameter."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5)
    )


def step(
    module: nn.Module, optimizer: torch.optim.Optimizer, number: int, inside: Any = None
) -> torch.Tensor:
    """Train on two batches, the first one in the context ``inside`` if it is given; return the
    gradients.
    """
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
    optimizer.zero_grad()
    for context in (nullcontext(),) if inside is None else (inside, nullcontext()):
        with context:
            module(torch.randn(8, 16, generator=generator)).square().mean().backward()
    gradients = torch.cat([p.grad.reshape(-1).clone() for p in module.parameters()])
    optimizer.step()
    return gradients


def hooked(
    name: str, options: dict[str, Any], **of_ddp: Any
) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return a DDP module with a hook, its optimizer, and the hook's state."""
    module = DistributedDataParallel(network(), **of_ddp)
    state, hook = bagua_ref.ddp_comm_hook(name.split()[0], **options)
    module.register_comm_hook(state, hook)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), state


def train_both(
    name: str, bucket_mb: float | None, of_ddp: dict[str, Any], accumulate: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Return every step's gradients, of DDP with a hook and of a wrapped module that is given DDP's
    buckets.
    """
    hook, optimizer, state = hooked(name, NAMES[name], bucket_cap_mb=bucket_mb, **of_ddp)
    ours, other = wrap(
        network(), Algorithm.init(name.split()[0], **NAMES[name]), lr=0.1, momentum=0.9
    )
    make, buckets = ours.bagua_algorithm.tensors_to_buckets, None

    def as_ddp(tensors: list[list[torch.Tensor]], do_flatten: bool) -> list[Any]:
        in_order = [tensor for bucket in tensors for tensor in bucket]
        return make(
            [[in_order[int(place)] for place in bucket] for bucket in state.buckets], do_flatten
        )

    ours.bagua_algorithm.tensors_to_buckets = as_ddp
    pairs = []
    for number in range(6):
        skipping = [hook.no_sync(), ours.no_sync()] if accumulate else [None, None]
        gradients = step(hook, optimizer, number, skipping[0])
        if state.buckets != buckets:
            buckets = state.buckets
            ours._bagua.reset()
        pairs.append((gradients, step(ours, other, number, skipping[1])))
    return pairs


MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "no_sync": ({}, True),
    "static_graph": ({"static_graph": True}, False),
    "gradient_as_bucket_view": ({"gradient_as_bucket_view": True}, True),
    "find_unused_parameters": ({"find_unused_parameters": True}, False),
}


@pytest.mark.proof
@on_every_process(3)  # 893 elements, which bytegrad has to pad
def test_a_hook_gives_what_with_bagua_gives_for_the_same_buckets_to_the_bit() -> None:
    for name in NAMES:
        for mode in MODES if name in ("powersgd", "topk", "bytegrad with memory") else ["plain"]:
            for number, (ours, theirs) in enumerate(
                train_both(name, None if mode == "plain" else ONE, *MODES[mode])
            ):
                assert torch.equal(ours, theirs), f"{name}, {mode}, step {number}"


def restart(name: str) -> list[torch.Tensor]:
    """Return the last gradients of a training, and those of one that goes on from its middle."""
    of_ddp = {"find_unused_parameters": True}  # then DDP keeps its first buckets
    module, optimizer, state = hooked(name, NAMES[name], **of_ddp)
    for number in range(4):
        step(module, optimizer, number)
    saved = [part.state_dict() for part in (module, optimizer, state)]
    saved = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved
    )
    whole = [step(module, optimizer, number) for number in range(4, 7)]
    module, optimizer, state = hooked(name, NAMES[name], **of_ddp)
    for part, values in zip((module, optimizer, state), saved, strict=True):
        part.load_state_dict(values)
    assert state.reductions == 4
    return [
        torch.stack(whole),
        torch.stack([step(module, optimizer, number) for number in range(4, 7)]),
    ]


@on_every_process(2)
def test_a_hook_goes_on_from_its_state_as_if_nothing_had_happened() -> None:
    for name in ("bytegrad with memory", "powersgd", "topk"):
        whole, continued = restart(name)
        assert_equal(continued, whole, EXACT)


@on_every_process(2)
def test_S11_2_one_overflow_skips_one_step_under_every_hook() -> None:
    """A GradScaler skips it on every rank after the loss of the last rank was infinite once."""
    for name, options in {**NAMES, "topk": {"ratio": 0.01}}.items():
        skipped = 0
        module, optimizer, _ = hooked(name, options)
        scaler = torch.amp.GradScaler("cpu", growth_interval=1000)
        for number in range(20):
            optimizer.zero_grad()
            factor = (
                torch.inf if number == 3 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
            )
            scaler.scale(module(torch.ones(4, 16)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
        assert skipped == 1, name


def differ(what: str) -> str:
    """Return the error of a training in which one rank differs."""
    rank = dist.get_rank()
    options = {
        "warmup_steps": 0,
        "matrix_approximation_rank": 1 + (what == "options") * rank,
        "min_compression_rate": 1.0,
    }
    try:
        module, optimizer, state = hooked("powersgd", options)
        for number in range(2):  # in the second one, DDP makes new buckets
            step(module, optimizer, number)
        if what == "reductions" and rank:
            state.load_state_dict({**state.state_dict(), "steps_of_optimizers": [7]})
        if what == "factors" and rank:
            saved = state.state_dict()
            state.load_state_dict(
                {**saved, "factors": {name: q + 1 for name, q in saved["factors"].items()}}
            )
        if what == "failure" and rank:
            state._buckets[0].bucket.append_python_op(lambda bucket: 1 / 0)
        # a rank may fail when the others have got what they need in this round
        for number in (2, 3):
            step(module, optimizer, number)
    except (RuntimeError, CommunicationError) as error:
        try:
            step(module, optimizer, 4)
        except (RuntimeError, CommunicationError, UnboundLocalError):
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("options", "disagree: .*options of checksum"),
        ("reductions", "disagree: .*finished 7 reductions"),
        ("factors", "disagree: .*factors of checksum"),
        ("failure", "division by zero|gave up"),
    ],
    ids=["options", "reductions", "factors", "failure"],
)
def test_ranks_that_differ_are_an_error_on_every_rank_for_good(what: str, message: str) -> None:
    for error in launch(differ, 2, what, collective_timeout=20):
        assert re.search(message, error), error


@pytest.mark.parametrize("name", ["qadam", "decentralized", "PowerSGD"])
def test_an_unknown_hook_is_an_error_that_lists_those_that_exist(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=(
            f"'{name}' is no communication hook; there are 'gradient_allreduce', 'bytegrad',"
            " 'powersgd'"
        ),
    ):
        bagua_ref.ddp_comm_hook(name)


def test_options_are_checked_and_torch_must_be_initialized() -> None:
    with pytest.raises(ValueError, match="matrix_approximation_rank=0 must be 1 or more"):
        bagua_ref.ddp_comm_hook("powersgd", matrix_approximation_rank=0)
    with pytest.raises(NotInitializedError, match="init_process_group"):
        bagua_ref.ddp_comm_hook("powersgd")


@on_every_process(2)
def test_S11_2_float64_is_refused_before_anything_is_sent() -> None:
    module = DistributedDataParallel(network().double())
    module.register_comm_hook(*bagua_ref.ddp_comm_hook("topk"))
    with pytest.raises(
        Exception, match=r"topk takes float16, bfloat16 or float32, not torch\.float64"
    ):
        module(torch.zeros(1, 16, dtype=torch.float64)).sum().backward()
