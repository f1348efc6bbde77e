"""Rounds of one training, which begin only if all ranks agree, and end for good when one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.observe.meter import Meter, Recorded
from bagua_ref.rounds.agreement import Agreement, Comparison, Fact
from bagua_ref.scheduling.engine import Round
from bagua_ref.types import Group

__all__ = ["AgreedRound", "AgreedRounds"]


class AgreedRounds:
    """The rounds of one training: their comparison, and the failure after which none begins any more.

    Args:
        group: the ranks of the training.
        name: the training's name, for messages.
        meter: of the training.
        in_nodes: whether ranks compare inside their node first.
        remedy: the way out after a failure, for messages.

    Attributes:
        alone: whether there is one rank only, so that nothing is compared.
        agreement: of all ranks.
        in_node: of the ranks of this node; None if they do not compare first.
        broken: why no round can begin; "" while all is well.
        loaded: whether a state was loaded since the last round.
        compared: the last round's comparison, when all ranks have agreed.
        joining: the `bagua_ref.data_parallel.joining.Joining` that the module is in; None outside of `bagua_ref.join`.
    """

    joining: Any = None

    def __init__(self, group: Group, name: str, meter: Meter, *, in_nodes: bool = False, remedy: str = "") -> None:
        self.group, self.name, self.meter, self._remedy = group, name, meter, remedy
        comm = group.get_global_communicator()
        self.alone = comm.nranks() == 1
        self.agreement = Agreement(comm, group.ranks, name)
        self.in_node: Agreement | None = None
        if in_nodes and not self.alone:
            node = group.get_intra_node_communicator()
            ranks = [rank for (rank,) in node.exchange_ints([group.ranks[comm.rank()]])()]
            self.in_node = Agreement(node, ranks, name)
        self.broken, self.loaded = "", False
        self.compared: Comparison | None = None

    def digest(self) -> Fact | None:
        """Return a checksum of what is equal on all ranks after a state was loaded; None: nothing has to be."""
        return None

    def note_load(self, *_: object) -> None:
        """Note that a state was loaded: a hook of the module and its optimizers."""
        self.loaded = True

    def abort(self, why: str) -> None:
        """Let no round begin any more, here and on the other ranks; a training alone can go on."""
        if not self.broken and not self.alone:
            self.broken = why
            self.group.abort(why)

    def fail(self, error: BaseException) -> None:
        """Abort because of ``error``, and let the flight recorder write why."""
        if not self.broken:
            why = str(error)
            explain(error)  # while what this rank waits for is known
            self.abort(why)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort if communication fails in this context."""
        try:
            yield
        except CommunicationError as error:
            self.fail(error)
            raise

    def check_usable(self) -> None:
        """Raise if a round has failed.

        Raises:
            CommunicationError: one has; says why, and how to go on.
        """
        if self.broken:
            raise CommunicationError(f"module {self.name!r} cannot train on: {self.broken}. {self._remedy}")


class AgreedRound(Round):
    """A round in which all ranks compare what they are about to do: before its first bucket, or while its buckets run.

    Args:
        rounds: of the training.
        facts: what must be equal on all ranks.
        alike: whether buckets may run during the comparison, as wrong rounds change nothing that counts.
        same_plan: whether buckets are those of the last round; if not, the facts are compared before they run: messages of
            another size than the receiver's would end its process inside gloo.
        stays_in_node: whether only the ranks of this node take part.
    """

    def __init__(
        self, rounds: AgreedRounds, facts: list[Fact], *, alike: bool = False, same_plan: bool = True, stays_in_node: bool = False
    ) -> None:
        self._rounds, self._facts, self._steps = rounds, facts, rounds.meter.steps
        self._loaded, rounds.loaded = rounds.loaded, False
        self._alike, self._same_plan, self._stays_in_node = alike, same_plan, stays_in_node
        self.waits = rounds.in_node is not None or not alike or not same_plan
        self._comparison: Comparison | None = None

    def begin(self) -> None:
        """Begin the comparison, and end it unless buckets may run during it."""
        rounds = self._rounds
        with Recorded("agreement"):
            if rounds.in_node is not None:
                rounds.in_node.begin(self._facts, self._loaded).check(rounds.digest)
                if self._stays_in_node:
                    return
            self._comparison = rounds.agreement.begin(self._facts, self._loaded)
            if not self._alike:
                self._check(self._comparison)
            elif not self._same_plan:
                self._comparison.check_facts()

    def end(self) -> None:
        """End the comparison, if `begin` has not."""
        if self._comparison is not None and self._alike:
            with Recorded("end of round"):
                self._check(self._comparison)

    def _check(self, comparison: Comparison) -> None:
        comparison.check(self._rounds.digest)
        self._rounds.compared, self._rounds.meter.steps_in_agreement = comparison, self._steps
