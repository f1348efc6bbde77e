"""Pairs of equal optimizers, one to be fused, with gradients for both and a comparison of their
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return torch.where(drawn.abs() < 0.2, torch.zeros_like(drawn).copysign(drawn), drawn).to(dtype)


def parameters(
    *shapes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Return parameters, each with its own values and storage, of usual shapes by default."""
    return [
        torch.nn.Parameter(numbers(seed + index, shape, dtype))
        for index, shape in enumerate(shapes or [(3, 5), (7,), (2, 3, 4), (64,)])
    ]


def copies(parameters: Sequence[Tensor]) -> list[Any]:
    """Return parameters with the same values, each in its own storage."""
    return [
        torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    ]


def give_gradients(
    seed: int, *sides: Sequence[Any], kept: bool = False, without: Sequence[int] = ()
) -> None:
    """Give the parameters of each side the same gradients; frozen ones get none.

    If ``kept``, write into existing gradients, as backward does after
    ``zero_grad(set_to_none=False)``.
    """
    for side in sides:
        for index, p in enumerate(side):
            if index in without or not p.requires_grad:
                p.grad = None
                continue
            grad = numbers(1000 * (seed + 1) + index, p.shape, p.dtype)
            if kept and p.grad is not None and 0 not in p.grad.stride():
                p.grad.copy_(grad)
            else:
                p.grad = grad


def assert_same(fused: Any, plain: Any) -> None:
    """Raise AssertionError unless weights, options and state are equal, bit for bit."""
    ours, theirs = fused.state_dict(), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        found = ours["state"][index]
        if not isinstance(state, dict):  # of no parameter
            _assert_equal(found, state, f"state {index!r}")
            continue
        assert found.keys() == state.keys(), f"state of parameter {index}"
        for key, value in state.items():
            _assert_equal(found[key], value, f"{key} of parameter {index}")
    for number, (group, right) in enumerate(
        zip(fused.param_groups, plain.param_groups, strict=True)
    ):
        for index, (p, q) in enumerate(zip(group["params"], right["params"], strict=True)):
            _assert_equal(p, q, f"parameter {index} of group {number}")


def _assert_equal(found: Any, expected: Any, what: str) -> None:
    assert type(found) is type(expected), what
    if not isinstance(expected, Tensor):
        assert found == expected, what
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    # compares signs of zeros, and NaNs
    found, expected = (
        torch.cat([x.detach().reshape(-1)]).view(torch.uint8) for x in (found, expected)
    )
    assert torch.equal(found, expected), what
