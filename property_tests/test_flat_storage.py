"""Properties of flat storage when tensors get other memory, or the same memory in another order
(S2.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.base.memory import effective_strides, is_dense
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.simulation import SimulatedWorld

STRAY: dict[str, Callable[[Tensor], Tensor]] = {
    "stays": lambda x: x,
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
    bucket._ops = [lambda flat: seen.append(flat.clone())]
    for strays in rounds:
        for p, stray in zip(made, strays, strict=False):
            if of_gradients:
                p.grad = STRAY[stray](p.grad)
            else:
                p.data = STRAY[stray](p.data)
        values = torch.cat([t.detach().flatten() for t in bucket.effective_tensors()])
        bucket.execute()
        assert torch.equal(seen[-1][: len(values)], values)
        assert not seen[-1][len(values) :].any()
        if flatten:
            assert bucket.check_flatten()
            assert torch.equal(bucket.flattened_tensor(), seen[-1])


@st.composite
def laid_out(draw: st.DrawFn, gaps: bool) -> Tensor:
    """Tensors of random shapes whose axes lie in memory in any order, with gaps between elements or
    not.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    x = torch.empty([shape[axis] for axis in order]).permute(
        [order.index(axis) for axis in range(len(shape))]
    )
    if gaps and draw(st.booleans()):
        x = torch.cat([x, x], draw(st.integers(0, len(shape) - 1))).as_strided(
            x.shape, [2 * stride for stride in x.stride()]
        )
    return x.copy_(
        torch.randn(x.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    )


class Curves(torch.nn.Module):
    """Parameters whose gradients differ by element, by step and by sample."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(values)

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for w in self.weights:
            each = torch.arange(1.0, w.numel() + 1).view(w.shape) / w.numel()
            losses += [(w * each * sample).sin().square().sum() for sample in x]
        return torch.stack(losses).sum() / len(x)


ADAM: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
}
EXACT_ON_EQUAL_BATCHES: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "decentralized": {"hierarchical": False},
    "local_sgd": {"period": 2},
    "diloco": {
        "period": 2,
        "fragments": 1,
        "outer_optimizer": lambda p: torch.optim.SGD(p, lr=1.0),
    },
    "async": {"warmup_steps": 99},
    "topk": {"ratio": 1.0},
}


@given(
    data=st.data(),
    name=st.sampled_from([*EXACT_ON_EQUAL_BATCHES]),
    optimizer=st.sampled_from([*ADAM]),
    kind=st.sampled_from([{"fused": True}, {"foreach": True}, {"foreach": False}]),
    flatten=st.booleans(),
    wrapped_at=st.integers(0, 2),
)
def test_S2_3_parameters_in_any_order_of_memory_train_as_one_process_does(
    data: st.DataObject,
    name: str,
    optimizer: str,
    kind: dict[str, bool],
    flatten: bool,
    wrapped_at: int,
) -> None:
    # torch's fused kernels themselves take tensors to be without gaps
    values = data.draw(st.lists(laid_out(gaps="fused" not in kind), min_size=1, max_size=4))
    options = {"lr": 0.1, **({"momentum": 0.9} if optimizer == "SGD" else {}), **kind}

    def train(comm: Any = None) -> list[Tensor]:
        # a plain copy would have no gaps
        module = Curves([torch.empty_strided(x.shape, x.stride()).copy_(x) for x in values])
        made = ADAM[optimizer](module.parameters(), **options)
        for step in range(4):
            if comm is not None and step == wrapped_at:
                bagua_ref.init_process_group()
                algorithm = Algorithm.init(name, **EXACT_ON_EQUAL_BATCHES[name])
                module.with_bagua([made], algorithm, do_flatten=flatten or name == "async")
            x = torch.tensor([0.5, 1.0, 1.5, 2.0]) + step
            split = (
                comm is not None and step >= wrapped_at and name in ("gradient_allreduce", "async")
            )
            made.zero_grad(set_to_none=step % 2 == 0)
            module(x[comm.rank() :: comm.nranks()] if split else x).backward()
            made.step()
            for p in module.parameters() if comm else ():
                wanted = p if is_dense(p) else torch.empty(p.shape)  # as autograd makes gradients
                assert effective_strides(p.shape, p.grad.stride()) == effective_strides(
                    p.shape, wanted.stride()
                )
        return [p.detach().clone() for p in module.parameters()]

    expected = train()
    for ours in SimulatedWorld(2).run(train):
        for mine, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
