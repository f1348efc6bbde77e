"""Runs of adjacent parameters: their state, and the blocks that are stepped in their place (S6)."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.layout import lay_out
from bagua_ref.contrib.fuse.sizes import WHOLE
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

    They become views of one vector, so that a single operation writes or compares all of them. Blocks have their own vector, as
    each step of a block counts on.
    """

    def __init__(self, key: Any, states: Sequence[dict[Any, Any]], num_blocks: int) -> None:
        self._key = key
        self._vector = torch.stack([state[key] for state in states])
        for state, own in zip(states, self._vector.unbind(), strict=True):
            state[key].data = own
        self._of_blocks = torch.stack([self._vector[0]] * num_blocks)
        self.values = list(self._of_blocks.unbind())
        """The number of each block."""
        self._repeated = self._of_blocks[0].expand_as(self._vector)

    def pull(self) -> bool:
        """Read the parameters' number; return False if they differ."""
        if torch.equal(self._vector, self._repeated):
            return True
        self._of_blocks[:] = self._vector[0]
        return torch.equal(self._vector, self._repeated)

    def push(self) -> None:
        """Write the blocks' number to the parameters' state."""
        if len(self.values) > 1 and not torch.equal(self._of_blocks, self._of_blocks[0].expand_as(self._of_blocks)):
            raise RuntimeError(_differs(self._key))
        self._vector.copy_(self._repeated)


class Run:
    """Contiguous parameters that are updated as one, block by block. A single parameter, too, is a run if it has several blocks.

    Args:
        parameters: parameters that are adjacent in one storage, in order.
        states: the optimizer's state of each, with the same keys and numbers; its tensors are moved together. None: no state.
        per_element: keys of ``states`` that have a number for each element.
        held: the one of these keys whose tensors a bucket holds, if any.
        block: the number of elements of each block; the last one has what is left.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        states: list[dict[Any, Any]] | None,
        per_element: Sequence[Any] = (),
        held: Any = None,
        block: int = WHOLE,
    ) -> None:
        self.parameters, self.states, self._block = parameters, states, block
        flat = lay_out(parameters)
        self._size = flat.size()
        self.blocks = [torch.nn.Parameter(part, requires_grad=parameters[0].requires_grad) for part in flat.split(block)]
        """All elements, in the parameters' own memory."""
        self.block_states: list[dict[Any, Any]] | None = None
        """The states of `blocks`; entries per element use the memory of the parameters' state."""
        self._tensors: dict[Any, Sequence[Tensor]] = {}
        """Those of the blocks, for each key."""
        self._scalars: dict[Any, SharedScalar] = {}
        self._numbers: dict[Any, Any] = {}
        self._readers: dict[Any, Callable[[Any], Any]] = {}
        if states is not None:
            for key, value in states[0].items():
                if key in per_element:
                    self._tensors[key] = lay_out([state[key] for state in states]).split(block)
                elif isinstance(value, torch.Tensor):
                    self._scalars[key] = SharedScalar(key, states, len(self.blocks))
                    self._tensors[key] = self._scalars[key].values
                else:
                    self._numbers[key], self._readers[key] = value, itemgetter(key)
            self.block_states = [
                {**{key: parts[place] for key, parts in self._tensors.items()}, **self._numbers}
                for place in range(len(self.blocks))
            ]
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
            values = list(map(read, self.states))
            if values.count(values[0]) < len(values):
                return False
            self._numbers[key] = values[0]
            for state in self.block_states or ():
                state[key] = values[0]
        return True

    def push(self, found: list[dict[Any, Any] | None], store: MutableMapping[Any, Any]) -> bool:
        """Copy the states of `blocks` after a step to the parameters.

        Args:
            found: the state of each block, None if it has none.
            store: the optimizer's state, to which new entries of the parameters are added.

        Returns:
            Whether this run can be used again: False if state has appeared or disappeared.

        Raises:
            RuntimeError: a state is neither per element nor one number, or blocks differ, so this optimizer is not element-wise.
        """
        states = [state for state in found if state is not None]
        if not states:
            for parameter in self.parameters if self.states is not None else ():
                store.pop(parameter, None)
            return self.states is None
        keys = states[0].keys()
        if len(states) < len(found) or any(state.keys() != keys for state in states):
            raise RuntimeError(_differs([*keys]))
        lasting = self.states is not None and keys == self._tensors.keys() | self._numbers.keys()
        if self.states is None:
            self.states = [store.setdefault(parameter, {}) for parameter in self.parameters]
        for key in keys:
            values = [state[key] for state in states]
            places = self._tensors.get(key)
            if places is not None and all(map(is_, values, places)):
                pass
            elif places is not None and all(map(_alike, values, places)):  # an optimizer that does not work in place
                for state, place in zip(states, places, strict=True):
                    place.copy_(state[key])
                    state[key] = place
            elif key in self._numbers and _same_number(values):
                if values[0] != self._numbers[key]:
                    self._numbers[key] = values[0]
                    deque(map(dict.__setitem__, self.states, itertools.repeat(key), itertools.repeat(values[0])), maxlen=0)
            else:
                self._publish(key, values)
                lasting = False
        for scalar in self._scalars.values():
            scalar.push()
        for key in (self._tensors.keys() | self._numbers.keys()) - keys:
            deque(map(dict.pop, self.states, itertools.repeat(key), itertools.repeat(None)), maxlen=0)
        self.block_states = states
        return lasting

    def _publish(self, key: Any, values: list[Any]) -> None:
        """Add a new entry, of which each block has a value, to the parameters' states."""
        assert self.states is not None
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == len(values) and all(value.shape == own.shape for value, own in zip(tensors, self.blocks, strict=True)):
            parts: list[Any] = self._parts(torch.cat(tensors) if len(tensors) > 1 else tensors[0])
        elif len(tensors) == len(values) and all(value.numel() == 1 for value in tensors):
            if not all(torch.equal(value, tensors[0]) for value in tensors):
                raise RuntimeError(_differs(key))
            parts = [tensors[0].clone() for _ in self.parameters]
        elif _same_number(values):
            parts = [values[0]] * len(self.parameters)
        elif all(type(value) in NUMBERS for value in values):
            raise RuntimeError(_differs(key))
        else:
            value = values[0]
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise RuntimeError(
                f"the optimizer's state {key!r} of {self._size.numel()} elements in {len(self.parameters)} parameters is {what}, "
                "which cannot be split between them; this optimizer cannot be fused"
            )
        for state, part in zip(self.states, parts, strict=True):
            state[key] = part

    def find_gradients(self, pointers: list[int]) -> None:
        """Find out from the gradients' data pointers whether they are laid out as the parameters are."""
        first = pointers[0]
        self._in_place = pointers[-1] == first + self._offsets[-1] and pointers == [first + offset for offset in self._offsets]

    def take_gradient(self, row_major: bool) -> None:
        """Set the blocks' gradients for one step: views of the gradients, or of a copy if they are laid out differently.

        Args:
            row_major: whether the gradients of all runs are row-major.
        """
        if self._in_place and (row_major or all(map(torch.Tensor.is_contiguous, map(get_grad, self.parameters)))):
            first: Tensor = self.parameters[0].grad  # type: ignore[assignment]
            try:
                # Raises if they are neighbours by chance, as then the first one's storage ends before the second.
                flat = first.detach().as_strided(self._size, (1,))
            except RuntimeError:
                pass
            else:
                self._copy = None
                self._set_gradients(flat)
                return
        self._in_place = False
        grads = list(map(get_grad, self.parameters))
        if self._copy is None:
            self._copy = self.parameters[0].new_empty(self._size)
            self._copied = self._parts(self._copy)
        with torch.no_grad():
            if self._one_dimensional:
                torch.cat(grads, out=self._copy)  # twice as fast
            else:
                torch._foreach_copy_(self._copied, grads)
        self._set_gradients(self._copy)
        self._copy_version = self._copy._version

    def _set_gradients(self, flat: Tensor) -> None:
        for block, grad in zip(self.blocks, flat.split(self._block), strict=True):
            block.grad = grad

    def give_gradient_back(self) -> None:
        """Drop the blocks' gradients, after copying changes that the step made in them to the parameters' gradients."""
        copy = self._copy
        for block in self.blocks:
            block.grad = None
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
        if len(self.parameters) == 1:
            return
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
        """Register the blocks as parameters whose state is in a bucket, for which `QAdamOptimizer` checks."""
        first = registration(self.parameters[0])
        for block, tensor in zip(self.blocks, self._tensors[held], strict=True):
            known = Registration(first.name, first.module_name, partial(_constant, tensor), None)
            known.sink = first.sink
            block._bagua_registration = known  # type: ignore[attr-defined]


def _constant(tensor: Tensor, _: Tensor) -> Tensor:
    return tensor


def getter_of(parameter: Tensor) -> Getter | None:
    """Return what finds the effective tensor of ``parameter``, None if it is no bagua tensor; registering it again replaces it."""
    known: Registration | None = getattr(parameter, "_bagua_registration", None)
    return None if known is None else known.getter


def _alike(value: Any, place: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype, value.device) == (place.shape, place.dtype, place.device)


def _same_number(values: list[Any]) -> bool:
    """Return whether all blocks have the same immutable value."""
    return all(type(value) in NUMBERS for value in values) and values.count(values[0]) == len(values)


def _differs(key: Any) -> str:
    return f"the optimizer's state {key!r} differs between parts of parameters: elements affect each other, so it cannot be fused"
