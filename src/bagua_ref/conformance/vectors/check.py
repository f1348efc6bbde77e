"""Comparison of outputs with golden vectors: a verdict for each case, and for each unexpected file or tensor."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, ULP, Tolerance, assert_equal
from bagua_ref.conformance.formats.safetensors_file import DamagedFileError, name_of, read_safetensors
from bagua_ref.conformance.vectors.files import VectorsError, read_manifest, read_vectors

__all__ = ["VectorsReport", "Verdict", "check_outputs", "tolerance_named"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case.

    Attributes:
        case: its entry in the manifest.
        status: ``"passed"``, ``"failed"`` or ``"missing"``.
        message: description of the failure; empty if it passed.
    """

    case: dict[str, Any]
    status: str
    message: str = ""


@dataclass(frozen=True)
class VectorsReport:
    """The verdicts on all selected cases.

    Attributes:
        verdicts: one for each case.
        problems: unexpected or unreadable files and tensors, by file or file and tensor.
        not_selected: number of cases that were not selected.
        versions: ``vectors_version`` and ``spec_version`` of the vectors.
    """

    verdicts: list[Verdict]
    problems: dict[str, str]
    not_selected: int
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether there are cases, all have passed, and there are no problems."""
        return bool(self.verdicts) and not self.problems and all(verdict.status == "passed" for verdict in self.verdicts)

    def count(self, status: str) -> int:
        """Return the number of cases with this status."""
        return sum(verdict.status == status for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        keys = ("id", "operation", "clause", "dtype", "tolerance", "flags")
        return {
            "passed": self.passed,
            **self.versions,
            "counts": {status: self.count(status) for status in ("passed", "failed", "missing")},
            "not_selected": self.not_selected,
            "problems": self.problems,
            "cases": [
                {**{key: verdict.case[key] for key in keys}, "status": verdict.status, "message": verdict.message}
                for verdict in self.verdicts
            ],
        }


def check_outputs(
    directory: Path, outputs: Path, *, operations: Collection[str] = (), dtypes: Collection[str] = ()
) -> VectorsReport:
    """Compare the tensors in ``outputs`` with those that the vectors in ``directory`` expect, each by its case's tolerance.

    Args:
        directory: of the vectors.
        outputs: a directory with nothing but safetensors files, whatever their names; their tensors are named as expected
            ones are, ``ID:NAME``.
        operations: only these; none: all.
        dtypes: only cases of these; none: all.

    Raises:
        VectorsError: the vectors are damaged, ``outputs`` is no directory, or nothing is selected.
    """
    manifest = read_manifest(directory)
    expected = read_vectors(directory, manifest)
    cases = manifest["cases"]
    for name, wanted, key in (("operation", operations, "operation"), ("dtype", dtypes, "dtype")):
        known = sorted({case[key] for case in cases})
        if unknown := sorted(set(wanted) - set(known)):
            raise VectorsError(f"{name} {', '.join(map(repr, unknown))} has no case; known are {', '.join(known)}")
    selected = [
        case for case in cases if (not operations or case["operation"] in operations) and (not dtypes or case["dtype"] in dtypes)
    ]
    if not selected:
        raise VectorsError("no case is of these operations and these dtypes at once")
    found, problems = _read_outputs(outputs, {output["tensor"] for case in cases for output in case["outputs"]})
    verdicts = [_judge(case, found, expected) for case in selected]
    versions = {key: manifest[key] for key in ("vectors_version", "spec_version")}
    return VectorsReport(verdicts, problems, len(cases) - len(selected), versions)


def tolerance_named(name: str) -> Tolerance:
    """Return the tolerance that a manifest names.

    >>> tolerance_named("ULP(4)")
    Tolerance(name='ULP(4)', ulps=4, epsilons=0)
    """
    if name == "EXACT":
        return EXACT
    match = re.fullmatch(r"(ULP|SUM)\((\d+)\)", name)
    assert match, name
    return {"ULP": ULP, "SUM": SUM}[match[1]](int(match[2]))


def _read_outputs(outputs: Path, known: set[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the outputs of known cases, and problems of files and other tensors."""
    try:
        paths = sorted(outputs.iterdir())
    except OSError as error:
        raise VectorsError(f"outputs {str(outputs)!r} cannot be read: {error.strerror}") from None
    found: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    problems: dict[str, str] = {}
    for path in paths:
        if path.suffix != ".safetensors" or not path.is_file():
            problems[path.name] = "foreign: only *.safetensors files belong among the outputs"
            continue
        try:
            tensors = read_safetensors(path)
        except DamagedFileError as error:
            problems[path.name] = str(error)
            continue
        except OSError as error:
            problems[path.name] = f"cannot be read: {error.strerror}"
            continue
        for name, tensor in tensors.items():
            if name not in known:
                problems[f"{path.name}: {name}"] = "extra: no case has such an output"
            elif name in found:
                problems[f"{path.name}: {name}"] = f"given twice: it is also in {source[name]}"
            else:
                found[name], source[name] = tensor, path.name
    return found, problems


def _judge(case: dict[str, Any], found: dict[str, Tensor], expected: dict[str, dict[str, Tensor]]) -> Verdict:
    tolerance = tolerance_named(case["tolerance"])
    tensors = expected[f"{case['suite']}.expected.safetensors"]
    missing, wrong = [], []
    for output in case["outputs"]:
        actual, right = found.get(output["tensor"]), tensors[output["tensor"]]
        if actual is None:
            missing.append(output["name"])
        elif actual.dtype is not right.dtype:
            wrong.append(f"{output['name']}: wrong dtype: {name_of(actual.dtype)} instead of {output['dtype']}")
        elif actual.shape != right.shape:
            wrong.append(f"{output['name']}: wrong shape: {list(actual.shape)} instead of {output['shape']}")
        else:
            magnitude = expected[f"{case['suite']}.inputs.safetensors"][output["magnitude"]] if "magnitude" in output else None
            try:
                assert_equal(actual, right, tolerance, magnitude=magnitude)
            except AssertionError as error:
                wrong.append(f"{output['name']}: {error}")
    if missing:
        wrong.insert(0, f"missing: no output {', '.join(missing)}")
    status = "missing" if len(missing) == len(case["outputs"]) else "failed" if wrong else "passed"
    return Verdict(case, status, "; ".join(wrong))
