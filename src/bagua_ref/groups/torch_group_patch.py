"""The methods that bagua_ref puts on torch's process groups."""

from __future__ import annotations

import weakref
from typing import Any

from bagua_ref.errors import NotInitializedError
from bagua_ref.groups.process_group import BaguaProcessGroup, from_torch_group

__all__ = ["BaguaProcessGroupPatch"]

# torch's groups accept no new attributes.
_patched: weakref.WeakKeyDictionary[Any, BaguaProcessGroup] = weakref.WeakKeyDictionary()


class BaguaProcessGroupPatch:
    """The methods that importing bagua_ref adds to torch's ProcessGroup, for the Bagua group of the same ranks."""

    def bagua_patch(self, stream: Any = None) -> Any:
        """Make the Bagua group of these ranks, once, and return the torch group. All members call this in the same order."""
        known = _patched.get(self)
        if known is None or known._closed:
            _patched[self] = from_torch_group(self, stream)
        return self

    @property
    def bagua_pg(self) -> BaguaProcessGroup:
        """The group that `bagua_patch` made."""
        return _patched_group(self)

    def bagua_get_global_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_global_communicator`."""
        return _patched_group(self).get_global_communicator()

    def bagua_get_inter_node_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_inter_node_communicator`."""
        return _patched_group(self).get_inter_node_communicator()

    def bagua_get_intra_node_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_intra_node_communicator`."""
        return _patched_group(self).get_intra_node_communicator()


def _patched_group(torch_group: Any) -> BaguaProcessGroup:
    group = _patched.get(torch_group)
    if group is None:
        raise NotInitializedError("this torch process group has no Bagua group yet; call its bagua_patch() first")
    return group
