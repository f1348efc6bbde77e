"""A target of which every part is wrong: all results differ, and nothing is refused. Scripts of its
failures must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref import contrib
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.communicators.base import Communicator
from bagua_ref.conformance.lab.play import tensors_in
from bagua_ref.conformance.targets.reference_target import ReferenceTarget
from bagua_ref.conformance.targets.world import own_communicator


def healed(script: str) -> str:
    """Return a script about `Wrong` that is about the reference instead."""
    return script.replace(
        "from tests.wrong_target import Wrong", "from tests.wrong_target import Right as Wrong"
    )


def spoiled(value: Any) -> Any:
    """Return another value of the same form."""
    if isinstance(value, Tensor):
        return (value == 0).to(value.dtype)  # zeros become 1, and all else 0
    if isinstance(value, np.ndarray):
        return (value == 0).astype(value.dtype)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if hasattr(value, "hits"):
        return SimpleNamespace(hits=value.hits + 1, misses=value.misses, errors=value.errors)
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, dict):
        return {key: spoiled(item) for key, item in value.items()}
    return type(value)(map(spoiled, value)) if isinstance(value, list | tuple) else value


@torch.no_grad()
def spoil(tensors: Any) -> None:
    """Change tensors, also in lists and tuples."""
    for tensor in tensors_in(tensors):
        tensor.copy_(spoiled(tensor))


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


class _Part:
    """A part whose methods refuse nothing, and return and write wrong values."""

    def __init__(self, right: Any) -> None:
        self._right = right

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._right, name)
        if not callable(found) or name in ("rank", "nranks", "close", "flush"):
            return found
        return lambda *arguments, **options: self._call(name, found, arguments, options)

    def _call(self, name: str, method: Callable[..., Any], arguments: Any, options: Any) -> Any:
        try:
            returned = method(*arguments, **options)
        except (TypeError, ValueError):
            returned = list(tensors_in(arguments))
        if isinstance(self._right, Communicator):
            spoil(arguments)
        return spoiled(returned)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _Part(self._right(*arguments, **options))


class _Sampler(contrib.LoadBalancingDistributedSampler):
    """Draws other samples, and takes any arguments."""

    def __init__(self, dataset: Any, *arguments: Any, **options: Any) -> None:
        try:
            super().__init__(dataset, *arguments, **options)
        except ValueError:
            super().__init__([0, 1], lambda x: x, 1, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(spoiled(list(super().__iter__())))

    def __len__(self) -> int:
        return super().__len__() + 1


class _Batches(contrib.LoadBalancingDistributedBatchSampler):
    def __init__(self, sampler: Any, batch_fn: Any, drop_last: bool = False) -> None:
        try:
            super().__init__(sampler, batch_fn, drop_last)
        except ValueError:
            super().__init__(
                contrib.LoadBalancingDistributedSampler([0, 1], lambda x: x, 1, 0),
                lambda found: [found],
            )

    def __len__(self) -> int:
        return super().__len__() + 1


class _Budget(contrib.BudgetBatchSampler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        try:
            super().__init__(*arguments, **options)
        except ValueError:
            super().__init__([1], 1, num_replicas=1, rank=0)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(spoiled(list(super().__iter__())))

    def __len__(self) -> int:
        return super().__len__() + 1


class Wrong:
    """A target with every part."""

    def __init__(self) -> None:
        right = ReferenceTarget()
        self.kernels, self.comm_ops, self.algorithms = (
            WrongKernels(),
            _Part(right.comm_ops),
            _Part(right.algorithms),
        )
        self.samplers = SimpleNamespace(
            LoadBalancingDistributedSampler=_Sampler,
            LoadBalancingDistributedBatchSampler=_Batches,
            BudgetBatchSampler=_Budget,
        )
        self.communicator = _Part(own_communicator)


class Right(ReferenceTarget):
    """The reference, made as `Wrong` is."""

    def __init__(self) -> None:
        super().__init__(ReferenceBackend())
