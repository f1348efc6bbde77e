"""Tensors on their way into flat storage (S2.3, S2.4)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.simulation import SimulatedWorld


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized"])
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW],
    ids=["SGD", "AdamW"],
)
def test_S2_3_weights_and_gradients_that_are_turned_where_they_lie_train_as_without_buckets(
    optimizer: Any, name: str, do_flatten: bool
) -> None:
    start = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

    def train(wrap: bool) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        made = optimizer(model.parameters())
        if wrap:
            bagua_ref.init_process_group()
            model.with_bagua([made], Algorithm.init(name), do_flatten=do_flatten)
        for step in range(6):
            made.zero_grad(set_to_none=step < 2)
            if step == 3:
                model[0].weight.data = model[0].weight.data.t()
            elif step == 4:
                model[0].weight.grad = model[0].weight.grad.t()
                model[0].bias.grad = model[0].bias.grad[:1].expand(3).clone()
            model(torch.arange(6.0).reshape(2, 3)).square().mean().backward()
            made.step()
        return [p.detach().clone() for p in model.parameters()]

    expected = train(wrap=False)
    # a mean of equals is what each of them was
    for rank in SimulatedWorld(2).run(lambda comm: train(wrap=True)):
        for ours, theirs in zip(rank, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.t(),
            (
                r"tensor 'w' has shape \(3, 2\) and torch.float32, but its bucket was made for"
                r" shape \(2, 3\)"
            ),
        ),
        (lambda x: x[:1], r"'w' has shape \(1, 3\)"),
        (
            lambda x: x.view(torch.int32),
            "'w' has shape .* and torch.int32, but its bucket .* torch.float32; make the bucket",
        ),
    ],
    ids=["transposed", "shorter", "reinterpreted"],
)
def test_S2_3_another_shape_or_dtype_in_the_same_memory_is_refused(
    change: Any, message: str, flatten: bool
) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).ensure_bagua_tensor("w")
    bucket = BaguaBucket([tensor], "0", flatten)
    bucket.append_python_op(lambda name: None)
    tensor.data = change(tensor.data)
    with pytest.raises(ValueError, match=message):
        bucket.execute()
