"""Runs of adjacent parameters: their state, and the flat parameter that is stepped in their place (S6)."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.layout import lay_out
from bagua_ref.tensor import Registration, registration
from bagua_ref.utils import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from torch import Tensor

    from bagua_ref.tensor import Getter

__all__ = ["NUMBERS", "Run", "SharedScalar", "getter_of"]

get_grad = attrgetter("grad")

NUMBERS = (int, float, bool, str, type(None))
"""Types of immutable values, which parameters can share."""


class SharedScalar:
    """A state tensor with one element, such as ``step``: each parameter has one, and all are equal.

    They become views of one vector, so that a single operation writes or compares all of them.
    """

    def __init__(self, key: Any, states: Sequence[dict[Any, Any]]) -> None:
        self._vector = torch.stack([state[key] for state in states])
        for state, own in zip(states, self._vector.unbind(), strict=True):
            state[key].data = own
        self.value = self._vector[0].clone()
        self._repeated = self.value.expand_as(self._vector)

    def pull(self) -> bool:
        """Read the parameters' number; return False if they differ."""
        if torch.equal(self._vector, self._repeated):
            return True
        self.value.copy_(self._vector[0])
        return torch.equal(self._vector, self._repeated)

    def push(self) -> None:
        """Write this number to the parameters' state."""
        self._vector.copy_(self._repeated)


class Run:
    """Contiguous parameters that are updated as one.

    Args:
        parameters: parameters that are adjacent in one storage, in order.
        states: the optimizer's state of each, with the same keys and numbers; its tensors are moved together. None: no state.
        per_element: keys of ``states`` that have a number for each element.
        held: the one of these keys whose tensors a bucket holds, if any.
    """

    def __init__(
        self, parameters: list[Tensor], states: list[dict[Any, Any]] | None, per_element: Sequence[Any] = (), held: Any = None
    ) -> None:
        self.parameters, self.states = parameters, states
        self.weight = torch.nn.Parameter(lay_out(parameters), requires_grad=parameters[0].requires_grad)
        """All elements, in the parameters' own memory."""
        self.state: dict[Any, Any] | None = None
        """The state of `weight`; entries per element use the memory of the parameters' state."""
        self._tensors: dict[Any, Tensor] = {}
        self._scalars: dict[Any, SharedScalar] = {}
        self._numbers: dict[Any, Any] = {}
        self._readers: dict[Any, Callable[[Any], Any]] = {}
        if states is not None:
            for key, value in states[0].items():
                if key in per_element:
                    self._tensors[key] = lay_out([state[key] for state in states])
                elif isinstance(value, torch.Tensor):
                    self._scalars[key] = SharedScalar(key, states)
                    self._tensors[key] = self._scalars[key].value
                else:
                    self._numbers[key], self._readers[key] = value, itemgetter(key)
            self.state = {**self._tensors, **self._numbers}
        self.num_entries = sum(map(len, states or ()))
        """The total number of entries of the parameters' states."""
        self.getter = getter_of(parameters[0])
        if held is not None:
            self._register(held)
        sizes = [p.numel() * p.element_size() for p in parameters]
        self._offsets = list(itertools.accumulate(sizes[:-1], initial=0))
        self._one_dimensional = all(p.ndim == 1 for p in parameters)
        self._in_place = False
        """Whether the gradients are laid out as the parameters are."""
        self._copy: Tensor | None = None
        """A copy of gradients that are laid out differently; kept, because allocating it costs more than the step."""
        self._copied: list[Tensor] = []
        """Its parts."""
        self._copy_version = 0
        self._seen_grad: weakref.ref[Tensor] | None = None

    @property
    def tensor_keys(self) -> list[Any]:
        """The keys of tensors in the parameters' states."""
        return list(self._tensors)

    def pull(self) -> bool:
        """Read the parameters' numbers, which ordinary steps may have changed; return False if they differ."""
        for scalar in self._scalars.values():
            if not scalar.pull():
                return False
        for key, read in self._readers.items():
            assert self.states is not None
            assert self.state is not None
            values = list(map(read, self.states))
            if values.count(values[0]) < len(values):
                return False
            self._numbers[key] = self.state[key] = values[0]
        return True

    def push(self, state: dict[Any, Any] | None, store: MutableMapping[Any, Any]) -> bool:
        """Copy the state of `weight` after a step to the parameters.

        Args:
            state: the state of `weight`, None if it has none.
            store: the optimizer's state, to which new entries of the parameters are added.

        Returns:
            Whether this run can be used again: False if state has appeared or disappeared.

        Raises:
            RuntimeError: a state is neither per element nor one number, so this optimizer is not element-wise.
        """
        if state is None:
            for parameter in self.parameters if self.states is not None else ():
                store.pop(parameter, None)
            return self.states is None
        lasting = self.states is not None and state.keys() == self._tensors.keys() | self._numbers.keys()
        if self.states is None:
            self.states = [store.setdefault(parameter, {}) for parameter in self.parameters]
        for key, value in state.items():
            place = self._tensors.get(key)
            if value is place and place is not None:
                pass
            elif place is not None and _alike(value, place):  # an optimizer that does not work in place
                place.copy_(value)
                state[key] = place
            elif key in self._numbers and type(value) in NUMBERS:
                if value != self._numbers[key]:
                    self._numbers[key] = value
                    deque(map(dict.__setitem__, self.states, itertools.repeat(key), itertools.repeat(value)), maxlen=0)
            else:
                self._publish(key, value)
                lasting = False
        for scalar in self._scalars.values():
            scalar.push()
        for key in (self._tensors.keys() | self._numbers.keys()) - state.keys():
            deque(map(dict.pop, self.states, itertools.repeat(key), itertools.repeat(None)), maxlen=0)
        self.state = state
        return lasting

    def _publish(self, key: Any, value: Any) -> None:
        """Add a new entry to the parameters' states."""
        assert self.states is not None
        if isinstance(value, torch.Tensor) and value.shape == self.weight.shape:
            parts: list[Any] = self._parts(value)
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            parts = [value.clone() for _ in self.parameters]
        elif type(value) in NUMBERS:
            parts = [value] * len(self.parameters)
        else:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise RuntimeError(
                f"the optimizer's state {key!r} of {self.weight.numel()} elements in {len(self.parameters)} parameters is {what}, "
                "which cannot be split between them; this optimizer cannot be fused"
            )
        for state, part in zip(self.states, parts, strict=True):
            state[key] = part

    def find_gradients(self, pointers: list[int]) -> None:
        """Find out from the gradients' data pointers whether they are laid out as the parameters are."""
        first = pointers[0]
        self._in_place = pointers[1] == first + self._offsets[1] and pointers == [first + offset for offset in self._offsets]

    def take_gradient(self, row_major: bool) -> None:
        """Set the flat weight's gradient for one step: a view of the gradients, or a copy if they are laid out differently.

        Args:
            row_major: whether the gradients of all runs are row-major.
        """
        if self._in_place and (row_major or all(map(torch.Tensor.is_contiguous, map(get_grad, self.parameters)))):
            first: Tensor = self.parameters[0].grad  # type: ignore[assignment]
            try:
                # Raises if they are neighbours by chance, as then the first one's storage ends before the second.
                self.weight.grad = first.detach().as_strided(self.weight.shape, (1,))
            except RuntimeError:
                pass
            else:
                self._copy = None
                return
        self._in_place = False
        grads = list(map(get_grad, self.parameters))
        if self._copy is None:
            self._copy = torch.empty_like(self.weight, requires_grad=False)
            self._copied = self._parts(self._copy)
        with torch.no_grad():
            if self._one_dimensional:
                torch.cat(grads, out=self._copy)  # twice as fast
            else:
                torch._foreach_copy_(self._copied, grads)
        self.weight.grad, self._copy_version = self._copy, self._copy._version

    def give_gradient_back(self) -> None:
        """Drop the flat weight's gradient, after copying changes that the step made in it to the parameters' gradients."""
        copy, self.weight.grad = self._copy, None
        if copy is not None and copy._version != self._copy_version:  # foreach=True with nesterov=True adds momentum to it
            with torch.no_grad():
                torch._foreach_copy_(list(map(get_grad, self.parameters)), self._copied)
        if copy is not None and copy.device.type != "cpu":  # there, memory is scarcer and allocation is fast
            self._copy, self._copied = None, []

    def keep_gradients(self, movable: Callable[[Tensor, Tensor], bool]) -> None:
        """Move the gradients permanently into the flat one, if they are still those of the last step.

        If ``zero_grad()`` sets gradients to None, which is its default, moving them would cost time in each step.

        Args:
            movable: tells whether a parameter's gradient may be moved.
        """
        if self._in_place:
            return
        first = self.parameters[0].grad
        if self._seen_grad is None or self._seen_grad() is not first:
            self._seen_grad = None if first is None else weakref.ref(first)
        else:
            self.move_gradients(movable)

    def move_gradients(self, movable: Callable[[Tensor, Tensor], bool]) -> None:
        """Make the gradients views of one tensor, if all may be moved: of the copy, if there is one."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if all(map(movable, self.parameters, grads)):
            for grad, part in zip(grads, self._copied if self._copy is not None else self._parts(flatten(grads)), strict=True):
                grad.data = part
            self._copy, self._copied = None, []

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return the part of ``flat`` that belongs to each parameter, in its shape."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _register(self, held: Any) -> None:
        """Register the flat weight as a parameter whose state is in a bucket, for which `QAdamOptimizer` checks."""
        tensor, first = self._tensors[held], registration(self.parameters[0])
        known = Registration(first.name, first.module_name, lambda _: tensor, None)
        known.sink = first.sink
        self.weight._bagua_registration = known  # type: ignore[attr-defined]


def getter_of(parameter: Tensor) -> Getter | None:
    """Return what finds the effective tensor of ``parameter``, None if it is no bagua tensor; registering it again replaces it."""
    known: Registration | None = getattr(parameter, "_bagua_registration", None)
    return None if known is None else known.getter


def _alike(value: Any, place: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype, value.device) == (place.shape, place.dtype, place.device)
