"""Tests of wrapping: every rank gets rank 0's state, of any torch optimizer, to the bit (S5)."""

from __future__ import annotations

import re
import warnings
from itertools import chain
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainings import on_every_rank, simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.data_parallel.rounds import describe_texts
from bagua_ref.data_parallel.state_broadcast import broadcast_state
from bagua_ref.simulation import SimulatedWorld

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 1}],
    "Adagrad": [{"lr_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"foreach": False, "betas": (0.8, 0.9)}],
    "AdamW": [{"amsgrad": True}],
    "LBFGS": [{"max_iter": 3, "history_size": 2}],
    "NAdam": [{"momentum_decay": 0.01}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "SGD": [{"momentum": 0.9}, {"weight_decay": 0.1}],
}
"""Options with which an optimizer keeps more state than by default."""

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)


def network(rank: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(rank)
    # Muon accepts matrices only.
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)).to(
        dtype
    )


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Step with gradients drawn from ``seed``, which no rank's backward would produce."""
    generator = torch.Generator().manual_seed(seed)

    def closure() -> torch.Tensor:
        for parameter in module.parameters():
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = (
                grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
            )
        return torch.tensor(1.0)

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in value for tensor in tensors_in(value[key])]
    return (
        [tensor for item in value for tensor in tensors_in(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def plain(value: Any) -> Any:
    """Return ``value`` with tensors replaced by objects that compare bits and dtype."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.dtype, tuple(value.shape), value.double().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_all_alike(results: list[Any]) -> None:
    for result in results[1:]:
        assert plain(result) == plain(results[0])


def check(
    name: str, options: dict[str, Any], dtype: torch.dtype, tensor_lr: bool = False
) -> list[Any]:
    """Wrap on ranks with different histories; return each rank's state after two more steps with
    equal gradients.
    """

    def rank(r: int) -> Any:
        module = network(r, dtype)
        lr: Any = torch.tensor(0.01 * (r + 1)) if tensor_lr else 0.01 * (r + 1)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=lr, **options)
        for s in range(3 * (1 - r % 2)):  # odd ranks have no state yet
            step(module, optimizer, seed=10 * r + s)
        module.zero_grad()
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        # load_state_dict adds this default, as torch's constructor would have.
        defaults = {
            name: value for name, value in optimizer.defaults.items() if name != "differentiable"
        }
        right_after = plain((optimizer.state_dict(), defaults, list(module.parameters())))
        for s in range(2):
            step(module, optimizer, seed=s)
        return right_after, optimizer.state_dict(), list(module.parameters())

    return simulate(3, rank)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        ("Adam", torch.float64),
        ("Adam", torch.bfloat16),
        ("SGD", torch.bfloat16),
    ],
    ids=str,
)
def test_S5_wrapping_broadcasts_any_torch_optimizer_bit_for_bit(
    name: str, dtype: torch.dtype
) -> None:
    for options in [{}, *OPTIONS.get(name, [])]:
        results = check(name, options, dtype)
        assert_all_alike(results)
        assert results[0][0][0]["param_groups"][0]["lr"] == 0.01


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name not in ("LBFGS", "Muon", "SparseAdam")]
)
def test_S5_a_tensor_learning_rate_is_broadcast_into_the_users_own_tensor(name: str) -> None:
    def rank(r: int) -> tuple[float, float, bool]:
        module = network(r)
        lr = torch.tensor(0.5 + r)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=lr, foreach=False)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        lr.mul_(2)  # as a user's schedule does
        return (
            optimizer.param_groups[0]["lr"].item(),
            optimizer.defaults["lr"].item(),
            optimizer.param_groups[0]["lr"] is lr,
        )

    assert simulate(3, rank) == [(1.0, 1.0, True)] * 3
    assert_all_alike(check(name, {"foreach": False}, torch.float32, tensor_lr=True))


@on_every_rank(2)
def test_S5_tensors_inside_tuples_of_options_are_kept_too(r: int) -> Any:
    module = network(r)
    betas = (torch.tensor(0.5 + r / 10), torch.tensor(0.9))
    optimizer = torch.optim.Adam(
        module.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False, capturable=False
    )
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    assert optimizer.param_groups[0]["betas"][0] is betas[0]
    return betas


def test_S5_groups_added_before_and_after_wrapping_have_the_first_ranks_options() -> None:
    def rank(r: int) -> Any:
        module = network(r)
        first, second = module.parameters()
        late = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([first], lr=0.1 + r, momentum=0.9)
        optimizer.add_param_group(
            {"params": [second], "lr": 1.0 + r, "weight_decay": r, "note": f"rank {r}"}
        )
        module.with_bagua([optimizer], GradientAllReduceAlgorithm(), ignored=[late])
        optimizer.add_param_group({"params": [late]})
        step(module, optimizer, 0)
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    results = simulate(3, rank)
    assert_all_alike(results)
    assert [group["lr"] for group in results[2]] == [0.1, 1.0, 0.1]
    assert results[2][1]["note"] == "rank 0"


def test_S5_state_of_an_optimizer_that_torch_does_not_know() -> None:
    class Odd(torch.optim.Optimizer):
        """Keeps a float32 master copy, a name and a history, and nothing for some parameters."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"][:1]:
                    state = self.state[p]
                    state.setdefault("master", p.float().clone()).sub_(
                        p.grad.float(), alpha=group["lr"]
                    )
                    state.setdefault("name", "first")
                    state["history"] = [
                        *state.get("history", []),
                        (state["master"].sum(), {"count": 1}),
                    ]
                    p.copy_(state["master"])

    def rank(r: int) -> Any:
        module = network(r, torch.bfloat16)
        optimizer = Odd(module.parameters(), lr=1e-3)
        for s in range(r + 1):
            step(module, optimizer, s)
        module.zero_grad()
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        for s in range(3):
            step(module, optimizer, s)
        return optimizer.state_dict(), list(module.parameters())

    results = simulate(3, rank)
    assert_all_alike(results)
    (entry,) = results[2][0]["state"].values()
    assert entry["master"].dtype is torch.float32
    assert (entry["name"], len(entry["history"])) == ("first", 4)


@on_every_rank(2)
def test_S5_several_optimizers_and_an_ignored_parameter(r: int) -> Any:
    module: Any = network(r)
    module._bagua_params_and_buffers_to_ignore = ["0.weight"]
    optimizers = [torch.optim.SGD([p], lr=1.0 + r) for p in module.parameters()]
    own = module[0].weight.clone()
    module.with_bagua(optimizers, GradientAllReduceAlgorithm())
    assert torch.equal(own, module[0].weight)
    return module[2].weight, [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


def bad_rank(r: int, what: str) -> str:
    """Return the error of wrapping on rank ``r`` of four, if rank 1 differs, and in "several" rank
    3 as well.
    """
    module: Any = network(r)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(module.parameters(), lr=0.1)]
    algorithm: Any = GradientAllReduceAlgorithm()
    if r == 1:
        if what == "frozen":
            module[0].requires_grad_(False)
        elif what == "shape":
            module[0] = nn.Linear(5, 3, bias=False)
        elif what == "groups":
            optimizers = [torch.optim.SGD([{"params": [p]} for p in module.parameters()], lr=0.1)]
        elif what == "optimizers":
            optimizers = []
        elif what == "algorithm":
            algorithm = bagua_ref.algorithms.ByteGradAlgorithm(hierarchical=False)
        elif what == "kind":
            optimizers = [torch.optim.Adam(module.parameters(), lr=0.1)]
        elif what == "order":
            module = nn.ModuleDict({"2": module[2], "0": module[0]})
    if what == "buffers" and r != 1:
        module.register_buffer("ex{}tra", torch.zeros(1))
    elif what == "several" and r % 2:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 1 + r))
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="differ between ranks") as raised:
        module.with_bagua(optimizers, algorithm)
    return str(raised.value)


SAID = {
    "frozen": (
        "rank 1 has parameter '0.weight': (3, 4) torch.float32, frozen, ranks 0, 2, 3 have"
        " parameter '0.weight': (3, 4) torch.float32"
    ),
    "shape": (
        "rank 1 has parameter '0.weight': (3, 5) torch.float32, ranks 0, 2, 3 have parameter"
        " '0.weight': (3, 4) torch.float32"
    ),
    "groups": (
        "rank 1 has optimizer 0: SGD of [1, 1] parameters, ranks 0, 2, 3 have optimizer 0: SGD of"
        " [2] parameters"
    ),
    "optimizers": (
        "rank 1 has optimizer 0: none, ranks 0, 2, 3 have optimizer 0: SGD of [2] parameters"
    ),
    "buffers": (
        "rank 1 has buffer 'ex{}tra': none, ranks 0, 2, 3 have buffer 'ex{}tra': (1,) torch.float32"
    ),
    "algorithm": (
        "rank 1 has algorithm: ByteGradAlgorithm{'hierarchical': False, 'average': True,"
        " 'compression': 'MinMaxUInt8', 'error_feedback': False}, ranks 0, 2, 3 have algorithm:"
        " GradientAllReduceAlgorithm{'hierarchical': False, 'average': True}"
    ),
    "kind": (
        "rank 1 has optimizer 0: Adam of [2] parameters, ranks 0, 2, 3 have optimizer 0: SGD of [2]"
        " parameters"
    ),
    "order": (
        "rank 1 has parameter '2.weight' at place 0, ranks 0, 2, 3 have parameter '0.weight' at"
        " place 0; rank 1 has parameter '0.weight' at place 1, ranks 0, 2, 3 have parameter"
        " '2.weight' at place 1"
    ),
    "several": (
        "ranks 0, 2 have optimizer 0: SGD of [2] parameters, ranks 1, 3 have optimizer 0: SGD of"
        " [6] parameters; ranks 0, 2 have parameter '0.bias': none, ranks 1, 3 have parameter"
        " '0.bias': (3,) torch.float32; ranks 0, 2 have parameter '2.bias': none, ranks 1, 3 have"
        " parameter '2.bias': (2,) torch.float32; and more"
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_S5_what_differs_is_an_error_on_all_ranks_that_says_who_differs_in_what(what: str) -> None:
    message = (
        "module, optimizers or settings differ between ranks, so they cannot train together. "
        + SAID[what]
    )
    assert simulate(4, lambda r: bad_rank(r, what)) == [message] * 4


@on_every_rank(4)
def test_S5_ranks_are_named_by_their_global_numbers(r: int) -> None:
    group = bagua_ref.new_group([1, 3])
    if r % 2:
        said = (
            r"rank 1 has parameter 'weight': \(1, 1\) torch.float32, rank 3 has parameter 'weight':"
            r" \(1, 3\) torch.float32$"
        )
        with pytest.raises(ValueError, match=said):
            cast("Any", nn.Linear(r, 1)).with_bagua([], GradientAllReduceAlgorithm(), group)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from("xyz")), min_size=2, max_size=5
    )
)
def test_S5_the_first_three_differences_are_told_of_every_rank(
    entries: list[dict[str, str]],
) -> None:
    """Whatever the ranks have, each is listed with its own text, and names of which all have the
    same text are not listed.
    """

    def rank(comm: Any) -> str:
        texts = {(f"{{has}} {name} {{value}}", "."): text for name, text in mine(comm).items()}
        return describe_texts(texts, comm, range(len(entries)), "none")

    def mine(comm: Any) -> dict[str, str]:
        return entries[comm.rank()]

    (said,) = set(SimulatedWorld(len(entries)).run(rank))
    differing = [
        name for name in dict.fromkeys(chain(*entries)) if len({e.get(name) for e in entries}) > 1
    ]
    told = [sentence for sentence in said.split("; ") if sentence not in ("", "and more")]
    assert len(told) == min(len(differing), 3)
    assert ("and more" in said) == (len(differing) > 3)
    for name, sentence in zip(differing, told, strict=False):
        for r, theirs in enumerate(entries):
            one = rf"\b{r}\b[\d, ]* (?:has|have) {name} {theirs.get(name, 'none')}\b"
            assert re.search(one, sentence)


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "says"),
    [
        (
            "Adam",
            "gradient_allreduce",
            "rank 1 has CPU kernels: DEFAULT, ranks 0, 2 have CPU kernels: AVX2",
        ),
        (
            "Adafactor",
            "bytegrad",
            (
                "rank 1 has CPU kernels: DEFAULT, ranks 0, 2 have CPU kernels: AVX2; rank 1 has"
                " threads: 8, ranks 0, 2 have threads: 4"
            ),
        ),
        ("Adam", "decentralized", ""),
    ],
)
def test_S5_ranks_whose_optimizers_round_differently_are_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, algorithm: str, says: str
) -> None:
    monkeypatch.setattr(
        torch.backends.cpu,
        "get_cpu_capability",
        lambda: ("AVX2", "DEFAULT")[bagua_ref.get_rank() % 2],
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: (4, 8)[bagua_ref.get_rank() % 2])

    def rank(r: int) -> None:
        module: Any = network(0)
        module.with_bagua(
            [getattr(torch.optim, optimizer)(module.parameters(), lr=0.1)],
            Algorithm.init(algorithm),
        )

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # else equal ones are shown once
        simulate(3, rank)
    said = [
        str(warning.message)
        for warning in warned
        if "hierarchical=True" not in str(warning.message)
    ]
    assert len(said) == (3 if says else 0)
    assert all(f"gradients are equal: {says}. Use one torch on all ranks" in text for text in said)


@on_every_rank(2)
def test_S5_ranks_that_differed_train_then(r: int) -> Any:
    """Rank 1 raises on its own, then both differ, then both train."""
    module: Any = network(0)
    if r == 1:
        with pytest.raises(TypeError):
            module.with_bagua([], 3)
    said = (
        r"rank 0 has parameter 'weight': \(1, 3\) torch.float32, rank 1 has parameter 'weight':"
        r" \(2, 3\) torch.float32; .* parameter 'bias'"
    )
    with pytest.raises(ValueError, match=said):
        cast("Any", nn.Linear(3, 1 + r)).with_bagua([], GradientAllReduceAlgorithm())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    module(torch.full((1, 4), r + 1.0)).sum().backward()
    optimizer.step()
    return list(module.parameters())


def test_S5_comparing_ranks_that_agree_takes_as_many_bytes_for_every_model() -> None:
    def sent(layers: int) -> int:
        def rank(r: int) -> int:
            module: Any = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))
            group = bagua_ref.groups.communication._get_default_group()
            comm = group.get_global_communicator()
            broadcast_state(module, [], comm, [], {}, range(4))
            return int(comm.bytes_sent)

        return max(simulate(4, rank))

    assert sent(100) - sent(1) <= 99 * 4 * 3  # the weights themselves


class Expanded(nn.Module):
    """A buffer and a frozen parameter whose elements share memory, as ``expand()`` makes them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3, 1), 1.0 + rank).expand(3, 4), requires_grad=False)
        self.register_buffer("mask", torch.full((1,), 2.0 + rank).expand(4))
        self.register_buffer("places", torch.arange(4).expand(1, -1) + rank, persistent=False)
        self.register_buffer("on", torch.tensor(rank == 0).expand(2, 2))
        self.register_buffer("none", torch.zeros(1, 0).expand(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.weight @ self.frozen) * self.mask * x).sum()

    def values(self) -> list[Any]:
        return [tensor.tolist() for tensor in (*self.parameters(), *self.buffers())]


def _expanded(rank: int, wrapper: bool, algorithm: str = "gradient_allreduce") -> Expanded:
    module = Expanded(rank)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    if wrapper:
        model: Any = DistributedDataParallel(module)
    else:
        model = module.with_bagua([optimizer], Algorithm.init(algorithm))
    assert module.values() == Expanded(0).values()
    assert module.frozen.stride() == (1, 0)
    assert module.mask.stride() == (0,)
    module.mask[:1].add_(rank)
    model(torch.full((4,), 1.0 + rank)).backward()
    assert module.mask.tolist() == [2.0 + (0 if wrapper else rank)] * 4
    return module


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
@pytest.mark.parametrize("wrapper", [True, False])
def test_S5_expanded_buffers_and_frozen_parameters_are_broadcast(
    wrapper: bool, algorithm: str
) -> None:
    simulate(2, lambda r: _expanded(r, wrapper, algorithm))


@on_every_rank(2)
def test_S5_a_tensor_that_is_expanded_on_some_ranks_only_is_named_on_all(r: int) -> None:
    module = Expanded(0)
    if r == 0:
        module.mask = module.mask.clone()
    with pytest.raises(
        ValueError,
        match=(
            r"rank 0 has buffer 'mask': \(4,\) torch.float32, rank 1 has buffer 'mask': \(4,\)"
            r" torch.float32, expanded"
        ),
    ):
        module.with_bagua([], GradientAllReduceAlgorithm())
