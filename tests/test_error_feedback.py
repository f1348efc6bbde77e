"""Tests of error memory: other buckets, NaN rounds, 16 bits, padding, and what is refused
(S11.1).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.trainings import Given, batch, by_name, network, on_every_rank, simulate, train
from torch import nn

import bagua_ref
from bagua_ref.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm, QAdamAlgorithm
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.errors import CommunicationError

ONE_BIT: dict[str, Any] = {"compression": "OneBit", "error_feedback": True}
Pair = tuple[Any, torch.optim.Optimizer]


def training(name: str, **options: Any) -> Pair:
    optimizer, algorithm = by_name(name, module := network(), **{**ONE_BIT, **options})
    return module.with_bagua([optimizer], algorithm), optimizer  # type: ignore[operator]


bytegrad = partial(training, "bytegrad", momentum=0.9, hierarchical=False)
qadam = partial(training, "qadam", hierarchical=False)
diloco = partial(training, "diloco", period=2, fragments=2)
ALL: dict[str, Callable[..., Pair]] = {"bytegrad": bytegrad, "qadam": qadam, "diloco": diloco}
EACH = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def kept(module: Any) -> list[torch.Tensor]:
    """Return copies of this rank's e and f, bucket by bucket."""
    return [
        entry[name]
        for entry in module.bagua_algorithm.state_dict()["memories"]
        for name in ("worker", "server")
    ]


def assert_same(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        assert_equal(a, b, EXACT)


# Training


@pytest.mark.proof
def test_qadam_with_one_bit_and_error_memory_learns_the_digits() -> None:
    pytest.importorskip("sklearn")
    from bagua_ref.cli import demo

    settings, digits = demo.Settings(ranks=2, epochs=8), demo.Digits.load()

    def rank(r: int) -> float:
        torch.manual_seed(0)
        model = demo.make_model()
        optimizer = demo.make_optimizer("qadam", model.parameters())
        model.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False, **ONE_BIT))
        for images, labels in digits.batches(settings, r, 2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        assert optimizer.step_id > 2 * optimizer.warmup_steps
        with torch.no_grad():
            return (
                (model(digits.test_images).argmax(1) == digits.test_labels).double().mean().item()
            )

    accuracies = simulate(2, rank)
    assert accuracies[0] == accuracies[1] > 0.93, accuracies


@pytest.mark.parametrize("make", [bytegrad, qadam], ids=["bytegrad", "qadam"])
@on_every_rank(2)
def test_memories_start_at_zero_in_buckets_of_other_tensors(
    r: int, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = make()
    train(module, optimizer, r, range(4))
    assert len(kept(module)) == 2
    bagua_ref.barrier()
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1")
    module._bagua.reset()
    assert len(kept(module)) == 8  # four buckets
    assert not any(memory.any() for memory in kept(module))
    train(module, optimizer, r, range(4, 5))


@on_every_rank(2)
def test_S11_1_what_16_bit_dtypes_round_away_is_not_remembered_and_payloads_are_float32(
    r: int,
) -> None:
    module = Given([torch.zeros(4)]).to(torch.float16)
    algorithm = ByteGradAlgorithm(hierarchical=False, compression="MXFP8", error_feedback=True)
    module.with_bagua([torch.optim.SGD(module.parameters(), lr=0.0)], algorithm)
    module([torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float16)]).backward()
    assert not any(memory.any() for memory in kept(module))
    # (448 + 1/1024) / 2 has more digits than a float16; MXFP8 takes both, so that nothing is left
    # out.
    module.zero_grad()
    module([torch.full((4,), 448.0 if r else 2.0**-10, dtype=torch.float16)]).backward()
    worker, server = kept(module)
    assert not worker.any()
    assert server.any()  # of the mean as float32; the float16 nearest to it has no error


@pytest.mark.parametrize("delay", [0, 1])
@on_every_rank(2)
def test_S9_5_a_mean_that_is_not_finite_leaves_all_memories_of_its_fragment(
    r: int, delay: int
) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    algorithm = DiLoCoAlgorithm(2, delay=delay, compression="MXFP4", error_feedback=True)
    module.with_bagua([optimizer], algorithm)
    train(module, optimizer, r, range(2))
    before = kept(module)
    assert before[0].any()
    if r == 1:
        with torch.no_grad():
            # some chunks and blocks of the fragment remain finite
            module[0].weight[0, 0] = torch.inf
    for step in (2, 3):
        module(batch(r, step)).sum().backward()
        for parameter in module.parameters():
            parameter.grad.zero_()
        if step == 2:
            optimizer.step()
    with pytest.raises(
        CommunicationError,
        match=r"fragment 0 was not applied: .* is not finite in '0.weight', as training has",
    ):
        optimizer.step()
    assert_same(kept(module), before)


def test_memories_are_float32_whatever_the_default_dtype_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        memory = ErrorMemory(4, 4, 2, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert memory.worker.dtype is memory.server.dtype is torch.float32


# States


def saved_by(make: Callable[..., Pair], ranks: int) -> list[Any]:
    def rank(r: int) -> Any:
        module, optimizer = make()
        train(module, optimizer, r, range(4))
        return copy.deepcopy(
            [part.state_dict() for part in (module, optimizer, module.bagua_algorithm)]
        )

    return simulate(ranks, rank)


def test_memories_of_other_buckets_are_dropped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = saved_by(bytegrad, 2)
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1")

    def rank(r: int) -> None:
        module, optimizer = bytegrad()
        train(module, optimizer, r, range(2))
        with pytest.warns(
            UserWarning,
            match="1 of 1 error memories were saved for buckets that this training does not have",
        ):
            module.bagua_algorithm.load_state_dict(saved[r][2])
        assert not any(memory.any() for memory in kept(module))

    simulate(2, rank)


def test_without_error_memory_states_hold_none_and_those_of_a_training_with_it_load() -> None:
    saved = saved_by(bytegrad, 2)

    def rank(r: int) -> None:
        module, _ = bytegrad(compression="MinMaxUInt8", error_feedback=False)
        assert module.bagua_algorithm.rank_state == frozenset()
        module.bagua_algorithm.load_state_dict(saved[r][2])
        assert module.bagua_algorithm.state_dict().keys() == {
            "version",
            "algorithm",
            "rank",
            "world_size",
            "train_step_counter",
            "steps_of_optimizers",
        }
        other, _ = bytegrad()
        other.bagua_algorithm.load_state_dict(module.bagua_algorithm.state_dict())
        assert not any(memory.any() for memory in kept(other))

    simulate(2, rank)


# Ranks that differ, and bad input


@EACH
@on_every_rank(1)
def test_one_bit_warns_without_error_memory_only(r: int, make: Callable[..., Pair]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, optimizer = make()
        train(module, optimizer, r, range(4))


@on_every_rank(2)
def test_a_bucket_refuses_a_memory_that_does_not_fit(r: int) -> None:
    bucket = BaguaBucket([torch.ones(4).ensure_bagua_tensor("t")], "b", flatten=True)
    memory = ErrorMemory(4, 4, 1, bucket.device)
    with pytest.raises(ValueError, match="error_memory needs compression"):
        bucket.append_centralized_synchronous_op(scattergather=True, error_memory=memory)
    with pytest.raises(
        ValueError, match=r"error_memory is for 4 elements in 1 chunks; bucket 'b' has 4 in 2"
    ):
        bucket.append_centralized_synchronous_op(
            scattergather=True, compression="MXFP8", error_memory=memory
        )
