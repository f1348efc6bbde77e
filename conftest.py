"""Set up every test run: how hard Hypothesis searches, what a machine lacks, what docstring examples may name."""

from __future__ import annotations

import os
import signal

# Two pytest workers, each with ranks of its own, share the cores: more threads per rank only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# A job in the background of a shell ignores Ctrl-C, and so would the tests that press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a borrowed GPU machine may lack it; its GPU tests do not need it
    collect_ignore_glob = ["src/bagua_ref/conformance/*.py"]
else:
    common = settings(
        deadline=None,  # a busy machine is no bug
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,  # CI judges a change, not its luck; everyone else searches anew each time
        print_blob=True,
    )
    settings.register_profile("quick", common, max_examples=50)
    settings.register_profile("full", common, max_examples=100)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


# Importing these raises, on purpose: they stand for parts of the original that are left out.
_LEFT_OUT = ("checkpoint", "contrib/sync_batchnorm", "distributed/launch", "distributed/run", "model_parallel", "moe", "service")
collect_ignore = [f"src/bagua_ref/{name}.py" for name in _LEFT_OUT]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _docstring_examples(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    """Let examples in docstrings use torch and the package's public names without importing them, and find no caches of others."""
    if isinstance(request.node, pytest.DoctestItem):
        import bagua_ref
        from bagua_ref.contrib.cache import job_servers

        for kind in ("redis", "fakeredis"):
            job_servers.shutdown(kind)  # a test that ran before in this process may have filled its job's cache
        doctest_namespace.update({"torch": torch, "bagua_ref": bagua_ref})
        doctest_namespace.update({name: getattr(bagua_ref, name) for name in bagua_ref.__all__})
