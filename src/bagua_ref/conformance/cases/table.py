"""The case table, ``table.json``: lists of dtypes and modes that checks, properties and golden vectors
draw from, and rows, whose cases are the golden vectors and the fixed inputs of checks.

A row has an ``operation``, its ``clause``, and the ``dtypes`` and ``kinds`` of numbers that it is
written for. ``parameters`` are lists of which every combination is a case; those in capitals are
sizes, which only shapes and tolerances refer to. A string in place of a list is the name of one at
the top of the file. Inputs are drawn from the text of a case's id, as `_tensor` says. Outputs of a
compression are also the inputs of a decompression, whose clause is ``then``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.cases.answers import stretches
from bagua_ref.conformance.cases.case import KINDS, Case, canonical
from bagua_ref.conformance.cases.numbers import Numbers, tensor_of
from bagua_ref.conformance.expected.compression_numpy import fresh
from bagua_ref.conformance.expected.samplers_plain import Draws

_TABLE = json.loads(resources.files(__package__).joinpath("table.json").read_text("utf-8"))

COMPRESSIBLE: tuple[str, ...] = tuple(_TABLE["compressible"])
FLOATS: tuple[str, ...] = tuple(_TABLE["floats"])
INTEGERS: tuple[str, ...] = tuple(_TABLE["integers"])
REDUCED: tuple[str, ...] = tuple(_TABLE["reduced integers"])
"""The integer dtypes that collectives reduce."""
GRAPHS: tuple[str, ...] = tuple(_TABLE["graphs"])


def all_cases(operations: str = "", of: str = "") -> Iterator[Case]:
    """Yield every case whose operation begins with this text, of this dtype."""

    def listed(found: Any) -> Any:
        return _TABLE[found] if isinstance(found, str) else found

    for row in _TABLE["rows"]:
        if not row["operation"].startswith(operations):
            continue
        choices = product(*map(listed, row.get("parameters", ())))
        merged = [{key: x for part in chosen for key, x in part.items()} for chosen in choices]
        kinds, dtypes = listed(row.get("kinds", [""])), listed(row["dtypes"])
        for dtype, kind, (place, given) in product(dtypes, kinds, enumerate(merged)):
            if of not in ("", dtype):
                continue
            words = [row.get("name"), kind, *(x for x in given.values() if isinstance(x, str))]
            words += [str(place)] if len(merged) > 1 else []
            name = "-".join(filter(None, words)).replace(" ", "") or "plain"
            yield from _cases(row, dtype, kind, name, given)


@cache
def rows_of(suite: str, dtype: str) -> tuple[Case, ...]:
    """Return a suite's fixed cases for a dtype, which every run of a check includes."""
    return tuple(all_cases(f"{suite}/", dtype))


def _cases(
    row: dict[str, Any], dtype: str, kind: str, name: str, given: dict[str, Any]
) -> Iterator[Case]:
    operation, numbers = row["operation"], Numbers(row["operation"], dtype, name)
    parameters = {key: value for key, value in given.items() if not key.isupper()}
    inputs = {
        key: canonical(_tensor(spec, dtype, kind, given, numbers))
        for key, spec in row["inputs"].items()
    }
    if operation.startswith("samplers/"):
        draws = Draws(given["seed"] + given["epoch"])
        stretches(operation.partition("/")[2], inputs["costs"], draws, **parameters)
        for key in ("noise", "permutations"):
            inputs[key] = torch.tensor(getattr(draws, key), dtype=torch.int64)
    case = Case(
        operation,
        row["clause"],
        dtype,
        name,
        inputs,
        parameters,
        row.get("flag", KINDS.get(kind, "valid")),
        row.get("tolerance", "EXACT").format(**given),
        row.get("magnitude", {}),
    )
    yield case
    if "then" in row:
        yield replace(
            case,
            operation="codecs/decompress",
            clause=row["then"],
            inputs=case.outputs,
            parameters={**parameters, "num_elements": inputs["x"].numel()},
        )


def _tensor(spec: Any, dtype: str, kind: str, given: dict[str, Any], numbers: Numbers) -> Tensor:
    """Return an input as a tensor.

    Args:
        spec: a list of a kind of numbers and of sizes, or an object with: ``kind``, ``shape`` and
            ``dtype``; ``below``, a limit of integers, ``from`` which number on, and ``shape``;
            ``values``, and a ``scale``; ``integers``; ``bytes``, how many; ``hex``; ``levels``, the
            ends between which a payload of MinMaxUInt8 has every level; or ``fresh``, the shape of
            random columns (S10.2).
        dtype: of the case.
        kind: of the case; the kind named ``"kind"``.
        given: parameters and sizes.
        numbers: what to draw from.
    """
    if isinstance(spec, list):
        spec = {"kind": spec[0], "shape": spec[1:]}
    shape = [given.get(size, size) for size in spec.get("shape", ())]
    found: torch.dtype = getattr(torch, dtype)
    if "kind" in spec:
        if spec.get("dtype") == "computed" and dtype != "float64":
            dtype = "float32"
        return numbers.of(kind if spec["kind"] == "kind" else spec["kind"], shape, dtype)
    if "below" in spec:
        first: int = spec.get("from", 0)
        drawn = numbers.integers(shape, spec["below"] - first) + first
        return drawn.to(found)
    if "values" in spec:
        scale = given.get(spec.get("scale"), spec.get("scale", 1))
        scale = getattr(torch.finfo(found), scale) if isinstance(scale, str) else scale
        return tensor_of(spec["values"], dtype, scale)
    if "integers" in spec:
        return torch.tensor(spec["integers"], dtype=torch.int64)
    if "bytes" in spec:
        return numbers.integers([spec["bytes"]], 256).to(torch.uint8)
    if "fresh" in spec:
        m, r = spec["fresh"]
        return torch.from_numpy(fresh(m, r, given["seed"], given["k"], given["i"]))
    data = bytes.fromhex(spec.get("hex", ""))
    if "levels" in spec:
        ends = tensor_of(spec["levels"], dtype).view(torch.uint8).tolist()
        data = bytes(ends).ljust(32, b"\0") + bytes(range(256))
    return torch.tensor(list(data), dtype=torch.uint8)
