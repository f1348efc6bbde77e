"""DiLoCo: local steps, and an outer optimizer on the mean of their changes; streaming in fragments
(S9.2 to S9.6), or with sparse messages (S15.5).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, TrainingContext
from bagua_ref.algorithms.fragments import (
    Fragment,
    InFlight,
    Trail,
    checked_fragments,
    named_fragments,
)
from bagua_ref.algorithms.local_sgd import LocalUpdatesImpl, norms_of
from bagua_ref.algorithms.registry import (
    check_number,
    check_sparse_options,
    check_whole,
    implements,
)
from bagua_ref.algorithms.state import ErrorMemories, TensorStore, check_tensors
from bagua_ref.algorithms.traits import Rounds
from bagua_ref.base.memory import Layout
from bagua_ref.base.untrusted import check_form
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.optimizer_state import check_optimizer_state
from bagua_ref.buckets.storage import register
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.meter import profiled
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class DiLoCoAlgorithm(Algorithm):
    """DiLoCo: every rank trains on its own gradients; at intervals, an outer optimizer updates
    shared global weights (S9.2 to S9.6).

    Loading weights into the module (``model.load_state_dict``, on all ranks) makes them g, with a
    new outer optimizer state, unless they are those of a step since g last changed. If weights are
    set back to those of an earlier step by other means, the next exchange raises an error.

    The global weights g start as the weights x of the first local step. Every ``period`` steps, ``D
    = mean over ranks of (g - x)`` becomes the gradient with which the outer optimizer updates g,
    and x becomes g. The state of the inner optimizers stays local.

    Streaming: with P fragments, each is sent once per period, ``gap = period/P`` steps after the
    one before. Its mean is computed
    in the background during the next ``delay`` steps and applied after them: ``x <- g + mix*(x -
    g)``. With t' the steps after the warm-up, from 1, fragment p is sent after the step with ``t' =
    (p+1)*gap - delay (mod period)``.

    Each rank sends ``8 (n-1)/n`` bytes per float32 weight every ``period`` steps, about a quarter
    with compression. It keeps g in float32 (float64 for float64 weights), the outer optimizer's
    state, and one fragment while it is in flight.

    SparseLoCo: with ``top_k``, each rank sends the ``top_k`` elements of largest absolute value of
    each chunk of ``p = error_decay*e + (g - x)``, and keeps the residual ``e = p - sent values``
    (S15.5). A chunk is a block of at most ``chunk`` rows and ``chunk`` columns of a weight. With
    "Stat2", each element takes 14 bits.

    Args:
        period: steps after which every fragment has been sent once.
        outer_optimizer: factory that returns an optimizer for a list of tensors, the part of g in a
            fragment; called for each fragment when the module is wrapped. None: ``SGD(lr=0.7,
            momentum=0.9, nesterov=True)``, or with ``top_k``, ``SGD(lr=1)``.
        fragments: the number P of fragments, contiguous parts of the parameters of about equal
            size; or lists of parameter names, in which each trained parameter occurs exactly once.
        delay: steps from sending a fragment to applying its mean, from 0 to gap - 1. With 0,
            training waits for the mean.
        mix: the share of x that a rank keeps when a fragment is applied, from 0 (x becomes g) to 1
            (x stays).
        warmup_steps: number of first steps, on averaged gradients, bit for bit as with
            `GradientAllReduceAlgorithm`.
        compression: None, or the name of a codec, one of `bagua_ref.list_codecs` (S3.2, S4, S12);
            with ``top_k`` also "Stat2", two bits per value (S15.3).
        error_feedback: keep compression errors, in float32, and add them to the fragment's next
            difference (S11.1). Must be False with ``top_k``, which always has an error memory.
        top_k: number of elements to send of each chunk; None: all, by S3.1 or S3.2.
        chunk: maximum side of a chunk, from 1 to 64; the side is the largest divisor of the
            weight's rows or columns up to this.
        error_decay: factor of the error memory when it is added, from 0 to 1.
        mean: "all": divide by the number of ranks; "contributors": each element by the number of
            ranks whose value there is not 0, which needs ``top_k``.

    Raises:
        ValueError: an argument is out of range, or needs ``top_k``; when wrapping: no optimizer was
            passed, there are more fragments than parameters, the lists of names do not match the
            module, or the outer optimizer holds other tensors.
        TypeError: an argument has the wrong type; when wrapping: float64 parameters with
            compression or ``top_k``, or ``outer_optimizer`` does not return an optimizer.

    >>> DiLoCoAlgorithm(period=32, fragments=4, delay=2, mix=0.5).gap
    8

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023 (arXiv:2311.08105), and "Streaming DiLoCo with overlapping communication", 2025
    (arXiv:2501.18512); with ``top_k``, Sarfi et al., "Communication Efficient LLM Pre-training with
    SparseLoCo", 2025 (arXiv:2508.15706).
    """

    period: int = 500
    outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    fragments: int | Sequence[Sequence[str]] = 1
    delay: int = 0
    mix: float = 0.0
    warmup_steps: int = 0
    compression: str | None = None
    error_feedback: bool = False
    top_k: int | None = None
    chunk: int = 64
    error_decay: float = 0.95
    mean: Literal["all", "contributors"] = "all"

    takes_shards = counts_steps = True

    @property
    def takes_float64(self) -> bool:  # type: ignore[override]
        """Whether float64 parameters are supported: only if differences are sent uncompressed."""
        return self.compression is None and self.top_k is None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("period", 1), ("delay", 0), ("warmup_steps", 0)):
            check_whole(name, getattr(self, name), least)
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                f"outer_optimizer={self.outer_optimizer!r} must be None, or make an optimizer of a"
                " list of tensors"
            )
        check_number("mix", self.mix, 0, 1)
        check_sparse_options(self.top_k, self.chunk, self.mean, self.compression)
        check_number("error_decay", self.error_decay, 0, 1)
        if self.error_feedback and self.top_k is not None:
            raise ValueError(
                f"error_feedback=True with top_k={self.top_k}: top_k has an error memory of its"
                " own; leave error_feedback False, and set error_decay"
            )
        if self.error_feedback and self.compression is None:
            raise ValueError(
                "error_feedback=True keeps what compression leaves out, and compression is None;"
                " name a codec"
            )
        object.__setattr__(self, "fragments", checked_fragments(self.fragments))
        if self.period % self.count:
            raise ValueError(
                f"period={self.period} must be a multiple of the number of fragments, {self.count}"
            )
        if self.delay >= self.gap:
            raise ValueError(
                f"delay={self.delay} must be less than gap={self.gap}, the period={self.period}"
                " divided by the number of fragments"
            )

    @property
    def count(self) -> int:
        """The number P of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def gap(self) -> int:
        """Number of steps between sending one fragment and sending the next."""
        return self.period // self.count

    def fragment_applied_after(self, step: int) -> int | None:
        """Return the index of the fragment to apply after a step of the local phase, counted from
        1; None if there is none (S9.4).
        """
        number, rest = divmod(step, self.gap)
        return None if rest or number < 1 else (number - 1) % self.count

    def rounds(self) -> Rounds:
        """Return the schedule of the steps after which a fragment is sent."""
        return Rounds(self.warmup_steps, self.gap, -self.delay % self.gap)

    def check(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raise an error also for fragments that do not fit the module."""
        super().check(parameters, optimizers)
        named_fragments(self.fragments, parameters)


@implements(DiLoCoAlgorithm)
class DiLoCoAlgorithmImpl(LocalUpdatesImpl):
    """Implementation of `DiLoCoAlgorithm` for one module; x are the weights, g their global
    copy.
    """

    name = "diloco"
    entries = frozenset(
        {"fragments", "global_weights", "has_global_weights", "outer_optimizers", "in_flight"}
    )
    counted = ("outer_steps",)

    def __init__(self, process_group: Group, **options: Any) -> None:
        super().__init__(process_group, **options)
        self._is_sparse = self.options.top_k is not None
        self.memories: Any = TensorStore("memories") if self._is_sparse else ErrorMemories()
        """This rank's residuals: e by parameter, or e and f by part of a fragment."""
        if self._is_sparse or self.options.error_feedback:
            self.stores, self.rank_state = {"memories": self.memories}, frozenset({"memories"})
        self._fragments: list[Fragment] = []
        self._taken = False
        """Whether g was initialized, from the weights or from a checkpoint."""
        self._loads = 0
        """Number of loads of weights up to the last forward pass."""
        self._state_loaded = False
        """Whether a state was loaded since the last forward pass."""
        self._in_flight: InFlight | None = None
        self._sending = 0
        """Index of the fragment sent last."""
        self.outer_steps = 0
        """Checksum of the settings of all outer optimizer steps so far."""
        self._showing = 0
        """Number of active `global_weights` contexts."""

    @property
    def fragments(self) -> list[list[str]]:
        """The names of the parameters in each fragment (S9.3)."""
        return [list(fragment.names) for fragment in self._fragments]

    @property
    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        """The outer optimizer of each fragment, for example for learning rate schedulers, which
        must step equally on all ranks.
        """
        return [fragment.optimizer for fragment in self._fragments]

    def facts(self) -> list[Fact]:
        """Return, in addition, the fragment to send and the current and past options of the outer
        optimizers.
        """
        local, settings = bool(self._past_warmup), self.outer_steps
        for fragment in self._fragments if local else ():
            settings = fragment.settings(settings)
        names = ("gradients", *(f"fragment {place}" for place in range(len(self._fragments))))
        return [
            *super().facts(),
            Fact("{is} about to send {value}", self._sending + 1 if local else 0, names),
            Fact("{has} outer optimizers with settings of checksum {value}", settings),
        ]

    def replicas(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return the weights in the warm-up, and their global copy g after it."""
        if not self._past_warmup:
            return super().replicas()
        return [(g, [fragment.optimizer]) for fragment in self._fragments for g in fragment.copies]

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients; create the fragments when the module is wrapped."""
        if not self._fragments:
            parameters = bagua_ddp.bagua_build_params()
            known = dict(parameters)
            default = _sgd if self._is_sparse else _nesterov
            make = self.options.outer_optimizer or default
            self._fragments = [
                Fragment(names, [known[name] for name in names], make)
                for names in named_fragments(self.options.fragments, parameters)
            ]
            for fragment in self._fragments:
                for part in fragment.parts:
                    self._expect_memory(part)
            self._trail = Trail([parameter for _, parameter in parameters])
        return super().init_tensors(bagua_ddp)

    def need_reset(self) -> bool:
        """Set g to the weights at the start of the local phase, or after other weights were
        loaded.
        """
        self._refuse_while_showing("a training forward pass")
        loads = self.context.loads
        model_loaded, self._loads = loads != self._loads, loads
        state_loaded, self._state_loaded = self._state_loaded, False
        if self.rounds.past_warmup(self.step):
            if self._taken and not state_loaded:
                self._trail.note(stepped=False)
                if model_loaded:
                    self._trail.read()
            if not self._taken or (model_loaded and self._trail.is_new and not state_loaded):
                self._take()
        return super().need_reset()

    def _take(self) -> None:
        """Set g to x, clear the outer optimizers' states and the error memories, and discard the
        fragment in flight.
        """
        if self._in_flight is not None:
            self._in_flight.wait(self.context.engine)
            self._in_flight = None
        for fragment in self._fragments:
            fragment.take()
            fragment.optimizer.state.clear()
        self.memories.load({})
        self._taken = True
        self._trail.clear()
        self._trail.note(stepped=True)
        self.context.note_load()  # g must be equal on all ranks, whatever they have loaded

    def after_local_step(self, has_round: bool) -> None:
        """Apply the fragment in flight if it is due, and send the next one if this step has a round
        (S9.4).
        """
        self._refuse_while_showing("an optimizer step")
        if self._in_flight is not None and self.step >= self._in_flight.due:
            self._apply()
        if has_round:
            due = self.step + self.options.delay
            fragment = self.options.fragment_applied_after(due - self.rounds.warmup)
            assert fragment is not None, "rounds are those of the schedule"
            self._send(fragment, due)
            if due == self.step:
                self._apply()
        self._trail.note(stepped=True)

    def _send(self, place: int, due: int) -> None:
        """Start averaging ``g - x`` of a fragment over ranks; the result is applied after step
        ``due``.
        """
        assert self._taken
        assert self._in_flight is None
        self._trail.read()
        if self._trail.went_back:
            raise CommunicationError(
                "the weights were set back to those of an earlier step, from before the last"
                " exchange, by other means than load_state_dict(), so that diloco would take the"
                " way back for progress. Call model.bagua_resynchronize() on every rank, or set"
                " weights back by model.load_state_dict()"
            )
        fragment, context = self._fragments[place], self.context
        flight = self._in_flight = InFlight(place, due, {}, len(fragment.parts))
        buckets = []
        for number, part in enumerate(fragment.parts):
            differences = fragment.differences(part)
            tensors = [register(d, n, context.bagua_module_name) for n, d in differences.items()]
            name = f"fragment{place}" if len(fragment.parts) == 1 else f"fragment{place}.{number}"
            make = partial(BaguaBucket, tensors, name, True, backend=context.kernel_backend)
            bucket = make() if self._is_sparse else make(self._ranks)
            self._append_mean(bucket, part, flight)
            flight.mean |= differences
            buckets.append(bucket.append_python_op(flight.note_arrival))
        self._drifts[place] = norms_of(bucket.load() for bucket in buckets)
        self._sending = place
        self.run_round(buckets)

    @property
    def _ranks(self) -> int:
        return len(self.process_group.ranks)

    def _append_mean(
        self, bucket: BaguaBucket, part: dict[str, torch.nn.Parameter], flight: InFlight
    ) -> None:
        """Append the mean over ranks to the bucket of a part of the fragment in flight: S15 if
        sparse, else S3.1, or S3.2 if compressed.
        """
        options = self.options
        if self._is_sparse:
            flat = self.memories.flat(list(part))
            flight.undo.append(partial(flat.copy_, flat.clone()))
            bucket.append_chunked_sparse_op(
                options.compression,
                self.process_group,
                k=options.top_k,
                chunk=options.chunk,
                decay=options.error_decay,
                mean=options.mean,
                error=lambda: flat,
            )
            return
        memory = self._expect_memory(part)
        if memory is not None:
            flight.undo.append(partial(memory.restore, (memory.worker, memory.server)))
        bucket.append_centralized_synchronous_op(
            scattergather=True,
            compression=options.compression,
            group=self.process_group,
            error_memory=memory,
        )

    def _expect_memory(self, part: dict[str, torch.nn.Parameter]) -> ErrorMemory | None:
        """Return the error memory of a part of a fragment; None if there is none, or if each
        parameter has its own.
        """
        if self._is_sparse:
            for name, g in part.items():
                self.memories.expect(name, g.detach(), Layout.of(g))
        if not self.options.error_feedback:
            return None
        numel = sum(g.numel() for g in part.values())
        numel += -numel % self._ranks
        memory: ErrorMemory = self.memories.claim(
            list(part), list(part.values()), numel, self._ranks
        )
        return memory

    def _apply(self) -> None:
        """Step the outer optimizer with the mean that was in flight, and update the weights with
        the result.
        """
        flight, self._in_flight = self._in_flight, None
        assert flight is not None
        flight.wait(self.context.engine)
        fragment = self._fragments[flight.fragment]
        overflowed = [name for name, mean in flight.mean.items() if not mean.isfinite().all()]
        if overflowed:
            for restore in flight.undo:
                restore()
            raise CommunicationError(
                f"fragment {flight.fragment} was not applied: the mean over ranks of what its"
                f" weights have changed is not finite in {', '.join(map(repr, overflowed))}, as"
                " training has diverged on at least one rank"
            )
        self.outer_steps = fragment.settings(self.outer_steps)
        with profiled("bagua_ref::update"):
            fragment.update(flight.mean)
            fragment.mix(self.options.mix)
        self._trail.exchanged()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Replace this rank's weights in this context by the global weights g, rounded to the
        weights' dtypes; not collective.

        In the warm-up, and before the first forward pass after it, the weights stay as they are.
        Buffers are this rank's own.

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
                f"{what} inside `with global_weights()` would train weights that are put back"
                " afterwards; leave the context first"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, g, the outer optimizers' states, and the mean in flight, after
        waiting for it.

        All of it is equal on all ranks, and loads into any number of them; with error feedback,
        this rank's residuals come in addition. Its keys are the same at any time, so that
        torch.distributed.checkpoint can load it into a new training; it takes a tuple as a whole.

        Raises:
            CommunicationError: the mean in flight does not arrive.
        """
        if self._in_flight is not None:
            self._in_flight.wait(self.context.engine)
        flight, optimizers = self._in_flight, [fragment.optimizer for fragment in self._fragments]
        weights = {
            name: g.detach().clone() if self._taken else torch.zeros_like(g)
            for fragment in self._fragments
            for name, g in fragment.named.items()
        }
        return {
            **super().state_dict(),
            "fragments": self.fragments,
            "global_weights": weights,
            "has_global_weights": self._taken,
            "outer_optimizers": tuple(copy.deepcopy(each.state_dict()) for each in optimizers),
            "in_flight": () if flight is None else (flight.state(),),
        }

    def load_checked(self, state: dict[str, Any]) -> None:
        """Load g, the states of the outer optimizers, the mean in flight, and the error
        memories.
        """
        if self._in_flight is not None:
            self.context.engine.wait_pending_comm_ops()
        super().load_checked(state)
        self._taken, self._in_flight = state["has_global_weights"], None
        for fragment, optimizer in zip(self._fragments, state["outer_optimizers"], strict=True):
            fragment.load(state["global_weights"] if self._taken else None, optimizer)
        self._state_loaded = True
        self._trail.clear()
        for flight in state["in_flight"]:
            named = self._fragments[flight["fragment"]].named
            mean = {
                name: Layout.of(g).copy_of(flight["mean"][name].to(g.device))
                for name, g in named.items()
            }
            self._in_flight = InFlight(flight["fragment"], flight["due"], mean)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        check_form(state, {"has_global_weights": bool}, "state")
        steps, taken = state["steps_of_optimizers"][-1], state["has_global_weights"]
        if steps < self.rounds.warmup if taken else steps > self.rounds.warmup:
            phase = "local phase" if taken else "warm-up"
            raise ValueError(
                f"state was saved in the {phase}, after step {steps};"
                f" warmup_steps={self.rounds.warmup} does not fit that"
            )
        if state["fragments"] != self.fragments:
            raise ValueError(
                f"state was saved with fragments {state['fragments']}, and this training has"
                f" {self.fragments}"
            )
        here = {name: g for fragment in self._fragments for name, g in fragment.named.items()}
        check_tensors("global_weights", state["global_weights"], here)
        saved = zip(self._fragments, state["outer_optimizers"], strict=True)
        for place, (fragment, optimizer) in enumerate(saved):
            try:
                check_optimizer_state(fragment.optimizer, optimizer)
            except ValueError as error:
                raise ValueError(
                    f"state does not fit the outer optimizer of fragment {place}: {error}"
                ) from error
        for flight in state["in_flight"]:
            place, due = flight["fragment"], flight["due"]
            fits = self.options.fragment_applied_after(due - self.rounds.warmup) == place
            if not (fits and steps < due <= steps + self.options.delay):
                raise ValueError(
                    f"state has fragment {place} in flight, to be applied after step {due}, which"
                    " fits no step of this training's schedule: load it with the period,"
                    " fragments, delay and warmup_steps with which it was saved"
                )
            check_tensors("the mean in flight", flight["mean"], self._fragments[place].named)


def _nesterov(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)
