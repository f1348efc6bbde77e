"""Tests of the warning and the log line when a training begins: their bytes are those that ranks
then send (S14.1).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.launch import launch

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.graphs import ring
from bagua_ref.simulation import SimulatedWorld

LOGGER = "bagua_ref.planning.wrapped"
WARMUP, PERIOD = 4, 2


class Own(ByteGradAlgorithm):
    """An algorithm of a user's, which has no plan."""


def train(name: str, steps: int, options: dict[str, Any]) -> None:
    bagua_ref.init_process_group()
    model = torch.nn.Linear(100, 20)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), warmup_steps=WARMUP)
        options = {"q_adam_optimizer": optimizer, **options}
    model.with_bagua(
        optimizer, Own(**options) if name == "own" else Algorithm.init(name, **options)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
    bagua_ref.destroy_process_group()


def simulate(nodes: tuple[int, ...], name: str, **options: Any) -> tuple[list[str], int, int]:
    """Return the warnings, and what the busiest rank sends in a step of the warm-up and afterwards,
    by the messages.
    """
    sent = {}
    for steps in (0, 1, WARMUP, WARMUP + PERIOD):
        world = SimulatedWorld(sum(nodes), nodes=nodes, link="1Gbit,1ms")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            world.run(lambda _, steps=steps: train(name, steps, options))
        sent[steps] = world.timeline.messages
    warned = [warning for warning in seen if "hierarchical" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in warned)
    later = busiest(sent[WARMUP + PERIOD] - sent[WARMUP]) // PERIOD
    return [str(warning.message) for warning in warned], busiest(sent[1] - sent[0]), later


def busiest(messages: Counter[tuple[int, int, int]]) -> int:
    """Return the bytes of the rank that sends most of these messages."""
    of_rank = Counter[int]()
    for (source, _, nbytes), count in messages.items():
        of_rank[source] += count * nbytes
    return max(of_rank.values(), default=0)


def numbers_of_bytes(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"(\d[\d,]*) B\b", text)]


@pytest.mark.parametrize(
    ("name", "n"),
    [("bytegrad", 2), ("low_precision_decentralized", 3), ("qadam", 4), ("local_sgd", 3)],
)
def test_one_rank_warns_where_the_option_costs_bytes(name: str, n: int) -> None:
    options = {"period": PERIOD} if name == "local_sgd" else {}
    warned, _, sent = simulate((n,), name, hierarchical=True, **options)
    (text,) = warned
    assert numbers_of_bytes(text) == [sent, simulate((n,), name, hierarchical=False, **options)[2]]
    assert "hierarchical=False" in text


@pytest.mark.parametrize(
    ("nodes", "name", "options"),
    [
        ((1,), "bytegrad", {}),
        ((3,), "bytegrad", {"hierarchical": False}),
        ((2, 1), "bytegrad", {}),
        ((3,), "own", {}),
        ((3,), "gradient_allreduce", {}),
        ((2,), "decentralized", {}),  # as many bytes either way
        ((3,), "decentralized", {"hierarchical": False}),
    ],
)
def test_nobody_warns_otherwise(nodes: tuple[int, ...], name: str, options: dict[str, Any]) -> None:
    assert simulate(nodes, name, **options)[0] == []


def test_the_log_has_the_bytes_now_and_after_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        _, first, later = simulate((1, 1, 1), "qadam")
    (text,) = {record.getMessage() for record in caplog.records if record.name == LOGGER}
    assert text.startswith("qadam, 3 ranks on 3 nodes: ")
    assert f"after {WARMUP} steps" in text
    assert f"({later / first:.3f} of gradient_allreduce)" in text
    assert numbers_of_bytes(text)[:2] == [first, later]


@pytest.mark.parametrize(("name", "sent"), [("gradient_allreduce", 8080), ("own", None)])
def test_the_log_of_algorithms_without_warm_up(
    name: str, sent: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        simulate((1, 1), name)
    found = {
        tuple(numbers_of_bytes(record.getMessage()))
        for record in caplog.records
        if record.name == LOGGER
    }
    assert found == (set() if sent is None else {(sent, 0, 0)})


def test_the_log_stays_empty_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        simulate((1, 1), "bytegrad")
    assert [record for record in caplog.records if record.name == LOGGER] == []


def test_functions_of_users_are_called_for_trained_steps_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def graph(step: int, n: int) -> Any:
        asked.append(step)
        return ring(step, n)

    def wrap(_: Any) -> None:
        bagua_ref.init_process_group()
        model = torch.nn.Linear(2, 2)
        model.with_bagua([], DecentralizedAlgorithm(hierarchical=False, peer_selection_mode=graph))
        bagua_ref.destroy_process_group()

    with caplog.at_level(logging.INFO, LOGGER):
        SimulatedWorld(3).run(wrap)
    assert asked == [0, 0, 0]  # by wrapping, once on each rank


@pytest.mark.timeout(30)
def test_long_periods_are_not_added_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert simulate((2,), "local_sgd", period=10**12, hierarchical=True)[0] == []
    assert [record for record in caplog.records if record.name == LOGGER] == []


def warnings_over_gloo() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.nn.Linear(100, 20)
        model.with_bagua(torch.optim.SGD(model.parameters(), lr=0.1), "bytegrad")
    return [str(warning.message) for warning in seen]


def test_processes_warn_on_the_first_rank() -> None:
    first, other = launch(warnings_over_gloo, 2)
    assert len(first) == 1
    assert "hierarchical=False" in first[0]
    assert other == []


def test_buckets_of_ddp_have_the_size_that_it_was_given(caplog: pytest.LogCaptureFixture) -> None:
    def wrap(steps: int) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            bagua_ref.init_process_group()
            model = bagua_ref.data_parallel.DistributedDataParallel(
                torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))),
                optimizers=[],
                algorithm=ByteGradAlgorithm(hierarchical=False),
                bucket_cap_mb=4e-5,
            )
            for _ in range(steps):
                model(torch.ones(1, 3)).sum().backward()
            bagua_ref.destroy_process_group()

        return run

    worlds = [SimulatedWorld(2, nodes=(1, 1), link="1Gbit,1ms") for _ in range(2)]
    with caplog.at_level(logging.INFO, LOGGER):
        for steps, world in enumerate(worlds):
            world.run(wrap(steps))
    texts = {record.getMessage() for record in caplog.records if record.name == LOGGER}
    assert {numbers_of_bytes(text)[0] for text in texts} == {
        busiest(worlds[1].timeline.messages - worlds[0].timeline.messages)
    }
