"""Properties of flat storage when tensors get other memory, or the same memory in another order
(S2.3).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.buckets.bucket import BaguaBucket

STRAY: dict[str, Callable[[Tensor], Tensor | None]] = {
    "stays": lambda x: x,
    "removed": lambda x: None,
    "moved": lambda x: x + 1,
    "transposed": lambda x: x.transpose(0, -1) if x.ndim and x.shape[0] == x.shape[-1] else x,
    "permuted": lambda x: x.permute(1, 2, 3, 0) if x.ndim == 4 and len({*x.shape}) == 1 else x,
    "channels_last": lambda x: (
        x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    ),
    "row repeated": lambda x: x[:1].expand(x.shape) if x.ndim else x,
    "element repeated": lambda x: x.as_strided(x.shape, [0] * x.ndim) if x.numel() else x,
}
LENGTHS = [(1,), (0,), (5,), (3,)]
"""Shapes of vectors: a bucket of nothing else is loaded in another way, if all of them were
moved.
"""
SHAPES = [(), *LENGTHS, (2, 2), (3, 3), (4, 1), (2, 3), (2, 5, 2), (2, 2, 2, 2), (2, 3, 4, 1)]


@pytest.mark.parametrize("of_gradients", [True, False], ids=["gradients", "weights"])
@given(
    shapes=st.sampled_from([SHAPES, LENGTHS]).flatmap(
        lambda shapes: st.lists(st.sampled_from(shapes), min_size=1, max_size=4)
    ),
    rounds=st.lists(
        st.sampled_from([["moved"], ["stays", "moved"], [*STRAY]]).flatmap(
            lambda strays: st.lists(st.sampled_from(strays), min_size=4, max_size=4)
        ),
        min_size=1,
        max_size=3,
    ),
    flatten=st.booleans(),
)
def test_S2_3_an_operation_sees_the_values_that_tensors_have_wherever_they_lie(
    of_gradients: bool, shapes: list[tuple[int, ...]], rounds: list[list[str]], flatten: bool
) -> None:
    made = [
        torch.nn.Parameter(torch.arange(torch.Size(shape).numel()).reshape(shape) + 100.0 * i)
        for i, shape in enumerate(shapes)
    ]
    for i, p in enumerate(made):
        p.grad = 2 * p.detach()
        closures = (
            (lambda p: p.grad, lambda p, grad: setattr(p, "grad", grad)) if of_gradients else ()
        )
        p.ensure_bagua_tensor(f"p{i}", "", *closures)
    bucket = BaguaBucket(made, "0", flatten, alignment=4)
    seen: list[Tensor] = []
    bucket._ops = [lambda flat: (seen.append(flat.clone()), flat.mul_(-1))]
    for strays in rounds:
        for p, stray in zip(made, strays, strict=False):
            if of_gradients:
                p.grad = STRAY[stray](p.grad)
            elif stray != "removed":
                p.data = STRAY[stray](p.data)
        effective = [p.grad if of_gradients else p for p in made]
        values = torch.cat(
            [
                torch.zeros(p.numel()) if t is None else t.detach().flatten()
                for p, t in zip(made, effective, strict=True)
            ]
        )
        bucket.execute()
        assert torch.equal(seen[-1][: len(values)], values)
        results = [t.detach().flatten() for t in bucket.effective_tensors()]
        assert torch.equal(torch.cat(results), -values)
        assert not seen[-1][len(values) :].any()
        if flatten:
            assert bucket.check_flatten()
            assert torch.equal(bucket.flattened_tensor(), -seen[-1])
