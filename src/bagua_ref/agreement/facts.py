"""Facts on which ranks must agree: numbers that are compared, and sentences that name a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["UNSAID", "Fact", "describe_differences"]

UNSAID = -(2**63)
"""The value of a fact about which a rank says nothing, so that it differs from no other."""


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


def describe_differences(facts: Sequence[Fact], notes: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Return which ranks differ in what, "" if they agree.

    Args:
        facts: this rank's.
        notes: the values of every rank.
        ranks: their names, in the order of ``notes``.

    >>> facts = [Fact("{has} taken {value} optimizer steps", 12)]
    >>> describe_differences(facts, [[12], [11], [12]], [0, 1, 2])
    'rank 1 has taken 11 optimizer steps, ranks 0, 2 have taken 12 optimizer steps'
    """
    if all(note == notes[0] for note in notes):
        return ""
    sentences = []
    for place, fact in enumerate(facts):
        ranks_of: dict[int, list[int]] = {}
        for rank, note in zip(ranks, notes, strict=True):
            if note[place] != UNSAID:
                ranks_of.setdefault(note[place], []).append(rank)
        if len(ranks_of) > 1:  # those who differ from most come first
            rarest = sorted(ranks_of.items(), key=lambda item: len(item[1]))
            sentences.append(", ".join(fact.about(some, value) for value, some in rarest))
    return "; ".join(sentences)
