"""Tests of powersgd and topk: torch's own hook, what counts as a step, bad input, states, and training over gloo (S10, S11.2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch
from tests.trainings import batch, network, simulate, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm, PowerSGDAlgorithm, TopKAlgorithm
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import TopK
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas.low_rank import orthonormalize

POWERSGD = PowerSGDAlgorithm(1, warmup_steps=0, min_compression_rate=0.5)
TOPK = TopKAlgorithm(0.2)
BOTH = pytest.mark.parametrize("algorithm", [POWERSGD, TOPK], ids=["powersgd", "topk"])


def wrapped(algorithm: Algorithm, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    module = network(dtype=dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module.with_bagua([optimizer], algorithm), optimizer


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(batch(rank, step, next(module.parameters()).dtype)).square().mean().backward()
        optimizer.step()


# torch's own hook


class TorchsBucket:
    """A bucket of DDP's, as far as torch's hook uses it."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._shapes = [gradient.shape for gradient in gradients]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Given(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> Any:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


SHAPES = [(5,), (24, 16), (40, 9), (3,), (16, 4, 3, 3)]


def beside_torchs(rank: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return every round's gradients and errors, ours and those of torch's hook from equal e and Q."""
    module: Any = Given(SHAPES)
    algorithm = PowerSGDAlgorithm(rank, warmup_steps=0, memory="averaged", min_compression_rate=1.0)
    module.with_bagua([torch.optim.SGD(module.parameters(), lr=0.0)], algorithm)
    kept = module.bagua_algorithm
    matrices = [f"weights.{place}" for place in (1, 2, 4)]
    theirs = torchs.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1.0)
    theirs.iter = 2
    seen = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    trend = [torch.randn(shape, generator=torch.Generator().manual_seed(99)) for shape in SHAPES]
    for number in range(20):
        gradients = [t + torch.randn(t.shape, generator=generator) for t in trend]
        bucket = TorchsBucket(gradients)
        if number:  # in the first round, Q is random on both sides
            errors = [kept.memories[name].reshape(-1) if name in matrices else torch.zeros(5 if name[-1] == "0" else 3)
                      for name in (f"weights.{place}" for place in range(5))]  # fmt: skip
            theirs.error_dict[0] = torch.cat(errors)
            theirs.p_memory_dict[0] = torch.zeros(sum(rank * SHAPES[int(name[-1])][0] for name in matrices))
            theirs.q_memory_dict[0] = torch.cat([kept.factors[name].reshape(-1) for name in matrices])
            torchs.powerSGD_hook(theirs, bucket).wait()
        module.zero_grad()
        module(gradients).backward()
        if number:
            ours = [w.grad.clone() for w in module.weights]
            ends = theirs.error_dict[0].split([g.numel() for g in gradients])
            seen.append(
                (
                    ours + [kept.memories[name].clone().reshape(-1) for name in matrices],
                    bucket.gradients() + [ends[int(name[-1])].clone() for name in matrices],
                )
            )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (2, 4), (4, 4)])
def test_S10_3_each_round_gives_what_torchs_hook_gives_from_equal_memories_and_factors(ranks: int, rank: int) -> None:
    for rounds in launch(beside_torchs, ranks, rank):
        for ours, theirs in rounds:
            size = max(float(x.abs().max()) for x in theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert_equal(mine, other, SUM(16 * ranks), magnitude=size)


def test_S10_3_columns_of_the_largest_numbers_are_orthonormalized() -> None:
    columns = torch.tensor([[1e300, 1e300], [1e300, -1e300]], dtype=torch.float64)
    orthonormalize([columns])
    assert_equal(columns.T @ columns, torch.eye(2, dtype=torch.float64), SUM(4), magnitude=1.0)


# Training


def test_S10_2_a_local_memory_has_nothing_of_what_the_factors_span() -> None:
    def rank(r: int) -> None:
        module: Any = Given([(6, 5)])
        module.with_bagua([torch.optim.SGD(module.parameters(), lr=0.0)], POWERSGD)
        module([torch.randn(6, 5, generator=torch.Generator().manual_seed(r))]).backward()
        left = module.bagua_algorithm.memories["weights.0"]
        assert (left.T @ module.weights[0].grad).abs().max() < 1e-5  # the columns of the gradient are multiples of P
        assert left.abs().max() > 0.1

    simulate(2, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_full_rank_and_full_ratio_are_the_mean(dtype: torch.dtype) -> None:
    full = [PowerSGDAlgorithm(99, warmup_steps=0, min_compression_rate=0.01), TopKAlgorithm(1.0)]

    def rank(r: int) -> list[torch.Tensor]:
        found = []
        for algorithm in [GradientAllReduceAlgorithm(), *(full if dtype is not torch.float64 else full[:1])]:
            module, optimizer = wrapped(algorithm, dtype)
            train(module, optimizer, r, range(1))
            found.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        return found

    for mean, low_rank, *sparse in simulate(3, rank):
        assert_equal(
            low_rank, mean, SUM(1000 if dtype is torch.float32 else 4 if dtype is torch.bfloat16 else 10**5), magnitude=1.0
        )
        for found in sparse:
            assert_equal(found, mean, EXACT)


@BOTH
def test_it_trains_over_gloo_as_in_the_simulation_to_the_bit(algorithm: Algorithm) -> None:
    real = launch(train_alone, 2, algorithm)
    for mine, wanted in zip(real, simulate(2, lambda r: train_alone(algorithm)), strict=True):
        assert_equal(mine, wanted, EXACT)


def train_alone(algorithm: Algorithm) -> torch.Tensor:
    torch.set_num_threads(1)
    module, optimizer = wrapped(algorithm)
    train(module, optimizer, bagua_ref.get_rank(), range(6))
    return weights(module)


@BOTH
def test_under_no_sync_gradients_are_local_and_no_round_counts(algorithm: Algorithm) -> None:
    def rank(r: int) -> None:
        module, optimizer = wrapped(algorithm)
        with module.no_sync():
            module(batch(r, 0)).square().mean().backward()
        assert module.bagua_algorithm.rounds == 0
        alone = network()
        alone(batch(r, 0)).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), alone.parameters(), strict=True))
        module(batch(r, 1)).square().mean().backward()
        assert module.bagua_algorithm.rounds == 1
        optimizer.step()

    simulate(2, rank)


def test_steps_that_a_scaler_skips_are_none_of_the_warm_up_and_leave_no_trace() -> None:
    def rank(r: int) -> list[Any]:
        module, optimizer = wrapped(PowerSGDAlgorithm(1, warmup_steps=2, min_compression_rate=0.5))
        scaler = bagua_ref.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        seen = []
        for step in range(6):
            factor = torch.inf if r == 0 and step in (1, 4) else 1.0
            optimizer.zero_grad()
            scaler.scale(module(batch(r, step)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((module._bagua.steps_of_optimizers[0], module.bagua_algorithm.rounds, scaler.get_scale()))
        kept = module.bagua_algorithm
        assert all(kept.memories[name].isfinite().all() and kept.factors[name].isfinite().all() for name in kept.factors)
        assert weights(module).isfinite().all()
        return seen

    for seen in simulate(2, rank):
        assert seen == [(1, 0, 4.0), (1, 0, 2.0), (2, 0, 2.0), (3, 1, 2.0), (3, 2, 1.0), (4, 3, 1.0)]


def test_memories_and_factors_survive_new_buckets_and_small_gradients_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(r: int, anew: bool) -> torch.Tensor:
        found = []
        for algorithm in (POWERSGD, TOPK):
            module, optimizer = wrapped(algorithm)
            train(module, optimizer, r, range(3))
            if anew:
                module._bagua.reset()
            train(module, optimizer, r, range(3, 6))
            found.append(weights(module))
            if algorithm is POWERSGD:
                assert set(module.bagua_algorithm.memories) == {"0.weight", "2.weight"}
        return torch.cat(found)

    for mine, wanted in zip(simulate(2, lambda r: rank(r, True)), simulate(2, lambda r: rank(r, False)), strict=True):
        assert_equal(mine, wanted, EXACT)


def test_a_bucket_sends_two_messages_of_exactly_the_bytes_of_P_Q_and_what_is_not_compressed() -> None:
    def rank(r: int) -> int:
        module, optimizer = wrapped(PowerSGDAlgorithm(2, warmup_steps=0, min_compression_rate=0.5))
        sizes: list[int] = []
        comm = module._bagua.process_group.get_global_communicator()
        allreduce = comm.allreduce_inplace
        comm.allreduce_inplace = lambda x, op: (sizes.append(x.numel()), allreduce(x, op))[1]
        before = comm.bytes_sent
        train(module, optimizer, r, range(1))
        # Matrices of 8 x 6 and 3 x 8, and biases of 8 and 3.
        assert sizes == [2 * (8 + 3) + 8 + 3, 2 * (6 + 8)]
        return comm.bytes_sent - before

    assert simulate(2, rank) == [4 * (33 + 28)] * 2


@pytest.mark.parametrize(
    ("ranks", "size", "shape"),
    [(4, 3e38, (8, 6)), (1, 1e38, (64, 8)), (2, torch.nan, (8, 6))],
    ids=["in the first message", "in the second message", "on one rank"],
)
def test_S10_4_what_overflows_is_nan_on_every_rank_and_leaves_no_trace(ranks: int, size: float, shape: Any) -> None:
    def rank(r: int) -> None:
        module: Any = Given([shape])
        module.with_bagua([torch.optim.SGD(module.parameters(), lr=0.0)], POWERSGD)
        bad = torch.ones(shape)
        if ranks != 2:
            bad.fill_(size)
        elif r == 1:
            bad[0, 0] = size
        for gradient in (bad, torch.ones(shape)):
            module.zero_grad()
            module([gradient]).backward()
            assert module.weights[0].grad.isnan().all() == (gradient is bad)
        assert_equal(module.weights[0].grad, torch.ones(shape), SUM(10))

    simulate(ranks, rank)


@BOTH
def test_a_step_that_no_backward_preceded_counts_as_none(algorithm: Algorithm) -> None:
    def rank(r: int) -> None:
        module, optimizer = wrapped(algorithm)
        train(module, optimizer, r, range(2))
        optimizer.zero_grad()
        optimizer.step()
        assert module._bagua.steps_of_optimizers == [2]

    simulate(2, rank)


# Ranks that differ


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [(POWERSGD, "steps"), (POWERSGD, "rounds"), (POWERSGD, "factors"), (POWERSGD, "weights"), (TOPK, "rounds"), (TOPK, "weights")],
)
def test_states_that_differ_between_ranks_are_an_error_on_every_rank(algorithm: Algorithm, what: str) -> None:
    def rank(r: int) -> str:
        module, optimizer = wrapped(algorithm)
        train(module, optimizer, r, range(2))
        state = module.bagua_algorithm.state_dict()
        if r and what == "steps":
            state["steps_of_optimizers"] = [7]
        if r and what == "rounds":
            state["rounds"] = 5
        if r and what == "factors":
            state["factors"] = {name: factor + 1 for name, factor in state["factors"].items()}
        module.bagua_algorithm.load_state_dict(state)
        if r and what == "weights":
            module.load_state_dict({name: w + 1 for name, w in module.state_dict().items()})
        try:
            train(module, optimizer, r, range(2, 3))
        except CommunicationError as error:
            return str(error)
        return "no error"

    messages = simulate(2, rank)
    assert all("disagree" in message for message in messages), messages


def test_options_that_differ_between_ranks_are_an_error_when_wrapping() -> None:
    def rank(r: int) -> None:
        with pytest.raises(ValueError, match="PowerSGDAlgorithm"):
            wrapped(PowerSGDAlgorithm(1 + r, warmup_steps=0))

    simulate(2, rank)


# States


@BOTH
def test_memories_of_another_rank_are_refused_by_name_unless_they_are_dropped(algorithm: Algorithm) -> None:
    def save(r: int) -> tuple[Any, Any]:
        module, optimizer = wrapped(algorithm)
        train(module, optimizer, r, range(3))
        return copy.deepcopy(module.bagua_algorithm.state_dict()), copy.deepcopy(module.state_dict())

    saved = simulate(3, save)

    def rank(r: int) -> torch.Tensor:
        module, optimizer = wrapped(algorithm)
        module.load_state_dict(saved[0][1])
        before = module.bagua_algorithm.state_dict()
        with pytest.raises(ValueError, match=f"memories of rank 0 of 3, and this is rank {r} of 2: .*drop_local=True"):
            module.bagua_algorithm.load_state_dict(saved[0][0])
        assert str(module.bagua_algorithm.state_dict()) == str(before)
        module.bagua_algorithm.load_state_dict(saved[0][0], drop_local=True)
        assert module.bagua_algorithm.rounds == 3
        assert all(not memory.any() for memory in module.bagua_algorithm.memories.values())
        for name, factor in saved[0][0]["factors"].items():
            assert_equal(module.bagua_algorithm.factors[name], factor, EXACT)
        train(module, optimizer, r, range(3, 5))
        return weights(module)

    ours, theirs = simulate(2, rank)
    assert_equal(ours, theirs, EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("factors"), "state is not one of powersgd: it lacks factors"),
        (lambda state: state.pop("rounds"), "state is not one of powersgd: it lacks rounds"),
        (lambda state: state.update(algorithm="topk"), "state was saved by topk, and this training uses powersgd"),
        (lambda state: state.update(version=9), "state has version 9; this version of bagua_ref reads version 1"),
        (lambda state: state["factors"].pop("0.weight"), r"factors of another model: it lacks \['0.weight'\]"),
        (lambda state: state["memories"].update({"0.weight": torch.zeros(2)}), r"memories that are not .* is \(2,\) torch.float32"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change: Any, message: str) -> None:
    def rank(r: int) -> None:
        module, optimizer = wrapped(POWERSGD)
        train(module, optimizer, r, range(2))
        before = module.bagua_algorithm.state_dict()
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(ValueError, match=message):
            module.bagua_algorithm.load_state_dict({**state, "train_step_counter": 99})
        assert str(module.bagua_algorithm.state_dict()) == str(before)

    simulate(2, rank)


# Bad input


@pytest.mark.parametrize(
    ("algorithm", "arguments", "error", "message"),
    [
        (PowerSGDAlgorithm, {"matrix_approximation_rank": 0}, ValueError, "matrix_approximation_rank=0 must be 1 or more"),
        (PowerSGDAlgorithm, {"matrix_approximation_rank": 1.5}, TypeError, "matrix_approximation_rank=1.5 must be an int"),
        (PowerSGDAlgorithm, {"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
        (PowerSGDAlgorithm, {"min_compression_rate": 0}, ValueError, "min_compression_rate=0 must be a finite number above 0"),
        (PowerSGDAlgorithm, {"min_compression_rate": float("nan")}, ValueError, "min_compression_rate=nan must be"),
        (PowerSGDAlgorithm, {"min_compression_rate": "2"}, TypeError, "min_compression_rate='2' must be a number above 0"),
        (PowerSGDAlgorithm, {"memory": "global"}, ValueError, "memory='global' must be one of 'local', 'averaged', None"),
        (PowerSGDAlgorithm, {"warm_start": 1}, TypeError, "warm_start=1 must be True or False"),
        (PowerSGDAlgorithm, {"seed": -1}, ValueError, "seed=-1 must be 0 or more"),
        (PowerSGDAlgorithm, {"seed": 2**32}, ValueError, r"seed=4294967296 must be below 2\*\*32"),
        (TopKAlgorithm, {"ratio": 0}, ValueError, "ratio=0 must be above 0 and at most 1"),
        (TopKAlgorithm, {"ratio": 1.01}, ValueError, "ratio=1.01 must be above 0 and at most 1"),
        (TopKAlgorithm, {"ratio": float("nan")}, ValueError, "ratio=nan must be above 0 and at most 1"),
        (TopKAlgorithm, {"ratio": True}, TypeError, "ratio=True must be a number"),
        (TopKAlgorithm, {"error_feedback": None}, TypeError, "error_feedback=None must be True or False"),
        (TopKAlgorithm, {"warmup_steps": "2"}, TypeError, "warmup_steps='2' must be an int"),
    ],
)
def test_options_that_are_refused(algorithm: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        algorithm(**arguments)


@pytest.mark.parametrize(
    ("algorithm", "name"), [(PowerSGDAlgorithm(warmup_steps=1), "powersgd"), (TopKAlgorithm(warmup_steps=1), "topk")]
)
def test_a_warm_up_needs_the_optimizers_whose_steps_it_counts(algorithm: Algorithm, name: str) -> None:
    def rank(r: int) -> None:
        with pytest.raises(ValueError, match=rf"optimizers=\[\]: {name} with warmup_steps > 0 counts the steps"):
            network().with_bagua([], algorithm)

    simulate(1, rank)


def test_S11_2_float64_is_refused_by_name_when_wrapping_and_when_an_operation_is_made() -> None:
    def rank(r: int) -> None:
        with pytest.raises(TypeError, match=r"parameter '0\.weight' is float64; topk takes float16, bfloat16 or float32"):
            wrapped(TOPK, torch.float64)
        bucket = BaguaBucket([torch.ones(3, dtype=torch.float64).ensure_bagua_tensor("t")], "b", flatten=True)
        with pytest.raises(TypeError, match=r"topk takes float16, bfloat16 or float32, not torch\.float64"):
            TopK(None, bucket.kernels, 3, 0.5, None, lambda: True, bucket.dtype)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at most 2147483647 elements, not 2147483648"):
            TopK(None, bucket.kernels, 2**31, 0.5, None, lambda: True, torch.float32)  # type: ignore[arg-type]

    simulate(1, rank)
