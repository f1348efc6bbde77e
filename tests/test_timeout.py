"""Tests of the timeout: argument, else BAGUA_REF_TIMEOUT, else 300 seconds, validated alike
wherever it is given (S2.5).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainings import network
from torch import nn

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm
from bagua_ref.contrib.utils.redis_store import RedisStore
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.env import checked_timeout, get_default_timeout
from bagua_ref.errors import CommunicationTimeoutError
from bagua_ref.simulation import SimulatedWorld


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_REF_TIMEOUT", raising=False)


def with_bagua(timeout: Any) -> float:
    module: Any = network()
    module.with_bagua([], GradientAllReduceAlgorithm(), timeout=timeout)
    return module._bagua.engine._worker.timeout  # type: ignore[no-any-return]


def wrapper(timeout: Any) -> float:
    return DistributedDataParallel(network(), timeout=timeout).inner.engine._worker.timeout


def simulate(timeout: Any, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)`` of the only rank of a world whose group has ``timeout``."""

    def rank(comm: Any) -> Any:
        bagua_ref.init_process_group(timeout=timeout)
        return function(argument)

    return SimulatedWorld(1).run(rank)[0]


def test_S2_5_argument_then_variable_then_300_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def group_timeout(timeout: Any) -> Any:
        return simulate(timeout, lambda _: bagua_ref.new_group().timeout, None)

    assert group_timeout(None) == get_default_timeout() == 300.0
    monkeypatch.setenv("BAGUA_REF_TIMEOUT", "12.5")
    assert group_timeout(None) == get_default_timeout() == 12.5
    assert group_timeout(7) == 7.0
    assert type(group_timeout(np.float32(0.5))) is float


@pytest.mark.parametrize("wrap", [with_bagua, wrapper], ids=lambda f: f.__name__)
def test_S2_5_a_wrapped_module_has_the_timeout_of_its_group(
    wrap: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulate(None, wrap, None) == 300.0
    assert simulate(40, wrap, None) == 40.0
    assert simulate(40, wrap, 9) == 9.0
    monkeypatch.setenv("BAGUA_REF_TIMEOUT", "50")
    assert simulate(None, wrap, None) == 50.0
    assert simulate(40, wrap, None) == 40.0


def test_S2_5_the_variable_limits_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_REF_TIMEOUT", "20")

    def rank(comm: Any) -> float:
        bagua_ref.init_process_group()
        group = bagua_ref.new_group()
        assert group.timeout == 20.0
        if comm.rank() == 1:
            bagua_ref.base.runtime.current_world().sleep(60)
            return 0.0
        with pytest.raises(CommunicationTimeoutError, match=r"20\.0 s"):
            group.get_global_communicator()
        return bagua_ref.base.runtime.current_world().now()

    assert SimulatedWorld(2).run(rank)[0] == 20.0


SECONDS = datetime.timedelta(seconds=3)
BAD = [
    0,
    -1,
    0.0,
    1e-4,
    2e9,
    math.inf,
    -math.inf,
    math.nan,
    True,
    False,
    "9",
    [3],
    1j,
    SECONDS,
    torch.ones(1),
]
TAKERS: dict[str, Callable[[Any], Any]] = {
    "checked_timeout": checked_timeout,
    "init_process_group": lambda timeout: bagua_ref.init_process_group(timeout=timeout),
    "with_bagua": lambda timeout: simulate(None, with_bagua, timeout),
    "DistributedDataParallel": lambda timeout: simulate(None, wrapper, timeout),
    "RedisStore": lambda timeout: RedisStore([{"host": "127.0.0.1"}], timeout=timeout),
}


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_S2_5_a_timeout_that_is_no_number_of_seconds_is_refused_everywhere(
    taker: Callable[[Any], Any], bad: Any
) -> None:
    with pytest.raises(ValueError) as refused:
        taker(bad)
    assert str(refused.value) == f"timeout={bad!r} must be a number of seconds from 0.001 to 1e9"


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "inf", "nan", "5 s", "1e10"])
def test_S2_5_a_variable_that_is_no_number_of_seconds_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_REF_TIMEOUT", text)
    for taker in (bagua_ref.init_process_group, get_default_timeout):
        with pytest.raises(ValueError) as refused:
            taker()
        assert (
            str(refused.value)
            == f"BAGUA_REF_TIMEOUT={text!r} must be a number of seconds from 0.001 to 1e9"
        )
    assert not bagua_ref.is_initialized()
    assert simulate(3, wrapper, None) == 3.0  # an argument takes precedence


def test_S2_5_a_refused_timeout_leaves_the_module_unwrapped() -> None:
    def rank(comm: Any) -> None:
        bagua_ref.init_process_group()
        module: Any = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="timeout=0"):
            module.with_bagua([], GradientAllReduceAlgorithm(), timeout=0)
        assert not hasattr(module, "_bagua")

    SimulatedWorld(1).run(rank)
