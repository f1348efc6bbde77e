"""The manifest of golden vectors: JSON with a schema that lists every file and case."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.base.not_provided import install_command
from bagua_ref.base.untrusted import load_json, read_file
from bagua_ref.conformance.clauses import VECTORS_VERSION, VECTORS_VERSIONS
from bagua_ref.conformance.vectors.case import Case, name_of
from bagua_ref.conformance.vectors.safetensors_file import DamagedFileError, read_safetensors

__all__ = [
    "MANIFEST", "SCHEMA", "VectorsError",
    "entry_of", "manifest_text", "read_manifest", "read_vectors", "schema_text", "schema_validator",
]  # fmt: skip

MANIFEST, SCHEMA = "manifest.json", "manifest.schema.json"


class VectorsError(Exception):
    """The vectors cannot be used: the manifest is missing or invalid, or a file is missing or changed."""


_CLAUSES = {"1": r"^S[1-8](\\.[0-9]+)?$", "2": r"^S([1-9]|1[0-3])(\\.[0-9]+)?$"}


def schema_text(version: str = VECTORS_VERSION) -> str:
    """Return the JSON schema of a manifest."""
    template = resources.files("bagua_ref.conformance.vectors").joinpath(SCHEMA).read_text("utf-8")
    return template.replace("@VERSION@", version).replace("@CLAUSES@", _CLAUSES[version])


def entry_of(case: Case) -> dict[str, Any]:
    """Return the manifest's entry for a case."""
    outputs = _described(case, case.outputs)
    for output in outputs:
        if output["name"] in case.magnitudes:
            output["magnitude"] = f"{output['tensor']}.magnitude"
    return {
        "id": case.id,
        "operation": case.operation,
        "clause": case.clause,
        "dtype": case.dtype,
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
        {"name": name, "tensor": f"{case.id}:{name}", "dtype": name_of(x.dtype), "shape": list(x.shape)}
        for name, x in tensors.items()
    ]


def manifest_text(entries: list[dict[str, Any]], files: dict[str, bytes], version: str = VECTORS_VERSION) -> str:
    """Return the manifest with a line for each file and case, so that changes are readable."""
    head = {
        "format": "bagua_ref golden vectors",
        "vectors_version": version,
        "spec_version": VECTORS_VERSIONS[version],
        "nan": "any NaN equals any other, but in payloads, where its bits are fixed (S4.4)",
    }
    listed = [{"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += ['"files": [', ",\n".join(map(json.dumps, listed)), "],", '"cases": [', ",\n".join(map(json.dumps, entries)), "]"]
    return "{\n" + "\n".join(lines) + "\n}\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of vectors in ``directory``.

    Raises:
        VectorsError: the manifest is missing or does not match the schema, or jsonschema is not installed.
    """
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = load_json(read_file(path))
    except OSError as error:
        raise VectorsError(f"{str(path)!r} cannot be read: {error.strerror}; is this a directory of vectors?") from None
    except ValueError as error:
        raise VectorsError(f"{str(path)!r}: {error}") from None
    version = manifest.get("vectors_version", VECTORS_VERSION) if isinstance(manifest, dict) else VECTORS_VERSION
    if version not in tuple(VECTORS_VERSIONS):
        raise VectorsError(
            f"{str(path)!r} has vectors_version {version!r}; this bagua_ref checks {', '.join(map(repr, VECTORS_VERSIONS))}"
        )
    misfit = next(iter(schema_validator(version).iter_errors(manifest)), None)
    if misfit is not None:
        place = "/".join(map(str, misfit.absolute_path)) or "the top"
        raise VectorsError(f"{str(path)!r} does not match the schema at {place}: {misfit.message[:200]}")
    return manifest


def schema_validator(version: str = VECTORS_VERSION) -> Any:
    """Return a validator of manifests.

    Raises:
        VectorsError: jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ModuleNotFoundError:
        raise VectorsError(f"golden vectors need jsonschema; install with: {install_command('conformance')}") from None
    return Draft202012Validator(json.loads(schema_text(version)))


def read_vectors(directory: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of every file that the manifest lists, by file and name.

    Raises:
        VectorsError: a file is missing, differs from the exported one, or lacks a tensor of a case.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for entry in manifest["files"]:
        path = directory / entry["name"]
        if entry["name"] in found:
            raise VectorsError(f"{str(directory / MANIFEST)!r} lists {entry['name']!r} twice")
        try:
            digest = hashlib.sha256(read_file(path)).hexdigest()
            if digest != entry["sha256"]:
                raise VectorsError(f"{str(path)!r} is not what was exported: its sha256 is {digest}, not {entry['sha256']}")
            found[entry["name"]] = read_safetensors(path)
        except OSError as error:
            raise VectorsError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        except (DamagedFileError, ModuleNotFoundError) as error:
            raise VectorsError(f"{str(path)!r}: {error}") from None
    ids = [case["id"] for case in manifest["cases"]]
    if len(set(ids)) != len(ids):
        raise VectorsError(f"{str(directory / MANIFEST)!r} has a case twice: {Counter(ids).most_common(1)[0][0]!r}")
    for case in manifest["cases"]:
        for kind, listed in (("inputs", case["inputs"]), ("expected", case["outputs"])):
            name = f"{case['suite']}.{kind}.safetensors"
            for entry in listed:
                x = found.get(name, {}).get(entry["tensor"])
                if x is None or name_of(x.dtype) != entry["dtype"] or list(x.shape) != entry["shape"]:
                    raise VectorsError(f"{str(directory / name)!r} has no {entry['tensor']!r} as the manifest describes it")
                if "magnitude" in entry:
                    magnitude = found.get(f"{case['suite']}.inputs.safetensors", {}).get(entry["magnitude"])
                    if magnitude is None or magnitude.shape != x.shape:
                        raise VectorsError(f"{str(directory)!r} has no {entry['magnitude']!r} of the shape of {entry['tensor']!r}")
    return found
