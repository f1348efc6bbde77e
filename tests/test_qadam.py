"""Tests of QAdam: phases, gradients that overflow, the optimizer alone, and where v is 0 (S5.5)."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.trainings import batch, network, on_every_rank, simulate, train
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer, q_adam_optimizer
from bagua_ref.conformance import EXACT, assert_equal

WARMUP = 4


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1).clone() for t in tensors])


def momenta(module: nn.Module, optimizer: QAdamOptimizer) -> torch.Tensor:
    return flat(optimizer.state[p]["exp_avg"] for p in module.parameters())


def make(
    seed: int = 0, warmup_steps: int = WARMUP, **options: Any
) -> tuple[nn.Sequential, QAdamOptimizer]:
    module = network(seed)
    return module, QAdamOptimizer(
        module.parameters(), warmup_steps=warmup_steps, **{"lr": 0.01, **options}
    )


def wrapped(hierarchical: bool = False, **options: Any) -> tuple[nn.Sequential, QAdamOptimizer]:
    do_flatten = options.pop("do_flatten", True)
    module, optimizer = make(**options)
    return (
        module.with_bagua(
            [optimizer], QAdamAlgorithm(optimizer, hierarchical), do_flatten=do_flatten
        ),
        optimizer,
    )


def ops(module: nn.Module) -> list[str]:
    return [repr(op) for op in module.bagua_buckets[0]._ops]


@on_every_rank(5, nodes=(1, 2, 2))
def test_S5_5_the_phases_differ_in_what_is_communicated_and_change_once(r: int) -> None:
    module, optimizer = wrapped(hierarchical=True)
    algorithm = module.bagua_algorithm
    alignment = 15  # lcm(5 ranks, 3 leaders), in both phases
    resets = []
    original = module._bagua.reset
    module._bagua.reset = lambda: (resets.append(optimizer.step_id), original())
    for step in range(WARMUP + 3):
        assert algorithm.optimizer_step_id == optimizer.step_id == step
        assert algorithm.need_reset() == (step == WARMUP)
        train(module, optimizer, r, range(step, step + 1))
        bucket = module.bagua_buckets[0]
        assert bucket.flattened_tensor().numel() % alignment == 0
        assert bucket.check_flatten()
        effective = {id(t) for t in bucket.effective_tensors()}
        if step < WARMUP:
            assert [op.partition("(")[0] for op in ops(module)] == ["CentralizedFullPrecision"]
            assert effective == {id(p.grad) for p in module.parameters()}
        else:
            assert "Hierarchical" in ops(module)[1]
            assert effective == {id(optimizer.state[p]["exp_avg"]) for p in module.parameters()}
    assert resets == [WARMUP]


@pytest.mark.parametrize(
    "at", [1, WARMUP + 2], ids=["back into the warm-up", "in the compressed phase"]
)
@on_every_rank(2)
def test_S5_5_loading_uses_what_was_loaded_and_resets_where_the_phase_changes(
    r: int, at: int
) -> None:
    module, optimizer = wrapped()
    train(module, optimizer, r, range(at))
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(module, optimizer, r, range(at, WARMUP + 4))
    weights = flat(module.parameters())
    assert module.bagua_buckets[0].check_flatten()
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    # new tensors, until the next round moves them into flat storage
    assert not module.bagua_buckets[0].check_flatten()
    train(module, optimizer, r, range(at, WARMUP + 4))
    assert module.bagua_buckets[0].check_flatten()
    assert_equal(flat(module.parameters()), weights, EXACT)


@on_every_rank(2)
def test_S5_5_wrapping_past_the_warm_up_starts_compressed(r: int) -> None:
    module, optimizer = make()
    train(module, optimizer, 0, range(WARMUP))
    module.with_bagua([optimizer], QAdamAlgorithm(optimizer))
    assert not module.bagua_algorithm.need_reset()
    before = momenta(module, optimizer)
    assert torch.equal(
        flat(module.bagua_buckets[0].effective_tensors()).sort()[0], before.sort()[0]
    )
    train(module, optimizer, r, range(WARMUP, WARMUP + 1))
    assert not torch.equal(momenta(module, optimizer), before)


@pytest.mark.parametrize("listed", [True, False])
@on_every_rank(3)
def test_S5_wrapping_gives_all_ranks_the_first_ones_phase_and_options(
    r: int, listed: bool
) -> torch.Tensor:
    module, optimizer = make(warmup_steps=WARMUP + r, lr=0.1 + r)
    train(module, optimizer, 0, range(WARMUP if r == 0 else 1))
    module.with_bagua([optimizer] if listed else [], QAdamAlgorithm(optimizer))
    assert (optimizer.step_id, optimizer.warmup_steps, optimizer.param_groups[0]["lr"]) == (
        WARMUP,
        WARMUP,
        0.1,
    )
    train(module, optimizer, r, range(3))
    return momenta(module, optimizer)


class Overflows(nn.Module):
    """tanh with a gradient that overflows on demand."""

    now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        if self.now:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


def train_scaled(
    r: int,
    scaler: Any,
    hand_over: bool,
    spoiled: int | None,
    steps: list[int],
    do_flatten: bool = True,
) -> Any:
    """Train on the batches ``steps``; the gradients of batch number ``spoiled`` overflow on rank 1.

    Return the weights after every step, and the final weights, momenta and gradients.
    """
    module, optimizer = make()
    algorithm = QAdamAlgorithm(optimizer, grad_scaler=scaler if hand_over else None)
    module.with_bagua([optimizer], algorithm, do_flatten=do_flatten)
    module[1] = Overflows()  # between the layers, so that the last layer's gradients are finite
    weights = []
    for place, step in enumerate(steps):
        optimizer.zero_grad()
        module[1].now = place == spoiled and r == 1
        output = module(batch(r, step))
        scaler.scale(output.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(flat(module.parameters()))
    assert optimizer.step_id == len(steps) - (spoiled is not None)
    return weights, (
        weights[-1],
        momenta(module, optimizer),
        flat(p.grad for p in module.parameters()),
    )


@pytest.mark.parametrize("spoiled", [1, WARMUP - 1, WARMUP, WARMUP + 2])
@on_every_rank(3)
def test_S5_5_a_grad_scaler_skips_the_same_step_on_every_rank(r: int, spoiled: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights, (*end, _) = train_scaled(r, scaler, False, spoiled, list(range(WARMUP + 5)))
    assert scaler.get_scale() == 2.0
    assert torch.equal(weights[spoiled], weights[spoiled - 1])
    assert weights[-1].isfinite().all()
    return end


@pytest.mark.parametrize(
    ("spoiled", "do_flatten", "bucket_size"),
    [
        (None, True, 1),
        (2, False, 2**20),
        (WARMUP, True, 1),
        (WARMUP + 1, False, 1),
        (WARMUP + 1, True, 2**20),
    ],
)
def test_S5_5_a_grad_scaler_that_was_handed_over_changes_nothing(
    spoiled: int | None, do_flatten: bool, bucket_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_size))
    steps = list(range(WARMUP + 4))
    # the skipped step is tried again
    again = steps if spoiled is None else [*steps[: spoiled + 1], *steps[spoiled:]]

    def rank(r: int, scale: float) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        return train_scaled(
            r, scaler, True, *((None, steps) if scale == 1 else (spoiled, again)), do_flatten
        )[1]

    plain, scaled = (simulate(2, lambda r, scale=scale: rank(r, scale)) for scale in (1.0, 1024.0))
    for result, wanted in zip(scaled, plain, strict=True):
        for mine, expected in zip(result, wanted, strict=True):
            assert_equal(mine, expected, EXACT)


@on_every_rank(2)
def test_S5_5_without_a_scaler_an_overflow_makes_nan_on_every_rank(r: int) -> None:
    module, optimizer = wrapped()
    train(module, optimizer, r, range(WARMUP + 1))
    optimizer.zero_grad()
    output = module(batch(r, 0))
    (output * (float("inf") if r == 1 else 1)).sum().backward()
    optimizer.step()
    train(module, optimizer, r, range(1))
    assert flat(module.parameters()).isnan().all()


def test_S5_5_float16_weights_without_gradient_stay_in_the_compressed_phase() -> None:
    """eps = 1e-8 is zero in float16, where torch's Adam divides 0 by 0."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = QAdamOptimizer([parameter], warmup_steps=2)
    optimizer.step_id = 1
    parameter.grad = torch.zeros(3, dtype=torch.float16)
    optimizer.step()
    assert parameter.tolist() == [1, 1, 1]


def test_S5_5_large_parameters_step_block_by_block_without_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(r: int) -> torch.Tensor:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, 230), nn.Linear(230, 3)]
        layers[2].weight.data = layers[2].weight.data.t().contiguous().t()  # not contiguous
        module = nn.Sequential(*layers)
        optimizer = QAdamOptimizer(module.parameters(), lr=0.001, warmup_steps=2, eps=1e-3)
        module.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))
        train(module, optimizer, r, range(5))
        return torch.cat([flat(module.parameters()), momenta(module, optimizer)])

    in_blocks = simulate(2, rank)
    monkeypatch.setattr(q_adam_optimizer, "BLOCK", 10**9)
    for block_by_block, at_once in zip(in_blocks, simulate(2, rank), strict=True):
        assert_equal(block_by_block, at_once, EXACT)


# The optimizer alone


def test_a_copy_or_pickle_of_the_optimizer_keeps_its_phase() -> None:
    module, optimizer = make(warmup_steps=2)
    train(module, optimizer, 0, range(1))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.step_id, other.warmup_steps) == (1, 2)
        other.step_id = 5
        assert optimizer.step_id == 1


def test_a_checkpoint_of_torchs_adam_can_be_continued() -> None:
    module, optimizer = make()
    adam = torch.optim.Adam(module.parameters(), lr=0.01, foreach=False)
    train(module, adam, 0, range(2))
    reference = copy.deepcopy(module)
    continued = torch.optim.Adam(reference.parameters(), lr=0.01, foreach=False)
    continued.load_state_dict(copy.deepcopy(adam.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert (optimizer.step_id, optimizer.warmup_steps) == (2, WARMUP)
    train(module, optimizer, 0, range(2, 3))
    train(reference, continued, 0, range(2, 3))
    assert_equal(flat(module.parameters()), flat(reference.parameters()), EXACT)


def test_a_group_added_later_is_in_the_same_phase() -> None:
    module, optimizer = make()
    train(module, optimizer, 0, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [group["step_id"] for group in optimizer.param_groups] == [2, 2]
    optimizer.step()
    assert [group["step_id"] for group in optimizer.param_groups] == [3, 3]


def test_past_the_warm_up_an_optimizer_that_no_algorithm_knows_says_so() -> None:
    module, optimizer = make(warmup_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, optimizer, 0, range(2))
    with pytest.warns(UserWarning, match=r"step 3 is past warmup_steps=2.*with_bagua"):
        train(module, optimizer, 0, range(2, 3))


BAD_OPTIONS: list[Any] = [
    ({"warmup_steps": 0}, ValueError, "warmup_steps=0 must be 1 or more"),
    ({"warmup_steps": -3}, ValueError, "warmup_steps=-3"),
    ({"warmup_steps": 2.5}, TypeError, r"warmup_steps=2\.5"),
    ({"warmup_steps": True}, TypeError, "warmup_steps=True"),
    ({"lr": -1.0}, ValueError, r"lr=-1\.0"),
    ({"lr": float("nan")}, ValueError, "lr=nan"),
    ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
    ({"weight_decay": -0.1}, ValueError, r"weight_decay=-0\.1"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas=\(1\.0, 0\.9\)"),
    ({"betas": (0.9,)}, ValueError, r"betas=\(0\.9,\)"),
]


@on_every_rank(2)
def test_S5_5_with_a_warm_up_of_one_step_no_weight_moves_and_it_says_so(r: int) -> torch.Tensor:
    torch.manual_seed(0)
    module: Any = nn.Linear(3, 2)
    before = flat(module.parameters())
    with pytest.warns(UserWarning, match="warmup_steps=1 freezes v at 0"):
        optimizer = QAdamOptimizer(module.parameters(), lr=0.1, warmup_steps=1)
    module.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of elements that do not move
        for step in range(4):
            optimizer.zero_grad()
            module(torch.full((2, 3), float(step + r + 1))).square().sum().backward()
            optimizer.step()
    assert torch.equal(flat(module.parameters()), before)
    assert optimizer.step_id == 4
    return flat(module.parameters())


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QAdamOptimizer([nn.Parameter(torch.ones(2))], **options)
    if "warmup_steps" not in options:
        with pytest.raises(error, match=message):
            QAdamOptimizer([{"params": [nn.Parameter(torch.ones(2))], **options}])


def test_other_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=3 of a group must be that of all: 100"):
        QAdamOptimizer([{"params": [nn.Parameter(torch.ones(2))], "warmup_steps": 3}])
    with pytest.raises(TypeError, match="complex64"):
        QAdamOptimizer([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


class Rows(nn.Module):
    """An embedding of 12 rows, and a layer after it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.last = nn.Embedding(12, 4, dtype=dtype), nn.Linear(4, 1, dtype=dtype)

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(chosen)).square().mean()


@pytest.mark.filterwarnings("ignore:qadam freezes v:UserWarning")
@pytest.mark.parametrize(
    ("compression", "dtype"),
    [
        *((codec, torch.float32) for codec in bagua_ref.list_codecs()),
        ("OneBit", torch.bfloat16),
        ("MinMaxUInt8", torch.float16),
    ],
)
@on_every_rank(2)
def test_S5_5_where_v_froze_at_zero_weights_do_not_move(
    r: int, compression: str, dtype: torch.dtype
) -> None:
    module = Rows(dtype)
    optimizer = QAdamOptimizer(module.parameters(), lr=1e-3, warmup_steps=3, eps=1e-4)
    algorithm = QAdamAlgorithm(optimizer, False, compression=compression, error_feedback=True)
    module.with_bagua([optimizer], algorithm)
    start = module.rows.weight.detach().clone()
    for step in range(20):
        optimizer.zero_grad()
        # the last rows have their first gradients late
        module(torch.arange(6 if step < 10 else 12)[r::2]).backward()
        optimizer.step()
    state = optimizer.state[module.rows.weight]
    assert torch.equal(state["exp_avg_sq"][6:], torch.zeros(6, 4))
    assert state["exp_avg"][6:].any()
    assert torch.equal(module.rows.weight[6:], start[6:])
    assert not torch.equal(module.rows.weight[:6], start[:6])


def test_S5_5_one_warning_counts_where_v_froze_at_zero() -> None:
    def rank(r: int) -> None:
        module = Rows(torch.float16)
        module.last.float()
        module.forward = lambda chosen: module.last(module.rows(chosen).float()).mean()  # type: ignore[method-assign]
        optimizer = QAdamOptimizer(module.parameters(), lr=0.0, warmup_steps=3)
        module.with_bagua([optimizer], QAdamAlgorithm(optimizer, False))
        for _ in range(6):
            optimizer.zero_grad()
            module(torch.arange(6)).mul(torch.tensor([1e-3])).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="qadam freezes v") as caught:
        simulate(3, rank)
    (said,) = [str(warning.message) for warning in caught if "qadam" in str(warning.message)]
    assert (
        said
        == "qadam freezes v after warmup_steps=3, and elements whose v is 0 do not move from now"
        " on: some in 1 parameters had no gradient in the warm-up (24 of 48 in 'rows.weight'); if"
        " they should learn, use a larger warmup_steps; some in 1 parameters had gradients whose"
        " squares are 0 in the weights' dtype (24 of 48 in 'rows.weight'); keep these weights in"
        " float32 instead of 16 bits"
    )


def test_the_algorithm_wants_its_own_optimizer() -> None:
    module, optimizer = make()
    assert isinstance(
        Algorithm.init("qadam", q_adam_optimizer=optimizer, hierarchical=False), QAdamAlgorithm
    )
    with pytest.raises(TypeError, match="must be a QAdamOptimizer, not Adam"):
        QAdamAlgorithm(torch.optim.Adam(module.parameters()))
    with pytest.raises(TypeError, match="grad_scaler=3"):
        QAdamAlgorithm(optimizer, grad_scaler=3)


@on_every_rank(3)
def test_S5_5_a_parameter_that_the_optimizer_lacks_is_named_on_every_rank(r: int) -> None:
    module = network()
    lacking = QAdamOptimizer([module[0].weight, module[0].bias, module[2].weight])
    with pytest.raises(
        ValueError, match=r"does not hold parameter '2\.bias'.*_bagua_params_and_buffers_to_ignore"
    ):
        module.with_bagua([lacking], QAdamAlgorithm(lacking))
    mine = lacking if r == 1 else QAdamOptimizer(module.parameters())
    with pytest.raises(ValueError, match=r"'2\.bias'" if r == 1 else r"rank 1 cannot .*'2\.bias'"):
        module.with_bagua([], QAdamAlgorithm(mine))
    module[2].bias.requires_grad_(False)
    module.with_bagua([lacking], QAdamAlgorithm(lacking))
    train(module, lacking, r, range(2))
