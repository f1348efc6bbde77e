"""Schedules of a small simulated world, systematically enumerated choices of the next thread; and
faults of its ranks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bagua_ref.errors import SimulationError
from bagua_ref.simulation.group import Call, SimulatedGroup

FAULTS = ("kill", "stop", "slow")

_LOST = 1.0
"""Virtual seconds that a slow rank loses before each communication."""

_REASON = "the program behaves differently than when this schedule was found"


class Schedule:
    """A schedule: one order in which the threads of a simulated world run.

    By default a thread runs until it waits, followed by the thread that became ready last. A
    deviation chooses another thread, as if the first had been interrupted.

    Args:
        choices: for each moment at which several threads can run, 0 for the default, k for the k-th
            other; defaults follow.

    Raises:
        ValueError: a choice is not such a number.

    >>> Schedule([0, 2])
    Schedule([0, 2])
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._choices = list(choices)
        if any(not isinstance(choice, int) or choice < 0 for choice in self._choices):
            raise ValueError(f"choices={choices!r} must be ints, 0 or more")
        self.restart()
        self._has_run = False

    def __repr__(self) -> str:
        return f"Schedule({self._choices})"

    def restart(self) -> None:
        """Restart the schedule for a new run."""
        self._has_run = True
        self._others: list[int] = []
        """For each choice, the number of alternatives to the default."""
        self._free: int | None = None
        """Index of the first choice to vary."""

    def begin(self) -> None:
        """Mark the start of the choices that `Schedules` may vary; only the first call in a run
        counts.
        """
        if self._free is None:
            self._free = len(self._others)

    def choose(self, ready: int) -> int:
        """Return the index of the thread to run next, among ``ready`` threads in the order in which
        they became ready.

        Raises:
            SimulationError: the schedule's choice exceeds the number of ready threads.
        """
        if ready == 1:
            return 0
        place = len(self._others)
        self._others.append(ready - 1)
        choice = self._choices[place] if place < len(self._choices) else 0
        if choice >= ready:
            raise SimulationError(
                f"choice {place} of {self!r} is {choice}, but only {ready} threads can run;"
                f" {_REASON}"
            )
        return ready - 1 - choice

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text of ``str(schedule)``.

        Raises:
            ValueError: it is not "default", ``seed:number`` or ``place:choice,place:choice,...``
                with ascending places.

        >>> Schedule.parse("1:2,4:1")
        Schedule([0, 2, 0, 0, 1])
        """
        if text.startswith("seed:") and text[5:].isdecimal():
            return SeededSchedule(int(text[5:]))
        choices: list[int] = []
        for part in [] if text == "default" else text.split(","):
            place, _, choice = part.partition(":")
            if not (
                place.isdecimal() and choice.isdecimal() and len(choices) <= int(place) < 10**7
            ):
                raise ValueError(
                    f"schedule {text!r} must be default, or PLACE:CHOICE,... with ascending places,"
                    " such as 3:1,17:2"
                )
            choices += [0] * (int(place) - len(choices)) + [int(choice)]
        return cls(choices)

    def __str__(self) -> str:
        return (
            ",".join(f"{place}:{choice}" for place, choice in enumerate(self._choices) if choice)
            or "default"
        )

    def places(self) -> list[int]:
        """Return the indices of non-default choices."""
        return [place for place, choice in enumerate(self._choices) if choice]

    def only(self, places: Collection[int]) -> Schedule:
        """Return a copy of the schedule that keeps only the deviations at these indices."""
        last = max(places, default=-1)
        return Schedule(
            [
                choice if place in places else 0
                for place, choice in enumerate(self._choices[: last + 1])
            ]
        )

    def deviations(self) -> int:
        """Return the number of non-default choices."""
        return len(self.places())

    def variants(self) -> Iterator[Schedule]:
        """Yield, after a run, the schedules with one further deviation, later than its last.

        Raises:
            SimulationError: there was no run, or it was over before the last choice.
        """
        if not self._has_run:
            raise SimulationError(
                f"{self!r} has not been run; pass it to SimulatedWorld(schedule=)"
            )
        if len(self._others) < len(self._choices):
            raise SimulationError(
                f"the run had {len(self._others)} choices, fewer than {self!r}; {_REASON}"
            )
        for place in range(max(len(self._choices), self._free or 0), len(self._others)):
            before = [*self._choices, *[0] * (place - len(self._choices))]
            for other in range(1, self._others[place] + 1):
                yield Schedule([*before, other])


class SeededSchedule(Schedule):
    """A schedule of random choices, drawn from a seed during the run.

    Args:
        seed: seed of the choices.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        super().__init__()

    def __str__(self) -> str:
        return f"seed:{self.seed}"

    def restart(self) -> None:
        """Restart the schedule for a new run with the same random choices."""
        super().restart()
        self._choices = []
        self._drawn = random.Random(self.seed)  # noqa: S311 # to repeat an order, not to hide one

    def choose(self, ready: int) -> int:
        """Draw the index of the thread to run next, and record the choice."""
        if ready > 1:
            self._choices.append(int(self._drawn.random() * ready))
        return super().choose(ready)


class Schedules:
    """Enumeration of the schedules of a small program, depth first: each once, up to a number of
    deviations.

    A program of two ranks with a handful of operations each has thousands of schedules, a training
    step more than can be run. Few deviations find most errors: an error that needs k interruptions
    at the right moments is found with k deviations.

    Args:
        deviations: see `Schedule`; None: any number.
        limit: maximal number of schedules.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        runs: the number of schedules that have been run.
        complete: whether all schedules up to the number of deviations have been run.
        exhausted: whether no other schedules exist, not counting those before `Schedule.begin`.

    >>> from bagua_ref.simulation import SimulatedWorld
    >>> def program(comm):
    ...     comm.barrier()
    >>> schedules = Schedules()
    >>> for schedule in schedules:
    ...     _ = SimulatedWorld(2, schedule=schedule).run(program)
    >>> schedules.exhausted
    True
    """

    def __init__(self, deviations: int | None = None, limit: int = 10_000) -> None:
        if deviations is not None and deviations < 0:
            raise ValueError(f"deviations={deviations!r} must be 0 or more, or None for any number")
        if limit < 1:
            raise ValueError(f"limit={limit!r} must be at least 1 schedule")
        self._deviations, self._limit = deviations, limit
        self._start()

    def __iter__(self) -> Iterator[Schedule]:
        self._start()
        while (schedule := self.take()) is not None:
            yield schedule
            self.add_variants(schedule)

    def _start(self) -> None:
        self._waiting, self._left_out, self._running = [Schedule()], 0, 0
        self.runs, self.complete, self.exhausted = 0, False, False

    def take(self) -> Schedule | None:
        """Return the next schedule to run; None if there is none at present. Several may be running
        at a time.
        """
        if not self._waiting or self.runs + self._running >= self._limit:
            return None
        self._running += 1
        return self._waiting.pop()

    def add_variants(self, schedule: Schedule) -> None:
        """Add the variants of a schedule that has been run, or of its copy, to the search."""
        self._running -= 1
        self.runs += 1
        if self._deviations is None or schedule.deviations() < self._deviations:
            self._waiting += schedule.variants()
        else:
            self._left_out += next(schedule.variants(), None) is not None
        self.complete = not self._waiting and not self._running
        self.exhausted = self.complete and not self._left_out


@dataclass
class Fault:
    """A fault of one rank, effective from one of its communications on.

    Args:
        kind: ``"kill"``: the rank's process ends; ``"stop"``: it does nothing for longer than the
            group's timeout; ``"slow"``: it loses a second before this communication and each later
            one.
        rank: the global rank.
        number: index of the communication on that rank, from 0.
    """

    kind: str
    rank: int
    number: int
    _gone: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse the text of ``str(fault)``; raise ValueError if it is invalid."""
        parts = re.fullmatch(rf"({'|'.join(FAULTS)}):([0-9]+):([0-9]+)", text)
        if parts is None:
            raise ValueError(
                f"fault {text!r} must be KIND:RANK:NUMBER, with a kind of {', '.join(FAULTS)}, such"
                " as kill:1:12"
            )
        return cls(parts[1], int(parts[2]), int(parts[3]))

    def strike(self, call: Call, rank: int, number: int, groups: Iterable[SimulatedGroup]) -> None:
        """Apply the fault if it is due, before the calling rank's communication ``number``;
        ``groups`` are the existing ones.
        """
        scheduler = call.group.scheduler
        scheduler.timeouts_fire = True
        if rank == self.rank and number == self.number and self.kind == "kill":
            self.leave(rank, groups, f"rank {rank} was killed")
            scheduler.kill()
        elif rank == self.rank and number == self.number and self.kind == "stop":
            scheduler.sleep(2 * min(call.group.timeout, 1e6))
        elif rank == self.rank and number >= self.number and self.kind == "slow":
            scheduler.sleep(_LOST)
        for other, reason in self._gone.items():
            if other in call.group.ranks:
                call.group.give_up(reason)

    def leave(self, rank: int, groups: Iterable[SimulatedGroup], reason: str) -> None:
        """Close a rank's connections, like the end of its process: operations of its groups raise
        on the other ranks.
        """
        self._gone[rank] = f"connection closed by peer: {reason}"
        for group in groups:
            if rank in group.ranks:
                group.give_up(self._gone[rank])
