"""Tests of accelerate: its recipes equal a training by hand with a tiny GPT-2, and its LocalSGD in
simulated ranks equals gloo.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from tests import torch_programs
from tests.integrations.language_model import BATCH, by_hand, language_model, sequences
from tests.integrations.trainings import ALGORITHMS, CASES, STEPS, optimizer_of, weights_of
from tests.launch import launch, preload
from tests.same import assert_same
from torch.nn.parallel import DistributedDataParallel

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.simulation import SimulatedWorld

preload(__name__)


def rank() -> int:
    return int(os.environ["RANK"])


def loader(accumulate: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(sequences(2 * BATCH * STEPS * accumulate), BATCH)


def loop(accelerator: Accelerator, model: Any, optimizer: Any, data: Any) -> None:
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def with_hook(name: str, accumulate: int) -> torch.Tensor:
    """Return the weights after the recipe for gradients."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = language_model(rank())
    model, optimizer, data = accelerator.prepare(
        model, optimizer_of(name, model), loader(accumulate)
    )
    model.register_comm_hook(*bagua_ref.ddp_comm_hook(name, **ALGORITHMS[name]))
    loop(accelerator, model, optimizer, data)
    return weights_of(model)


def with_wrapping(name: str, accumulate: int) -> torch.Tensor:
    """Return the weights after the recipe for all algorithms."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = accelerator.prepare_model(language_model(rank()), evaluation_mode=True)
    optimizer = optimizer_of(name, model)
    if not bagua_ref.is_initialized():
        bagua_ref.init_process_group()
    options = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
    model.with_bagua([optimizer], Algorithm.init(name, **ALGORITHMS[name], **options))
    optimizer, data = accelerator.prepare(optimizer, loader(accumulate))
    loop(accelerator, model, optimizer, data)
    assert not isinstance(model, DistributedDataParallel)
    return weights_of(model)


def hook_each() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name in ("gradient_allreduce", "bytegrad", "powersgd", "topk"):
        for accumulate in (1, 2):
            found[f"{name}, {accumulate}"] = (
                with_hook(name, accumulate),
                by_hand(rank(), name, accumulate, hook=True),
            )
    found["as with_bagua"] = (
        found["gradient_allreduce, 1"][0],
        by_hand(rank(), "gradient_allreduce", 1),
    )
    return found


def test_a_hook_under_accelerate_gives_what_it_gives_by_hand() -> None:
    for of_rank in launch(hook_each, 2, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name


def wrap_each() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, accumulate in CASES:
        found[f"{name}, {accumulate}"] = (
            with_wrapping(name, accumulate),
            by_hand(rank(), name, accumulate),
        )
    return found


def test_a_wrapped_model_under_accelerate_trains_as_by_hand() -> None:
    for of_rank in launch(wrap_each, 2, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name


def local_sgd(exact: bool) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model = torch_programs.small_model(exact)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.25))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        trained = torch_programs.train(model, exact, optimizer, after=local.step)
    accelerator.state._reset_state(reset_partial_state=True)
    return trained


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerates_local_sgd_gives_in_the_simulated_world_what_it_gives_over_gloo(
    ranks: int,
) -> None:
    program = ["LocalSGD"], ranks > 2, {"LocalSGD": local_sgd}
    real = launch(torch_programs.run, ranks, *program, init=False)
    simulated = SimulatedWorld(ranks, torch_distributed=True).run(torch_programs.run, *program)
    assert_same(simulated, real, "LocalSGD")
