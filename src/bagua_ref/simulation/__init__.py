"""Public interface of simulated worlds: any number of ranks in one process, deterministic, on a
virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bagua_ref.base.launch_environment import Identity
from bagua_ref.base.runtime import use_world
from bagua_ref.errors import RankCall
from bagua_ref.formulas.costs import LinkCosts
from bagua_ref.simulation.communicator import SimulatedNetwork, SimulatedTransport
from bagua_ref.simulation.group import Call
from bagua_ref.simulation.rank_world import SimulatedRankWorld, always
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.schedules import Schedule, Schedules, SeededSchedule
from bagua_ref.simulation.tasks import RankState

__all__ = ["Schedule", "Schedules", "SimulatedWorld", "always"]

T = TypeVar("T")


class SimulatedWorld:
    """Simulated ranks: threads of this process that run one at a time, in an order drawn from a
    seed (S1).

    It is not a `bagua_ref.runtime.World`, which belongs to one rank: `run` makes a
    `SimulatedRankWorld` for each rank.

    Inside `run`, all code that asks for its rank, communicates, waits, reads the clock or starts
    threads through `bagua_ref.runtime` uses the simulated rank: ``get_rank()``,
    ``init_process_group()``, ``with_bagua`` and samplers work unchanged, and torch.distributed is
    never initialised. Sleeping takes no real time. The ranks share what a process shares:
    environment, module globals and devices. Random generators are an exception, see `run`.

    Args:
        world_size: the number of ranks, at least 1.
        nodes: the number of ranks on each node, in rank order; None: all ranks are on one node.
        seed: the seed of the interleaving. The same program and seed give the same interleaving and
            results.
        schedule: the interleaving of a single run, instead of a seed's.
        torch_distributed: whether each rank is like a process in which `torch.distributed` is the
            simulated world's, so that ``run`` takes any program that is written for it; see
            `bagua_ref.simulation.torch_distributed`.
        link: the links between ranks, such as "1Gbit,20ms" (see
            `bagua_ref.formulas.costs.LinkCosts.parse`): collectives and messages take the time of
            S14. None: they take none.
        compute: the seconds of a forward and backward pass; "measured": threads take their CPU
            time; None: compute takes none.

    Attributes:
        virtual_time: the duration of the last `run` in virtual seconds.
        timeline: with a ``link``, the `bagua_ref.simulation.timing.Timeline` of the last `run`;
            else None.

    Raises:
        ValueError: ``nodes`` are not positive numbers that sum to ``world_size``.

    >>> def program(comm):
    ...     x = torch.tensor([float(comm.rank())])
    ...     comm.allreduce_inplace(x)
    ...     return x.item()
    >>> SimulatedWorld(4, nodes=(3, 1)).run(program)
    [6.0, 6.0, 6.0, 6.0]
    >>> def program():
    ...     torch.distributed.init_process_group("gloo")
    ...     x = torch.tensor([float(torch.distributed.get_rank())])
    ...     torch.distributed.all_reduce(x)
    ...     return x.item()
    >>> SimulatedWorld(4, torch_distributed=True).run(program)
    [6.0, 6.0, 6.0, 6.0]
    """

    def __init__(
        self,
        world_size: int,
        nodes: Sequence[int] | None = None,
        seed: int = 0,
        schedule: Schedule | None = None,
        *,
        torch_distributed: bool = False,
        link: LinkCosts | str | None = None,
        compute: float | str | None = None,
    ) -> None:
        for name, value in (("world_size", world_size), ("seed", seed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be an int")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule={schedule!r} must be a Schedule, or None to draw one from the seed"
            )
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        sizes = (world_size,) if nodes is None else tuple(nodes)
        if any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) != world_size:
            raise ValueError(
                f"nodes={sizes} must be numbers of ranks, each at least 1, that sum to"
                f" world_size={world_size}"
            )
        self.world_size, self.nodes, self.seed, self.schedule = world_size, sizes, seed, schedule
        self.torch_distributed = torch_distributed
        self.link = LinkCosts.parse(link) if isinstance(link, str) else link
        number = (
            isinstance(compute, float | int)
            and not isinstance(compute, bool)
            and 0 <= compute < float("inf")
        )
        if (compute not in (None, "measured") and not number) or (
            compute is not None and link is None
        ):
            raise ValueError(
                f'compute={compute!r} must be seconds or "measured" with a link, or None'
            )
        self.compute = compute
        self.timeline: Any = None
        self.failed_call: RankCall | None = None
        """The call that raised the exception which ended the last `run`."""
        self.virtual_time = 0.0
        self._messages: list[tuple[str, list[Tensor]]] | None = None
        self.observe: Callable[[Call], None] | None = None
        """Callback of each rank with each of its communications, before it takes place."""

    def __repr__(self) -> str:
        order = f"seed={self.seed}" if self.schedule is None else f"schedule={self.schedule!r}"
        return f"SimulatedWorld({self.world_size}, nodes={self.nodes}, {order})"

    def record(self) -> list[tuple[str, list[Tensor]]]:
        """Return a list of collectives that later runs extend: the name, and a copy of what each
        rank of the group sends.

        >>> world = SimulatedWorld(2)
        >>> messages = world.record()
        >>> _ = world.run(lambda comm: comm.allreduce_inplace(torch.ones(1), ReduceOp.SUM))
        >>> messages
        [('allreduce(op=SUM)', [tensor([1.]), tensor([1.])])]
        """
        self._messages = [] if self._messages is None else self._messages
        return self._messages

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call ``function(comm, *args)`` on every rank, with its communicator of all ranks; return
        the results by rank.

        With ``torch_distributed=True`` it is ``function(*args)``, called as a process's main
        function.

        Each run starts in a new world, without groups and at time 0. Every rank has its own state
        of torch's CPU generator and of Python's `random`, which starts as the caller's. torch uses
        one thread meanwhile.

        Raises:
            SimulationError: deadlock: every rank is waiting for another; the message names the
                waits, and ``kind`` and ``calls`` tell rank, line and operation. With
                ``torch_distributed=True`` also calls that do not match, as soon as two ranks have
                made them, and what cannot be simulated; programs cannot catch these.
            BaseException: the exception of the first rank to fail, unchanged; the other ranks are
                ended.
        """
        places = [
            (place, size, node) for node, size in enumerate(self.nodes) for place in range(size)
        ]
        identities = [Identity(rank, self.world_size, *place) for rank, place in enumerate(places)]
        node_of = tuple(identity.node_rank for identity in identities)
        states: Any = [RankState() for _ in identities]
        # imported here, as it takes longer than the rest of this package
        if self.torch_distributed:
            from bagua_ref.simulation.torch_distributed import (
                rank_states,
                run_process,
                simulated_torch,
            )

            states = rank_states(identities)
        schedule = self.schedule or SeededSchedule(self.seed)
        schedule.restart()
        scheduler = Scheduler(schedule.choose, states)
        scheduler.messages = self._messages
        network = SimulatedNetwork(scheduler, node_of)
        if self.observe is not None:
            scheduler.on_communication = self.observe
        torch_distributed: Any = nullcontext()
        timing: Any = nullcontext()
        if self.torch_distributed:
            torch_distributed = simulated_torch(scheduler, network, states)
        if self.link is not None:
            from bagua_ref.simulation.timing import Timing

            timing = Timing(scheduler, node_of, self.link, self.compute)
            self.timeline = timing.timeline
        results: dict[int, T] = {}
        board = HashStore()

        def main(rank: int) -> None:
            transport = SimulatedTransport(network, rank)
            with use_world(
                SimulatedRankWorld(scheduler, identities[rank], transport, states[rank], board)
            ) as world:
                results[rank] = (
                    run_process(world, function, *args)
                    if self.torch_distributed
                    else function(transport.everyone(), *args)
                )
                if world.meter is not None:
                    scheduler.steps_at_end[rank] = world.meter.steps

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch_distributed, timing:
                scheduler.run([partial(main, rank) for rank in range(self.world_size)])
        finally:
            torch.set_num_threads(threads)
            self.failed_call = scheduler.failed_call
            self.virtual_time = scheduler.time
        return [results.get(rank) for rank in range(self.world_size)]  # type: ignore[misc] # a killed rank has none
