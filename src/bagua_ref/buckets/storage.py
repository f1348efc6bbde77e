"""Registered tensors, and the flat storage of a bucket: either the tensors' own memory, or a
separate buffer (S1, S2.2, S2.3).

A proxy tensor is the one that users register; its effective tensor is the one that communication
works on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, eq
from typing import TypeAlias, cast

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.base import runtime
from bagua_ref.base.memory import Layout, check_beside
from bagua_ref.base.utils import NotCopied, check_contiguous, overlapping
from bagua_ref.types import ReadinessSink

Getter: TypeAlias = Callable[[Tensor], Tensor | None]
Setter: TypeAlias = Callable[[Tensor, Tensor], object]

_unnamed = itertools.count()


class Registration(NotCopied):
    """Record of a proxy tensor: its name, the access to its effective tensor, and the engine to
    notify when it is ready.

    Attributes:
        name: the tensor's name, unique within its module's buckets.
        module_name: the wrapped module that the tensor belongs to, or "".
        getter: function that returns the effective tensor of a proxy; None if there is none yet,
            like a gradient after ``zero_grad()``.
        setter: function that replaces the effective tensor; None: its storage is replaced.
        sink: the engine to notify when the tensor is ready; set when its bucket is registered. A
            weak reference, so that a tensor that outlives the training does not keep it alive.
    """

    __slots__ = ("getter", "module_name", "name", "setter", "sink")

    def __init__(
        self, name: str, module_name: str, getter: Getter | None, setter: Setter | None
    ) -> None:
        self.name, self.module_name = name, module_name
        self.connect(getter, setter)

    def __repr__(self) -> str:
        return f"Registration({self.name!r} of module {self.module_name!r})"

    def __str__(self) -> str:
        return f"tensor {self.name!r}"

    def connect(self, getter: Getter | None, setter: Setter | None) -> None:
        """Set the getter (None: the proxy itself) and setter of the effective tensor; remove the
        engine.
        """
        self.getter: Getter = _itself if getter is None else getter
        self.setter = setter
        self.sink: weakref.ref[ReadinessSink] | None = None

    def replace(self, proxy: Tensor, tensor: Tensor) -> None:
        """Replace the effective tensor with ``tensor``."""
        if self.setter is not None:
            self.setter(proxy, tensor)
            return
        effective = self.getter(proxy)
        if effective is None:
            raise ValueError(
                f"tensor {self.name!r} has no effective tensor, and no setter_closure to put one in"
                " place"
            )
        effective.data = tensor


def registration(tensor: Tensor) -> Registration:
    """Return the registration of ``tensor``.

    Raises:
        ValueError: ``tensor`` is not a bagua tensor.
    """
    found: Registration | None = getattr(tensor, "_bagua_registration", None)
    if found is None:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not a bagua tensor; call"
            " tensor.ensure_bagua_tensor(name) first"
        )
    return found


def held_by_bucket(parameter: Tensor) -> Tensor | None:
    """Return the effective tensor (weight, gradient or momentum) of ``parameter`` that is in a live
    Bagua bucket, or None.
    """
    known: Registration | None = getattr(parameter, "_bagua_registration", None)
    return (
        known.getter(parameter)
        if known is not None and known.sink is not None and known.sink() is not None
        else None
    )


def register(
    tensor: Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter: Getter | None = None,
    setter: Setter | None = None,
) -> Tensor:
    """Register ``tensor`` as `bagua_ref.tensor.BaguaTensor.ensure_bagua_tensor` does; return it."""
    for argument, text in (("name", name), ("module_name", module_name)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{argument}={text!r} must be a string or None")
    for argument, closure in (("getter_closure", getter), ("setter_closure", setter)):
        if closure is not None and not callable(closure):
            raise TypeError(f"{argument}={closure!r} must be callable or None")
    known: Registration | None = getattr(tensor, "_bagua_registration", None)
    if known is not None and known.module_name == (module_name or ""):
        if name is not None and name != known.name:
            raise ValueError(
                f"name={name!r}: this tensor is already registered as {known.name!r} in module"
                f" {known.module_name!r}"
            )
        known.connect(getter, setter)
        return tensor
    if name is None:
        name = f"bagua_tensor_{next(_unnamed)}"
    tensor._bagua_registration = Registration(name, module_name or "", getter, setter)  # type: ignore[attr-defined]
    return tensor


def check_shared(tensors: list[Tensor], name: str) -> list[Tensor]:
    """Return the effective tensors of the bucket ``name``, after checking that they can share it
    (S2.6).

    Raises:
        ValueError: the list is empty, a name appears twice, tensors overlap or are on different
            devices, or an effective tensor is missing.
        TypeError: mixed dtypes, or an entry is not a tensor.
    """
    if not tensors:
        raise ValueError(f"tensors=[] of bucket {name!r} must hold at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"tensors of bucket {name!r} must be torch tensors, not {type(tensor).__name__}"
            )
    names = [registration(tensor).name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"tensors {names} of bucket {name!r}: each name may appear only once")
    effective = effective_tensors(tensors, name)
    for what, values, error in (
        ("dtypes", [t.dtype for t in effective], TypeError),
        ("devices", [t.device for t in effective], ValueError),
    ):
        if len(set(values)) > 1:
            raise error(
                f"tensors of bucket {name!r} have different {what}:"
                f" {sorted(set(map(str, values)))}; they must be equal"
            )
    if (pair := overlapping(effective)) is not None:
        raise ValueError(
            f"tensors {names[pair[0]]!r} and {names[pair[1]]!r} of bucket {name!r} overlap in"
            " memory"
        )
    return effective


def check_apart(flat: Tensor, name: str, **tensors: Tensor) -> list[Tensor]:
    """Return the effective tensors, after checking that they fit bucket ``name`` and overlap
    neither its flat tensor nor each other.

    Raises:
        ValueError: a tensor is not a bagua tensor, has the wrong size, shape or device, or overlaps
            another.
        TypeError: an entry has another dtype than the bucket, or is not a tensor.
    """
    others = {f"bucket {name!r}": flat}
    for argument, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument} must be a torch.Tensor, not {type(tensor).__name__}")
        if getattr(tensor, "_bagua_registration", None) is None:
            raise ValueError(
                f"{argument} is not a bagua tensor; make it by"
                " bucket.flattened_tensor().ensure_bagua_tensor()"
            )
        (effective,) = effective_tensors([tensor], argument)
        for other_name, other in others.items():
            check_beside(other_name, other, argument, effective)
        others[argument] = effective.detach()
    return [others[argument] for argument in tensors]


def effective_tensor(proxy: Tensor) -> Tensor | None:
    """Return the effective tensor of ``proxy``, or None if there is none yet."""
    return registration(proxy).getter(proxy)


def effective_tensors(tensors: list[Tensor], name: str) -> list[Tensor]:
    """Return the effective tensors of bucket ``name``.

    Raises:
        ValueError: an effective tensor is missing.
    """
    found = []
    for proxy in tensors:
        tensor = effective_tensor(proxy)
        if tensor is None:
            raise ValueError(
                f"tensor {registration(proxy).name!r} of bucket {name!r} has no effective tensor; "
                "for a gradient call bagua_ensure_grad() first"
            )
        found.append(tensor)
    return found


class FlatStorage:
    """The flat tensor that a bucket's operations work on, and the copies between it and the
    bucket's tensors.

    Args:
        tensors: bagua tensors.
        name: name of the bucket.
        flatten: move the effective tensors into one contiguous storage, unless they already are;
            otherwise `load` gathers them into a buffer and `copy_from_flat` copies that into them.
            The order of elements is the same in both.
        alignment: the number of elements, padding included, is a multiple of it.

    Attributes:
        layouts: layout of each effective tensor in flat storage, which gives the order of its
            elements there (S2.3): its strides at creation, or row-major if it is not dense.
        filled: the number of elements, without padding.
        numel: the number of elements, padding included.
        padding_tensor: the padding, or None.

    Raises:
        ValueError: see `check_shared`.
        TypeError: likewise.
    """

    kernels: KernelBackend

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int) -> None:
        self.tensors, self.name, self.flatten = list(tensors), name, flatten
        effective = check_shared(self.tensors, name)
        self._registered = [registration(tensor) for tensor in tensors]
        self.dtype, self.device = effective[0].dtype, effective[0].device
        self.layouts = [Layout.of(t) for t in effective]
        self._shapes = [layout.shape for layout in self.layouts]
        self._one_dimensional = all(len(shape) == 1 for shape in self._shapes)
        self.filled = sum(t.numel() for t in effective)
        self.numel = self.filled + -self.filled % alignment
        self.padding_tensor: Tensor | None = None
        if self.numel > self.filled:
            zeros = torch.zeros(self.numel - self.filled, dtype=self.dtype, device=self.device)
            self.padding_tensor = register(zeros, f"bagua_padding_tensor_bucket_{name}")
        self._flat: Tensor | None = None
        """If flat, the effective tensors' own storage; else a buffer, allocated at first use."""
        self._views: list[Tensor] = []
        """If flat, views of ``_flat`` in each tensor's shape and strides."""
        if flatten:
            self._move_together(effective)
        self._positions = list(_positions(self._views))
        self._memory = range(0)
        """If flat, the address range of the storage."""
        if self._flat is not None:
            storage = self._flat.untyped_storage()
            self._memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def effective_tensors(self) -> list[Tensor]:
        """Return the effective tensors, without padding.

        Raises:
            ValueError: an effective tensor is missing.
        """
        return effective_tensors(self.tensors, self.name)

    def check_flatten(self) -> bool:
        """Return whether the effective tensors and the padding are contiguous in memory (S2.3).

        A missing gradient, as before the first backward pass or after ``zero_grad()``, counts as
        being in its place.
        """
        effective = [effective_tensor(proxy) for proxy in self.tensors]
        if not self.flatten and None in effective:
            return False
        present = [
            self._views[place] if tensor is None else tensor
            for place, tensor in enumerate(effective)
        ]
        return self._are_contiguous(present)

    def _are_contiguous(self, effective: Sequence[Tensor]) -> bool:
        return check_contiguous(
            [
                *self._in_order(effective),
                *([self.padding_tensor] if self.padding_tensor is not None else []),
            ]
        )

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Split ``flat``, which has the bucket's size, into views with the effective tensors'
        shapes and strides.
        """
        parts = flat[: self.filled].split([shape.numel() for shape in self._shapes])
        return [layout.view(part) for layout, part in zip(self.layouts, parts, strict=True)]

    def _move_together(self, effective: Sequence[Tensor]) -> None:
        """Move the effective tensors into one contiguous storage, unless they already share one
        (S2.3).
        """
        adjacent = self._are_contiguous(effective)
        if adjacent and self.numel:
            first = next(t for t in effective if t.numel()).detach()
            self._flat = first.as_strided((self.numel,), (1,))
        else:
            self._flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._views = self.views_of(self._flat)
        if adjacent:
            return
        torch._foreach_copy_(self._views, [t.detach() for t in effective])
        for tensor, view in zip(effective, self._views, strict=True):
            tensor.data = view
        if self.padding_tensor is not None:
            self._flat[self.filled :] = 0
            self.padding_tensor.data = self._flat[self.filled :]

    @torch.no_grad()  # gradients of backward(create_graph=True) require gradients
    def load(self) -> Tensor:
        """Return the flat tensor with the current values of the effective tensors and zero padding.

        If ``flatten``, the effective tensors are views of it from now on.

        Raises:
            ValueError: a tensor has another shape or dtype than when the bucket was made.
            NotImplementedError: a tensor is sparse.
        """
        if self._flat is None:
            self._flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        if self.padding_tensor is not None:
            self._flat[self.filled :] = 0
        effective = [
            known.getter(proxy) for known, proxy in zip(self._registered, self.tensors, strict=True)
        ]
        kinds = {None if tensor is None else (tensor.layout, tensor.dtype) for tensor in effective}
        # Much faster than one check for each.
        all_fit = kinds == {(torch.strided, self.dtype)} and all(
            map(eq, map(_shape, effective), self._shapes)
        )
        dense = cast("list[Tensor]", effective) if all_fit else self._filled_up(effective)
        (self._move_in if self.flatten else self._gather)(dense)
        return self._flat

    def _gather(self, effective: list[Tensor]) -> None:
        for place, tensor in enumerate(effective):
            if any(
                size > 1 and not stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ):
                # the result needs room for each element
                effective[place] = self.layouts[place].copy_of(tensor)
                self._registered[place].replace(self.tensors[place], effective[place])
        runtime.hold(effective, self.device)
        self.kernels.gather_flat(
            self._in_order(effective), cast("Tensor", self._flat)[: self.filled]
        )

    def _move_in(self, effective: list[Tensor]) -> None:
        """Move effective tensors that are outside flat storage into it."""
        places: Sequence[int] = range(len(effective))
        outside, pointers = effective, list(map(torch.Tensor.data_ptr, effective))
        # else all lie elsewhere
        if max(pointers) >= self._memory.start and min(pointers) < self._memory.stop:
            places = [
                place
                for place, position in enumerate(_positions(effective))
                if position != self._positions[place]
            ]
            # Those that lie in other tensors' places are copied first: they could be overwritten
            # before they are read.
            outside = [
                effective[place].clone() if pointers[place] in self._memory else effective[place]
                for place in places
            ]
        if outside:
            # a view was the gradient, and its ``data`` was replaced
            if not all(map(eq, _positions(self._views), self._positions)):
                self._views = self.views_of(cast("Tensor", self._flat))
            views = [self._views[place] for place in places]
            runtime.hold(outside, self.device)
            if outside is effective and self._one_dimensional:
                # takes half the time of the call below
                torch.cat(outside, out=cast("Tensor", self._flat)[: self.filled])
            else:
                torch._foreach_copy_(views, outside)
            for place, view in zip(places, views, strict=True):
                self._registered[place].replace(self.tensors[place], view)

    def _filled_up(self, effective: Sequence[Tensor | None]) -> list[Tensor]:
        """Return ``effective`` with zeros for missing gradients; raise for a tensor that does not
        fit.
        """
        found = []
        for place, (tensor, shape, known) in enumerate(
            zip(effective, self._shapes, self._registered, strict=True)
        ):
            if tensor is None:
                tensor = self.layouts[place].zeros(self.dtype, self.device)
                known.replace(self.tensors[place], tensor)
            if tensor.layout is not torch.strided:
                raise NotImplementedError(
                    f"tensor {known.name!r} is {tensor.layout}; only dense ones can be"
                    " communicated: use sparse=False"
                )
            if tensor.shape != shape or tensor.dtype is not self.dtype:
                raise ValueError(
                    f"tensor {known.name!r} has shape {tuple(tensor.shape)} and {tensor.dtype}, but"
                    f" its bucket was made for shape {tuple(shape)} and {self.dtype}; make the"
                    " bucket, or wrap the module, after changing them"
                )
            found.append(tensor)
        return found

    def copy_from_flat(self, flat: Tensor) -> None:
        """Copy ``flat``, which has the bucket's size, into the effective tensors; padding is not
        copied.
        """
        if flat.numel() != self.numel:
            raise ValueError(
                f"flat has {flat.numel()} elements; bucket {self.name!r} has {self.numel},"
                " including padding"
            )
        effective = self.effective_tensors()
        runtime.hold(effective, self.device)
        self.kernels.scatter_flat(flat[: self.filled], self._in_order(effective))

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a view of each tensor, of any strides, with its elements in the order of flat
        storage.
        """
        return [
            layout.in_order(tensor.detach())
            for layout, tensor in zip(self.layouts, tensors, strict=True)
        ]


_shape = attrgetter("shape")


def _positions(tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the address and strides of each tensor; an iterator, because a list of thousands of
    tuples would trigger the garbage collector.
    """
    return zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
