"""Training of a wrapped module against a plain model: which gradients are reduced, which steps may
follow (S2.5, S5).

One rank trains alone, with an algorithm whose reduction doubles gradients, so that each one shows
whether it was reduced. The model looks at the history of events only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.trainings import FailsInBackward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.algorithms.base import AlgorithmImpl
from bagua_ref.algorithms.traits import Traits


class _Doubling(AlgorithmImpl):
    phases = (Traits(same_replicas=True),)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[bool] = []
        """For each optimizer step, whether it may communicate."""

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        def double(name: str) -> None:
            for gradient in bucket.effective_tensors():
                gradient.mul_(2)

        bucket.append_python_op(double)

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], object]:
        return lambda optimizer: self.steps.append(True)

    def end_unsynchronized_step(self, optimizer: Any) -> None:
        self.steps.append(False)


class Doubling(Algorithm):
    implementation = _Doubling


class Net(nn.Module):
    """Uses ``first`` twice, ``second`` always and ``third`` if told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(3, 3).double() for _ in range(3))
        self.checkpointed: bool | None = None
        self.fails = False

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        y = self.first(x)
        if self.checkpointed is None:
            y = self.second(y)
        else:
            y = checkpoint(self.second, y, use_reentrant=self.checkpointed)
        if self.fails:
            y = FailsInBackward.apply(y)  # type: ignore[no-untyped-call]
        y = self.first(y.tanh())
        found: Tensor = self.third(y) if whole else y
        return found


SYNC = st.booleans()
WHOLE = st.booleans()


class Training(RuleBasedStateMachine):
    losses: list[Any] = []  # which rules read before they run
    failed = False

    @initialize(flat=st.booleans())
    def wrap(self, flat: bool) -> None:
        bagua_ref.init_process_group()
        self.module, self.plain = Net(), Net()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.module.with_bagua(
            [self.optimizer], Doubling(), do_flatten=flat, find_unused_parameters=True
        )
        self.inputs = torch.Generator().manual_seed(0)
        self.losses: list[tuple[Tensor, bool, dict[str, Tensor]]] = []
        """Losses, whether their forward passes began outside no_sync, and their gradients."""
        self.history: list[str] = []
        self.gradients: dict[str, Tensor | None] = dict.fromkeys(self.names)
        self.reached: set[str] = set()
        """Parameters that a backward pass has reached since the last reduction."""
        self.kinds: dict[str, list[str]] = {name: [] for name in self.names}
        """How what is in each gradient came there since the last step."""
        self.failed = False
        self.steps: list[bool] = []

    def teardown(self) -> None:
        if bagua_ref.is_initialized():
            bagua_ref.destroy_process_group()

    # The model

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.plain.named_parameters()]

    def since(self, event: str) -> list[str]:
        """Return what has happened since the last event that begins with ``event``."""
        places = [n for n, found in enumerate(self.history) if found.startswith(event)]
        return self.history[places[-1] + 1 :] if places else self.history

    def step_is_to_come(self) -> bool:
        return any(event.startswith("forward") for event in self.since("step"))

    def takes_whatever_comes(self) -> bool:
        """Return whether a backward pass that reaches no output is reduced: after a forward pass
        outside no_sync until a reduction, and longer if no other one has followed.
        """
        forwards = [n for n, event in enumerate(self.history) if event.startswith("forward")]
        if not forwards:
            return False
        until_then = self.history[: forwards[-1] + 1]
        last = len(until_then) - 1 - [*until_then[::-1], "reduced"].index("reduced")
        return "forward outside no_sync" in until_then[last + 1 :]

    def first_run(self) -> bool | None:
        """Return whether a forward pass without gradients, which a backward pass that reaches no
        output shows to be the first run of a checkpoint, was outside no_sync; None: there is none.
        """
        after = self.since("forward")
        last = [n for n, event in enumerate(after) if event.startswith("without gradients")]
        if not last or "hidden gradient" in after[last[-1] :]:
            return None
        if len(after) < len(self.history) and not any(
            event.endswith("gradient") for event in after
        ):
            return None  # that forward pass still waits for its first gradient
        return after[last[-1]].endswith("outside no_sync")

    def arrive(self, gradients: dict[str, Tensor], kind: str, how: str = "gradient") -> None:
        """Add gradients; all that were reached are doubled if the kind is "reduced"."""
        for name, gradient in gradients.items():
            before = self.gradients[name]
            self.gradients[name] = gradient if before is None else before + gradient
            self.kinds[name].append(kind)
        self.reached |= gradients.keys()
        self.history.append(how)
        if kind == "reduced":
            for name in self.reached:
                before = self.gradients[name]
                zeros = torch.zeros_like(self.plain.get_parameter(name))
                self.gradients[name] = zeros if before is None else 2 * before
            for kinds in self.kinds.values():
                kinds.clear()
            self.reached = set()
            self.history.append("reduced")

    def why_refused(self) -> str:
        kinds = {kind for kinds in self.kinds.values() for kind in kinds}
        if self.failed:
            return "a backward pass failed"
        if "reduced" in self.since("step"):
            return "got another gradient" if kinds else ""
        return "eval mode|no training forward" if "bypassing" in kinds else ""

    # Passes

    def loss(
        self, outside: bool, run: Callable[..., Tensor], plain: Callable[..., Tensor] | None = None
    ) -> Any:
        """Return a loss of the wrapped module, and the gradients of one of the plain module."""
        x = torch.randn(2, 3, generator=self.inputs, dtype=torch.float64, requires_grad=True)
        expected = (plain or run)(self.plain, x).square().mean()
        found = torch.autograd.grad(expected, list(self.plain.parameters()), allow_unused=True)
        gradients = {n: g for n, g in zip(self.names, found, strict=True) if g is not None}
        with self.no_sync(outside):
            return run(self.module, x).square().mean(), gradients

    def no_sync(self, outside: bool) -> AbstractContextManager[Any]:
        return nullcontext() if outside else self.module.no_sync()

    def hidden(self, loss: Tensor, gradients: dict[str, Tensor], outside: bool) -> None:
        """Run a backward pass that comes to no output of a forward pass."""
        first_run = self.first_run()
        if first_run is not None:
            self.begin_forward(first_run)
        if not self.module.training:
            kind = "local" if not outside else "bypassing"
        elif not self.step_is_to_come():
            kind = "bypassing" if outside else "local"
        else:
            kind = "reduced" if self.takes_whatever_comes() else "local"
        with self.no_sync(outside):
            loss.backward()
        self.arrive(gradients, kind, "hidden gradient")

    @rule(outside=SYNC, whole=WHOLE, checkpointed=st.sampled_from([None, False, True]))
    def forward(self, outside: bool, whole: bool, checkpointed: bool | None) -> None:
        self.module.checkpointed = checkpointed
        loss, gradients = self.loss(outside, lambda module, x: module(x, whole))
        self.begin_forward(outside)
        self.losses.append((loss, outside, gradients))

    def begin_forward(self, outside: bool) -> None:
        self.history.append("forward outside no_sync" if outside else "forward")
        self.failed = False

    @precondition(lambda self: self.losses and not self.failed)
    @rule(outside=SYNC, data=st.data())
    def backward(self, outside: bool, data: st.DataObject) -> None:
        """Differentiate some losses; whether under no_sync does not matter."""
        count = data.draw(st.integers(1, min(2, len(self.losses))))
        losses, self.losses = self.losses[-count:], self.losses[:-count]
        total: dict[str, Tensor] = {}
        for _, _, gradients in losses:
            for name, gradient in gradients.items():
                total[name] = total.get(name, torch.zeros(())) + gradient
        with self.no_sync(outside):
            torch.stack([loss for loss, _, _ in losses]).sum().backward()
        self.arrive(total, "reduced" if any(sync for _, sync, _ in losses) else "local")

    @rule(outside=SYNC)
    def forward_without_gradients(self, outside: bool) -> None:
        with torch.no_grad(), self.no_sync(outside):
            self.module(torch.ones(1, 3, dtype=torch.float64), True)
        self.note_forward_without_gradients(outside)

    def note_forward_without_gradients(self, outside: bool) -> None:
        self.failed = False
        self.history.append("without gradients" + ", outside no_sync" * outside)

    @rule(outside=SYNC, whole=WHOLE)
    def checkpoint_around_the_module(self, outside: bool, whole: bool) -> None:
        """Its first run has gradients disabled."""
        loss, gradients = self.loss(
            outside,
            lambda module, x: checkpoint(module, x, whole, use_reentrant=True),
            lambda module, x: module(x, whole),
        )
        self.note_forward_without_gradients(outside)
        self.hidden(loss, gradients, outside=True)

    @precondition(lambda self: not self.failed)
    @rule(outside=SYNC, training=st.booleans())
    def bypass(self, outside: bool, training: bool) -> None:
        """Call the children instead of the module, perhaps in eval mode."""
        loss, gradients = self.loss(True, lambda module, x: module.first(module.second(x)))
        self.module.train(training)
        self.hidden(loss, gradients, outside)
        self.module.train()

    # Steps

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        for name, gradient in self.gradients.items():
            if set_to_none:
                self.gradients[name] = None
                self.kinds[name].clear()
            elif gradient is not None:
                self.gradients[name] = torch.zeros_like(gradient)

    @rule()
    def step(self) -> None:
        if why := self.why_refused():
            with pytest.raises(RuntimeError, match=why):
                self.optimizer.step()
            return
        self.optimizer.step()
        since = self.since("step")
        if {"gradient", "hidden gradient"} & {*since}:
            self.steps.append("reduced" in since)
        else:
            self.steps.append(self.takes_whatever_comes())
        self.history.append("step")
        self.losses.clear()  # autograd would refuse them: weights have changed
        self.plain.load_state_dict(self.module.state_dict())
        for kinds in self.kinds.values():
            kinds.clear()

    @rule(outside=SYNC)
    def fail(self, outside: bool) -> None:
        """A backward pass fails half-way; the user drops its gradients."""
        self.module.fails = True
        with self.no_sync(outside):
            loss = self.module(torch.ones(1, 3, dtype=torch.float64), True).sum()
        self.module.fails = False
        with pytest.raises(ArithmeticError):
            loss.backward()
        self.begin_forward(outside)
        self.history.append("failed gradient" if outside else "gradient")
        self.failed = outside
        self.losses.clear()
        self.optimizer.zero_grad()
        self.gradients = dict.fromkeys(self.names)
        self.reached |= {"first.weight", "first.bias", "second.weight", "second.bias"}
        self.reached |= {"third.weight", "third.bias"}
        for kinds in self.kinds.values():
            kinds.clear()

    @invariant()
    def gradients_and_steps_are_those_of_the_model(self) -> None:
        if not hasattr(self, "history"):
            return
        for name, expected in self.gradients.items():
            found = self.module.get_parameter(name).grad
            assert (found is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(found, expected)
        assert self.module.bagua_algorithm.steps == self.steps
        forwards = sum(event.startswith("forward") for event in self.history)
        assert self.module.bagua_train_step_counter == forwards


TestTraining = Training.TestCase
TestTraining.settings = settings(stateful_step_count=40)
