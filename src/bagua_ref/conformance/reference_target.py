"""The package's own parts as one target: what the checks themselves are tried on, and an example of what a target looks like."""

from __future__ import annotations

from bagua_ref.conformance.world import own_communicator

__all__ = ["ReferenceTarget"]


class ReferenceTarget:
    """Every part that suites look at: ``bagua-ref verify --backend bagua_ref.conformance.reference_target:ReferenceTarget``."""

    name = "bagua_ref"
    kernels = "reference"
    communicator = staticmethod(own_communicator)

    def __init__(self) -> None:
        from bagua_ref import contrib

        self.samplers = self.cache = contrib
        self.fuse_optimizer = contrib.fuse_optimizer
