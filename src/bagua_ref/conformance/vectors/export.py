"""Export of the golden vectors, with the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.conformance.expected.tolerances import assert_equal
from bagua_ref.conformance.formats.safetensors_file import write_safetensors
from bagua_ref.conformance.vectors import codec_cases, comm_op_cases, kernel_cases, training_cases
from bagua_ref.conformance.vectors.case import Case
from bagua_ref.conformance.vectors.check import tolerance_named
from bagua_ref.conformance.vectors.manifest import (
    MANIFEST,
    SCHEMA,
    VectorsError,
    entry_of,
    manifest_text,
    read_manifest,
    schema_text,
    schema_validator,
)
from bagua_ref.conformance.vectors.runs import run

__all__ = ["all_cases", "export_vectors"]


def all_cases() -> Iterator[Case]:
    """Yield every golden vector."""
    return chain(
        kernel_cases.kernel_cases(), codec_cases.minmax_cases(), comm_op_cases.comm_op_cases(), comm_op_cases.peer_cases(),
        kernel_cases.sampler_cases(), kernel_cases.cache_cases(), training_cases.optimizer_cases(), comm_op_cases.graph_cases(),
        training_cases.local_update_cases(), codec_cases.codec_cases(), training_cases.compressed_cases(),
        comm_op_cases.collective_cases(), training_cases.algorithm_cases(),
    )  # fmt: skip


def export_vectors(directory: Path) -> int:
    """Write all cases to ``directory``; return how many there are.

    For each suite ``SUITE.inputs.safetensors`` and ``SUITE.expected.safetensors``; the manifest, and its schema.

    Args:
        directory: is made; must be empty if it is there.

    Raises:
        VectorsError: it is not empty, or cannot be written; or on this machine the package gives other results.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise VectorsError(f"{str(directory)!r} is not empty; give a new directory, or empty this one first")
        schema_validator()  # without it the manifest could not be checked in the end
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
        _compare_with_package(case)
        entry = entries[case.id] = entry_of(case)
        inputs, expected = suites.setdefault(case.suite, ({}, {}))
        inputs.update({f"{case.id}:{name}": x for name, x in case.inputs.items()})
        expected.update({f"{case.id}:{name}": x for name, x in case.outputs.items()})
        inputs.update({out["magnitude"]: case.magnitude(out["name"]) for out in entry["outputs"] if "magnitude" in out})
    files = {}
    for suite, tensors in suites.items():
        for kind, named in zip(("inputs", "expected"), tensors, strict=True):
            name = f"{suite}.{kind}.safetensors"
            files[name] = write_safetensors(directory / name, named)
    (directory / SCHEMA).write_text(schema_text(), "utf-8", newline="\n")
    (directory / MANIFEST).write_text(manifest_text(list(entries.values()), files), "utf-8", newline="\n")
    return len(entries)


def _compare_with_package(case: Case) -> None:
    """Raise VectorsError unless the package gives the expected outputs."""
    try:
        for name, found in run(case).items():
            assert_equal(found, case.outputs[name], tolerance_named(case.tolerance), magnitude=case.magnitude(name))
    except AssertionError as error:
        raise VectorsError(f"{case.id}: the package does not give the expected outputs: {error}") from None
