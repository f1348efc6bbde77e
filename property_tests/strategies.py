"""Inputs that break number formats: what properties draw from.

Lists of numbers shrink well, so tensors are drawn element by element and kept short; sizes that cross a block of the
reference are examples in ``tests/``.
"""

from __future__ import annotations

import os

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.backends import available_backends, register_backend

COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32)
FLOATS = (*COMPRESSIBLE, torch.float64)

register_backend("cuda-emulated", "tests.cuda_emulation.backend:EmulatedBackend", hint="install g++")
register_backend("cuda-on-copies", "tests.cuda_emulation.copies:CudaOnCopies")


def _backends() -> list[ParameterSet | str]:
    """Every backend that can run here, the CUDA sources compiled for the CPU among them; properties draw CPU tensors."""
    why_not = available_backends()
    chosen: list[ParameterSet | str] = [name for name, reason in why_not.items() if reason is None and not name.startswith("cuda")]
    # Without g++ a developer goes on with a reason; CI must have it, so there the properties fail.
    excused = [] if why_not["cuda-emulated"] is None or "CI" in os.environ else [pytest.mark.skip(why_not["cuda-emulated"])]
    chosen.append(pytest.param("cuda-emulated", marks=excused))
    if torch.cuda.is_available():
        lacking = [] if why_not["cuda"] is None else [pytest.mark.skip(why_not["cuda"])]
        chosen.append(pytest.param("cuda-on-copies", marks=[pytest.mark.gpu, *lacking], id="cuda"))
    return chosen


every_backend = pytest.mark.parametrize("backend", _backends())
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_compressible = pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)


def name_of(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for torch.float32: what the scalar oracles call it."""
    return str(dtype).removeprefix("torch.")


def numbers(dtype: torch.dtype, *, finite: bool = False) -> st.SearchStrategy[float]:
    """Any number of dtype, edges more often than chance would have them."""
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, 1.0, -1.0, info.max, -info.max, info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 4, 1 + info.eps]
    if not finite:
        edges += [float("inf"), float("-inf"), float("nan")]
    width = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}[dtype]
    limit = {"min_value": -info.max, "max_value": info.max} if finite else {"allow_nan": True, "allow_infinity": True}
    return st.one_of(st.floats(-4, 4, width=width), st.sampled_from(edges), st.floats(width=width, **limit))


def adversarial(dtype: torch.dtype, size: int, *, finite: bool = False) -> st.SearchStrategy[Tensor]:
    """Tensors of ``size`` elements: tame, halves, constant, denormal, huge, or anything."""
    info = torch.finfo(dtype)

    def tensors(number: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
        return st.lists(number, min_size=size, max_size=size).map(
            lambda values: torch.tensor(values, dtype=torch.float64).to(dtype)
        )

    return st.one_of(
        tensors(st.floats(-4, 4)),
        tensors(st.integers(-600, 600).map(lambda n: n / 2)),
        tensors(st.integers(-8, 8).map(lambda n: n * info.tiny / 16)),
        tensors(st.integers(-8, 8).map(lambda n: n / 8 * info.max)),
        tensors(numbers(dtype, finite=finite)),
        numbers(dtype, finite=finite).map(lambda value: torch.full((size,), value, dtype=torch.float64).to(dtype)),
    )


chunk_sizes = st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 31, 32, 33, 64, 65]))
"""Also sizes that fill a payload's rows of 32 bytes, and that do not."""


@st.composite
def chunked(draw: st.DrawFn, dtype: torch.dtype, *, finite: bool = False) -> tuple[Tensor, int]:
    """A flat tensor of 1 to 5 equal chunks, each of its own kind, and how many there are."""
    num_chunks, size = draw(st.integers(1, 5)), draw(chunk_sizes)
    return torch.cat([draw(adversarial(dtype, size, finite=finite)) for _ in range(num_chunks)]), num_chunks


@st.composite
def same_sized(draw: st.DrawFn, dtype: torch.dtype, count: int) -> list[Tensor]:
    """``count`` flat tensors of one size, possibly empty."""
    size = draw(st.integers(0, 12))
    return [draw(adversarial(dtype, size)) for _ in range(count)]


@st.composite
def ends_near_half_a_level(draw: st.DrawFn) -> tuple[float, float]:
    """A float32 minimum and maximum with max*scale close to k + 1/2: where S4.6's bound is tight.

    ``max * 255 / (max - min) = k + 1/2`` solved for max, then moved by up to four float32 steps either way.
    """
    half = draw(st.one_of(st.integers(0, 254), st.integers(255, 2**18))) + 0.5
    magnitude = draw(st.floats(1, 2, width=32)) * 2.0 ** draw(st.integers(-10, 60))
    low = -magnitude if half < 255 else magnitude
    high = torch.tensor(-half * low / (255 - half), dtype=torch.float32)
    bits = high.view(torch.int32) + draw(st.integers(-4, 4))
    moved = bits.view(torch.float32).item()
    low = torch.tensor(low, dtype=torch.float32).item()
    sign = draw(st.sampled_from([1, -1])) if half > 255 else 1
    low, high_value = sorted((sign * low, sign * moved))
    return low, high_value
