"""Export of the golden vectors, with the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from torch import Tensor

from bagua_ref.conformance.clauses import VECTORS_VERSION
from bagua_ref.conformance.expected.tolerances import assert_equal
from bagua_ref.conformance.formats.safetensors_file import write_safetensors
from bagua_ref.conformance.vectors.algorithm_cases import algorithm_cases
from bagua_ref.conformance.vectors.case import Case
from bagua_ref.conformance.vectors.check import tolerance_named
from bagua_ref.conformance.vectors.codec_cases import codec_cases
from bagua_ref.conformance.vectors.collective_cases import collective_cases
from bagua_ref.conformance.vectors.comm_op_cases import comm_op_cases
from bagua_ref.conformance.vectors.compressed_cases import compressed_cases
from bagua_ref.conformance.vectors.format_cases import format_cases
from bagua_ref.conformance.vectors.graph_cases import graph_cases
from bagua_ref.conformance.vectors.independent import solve
from bagua_ref.conformance.vectors.kernel_cases import kernel_cases
from bagua_ref.conformance.vectors.local_update_cases import local_update_cases
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
from bagua_ref.conformance.vectors.other_cases import cache_cases, optimizer_cases, peer_cases, sampler_cases

__all__ = ["all_cases", "export_vectors"]


def all_cases(version: str = VECTORS_VERSION) -> Iterator[Case]:
    """Yield every golden vector of a version, computed by the reference."""
    first = chain(kernel_cases(), codec_cases(), comm_op_cases(), peer_cases(), sampler_cases(), cache_cases(), optimizer_cases())
    later = chain(graph_cases(), local_update_cases(), format_cases(), compressed_cases(), collective_cases(), algorithm_cases())
    return (case for case in chain(first, later) if int(case.since) <= int(version))


def export_vectors(directory: Path, version: str = VECTORS_VERSION) -> int:
    """Write all cases to ``directory``; return how many there are.

    For each suite ``SUITE.inputs.safetensors`` and ``SUITE.expected.safetensors``; the manifest, and its schema.

    Args:
        directory: is made; must be empty if it is there.
        version: of the vectors; a later one has the cases of an earlier one and more.

    Raises:
        VectorsError: it is not empty, or cannot be written; or on this machine the reference and the second opinion differ.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise VectorsError(f"{str(directory)!r} is not empty; give a new directory, or empty this one first")
        schema_validator()  # without it the manifest could not be checked in the end
        count = _write(directory, version)
    except OSError as error:
        raise VectorsError(f"{str(directory)!r} cannot be written: {error}") from None
    read_manifest(directory)
    return count


def _write(directory: Path, version: str) -> int:
    suites: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    entries = {}
    for case in all_cases(version):
        assert case.id not in entries, case.id
        _cross_check(case)
        entries[case.id] = entry_of(case)
        inputs, expected = suites.setdefault(case.suite, ({}, {}))
        inputs.update({f"{case.id}:{name}": x for name, x in case.inputs.items()})
        expected.update({f"{case.id}:{name}": x for name, x in case.outputs.items()})
        inputs.update({f"{case.id}:{name}.magnitude": x for name, x in case.magnitudes.items()})
    files = {}
    for suite, tensors in suites.items():
        for kind, named in zip(("inputs", "expected"), tensors, strict=True):
            name = f"{suite}.{kind}.safetensors"
            files[name] = write_safetensors(directory / name, named)
    (directory / SCHEMA).write_text(schema_text(version), "utf-8", newline="\n")
    (directory / MANIFEST).write_text(manifest_text(list(entries.values()), files, version), "utf-8", newline="\n")
    return len(entries)


def _cross_check(case: Case) -> None:
    """Compare the reference's outputs with those of the independent implementation."""
    second = solve(case.suite, case.operation, case.dtype, case.parameters, case.inputs)
    assert second.keys() == case.outputs.keys(), case.id
    for name, x in case.outputs.items():
        try:
            assert_equal(x, second[name], tolerance_named(case.tolerance), magnitude=case.magnitudes.get(name))
        except AssertionError as error:
            raise VectorsError(f"{case.id}: the reference and the second opinion differ in {name}: {error}") from None
