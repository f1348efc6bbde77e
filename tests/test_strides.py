"""Training of parameters that are not row-major: they keep their strides, and algorithms compute
what they do otherwise (S2.3).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.trainings import by_name, on_every_rank, simulate
from torch import Tensor, nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import CommunicationError

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
AS_PLAIN: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "decentralized": {"hierarchical": False},
    "local_sgd": {"period": 1},
    "diloco": {"period": 1, "outer_optimizer": lambda p: torch.optim.SGD(p, lr=1.0, fused=True)},
    "async": {"warmup_steps": 100},
    "topk": {"ratio": 1.0},
}
"""Algorithms that train as one process does, if all ranks have the same batch."""
COMPRESSED: dict[str, dict[str, Any]] = {
    "bytegrad": {"hierarchical": False, "compression": "OneBit", "error_feedback": True},
    "topk": {"ratio": 0.3},
    "powersgd": {"warmup_steps": 0, "min_compression_rate": 0.1, "matrix_approximation_rank": 2},
    "qadam": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "diloco": {"period": 1, "compression": "MXFP8", "error_feedback": True},
}


class Layers(nn.Module):
    """Layers whose weights are laid out in memory as users do it: channels last, transposed,
    permuted.
    """

    def __init__(self, row_major: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3)
        self.volume = nn.Conv3d(1, 2, 2)
        self.turned = nn.Parameter(torch.empty(4, 3).t())
        self.permuted = nn.Parameter(torch.empty(2, 3, 4).permute(2, 0, 1))
        self.bias = nn.Parameter(torch.empty(4))
        self.conv.to(memory_format=torch.channels_last)
        self.volume.to(memory_format=torch.channels_last_3d)
        for parameter in self.parameters():
            if row_major:
                parameter.data = parameter.data.contiguous()
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x).mean((2, 3)) @ self.turned + self.bias
        deep = self.volume(x.view(x.shape[0], 1, 2, 6, 6)).mean((2, 3, 4))
        return torch.tanh(torch.einsum("bi,ijk,bj->bk", seen, self.permuted, deep)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(step))


def step_on(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).backward()
    optimizer.step()


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in module.parameters()]


def train_plainly(
    make: Callable[[Any], torch.optim.Optimizer], steps: int = 3, row_major: bool = True
) -> list[Tensor]:
    module = Layers(row_major)
    optimizer = make(module.parameters())
    for step in range(steps):
        step_on(module, optimizer, batch(step))
    return weights(module)


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-6)


def make_run(
    name: str,
    row_major: bool = False,
    flatten: bool = True,
    *,
    table: dict[str, dict[str, Any]] | None = None,
    optimizer: str = "SGD",
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Return layers in training, and their optimizer; ``options`` of the algorithm come on top of
    those in the table.
    """
    module = Layers(row_major)
    made_for, algorithm = by_name(
        name, module, **{**(table or {**AS_PLAIN, **COMPRESSED})[name], **options}
    )
    if name != "qadam":
        made_for = FUSED[optimizer](module.parameters())
    return module.with_bagua([made_for], algorithm, do_flatten=flatten), made_for  # type: ignore[operator]


# its buckets are always flat


@pytest.mark.parametrize("flatten", [True, False])
def test_S2_3_a_bucket_holds_dense_tensors_in_the_order_of_memory_and_others_row_major(
    flatten: bool,
) -> None:
    def made() -> dict[str, Tensor]:
        return {
            "turned": torch.arange(6.0).view(3, 2).t(),
            "channels last": (
                torch.arange(16.0).view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last)
                + 10
            ),
            "gapped": torch.arange(12.0).view(4, 3).t()[:, ::2] + 0,
            "with gaps": torch.arange(30, 42.0).view(4, 3)[:, ::2],
            "expanded": torch.arange(50, 53.0).expand(2, 3),
            "single": torch.arange(60, 64.0).view(1, 4, 1).permute(1, 2, 0),
            "empty": torch.empty(0, 3).t(),
        }

    expected, tensors = made(), made()
    bucket = BaguaBucket(
        [tensor.ensure_bagua_tensor(name) for name, tensor in tensors.items()],
        "0",
        flatten,
        alignment=5,
    )
    seen: list[Tensor] = []
    bucket._ops = [lambda flat: (seen.append(flat.clone()), flat.mul_(2))]
    in_order = [
        t.as_strided((t.numel(),), (1,)) if n not in ("with gaps", "expanded") else t.reshape(-1)
        for n, t in expected.items()
    ]
    wanted = torch.cat([*in_order, torch.zeros(4)])
    assert torch.equal(bucket.flattened_tensor(), wanted)
    bucket.execute()
    assert torch.equal(seen[0], wanted)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, 2 * expected[name]), name
        if name not in ("with gaps", "expanded"):
            assert tensor.stride() == expected[name].stride(), name
        elif flatten or name == "expanded":
            assert tensor.is_contiguous(), name
    assert bucket.check_flatten() is flatten


def test_S2_3_an_expanded_gradient_becomes_one_with_the_weight_s_strides() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2).t())
    parameter.bagua_ensure_grad().ensure_bagua_tensor(
        "p", "", lambda p: p.grad, lambda p, grad: setattr(p, "grad", grad)
    )
    bucket = BaguaBucket([parameter], "0", flatten=False)
    bucket._ops = [lambda flat: flat.mul_(2)]
    parameter.grad = torch.arange(3.0).expand(2, 3)
    bucket.execute()
    assert parameter.grad.stride() == (1, 2)
    assert parameter.grad.tolist() == [[0, 2, 4]] * 2


def test_S2_3_gradients_and_storage_keep_a_parameter_s_strides() -> None:
    turned, gapped = torch.ones(3, 2).t(), torch.ones(2, 4)[:, ::2]
    for tensor, strides in ((turned, (1, 2)), (gapped, (2, 1))):
        parameter = nn.Parameter(tensor)
        assert parameter.bagua_ensure_grad().grad.stride() == strides
    storage = torch.arange(8.0).untyped_storage()
    turned.bagua_set_storage(storage, 2)
    assert torch.equal(turned, torch.arange(2, 8.0).view(3, 2).t())
    assert turned.stride() == (1, 2)
    gapped.bagua_set_storage(storage, 0)
    assert torch.equal(gapped, torch.arange(4.0).view(2, 2))


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized", "topk", "local_sgd"])
@on_every_rank(2)
def test_S2_3_ranks_with_other_strides_are_refused_on_every_rank(
    rank: int, name: str, wrapper: bool
) -> None:
    model = nn.Linear(3, 2)
    if rank == 1:
        model.weight = nn.Parameter(torch.zeros(3, 2).t())
    optimizer, algorithm = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        Algorithm.init(name, **AS_PLAIN[name]),
    )
    wrap = (
        partial(bagua_ref.data_parallel.DistributedDataParallel, model)
        if wrapper
        else model.with_bagua
    )
    with pytest.raises(
        ValueError,
        match=r"rank 0 has parameter 'weight': \(2, 3\) .*, rank 1 has .* strides \(1, 2\)",
    ):
        wrap(optimizers=[optimizer], algorithm=algorithm)


@on_every_rank(2)
def test_S2_3_strides_of_axes_of_length_1_and_of_what_is_not_trained_may_differ(rank: int) -> None:
    model = nn.Conv2d(4, 4, 1)
    model.register_buffer("extra", torch.zeros(3, 2).t() if rank else torch.zeros(2, 3))
    model.frozen = nn.Parameter(
        torch.zeros(3, 2).t() if rank else torch.zeros(2, 3), requires_grad=False
    )
    model.turned = nn.Parameter(torch.zeros(12).as_strided((3, 4, 1), (1, 3, 5 + rank)))
    if rank:
        model.to(memory_format=torch.channels_last)
    model.with_bagua([], Algorithm.init("gradient_allreduce"))


@pytest.mark.parametrize(
    ("name", "flatten"),
    [
        *(
            (name, True)
            for name in (*AS_PLAIN, "bytegrad", "powersgd", "qadam", "low_precision_decentralized")
        ),
        *((name, False) for name in ("gradient_allreduce", "topk", "bytegrad", "qadam")),
    ],
)
def test_S2_3_new_strides_make_new_buckets_or_are_refused(name: str, flatten: bool) -> None:
    exact = name in AS_PLAIN

    def train(rank: int) -> list[Tensor]:
        module, made = make_run(
            name, True, flatten, table=AS_PLAIN if exact else COMPRESSED, optimizer="Adam"
        )
        for step in range(6):
            if step in (2, 4):
                module.conv.to(
                    memory_format=torch.channels_last if step == 2 else torch.contiguous_format
                )
                module.turned.data = (
                    module.turned.data.t().contiguous().t()
                    if step == 2
                    else module.turned.data.contiguous()
                )
            if step == 2 and name == "async":
                with pytest.raises(
                    RuntimeError,
                    match=(
                        r"'turned' had strides .4, 1. when .* has .1, 3. now.*with_bagua\(\) again"
                    ),
                ):
                    module(batch(step))
                return []
            step_on(module, made, batch(step))
            assert module.turned.stride() == ((1, 3) if step in (2, 3) else (4, 1))
            assert module.turned.grad.stride() == module.turned.stride()
        return weights(module)

    for ours in simulate(2, train):
        if exact and ours:
            assert_close(ours, train_plainly(lambda p: torch.optim.Adam(p, lr=0.05), steps=6))


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_S11_2_memories_of_parameters_follow_new_strides(name: str, flatten: bool) -> None:
    def train(rank: int, changes: bool) -> list[Tensor]:
        module, made = make_run(name, True, flatten)
        for step in range(6):
            if changes and step in (2, 4):
                module.conv.to(
                    memory_format=torch.channels_last if step == 2 else torch.contiguous_format
                )
            step_on(module, made, batch(step)[rank::2])
        return [*weights(module), *module.bagua_algorithm.state_dict()["memories"].values()]

    ours, theirs = (simulate(2, partial(train, changes=changes)) for changes in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)


@on_every_rank(2)
def test_S11_1_memories_of_former_strides_are_dropped(rank: int) -> None:
    module = nn.Conv2d(2, 3, 3, bias=False)
    made = torch.optim.SGD(module.parameters(), lr=0.05)
    module.with_bagua([made], Algorithm.init("bytegrad", hierarchical=False, error_feedback=True))
    for step in range(2):
        made.zero_grad()
        module(batch(step)).square().mean().backward()
        made.step()
        module.to(memory_format=torch.channels_last)
    (memory,) = module.bagua_algorithm.state_dict()["memories"]
    assert memory["tensors"] == ["weight (3, 2, 3, 3) with strides (18, 1, 6, 2)"]


def test_S5_5_momenta_of_other_strides_on_one_rank_enter_buckets_in_the_order_of_the_weights() -> (
    None
):
    def train(rank: int, turns: bool) -> list[Tensor]:
        module = Layers()
        made = QAdamOptimizer(module.parameters(), lr=0.05, warmup_steps=3)
        module.with_bagua([], Algorithm.init("qadam", q_adam_optimizer=made, hierarchical=False))
        for step in range(5):
            if turns and rank == 1 and step == 2:
                for state in made.state.values():
                    state["exp_avg"] = state["exp_avg"].contiguous()
            step_on(module, made, batch(step)[rank::2])
        return weights(module)

    ours, theirs = (simulate(2, partial(train, turns=turns)) for turns in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


@on_every_rank(2)
def test_S9_2_global_weights_of_other_strides_are_loaded(rank: int) -> None:
    def make(row_major: bool) -> tuple[Any, torch.optim.Optimizer]:
        module = Layers(row_major)
        made = torch.optim.SGD(module.parameters(), lr=0.05)
        outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, fused=True)
        module.with_bagua(
            [made], Algorithm.init("diloco", period=2, delay=1, outer_optimizer=outer)
        )
        return module, made

    module, made = make(row_major=True)
    for step in range(3):
        step_on(module, made, batch(step)[rank::2])
    again, other = make(row_major=False)
    again.load_state_dict(module.state_dict())
    again.bagua_algorithm.load_state_dict(module.bagua_algorithm.state_dict())
    for step in range(3, 7):
        step_on(module, made, batch(step)[rank::2])
        step_on(again, other, batch(step)[rank::2])
    assert_close(weights(again), weights(module))


@pytest.mark.parametrize("flatten", [True, False])
@on_every_rank(2)
def test_S2_3_gradients_that_are_there_when_wrapping_get_the_strides_of_the_weights(
    rank: int, flatten: bool
) -> None:
    module = Layers()
    made = FUSED["Adam"](module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    module.turned.grad = torch.zeros(4, 3).t() if rank else torch.zeros(3, 4)
    kept = module.turned.grad
    module.with_bagua([made], Algorithm.init("gradient_allreduce"), do_flatten=flatten)
    for step in range(3):
        made.zero_grad(set_to_none=False)
        module(batch(step)[rank::2]).backward()
        made.step()
    assert module.turned.grad is kept
    ours = weights(module)
    assert_close(ours, train_plainly(FUSED["Adam"]))


def test_S2_3_gradients_accumulated_before_strides_changed_stay() -> None:
    def train(rank: int, wrap: bool) -> list[Tensor]:
        module = Layers(row_major=True)
        made = torch.optim.SGD(module.parameters(), lr=0.05)
        if wrap:
            module.with_bagua([made], Algorithm.init("gradient_allreduce"))
        with module.no_sync() if wrap else torch.enable_grad():
            module(batch(0)).backward()
            module.conv.to(memory_format=torch.channels_last)
            plan = module._bagua.rounds._plan if wrap else None
            module(batch(1)).backward()
            assert not wrap or module._bagua.rounds._plan == plan, (
                "nothing is communicated under no_sync, so no plan is made"
            )
        module(batch(2)).backward()
        assert not wrap or module._bagua.rounds._plan != plan
        made.step()
        return weights(module)

    expected = train(0, wrap=False)
    for ours in simulate(2, partial(train, wrap=True)):
        assert_close(ours, expected)


@pytest.mark.parametrize(
    ("name", "turned", "message"),
    [
        *(
            (name, False, "rank 1 is about to make new buckets")
            for name in (
                "gradient_allreduce",
                "decentralized",
                "local_sgd",
                "topk",
                "low_precision_decentralized",
            )
        ),
        ("local_sgd", True, "buckets of plan"),
    ],
)
@on_every_rank(2)
def test_S2_3_new_strides_that_differ_are_an_error_on_every_rank(
    rank: int, name: str, turned: bool, message: str
) -> None:
    module, made = make_run(name, row_major=True)
    step_on(module, made, batch(0))
    if rank == 1:
        module.conv.to(memory_format=torch.channels_last)
    elif turned:
        module.turned.data = module.turned.data.t().contiguous().t()
    with pytest.raises(CommunicationError, match=message):
        step_on(module, made, batch(1))


@pytest.mark.parametrize("inside", [False, True])
@on_every_rank(2)
def test_S2_3_new_strides_before_backward_or_in_train_reach_the_gradients(
    rank: int, inside: bool
) -> None:
    found = []
    for wrap in (True, False):
        module = Layers(row_major=True)
        made = torch.optim.SGD(module.parameters(), lr=0.05, fused=True)
        context: Any = nullcontext()
        if wrap and inside:
            context = bagua_ref.train(module, [made], Algorithm.init("gradient_allreduce"))
        elif wrap:
            module.with_bagua([made], Algorithm.init("gradient_allreduce"))
        with context:
            for step in range(4):
                made.zero_grad()
                loss = module(batch(step))
                if step == 1:
                    module.turned.data = module.turned.data.t().contiguous().t()
                loss.backward()
                made.step()
                if step == 1:
                    module.conv.to(memory_format=torch.channels_last)
        found.append(weights(module))
    assert_close(*found)


@on_every_rank(2)
def test_S2_3_a_rank_without_batches_follows_new_strides(rank: int) -> list[Tensor]:
    module, made = make_run("gradient_allreduce", row_major=True, optimizer="Adam")
    with bagua_ref.join([module]):
        step_on(module, made, batch(0))
        module.conv.to(memory_format=torch.channels_last)
        for step in range(1, 3) if rank == 0 else ():
            step_on(module, made, batch(step))
    return weights(module)


@on_every_rank(2)
def test_S2_3_loaded_optimizer_state_gets_the_strides_of_the_weights(rank: int) -> None:
    row_major = Layers(row_major=True)
    saving = FUSED["Adam"](row_major.parameters())
    step_on(row_major, saving, batch(0))
    module, made = make_run("gradient_allreduce", optimizer="Adam")
    module.load_state_dict(row_major.state_dict())
    made.load_state_dict(copy.deepcopy(saving.state_dict()))
    for step in (1, 2):
        step_on(module, made, batch(step))
    assert_close(weights(module), train_plainly(FUSED["Adam"]))


@pytest.mark.parametrize("flatten", [True, False])
def test_S2_5_gradients_of_parameters_that_a_rank_does_not_use_have_their_strides(
    flatten: bool,
) -> None:
    def train(rank: int) -> list[Tensor]:
        module = Layers()
        module.forward = lambda x: (
            (x * module.turned).square().sum() if rank else module.bias.square().sum()
        )
        made = FUSED["Adam"](module.parameters())
        module.with_bagua(
            [made],
            Algorithm.init("gradient_allreduce"),
            do_flatten=flatten,
            find_unused_parameters=True,
        )
        for step in range(3):
            step_on(module, made, torch.arange(1.0, 13.0).view(3, 4) + step)
        return [module.turned.detach(), module.bias.detach()]

    alone = Layers(row_major=True)
    made = FUSED["Adam"](alone.parameters())
    for step in range(3):
        made.zero_grad()
        x = torch.arange(1.0, 13.0).view(3, 4) + step
        (((x * alone.turned).square().sum() + alone.bias.square().sum()) / 2).backward()
        made.step()
    for ours in simulate(2, train):
        assert_close(ours, [alone.turned.detach(), alone.bias.detach()])


@pytest.mark.parametrize(
    "name", ["bytegrad", "topk", "qadam", "low_precision_decentralized", "diloco"]
)
@on_every_rank(2)
def test_S2_3_memories_of_other_strides_are_refused_by_name(rank: int, name: str) -> None:
    memory = {} if name == "low_precision_decentralized" else {"error_feedback": True}
    module, made = make_run(name, **memory)
    for step in range(4):
        step_on(module, made, batch(step)[rank::2])
    saved = module.bagua_algorithm.state_dict()
    again, _ = make_run(name, row_major=True, **memory)
    before = again.bagua_algorithm.state_dict()
    with pytest.raises(
        ValueError, match=r"'(conv.weight|turned).*with strides \((18, 1, 6, 2|1, 3)\)"
    ):
        again.bagua_algorithm.load_state_dict(saved)
    assert repr(again.bagua_algorithm.state_dict()) == repr(before)
