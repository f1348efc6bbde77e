"""Tests of the suites of fused optimizers and caches with outside targets: faulty ones fail with a
script.
"""

from __future__ import annotations

import os
import pickle
import time
import types

import pytest
from tests.cache_servers import connect, eventually, processes
from tests.launch import run_script

from bagua_ref import contrib
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.targets.reference_target import ReferenceTarget

pytestmark = pytest.mark.slow


def on(target, *checks, **options):
    return run_conformance(target, checks=checks, **{"time_limit": 3.0, **options})


# Fused optimizers from outside


def unfused(optimizer, do_flatten=True, check_flatten=True, *, allow_inexact=False):
    """The minimum that S6 allows: every parameter is stepped separately."""
    optimizer._bagua_fused_count = 0
    optimizer.fuse_step = lambda closure=None: optimizer.step(closure)
    return optimizer


def forgets_gradients(optimizer, do_flatten=True, check_flatten=True, *, allow_inexact=False):
    """Always step with the gradients of the first call."""
    unfused(optimizer)
    held = {}

    def fuse_step(closure=None):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = held.setdefault(p, p.grad)
        return optimizer.step(closure)

    optimizer.fuse_step = fuse_step
    return optimizer


def raises(optimizer, **flags):
    raise RuntimeError("out of cheese")


def sleeps(optimizer, **flags):
    time.sleep(1000)


def dies(optimizer, **flags):
    os._exit(7)


def returns_nothing(optimizer, **flags):
    return None


def target_of(fuse_optimizer):
    return types.SimpleNamespace(fuse_optimizer=fuse_optimizer)


@pytest.mark.usefixtures("few_inputs")
def test_an_optimizer_that_fuses_nothing_fails_only_where_something_must_be_fused():
    report = on(target_of(unfused), "S6", jobs=2, shrink=False)
    assert {result.id for result in report.failures()} == {
        f"fused_optimizer.S6.{name}" for name in ("count", "moved", "refuses")
    }


@pytest.mark.parametrize(
    ("fuse_optimizer", "check", "said"),
    [
        (forgets_gradients, "zero_grad", "weights of parameter"),
        (raises, "bits", "out of cheese"),
        (sleeps, "bits", "fuse_optimizer: no answer within 1 s"),
        (dies, "bits", "crashed: exit code 7"),
        (returns_nothing, "identity", "must return the optimizer itself"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_fused_optimizer_is_a_verdict_with_a_script(fuse_optimizer, check, said):
    limit = {"time_limit": 1.0} if fuse_optimizer is sleeps else {}
    failed = on(target_of(fuse_optimizer), f"fused_optimizer.S6.{check}", **limit).failures()[0]
    assert said in failed.message
    script = failed.counterexample
    assert (
        f"from tests.test_conformance_contrib import {fuse_optimizer.__name__} as fuse_optimizer"
        in script
    )
    if fuse_optimizer is forgets_gradients:
        assert run_script(script).returncode == 1, script
        ran = run_script(
            script.replace(
                "from tests.test_conformance_contrib import",
                "from bagua_ref.contrib import fuse_optimizer  #",
            )
        )
        assert ran.returncode == 0, ran.stderr


# Caches from outside


class Plain:
    """A dict in each process with a cache's interface; it has no store."""

    def __init__(self, backend="redis", dataset_name="", writer_buffer_size=1, **kwargs):
        self.name, self.kept = dataset_name, {}

    def get(self, key, load_fn):
        if key not in self.kept:
            self.kept[key] = load_fn(key)
        return self.kept[key]

    def num_keys(self):
        return len(self.kept)

    def flush(self):
        pass

    close = flush


class Pickles(Plain):
    """A cache as one would write it in five minutes."""

    def __init__(self, backend="redis", dataset_name="", writer_buffer_size=1, *, hosts, **kwargs):
        super().__init__(backend, dataset_name)
        self.store = connect(**hosts[0])

    def get(self, key, load_fn):
        data = self.store.get(f"{self.name}_{key}")
        if data is not None:
            return pickle.loads(data)
        value = load_fn(key)
        self.store.set(f"{self.name}_{key}", pickle.dumps(value))
        return value

    def num_keys(self):
        return self.store.dbsize()


class Raises(Plain):
    def get(self, key, load_fn):
        raise RuntimeError("out of cheese")


class Sleeps(Plain):
    def get(self, key, load_fn):
        time.sleep(1000)


class SleepsInWorkers(Plain):
    def get(self, key, load_fn):
        time.sleep(1000 if isinstance(key, int) and key >= 100 else 0)
        return load_fn(key)


class ReturnsNothing(Plain):
    def get(self, key, load_fn):
        return None


class Target:
    """A target with a cache of its own."""

    loader = contrib.CacheLoader

    @property
    def cache(self):
        return types.SimpleNamespace(CacheLoader=self.loader)


def with_loader(loader):
    """Return a class of targets with this cache, named after it."""
    return type(f"Target{loader.__name__}", (Target,), {"loader": loader, "__module__": __name__})


(
    TargetPlain,
    TargetPickles,
    TargetRaises,
    TargetReturnsNothing,
    TargetSleeps,
    TargetSleepsInWorkers,
) = map(with_loader, (Plain, Pickles, Raises, ReturnsNothing, Sleeps, SleepsInWorkers))


@pytest.mark.parametrize(
    ("target", "check", "said"),
    [
        (TargetPlain, "S8.1.keys", "has the keys [] instead of"),
        (TargetPickles, "S8.5.runs_nothing", "reading a value ran code from the store"),
        (TargetPickles, "S8.3.down", "raised ConnectionError"),
        (TargetRaises, "S8.2.get", "out of cheese"),
        (TargetReturnsNothing, "S8.2.get", "load_fn was called for []"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_faulty_cache_is_a_verdict_with_a_script(target, check, said):
    failed = on(target(), f"cache.{check}").failures()[0]
    assert said in failed.message
    script = failed.counterexample
    assert f"from tests.test_conformance_contrib import {target.__name__}" in script
    if target is TargetPlain:
        assert run_script(script).returncode == 1, script
        ran = run_script(script.replace(target.__name__, "Target"))
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "target", [TargetSleeps, TargetSleepsInWorkers], ids=lambda target: target.__name__
)
def test_a_cache_that_hangs_leaves_no_process_behind(target):
    check, before = "cache.S8.2.worker", set(processes("watchdog.py"))
    report = on(target(), check, shrink=False, time_limit=1.0)
    assert "cache: no answer within 1 s" in report.failures()[0].message
    assert "start_servers(1)" in report.failures()[0].counterexample
    assert eventually(lambda: not set(processes("watchdog.py", f" {os.getpid()} ")) - before)


# The package's own targets, and machines without a server


@pytest.mark.usefixtures("few_inputs")
def test_the_package_passes_in_processes_and_on_threads():
    before = set(processes("watchdog.py"))
    for jobs in (2, 0):
        report = on(
            ReferenceTarget(),
            "cache.S8.2.worker",
            "cache.S8.3.damage",
            "fused_optimizer.S6.storages",
            jobs=jobs,
            time_limit=20,
        )
        assert report.passed, report
    assert set(processes("watchdog.py", f" {os.getpid()} ")) <= before


@pytest.mark.usefixtures("few_inputs")
def test_without_a_program_the_small_server_serves(monkeypatch):
    monkeypatch.setenv("PATH", "")
    report = on(ReferenceTarget(), "S8.1", "S8.3", time_limit=20, seed=3)
    assert report.passed, report


def test_without_any_server_the_suite_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = run_conformance(ReferenceTarget(), ["cache"])
    assert not report.ran
    assert {result.message for result in report.results if result.status == "skipped"} == {
        "there is no server: install redis-server or valkey-server, or the package fakeredis"
    }


@pytest.mark.parametrize(
    "target", ["reference", types.SimpleNamespace(samplers=contrib)], ids=["backend", "other"]
)
def test_a_target_without_the_part_is_skipped_with_a_reason(target):
    for suite, part in (("cache", "cache"), ("fused_optimizer", "fuse_optimizer")):
        results = run_conformance(target, [suite]).results
        assert {result.message for result in results if result.status == "skipped"} == {
            f"the target has no {part}"
        }


def test_the_command_names_the_package_s_own_target(capsys):
    from bagua_ref.cli import main

    name = "bagua_ref.conformance.targets.reference_target:ReferenceTarget"
    assert (
        main(
            [
                "verify",
                "--backend",
                name,
                "--check",
                "fused_optimizer.S6.count",
                "--check",
                "cache.S8.2.none",
            ]
        )
        == 0
    )
    assert f"PASSED: {name}" in capsys.readouterr().out
