"""DiLoCo at work: global weights, the fragment in flight, and the outer steps (S9.2 to S9.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.diloco_state import InFlight, check_outer_state, load_outer_state, outer_state
from bagua_ref.algorithms.error_memories import ErrorMemories
from bagua_ref.algorithms.fragments import Fragment, Schedule, named_fragments
from bagua_ref.algorithms.local_updates import LocalUpdatesImpl, drift, norms_of
from bagua_ref.buckets.tensor import BaguaTensor
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.meter import profiled
from bagua_ref.rounds import Fact
from bagua_ref.types import Group

__all__ = ["DiLoCoAlgorithmImpl"]


class DiLoCoAlgorithmImpl(LocalUpdatesImpl):
    """`DiLoCoAlgorithm` at work on one module; x are the weights, g their global copy."""

    name = "diloco"

    def __init__(
        self,
        process_group: Group,
        schedule: Schedule,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        fragments: int | list[list[str]] = 1,
        mix: float = 0.0,
        warmup_steps: int = 0,
        compression: str | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(process_group, warmup_steps)
        self.error_memories = ErrorMemories(self.name, process_group, error_feedback)
        self.rank_state = self.error_memories.rank_state
        self.schedule, self.mix, self.compression = schedule, mix, compression
        self._asked, self._make_outer_optimizer = fragments, outer_optimizer
        self._fragments: list[Fragment] = []
        self._taken = False
        """Whether g has been taken from the weights, or loaded."""
        self._in_flight: InFlight | None = None
        self._sending = 0
        """The fragment that is sent, or was sent last."""
        self._outer_steps = 0
        """A checksum of the settings with which outer optimizers have stepped."""
        self._showing = 0
        """How many `global_weights` contexts the caller is in."""
        self._drifts: dict[int, list[Tensor]] = {}
        """For each fragment that has been sent, the norms of what its weights differed from g then."""

    @property
    def fragments(self) -> list[list[str]]:
        """The names of the parameters in each fragment (S9.3)."""
        return [list(fragment.names) for fragment in self._fragments]

    @property
    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        """The outer optimizer of each fragment, for instance for learning rate schedulers, which all ranks must step alike."""
        return [fragment.optimizer for fragment in self._fragments]

    def facts(self) -> list[Fact]:
        """Return what is sent, and the outer optimizers' settings so far and now, too."""
        local, settings = bool(self._past_warmup), self._outer_steps
        for fragment in self._fragments if local else ():
            settings = fragment.settings(settings)
        names = ("gradients", *(f"fragment {place}" for place in range(len(self._fragments))))
        return [
            *super().facts(),
            Fact("{is} about to send {value}", self._sending + 1 if local else 0, names),
            Fact("{has} outer optimizers with settings of checksum {value}", settings),
        ]

    def replicas(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return the weights in the warm-up, after it g."""
        if not self._past_warmup:
            return super().replicas()
        return [(g, [fragment.optimizer]) for fragment in self._fragments for g in fragment.copies]

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients; make the fragments when the module is wrapped."""
        if not self._fragments:
            parameters = bagua_ddp.bagua_build_params()
            known = dict(parameters)
            self._fragments = [
                Fragment(names, [known[name] for name in names], self._make_outer_optimizer)
                for names in named_fragments(self._asked, parameters)
            ]
            for fragment in self._fragments:
                self._memories_of(fragment)
        return super().init_tensors(bagua_ddp)

    def begin_forward(self) -> None:
        """Take g from the weights at the start of the local phase."""
        self._refuse_while_showing("a training forward pass")
        if not self._taken and self.step >= self.warmup_steps:
            for fragment in self._fragments:
                fragment.take()
            self._taken = True
            self.context.note_load()  # g must be equal on all ranks, whatever they have loaded

    def after_local_step(self, local_step: int, communicates: bool) -> None:
        """Apply what is due, and send the fragment whose turn it is (S9.4)."""
        self._refuse_while_showing("an optimizer step")
        if self._in_flight is not None and self.step >= self._in_flight.due:
            self._apply()
        fragment = self.schedule.sent_after(local_step)
        if fragment is not None and communicates:
            self._send(fragment)
            if self.schedule.delay == 0:
                self._apply()

    def _send(self, place: int) -> None:
        """Begin averaging ``g - x`` of a fragment over ranks."""
        assert self._taken
        assert self._in_flight is None
        fragment, context = self._fragments[place], self.context
        flats = fragment.differences(self.process_group.get_global_communicator().nranks())
        self._drifts[place] = norms_of(flats)
        names = [f"fragment{place}" if len(flats) == 1 else f"fragment{place}.{part}" for part in range(len(flats))]
        memories = self._memories_of(fragment)
        flight = InFlight(place, self.step + self.schedule.delay, fragment.by_name(flats), names, memories)
        about: dict[str, Any] = {"period": self.schedule.period, "fragments": self.schedule.count, "delay": self.schedule.delay}
        about |= {"mix": self.mix, "compression": self.compression, "t": self.step, "fragment": place}
        buckets = []
        for name, flat, memory in zip_longest(names, flats, memories):
            tensor = BaguaTensor.ensure_bagua_tensor(flat, name, context.bagua_module_name)  # type: ignore[arg-type]
            bucket = self.new_bucket([tensor], name, flatten=True, **about)
            bucket.append_centralized_synchronous_op(
                scattergather=True, compression=self.compression, group=self.process_group, error_memory=memory
            )
            buckets.append(bucket.append_python_op(flight.note_arrival))
        self._in_flight, self._sending = flight, place
        self.run_round(buckets)

    def _memories_of(self, fragment: Fragment) -> list[ErrorMemory]:
        """Return the error memory of each of a fragment's flat tensors; none without error feedback."""
        n, found = self.process_group.get_global_communicator().nranks(), []
        for part in fragment.named_parts() if self.error_memories.error_feedback else ():
            filled = sum(copy.numel() for copy in part.values())
            found.append(self.error_memories.claim(list(part), list(part.values()), filled + -filled % n, n))
        return found

    def _apply(self) -> None:
        """Let the outer optimizer step with the mean that was in flight, and move the weights to the result."""
        flight, self._in_flight = self._in_flight, None
        assert flight is not None
        flight.wait(self.context.engine)
        fragment = self._fragments[flight.fragment]
        overflowed = [name for name, mean in flight.mean.items() if not mean.isfinite().all()]
        if overflowed:
            raise CommunicationError(
                f"fragment {flight.fragment} was not applied: the mean over ranks of what its weights have changed is not finite "
                f"in {', '.join(map(repr, overflowed))}, as training has diverged on at least one rank"
            )
        self._outer_steps = fragment.settings(self._outer_steps)
        with profiled("bagua_ref::update"):
            fragment.update(flight.mean)
            fragment.mix(self.mix)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Show the global weights g, rounded to the weights' dtypes, in place of this rank's weights; not collective.

        In the warm-up, and before the first forward pass after it, the weights stay as they are. Buffers are this rank's own.

        Raises:
            RuntimeError: a training forward pass or an optimizer step runs in this context.

        >>> from bagua_ref.algorithms import DiLoCoAlgorithm
        >>> bagua_ref.init_process_group()
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> model = model.with_bagua([optimizer], DiLoCoAlgorithm(period=10))
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> model(torch.ones(1, 1)).sum().backward()
        >>> optimizer.step()
        >>> with model.bagua_algorithm.global_weights():
        ...     model.weight.item()
        1.0
        >>> model.weight.item()
        0.5
        >>> bagua_ref.destroy_process_group()
        """
        if not self._taken:
            yield
            return
        weights = [parameter.detach() for _, parameter in self.context.bagua_build_params()]
        local = [weight.clone() for weight in weights]
        self._showing += 1
        try:
            for fragment in self._fragments:
                fragment.mix(0)
            self.context.reshard()
            yield
        finally:
            self._showing -= 1
            torch._foreach_copy_(weights, local)
            self.context.reshard()

    def _refuse_while_showing(self, what: str) -> None:
        if self._showing:
            raise RuntimeError(
                f"{what} inside `with global_weights()` would train weights that are put back afterwards; leave the context first"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, g, the outer optimizers' states, and what is in flight, after waiting for it.

        All of it is equal on all ranks, and loads into any number of them; with error feedback, this rank's memories come in
        addition.

        Raises:
            CommunicationError: what is in flight does not arrive.
        """
        if self._in_flight is not None:
            self._in_flight.wait(self.context.engine)
        outer = outer_state(self._fragments, self._taken, self._in_flight)
        return {**super().state_dict(), **outer, **self.error_memories.state()}

    def load_state_dict(self, state: dict[str, Any], drop_local: bool = False) -> None:
        """Continue from ``state``, as `LocalUpdatesImpl.load_state_dict` does.

        Args:
            state: what `state_dict` returned; with error memories, on the same rank of as many ranks.
            drop_local: take the state of any rank of any number of ranks, and start with error memories of zero.

        Raises:
            ValueError: it is a state of another algorithm, version or training, or has error memories of another rank.
        """
        state = {name: value for name, value in state.items() if not drop_local or name not in self.rank_state}
        self.check_state(state)
        if self._in_flight is not None:
            self.context.engine.wait_pending_comm_ops()
        super().load_state_dict(state, drop_local)
        self.error_memories.load(self.error_memories.check(state, drop_local))
        self._in_flight, self._taken = load_outer_state(state, self._fragments), state["global_weights"] is not None

    def counters(self) -> dict[str, Any]:
        """Return the steps so far, and a checksum of the settings of the outer steps."""
        return {**super().counters(), "outer_steps": self._outer_steps}

    def load_counters(self, state: dict[str, Any]) -> None:
        """Continue from the numbers that `counters` returned."""
        super().load_counters(state)
        self._outer_steps = state["outer_steps"]

    def metrics(self) -> dict[str, float | int]:
        """Return the L2 norm of ``g - x`` when the fragments were last sent."""
        return drift(self._drifts)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        self.error_memories.check(state, drop_local=False)
        missing = sorted({"fragments", "global_weights", "outer_optimizers", "outer_entries", "in_flight"} - state.keys())
        if missing:
            raise ValueError(f"state is not one of diloco: it lacks {', '.join(missing)}")
        steps, local = state["steps_of_optimizers"][-1], state["global_weights"] is not None
        if steps < self.warmup_steps if local else steps > self.warmup_steps:
            phase = "local phase" if local else "warm-up"
            raise ValueError(
                f"state was saved in the {phase}, after step {steps}; warmup_steps={self.warmup_steps} does not fit that"
            )
        to_come = range(steps + 1, steps + self.schedule.delay + 1)
        due = {step: self.schedule.applied_after(step - self.warmup_steps) for step in to_come}
        check_outer_state(state, self._fragments, {step: place for step, place in due.items() if place is not None})
