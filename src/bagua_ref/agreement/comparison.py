"""The comparison of what ranks are about to do, which takes one small message from each rank to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bagua_ref.agreement.facts import describe_differences
from bagua_ref.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bagua_ref.agreement.facts import Fact
    from bagua_ref.communicators.base import Communicator

__all__ = ["Agreement"]


class Agreement:
    """Comparison of ranks before each round of communication, so that no round is ever mixed with another.

    Args:
        comm: the communicator of all ranks, which the caller's thread alone uses.
        ranks: their global ranks, for messages.
        module_name: the module that they train, for messages.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], module_name: str) -> None:
        self._comm, self._ranks, self._module_name = comm, ranks, module_name

    def check(self, facts: Sequence[Fact], loaded: bool, digest: Callable[[], Fact | None]) -> None:
        """Compare ``facts`` with the other ranks'. Collective: every rank brings as many, in the same order.

        Args:
            facts: what must be equal.
            loaded: whether this rank has loaded a state since the last round.
            digest: returns a fact about all weights, None if they may differ; called if some rank has loaded a state.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        notes = self._exchange([int(loaded), *(fact.value for fact in facts)])
        differences = describe_differences(facts, [note[1:] for note in notes], self._ranks)
        if not differences and any(note[0] for note in notes) and (weights := digest()) is not None:
            differences = describe_differences([weights], self._exchange([weights.value]), self._ranks)
        if differences:
            raise CommunicationError(f"the ranks that train module {self._module_name!r} disagree: {differences}")

    def _exchange(self, note: list[int]) -> list[list[int]]:
        notes: list[list[int]] = self._comm.exchange_notes(torch.tensor(note, dtype=torch.int64)).tolist()
        return notes
