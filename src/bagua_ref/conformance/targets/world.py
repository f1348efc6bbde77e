"""Worlds for checks of communicators and bucket operations, with ranks as simulated or real
threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_ref.communicators.base import Communicator
from bagua_ref.simulation import SimulatedWorld

MOST_RANKS = {"collectives": 9, "comm_ops": 18, "algorithms": 12}
"""Maximal number of ranks of each suite with worlds."""


@dataclass(frozen=True)
class RankWorld:
    """The argument of a target's ``communicator(world)`` on each rank.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        nodes: number of ranks on each node.
        transport: a working communicator, which the tested one may use.
        store: a torch store shared by all ranks; in place of a transport if the factory has
            ``real_threads = True``.
    """

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    transport: Communicator | None = None
    store: Any = None


def own_communicator(world: RankWorld) -> Communicator:
    """Return the simulated world's own communicator: the reference of the collectives suite."""
    assert world.transport is not None
    return world.transport


def run_world(
    factory: Callable[[RankWorld], Any],
    nodes: tuple[int, ...],
    program: Callable[[Any], Any],
    seed: int = 0,
) -> list[Any]:
    """Return the results of ``program(factory(world))`` on each rank.

    Args:
        factory: creates a rank's communicator. Ranks are threads of the simulated world, of which
            one runs at a time, and which may wait for each other through ``world.transport`` only;
            with ``factory.real_threads = True`` they are real ones, for communicators that wait by
            other means.
        nodes: number of ranks on each node.
        program: runs on each rank.
        seed: seed of the simulated world's interleaving.
    """
    size = sum(nodes)
    if getattr(factory, "real_threads", False):
        return _on_threads(factory, nodes, program)

    def rank(transport: Communicator) -> Any:
        return program(factory(RankWorld(transport.rank(), size, nodes, transport)))

    return SimulatedWorld(size, nodes=nodes, seed=seed).run(rank)


def _on_threads(
    factory: Callable[[RankWorld], Any], nodes: tuple[int, ...], program: Callable[[Any], Any]
) -> list[Any]:
    import torch.distributed as dist

    size, store = sum(nodes), dist.HashStore()  # type: ignore[attr-defined]
    ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    # kept until all ranks have ended: destroying one may cut off another rank's last message
    communicators = []

    def rank(number: int) -> None:
        try:
            communicators.append(
                communicator := factory(RankWorld(number, size, nodes, store=store))
            )
            ended.put((number, program(communicator), None))
        except BaseException as error:
            ended.put((number, None, error))

    for number in range(size):
        threading.Thread(target=rank, args=(number,), daemon=True).start()
    results: dict[int, Any] = {}
    for _ in range(size):
        number, result, error = ended.get()
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(size)]
