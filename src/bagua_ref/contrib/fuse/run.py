"""Runs of adjacent parameters, each stepped as one flat parameter, and their memory (S6)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bagua_ref.base.utils import flatten

__all__ = [
    "NUMBERS", "PLAIN_TYPES", "SHORT", "Run", "attributes", "find_runs", "flatten_weights", "held_by_bucket", "is_expanded",
    "is_plain",
]  # fmt: skip

LONGEST_ON_CPU, LONGEST = 2**19, 2**24
"""About so many elements are stepped at once, as more of them fit no cache: without it, Adam takes 2.5 times as long."""

data_ptr, is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
get_grad, get_dtype = attrgetter("grad"), attrgetter("dtype")

SHORT = torch.float16, torch.bfloat16
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (int, float, bool, str, type(None))
"""Types of immutable values, which parameters can share."""


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` contains exactly its elements, in row-major order."""
    kind = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()
    return kind and tensor.is_contiguous() and not tensor.is_neg()


def is_expanded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has elements in one place; then torch's sums have other last bits than with a copy of it."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def attributes(parameter: Tensor) -> tuple[Any, ...] | None:
    """Return the attributes that users have given to ``parameter``, which its optimizer may read; None if some are mutable."""
    own = [(name, type(value), value) for name, value in vars(parameter).items() if not name.startswith("_bagua")]
    return tuple(own) if all(kind in NUMBERS for _, kind, _ in own) else None


def held_by_bucket(parameter: Tensor) -> Tensor | None:
    """Return the effective tensor of ``parameter`` - weight, gradient or momentum - that a live Bagua bucket holds, if any."""
    known = getattr(parameter, "_bagua_registration", None)
    if known is None or known.sink is None or known.sink() is None:
        return None
    held: Tensor | None = known.getter(parameter)
    return held


def flat_view(tensors: Sequence[Tensor], flats: Sequence[Tensor] = ()) -> Tensor | None:
    """Return the flat tensor of which row-major, non-empty ``tensors`` are the consecutive parts, None if there is none.

    They must lie in one storage or in one of ``flats``: neighbours by chance may be separated at any time.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    start, item = tensors[0].data_ptr(), tensors[0].element_size()
    if [tensor.data_ptr() for tensor in tensors] == list(itertools.accumulate(sizes[:-1], initial=start)):
        for whole in (tensors[0], *flats):
            storage = whole.untyped_storage()
            offset = start - storage.data_ptr()
            if offset >= 0 and offset + sum(sizes) <= storage.nbytes() and whole.dtype is tensors[0].dtype:
                return whole.detach().as_strided((sum(sizes) // item,), (1,), offset // item)
    return None


def neighbours(tensors: Iterable[Tensor], flats: Sequence[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Yield, by address, the longest lists of tensors that have a `flat_view`; a tensor without neighbours is its own list."""
    chain: list[Tensor] = []
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        if chain and flat_view((chain[-1], tensor), flats) is None:
            yield chain
            chain = []
        chain.append(tensor)
    if chain:
        yield chain


def flatten_weights(parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Move row-major weights into flat tensors, one for each kind and last first; yield each with the parameters in it.

    The order is that of buckets (S2.1), so that gradients and weights match. Each weight keeps a storage of its own, a part of the
    flat tensor's memory, as ``torch.save`` writes whole storages. Weights stay where they are if they are shared between
    processes or beside another one.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for p in reversed(parameters):
        shared = p.device.type not in ("cpu", "cuda") or (p.device.type == "cpu" and p.is_shared())
        if p.numel() and p.is_leaf and not shared and (own := attributes(p)) is not None:
            kinds.setdefault((p.dtype, p.device, p.requires_grad, own), []).append(p)
    for candidates in kinds.values():
        lonely = {id(chain[0]) for chain in neighbours(candidates) if len(chain) == 1}
        moving = [p for p in candidates if id(p) in lonely]
        if len(moving) > 1:
            flat = flatten(moving).detach()
            for p, part in zip(moving, flat.split([p.numel() for p in moving]), strict=True):
                p.data = from_dlpack(part.view(p.shape))
            yield flat, moving


def find_runs(parameters: Sequence[Tensor], store: MutableMapping[Any, Any], flats: Sequence[Tensor]) -> Iterator[Run]:
    """Yield the runs among ``parameters`` of one group, which have gradients, and maybe state in ``store``."""
    for chain in neighbours(parameters, flats):
        longest = LONGEST_ON_CPU if chain[0].device.type == "cpu" else LONGEST
        totals = itertools.accumulate(p.numel() for p in chain)
        alike = {id(p): (_signature(p, store.get(p)), total // longest) for p, total in zip(chain, totals, strict=True)}
        for (signature, _), members in itertools.groupby(chain, key=lambda p: alike[id(p)]):
            part = list(members)
            if len(part) > 1 and signature is not None:
                flat = flat_view(part, flats)
                assert flat is not None, "neighbours are not adjacent"
                yield Run(part, flat, [store[p] for p in part] if part[0] in store else None)


ELEMENTS, ONE, NUMBER = "a number per element", "a tensor of one number", "a number"


def _kind(value: Any, parameter: Tensor) -> str | None:
    """Return the kind of a state of ``parameter``, None if it cannot be part of a run."""
    if not isinstance(value, Tensor):
        return NUMBER if type(value) in NUMBERS else None
    if value.requires_grad or not is_plain(value):
        return None
    return ELEMENTS if value.shape == parameter.shape else ONE if value.numel() == 1 else None


def _signature(parameter: Tensor, state: Any) -> tuple[Any, ...] | None:
    """Return the properties that parameters of a run have in common, None if the parameter cannot be in a run."""
    own, held = attributes(parameter), held_by_bucket(parameter)
    is_state_held = not (held is None or held is parameter or held is parameter.grad)
    if own is None or is_state_held or not (state is None or type(state) is dict):
        return None
    entries: list[tuple[Any, ...]] = []
    for key, value in (state or {}).items():
        kind = _kind(value, parameter)
        if kind is None:
            return None
        of_tensor = (value.dtype, value.device) if isinstance(value, Tensor) else (type(value), value)
        entries.append((key, kind, *of_tensor, *((value.shape, value.item()) if kind == ONE else ())))
    return parameter.dtype, parameter.device, parameter.requires_grad, own, state is None, entries


class Run:
    """Adjacent parameters and the flat one, whose parts they are, that is stepped in their place.

    ``states`` are their entries of the optimizer's state, whose tensors are put beside each other, and None if there are none.
    """

    def __init__(self, parameters: list[Tensor], flat: Tensor, states: list[dict[Any, Any]] | None) -> None:
        self.parameters, self.states = parameters, states
        self.flat = torch.nn.Parameter(flat, requires_grad=parameters[0].requires_grad)
        for name, _, value in attributes(parameters[0]) or ():
            setattr(self.flat, name, value)
        self.state: dict[Any, Any] | None = None if states is None else {}  # that of the flat parameter
        self._parts: dict[Any, tuple[list[Any], list[int]]] = {}  # for each key: the parameters' entries, addresses of tensors
        self._vectors: dict[Any, Tensor] = {}  # for tensors of one number, such as ``step``: those of all parameters
        for key, value in (states or [{}])[0].items():
            entries, kind = [state[key] for state in states or ()], _kind(value, parameters[0])
            whole = flat_view(entries) if kind == ELEMENTS else None
            joined = whole if whole is not None else flatten(entries) if kind == ELEMENTS else value
            self._set_state(key, joined.clone() if kind == ONE else joined, entries)
        # Only these can change their dtype in place without changing their size: the others are floats that need gradients.
        self._convertible = [p for p in parameters if p.dtype in SHORT or not p.requires_grad]
        self._attributes = list(map(vars, parameters))
        self._expected = self._describe(), list(map(dict, self._attributes))
        self._offsets = [p.data_ptr() - parameters[0].data_ptr() for p in parameters]
        self._one_dimensional = all(p.ndim == 1 for p in parameters)
        self._pointers: list[int] = []  # of the gradients at the last step
        self._in_place = False  # whether they lie as the weights do
        # A copy of gradients that lie otherwise, and its parts; kept, because allocating it costs more than the step.
        self._copy: Tensor | None = None
        self._copied: list[Tensor] = []
        self._copy_version = 0
        self._seen: Tensor | None = None  # the first gradient of the last step

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return the part of ``flat`` that belongs to each parameter, in its shape."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _set_state(self, key: Any, value: Any, entries: list[Any] | None = None) -> None:
        """Make ``value`` the flat parameter's state, and its parts those of the parameters, which have ``entries`` already."""
        parts: list[Any] = [value] * len(self.parameters)
        self._vectors.pop(key, None)
        if isinstance(value, Tensor) and value.shape == self.flat.shape:
            parts = self._split(value)
        elif isinstance(value, Tensor) and value.numel() == 1:
            self._vectors[key] = torch.stack(parts)
            parts = list(self._vectors[key].unbind())
        elif type(value) not in NUMBERS:
            what = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            count = f"{self.flat.numel()} elements in {len(self.parameters)} parameters"
            raise RuntimeError(f"state {key!r} of {count} is a {what}, which cannot be split: this optimizer cannot be fused")
        if entries is not None and isinstance(value, Tensor):
            for entry, part in zip(entries, parts, strict=True):
                entry.data = part
            parts = entries
        for state, part in zip(self.states or (), parts, strict=True):
            state[key] = part
        self._parts[key] = parts, list(map(data_ptr, parts)) if isinstance(value, Tensor) else []
        self.state = {**(self.state or {}), key: value}

    def _describe(self) -> tuple[Any, ...]:
        known = getattr(self.parameters[0], "_bagua_registration", None)
        dtypes = list(map(get_dtype, self._convertible))
        return list(map(data_ptr, self.parameters)), list(map(Tensor.numel, self.parameters)), dtypes, known and known.getter

    def is_current(self) -> bool:
        """Read the numbers of the state; return False if anything else but gradients has changed since the last step."""
        if (self._describe(), self._attributes) != self._expected or not all(map(is_contiguous, self.parameters)):
            return False
        if self.states is None or self.state is None:
            return True
        if sum(map(len, self.states)) != len(self.states) * len(self.state):
            return False
        for key, (parts, pointers) in self._parts.items():
            if not all(map(is_, map(itemgetter(key), self.states), parts)):
                return False
            if pointers and list(map(data_ptr, parts)) != pointers:
                return False
        for key, vector in self._vectors.items():
            value = self.state[key]
            if not torch.equal(vector, value.expand_as(vector)) and not torch.equal(
                vector, value.copy_(vector[0]).expand_as(vector)
            ):
                return False
        return True

    def give_state_back(self, found: dict[Any, Any] | None, store: MutableMapping[Any, Any]) -> None:
        """Put the parts of the flat parameter's state after a step, ``found``, into the parameters' entries of ``store``."""
        before, self.state = self.state or {}, found
        if found is None:
            for parameter in self.parameters if self.states is not None else ():
                store.pop(parameter, None)
            self.states = None
            return
        if self.states is None:
            self.states = [store.setdefault(parameter, {}) for parameter in self.parameters]
        for key, value in list(found.items()):
            if key not in before or value is not before[key]:
                self._set_state(key, value)
        for key, vector in self._vectors.items():
            vector.copy_(found[key])
        for key in before.keys() - found.keys():
            del self._parts[key]
            self._vectors.pop(key, None)
            for state in self.states:
                state.pop(key, None)

    def take_gradient(self, keep: bool) -> bool:
        """Set the flat gradient for one step: a view of the gradients if they lie as the weights do, else a copy of them.

        If ``keep``, gradients become parts of the copy if they are still those of the last step and only these parameters use
        them. After ``zero_grad()``, which sets them to None, moving new ones would cost time in each step.

        Returns:
            False, with nothing changed, if a gradient has elements in one place.

        Raises:
            TypeError, RuntimeError: a gradient is None, or not dense.
        """
        grads = list(map(get_grad, self.parameters))
        pointers, row_major = list(map(data_ptr, grads)), all(map(is_contiguous, grads))
        if not row_major and any(map(is_expanded, grads)):
            return False
        if pointers != self._pointers:
            first, self._pointers = pointers[0], pointers  # the last is asked first, as new gradients rarely lie so
            self._in_place = pointers[-1] == first + self._offsets[-1] and pointers == [first + off for off in self._offsets]
        if self._in_place and row_major:
            try:
                self.flat.grad = grads[0].detach().as_strided(self.flat.shape, (1,))
            except RuntimeError:  # neighbours by chance: the first one's storage ends before the second
                self._in_place = False
            else:
                self._copy = self._seen = None
                return True
        if self._copy is None:
            self._copy = torch.empty_like(self.flat, requires_grad=False)
            self._copied = self._split(self._copy)
        with torch.no_grad():
            if self._one_dimensional:
                torch.cat(grads, out=self._copy)  # twice as fast
            else:
                torch._foreach_copy_(self._copied, grads)
        self.flat.grad, self._copy_version = self._copy, self._copy._version
        if keep and self._seen is grads[0] and all(map(_is_movable, self.parameters, grads)):
            for grad, part in zip(grads, self._copied, strict=True):
                grad.data = part
            self._copy = None
        self._seen = grads[0]
        return True

    def give_gradient_back(self) -> None:
        """Drop the flat gradient, after copying changes that the step made in a copy to the parameters' gradients."""
        self.flat.grad = None
        if self._copy is not None and self._copy._version != self._copy_version:  # foreach=True with nesterov=True
            with torch.no_grad():
                torch._foreach_copy_(list(map(get_grad, self.parameters)), self._copied)
        if self._copy is not None and self._copy.device.type != "cpu":  # there, memory is scarcer and allocation is fast
            self._copy = None


def _is_movable(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether only the parameter uses the memory of its gradient."""
    owned = is_plain(grad) and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return owned and held_by_bucket(parameter) is not grad and not (grad.device.type == "cpu" and grad.is_shared())
