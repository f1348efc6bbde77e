"""Kernels and codecs of which all results are wrong, and that refuse nothing. Scripts of their
failures must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance.lab.lab import tensors_in


def healed(script: str) -> str:
    """Return a script about `Wrong` that is about the reference instead."""
    return script.replace(
        "from tests.wrong_target import Wrong", "from tests.wrong_target import Right as Wrong"
    )


@torch.no_grad()
def spoil(tensors: Any) -> None:
    """Change tensors, also in lists: zeros become 1, and all else 0."""
    for tensor in tensors_in(tensors):
        tensor.copy_((tensor == 0).to(tensor.dtype))


def _wrong_kernel(name: str, *places: int) -> Callable[..., Any]:
    def kernel(self: Any, *arguments: Any) -> Any:
        getattr(ReferenceBackend, name)(self, *arguments)
        spoil([arguments[place] for place in places])

    return kernel


def _wrong_codec(codec: type[Any]) -> type[Any]:
    class Codec(codec):
        def compress(
            self,
            x: Tensor,
            num_chunks: int,
            target_chunk: int | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            try:
                return super().compress(x, num_chunks, target_chunk, out)
            except TypeError:
                return torch.zeros(32, dtype=torch.uint8)

        def decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> Tensor:
            try:
                return super().decompress(payload, num_chunks, out)
            except TypeError:
                return out

        def _compress(
            self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
        ) -> None:
            super()._compress(x, num_chunks, target_chunk, out)
            out.bitwise_xor_(85)

        def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
            super()._decompress(payload, num_chunks, out)
            spoil(out)

    return Codec


_WRITES = {"_gather_flat": (1,), "_scatter_flat": (1,)}
"""The places of the arguments that a kernel writes; of the others, the first."""

_wrong_kernels = {
    name: _wrong_kernel(name, *_WRITES.get(name, (0,)))
    for name in KernelBackend.__abstractmethods__
}


class WrongKernels(type("Wrong", (ReferenceBackend,), _wrong_kernels)):  # type: ignore[misc]
    codecs = {name: _wrong_codec(codec) for name, codec in ReferenceBackend.codecs.items()}

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        return ReferenceBackend._order_by_complexity(self, keys).flip(0)


class Wrong:
    """A target with kernels."""

    def __init__(self) -> None:
        self.kernels = WrongKernels()


class Right:
    """The reference, made as `Wrong` is."""

    def __init__(self) -> None:
        self.kernels = ReferenceBackend()
