"""Coverage-guided search for hostile input: ``python property_tests/fuzz.py PROPERTY
-max_total_time=60``.

Runs one property of test_hostile_input.py under Atheris (``pip install atheris``), which the
development tools lack. Options after the property's name are libFuzzer's. If the property fails, it
prints the traceback, and the exit status is not 0. Then pytest repeats the input, which Hypothesis
has stored, and reduces it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from tempfile import gettempdir


def main(arguments: list[str]) -> None:
    """Fuzz the property that the first argument names."""
    try:
        import atheris
    except ModuleNotFoundError:
        sys.exit("fuzz.py: needs Atheris; install with: pip install atheris")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with atheris.instrument_imports(
        include=["bagua_ref.base.untrusted", "bagua_ref.conformance", "bagua_ref.cli", "json"]
    ):
        module = importlib.import_module("property_tests.test_hostile_input")
    # A property that is run once for each backend cannot be called without one.
    found = {
        name: test
        for name, test in vars(module).items()
        if hasattr(test, "hypothesis") and not hasattr(test, "pytestmark")
    }
    if not arguments or arguments[0] not in found:
        sys.exit("\n  ".join(["fuzz.py: the first argument must be one of", *found]))
    atheris.Setup(
        [
            sys.argv[0],
            "-len_control=0",
            "-max_len=4096",
            f"-artifact_prefix={gettempdir()}/",
            *arguments[1:],
        ],
        found[arguments[0]].hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
