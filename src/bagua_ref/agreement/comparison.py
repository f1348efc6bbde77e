"""The comparison of what ranks are about to do, which takes one small message from each rank to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_ref.agreement.facts import Fact, describe_differences
from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError

__all__ = ["Agreement", "Comparison"]


class Agreement:
    """Comparison of ranks before each round of communication, so that no round is ever mixed with another.

    Args:
        comm: the communicator of all ranks, which the caller's thread alone uses.
        ranks: their global ranks, for messages.
        module_name: the module that they train, for messages.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], module_name: str) -> None:
        self.comm, self._ranks, self._module_name = comm, ranks, module_name

    def begin(self, facts: Sequence[Fact], flag: bool) -> Comparison:
        """Send ``facts`` to the other ranks. Collective: every rank brings as many, in the same order.

        Args:
            facts: what must be equal.
            flag: of a round, whether this rank has loaded a state since the last one.
        """
        return Comparison(self, facts, self.comm.exchange_ints([int(flag), *(fact.value for fact in facts)]))

    def _check(self, facts: Sequence[Fact], notes: Sequence[Sequence[int]]) -> None:
        if differences := describe_differences(facts, notes, self._ranks):
            raise CommunicationError(f"the ranks that train module {self._module_name!r} disagree: {differences}")


class Comparison:
    """One round's comparison, under way.

    Args:
        agreement: what it is part of.
        facts: this rank's.
        notes: waits for those of all ranks.
    """

    def __init__(self, agreement: Agreement, facts: Sequence[Fact], notes: Callable[[], list[list[int]]]) -> None:
        self._agreement, self._facts, self._notes = agreement, facts, notes
        self._received: list[list[int]] | None = None

    def check_facts(self) -> list[list[int]]:
        """Wait for the facts of all ranks and compare them, once; return each rank's flag and facts.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        if self._received is None:
            notes = self._notes()
            self._agreement._check(self._facts, [note[1:] for note in notes])
            self._received = notes
        return self._received

    def check(self, digest: Callable[[], Fact | None]) -> None:
        """Compare the facts, and the weights if some rank has loaded a state. Collective: all ranks call it, at the same place.

        Args:
            digest: returns a fact about all weights, None if they may differ.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        if any(note[0] for note in self.check_facts()) and (weights := digest()) is not None:
            self._agreement._check([weights], self._agreement.comm.exchange_ints([weights.value])())
