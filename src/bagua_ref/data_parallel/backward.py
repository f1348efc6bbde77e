"""State machine of a module's backward passes: which gradients are synchronized, and which
optimizer steps may follow (S5).

It is pure: events come in as calls, and the actions that they lead to are returned. Tensors are
opaque here, and nothing communicates; `bagua_ref.data_parallel.training` performs the actions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class State(Enum):
    """State of a module in training."""

    IDLE = "idle"
    """No training forward pass has begun since the last step."""
    FORWARD = "forward"
    """Training forward passes have begun; optimizer steps have not."""
    BACKWARD = "backward"
    """A synchronized backward pass is in progress, or has failed."""
    WAITING = "waiting"
    """The backward pass has ended; its round has not."""


class Gradients(Enum):
    """State of an optimizer's gradients since its last step."""

    NONE = "none"
    LOCAL = "local"
    """Local on purpose."""
    BYPASSED = "bypassed"
    """Local, because a backward pass did not follow a training forward pass."""
    SYNCHRONIZED = "synchronized"
    LATE = "late"
    """Synchronized, but local gradients were added later."""


class Event(Enum):
    """Events that change a `State` or `Gradients`."""

    FORWARD = "forward begins"
    GRADIENT = "synchronized gradient"
    BACKWARD_ENDS = "backward ends"
    ROUND_ENDS = "round ends"
    STEP = "step begins"
    STEP_INSIDE = "step begins inside backward"
    STEPPED = "all optimizers have stepped"
    LOCAL = "local gradient"
    BYPASS = "bypassing gradient"
    FAILED = "backward has failed"


_INSIDE = (
    "{alone}, inside backward(), as from a hook of a parameter. Call step() after backward() has"
    " returned"
)
_FAILED = (
    "{alone}: a backward pass failed. Run forward and backward again; inside train(), leave the"
    " context"
)
_BYPASSED = (
    "{alone}: the backward that reached parameter {name!r} {reason}. Call the wrapped module itself,"
    " model(x), in training mode for each step; model.no_sync() keeps gradients local on purpose"
)
_LATE = (
    "{alone}: after the synchronized backward pass of this step, parameter {name!r} got another"
    " gradient, under no_sync() or in eval mode. The last backward pass before step() must be the"
    " one whose forward pass began outside no_sync()"
)
_EVAL = "began while the module was in eval mode"
_NO_FORWARD = (
    "followed no training forward of the module, as when one of its children or methods is called"
    " instead of it"
)

_S, _G, _E = State, Gradients, Event
TRANSITIONS: dict[tuple[State | Gradients, Event], State | Gradients | str] = {
    **{(state, _E.FORWARD): _S.FORWARD for state in State},
    **{(state, _E.GRADIENT): _S.BACKWARD for state in State},
    (_S.BACKWARD, _E.BACKWARD_ENDS): _S.WAITING,
    (_S.WAITING, _E.ROUND_ENDS): _S.FORWARD,
    (_S.BACKWARD, _E.FAILED): _S.FORWARD,
    **{(state, _E.STEPPED): _S.IDLE for state in (_S.FORWARD, _S.WAITING)},
    (_S.BACKWARD, _E.STEP): _FAILED,
    **{(state, _E.STEP_INSIDE): _INSIDE for state in State},
    **{(gradients, _E.GRADIENT): _G.SYNCHRONIZED for gradients in Gradients},
    (_G.NONE, _E.LOCAL): _G.LOCAL,
    **{(gradients, _E.BYPASS): _G.BYPASSED for gradients in (_G.NONE, _G.LOCAL)},
    **{(_G.SYNCHRONIZED, event): _G.LATE for event in (_E.LOCAL, _E.BYPASS)},
    # if the gradients are still there: zero_grad() may have dropped them
    (_G.BYPASSED, _E.STEP): _BYPASSED,
    (_G.LATE, _E.STEP): _LATE,
}
"""(state, event) -> next state; the state is unchanged without an entry. A text is the error of an
illegal event.
"""


class BeginForward(NamedTuple):
    """Action: begin a training step, at the start of its forward pass, or of a backward pass in
    place of it.
    """

    synchronized: bool
    in_backward: bool


class AbandonRound(NamedTuple):
    """Action: abandon the round of a backward pass that failed."""


class BeginRound(NamedTuple):
    """Action: begin the round of a backward pass."""


class Deliver(NamedTuple):
    """Action: mark gradients ready that arrived before their backward pass was known to be
    synchronized.
    """

    gradients: list[tuple[str, Any]]


Action = BeginForward | AbandonRound | BeginRound | Deliver


class Stepped(NamedTuple):
    """Outcome of an optimizer step.

    Attributes:
        counts: whether the step counts as a step of the training; False for one that only
            initializes optimizer state.
        followed: whether gradients had arrived since the last step.
        synchronized: whether a backward pass was synchronized since the last step.
    """

    counts: bool
    followed: bool
    synchronized: bool


@dataclass(eq=False)
class Task:
    """Record of an autograd task that has reached the output of a forward pass; the task keeps it
    as a callback, and calls it at the end.

    Attributes:
        synchronized: whether one of the forward passes that it reached began outside `no_sync`.
        over: whether the task has ended.
        waiting: the gradients that arrived before that forward pass was reached, with names.
    """

    synchronized: bool = False
    over: bool = False
    waiting: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self) -> None:
        """Mark the task as ended."""
        self.over = True


@dataclass(eq=False)
class _Pending:
    """Record of the forward passes whose backward passes have not run yet."""

    synchronizing: bool
    """Whether a backward pass that reaches no known output is synchronized: like with torch's
    DistributedDataParallel, if it is the first one after a forward pass outside `no_sync`.
    """
    awaited: bool = False
    """Whether the last forward pass outside `no_sync` still waits for a synchronized backward
    pass.
    """
    expected: bool = False
    """Whether no gradient has arrived since the last forward pass."""
    without_gradients: bool | None = None
    """Whether the last forward pass began outside `no_sync`, if gradients were disabled in it. Only
    the first run of a reentrant checkpoint around the module leads to a backward pass.
    """
    functional: bool | None = None
    """Whether a forward pass since the last step that had other tensors in place of parameters, as
    in `torch.func.functional_call`, began outside `no_sync`; None: there was none. Only a backward
    pass shows whether it is part of training: if it reaches parameters, as that of MAML's loss
    does.
    """


@dataclass(eq=False)
class _Optimizer:
    """Record of one optimizer since its last step."""

    due: bool = False
    """Whether the optimizer has not stepped since the last training forward pass."""
    gradients: Gradients = Gradients.NONE
    suspects: dict[str, tuple[Callable[[], Any], str]] = field(default_factory=dict)
    """Weak references to local gradients that a step must not use, and the reasons, by name."""
    before: Gradients | None = None
    """Value of `gradients` at the start of the current step; None outside of steps."""


class Backward:
    """State machine of the backward passes and optimizer steps of one module.

    Args:
        module: the module's name, for messages.
        optimizers: the optimizers of the training, as any hashable objects.
        stands_alone: whether backward passes need no forward pass if there are no optimizers.
        without_forward: whether training steps are detected only by gradients, as in `train`.

    Attributes:
        state: the current state.
        skipping: whether forward passes that begin now skip communication, as in `no_sync`.
    """

    def __init__(
        self,
        module: str,
        optimizers: Iterable[Hashable],
        *,
        stands_alone: bool = False,
        without_forward: bool = False,
    ) -> None:
        known = list(optimizers)
        self.state, self.skipping, self._module = State.IDLE, False, module
        self._stands_alone = stands_alone and not known
        self._without_forward = without_forward
        self._optimizers = {optimizer: _Optimizer() for optimizer in (None, *known)}
        """Records by optimizer; that of None stands for all unknown optimizers."""
        self._due = [self._optimizers[o] for o in known or [None]]
        self._pending = _Pending(synchronizing=not known)
        self._task: Callable[[], Task | None] = lambda: None
        self._stood_in = -1
        """Last autograd task whose gradients implied a forward pass."""

    # Forward passes

    def forward_begins(self, synchronized: bool, in_backward: bool = False) -> list[Action]:
        """Handle the start of a training forward pass, ``synchronized`` if outside `no_sync`; a
        gradient can also imply it.
        """
        actions = self._abandon_failed()
        pending = self._pending
        pending.expected, pending.without_gradients, pending.functional = (
            not in_backward,
            None,
            None,
        )
        if synchronized:
            pending.synchronizing = pending.awaited = True
        elif not pending.awaited:
            pending.synchronizing = False
        for record in self._due:
            record.due = True
        self._go(Event.FORWARD)
        return [*actions, BeginForward(synchronized, in_backward)]

    def forward_without_gradients_begins(self) -> list[Action]:
        """Handle the start of a forward pass in training mode with gradients disabled."""
        actions = self._abandon_failed()
        self._pending.without_gradients = not self.skipping
        return actions

    def functional_forward_begins(self) -> None:
        """Handle the start of a forward pass with other tensors in place of the parameters."""
        if self.state is State.IDLE:
            self._pending.functional = bool(self._pending.functional) or not self.skipping

    def _abandon_failed(self) -> list[Action]:
        if self.state is not State.BACKWARD:
            return []
        self._go(Event.FAILED)
        self._end_step()
        return [AbandonRound()]

    # Backward passes

    @property
    def task(self) -> Task | None:
        """Record of the current autograd task, if that has reached an output."""
        task = self._task()
        return None if task is None or task.over else task

    def output_reached(self, synchronized: bool, keep: Callable[[Task], object]) -> list[Action]:
        """Handle an autograd task that reaches the output of a forward pass, inside or outside
        `no_sync`.

        Args:
            synchronized: whether the forward pass began outside `no_sync`.
            keep: function that stores a new record until the task has ended or failed.
        """
        task = self.task
        if task is None:
            task = Task()
            keep(task)
            self._task = weakref.ref(task)
        late = synchronized and not task.synchronized and task.waiting
        task.synchronized = task.synchronized or synchronized
        return [*self._begin_round(), Deliver(task.waiting)] if late else []

    def gradient(
        self,
        name: str,
        token: Any,
        refer: Callable[[], Callable[[], Any]],
        *,
        training: bool,
        task: int,
        alike: bool,
    ) -> list[Action]:
        """Handle a gradient: the first one of a backward pass, or one that is not synchronized.

        Args:
            name: name of the parameter.
            token: any object, returned in `Deliver` if the gradient turns out to be synchronized.
            refer: returns a weak reference to the gradient.
            training: whether the module is in training mode.
            task: the number of the autograd task.
            alike: whether ranks must step alike.

        Returns:
            Actions, after which the gradient is synchronized if `state` is BACKWARD.
        """
        reached = self.task
        stand_in = self._stand_in(reached, training, task)
        actions = [] if stand_in is None else self.forward_begins(stand_in, in_backward=True)
        if reached is not None:
            if reached.synchronized:
                return [*actions, *self._begin_round()]
            reached.waiting.append((name, token))
            why = ""
        else:
            why = self._why_bypassed(training)
            forward = any(record.due for record in self._due)
            if not why and self._pending.synchronizing and (forward or not self.skipping):
                return [*actions, *self._begin_round()]
            why = "" if self.skipping else why
        for record in self._optimizers.values():
            record.gradients = self._after(record.gradients, Event.BYPASS if why else Event.LOCAL)
            if alike if record.gradients is Gradients.LATE else why:
                record.suspects[name] = refer(), why
        return actions

    def backward_ends(self) -> None:
        """Handle the end of the outermost autograd task of a synchronized backward pass."""
        self._go(Event.BACKWARD_ENDS)

    def round_ends(self) -> None:
        """Handle the end of a round, which has reduced the gradients."""
        self._go(Event.ROUND_ENDS)
        for record in self._optimizers.values():
            record.gradients = self._after(record.gradients, Event.GRADIENT)
            record.suspects.clear()
        self._optimizers[None].due = self._pending.awaited = False
        self._end_step()

    def _begin_round(self) -> list[Action]:
        self._go(Event.GRADIENT)
        return [BeginRound()]

    def _stand_in(self, reached: Task | None, training: bool, task: int) -> bool | None:
        """Return whether the forward pass implied by a gradient began outside `no_sync`; None if
        the gradient implies none.
        """
        pending = self._pending
        expected, pending.expected = pending.expected, False
        if reached is None:
            first_run, pending.without_gradients = pending.without_gradients, None
            if first_run is not None and not expected:
                return first_run
        if not training:
            return None
        if self._without_forward:
            before, self._stood_in = self._stood_in, task
            return None if task == before else not self.skipping
        if self.state is State.IDLE:
            functional, pending.functional = pending.functional, None
            return functional
        return None

    def _why_bypassed(self, training: bool) -> str:
        """Return the reason why a backward pass cannot be synchronized; "" if it can, or need not
        be.
        """
        if not training:
            return _EVAL
        if self._stands_alone or any(record.due for record in self._due):
            return ""
        return _NO_FORWARD

    # Steps

    @property
    def stepping(self) -> bool:
        """Whether a known optimizer is in the middle of a step, which may consist of steps of other
        optimizers.
        """
        return any(record.before is not None for record in self._optimizers.values())

    def step_begins(
        self,
        optimizer: Hashable,
        gradients: Callable[[], Mapping[str, Any]],
        inside: bool = False,
        who: str = "",
    ) -> None:
        """Handle the start of an optimizer step.

        Args:
            optimizer: a known optimizer; None: an unknown one.
            gradients: returns the gradients that the step would use, by name.
            inside: whether the step is inside a backward pass.
            who: name of the optimizer, for messages.

        Raises:
            RuntimeError: the optimizer must not step; the message says why.
        """
        self._go(Event.STEP_INSIDE if inside else Event.STEP, who=who)
        record = self._optimizers[optimizer]
        if record.suspects:
            used = gradients()
            for name, (gradient, reason) in record.suspects.items():
                # zero_grad() may have dropped it
                if used.get(name) is not None and used[name] is gradient():
                    self._after(record.gradients, Event.STEP, who=who, name=name, reason=reason)
        if optimizer is not None:
            record.before, self._pending.functional = record.gradients, None
        record.gradients, record.suspects = Gradients.NONE, {}

    def step_ends(self, optimizer: Hashable, changes: bool, training: bool) -> Stepped:
        """Handle the end of a known optimizer's step.

        Args:
            optimizer: the optimizer that has stepped.
            changes: whether the learning rate is not 0, so that the step can change weights even
                without gradients.
            training: whether the module is in training mode.
        """
        record = self._optimizers[optimizer]
        before = record.before
        assert before is not None, "its step has begun"
        if record.gradients is not Gradients.NONE:  # of the step's own closure
            before = record.gradients
        if record.gradients is not Gradients.BYPASSED:
            record.gradients, record.suspects = Gradients.NONE, {}
        record.due, record.before = False, None
        self._end_step()
        followed = before is not Gradients.NONE
        synchronized = before in (Gradients.SYNCHRONIZED, Gradients.LATE)
        if not followed:  # as where gradients did not come through backward()
            synchronized = training and self._pending.synchronizing
        return Stepped(followed or changes, followed, synchronized)

    def _end_step(self) -> None:
        if not any(record.due for record in self._due):
            self._go(Event.STEPPED)

    # The table

    def _go(self, event: Event, **names: Any) -> None:
        self.state = self._after(self.state, event, **names)

    def _after(self, before: Any, event: Event, who: str = "", **names: Any) -> Any:
        """Return the next state, or raise RuntimeError if ``event`` is illegal."""
        found = TRANSITIONS.get((before, event), before)
        if isinstance(found, str):
            alone = (
                f"{who} was about to step module {self._module!r} with gradients of this rank alone"
            )
            raise RuntimeError(found.format(alone=alone, **names))
        return found
