"""Export of golden vectors to files, and comparison of outputs with them: a verdict for each case,
and a problem for each file or tensor that belongs to no case.

Exported files have the same bytes on every machine: tensors, and a manifest, JSON that lists every
file and case.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.conformance.cases.case import Case
from bagua_ref.conformance.cases.table import all_cases
from bagua_ref.conformance.cases.tensor_files import (
    DamagedFileError,
    read_safetensors,
    write_safetensors,
)
from bagua_ref.conformance.clauses import SPEC_VERSION, VECTORS_VERSION
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, ULP, Tolerance, assert_equal
from bagua_ref.conformance.targets.process_link import Program, ProgramError


class VectorsError(Exception):
    """Vectors cannot be written, or outputs cannot be compared with them."""


def export_vectors(directory: Path) -> int:
    """Write all cases to a folder; return their number.

    Each suite has ``SUITE.inputs.safetensors`` and ``SUITE.expected.safetensors``; all suites share
    the manifest and its JSON schema.

    Args:
        directory: folder to create; if it exists, it must be empty.

    Raises:
        VectorsError: it is not empty, or cannot be written.
    """
    tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    entries = []
    for case in all_cases():
        suite, _, operation = case.operation.partition("/")
        for kind, of_case in (("inputs", case.inputs), ("expected", case.outputs)):
            named = {f"{case.id}:{name}": x for name, x in of_case.items()}
            tensors[f"{suite}.{kind}.safetensors"].update(named)
        entry = {
            "id": case.id,
            "suite": suite,
            "operation": operation,
            "clause": case.clause,
            "dtype": case.dtype,
            "tolerance": case.tolerance,
            "flag": case.flag,
            "parameters": case.parameters,
            "inputs": list(case.inputs),
            "outputs": list(case.outputs),
        }
        entries.append(entry | ({"magnitudes": case.magnitudes} if case.magnitudes else {}))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise VectorsError(
                f"{str(directory)!r} is not empty; give a new directory, or empty this one first"
            )
        files = []
        for name, named in tensors.items():
            data = write_safetensors(directory / name, named)
            digest = hashlib.sha256(data).hexdigest()
            files.append({"name": name, "bytes": len(data), "sha256": digest})
        schema = resources.files(__package__).joinpath("manifest.schema.json").read_bytes()
        (directory / "manifest.schema.json").write_bytes(schema)
        (directory / "manifest.json").write_bytes(_manifest(files, entries).encode())
    except OSError as error:
        raise VectorsError(f"{str(directory)!r} cannot be written: {error}") from None
    return len(entries)


def _manifest(files: list[dict[str, Any]], entries: list[dict[str, Any]]) -> str:
    """Return the manifest as JSON with one line per file and case, for readable diffs."""
    head = {
        "format": "bagua_ref golden vectors",
        "vectors_version": VECTORS_VERSION,
        "spec_version": SPEC_VERSION,
    }
    lists = {"files": files, "cases": entries}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, listed in lists.items():
        lines.append(f'"{key}": [\n' + ",\n".join(map(json.dumps, listed)) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case.

    Attributes:
        case: the case.
        status: ``"passed"``, ``"failed"`` or ``"missing"``.
        message: description of the failure; empty if it passed.
    """

    case: Case
    status: str
    message: str = ""


@dataclass(frozen=True)
class VectorsReport:
    """The verdicts on all selected cases.

    Attributes:
        verdicts: one for each case.
        problems: unexpected or unreadable files and tensors, by file or file and tensor.
        not_selected: number of cases that were not selected.
    """

    verdicts: list[Verdict]
    problems: dict[str, str]
    not_selected: int

    @property
    def passed(self) -> bool:
        """Whether all cases have passed, and there are no problems."""
        return not self.problems and self.count("passed") == len(self.verdicts)

    def count(self, status: str) -> int:
        """Return the number of cases with this status."""
        return sum(verdict.status == status for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        keys = ("id", "operation", "clause", "dtype", "tolerance", "flag")
        return {
            "passed": self.passed,
            "vectors_version": VECTORS_VERSION,
            "spec_version": SPEC_VERSION,
            "counts": {status: self.count(status) for status in ("passed", "failed", "missing")},
            "not_selected": self.not_selected,
            "problems": self.problems,
            "cases": [
                {key: getattr(verdict.case, key) for key in keys}
                | {"status": verdict.status, "message": verdict.message}
                for verdict in self.verdicts
            ],
        }


def check_outputs(outputs: Path, *, only: Collection[Collection[str]] = ()) -> VectorsReport:
    """Compare a folder's tensors with those expected, each within its case's tolerance.

    Args:
        outputs: a folder with nothing but safetensors files, whatever their names; their tensors are
            named as expected ones are, ``ID:NAME``.
        only: groups of texts; a case is selected if its id contains one text of each group.

    Raises:
        VectorsError: ``outputs`` cannot be read, or nothing is selected.
    """
    selected, others = _select(only)
    found, problems = _read_outputs(outputs)
    verdicts = []
    for case in selected:
        named = {name: found.pop(f"{case.id}:{name}", ("", None))[1] for name in case.outputs}
        verdicts.append(_judge(case, named))
    for name, (file, _) in found.items():  # tensors without a case
        if name.partition(":")[0] not in others:
            problems[f"{file}: {name}"] = "extra: no case has such an output"
    return VectorsReport(verdicts, problems, len(others))


def check_program(
    command: str, *, only: Collection[Collection[str]] = (), seconds: float = 60.0
) -> VectorsReport:
    """Ask a program for the outputs of each case, and compare them in the same way. Outputs that it
    answers with an error count as missing.

    Args:
        command: the program and its arguments; a request's ``call`` is a case's suite and
            operation, with the case's parameters, ``dtype`` and inputs.
        only: see `check_outputs`.
        seconds: time limit of each answer.

    Raises:
        VectorsError: the program ended or answered something else, or nothing is selected.
    """
    selected, others = _select(only)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = Program(command, seconds, folder)
            for case in selected:
                try:
                    members = {"dtype": case.dtype, **case.parameters}
                    _, found = program.ask(case.operation, case.inputs, **members)
                    verdicts.append(_judge(case, found))
                except ProgramError as error:
                    if program.broken:
                        raise
                    verdicts.append(Verdict(case, "missing", str(error)))
            program.end()
        except ProgramError as error:
            raise VectorsError(str(error)) from None
    return VectorsReport(verdicts, {}, len(others))


def _select(only: Collection[Collection[str]]) -> tuple[list[Case], set[str]]:
    """Return the selected cases, and the ids of the others."""
    selected, others = [], set()
    cases = list(all_cases())
    for texts in only:
        for text in texts:
            if not any(text in case.id for case in cases):
                raise VectorsError(f"no case's id contains {text!r}; ids are such as {cases[0].id}")
    for case in cases:
        if all(any(text in case.id for text in texts) for texts in only):
            selected.append(case)
        else:
            others.add(case.id)
    if not selected:
        raise VectorsError(f"no case's id contains a text of each of {[*map(list, only)]}")
    return selected, others


def _read_outputs(outputs: Path) -> tuple[dict[str, tuple[str, Tensor]], dict[str, str]]:
    """Return tensors by name, each with its file, and a list of problems."""
    found: dict[str, tuple[str, Tensor]] = {}
    problems: dict[str, str] = {}
    try:
        for path in sorted(outputs.iterdir()):
            if path.suffix != ".safetensors" or not path.is_file():
                problems[path.name] = "foreign: only *.safetensors files belong among the outputs"
                continue
            try:
                tensors = read_safetensors(path)
            except DamagedFileError as error:
                problems[path.name] = str(error)
                continue
            for name, x in tensors.items():
                if name in found:
                    message = f"given twice: it is also in {found[name][0]}"
                    problems[f"{path.name}: {name}"] = message
                found.setdefault(name, (path.name, x))
    except (OSError, ModuleNotFoundError) as error:
        raise VectorsError(f"outputs {str(outputs)!r} cannot be read: {error}") from None
    return found, problems


def _judge(case: Case, found: Mapping[str, Tensor | None]) -> Verdict:
    """Compare a case's outputs with the actual ones, by name."""
    missing, wrong = [], []
    for name, expected in case.outputs.items():
        actual = found.get(name)
        if actual is None:
            missing.append(name)
            continue
        try:
            tolerance, magnitude = _tolerance(case.tolerance), case.magnitudes.get(name)
            assert_equal(actual, expected, tolerance, magnitude=magnitude)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    if missing:
        wrong.insert(0, f"missing: no output {', '.join(missing)}")
    status = "missing" if len(missing) == len(case.outputs) else "failed" if wrong else "passed"
    return Verdict(case, status, "; ".join(wrong))


def _tolerance(name: str) -> Tolerance:
    """Return the tolerance with this name.

    >>> _tolerance("ULP(4)")
    Tolerance(name='ULP(4)', ulps=4, epsilons=0)
    """
    match = re.fullmatch(r"(ULP|SUM)\((\d+)\)", name)
    return {"ULP": ULP, "SUM": SUM}[match[1]](int(match[2])) if match else EXACT
