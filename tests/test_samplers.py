"""Tests of the balanced samplers: bad input, resuming, and the command that shows their batches
(S7).
"""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.scripts import load_script
from torch.utils.data import DataLoader

import bagua_ref
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.cli import balance, main
from bagua_ref.cli.command import CommandError
from bagua_ref.contrib import (
    BudgetBatchSampler,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_ref.simulation import SimulatedWorld

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]


def sampler_of(
    rank: int | None = 0, replicas: int | None = 3, lengths: Any = LENGTHS, **options: Any
) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(
        range(len(lengths)), None, replicas, rank, complexities=lengths, **options
    )


def pairs(indices: list[int]) -> list[list[int]]:
    return [indices[place : place + 2] for place in range(0, len(indices), 2)]


def batches_of(
    rank: int | None = 0, batch_fn: Any = pairs, drop_last: bool = False, **options: Any
) -> LoadBalancingDistributedBatchSampler:
    return LoadBalancingDistributedBatchSampler(sampler_of(rank, **options), batch_fn, drop_last)


def budget_of(
    rank: int | None = 0,
    replicas: int | None = 3,
    costs: Any = LENGTHS,
    max_cost: Any = 18,
    **options: Any,
) -> BudgetBatchSampler:
    return BudgetBatchSampler(costs, max_cost, num_replicas=replicas, rank=rank, **options)


def take(iterable: Any, count: int) -> list[Any]:
    iterator = iter(iterable)
    return [next(iterator) for _ in range(count)]


# Order of samples


@pytest.mark.parametrize(
    "lengths",
    [
        (length for length in LENGTHS),
        [torch.tensor(length) for length in LENGTHS],
        np.array(LENGTHS, dtype=object),
        *(np.array(LENGTHS, dtype=kind) for kind in ("uint8", "float16", ">i4", ">f8")),
        *(torch.tensor(LENGTHS, dtype=kind) for kind in (torch.uint8, torch.bfloat16)),
        torch.tensor(LENGTHS, dtype=torch.float32, requires_grad=True),
        torch.tensor([LENGTHS, LENGTHS]).T[:, 0],
    ],
    ids=lambda lengths: f"{type(lengths).__name__} {getattr(lengths, 'dtype', '')}",
)
def test_complexities_come_in_any_form(lengths: Any) -> None:
    expected = list(sampler_of(random_level=0.5))
    sampler = LoadBalancingDistributedSampler(
        LENGTHS, None, 3, 0, random_level=0.5, complexities=lengths
    )
    if isinstance(lengths, (torch.Tensor, np.ndarray)):  # of which the sampler keeps a copy
        lengths = lengths.detach() if isinstance(lengths, torch.Tensor) else lengths
        lengths[:] = 1
    assert list(sampler) == expected


def test_infinity_has_a_place_without_shuffle_only() -> None:
    lengths = [float("inf"), 10**400, 1.5, float("-inf")]
    assert list(sampler_of(0, 1, lengths, shuffle=False)) == [3, 2, 1, 0]
    with pytest.raises(
        ValueError, match="from -inf to inf are too far apart for the noise of shuffle=True"
    ):
        sampler_of(0, 1, lengths)


def test_equal_complexities_warn_where_the_sampler_is_made() -> None:
    with pytest.warns(
        UserWarning, match="all 4 complexities are 7, so there is nothing to balance"
    ) as warned:
        LoadBalancingDistributedSampler(range(4), lambda _: torch.tensor(7), 2, 0)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler_of(0, 2, [7])
        sampler_of(0, 2, [7, 8])


# Bad input


class Untouchable:
    """A dataset whose samples are never read."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"random_level": -0.1},
            ValueError,
            r"random_level=-0.1 must be from 0 \(best balance\) to 1",
        ),
        ({"random_level": float("nan")}, ValueError, "random_level is NaN"),
        ({"random_level": "high"}, TypeError, "random_level='high'"),
        ({"num_replicas": 0}, ValueError, "num_replicas=0 must be at least 1"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas=2.0 is a float; it must be an int"),
        ({"rank": 2}, ValueError, "rank=2 must be from 0 to num_replicas - 1 = 1"),
        ({"dataset": []}, ValueError, "dataset is empty"),
        ({"complexity_fn": None}, ValueError, "either complexity_fn or complexities="),
        ({"complexities": [1, 2]}, ValueError, "either complexity_fn or complexities="),
        ({"complexity_fn": [1, 2]}, TypeError, r"complexity_fn=\[1, 2\] must be a function"),
        (
            {"complexity_fn": str},
            TypeError,
            "the complexity of sample 0='1' is a str; it must be an int or a float",
        ),
        (
            {"complexity_fn": lambda sample: float("nan")},
            ValueError,
            "the complexity of sample 0 is NaN",
        ),
        (
            {"complexity_fn": lambda sample: torch.zeros(2)},
            ValueError,
            r"sample 0 has shape \(2,\); it must be one number",
        ),
        (
            {"complexity_fn": None, "complexities": [1]},
            ValueError,
            r"shape \(1,\).* each of the 2 samples",
        ),
        ({"complexity_fn": None, "complexities": torch.ones(2, 2)}, ValueError, r"shape \(2, 2\)"),
        (
            {"complexity_fn": None, "complexities": torch.tensor([1, float("nan")])},
            ValueError,
            r"complexities\[1\] is NaN",
        ),
        (
            {"complexity_fn": None, "complexities": {0: 3, 1: 2}},
            TypeError,
            "complexities is a dict",
        ),
        ({"complexity_fn": None, "complexities": "12"}, TypeError, r"complexities\[0\]='1'"),
        (
            {"complexity_fn": None, "complexities": [2**70, 0], "random_level": 0.5},
            ValueError,
            "does not fit into 64 bits",
        ),
        ({"seed": 2**64}, ValueError, "seed . epoch = 18446744073709551616 must fit into 64 bits"),
        ({"backend": "abacus", "dataset": Untouchable()}, ValueError, "abacus"),
    ],
)
def test_what_does_not_fit_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "dataset": [1, 2],
        "complexity_fn": abs,
        "num_replicas": 2,
        "rank": 1,
    }
    with pytest.raises(error, match=message):
        LoadBalancingDistributedSampler(**{**arguments, **options})


def test_epochs_that_no_generator_takes_are_refused_and_the_sampler_stays() -> None:
    sampler = sampler_of(seed=5)
    with pytest.raises(ValueError, match="must fit into 64 bits"):
        sampler.set_epoch(2**64)
    with pytest.raises(TypeError, match="epoch='3' is a str; it must be an int"):
        sampler.set_epoch("3")  # type: ignore[arg-type]
    assert sampler.epoch == 0


def test_S7_2_the_noise_bound_is_computed_in_float64() -> None:
    """In float32, 2^25 + 1 rounds to 2^25, and randint with another bound draws other noise."""
    values = [0.0] * 5000 + [2.0**25]

    def order(bound: int) -> list[int]:
        noise = torch.randint(
            bound, (len(values),), generator=torch.Generator().manual_seed(0)
        ).tolist()
        return sorted(range(len(values)), key=lambda i: values[i] + noise[i])

    assert order(2**25 + 1) != order(2**25)
    replicas = len(values)  # a single chunk, which is the order itself
    sampler = LoadBalancingDistributedSampler(
        values, None, replicas, 0, random_level=1.0, complexities=np.array(values, np.float32)
    )
    assert sampler.shuffle_chunks()[0] == [order(2**25 + 1)]


# Random numbers


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = LoadBalancingDistributedSampler(LENGTHS, abs)
    assert (sampler.rank, sampler.num_replicas) == (2, 4)
    sampler = LoadBalancingDistributedSampler(LENGTHS, abs, num_replicas=3)
    assert (sampler.rank, sampler.num_replicas) == (2, 3)
    with pytest.raises(ValueError, match="rank=2 must be from 0 to num_replicas - 1 = 1"):
        LoadBalancingDistributedSampler(LENGTHS, abs, num_replicas=2)
    monkeypatch.setenv("RANK", "first")
    assert LoadBalancingDistributedSampler(LENGTHS, abs, 2, 1).rank == 1


def test_rank_and_size_come_from_a_simulated_world() -> None:
    def draw(comm: Any) -> tuple[int, int, list[int]]:
        sampler = LoadBalancingDistributedSampler(LENGTHS, abs)
        return sampler.rank, sampler.num_replicas, list(sampler)

    assert SimulatedWorld(3).run(draw) == [(rank, 3, list(sampler_of(rank))) for rank in range(3)]


def test_rank_and_size_come_from_torch_where_only_torch_was_initialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    sampler = LoadBalancingDistributedSampler(LENGTHS, abs)
    assert (sampler.rank, sampler.num_replicas) == (1, 3)
    assert LoadBalancingDistributedSampler(LENGTHS, abs, 5, 4).rank == 4


# Sorting and caching


class Counting(ReferenceBackend):
    calls = 0

    def _order_by_complexity(self, keys: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super()._order_by_complexity(keys)


def test_the_backend_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bagua_ref.backends._instances, "counting", Counting())  # for this test only
    monkeypatch.setattr(Counting, "calls", 0)
    sampler = sampler_of(random_level=1, backend="counting")
    assert Counting.calls == 0
    assert list(sampler) == list(sampler_of(random_level=1))
    assert Counting.calls == 1
    sampler_of(random_level=0, backend=Counting())
    assert Counting.calls == 2
    with bagua_ref.use_backend("counting"):
        sampler_of(random_level=0)
    assert Counting.calls == 3


@pytest.mark.gpu
def test_a_backend_for_cuda_tensors_is_given_cuda_tensors() -> None:
    class OnlyCuda(ReferenceBackend):
        device_types = ("cuda",)

    for lengths in (LENGTHS, [length + 0.5 for length in LENGTHS]):
        expected = list(sampler_of(lengths=lengths, random_level=0.5))
        assert list(sampler_of(lengths=lengths, random_level=0.5, backend=OnlyCuda())) == expected
        assert (
            list(sampler_of(lengths=torch.tensor(lengths, device="cuda"), random_level=0.5))
            == expected
        )


@pytest.mark.parametrize("random_level", [0, 0.1])
def test_it_keeps_few_bytes_per_sample(random_level: float) -> None:
    count = 20_000
    lengths = [(1 + place * place % 997) * 1e-3 for place in range(count)]
    sampler = sampler_of(0, 1, lengths, random_level=random_level)
    take(sampler, 10)
    assert len(pickle.dumps(sampler)) < 9 * count


def test_progress_is_shown_on_rank_0_and_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    LoadBalancingDistributedSampler([1, 2, 3], abs, 2, 0, progress=True)
    lines = "".join(f"complexities: {done} %\n" for done in (30, 60, 100))
    assert capsys.readouterr() == ("", lines)
    LoadBalancingDistributedSampler(LENGTHS, abs, 2, 1, progress=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("drop_last", [False, True])
def test_S7_4_what_a_consumer_does_to_a_batch_changes_no_other(drop_last: bool) -> None:
    own = [[1, 2], [3]]  # one of the replicas repeats its batches in cycle
    cuts = [[[0, 1], [2], [3, 4], [5], [6]], own, [[7]] * 3]
    batch_sampler = batches_of(
        1, lambda indices: cuts[indices[0] % 3], drop_last, lengths=[0, 1, 2], shuffle=False
    )
    wanted = list(map(list, batch_sampler))
    for _ in range(2):
        found = []
        for batch in batch_sampler:
            found.append(list(batch))
            batch.append(99)
            batch[0] = -1
        assert found == wanted
    assert own == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("lengths", "random_level", "warns"),
    [
        ([1, 2, 3], 0.4, True),
        ([0.1, 0.9, 0.5], 0, False),
        ([0, 1], 1, False),
    ],
)
def test_S7_2_noise_that_is_always_zero_is_warned_about(
    lengths: list[float], random_level: float, warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sampler_of(0, 1, lengths, random_level=random_level, shuffle=False)
        sampler = sampler_of(0, 1, lengths, random_level=random_level)
    said = f"random_level={random_level} has no effect: "
    assert [str(each.message).startswith(said) for each in warned] == [True] * warns
    plain = sampler_of(0, 1, lengths)
    for epoch in range(5 * warns):
        sampler.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert sampler.shuffle_chunks() == plain.shuffle_chunks()


# Epochs and resuming


def test_the_state_counts_the_iterator_that_began_last() -> None:
    sampler = sampler_of()
    older = iter(sampler)
    next(older)
    newer = iter(sampler)
    take(newer, 3)
    next(older)
    assert sampler.state_dict()["samples"] == 3
    assert sampler.state_dict(samples=2)["samples"] == 2


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict is a NoneType"):
        sampler_of().load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"state_dict lacks num_replicas, length, .*epoch, samples"
    ):
        sampler_of().load_state_dict({})
    with pytest.raises(ValueError, match="state_dict lacks batches"):
        batches_of().load_state_dict(sampler_of().state_dict())
    with pytest.raises(ValueError, match="samples=9 must be from 0 to 8"):
        sampler_of().state_dict(samples=9)
    with pytest.raises(ValueError, match="batches=5 must be from 0 to 4"):
        batches_of().state_dict(batches=5)


# Batches


def test_batches_follow_the_epoch_however_it_is_set() -> None:
    expected = batches_of()
    expected.set_epoch(3)
    batch_sampler = batches_of()
    batch_sampler.sampler.set_epoch(3)
    assert len(batch_sampler) == 4
    assert list(batch_sampler) == list(expected) != list(batches_of())
    assert expected.sampler.epoch == 3


def test_batches_are_cut_again_on_demand() -> None:
    size = 2
    batch_sampler = batches_of(
        0, lambda indices: [indices[place : place + size] for place in range(0, len(indices), size)]
    )
    size = 4
    assert len(batch_sampler) == 4
    batch_sampler.generate_batches()
    assert [len(batch) for batch in batch_sampler] == [4, 4]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_replica_without_batches_is_named_on_every_rank(drop_last: bool) -> None:
    for rank in range(3):
        with pytest.raises(ValueError, match="no batches for replica 1 from its 8 indices"):
            batches_of(
                rank,
                lambda indices: [] if 4 in indices else [indices],
                drop_last,
                lengths=range(24),
                shuffle=False,
            )


def test_wrong_samplers_are_refused() -> None:
    for wrong in (torch.utils.data.SequentialSampler(LENGTHS), None, [1, 2]):
        with pytest.raises(ValueError, match="must be a LoadBalancingDistributedSampler"):
            LoadBalancingDistributedBatchSampler(wrong, pairs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sampler\.drop_last must be False"):
        LoadBalancingDistributedBatchSampler(sampler_of(drop_last=True), pairs)
    with pytest.raises(TypeError, match="batch_fn=3 must be a function"):
        batches_of(0, 3)
    with pytest.raises(
        TypeError,
        match="batch_fn returned a NoneType for replica 0; it must return a list of batches",
    ):
        batches_of(0, lambda indices: None)


def test_batches_of_another_batch_fn_are_refused() -> None:
    state = batches_of().state_dict()
    other = batches_of(0, lambda indices: [indices])
    with pytest.raises(ValueError, match="num_batches=4, and here it is 1"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="drop_last=False, and here it is True"):
        batches_of(drop_last=True).load_state_dict(state)
    assert len(list(other)) == 1


# Another number of replicas


def test_S7_6_a_state_of_before_has_one_stretch() -> None:
    state = sampler_of(0, 2).state_dict(samples=5)
    del state["stretches"], state["num_samples"]
    for replicas in (2, 3):
        old, new = sampler_of(1, replicas), sampler_of(1, replicas)
        old.load_state_dict(state)
        new.load_state_dict(sampler_of(0, 2).state_dict(samples=5))
        assert list(old) == list(new)


every_sampler = pytest.mark.parametrize(
    "make",
    [sampler_of, lambda rank, replicas: batches_of(rank, replicas=replicas), budget_of],
    ids=["samples", "batches", "budget"],
)


def continued(make: Any, replicas: int = 2, drawn: int = 2) -> Any:
    """Return the sampler of the last rank, that goes on after three ranks have drawn."""
    saving, sampler = make(0, 3), make(replicas - 1, replicas)
    sampler.load_state_dict(saving.state_dict(**{saving.unit: drawn}))
    return sampler


def at(sampler: Any, epoch: int) -> Any:
    sampler.set_epoch(epoch)
    return sampler


@every_sampler
def test_S7_6_a_loader_resumes_and_begins_later_epochs_at_their_starts(make: Any) -> None:
    """Its workers draw ahead, so training says how much of an epoch it has used."""
    in_epoch = {"batch_size": 1} if make is sampler_of else {}

    def loader_of(sampler: Any, **options: Any) -> DataLoader[Any]:
        options |= {
            "sampler" if in_epoch else "batch_sampler": sampler,
            "collate_fn": (lambda b: b[0]) if in_epoch else list,
        }
        return DataLoader(range(len(LENGTHS)), num_workers=1, **in_epoch, **options)

    sampler, fresh, rest = continued(make), make(1, 2), list(continued(make))
    assert take(loader_of(continued(make)), 1) == rest[:1]
    loader = loader_of(sampler, persistent_workers=True, prefetch_factor=3)
    assert list(loader) == rest
    assert list(loader) == list(fresh)
    for each in (sampler, fresh):
        each.set_epoch(1)
    assert list(loader) == list(fresh)
    assert take(loader, 2) == list(fresh)[:2]
    fresh.load_state_dict(sampler.state_dict(**{sampler.unit: 2}))
    assert list(loader_of(fresh)) == list(at(make(1, 2), 1))[2:]


@every_sampler
def test_S7_6_an_iterator_keeps_its_stretch_in_the_next_epoch(make: Any) -> None:
    sampler, fresh = continued(make), make(1, 2)
    iterator = iter(sampler)
    begun = next(iterator)
    for each in (sampler, fresh):
        each.set_epoch(1)
    assert [begun, *iterator] == list(continued(make))
    assert sampler.state_dict() == fresh.state_dict()


@every_sampler
def test_S7_6_more_replicas_than_samples_are_left_and_the_end_of_an_epoch(make: Any) -> None:
    assert len(list(continued(make, 100))) == 1
    whole = make(0, 3)
    list(whole)
    ended = continued(make, 2, len(whole))
    assert (len(ended), list(ended)) == (0, [])
    assert ended.state_dict() == whole.state_dict()
    assert list(at(ended, 5)) == list(at(make(1, 2), 5))


@every_sampler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "saved with seed=5, and here it is 0"),
        ({"length": 22}, "saved with length=22, and here it is 23"),
        ({"epoch": 2**70}, "64 bits"),
        ({"unit": 99}, "=99 must be from 0 to"),
        (
            {"stretches": [[2, 3]]},
            "stretch 1 of 2, 2 replicas that drew 1 .* each, must be of .* other ones than before",
        ),
        (
            {"stretches": [[3, 0]]},
            "stretch 0 of 2, 3 replicas that drew 0 .* each, .* that drew at least 1",
        ),
        ({"stretches": [[2**40, 1]]}, "must be of 1 to 1048576 replicas"),
        ({"stretches": [3]}, r"stretches=\[3\] must be pairs"),
        ({"num_replicas": 1.5}, "num_replicas=1.5 is a float"),
        ({"num_unit": 99}, "=99, and here it is"),
    ],
)
def test_S7_6_a_state_that_is_refused_changes_nothing(
    make: Any, change: dict[str, Any], message: str
) -> None:
    sampler, saved = continued(make), make(0, 2)
    change = {name.replace("unit", saved.unit): value for name, value in change.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        sampler.load_state_dict({**saved.state_dict(**{saved.unit: 1}), **change})
    assert sampler.state_dict() == continued(make).state_dict()
    assert list(sampler) == list(continued(make))


def drawn_by_ranks(make: Any, ranks: int = 2, use: Any = None) -> list[Any]:
    """Return what each rank of a simulated world draws of ``make(rank)``, or why it cannot."""

    def rank(comm: Any) -> Any:
        bagua_ref.init_process_group()
        sampler = make(comm.rank())
        try:
            if use is not None:
                return use(sampler)
            return [(index, comm.barrier())[0] for index in sampler]  # as training does each step
        except ValueError as error:
            return str(error)

    return SimulatedWorld(ranks).run(rank)


SAME: dict[str, Any] = {"rank": None, "replicas": None}  # those of the process group
differences = pytest.mark.parametrize(
    ("make", "different"),
    [
        (lambda rank: sampler_of(**SAME, seed=rank), "seed=1"),
        (lambda rank: sampler_of(**SAME, shuffle=rank == 0), "shuffle=False"),
        (lambda rank: sampler_of(**SAME, drop_last=rank == 1), "drop_last=True"),
        (lambda rank: sampler_of(**SAME, random_level=rank / 2), "random_level=0.5"),
        (lambda rank: sampler_of(**SAME, lengths=LENGTHS[:: 1 - 2 * rank]), "complexities="),
        (lambda rank: sampler_of(**SAME, lengths=LENGTHS[rank:]), "length=22"),
        (lambda rank: sampler_of(0, 2 - rank), "num_replicas=1"),
        (lambda rank: batches_of(**SAME, seed=rank), "seed=1"),
        (lambda rank: budget_of(**SAME, mix=8 - rank), "mix=7"),
    ],
)


@differences
def test_what_differs_between_ranks_ends_the_first_epoch_and_a_save(
    make: Any, different: str, tmp_path: Path
) -> None:
    def save(**options: Any) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], bagua_ref.algorithms.GradientAllReduceAlgorithm())
        bagua_ref.checkpoint.save(tmp_path, model, optimizer, step=1, **options)

    for use in (
        None,
        lambda sampler: sampler.check_agreement(),
        lambda sampler: save(sampler=sampler),
        lambda sampler: save(sampler=sampler.state_dict()),
        lambda sampler: save(extra={"loaders": [sampler.state_dict()]}),
    ):
        for said in drawn_by_ranks(make, use=use):
            assert (
                f"samplers differ, so samples would repeat and others be left out: rank 1 has {different}"
                in said
            )


def test_samplers_that_may_differ_are_drawn() -> None:
    def one_is_looked_at(rank: int) -> Any:
        if rank == 1:
            list(sampler_of(**SAME, seed=5))
        return sampler_of(**SAME)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make, count in (
            (lambda rank: sampler_of(**SAME), 12),
            (one_is_looked_at, 12),
            (lambda rank: sampler_of(1 - rank, 2), 12),
            (lambda rank: sampler_of(0, 1, seed=rank), 23),  # of a training of its own
        ):
            assert [len(share) for share in drawn_by_ranks(make)] == [count] * 2


@pytest.mark.parametrize(
    ("replicas", "said"), [(2, "both have rank=0 of 2"), (3, "more than the 2 ranks")]
)
def test_shares_that_are_drawn_twice_or_never_are_warned_about(replicas: int, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        drawn_by_ranks(lambda rank: sampler_of(0, replicas))
    if replicas == 2:
        compare = LoadBalancingDistributedSampler.check_agreement
        for error in drawn_by_ranks(lambda rank: sampler_of(0, 2), use=compare):
            assert said in error


@every_sampler
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_S7_6_a_copy_has_a_position_of_its_own(make: Any, duplicate: Any) -> None:
    sampler, expected = continued(make), list(continued(make))
    assert list(duplicate(sampler)) == list(sampler) == expected
    sampler = continued(make)
    iterator = iter(sampler)
    next(iterator)
    copied = duplicate(sampler)
    assert copied.state_dict() == sampler.state_dict()
    resumed = make(1, 2)
    resumed.load_state_dict(copied.state_dict())
    assert list(resumed) == expected[1:]
    copied.set_epoch(3)
    assert [sampler.epoch, copied.epoch] == [0, 3]
    assert list(iterator) == expected[1:]


@every_sampler
def test_a_trainer_that_counts_epochs_from_its_restart_keeps_a_loaded_position(make: Any) -> None:
    sampler = make(0, 2)
    sampler.set_epoch(3)
    expected = list(sampler)
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()

    restarted = make(0, 2)
    restarted.load_state_dict(state)
    restarted.set_epoch(3)
    with pytest.warns(UserWarning, match="of epoch 3: the loaded position is kept"):
        restarted.set_epoch(0)
    assert (restarted.epoch, list(restarted)) == (3, expected[1:])
    restarted.set_epoch(1)
    assert restarted.epoch == 4
    restarted.load_state_dict(state)
    assert list(restarted) == expected[1:]
    restarted.set_epoch(0)  # after it was drawn, an epoch is what it says
    assert restarted.epoch == 0


@every_sampler
def test_the_checksum_of_costs_is_computed_once(make: Any, monkeypatch: Any) -> None:
    calls, sampler = [], make(0, 2)
    monkeypatch.setattr(zlib, "crc32", lambda data: calls.append(len(data)) or 7)
    for _ in range(3):
        sampler.state_dict()
    assert len(calls) == 1


@pytest.mark.slow
@on_every_process(3, init=False)
def test_processes_with_torchs_group_alone_learn_together_that_seeds_differ() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def draw(seed: int, lengths: list[int]) -> None:
        sampler = sampler_of(None, None, lengths, seed=seed)
        for _ in DataLoader(lengths, sampler=sampler, batch_size=4):
            dist.barrier()  # as training does with each batch

    draw(0, list(range(60)))
    if rank == 0:
        list(sampler_of(rank, 3, list(range(60)), seed=5))  # drawn here alone: nobody waits
    with pytest.raises(ValueError, match=r"the ranks' samplers differ.* seed="):
        draw(rank, list(range(60)))
    dist.barrier()
    dist.destroy_process_group()


# Batches under a budget


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_cost": 0.5}, ValueError, "max_cost=0.5 must be a finite number of at least 1"),
        ({"max_cost": float("inf")}, ValueError, "max_cost=inf"),
        ({"max_cost": "9"}, TypeError, "max_cost='9' is a str"),
        (
            {"max_cost": 8},
            ValueError,
            r"costs\[5\]=9 makes a batch of sample 5 alone cost 9, over max_cost=8",
        ),
        ({"costs": []}, ValueError, "costs is empty"),
        ({"costs": None}, TypeError, "costs is a NoneType; it must be a list, array or tensor"),
        ({"costs": [1, 0]}, ValueError, r"costs\[1\]=0 must be positive and finite"),
        ({"costs": [1.0, float("inf")]}, ValueError, r"costs\[1\]=inf must be positive and finite"),
        ({"costs": [1.0, float("nan")]}, ValueError, r"costs\[1\] is NaN"),
        ({"costs": [1, 10**400]}, ValueError, "too large for a float"),
        ({"costs": [[1, 2]]}, TypeError, r"costs\[0\]=\[1, 2\] is a list"),
        ({"mix": 0}, ValueError, "mix=0 must be at least 1"),
        ({"padded": 1}, TypeError, "padded=1 must be True, False or a function"),
        ({"padded": lambda m, h: -m, "max_cost": 9}, ValueError, "padded must not decrease"),
        ({"padded": lambda m, h: 5 / h}, ValueError, "padded must not decrease"),
        (
            {"padded": lambda m, h: 10 * m + 5 * (h < 3), "max_cost": 25},
            ValueError,
            "of a batch that is not longer",
        ),
        ({"padded": lambda m, h: float("nan")}, ValueError, "NaN"),
        (
            {"costs": [5, 5], "drop_last": True},
            ValueError,
            "leaves no batch: 2 batches of 2 samples are fewer than 3 replicas",
        ),
    ],
)
def test_S7_7_what_does_not_fit_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        budget_of(0, 3, **{"max_cost": 9, **options})


def test_S7_7_a_state_of_another_cost_is_refused() -> None:
    state = budget_of(padded=lambda m, h: m * h).state_dict(batches=1)
    budget_of(padded=lambda m, h: h * m).load_state_dict(state)
    changes: list[tuple[dict[str, Any], str]] = [
        (
            {"padded": lambda m, h: m * h + (m > 2)},
            "padded=a function, .* and here it is a function",
        ),
        ({"padded": True}, "padded=a function, .* and here it is True"),
        ({"max_cost": 19}, "max_cost=18, and here it is 19"),
        ({"mix": 1}, "mix=8, and here it is 1"),
        ({"costs": LENGTHS[::-1]}, "other costs"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            budget_of(**{"padded": lambda m, h: m * h, **change}).load_state_dict(state)


# bagua-ref balance


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text(
        "# lengths\n" + "".join(f"{length}\n\n" for length in LENGTHS) + "2.5 # half a word\n"
    )
    return path


def balance_of(path: Path, *options: object) -> int:
    return main(["balance", "--lengths", str(path), "--ranks", "3", *map(str, options)])


def test_balance_prints_draws_and_writes_json(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, values = tmp_path / "work.png", tmp_path / "balance.json"
    options = ("--batch-size", 2, "--png", picture, "--json-file", values)
    assert balance_of(lengths_file, *options) == 0
    printed = capsys.readouterr().out
    found = json.loads(values.read_text())
    assert found["ranks"] == 3
    ways = ["without balancing", "with balancing", *(f"budget mix={mix}" for mix in (1, 8, 32))]
    assert list(found["ways"]) == ways
    for way in ways:
        assert re.search(way + r" +\d+ +[\d.]+% +[\d.]+% +[\d.]+%", printed)
    assert f"Picture: {picture}" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, balanced = (found["ways"][way] for way in ways[:2])
    assert np.array(balanced["work"]).shape == np.array(plain["work"]).shape == (4, 3)
    assert balanced["waiting"] < plain["waiting"]
    assert (plain["time"], plain["steps"]) == (1, 4)


def test_balance_draws_only_when_asked(
    lengths_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    assert balance_of(lengths_file) == 0
    assert "with balancing" in capsys.readouterr().out
    assert list(tmp_path.glob("*.png")) == []


def test_lengths_are_read_from_arrays_and_what_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    assert balance.read_lengths(f"{tmp_path}/lengths.npy") == LENGTHS
    source = f"lengths = {LENGTHS}\ntexts = lambda: ['a' * length for length in lengths]\n"
    (tmp_path / "corpus_here.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lengths", "texts"):
        assert balance.read_lengths(f"corpus_here:{name}") == LENGTHS
    with pytest.raises(CommandError, match="cannot load corpus_here:text"):
        balance.read_lengths("corpus_here:text")


@pytest.mark.parametrize(
    ("content", "more", "complaint"),
    [
        ("1\ntwo\n", [], "could not convert string 'two'"),
        ("# nothing\n", [], "contains no list of lengths"),
        ("1\n0\n", [], "length 1 of 2 is 0; it must be a number above 0"),
        ("1\n2\n", ["--ranks", "0"], "--ranks: '0' must be an integer from 1"),
        (
            "1\n2\n",
            ["--max-cost", "1.5"],
            "costs[1]=2 makes a batch of sample 1 alone cost 2, over max_cost=1.5",
        ),
        ("1\n2\n", ["--seed", str(2**64)], "must be an integer from 0 to"),
        (None, [], "No such file"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_balance_names_bad_input(
    content: str | None,
    more: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_text(content)
    assert balance_of(path, "--png", tmp_path / "p.png", *more) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""


@pytest.mark.slow
def test_the_example_writes_lengths_for_balance_and_trains_with_both_samplers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script("examples/balanced_text.py")
    texts = str(Path(json.__file__).parents[1] / "asyncio")  # the whole library has 7,000
    monkeypatch.setattr(example.sysconfig, "get_path", lambda name: texts)
    example.main(["--write-lengths", str(tmp_path / "lengths.txt")])
    assert re.match(r"\d+ lengths from \d+ to \d+ in ", capsys.readouterr().out)
    epochs = balance.work_of_epochs(balance.read_lengths(f"{tmp_path}/lengths.txt"), 4)
    assert epochs["without balancing"]["waiting"] > 0.2 > epochs["with balancing"]["waiting"]
    SimulatedWorld(2).run(lambda comm: example.main(["--steps", "2"]))
    row = r"{}: [\d.]+ s on 2 ranks\n"
    both = row.format("DistributedSampler") + row.format("LoadBalancingDistributedSampler")
    assert re.fullmatch(both, capsys.readouterr().out)
