"""Proxy and effective tensors: the tensors that users register, and the ones that communication works on (S1)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from bagua_ref.base.memory import Layout, check_beside
from bagua_ref.base.utils import NotCopied, overlapping
from bagua_ref.types import BackendTensor, ReadinessSink

if TYPE_CHECKING:
    Getter = Callable[[Tensor], Tensor | None]
    Setter = Callable[[Tensor, Tensor], object]

__all__ = [
    "BaguaTensor",
    "RegisteredTensor",
    "Registration",
    "align",
    "check_apart",
    "check_shared",
    "effective_tensor",
    "effective_tensors",
    "registration",
    "with_aligned_grad",
]

_unnamed = itertools.count()


class Registration(NotCopied):
    """Record of a proxy tensor: its name, the access to its effective tensor, and the engine that waits for it.

    Attributes:
        name: unique within its module's buckets.
        module_name: the wrapped module that the tensor belongs to, or "".
        getter: returns the effective tensor of a proxy, None if there is none yet, like a gradient after ``zero_grad()``.
        setter: replaces the effective tensor; None: its storage is replaced.
        sink: the engine to notify when the tensor is ready; set when its bucket is registered. A weak reference, so that a tensor
            that outlives the training does not keep it alive.
    """

    __slots__ = ("getter", "module_name", "name", "setter", "sink")

    def __init__(self, name: str, module_name: str, getter: Getter | None, setter: Setter | None) -> None:
        self.name, self.module_name = name, module_name
        self.connect(getter, setter)

    def __repr__(self) -> str:
        return f"Registration({self.name!r} of module {self.module_name!r})"

    def __str__(self) -> str:
        return f"tensor {self.name!r}"

    def connect(self, getter: Getter | None, setter: Setter | None) -> None:
        """Find and replace the effective tensor by ``getter`` (None: it is the proxy itself) and ``setter``; forget the engine."""
        self.getter: Getter = _itself if getter is None else getter
        self.setter = setter
        self.sink: weakref.ref[ReadinessSink] | None = None

    def replace(self, proxy: Tensor, tensor: Tensor) -> None:
        """Make ``tensor`` the effective tensor."""
        if self.setter is not None:
            self.setter(proxy, tensor)
            return
        effective = self.getter(proxy)
        if effective is None:
            raise ValueError(f"tensor {self.name!r} has no effective tensor, and no setter_closure to put one in place")
        effective.data = tensor


class RegisteredTensor(BackendTensor):
    """A bagua tensor as an argument of collectives, which use its effective tensor at the time of the call (S1).

    Tensors hold no reference to theirs, which would be a cycle.
    """

    def __init__(self, tensor: Tensor) -> None:
        registration(tensor)
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"RegisteredTensor({self.name!r} of module {self.module_name!r})"

    @property
    def name(self) -> str:
        """The name under which the tensor is registered."""
        return registration(self._tensor).name

    @property
    def module_name(self) -> str:
        """The wrapped module that the tensor belongs to, or ""."""
        return registration(self._tensor).module_name

    def effective_tensor(self) -> Tensor:
        """Return the effective tensor, detached.

        Raises:
            ValueError: there is no effective tensor.
        """
        effective = effective_tensor(self._tensor)
        if effective is None:
            raise ValueError(f"tensor {self.name!r} has no effective tensor; for a gradient call bagua_ensure_grad() first")
        return effective.detach()

    def data_ptr(self) -> int:
        """Return the address of the effective tensor's first element."""
        return self.effective_tensor().data_ptr()

    def num_elements(self) -> int:
        """Return the effective tensor's number of elements."""
        return self.effective_tensor().numel()


def registration(tensor: Tensor) -> Registration:
    """Return the registration of ``tensor``.

    Raises:
        ValueError: it is not a bagua tensor.
    """
    found: Registration | None = getattr(tensor, "_bagua_registration", None)
    if found is None:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not a bagua tensor; call tensor.ensure_bagua_tensor(name) first"
        )
    return found


def align(tensor: Tensor, parameter: Tensor) -> None:
    """Give ``tensor`` the strides that ``parameter``, of the same shape, has in flat storage (S2.3); values and identity stay.

    Gradients and optimizer state need them: torch's fused optimizers go through all of them in the order of memory.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():
        return  # most are
    layout = Layout.of(parameter)
    if not layout.describes(tensor):
        tensor.data = layout.copy_of(tensor)


def with_aligned_grad(parameter: Tensor) -> Tensor:
    """Return ``parameter`` with a gradient, of zeros if it had none, in the strides that `align` gives."""
    gradient = BaguaTensor.bagua_ensure_grad(parameter).grad  # type: ignore[arg-type]
    if gradient is not None and gradient.layout is torch.strided:
        align(gradient, parameter)
    return parameter


def check_shared(tensors: list[Tensor], name: str) -> list[Tensor]:
    """Return the effective tensors after checking that they can share the bucket ``name`` (S2.6).

    Raises:
        ValueError: the list is empty, a name appears twice, tensors overlap or are on different devices, or an effective tensor is
            missing.
        TypeError: mixed dtypes, or an entry is not a tensor.
    """
    if not tensors:
        raise ValueError(f"tensors=[] of bucket {name!r} must hold at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors of bucket {name!r} must be torch tensors, not {type(tensor).__name__}")
    names = [registration(tensor).name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"tensors {names} of bucket {name!r}: each name may appear only once")
    effective = effective_tensors(tensors, name)
    for what, values, error in (
        ("dtypes", [t.dtype for t in effective], TypeError),
        ("devices", [t.device for t in effective], ValueError),
    ):
        if len(set(values)) > 1:
            raise error(f"tensors of bucket {name!r} have different {what}: {sorted(set(map(str, values)))}; they must be equal")
    if (pair := overlapping(effective)) is not None:
        raise ValueError(f"tensors {names[pair[0]]!r} and {names[pair[1]]!r} of bucket {name!r} overlap in memory")
    return effective


def check_apart(flat: Tensor, name: str, **tensors: Tensor) -> list[Tensor]:
    """Return the effective tensors after checking that they fit bucket ``name`` and overlap neither its flat tensor nor each other.

    Raises:
        ValueError: one is not a bagua tensor, its size, shape or device does not fit, or two overlap.
        TypeError: one has another dtype than the bucket, or is not a tensor.
    """
    others = {f"bucket {name!r}": flat}
    for argument, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument} must be a torch.Tensor, not {type(tensor).__name__}")
        if not BaguaTensor.is_bagua_tensor(tensor):  # type: ignore[arg-type]
            raise ValueError(f"{argument} is not a bagua tensor; make it by bucket.flattened_tensor().ensure_bagua_tensor()")
        (effective,) = effective_tensors([tensor], argument)
        for other_name, other in others.items():
            check_beside(other_name, other, argument, effective)
        others[argument] = effective.detach()
    return [others[argument] for argument in tensors]


def effective_tensor(proxy: Tensor) -> Tensor | None:
    """Return the effective tensor of ``proxy``, None if there is none yet."""
    return registration(proxy).getter(proxy)


def effective_tensors(tensors: list[Tensor], name: str) -> list[Tensor]:
    """Return the effective tensors of bucket ``name``.

    Raises:
        ValueError: one is missing.
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


class BaguaTensor:
    """The methods that bagua_ref puts on ``torch.Tensor``.

    Source: ``bagua/torch_api/tensor.py`` of Bagua 0.9.
    """

    def is_bagua_tensor(self) -> bool:
        """Return whether this tensor is registered as a proxy."""
        return getattr(self, "_bagua_registration", None) is not None

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Tensor:
        """Register this tensor, in place, as the proxy of ``getter_closure(self)``, or of itself (S1); return it.

        Registering again replaces the closures. Within one module the name cannot change.

        Args:
            name: unique within its module's buckets; None generates one.
            module_name: the wrapped module that the tensor belongs to.
            getter_closure: returns the effective tensor, e.g. ``lambda p: p.grad``.
            setter_closure: replaces the effective tensor, e.g. ``lambda p, t: setattr(p, "grad", t)``.

        Raises:
            ValueError: it already has another name in this module.

        >>> torch.ones(2).ensure_bagua_tensor("w").is_bagua_tensor()
        True
        """
        tensor = _as_tensor(self)
        for argument, text in (("name", name), ("module_name", module_name)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{argument}={text!r} must be a string or None")
        for argument, closure in (("getter_closure", getter_closure), ("setter_closure", setter_closure)):
            if closure is not None and not callable(closure):
                raise TypeError(f"{argument}={closure!r} must be callable or None")
        known: Registration | None = getattr(tensor, "_bagua_registration", None)
        if known is not None and known.module_name == (module_name or ""):
            if name is not None and name != known.name:
                raise ValueError(
                    f"name={name!r}: this tensor is already registered as {known.name!r} in module {known.module_name!r}"
                )
            known.connect(getter_closure, setter_closure)
            return tensor
        if name is None:
            name = f"bagua_tensor_{next(_unnamed)}"
        tensor._bagua_registration = Registration(name, module_name or "", getter_closure, setter_closure)  # type: ignore[attr-defined]
        return tensor

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Tensor:
        """Return a new bagua tensor that shares this tensor's storage; this tensor is not registered.

        If this tensor later moves to another storage, the new one does not follow. Arguments as in `ensure_bagua_tensor`.
        """
        view: Tensor = _as_tensor(self).detach()
        return cast("BaguaTensor", view).ensure_bagua_tensor(name, module_name, getter_closure, setter_closure)

    def bagua_getter_closure(self) -> Tensor | None:
        """Return the effective tensor (S1)."""
        return effective_tensor(_as_tensor(self))

    def bagua_setter_closure(self, tensor: Tensor) -> None:
        """Make ``tensor`` the effective tensor."""
        registration(_as_tensor(self)).replace(_as_tensor(self), tensor)

    def bagua_backend_tensor(self) -> RegisteredTensor:
        """Return an object that collectives of a communicator accept in place of this tensor (S3.9).

        >>> x = torch.ones(2).ensure_bagua_tensor("x")
        >>> x.bagua_backend_tensor().num_elements()
        2
        """
        return RegisteredTensor(_as_tensor(self))

    def bagua_ensure_grad(self) -> Tensor:
        """Set the gradient to zeros if there is none; return this parameter.

        The gradient has this parameter's strides if it is dense (S2.3), else it is row-major.
        """
        tensor = _as_tensor(self)
        if tensor.grad is None:
            tensor.grad = Layout.of(tensor).zeros(tensor.dtype, tensor.device)
        return tensor

    def bagua_mark_communication_ready(self) -> None:
        """Mark this tensor ready; its bucket runs when all of its tensors are (S2.4).

        On CUDA the bucket's operations wait for everything queued so far on the current stream.

        Raises:
            ValueError: the tensor is in no registered bucket, or its bucket cannot be loaded.
        """
        found = registration(_as_tensor(self))
        sink = None if found.sink is None else found.sink()
        if sink is None:
            raise ValueError(f"tensor {found.name!r} is in no registered bucket, so it cannot be marked ready")
        sink.mark_ready(_as_tensor(self))

    def bagua_mark_communication_ready_without_synchronization(self) -> None:
        """Mark this tensor ready, as `bagua_mark_communication_ready` does.

        Unlike in the original, the operations wait for the current CUDA stream here, too: it may still be copying the tensor into
        its bucket.
        """
        BaguaTensor.bagua_mark_communication_ready(self)

    def bagua_set_storage(self, storage: torch.UntypedStorage | torch.TypedStorage, storage_offset: int = 0) -> None:
        """Make the effective tensor a view of ``storage`` from element ``storage_offset`` on, with the values there.

        It keeps its strides if it is dense, and becomes row-major otherwise (S2.3).

        Raises:
            ValueError: the storage is too small, or there is no effective tensor.
        """
        tensor = _as_tensor(self)
        found: Registration | None = getattr(tensor, "_bagua_registration", None)
        effective = tensor if found is None else found.getter(tensor)
        if effective is None:
            raise ValueError("this tensor has no effective tensor; call bagua_ensure_grad() first")
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        needed = (storage_offset + effective.numel()) * effective.element_size()
        if storage_offset < 0 or needed > untyped.nbytes():
            raise ValueError(
                f"storage_offset={storage_offset}: {effective.numel()} elements of {effective.dtype} at this offset need "
                f"{needed} bytes; the storage has {untyped.nbytes()}"
            )
        layout, view = Layout.of(effective), torch.empty(0, dtype=effective.dtype, device=effective.device)
        view.set_(untyped, storage_offset, layout.shape, layout.strides)
        if found is None:
            tensor.data = view
        else:
            found.replace(tensor, view)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _as_tensor(mixin: object) -> Tensor:
    """Return ``mixin`` as the torch.Tensor that it is, as its methods run on torch.Tensor."""
    return cast("Tensor", mixin)
