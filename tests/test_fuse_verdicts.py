"""Tests of which optimizers can be fused: torch's own by a table that is verified here, others by
the probe (S6).
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.scripts import load_script
from tests.test_fuse import Plain, give, parameters
from torch import Tensor

from bagua_ref.contrib.fuse.optimizer import (
    ELEMENTWISE,
    NOT_ELEMENTWISE,
    fuse_optimizer,
    is_fused_optimizer,
    try_on_clones,
)

pytestmark = pytest.mark.slow


verdicts = load_script("docs/_fuse_table.py")


@pytest.mark.proof
def test_the_page_is_current_and_has_every_optimizer_of_torch() -> None:
    assert verdicts.classes().keys() <= {*ELEMENTWISE, *NOT_ELEMENTWISE}
    page = verdicts.PAGE.read_text().splitlines()
    for name, cls in verdicts.classes().items():  # older versions of torch have fewer
        row = verdicts.row(name, cls)
        assert row in page, "run: python docs/_fuse_table.py"
        # a trial agrees
        assert ("| equal in every bit |" in row) == ("| fused |" in row) == (name in ELEMENTWISE)
    listed = [line.split("`")[1] for line in page if line.startswith("| `")]
    assert sorted(listed) == sorted([*ELEMENTWISE, *NOT_ELEMENTWISE])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", [name for name in NOT_ELEMENTWISE if name in verdicts.classes()])
def test_what_is_known_to_couple_elements_is_refused_by_name(name: str, verify: bool) -> None:
    optimizer = verdicts.make(verdicts.classes()[name])
    with pytest.raises(
        ValueError, match=f"optimizer={name} cannot be fused: {NOT_ELEMENTWISE[name][:20]}"
    ):
        fuse_optimizer(optimizer, verify=verify)
    assert not is_fused_optimizer(optimizer)


class Signs(Plain):
    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["calls"] = state.get("calls", 0) + 1  # a Python number, made at the first step
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + grad  # a new tensor in each step
        p.sub_(state["m"].sign(), alpha=group["lr"] / state["calls"])


class Lamb(Plain):
    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.sub_(grad * (p.norm() / grad.norm().clamp_min(1e-9)), alpha=group["lr"])


class LambWhereDecayed(Plain):
    """Element-wise unless weight_decay is set."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        trust = p.norm() / grad.norm().clamp_min(1e-9) if group["weight_decay"] else 1.0
        p.sub_(grad * trust, alpha=group["lr"])


class OnlyLate(Plain):
    """Element-wise in its first steps only."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(grad if state["step"] < 6 else grad / (1 + grad.abs().max()), alpha=group["lr"])


class MatricesOnly(Plain):
    """Depends on the number of dimensions."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.sub_(grad.sign() if p.ndim > 1 else grad, alpha=group["lr"])


class WholeSteps(Plain):
    """Depends on all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.total = sum(
            float(p.grad.sum())
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        )
        return super().step(closure)

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.sub_(grad, alpha=group["lr"] * (1 + abs(self.total)))


class Noisy(Plain):
    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.sub_(grad + torch.randn_like(p), alpha=group["lr"])


class Rows(Plain):
    """Has state per row."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["rows"] = state.get("rows", 0) + grad.square().mean(-1, keepdim=True)
        p.sub_(grad / (1 + state["rows"].sqrt()), alpha=group["lr"])


class Blocks(Plain):
    """Has state that parameters cannot share."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["blocks"] = [grad]
        p.sub_(grad, alpha=group["lr"])


class Counts(Plain):
    """Depends on the number of parameters, not on their elements."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.sub_(grad, alpha=group["lr"] / len(group["params"]))


class NeedsClosure(Plain):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("cls", [Signs, LambWhereDecayed, type("MyAdam", (torch.optim.Adam,), {})])
def test_a_class_that_updates_each_element_by_itself_is_fused(cls: Any) -> None:
    options = {} if cls is Signs else {"weight_decay": 0.0}
    ps, qs = parameters(), parameters()
    fused, plain = fuse_optimizer(cls(ps, **options)), cls(qs, **options)
    for step in range(5):
        give(step, ps, qs)
        fused.fuse_step() if step != 3 else fused.step()
        plain.step()
        for p, q in zip(ps, qs, strict=True):
            assert torch.equal(p, q)
            assert str(fused.state[p]) == str(plain.state[q])
    assert fused._bagua_fused_count == 4


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Lamb, r"combines elements of a parameter, or takes only some, by linalg_vector_norm\(\)"),
        (OnlyLate, r"combines elements .* by max\(\)"),
        (MatricesOnly, "elements affect each other, or it depends on shapes or order"),
        (WholeSteps, r"combines elements .* by sum\(\)"),
        (Noisy, "depends on shapes or order"),
        (Rows, r"combines elements .* by mean\(\)"),
        (Blocks, r"state 'blocks' .* is a list, which cannot be split"),
        (Counts, "different weights"),
        (
            NeedsClosure,
            r"step\(\) of a small copy of it raised TypeError: .*closure.* pass verify=False",
        ),
    ],
)
def test_a_class_that_does_not_is_refused_with_the_reason(cls: Any, why: str) -> None:
    ps = parameters()
    pointers, values = [p.data_ptr() for p in ps], [p.detach().clone() for p in ps]
    optimizer = cls(ps)
    random = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=f"optimizer={cls.__name__} cannot be fused: .*{why}"):
        fuse_optimizer(optimizer)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [p.data_ptr() for p in ps] == pointers
    assert all(map(torch.equal, ps, values))
    assert not is_fused_optimizer(optimizer)
    assert not hasattr(optimizer, "fuse_step")
    assert not optimizer.state


@pytest.mark.parametrize(
    "special",
    [
        # like gradient centralization, which is often applied to convolutions only
        lambda p: p.ndim > 3,
        lambda p: p.ndim == 5,
        lambda p: p.ndim == 2 and p.shape[0] == p.shape[1],
        # like Adafactor's factors in most implementations
        lambda p: p.ndim > 1 and min(p.shape) >= 128,
        lambda p: p.numel() >= 4096,  # like 8-bit state
    ],
)
def test_a_class_that_treats_a_few_shapes_otherwise_is_refused(special: Any) -> None:
    class Special(Plain):
        def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
            p.sub_(grad.sign() if special(p) else grad, alpha=group["lr"])

    with pytest.raises(
        ValueError, match=r"optimizer=Special cannot be fused: .*depends on shapes or order"
    ):
        fuse_optimizer(Special(parameters()))


class Shampoo(Plain):
    """Multiplies by a root of a matrix for each dimension, as Shampoo does; of a vector of n
    elements, that has n x n.
    """

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        for dim, size in enumerate(grad.shape):
            rows = grad.transpose(0, dim).reshape(size, -1)
            values, vectors = torch.linalg.eigh(
                state.setdefault(dim, torch.eye(size) * 1e-4).add_(rows @ rows.t())
            )
            rows = vectors @ (
                values.clamp_min(1e-6).pow(-1 / grad.ndim).unsqueeze(1) * (vectors.t() @ rows)
            )
            grad = rows.view(grad.transpose(0, dim).shape).transpose(0, dim)
        p.sub_(grad, alpha=group["lr"])


class Slow(Plain):
    """Takes a while for each parameter."""

    seconds = 0.05

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        time.sleep(self.seconds)
        p.sub_(grad, alpha=group["lr"])


class Pairs(Plain):
    """Makes a matrix of all pairs of elements."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        torch.outer(grad.flatten(), grad.flatten())
        p.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("cls", [Shampoo, Pairs])
def test_a_trial_makes_no_matrices_with_a_row_for_each_element(cls: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            rf"optimizer={cls.__name__} cannot be fused: its step combines elements .* by"
            r" m(m|ul)\(\)"
        ),
    ):
        fuse_optimizer(cls(parameters()))


def test_a_trial_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_ref.contrib.fuse.optimizer.MOST_SECONDS", 0.1)
    calls: list[int] = []
    monkeypatch.setattr(
        time, "sleep", lambda seconds, sleep=time.sleep: (calls.append(1), sleep(seconds))
    )
    optimizer = Slow(parameters())
    with pytest.raises(
        ValueError,
        match=r"optimizer=Slow cannot be fused: .* more than 0.1 s\. .* pass verify=False",
    ):
        fuse_optimizer(optimizer)
    assert len(calls) <= 9  # one step of a clone, of 16 and more
    assert not is_fused_optimizer(optimizer)
    assert is_fused_optimizer(fuse_optimizer(optimizer, verify=False))


class SlowInside(Plain):
    """Takes many operations."""

    seconds = 0.0

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        for _ in range(50):
            SlowInside.seconds += 0.001
            p.sub_(grad, alpha=group["lr"] / 50)


class Stubborn(SlowInside):
    """Handles all errors."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        try:
            super().update(p, grad, state, group)
        except Exception:
            state["failed"] = True


@pytest.mark.parametrize("cls", [SlowInside, Stubborn])
def test_a_trial_ends_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    steps: list[int] = []
    monkeypatch.setattr(SlowInside, "seconds", 0.0)
    monkeypatch.setattr(
        "bagua_ref.contrib.fuse.optimizer.time",
        SimpleNamespace(monotonic=lambda: SlowInside.seconds),
    )
    monkeypatch.setattr("bagua_ref.contrib.fuse.optimizer.MOST_SECONDS", 0.03)
    monkeypatch.setattr(cls, "step", lambda self, step=Plain.step: (step(self), steps.append(1)))
    with pytest.raises(
        ValueError,
        match=rf"{cls.__name__} cannot be fused: .* more than 0.03 s\. .* pass verify=False",
    ):
        fuse_optimizer(cls(parameters()))
    assert not steps


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda params: torch.optim.AdamW(params), True),
        (lambda params: torch.optim.SGD(params, lr=0.1), True),
        (lambda params: torch.optim.AdamW(params, fused=True), False),
        (lambda params: torch.optim.RMSprop(params), False),
        (lambda params: Signs(params), False),
        (lambda params: torch.optim.SGD([{"params": []}], lr=0.1), False),
    ],
)
def test_the_log_says_once_where_torch_has_a_fused_step(
    make: Any, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        torch.optim.SGD(parameters(), lr=0.1, fused=True)
    except RuntimeError:
        pytest.skip("this torch has no fused steps on a CPU")
    with caplog.at_level("INFO", logger="bagua_ref"):
        ps = parameters()
        fused: Any = fuse_optimizer(make(ps))
        give(0, ps)
        fused.fuse_step()
        fused.fuse_step()
    entries = [record for record in caplog.records if "fused=True" in record.getMessage()]
    assert [record.levelname for record in entries] == ["INFO"] * said


def test_every_groups_options_are_tried() -> None:
    ps = parameters()
    groups = [{"params": ps[:2], "weight_decay": 0.0}, {"params": ps[2:], "weight_decay": 0.1}]
    with pytest.raises(ValueError, match="LambWhereDecayed cannot be fused"):
        fuse_optimizer(LambWhereDecayed(groups, weight_decay=0.0))


def test_a_new_option_or_group_is_tried_before_it_is_stepped() -> None:
    for change in ("option", "group"):
        ps = parameters()
        optimizer: Any = fuse_optimizer(LambWhereDecayed(ps, weight_decay=0.0))
        give(0, ps)
        optimizer.fuse_step()
        if change == "option":
            optimizer.param_groups[0]["weight_decay"] = 0.1
        else:
            optimizer.add_param_group({"params": parameters(), "weight_decay": 0.1})
        before = [p.detach().clone() for p in ps]
        with pytest.raises(ValueError, match="LambWhereDecayed cannot be fused"):
            optimizer.fuse_step()
        assert all(map(torch.equal, ps, before))
        optimizer.step()  # still works
        assert not any(map(torch.equal, ps, before))


def test_verify_false_is_at_the_users_risk() -> None:
    ps = parameters()
    optimizer: Any = fuse_optimizer(Lamb(ps), verify=False)
    give(0, ps)
    optimizer.fuse_step()
    assert optimizer._bagua_fused_count == 1
    blocks: Any = fuse_optimizer(Blocks(parameters()), verify=False)
    give(0, blocks.param_groups[0]["params"])
    with pytest.raises(
        RuntimeError,
        match=r"state 'blocks' of 110 elements in 4 parameters is a list, .* cannot be fused",
    ):
        blocks.fuse_step()


def test_the_probe_leaves_attributes_hooks_and_models_alone() -> None:
    class Attached(Signs):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.first = self.param_groups[0]["params"][0]
            self.notes: list[int] = []

        def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
            self.notes.append(1)
            self.first.add_(1)
            super().update(p, grad, state, group)

    ps = parameters()
    before = ps[0].detach().clone()
    optimizer = Attached(ps)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    fuse_optimizer(optimizer)
    assert (seen, optimizer.notes) == ([], [])
    assert torch.equal(ps[0], before)


def test_an_optimizer_that_was_stepped_before_is_tried_from_where_it_is() -> None:
    ps = parameters()
    optimizer = Signs(ps)
    for _ in range(3):
        give(0, ps)
        optimizer.step()
    fused: Any = fuse_optimizer(optimizer)
    fused.fuse_step()
    assert [state["calls"] for state in fused.state.values()] == [4] * 4
    assert fused._bagua_fused_count == 1


def test_a_third_party_optimizer_passes_and_the_example_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "CI" not in os.environ:  # CI must have it
        pytest.importorskip("lion_pytorch")
    from lion_pytorch import Lion

    assert try_on_clones(Lion(parameters())) is None
    load_script("examples/fuse_third_party.py").main()
    printed = capsys.readouterr().out
    assert "240 parameters, 53 fused steps" in printed
    assert "weights equal in every bit" in printed
