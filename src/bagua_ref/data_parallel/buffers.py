"""The buffers of a module in training, which training forward passes may broadcast."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from bagua_ref.groups.communication import broadcast_coalesced
from bagua_ref.observe.meter import Meter
from bagua_ref.types import Group

__all__ = ["Buffers"]


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
