"""Rounds of communication that begin only if all ranks agree: the only place that compares ranks during training.

Each rank sends each other one small message about what it is about to do. Once a round has failed, none begins any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.observe.meter import Meter, Operation
from bagua_ref.scheduling.engine import Round
from bagua_ref.types import Group

__all__ = ["UNSAID", "AgreedRound", "AgreedRounds", "Comparison", "Fact", "describe_differences"]

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


class Comparison:
    """A comparison of facts between ranks, under way, so that no round is ever mixed with another.

    Collective: every rank brings as many facts, in the same order; making one sends them.

    Args:
        comm: the communicator of the ranks, which the caller's thread alone uses.
        ranks: their global ranks, for messages.
        module_name: the module that they train, for messages.
        facts: this rank's, which must be equal on all ranks.
        flag: of a round, whether this rank has loaded a state since the last one.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], module_name: str, facts: Sequence[Fact], flag: bool = False
    ) -> None:
        self._comm, self._ranks, self._module_name, self._facts = comm, ranks, module_name, facts
        self._receive = comm.exchange_ints([int(flag), *(fact.value for fact in facts)])
        self._received: list[list[int]] | None = None

    def check_facts(self) -> list[list[int]]:
        """Wait for the facts of all ranks and compare them, once; return each rank's flag and values.

        Raises:
            CommunicationError: ranks differ; the message, equal on all of them, says which ranks in what.
        """
        if self._received is None:
            received = self._receive()
            self._compare(self._facts, [values for _, *values in received])
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
            self._compare([weights], self._comm.exchange_ints([weights.value])())

    def _compare(self, facts: Sequence[Fact], values: Sequence[Sequence[int]]) -> None:
        if any(theirs != values[0] for theirs in values) and (differences := describe_differences(facts, values, self._ranks)):
            raise CommunicationError(f"the ranks that train module {self._module_name!r} disagree: {differences}")


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
        compare: begins a `Comparison` of all ranks, from facts and a flag.
        compare_in_node: begins one of the ranks of this node; None if they do not compare first.
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
        self.compare = partial(Comparison, comm, group.ranks, name)
        self.compare_in_node: Callable[..., Comparison] | None = None
        if in_nodes and not self.alone:
            node = group.get_intra_node_communicator()
            ranks = [rank for (rank,) in node.exchange_ints([group.ranks[comm.rank()]])()]
            self.compare_in_node = partial(Comparison, node, ranks, name)
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
        self.waits = rounds.compare_in_node is not None or not alike or not same_plan
        self._comparison: Comparison | None = None

    def begin(self) -> None:
        """Begin the comparison, and end it unless buckets may run during it."""
        rounds = self._rounds
        with Operation("agreement"):
            if rounds.compare_in_node is not None:
                rounds.compare_in_node(self._facts, self._loaded).check(rounds.digest)
                if self._stays_in_node:
                    return
            self._comparison = rounds.compare(self._facts, self._loaded)
            if not self._alike:
                self._check(self._comparison)
            elif not self._same_plan:
                self._comparison.check_facts()

    def end(self) -> None:
        """End the comparison, if `begin` has not."""
        if self._comparison is not None and self._alike:
            with Operation("end of round"):
                self._check(self._comparison)

    def _check(self, comparison: Comparison) -> None:
        comparison.check(self._rounds.digest)
        self._rounds.compared, self._rounds.meter.steps_in_agreement = comparison, self._steps
