"""Comparison of what the ranks of a training are about to do, by one small message from each rank to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError

__all__ = ["UNSAID", "Agreement", "Comparison", "Fact", "describe_differences"]

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


def describe_differences(facts: Sequence[Fact], values: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Return which ranks differ in what, "" if they agree.

    Args:
        facts: this rank's.
        values: those of the facts on every rank.
        ranks: the numbers of the ranks, in the order of ``values``.

    >>> facts = [Fact("{has} taken {value} optimizer steps", 12)]
    >>> describe_differences(facts, [[12], [11], [12]], [0, 1, 2])
    'rank 1 has taken 11 optimizer steps, ranks 0, 2 have taken 12 optimizer steps'
    """
    if all(theirs == values[0] for theirs in values):
        return ""
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


class Agreement:
    """Comparison of ranks before each round of communication, so that no round is ever mixed with another.

    Args:
        comm: the communicator of all ranks, which the caller's thread alone uses.
        ranks: their global ranks, for messages.
        module_name: the module that they train, for messages.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], module_name: str) -> None:
        self.comm, self._ranks, self._module_name = comm, ranks, module_name

    def begin(self, facts: Sequence[Fact], flag: bool = False) -> Comparison:
        """Send ``facts`` to the other ranks. Collective: every rank brings as many, in the same order.

        Args:
            facts: what must be equal.
            flag: of a round, whether this rank has loaded a state since the last one.
        """
        return Comparison(self, facts, self.comm.exchange_ints([int(flag), *(fact.value for fact in facts)]))

    def check(self, facts: Sequence[Fact], values: Sequence[Sequence[int]]) -> None:
        """Raise CommunicationError if the ``values`` of the facts on every rank differ; says which ranks differ in what."""
        if differences := describe_differences(facts, values, self._ranks):
            raise CommunicationError(f"the ranks that train module {self._module_name!r} disagree: {differences}")


class Comparison:
    """One round's comparison, under way.

    Args:
        agreement: the agreement that it is part of.
        facts: this rank's.
        receive: waits for flag and values of all ranks.
    """

    def __init__(self, agreement: Agreement, facts: Sequence[Fact], receive: Callable[[], list[list[int]]]) -> None:
        self._agreement, self._facts, self._receive = agreement, facts, receive
        self._received: list[list[int]] | None = None

    def check_facts(self) -> list[list[int]]:
        """Wait for the facts of all ranks and compare them, once; return each rank's flag and values.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        if self._received is None:
            received = self._receive()
            self._agreement.check(self._facts, [values for _, *values in received])
            self._received = received
        return self._received

    def check(self, digest: Callable[[], Fact | None]) -> None:
        """Compare the facts, and the weights if some rank has loaded a state. Collective: all ranks call it, at the same place.

        Args:
            digest: returns a fact about all weights, None if they may differ.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        if any(flag for flag, *_ in self.check_facts()) and (weights := digest()) is not None:
            self._agreement.check([weights], self._agreement.comm.exchange_ints([weights.value])())
