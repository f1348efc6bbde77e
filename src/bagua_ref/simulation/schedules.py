"""Systematic search through the schedules of a small simulated world: its choices of the next thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bagua_ref.errors import SimulationError

__all__ = ["Schedule", "Schedules"]

_REASON = "the program behaves differently than when this schedule was found"


class Schedule:
    """One order in which the threads of a simulated world run.

    By default a thread runs until it waits, and then the thread runs that became ready last. A deviation takes another one, as if
    the first had been interrupted.

    Args:
        choices: for each moment at which several threads can run, 0 for the default, k for the k-th other; defaults follow.

    Raises:
        ValueError: a choice is not such a number.

    >>> Schedule([0, 2])
    Schedule([0, 2])
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._choices = tuple(choices)
        if any(not isinstance(choice, int) or choice < 0 for choice in self._choices):
            raise ValueError(f"choices={choices!r} must be ints, 0 or more")
        self.restart()
        self._has_run = False

    def __repr__(self) -> str:
        return f"Schedule({list(self._choices)})"

    def restart(self) -> None:
        """Begin a run: the next choice is the first one."""
        self._has_run = True
        self._others: list[int] = []
        """For each choice, the number of alternatives to the default."""
        self._free: int | None = None
        """The first choice to vary."""

    def begin(self) -> None:
        """Keep `Schedules` from varying the choices of this run up to here; only the first call counts."""
        if self._free is None:
            self._free = len(self._others)

    def choose(self, ready: int) -> int:
        """Return the index of the thread to run next, of ``ready`` threads in the order in which they became ready.

        Raises:
            SimulationError: there are too few threads for the choice.
        """
        if ready == 1:
            return 0
        place = len(self._others)
        self._others.append(ready - 1)
        choice = self._choices[place] if place < len(self._choices) else 0
        if choice >= ready:
            raise SimulationError(f"choice {place} of {self!r} is {choice}, but only {ready} threads can run; {_REASON}")
        return ready - 1 - choice

    def deviations(self) -> int:
        """Return the number of choices that are not the default."""
        return sum(choice != 0 for choice in self._choices)

    def variants(self) -> Iterator[Schedule]:
        """Yield, after a run, the schedules that deviate from it once, after its last deviation.

        Raises:
            SimulationError: there was no run, or it was over before the last choice.
        """
        if not self._has_run:
            raise SimulationError(f"{self!r} has not been run; pass it to SimulatedWorld(schedule=)")
        if len(self._others) < len(self._choices):
            raise SimulationError(f"the run had {len(self._others)} choices, fewer than {self!r}; {_REASON}")
        for place in range(max(len(self._choices), self._free or 0), len(self._others)):
            before = [*self._choices, *[0] * (place - len(self._choices))]
            for other in range(1, self._others[place] + 1):
                yield Schedule([*before, other])


class Schedules:
    """The schedules of a small program, depth first: each of them once, up to a number of deviations.

    A program of two ranks that each do a handful of things has thousands of schedules, a training step more than can be run. Few
    deviations find most errors: an error that needs k interruptions at the right moments is found with k deviations.

    Args:
        deviations: see `Schedule`; None: any number.
        limit: the most schedules to give.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        runs: the number of schedules that have been run.
        complete: whether all schedules with at most so many deviations have been run.
        exhausted: whether there are no other schedules, not counting those before `Schedule.begin`.

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
        self.runs = 0
        self.complete = self.exhausted = False

    def __repr__(self) -> str:
        how = "all" if self.exhausted else f"all with at most {self._deviations} deviations" if self.complete else "not all"
        return f"Schedules({self.runs} run, {how})"

    def __iter__(self) -> Iterator[Schedule]:
        waiting, left_out = [Schedule()], 0
        self.runs, self.complete, self.exhausted = 0, False, False
        while waiting and self.runs < self._limit:
            schedule = waiting.pop()
            yield schedule
            self.runs += 1
            variants = list(schedule.variants())
            if self._deviations is None or schedule.deviations() < self._deviations:
                waiting += variants
            else:
                left_out += len(variants)
        self.complete = not waiting
        self.exhausted = self.complete and not left_out
