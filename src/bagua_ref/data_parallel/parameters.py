"""Assignment of parameters to buckets, broadcast of buffers, and handling of parameters unused by
all ranks (S2.1, S2.5).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.buckets.storage import held_by_bucket
from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError
from bagua_ref.groups.communication import broadcast_coalesced
from bagua_ref.observe.meter import Meter
from bagua_ref.types import Group

_BITS = 63
"""Bits used of each integer in the message about unused parameters."""
_ORDER = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Order of dtypes among buckets."""


class Buffers:
    """A module's buffers and the connections for their broadcast, separate from the background
    worker's, which the training thread must not use.

    Args:
        module: the module; held weakly, and it may replace its buffers at any time.
        ignored: names of buffers that are not broadcast.
        group: the ranks.
        wanted: whether to broadcast buffers.

    Attributes:
        group: the group used for broadcasts only; None if there is nothing to broadcast.
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str], group: Group, wanted: bool
    ) -> None:
        self._module, self._ignored, self._wanted = weakref.ref(module), ignored, wanted
        self.group = group.sibling() if self.are_broadcast() and len(group.ranks) > 1 else None
        if self.group is not None:
            self.group.get_global_communicator()

    def are_broadcast(self) -> bool:
        """Return whether there are buffers to broadcast."""
        return self._wanted and bool(self._current())

    def broadcast(self, source: int, meter: Meter) -> None:
        """Broadcast the buffers of rank ``source`` of the group. Collective."""
        assert self.group is not None, "are_broadcast() is True, and there are other ranks"
        # Autograd must not take this for a change by the user to a saved buffer: data has no
        # version.
        buffers = [
            buffer.data for buffer in self._current() if not is_functorch_wrapped_tensor(buffer)
        ]
        with meter.timing("wait_seconds"):
            broadcast_coalesced(buffers, source, self.group.get_global_communicator())

    def close(self) -> None:
        """Close the connections."""
        if self.group is not None:
            self.group.close()

    def _current(self) -> list[torch.Tensor]:
        module = self._module()
        assert module is not None, "it is being trained"
        return [buffer for name, buffer in module.named_buffers() if name not in self._ignored]


class UnusedParameters:
    """Record of the parameters reached by backward passes since the last synchronized round; stores
    the gradients of the others during a round.

    Args:
        training: the training; held weakly.
        group: the training's ranks, in a group used for these messages only: when a rank's backward
            pass has ended, the worker's connections are busy with buckets, and with different ones
            on each rank.

    Attributes:
        reached: the names of parameters that a backward pass of this rank has reached since the
            last synchronized round.
        group: the group passed.
    """

    def __init__(self, training: TrainingContext, group: Group) -> None:
        self._training: TrainingContext = weakref.proxy(training)
        self.group = group
        self.reached: set[str] = set()
        self._set_aside: list[tuple[Any, tuple[torch.Tensor, torch.Tensor] | None]] = []
        """Parameters that no rank reached, each with its gradient and a copy of it, or None without
        a gradient.
        """
        group.get_global_communicator()  # all ranks connect now, in the same order
        if training.bagua_algorithm.traits.in_node is not None:
            group.get_intra_node_communicator()

    def noting(
        self, hook: Callable[[str, torch.nn.Parameter], object]
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Return a backward hook that records the parameter as reached and calls ``hook``."""
        reached = self.reached

        def noted(name: str, parameter: torch.nn.Parameter) -> None:
            reached.add(name)
            hook(name, parameter)

        return noted

    def agree(self) -> None:
        """Agree on the parameters that no rank has reached, and remove their gradients, so that
        they count as zero in the round. Collective.
        """
        training = self._training
        parameters = training.bagua_build_params()
        reached = self._on_any_rank([name in self.reached for name, _ in parameters])
        self.reached.clear()
        unused = [
            parameter
            for (_, parameter), is_reached in zip(parameters, reached, strict=True)
            if not is_reached
        ]
        self._set_aside = [
            (p, None if p.grad is None else (p.grad, p.grad.detach().clone())) for p in unused
        ]
        for parameter in unused:
            parameter.grad = None
        training.unused = set(unused)

    def agree_without_batch(self) -> None:
        """Report to the other ranks that this rank has reached no parameters. Collective."""
        self._on_any_rank([False] * len(self._training.bagua_build_params()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the removed gradients after the round, except where error feedback has delivered
        a gradient.
        """
        delivers = self._training.bagua_algorithm.delivers_errors
        for parameter, before in self._set_aside:
            made = held_by_bucket(parameter)
            if delivers and made is parameter.grad and made is not None and made.any():
                if before is not None:
                    made.detach().add_(before[1])
            elif before is None:
                parameter.grad = None
            else:
                parameter.grad = before[0]
                # it may lie in the bucket, which the round has written to
                before[0].detach().copy_(before[1])
        self._set_aside, self._training.unused = [], ()

    def _on_any_rank(self, bits: Sequence[bool]) -> list[bool]:
        """Return, for each index, whether the bit is set on any rank."""
        algorithm = self._training.bagua_algorithm
        group = self.group
        comm: Communicator = (
            group.get_intra_node_communicator()
            if algorithm.traits.in_node
            else group.get_global_communicator()
        )
        if comm.nranks() == 1:
            return list(bits)
        note = [
            sum(bit << place for place, bit in enumerate(bits[start : start + _BITS]))
            for start in range(0, len(bits), _BITS)
        ]
        engine = self._training.engine
        try:
            with engine.meter.timing("wait_seconds"):
                notes = comm.exchange_ints(note)()
        except CommunicationError:
            engine.wait_pending_comm_ops()  # if the worker has failed, too, its error says more
            raise
        return [
            any(words[place // _BITS] >> place % _BITS & 1 for words in notes)
            for place in range(len(bits))
        ]


def split_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Sort ``tensors`` by dtype (bf16, f16, f32, f64), then by device in order of appearance, and
    split them into buckets (S2.1).

    A bucket is closed as soon as it holds ``bucket_bytes`` or more, and at every change of dtype or
    device.

    Raises:
        TypeError: a dtype that cannot be trained.

    >>> [len(bucket) for bucket in split_into_buckets([torch.ones(4)] * 5, bucket_bytes=32)]
    [2, 2, 1]
    """
    for tensor in tensors:
        if tensor.dtype not in _ORDER:
            raise TypeError(
                f"tensors of {tensor.dtype} cannot be trained; allowed are"
                f" {', '.join(map(str, _ORDER))}"
            )
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
    """Raise an error for parameters that cannot be moved into buckets, such as lazy ones.

    Raises:
        NotImplementedError: there is such a parameter; the message names it and its type, and says
            what to do.
    """
    for name, parameter in module.named_parameters():
        kind = type(parameter.data).__name__
        if kind == "DTensor":
            continue  # `check_sharded` judges it
        if kind == "UninitializedTensor" or hasattr(parameter, "materialize"):
            raise ValueError(
                f"parameter {name!r} is not initialized yet; call the module once before"
                " wrapping it"
            )
        if kind != "Tensor":
            raise NotImplementedError(
                f"parameter {name!r} is a {kind}, which cannot be put into a bucket; only plain"
                " tensors can"
            )
    for name, inside in module.named_modules():
        if "FullyShardedDataParallel" in (base.__name__ for base in type(inside).__mro__):
            raise NotImplementedError(
                f"{'module.' + name if name else 'module'} is a FullyShardedDataParallel, which"
                " communicates by itself; wrap the module without it"
            )
