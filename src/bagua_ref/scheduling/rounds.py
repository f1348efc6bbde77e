"""Rounds of communication, facts that must be equal on all ranks when one begins, and the words for those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["UNSAID", "Fact", "Round", "describe_differences"]

UNSAID = -(2**63)
"""The value of a fact about which a rank says nothing, so that it differs from no other."""


class Round:
    """A round of communication: the part before its first bucket and after its last one, of which this one has neither.

    Attributes:
        waits: whether `begin` waits for other ranks. If not, the marking thread calls it, unless the worker is busy.
    """

    waits = False

    def begin(self) -> None:
        """Begin the round, before its first bucket. If this raises an error, no bucket runs any more, and waiting raises it."""

    def end(self) -> None:
        """End the round, after its last bucket and unless one has failed; errors are those of `begin`."""


class Fact(NamedTuple):
    """A number that must be equal on all ranks.

    Attributes:
        sentence: about one or several ranks, with ``{has}`` or ``{is}`` for the verb and ``{value}`` for the number.
        value: the number on this rank, an int64.
        names: what the values 0, 1, ... mean, if they are no quantities.

    >>> Fact("{is} in {value}", 1, ("warm-up", "the compressed phase")).about([1, 3], 0)
    'ranks 1, 3 are in warm-up'
    """

    sentence: str
    value: int
    names: tuple[str, ...] = ()

    def about(self, ranks: Sequence[int], value: int) -> str:
        """Return the sentence about ``ranks``, on which the number is ``value``."""
        several = len(ranks) > 1
        verbs = {"has": "have" if several else "has", "is": "are" if several else "is"}
        who = f"rank{'s' * several} {', '.join(map(str, ranks))}"
        return f"{who} {self.sentence.format(value=self.names[value] if self.names else value, **verbs)}"


def describe_differences(facts: Sequence[Fact], values: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Return the differences between ranks as text, "" if they agree.

    Args:
        facts: this rank's.
        values: those of the facts on every rank.
        ranks: the numbers of the ranks, in the order of ``values``.

    >>> facts = [Fact("{has} taken {value} optimizer steps", 12)]
    >>> describe_differences(facts, [[12], [11], [12]], [0, 1, 2])
    'rank 1 has taken 11 optimizer steps, ranks 0, 2 have taken 12 optimizer steps'
    """
    sentences = []
    for place, fact in enumerate(facts):
        ranks_of: dict[int, list[int]] = {}
        for rank, theirs in zip(ranks, values, strict=True):
            if theirs[place] != UNSAID:
                ranks_of.setdefault(theirs[place], []).append(rank)
        if len(ranks_of) > 1:  # those who differ from most come first
            rarest = sorted(ranks_of.items(), key=lambda item: len(item[1]))
            sentences.append(", ".join(fact.about(some, value) for value, some in rarest))
    return "; ".join(sentences)
