"""Tests of wrapping: every rank gets rank 0's state, of any torch optimizer, to the bit (S5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainings import simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm

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
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def network(rank: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(rank)
    # Muon accepts matrices only.
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)).to(dtype)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Step with gradients drawn from ``seed``, which no rank's backward would produce."""
    generator = torch.Generator().manual_seed(seed)

    def closure() -> torch.Tensor:
        for parameter in module.parameters():
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
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
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


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


def check(name: str, options: dict[str, Any], dtype: torch.dtype, tensor_lr: bool = False) -> list[Any]:
    """Wrap on ranks with different histories; return each rank's state after two more steps with equal gradients."""

    def rank(r: int) -> Any:
        module = network(r, dtype)
        lr: Any = torch.tensor(0.01 * (r + 1)) if tensor_lr else 0.01 * (r + 1)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=lr, **options)
        for s in range(3 * (1 - r % 2)):  # odd ranks have no state yet
            step(module, optimizer, seed=10 * r + s)
        module.zero_grad()
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        # load_state_dict adds this default, as torch's constructor would have.
        defaults = {name: value for name, value in optimizer.defaults.items() if name != "differentiable"}
        right_after = plain((optimizer.state_dict(), defaults, list(module.parameters())))
        for s in range(2):
            step(module, optimizer, seed=s)
        return right_after, optimizer.state_dict(), list(module.parameters())

    return simulate(3, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_S5_wrapping_broadcasts_any_torch_optimizer_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    for options in [{}, *OPTIONS.get(name, [])]:
        results = check(name, options, dtype)
        assert_all_alike(results)
        assert results[0][0][0]["param_groups"][0]["lr"] == 0.01


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("LBFGS", "Muon", "SparseAdam")])
def test_S5_a_tensor_learning_rate_is_broadcast_into_the_users_own_tensor(name: str) -> None:
    def rank(r: int) -> tuple[float, float, bool]:
        module = network(r)
        lr = torch.tensor(0.5 + r)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=lr, foreach=False)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        lr.mul_(2)  # as a user's schedule does
        return optimizer.param_groups[0]["lr"].item(), optimizer.defaults["lr"].item(), optimizer.param_groups[0]["lr"] is lr

    assert simulate(3, rank) == [(1.0, 1.0, True)] * 3
    assert_all_alike(check(name, {"foreach": False}, torch.float32, tensor_lr=True))


def test_S5_tensors_inside_tuples_of_options_are_kept_too() -> None:
    def rank(r: int) -> Any:
        module = network(r)
        betas = (torch.tensor(0.5 + r / 10), torch.tensor(0.9))
        optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False, capturable=False)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        assert optimizer.param_groups[0]["betas"][0] is betas[0]
        return betas

    assert_all_alike(simulate(2, rank))


def test_S5_groups_added_before_and_after_wrapping_have_the_first_ranks_options() -> None:
    def rank(r: int) -> Any:
        module = network(r)
        first, second = module.parameters()
        late = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([first], lr=0.1 + r, momentum=0.9)
        optimizer.add_param_group({"params": [second], "lr": 1.0 + r, "weight_decay": r, "note": f"rank {r}"})
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        optimizer.add_param_group({"params": [late]})
        step(module, optimizer, 0)
        return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

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
                    state.setdefault("master", p.float().clone()).sub_(p.grad.float(), alpha=group["lr"])
                    state.setdefault("name", "first")
                    state["history"] = [*state.get("history", []), (state["master"].sum(), {"count": 1})]
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


def test_S5_several_optimizers_and_an_ignored_parameter() -> None:
    def rank(r: int) -> Any:
        module = network(r)
        module._bagua_params_and_buffers_to_ignore = ["0.weight"]
        optimizers = [torch.optim.SGD([p], lr=1.0 + r) for p in module.parameters()]
        own = module[0].weight.clone()
        module.with_bagua(optimizers, GradientAllReduceAlgorithm())
        assert torch.equal(own, module[0].weight)
        return module[2].weight, [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    assert_all_alike(simulate(2, rank))


def bad_rank(r: int, what: str) -> None:
    module = network(r)
    arguments: dict[str, Any] = {}
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
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
        elif what == "buffers":
            module.register_buffer("extra", torch.zeros(1))
        elif what == "algorithm":
            algorithm = bagua_ref.algorithms.ByteGradAlgorithm()
        elif what == "kind":
            optimizers = [torch.optim.Adam(module.parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="differ between ranks"):
        module.with_bagua(optimizers, algorithm, **arguments)


@pytest.mark.parametrize("what", ["frozen", "shape", "groups", "optimizers", "buffers", "algorithm", "kind"])
def test_what_differs_between_ranks_is_an_error_on_all_of_them(what: str) -> None:
    simulate(3, lambda r: bad_rank(r, what))
