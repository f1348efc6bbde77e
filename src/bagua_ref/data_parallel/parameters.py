"""Parameters and buffers of a module in training, and their assignment to buckets (S2.1)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from bagua_ref.algorithms.base import AlgorithmImpl
from bagua_ref.buckets.optimizer_state import align
from bagua_ref.data_parallel.hooks import are_for_a_call
from bagua_ref.data_parallel.sharding import LocalShard, reshard, stand_in
from bagua_ref.groups.communication import broadcast_coalesced
from bagua_ref.observe.meter import Meter
from bagua_ref.types import Group

__all__ = ["Buffers", "TrainedParameters", "refuse_what_cannot_be_flat", "split_into_buckets"]

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_ORDER = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of buckets, in this order."""


class TrainedParameters:
    """The parameters that a module had when it was wrapped, by name; `check` detects later ones.

    Args:
        module: whose parameters they are; held weakly.
        ignored: names of parameters that do not take part.

    Raises:
        NotImplementedError: a parameter gets sparse gradients.
        TypeError: a parameter is complex.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self._module, self._ignored = weakref.ref(module), ignored
        reshard(module)
        self._take_stock(module)
        self.named = self._find(module)
        """Those that need a gradient and are not ignored, by names as in ``named_parameters()``; `LocalShard` of sharded ones."""
        self.shards = {name: shard for name, shard in self.named if isinstance(shard, LocalShard)}
        self._with_strides = [parameter for _, parameter in self.named if parameter.dim() > 1]
        self.note_strides()

    def check(self) -> bool:
        """Return whether the module has its trained parameters now.

        It has not in a forward pass with other tensors in their place, as `torch.func.functional_call` runs it.

        Raises:
            RuntimeError: parameters were added, replaced or unfrozen for good; the message names them.
        """
        if self.shards:  # FSDP2 itself replaces parameters, and refuses later ones
            return True
        same = list(map(id, chain.from_iterable(self._members))) == self._ids
        return (same and not any(p.requires_grad for p in self._frozen)) or self._check_changes()

    def _check_changes(self) -> bool:
        module = self._module()
        assert module is not None, "its forward is under way"
        known = dict(self.named)
        held = [tensor for inside in module.modules() for tensor in inside._parameters.values() if tensor is not None]
        if are_for_a_call(held):
            return {*map(id, held)}.issuperset(map(id, known.values()))
        new = [name for name, parameter in self._find(module) if known.get(name) is not parameter]
        if new:
            raise RuntimeError(
                f"{type(module).__name__} was wrapped before {'parameters' if len(new) > 1 else 'parameter'} "
                f"{', '.join(map(repr, new))} could be trained (added, replaced or unfrozen since), so they would not be "
                "synchronized. Call with_bagua() again on every rank, or list the names in "
                "module._bagua_params_and_buffers_to_ignore before wrapping"
            )
        self._take_stock(module)  # what changed is ignored, or frozen
        return True

    def note_strides(self) -> None:
        """Note the strides that the parameters have now: those of the buckets made last."""
        self._strides = list(map(torch.Tensor.stride, self._with_strides))

    def align_gradients(self) -> None:
        """Give gradients the strides of their parameters, if those have changed between a forward pass and its backward pass."""
        if list(map(torch.Tensor.stride, self._with_strides)) != self._strides:
            for parameter in self._with_strides:
                if parameter.grad is not None:
                    align(parameter.grad, parameter)

    def have_new_strides(self, algorithm: AlgorithmImpl) -> bool:
        """Return whether strides have changed since `note_strides`, as by ``model.to(memory_format=...)``: then buckets must, too.

        Raises:
            RuntimeError: they have, and ``algorithm`` cannot make new buckets; the message names a parameter and its strides.
        """
        if list(map(torch.Tensor.stride, self._with_strides)) == self._strides:
            return False
        if not algorithm.takes_new_strides:
            self._refuse_new_strides(algorithm)
        return True

    def _refuse_new_strides(self, algorithm: AlgorithmImpl) -> None:
        before = dict(zip(self._with_strides, self._strides, strict=True))
        name, parameter = next((n, p) for n, p in self.named if p in before and p.stride() != before[p])
        raise RuntimeError(
            f"parameter {name!r} had strides {before[parameter]} when the module was wrapped and has {parameter.stride()} now, "
            f"and {type(algorithm).__name__} cannot make new buckets during training. Call with_bagua() again on every rank"
        )

    def _find(self, module: torch.nn.Module) -> list[tuple[str, Parameter]]:
        sparse = {id(m._parameters.get("weight")): m for m in module.modules() if isinstance(m, _EMBEDDINGS) and m.sparse}
        found = [(name, stand_in(p)) for name, p in module.named_parameters() if p.requires_grad and name not in self._ignored]
        for name, parameter in found:
            if id(parameter) in sparse:
                raise NotImplementedError(
                    f"parameter {name!r} of {sparse[id(parameter)]!r} gets sparse gradients, which cannot be communicated; use "
                    f"sparse=False or list it in module._bagua_params_and_buffers_to_ignore"
                )
            if parameter.dtype.is_complex:
                raise TypeError(
                    f"parameter {name!r} is {parameter.dtype}, which cannot be trained; make its real view the parameter, "
                    "nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex(parameter) in forward()"
                )
        return found

    def _take_stock(self, module: torch.nn.Module) -> None:
        """Remember all parameters and submodules by identity: comparing that takes microseconds, naming them does not."""
        self._members: list[Collection[Any]] = [
            members.values() for inside in module.modules() for members in (inside._parameters, inside._modules)
        ]
        self._kept = list(chain.from_iterable(self._members))  # an id is only another object's once this one is gone
        self._ids = list(map(id, self._kept))
        self._frozen = [p for name, p in module.named_parameters() if not p.requires_grad and name not in self._ignored]


class Buffers:
    """A module's buffers and, if they are broadcast, connections for that: the training thread must not use the worker's.

    Args:
        module: the module; held weakly, and it may replace its buffers at any time.
        ignored: names of those that are not broadcast.
        group: the ranks.
        wanted: whether they are to be broadcast.

    Attributes:
        group: a group of their own; None if there is nothing to broadcast.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], group: Group, wanted: bool) -> None:
        self._module, self._ignored, self._wanted = weakref.ref(module), ignored, wanted
        self.group = group.sibling() if self.are_broadcast() and len(group.ranks) > 1 else None
        if self.group is not None:
            self.group.get_global_communicator()

    def are_broadcast(self) -> bool:
        """Return whether there are buffers, and they are to be broadcast."""
        return self._wanted and bool(self._current())

    def broadcast(self, source: int, meter: Meter) -> None:
        """Give every rank the buffers of rank ``source`` of the group. Collective."""
        assert self.group is not None, "are_broadcast() is True, and there are other ranks"
        # Autograd must not take this for a change by the user to a saved buffer: data has no version.
        buffers = [buffer.data for buffer in self._current() if not is_functorch_wrapped_tensor(buffer)]
        with meter.waiting():
            broadcast_coalesced(buffers, source, self.group.get_global_communicator())

    def close(self) -> None:
        """Close the connections."""
        if self.group is not None:
            self.group.close()

    def _current(self) -> list[torch.Tensor]:
        module = self._module()
        assert module is not None, "it is being trained"
        return [buffer for name, buffer in module.named_buffers() if name not in self._ignored]


def split_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return ``tensors`` by dtype (bf16, f16, f32, f64), then device by first appearance, cut into buckets (S2.1).

    A bucket is closed as soon as it holds ``bucket_bytes`` or more, and at every change of dtype or device.

    Raises:
        TypeError: a dtype that cannot be trained.

    >>> [len(bucket) for bucket in split_into_buckets([torch.ones(4)] * 5, bucket_bytes=32)]
    [2, 2, 1]
    """
    for tensor in tensors:
        if tensor.dtype not in _ORDER:
            raise TypeError(f"tensors of {tensor.dtype} cannot be trained; allowed are {', '.join(map(str, _ORDER))}")
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    buckets: list[list[Tensor]] = []
    for dtype in _ORDER:
        for device in devices:
            filled = bucket_bytes  # nothing is open at a change of dtype or device
            for tensor in tensors:
                if (tensor.dtype, tensor.device) == (dtype, device):
                    if filled >= bucket_bytes:
                        buckets.append([])
                        filled = 0
                    buckets[-1].append(tensor)
                    filled += tensor.numel() * tensor.element_size()
    return buckets


def refuse_what_cannot_be_flat(module: torch.nn.Module) -> None:
    """Refuse parameters that cannot be moved into buckets, such as lazy ones.

    Raises:
        NotImplementedError: there is one; the message names it and its type, and says what to do.
    """
    for name, parameter in module.named_parameters():
        kind = type(parameter.data).__name__
        if kind == "DTensor":
            continue  # `check_sharded` judges it
        if kind == "UninitializedTensor" or hasattr(parameter, "materialize"):
            raise ValueError(f"parameter {name!r} is not initialized yet; call the module once before wrapping it")
        if kind != "Tensor":
            raise NotImplementedError(f"parameter {name!r} is a {kind}, which cannot be put into a bucket; only plain tensors can")
    for name, inside in module.named_modules():
        if "FullyShardedDataParallel" in (base.__name__ for base in type(inside).__mro__):
            raise NotImplementedError(
                f"{'module.' + name if name else 'module'} is a FullyShardedDataParallel, which communicates by itself; wrap the "
                "module without it"
            )
