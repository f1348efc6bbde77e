"""Faults of simulated ranks: one is killed, stops for a long time, or is slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua_ref.communicators.simulated import Call, SimulatedGroup

__all__ = ["KINDS", "Fault"]

KINDS = ("kill", "stop", "slow")

_SLOW = 1.0
"""Virtual seconds that a slow rank loses before each communication."""


@dataclass
class Fault:
    """A fault of one rank at one of its communications.

    Args:
        kind: ``"kill"``: the rank's process ends; ``"stop"``: it does nothing for longer than the group's timeout;
            ``"slow"``: it loses a second before this communication and each later one.
        rank: the global rank.
        number: of its communications, from 0.
    """

    kind: str
    rank: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault of ``str(fault)``; raise ValueError if it is none."""
        kind, _, rest = text.partition(":")
        rank, _, number = rest.partition(":")
        if kind not in KINDS or not rank.isdecimal() or not number.isdecimal():
            raise ValueError(f"fault {text!r} must be KIND:RANK:NUMBER, with a kind of {', '.join(KINDS)}, such as kill:1:12")
        return cls(kind, int(rank), int(number))

    def strike(self, call: Call, rank: int, number: int) -> None:
        """Let the fault happen, if it is time, before the calling rank's communication ``number``."""
        scheduler = call.group.scheduler
        if self.kind == "kill" and rank != self.rank and self.rank in self._dead and self.rank in call.group.ranks:
            call.group.give_up(self._dead[self.rank])
        ...
