"""The methods that bagua_ref puts on ``torch.Tensor``, and bagua tensors as arguments of
collectives (S1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from bagua_ref.base.memory import Layout
from bagua_ref.buckets.optimizer_state import ensure_grad
from bagua_ref.buckets.storage import (
    Getter,
    Registration,
    Setter,
    effective_tensor,
    register,
    registration,
)
from bagua_ref.types import BackendTensor

__all__ = ["BaguaTensor", "RegisteredTensor"]


class RegisteredTensor(BackendTensor):
    """A bagua tensor as an argument of collectives, which use the effective tensor at the time of
    the call (S1).

    A tensor holds no reference to its RegisteredTensor, which would be a cycle.
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
        """Name of the wrapped module that the tensor belongs to, or ""."""
        return registration(self._tensor).module_name

    def effective_tensor(self) -> Tensor:
        """Return the effective tensor, detached.

        Raises:
            ValueError: there is no effective tensor.
        """
        effective = effective_tensor(self._tensor)
        if effective is None:
            raise ValueError(
                f"tensor {self.name!r} has no effective tensor; for a gradient call"
                " bagua_ensure_grad() first"
            )
        return effective.detach()

    def data_ptr(self) -> int:
        """Return the address of the effective tensor's first element."""
        return self.effective_tensor().data_ptr()

    def num_elements(self) -> int:
        """Return the effective tensor's number of elements."""
        return self.effective_tensor().numel()


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
        """Register this tensor in place, as the proxy of ``getter_closure(self)`` or of itself
        (S1); return it.

        Registering again replaces the closures. Within one module the name cannot change.

        Args:
            name: the tensor's name, unique within its module's buckets; None generates one.
            module_name: the wrapped module that the tensor belongs to.
            getter_closure: returns the effective tensor, e.g. ``lambda p: p.grad``.
            setter_closure: replaces the effective tensor, e.g. ``lambda p, t: setattr(p, "grad",
                t)``.

        Raises:
            ValueError: it already has another name in this module.

        >>> torch.ones(2).ensure_bagua_tensor("w").is_bagua_tensor()
        True
        """
        return register(_as_tensor(self), name, module_name, getter_closure, setter_closure)

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Tensor:
        """Return a new bagua tensor that shares this tensor's storage; this tensor is not
        registered.

        If this tensor later moves to another storage, the new one does not follow. Arguments as in
        `ensure_bagua_tensor`.
        """
        return register(
            _as_tensor(self).detach(), name, module_name, getter_closure, setter_closure
        )

    def bagua_getter_closure(self) -> Tensor | None:
        """Return the effective tensor (S1)."""
        return effective_tensor(_as_tensor(self))

    def bagua_setter_closure(self, tensor: Tensor) -> None:
        """Replace the effective tensor with ``tensor``."""
        registration(_as_tensor(self)).replace(_as_tensor(self), tensor)

    def bagua_backend_tensor(self) -> RegisteredTensor:
        """Return an object that a communicator's collectives accept in place of this tensor (S3.9).

        >>> x = torch.ones(2).ensure_bagua_tensor("x")
        >>> x.bagua_backend_tensor().num_elements()
        2
        """
        return RegisteredTensor(_as_tensor(self))

    def bagua_ensure_grad(self) -> Tensor:
        """Create a gradient of zeros if there is none; return this parameter.

        The gradient has this parameter's strides if it is dense (S2.3), else it is row-major.
        """
        ensure_grad(_as_tensor(self))
        return _as_tensor(self)

    def bagua_mark_communication_ready(self) -> None:
        """Mark this tensor ready; its bucket runs when all of its tensors are (S2.4).

        On CUDA the bucket's operations wait for everything queued so far on the current stream.

        Raises:
            ValueError: the tensor is in no registered bucket, or its bucket cannot be loaded.
        """
        found = registration(_as_tensor(self))
        sink = None if found.sink is None else found.sink()
        if sink is None:
            raise ValueError(
                f"tensor {found.name!r} is in no registered bucket, so it cannot be marked ready"
            )
        sink.mark_ready(_as_tensor(self))

    def bagua_mark_communication_ready_without_synchronization(self) -> None:
        """Mark this tensor ready, as `bagua_mark_communication_ready` does.

        Unlike in the original, the operations wait for the current CUDA stream here, too: it may
        still be copying the tensor into its bucket.
        """
        BaguaTensor.bagua_mark_communication_ready(self)

    def bagua_set_storage(
        self, storage: torch.UntypedStorage | torch.TypedStorage, storage_offset: int = 0
    ) -> None:
        """Turn the effective tensor into a view of ``storage`` from element ``storage_offset`` on,
        with the values found there.

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
                f"storage_offset={storage_offset}: {effective.numel()} elements of"
                f" {effective.dtype} at this offset need {needed} bytes; the storage has"
                f" {untyped.nbytes()}"
            )
        layout, view = (
            Layout.of(effective),
            torch.empty(0, dtype=effective.dtype, device=effective.device),
        )
        view.set_(untyped, storage_offset, layout.shape, layout.strides)
        if found is None:
            tensor.data = view
        else:
            found.replace(tensor, view)


def _as_tensor(mixin: object) -> Tensor:
    """Return ``mixin`` typed as torch.Tensor, since its methods run on torch.Tensor."""
    return cast("Tensor", mixin)
