"""Tests of large parameters of a fused optimizer, which stay where they are and are stepped in blocks (S6)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_fuse import Storages, adam, assert_alike, give, parameters, sgd, twins
from tests.test_fuse_interplay import wrapped
from tests.test_fuse_verdicts import Base
from torch import Tensor, nn

import bagua_ref
from bagua_ref.contrib.fuse import sizes
from bagua_ref.contrib.fuse.optimizer import fuse_optimizer
from bagua_ref.contrib.fuse.verify import ELEMENTWISE
from bagua_ref.simulation import SimulatedWorld

SHAPES = [(33,), (3, 2), (5,), (9, 4), (2,), (7, 3), ()]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parameters of more than 8 elements be large, and a block have 4."""
    monkeypatch.setattr(sizes, "SMALL_ON_CPU", 8)
    monkeypatch.setattr(sizes, "block_of", lambda cache: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def blocks_of(fused: Any) -> list[list[int]]:
    """Return the lengths of the blocks of each run, those of large parameters last."""
    return [[block.numel() for block in run.blocks] for run in fused._bagua_fused_optimizer._plan.runs]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_S6_steps_in_blocks_have_the_bits_of_step(name: str, kept: bool) -> None:
    more = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Rprop": {}}.get(name, {"weight_decay": 0.1})
    ps, fused, qs, plain = twins(lambda params: getattr(torch.optim, name)(params, lr=0.1, **more), *SHAPES)
    for step in range(6):
        give(step, ps, qs, kept=kept)
        fused.step() if step == 3 else fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
    assert fused._bagua_fused_count == 5
    assert blocks_of(fused) == [[4, 4, 4, 2], [4] * 8 + [1], [4] * 9, [4] * 5 + [1]]


def test_each_step_is_counted_once_however_many_blocks_there_are() -> None:
    ps, fused, qs, plain = twins(adam, (100,), (3,))
    for step in range(4):
        give(step, ps, qs)
        fused.fuse_step()
        plain.step()
    assert blocks_of(fused) == [[4] * 25]
    assert [state["step"].item() for state in fused.state.values()] == [4.0, 4.0]
    assert_alike(fused, plain)
    assert fused._bagua_fused_count == 4


def test_groups_and_dtypes_have_blocks_of_their_own() -> None:
    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": params[:5], "lr": 0.1}, {"params": params[5:8], "lr": 0.01, "momentum": 0.5}, {"params": params[8:]}]

    ps = [
        *parameters((21,), (2, 5), (3,)),
        *parameters((21,), (4,), dtype=torch.float64),
        *parameters((3,), (13,), (4,)),
        *parameters((40,), (40,), dtype=torch.bfloat16),
    ]
    qs = copy.deepcopy(ps)
    fused, plain = fuse_optimizer(sgd(groups(ps))), sgd(groups(qs))
    for step in range(4):
        give(step, ps, qs, kept=step == 3)
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
    assert blocks_of(fused) == [[4] * 5 + [1], [4, 4, 2], [4] * 5 + [1], [4, 3], [4, 4, 4, 1]]
    assert fused._bagua_fused_count == 8


def test_large_parameters_and_gradients_stay_where_they_are() -> None:
    ps, fused, qs, plain = twins(sgd, (40,), (3,), (5, 9), (4,))
    before = [p.data_ptr() for p in ps]
    apart = copy.deepcopy(plain), [q.data_ptr() for q in qs]
    assert apart[1] != before
    for step in range(4):
        give(step, ps, qs, kept=step > 1)
        held = [p.grad.data_ptr() for p in ps]
        fused.fuse_step()
        plain.step()
        assert [ps[place].grad.data_ptr() for place in (0, 2)] == [held[0], held[2]]
    assert [p.data_ptr() for p in ps] == before
    assert len({p.untyped_storage().data_ptr() for p in ps}) == 3
    assert [run._copy for run in fused._bagua_fused_optimizer._plan.runs[1:]] == [None, None]
    assert_alike(fused, plain)


def test_weights_that_lie_in_a_large_storage_are_found_there() -> None:
    storage = torch.randn(100)
    outside = storage.clone()
    ps: list[Tensor] = [nn.Parameter(storage[7:40]), nn.Parameter(storage[60:90])]
    qs = copy.deepcopy(ps)
    fused, plain = fuse_optimizer(adam(ps), do_flatten=False), adam(qs)
    for step in range(3):
        give(step, ps, qs)
        fused.fuse_step()
        plain.step()
    assert_alike(fused, plain)
    for gap in (slice(0, 7), slice(40, 60), slice(90, 100)):
        assert torch.equal(storage[gap], outside[gap])


def test_sparse_and_transposed_gradients_are_not_cut() -> None:
    ps, fused, qs, plain = twins(sgd, (6, 4), (3,), (2,), (5, 5))
    for step in range(8):
        give(step, ps, qs)
        for side in (ps, qs):
            if step in (3, 4):
                side[0].grad = side[0].grad.to_sparse()
            if step in (2, 6):
                side[3].grad = side[3].grad.t()
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
        if step in (1, 2, 3):
            assert blocks_of(fused) == [[4, 1], *[[4] * 6] * (step != 3), *[[4] * 6 + [1]] * (step != 2)]
    assert fused._bagua_fused_count == 8


def test_weights_without_gradient_join_again() -> None:
    ps, fused, qs, plain = twins(adam, (20,), (30,), (3,))
    for step in range(6):
        give(step, ps, qs)
        if step in (2, 3):
            ps[1].grad = qs[1].grad = None
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
    assert blocks_of(fused) == [[4] * 5, [4] * 7 + [2]]


def test_state_that_is_loaded_or_changed_counts() -> None:
    ps, fused, qs, plain = twins(adam, (21,), (3,), (4,))
    for step in range(8):
        give(step, ps, qs)
        if step == 3:
            fused.load_state_dict(copy.deepcopy(fused.state_dict()))
        if step == 5:
            for optimizer, p in ((fused, ps[0]), (plain, qs[0])):
                optimizer.state[p]["step"].fill_(9)
                optimizer.state[p]["exp_avg"].mul_(2)
        if step == 6:
            for optimizer, p in ((fused, ps[0]), (plain, qs[0])):
                del optimizer.state[p]
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)


class Late(Base):
    """Has state that is made anew in each step, and more from the fourth on."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["calls"] = state.get("calls", 0) + 1
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + grad
        if state["calls"] > 3:
            state["late"] = state.get("late", torch.zeros_like(p)) + grad.abs()
            state["count"] = state.get("count", torch.zeros(())) + 1
        p.sub_(state["m"] + state.get("late", 0), alpha=group["lr"] / state["calls"])


def test_state_that_appears_in_blocks_is_put_together() -> None:
    ps, fused, qs, plain = twins(Late, *SHAPES)
    for step in range(7):
        give(step, ps, qs)
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
    assert blocks_of(fused)[1] == [4] * 8 + [1]


class Largest(Base):
    """Has a number that is not the same for all parts of a parameter, maybe from the second step on."""

    kind: Callable[[Tensor], Any] = float
    first = 1

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] >= self.first:
            state["largest"] = self.kind(grad.abs().max())
        p.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("kind", [float, torch.clone])
def test_blocks_that_disagree_are_an_error(kind: Any, first: int) -> None:
    ps = parameters((20,), (3,))
    cls = type("Largest", (Largest,), {"kind": staticmethod(kind), "first": first})
    fused: Any = fuse_optimizer(cls(ps), verify=False)
    give(0, ps)
    fused.fuse_step()
    give(1, ps)
    with pytest.raises(RuntimeError, match="state 'largest' differs between parts of parameters"):
        fused.fuse_step()
    assert fused.param_groups[0]["params"] == ps


class Counting(Base):
    """Counts steps in which some gradient is large, in a tensor."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state.setdefault("large", torch.zeros(())).add_(grad.max() > 1)
        p.sub_(grad, alpha=group["lr"])


def test_counts_that_differ_between_blocks_are_an_error() -> None:
    ps = parameters((20,))
    fused: Any = fuse_optimizer(Counting(ps), verify=False)
    for largest in (0, 2):
        ps[0].grad = torch.linspace(0, largest, 20)
        if largest:
            with pytest.raises(RuntimeError, match="state 'large' differs between parts of parameters"):
                fused.fuse_step()
        else:
            fused.fuse_step()


def test_numbers_that_were_changed_between_steps_reach_all_blocks() -> None:
    ps, fused, qs, plain = twins(Late, (20,), (3,), (4,))
    for step in range(4):
        give(step, ps, qs)
        if step == 3:
            for optimizer in (fused, plain):
                for state in optimizer.state.values():
                    state["calls"] = 7
        fused.fuse_step()
        plain.step()
    assert_alike(fused, plain)


def test_large_parameters_count_as_if_they_were_joined() -> None:
    for shapes, do_flatten, count in (
        ([(20,), (30,)], True, 2),
        ([(20,), (3,)], True, 2),
        ([(20,)], True, 0),
        ([(20,), (30,)], False, 0),
    ):
        ps = parameters(*shapes)
        fused: Any = fuse_optimizer(adam(ps), do_flatten=do_flatten)
        for step in range(2):
            give(step, ps)
            fused.fuse_step()
        assert fused._bagua_fused_count == count


def test_each_group_has_its_own_sizes() -> None:
    ps, qs = parameters((20,)), parameters((30,))
    fused: Any = fuse_optimizer(torch.optim.Adam([{"params": ps, "foreach": True}, {"params": qs}]))
    for step in range(2):
        give(step, ps + qs, ps + qs)
        fused.fuse_step()
    assert blocks_of(fused) == [[4] * 7 + [2]]


class Unalike(Base):
    """Keeps state only where a gradient is large."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        if grad.max() > 1:
            state["large"] = 1
        p.sub_(grad, alpha=group["lr"])


def test_blocks_with_different_entries_are_an_error() -> None:
    ps = parameters((20,))
    fused: Any = fuse_optimizer(Unalike(ps), verify=False)
    ps[0].grad = torch.zeros(20)
    fused.fuse_step()
    ps[0].grad = torch.linspace(0, 2, 20)
    with pytest.raises(RuntimeError, match="differs between parts of parameters"):
        fused.fuse_step()


def test_a_step_takes_no_more_memory_than_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "block_of", lambda cache: 64)
    ps, fused, _, _ = twins(adam, (1000,), (40, 50), (3,), (5,))
    for step in range(3):
        give(step, ps)
        fused.fuse_step()
    give(3, ps)
    gc.collect()
    held = [value for state in fused.state.values() for value in state.values()]
    with Storages([*ps, *(p.grad for p in ps), *held]) as storages:
        del held
        fused.fuse_step()
    assert 4 * 4 * 3008 <= storages.start <= 4 * 4 * 3008 + 100
    assert storages.peak - storages.start <= 4 * 4 * 64


def test_foreach_and_fused_steps_are_not_cut() -> None:
    for flags in ({"foreach": True}, {"fused": True}):
        ps = parameters((40,), (3,), (4,))
        fused: Any = fuse_optimizer(torch.optim.Adam(ps, **flags), allow_inexact=True)
        for step in range(3):
            give(step, ps)
            fused.fuse_step()
        assert blocks_of(fused) == [[7]]
        assert fused._bagua_fused_count == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient_allreduce", "qadam"])
def test_S6_a_wrapped_module_trains_as_with_the_unfused_optimizer(name: str) -> None:
    def rank(fuse: bool) -> Callable[[Any], Any]:
        def main(comm: Any) -> Any:
            bagua_ref.init_process_group()
            return wrapped(comm.rank(), name, fuse, set_to_none=True, do_flatten=True, fuse_first=True)

        return main

    for (ours, count, _), (theirs, _, _) in zip(SimulatedWorld(2).run(rank(True)), SimulatedWorld(2).run(rank(False)), strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert count == 8


# Sizes


def test_threads_and_caches_decide_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sizes, "cache_of_core", lambda: 5 * 2**20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    group = {"params": parameters((3,))}
    assert sizes.sizes_for(group).block == 3 * 2**18
    assert sizes.sizes_for({**group, "foreach": True}).block == sizes.sizes_for({**group, "fused": True}).block == sizes.WHOLE
    assert sizes.sizes_for({"params": [torch.zeros(3, device="meta")]}) == sizes.Sizes(sizes.SMALL, sizes.RUN, sizes.WHOLE)
    assert [sizes.block_of(cache) for cache in (0, 1, 2**20, 5 * 2**20, 2**40)] == [2**18, 2**16, 2**16, 2**18, 2**19]


def test_the_cache_of_a_core_is_what_linux_says(tmp_path: Path) -> None:
    levels = [
        ("1", "Data", "32K", "1"),
        ("2", "Unified", "1024K", "3"),
        ("3", "Unified", "32M", "0000,000000ff"),
        ("4", "?", "1G", "1"),
    ]
    for place, values in enumerate(levels):
        folder = tmp_path / f"index{place}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size", "shared_cpu_map"), values, strict=True):
            (folder / name).write_text(value + "\n")
    (tmp_path / "index9").mkdir()
    assert sizes.cache_of_core(tmp_path) == 2**19 + 2**22
    assert sizes.cache_of_core(tmp_path / "nothing") == 0
