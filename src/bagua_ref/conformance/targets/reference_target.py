"""The package's parts as one target: an example, and the target that the checks themselves are tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagua_ref import contrib
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_ops import ReferenceCommOps
from bagua_ref.conformance.targets.world import own_communicator

__all__ = ["ReferenceTarget"]


@dataclass
class ReferenceTarget:
    """A target with every part that suites check.

    ``bagua-ref verify --backend bagua_ref.conformance.targets.reference_target:ReferenceTarget`` checks them.

    Args:
        kernels: a backend or its name.
        flatten: give buckets flat storage.
    """

    kernels: Any = "reference"
    flatten: bool = True

    name = "bagua_ref"
    communicator = staticmethod(own_communicator)
    samplers = cache = contrib
    fuse_optimizer = staticmethod(contrib.fuse_optimizer)

    @property
    def comm_ops(self) -> ReferenceCommOps:
        """The package's own operations, with these kernels."""
        return ReferenceCommOps(self.kernels, self.flatten)

    @property
    def algorithms(self) -> ReferenceAlgorithms:
        """The package's own algorithms, with these kernels."""
        return ReferenceAlgorithms(self.kernels, flatten=self.flatten)
