"""Files of golden vectors, and comparison of outputs with them: a verdict for each case, and for
each unexpected file or tensor.

They have the same bytes on every machine: tensors, and a manifest, JSON that lists every file and
case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.base.not_provided import install_command
from bagua_ref.base.untrusted import load_json
from bagua_ref.conformance.cases.tensor_files import (
    DamagedFileError,
    name_of,
    read_safetensors,
    read_tensors,
    write_safetensors,
)
from bagua_ref.conformance.clauses import SPEC_VERSION, VECTORS_VERSION
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, ULP, Tolerance, assert_equal
from bagua_ref.conformance.vectors import codec_cases, comm_op_cases, kernel_cases, training_cases
from bagua_ref.conformance.vectors.case import Case

__all__ = [
    "VectorsError",
    "VectorsReport",
    "Verdict",
    "all_cases",
    "check_outputs",
    "export_vectors",
    "manifest_text",
    "read_manifest",
    "read_vectors",
    "schema_text",
    "tolerance_named",
]

MANIFEST, SCHEMA = "manifest.json", "manifest.schema.json"


class VectorsError(Exception):
    """The vectors cannot be used: the manifest is missing or invalid, or a file is missing or
    changed.
    """


def all_cases() -> Iterator[Case]:
    """Yield every golden vector."""
    return chain(
        kernel_cases.kernel_cases(),
        codec_cases.minmax_cases(),
        comm_op_cases.comm_op_cases(),
        comm_op_cases.peer_cases(),
        kernel_cases.sampler_cases(),
        training_cases.optimizer_cases(),
        comm_op_cases.graph_cases(),
        training_cases.local_update_cases(),
        codec_cases.codec_cases(),
        training_cases.compressed_cases(),
        comm_op_cases.collective_cases(),
        training_cases.algorithm_cases(),
    )


def export_vectors(directory: Path) -> int:
    """Write all cases to ``directory``; return how many there are.

    For each suite ``SUITE.inputs.safetensors`` and ``SUITE.expected.safetensors``; the manifest,
    and its schema.

    Args:
        directory: is made; must be empty if it is there.

    Raises:
        VectorsError: it is not empty, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise VectorsError(
                f"{str(directory)!r} is not empty; give a new directory, or empty this one first"
            )
        _validator()  # without it the manifest could not be checked in the end
        count = _write(directory)
    except OSError as error:
        raise VectorsError(f"{str(directory)!r} cannot be written: {error}") from None
    read_manifest(directory)
    return count


def _write(directory: Path) -> int:
    suites: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for case in all_cases():
        assert case.id not in entries, case.id
        entry = entries[case.id] = _entry(case)
        inputs, expected = suites.setdefault(case.suite, ({}, {}))
        inputs.update({f"{case.id}:{name}": x for name, x in case.inputs.items()})
        expected.update({f"{case.id}:{name}": x for name, x in case.outputs.items()})
        inputs.update(
            {
                out["magnitude"]: case.magnitude(out["name"])
                for out in entry["outputs"]
                if "magnitude" in out
            }
        )
    files = {}
    for suite, tensors in suites.items():
        for kind, named in zip(("inputs", "expected"), tensors, strict=True):
            name = f"{suite}.{kind}.safetensors"
            files[name] = write_safetensors(directory / name, named)
    (directory / SCHEMA).write_text(schema_text(), "utf-8", newline="\n")
    (directory / MANIFEST).write_text(
        manifest_text(list(entries.values()), files), "utf-8", newline="\n"
    )
    return len(entries)


def schema_text() -> str:
    """Return the JSON schema of a manifest."""
    return resources.files("bagua_ref.conformance.vectors").joinpath(SCHEMA).read_text("utf-8")


def _entry(case: Case) -> dict[str, Any]:
    """Return the manifest's entry for a case."""
    outputs = _described(case, case.outputs)
    for output in outputs:
        if case.magnitude(output["name"]) is not None:
            output["magnitude"] = f"{output['tensor']}.magnitude"
    return {
        "id": case.id,
        "operation": case.operation,
        "clause": case.clause,
        "dtype": name_of(case.dtype),
        "seed": case.seed,
        "tolerance": case.tolerance,
        "flags": list(case.flags),
        "parameters": case.parameters,
        "suite": case.suite,
        "inputs": _described(case, case.inputs),
        "outputs": outputs,
    }


def _described(case: Case, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "tensor": f"{case.id}:{name}",
            "dtype": name_of(x.dtype),
            "shape": list(x.shape),
        }
        for name, x in tensors.items()
    ]


def manifest_text(entries: list[dict[str, Any]], files: dict[str, bytes]) -> str:
    """Return the manifest with a line for each file and case, so that changes are readable."""
    head = {
        "format": "bagua_ref golden vectors",
        "vectors_version": VECTORS_VERSION,
        "spec_version": SPEC_VERSION,
        "nan": "any NaN equals any other, but in payloads, where its bits are fixed (S4.4)",
    }
    listed = [
        {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    ]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += [
        '"files": [',
        ",\n".join(map(json.dumps, listed)),
        "],",
        '"cases": [',
        ",\n".join(map(json.dumps, entries)),
        "]",
    ]
    return "{\n" + "\n".join(lines) + "\n}\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of vectors in ``directory``.

    Raises:
        VectorsError: the manifest is missing or does not match the schema, or jsonschema is not
            installed.
    """
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = load_json(path.read_bytes())
    except OSError as error:
        raise VectorsError(
            f"{str(path)!r} cannot be read: {error.strerror}; is this a directory of vectors?"
        ) from None
    except ValueError as error:
        raise VectorsError(f"{str(path)!r}: {error}") from None
    version = (
        manifest.get("vectors_version", VECTORS_VERSION)
        if isinstance(manifest, dict)
        else VECTORS_VERSION
    )
    if version != VECTORS_VERSION:
        raise VectorsError(
            f"{str(path)!r} has vectors_version {version!r}; this bagua_ref checks"
            f" {VECTORS_VERSION!r}"
        )
    misfit = next(iter(_validator().iter_errors(manifest)), None)
    if misfit is not None:
        place = "/".join(map(str, misfit.absolute_path)) or "the top"
        raise VectorsError(
            f"{str(path)!r} does not match the schema at {place}: {misfit.message[:200]}"
        )
    return manifest


def _validator() -> Any:
    """Return a validator of manifests.

    Raises:
        VectorsError: jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ModuleNotFoundError:
        raise VectorsError(
            f"golden vectors need jsonschema; install with: {install_command('conformance')}"
        ) from None
    return Draft202012Validator(json.loads(schema_text()))


def read_vectors(directory: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of every file that the manifest lists, by file and name.

    Raises:
        VectorsError: a file is missing, differs from the exported one, or lacks a tensor of a case.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for entry in manifest["files"]:
        path = directory / entry["name"]
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise VectorsError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        if digest != entry["sha256"]:
            raise VectorsError(
                f"{str(path)!r} is not what was exported: its sha256 is {digest}, not"
                f" {entry['sha256']}"
            )
        found[entry["name"]] = read_tensors(path, VectorsError)
    for case in manifest["cases"]:
        for kind, listed in (("inputs", case["inputs"]), ("expected", case["outputs"])):
            name = f"{case['suite']}.{kind}.safetensors"
            for entry in listed:
                x = found.get(name, {}).get(entry["tensor"])
                if (
                    x is None
                    or name_of(x.dtype) != entry["dtype"]
                    or list(x.shape) != entry["shape"]
                ):
                    raise VectorsError(
                        f"{str(directory / name)!r} has no {entry['tensor']!r} as the manifest"
                        " describes it"
                    )
                if "magnitude" in entry:
                    magnitude = found.get(f"{case['suite']}.inputs.safetensors", {}).get(
                        entry["magnitude"]
                    )
                    if magnitude is None or magnitude.shape != x.shape:
                        raise VectorsError(
                            f"{str(directory)!r} has no {entry['magnitude']!r} of the shape of"
                            f" {entry['tensor']!r}"
                        )
    return found


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
        return (
            bool(self.verdicts)
            and not self.problems
            and all(verdict.status == "passed" for verdict in self.verdicts)
        )

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
                {
                    **{key: verdict.case[key] for key in keys},
                    "status": verdict.status,
                    "message": verdict.message,
                }
                for verdict in self.verdicts
            ],
        }


def check_outputs(
    directory: Path,
    outputs: Path,
    *,
    operations: Collection[str] = (),
    dtypes: Collection[str] = (),
) -> VectorsReport:
    """Compare the tensors in ``outputs`` with those that the vectors in ``directory`` expect, each
    by its case's tolerance.

    Args:
        directory: of the vectors.
        outputs: a directory with nothing but safetensors files, whatever their names; their tensors
            are named as expected ones are, ``ID:NAME``.
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
            raise VectorsError(
                f"{name} {', '.join(map(repr, unknown))} has no case; known are {', '.join(known)}"
            )
    selected = [
        case
        for case in cases
        if (not operations or case["operation"] in operations)
        and (not dtypes or case["dtype"] in dtypes)
    ]
    if not selected:
        raise VectorsError("no case is of these operations and these dtypes at once")
    found, problems = _read_outputs(
        outputs, {output["tensor"] for case in cases for output in case["outputs"]}
    )
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


def _judge(
    case: dict[str, Any], found: dict[str, Tensor], expected: dict[str, dict[str, Tensor]]
) -> Verdict:
    tolerance = tolerance_named(case["tolerance"])
    tensors = expected[f"{case['suite']}.expected.safetensors"]
    missing, wrong = [], []
    for output in case["outputs"]:
        actual, right = found.get(output["tensor"]), tensors[output["tensor"]]
        if actual is None:
            missing.append(output["name"])
        elif actual.dtype is not right.dtype:
            wrong.append(
                f"{output['name']}: wrong dtype: {name_of(actual.dtype)} instead of"
                f" {output['dtype']}"
            )
        elif actual.shape != right.shape:
            wrong.append(
                f"{output['name']}: wrong shape: {list(actual.shape)} instead of {output['shape']}"
            )
        else:
            magnitude = (
                expected[f"{case['suite']}.inputs.safetensors"][output["magnitude"]]
                if "magnitude" in output
                else None
            )
            try:
                assert_equal(actual, right, tolerance, magnitude=magnitude)
            except AssertionError as error:
                wrong.append(f"{output['name']}: {error}")
    if missing:
        wrong.insert(0, f"missing: no output {', '.join(missing)}")
    status = "missing" if len(missing) == len(case["outputs"]) else "failed" if wrong else "passed"
    return Verdict(case, status, "; ".join(wrong))
