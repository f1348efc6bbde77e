"""Properties of fuse_step beside the shipped suite's: tensors that are turned, cut or moved between steps (S6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.lab.twins import assert_gradients, assert_twins, copies, give_gradients, parameters
from bagua_ref.contrib.fuse.optimizer import fuse_optimizer


def put(stray: str, x: Tensor) -> Tensor:
    """Return another view of the memory of ``x``, or its values in other memory."""
    if stray == "transposed":
        return x.transpose(0, -1)
    if stray == "row repeated":
        return x[:1].expand(x.shape)
    if stray == "element repeated":
        return x.as_strided(x.shape, [0] * x.ndim)
    if stray == "shorter":
        return x[:1]
    if stray == "every second":
        return x[::2]
    if stray == "flat":
        return x.view(-1) if x.is_contiguous() else x
    if stray == "channels_last":
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    return x.clone()


STRAYS = "transposed", "row repeated", "element repeated", "shorter", "every second", "flat", "channels_last", "moved"
SHAPES = [(3, 3), (2, 3), (4,), (4,), (1, 3), (2, 2, 2, 2), (2, 3, 2, 2)]
turns = st.lists(
    st.tuples(
        st.sampled_from(["weight", "gradient", "state", "frozen"]), st.integers(0, 9), st.sampled_from(STRAYS), st.booleans()
    ),
    max_size=3,
)


@pytest.mark.filterwarnings("ignore:.*have left the storage")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5),
    kept=st.booleans(),
    momentum=st.sampled_from([0, 0.9]),
    days=st.lists(turns, min_size=1, max_size=5),
)
def test_S6_tensors_that_are_turned_or_cut_in_their_memory_are_stepped_as_by_step(
    name: str, shapes: list[tuple[int, ...]], kept: bool, momentum: float, days: list[list[tuple[str, int, str, bool]]]
) -> None:
    options: dict[str, Any] = {"momentum": momentum} if name == "SGD" else {}
    ps = parameters(0, shapes)
    qs = copies(ps)
    fused, plain = (getattr(torch.optim, name)(params, lr=0.1, **options) for params in (ps, qs))
    fuse_optimizer(fused)
    for seed, day in enumerate([[], [], *days]):  # the plan has been made and used before the first tensor changes
        stale = kept
        for what, place, stray, as_data in day:
            for optimizer, twin in ((fused, ps[place % len(ps)]), (plain, qs[place % len(qs)])):
                if what == "weight":
                    twin.data = put(stray, twin.data)
                    stale = stale and (twin.grad is None or twin.grad.shape == twin.shape)
                elif what == "frozen":
                    twin.requires_grad_(not twin.requires_grad)
                elif what == "gradient" and twin.grad is not None and put(stray, twin.grad).shape == twin.shape:
                    twin.grad = put(stray, twin.grad)
                elif what == "state":
                    for key, value in optimizer.state[twin].items():
                        if isinstance(value, Tensor) and key != "step" and as_data:
                            value.data = put(stray, value.data)
                        elif isinstance(value, Tensor) and key != "step":
                            optimizer.state[twin][key] = put(stray, value)
        if not any(what == "gradient" for what, *_ in day):
            repeated = any(p.grad is not None and 0 in p.grad.stride() for p in ps)
            give_gradients(seed, ps, qs, kept=stale and not repeated)
        given = [None if q.grad is None else q.grad.clone() for q in qs]
        try:
            plain.step()
        except RuntimeError:  # shapes no longer match, or the memory is too small
            break
        fused.fuse_step()
        assert_twins(fused, plain)
        assert_gradients(given, ps, qs)
