"""The package's own parts as one target: what the checks themselves are tried on, and an example of what a target looks like."""

from __future__ import annotations

from bagua_ref import contrib
from bagua_ref.conformance.targets.world import own_communicator

__all__ = ["ReferenceTarget"]


class ReferenceTarget:
    """Every part that suites look at.

    ``bagua-ref verify --backend bagua_ref.conformance.targets.reference_target:ReferenceTarget`` checks them.
    """

    name = "bagua_ref"
    kernels = "reference"
    communicator = staticmethod(own_communicator)

    samplers = cache = contrib
    fuse_optimizer = staticmethod(contrib.fuse_optimizer)
