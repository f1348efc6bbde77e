"""Tests of the suite of caches with outside targets: faulty ones fail with a script."""

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
    results = run_conformance(target, ["cache"]).results
    assert {result.message for result in results if result.status == "skipped"} == {
        "the target has no cache"
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
                "cache.S8.2.none",
            ]
        )
        == 0
    )
    assert f"PASSED: {name}" in capsys.readouterr().out
