"""Faults of simulated ranks: one is killed, stops for a long time, or is slow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from bagua_ref.communicators.simulated_group import Call, SimulatedGroup

__all__ = ["FAULTS", "Fault"]

FAULTS = ("kill", "stop", "slow")

_LOST = 1.0
"""Virtual seconds that a slow rank loses before each communication."""


@dataclass
class Fault:
    """A fault of one rank, from one of its communications on.

    Args:
        kind: ``"kill"``: the rank's process ends; ``"stop"``: it does nothing for longer than the group's timeout;
            ``"slow"``: it loses a second before this communication and each later one.
        rank: the global rank.
        number: of its communications, from 0.
    """

    kind: str
    rank: int
    number: int
    _gone: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault of ``str(fault)``; raise ValueError if it is none."""
        parts = re.fullmatch(rf"({'|'.join(FAULTS)}):([0-9]+):([0-9]+)", text)
        if parts is None:
            raise ValueError(f"fault {text!r} must be KIND:RANK:NUMBER, with a kind of {', '.join(FAULTS)}, such as kill:1:12")
        return cls(parts[1], int(parts[2]), int(parts[3]))

    def strike(self, call: Call, rank: int, number: int, groups: Iterable[SimulatedGroup]) -> None:
        """Let the fault happen, if it is time, before the calling rank's communication ``number``; ``groups`` are those known."""
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
        """Close a rank's connections, as the end of its process does: its groups' operations raise on the other ranks."""
        self._gone[rank] = f"connection closed by peer: {reason}"
        for group in groups:
            if rank in group.ranks:
                group.give_up(self._gone[rank])
