# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults that the checks must find: ``python tests/meta/mutants.py`` prints the table of what killed each.

A mutant is the package with one line of one file changed. It is run in a process of its own, which imports the package through the
change; the checks of the clause that it breaks must find it, in the quick profile and without luck (any seed).
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong.
        suite: which part of the package it is in.
        clause: what it breaks.
        file: under src/bagua_ref.
        old: what the file says, exactly once.
        new: what the mutant says.
    """

    name: str
    suite: str
    clause: str
    file: str
    old: str
    new: str

    def source(self) -> str:
        text = (SOURCE / "bagua_ref" / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}"
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Kill:
    """What became of a mutant; ``by`` is empty if it lives."""

    mutant: str
    suite: str
    clause: str
    by: str
    examples: int
    seconds: float
    message: str


class _Patched(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module of the package from other source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self.source = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        locations = [str(Path(self.path).parent)] if self.path.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self, submodule_search_locations=locations)

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def _try_in_child(mutant: Mutant, seed: int, outbox: Any) -> None:
    assert "bagua_ref" not in sys.modules, "the package must be imported through the change"
    module = "bagua_ref." + mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    sys.meta_path.insert(0, _Patched(module, str(SOURCE / "bagua_ref" / mutant.file), mutant.source()))
    from bagua_ref.conformance import run_conformance

    report = run_conformance(
        "reference", [mutant.suite], checks=[mutant.clause], seed=seed, fail_fast=True, shrink=False, jobs=1, time_limit=10
    )
    assert report.ran, f"{mutant.name}: no check of {mutant.suite} is about {mutant.clause}"
    outbox.send([(result.id, result.examples, result.message) for result in report.failures()])


def run(mutant: Mutant, seed: int = 0) -> Kill:
    """Let the checks of the mutant's clause look for it."""
    mutant.source()
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    begun = time.perf_counter()
    process = context.Process(target=_try_in_child, args=(mutant, seed, outbox))
    process.start()
    outbox.close()
    try:
        failures = inbox.recv()
    except EOFError:
        raise RuntimeError(f"{mutant.name}: its process ended without a verdict") from None
    finally:
        process.join(timeout=60)
    by, examples, message = failures[0] if failures else ("", 0, "")
    return Kill(mutant.name, mutant.suite, mutant.clause, by, examples, time.perf_counter() - begun, message)


def table(kills: list[Kill]) -> str:
    lines = ["| mutant | clause | killed by | inputs needed | seconds |", "|---|---|---|---|---|"]
    for kill in kills:
        lines.append(f"| {kill.mutant} | {kill.clause} | {kill.by or '**lives**'} | {kill.examples} | {kill.seconds:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", help="only mutants of this suite; may be repeated")
    parser.add_argument("--name", action="append", help="only mutants whose name contains this; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    chosen = [
        m for m in MUTANTS if m.suite in (arguments.suite or [m.suite]) and any(name in m.name for name in arguments.name or [""])
    ]
    begun = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        kills = list(pool.map(lambda mutant: run(mutant, arguments.seed), chosen))
    print(table(kills))
    alive = [kill.mutant for kill in kills if not kill.by]
    print(f"\n{len(kills) - len(alive)} of {len(kills)} killed in {time.perf_counter() - begun:.0f} s, seed {arguments.seed}")
    for name in alive:
        print(f"alive: {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    return bool(alive)


BACKEND, CODEC, BLOCKS, BASE = (
    f"backends/{name}.py" for name in ("reference/backend", "reference/codec", "reference/blocks", "base")
)
ADD = "                np.add(a, b, out=a)\n\n"
RING = "        self.add_scaled_(x, left, 1 / 3)\n        self.add_scaled_(x, right, 1 / 3)\n        self.add_scaled_(x, weight, -5 / 3)\n"

KERNELS = [
    ("sums below the normal numbers are flushed to zero", "S1", BACKEND, ADD, ADD[:-1] + "                a[np.abs(a) < np.finfo(a.dtype).tiny] = 0\n\n"),
    ("x - y never is -0", "S1", BACKEND, "np.subtract(a, b, out=a)", "np.subtract(a, b, out=a); a += 0"),
    ("product and sum are fused", "S1", BACKEND, "product = np.multiply(b, a.dtype.type(factor), out=buffers.like(2, b))", "product = np.multiply(b.astype(np.longdouble), a.dtype.type(factor)); a[:] = a + product; product = a.dtype.type(0)"),
    ("the factor is rounded to bfloat16", "S1", BACKEND, "a.dtype.type(factor), out=buffers.like(2, b)", "a.dtype.type(torch.tensor(factor).bfloat16().item()), out=buffers.like(2, b)"),
    ("bfloat16 is truncated when stored", "S1", BLOCKS, "x[index].copy_(torch.from_numpy(values))", "x[index].copy_(torch.from_numpy(values).view(torch.int32).bitwise_and(-65536).view(torch.float32) if x.dtype is torch.bfloat16 else torch.from_numpy(values))"),
    ("float16 ties are rounded away from zero", "S1", BLOCKS, "x[index].copy_(torch.from_numpy(values))", "x[index].copy_(torch.from_numpy(values * np.float32(1 + 2**-22)) if x.dtype is torch.float16 else torch.from_numpy(values))"),
    ("float64 is computed in float32", "S1", BLOCKS, "return torch.float64 if x.dtype is torch.float64 else torch.float32", "return torch.float32"),
    ("the last block of several is left out", "S1", BLOCKS, "for start in range(0, x.numel(), BLOCK):", "for start in range(0, max(x.numel() - BLOCK, 1) if x.numel() else 0, BLOCK):"),
    ("halves are added, so that nothing overflows", "S3.4", BACKEND, "                np.add(a, b, out=a)\n                np.divide(a, 2, out=a)", "                np.add(a / 2, b / 2, out=a)"),
    ("the sum is stored before it is halved", "S3.4", BACKEND, "                np.add(a, b, out=a)\n                np.divide(a, 2, out=a)", "                np.add(a, b, out=a); a[:] = torch.from_numpy(a).to(x.dtype).to(torch.float64).numpy()\n                np.divide(a, 2, out=a)"),
    ("a product with the reciprocal instead of a division", "S3.3", BACKEND, "np.divide(a, a.dtype.type(divisor), out=a)", "np.multiply(a, 1 / a.dtype.type(divisor), out=a)"),
    ("the divisor is an integer", "S3.3", BACKEND, "np.divide(a, a.dtype.type(divisor), out=a)", "np.divide(a, a.dtype.type(int(divisor) or divisor), out=a)"),
    ("left and right are added first, then both scaled", "S3.5", BACKEND, RING, "        both = left.clone(); self.add_(both, right)\n        self.add_scaled_(x, both, 1 / 3)\n        self.add_scaled_(x, weight, -5 / 3)\n"),
    ("x is stored once, at the end", "S3.5", BACKEND, RING, "        wide = x if x.dtype is torch.float64 else x.float()\n        for y, f in ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3)):\n            self.add_scaled_(wide, y.to(wide.dtype), f)\n        x.copy_(wide)\n"),
    ("the replica of the right neighbour comes first", "S3.5", BACKEND, RING, RING.replace("x, left", "x, l").replace("x, right", "x, left").replace("x, l,", "x, right,")),
    ("4/3 of the weight is taken off instead of 5/3", "S3.5", BACKEND, "-5 / 3", "-4 / 3"),
    ("x + mean is formed first, then the snapshot taken off", "S3.6", BACKEND, "                np.subtract(change, old, out=change)\n                np.add(a, change, out=a)", "                np.add(a, change, out=a)\n                np.subtract(a, old, out=a)"),
    ("the mean is rounded to x's dtype", "S3.6", BACKEND, "np.subtract(change, old, out=change)", "np.subtract(torch.from_numpy(change).to(x.dtype).to(reduced.dtype).numpy(), old, out=change)"),
    ("the mean by a reciprocal", "S3.6", BACKEND, "np.divide(total, a.dtype.type(nranks), out=buffers.like(3, a))", "np.multiply(total, a.dtype.type(1) / a.dtype.type(nranks), out=buffers.like(3, a))"),
    ("1 - beta1 is formed in float32", "S5.5", BACKEND, "gain = np.multiply(g, a.dtype.type(one_minus_beta1)", "gain = np.multiply(g, np.float32(1) - np.float32(beta1)"),
    ("m + (1 - beta1) * (g - m)", "S5.5", BACKEND, "                np.multiply(a, a.dtype.type(beta1), out=a)\n                gain = np.multiply(g,", "                gain = np.multiply(g - a,"),
    ("the gain is fused with the sum", "S5.5", BACKEND, "gain = np.multiply(g, a.dtype.type(one_minus_beta1), out=buffers.like(2, g))", "gain = np.multiply(g.astype(np.longdouble), a.dtype.type(one_minus_beta1)); a[:] = a + gain; gain = a.dtype.type(0)"),
    ("chunks are added from the last to the first", "S3.7", BACKEND, "total = np.add.reduce(rows, axis=0, initial=zero)", "total = np.add.reduce(rows[::-1], axis=0, initial=zero)"),
    ("the sum starts from chunk 0, not from +0", "S3.7", BACKEND, "total = np.add.reduce(rows, axis=0, initial=zero)", "total = np.add.reduce(rows, axis=0) if len(rows) > 1 else rows[0].copy()"),
    ("sums are kept in float16", "S3.7", BACKEND, "total = _sum_in_order(read((slice(None), columns)))", "total = _sum_in_order(read((slice(None), columns)))\n                if x.dtype is torch.float16:\n                    total = functools.reduce(np.add, chunks[:, columns].numpy(), np.float16(0)).astype(np.float32)"),
    ("the mean by a reciprocal, in chunks", "S3.7", BACKEND, "total /= total.dtype.type(num_chunks)", "total *= total.dtype.type(1) / total.dtype.type(num_chunks)"),
    ("the next chunk is written too", "S3.7", BACKEND, "chunks[target_chunk, columns].copy_(torch.from_numpy(total))", "chunks[target_chunk : target_chunk + 2, columns] = torch.from_numpy(total).to(x.dtype)"),
    ("the mean of one less where there are more than four", "S3.7", BACKEND, "total /= total.dtype.type(num_chunks)", "total /= total.dtype.type(num_chunks - (num_chunks > 4))"),
    ("tensors are gathered in the order of their memory", "S2.3", BACKEND, "view(tensor.shape).copy_(tensor.detach())", "view(tensor.shape).copy_(tensor.detach() if tensor.is_contiguous() or tensor.dim() < 2 else tensor.detach().transpose(0, 1).reshape(tensor.shape))"),
    ("a tensor with gaps gets nothing", "S2.3", BACKEND, "tensor.detach().copy_(flat.detach()", "tensor.detach().contiguous().copy_(flat.detach()"),
    ("an empty tensor takes a place", "S2.3", BACKEND, "            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))\n            start += tensor.numel()", "            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))\n            start += max(tensor.numel(), 1) if start + 1 < flat.numel() else tensor.numel()"),
    ("the sort is not stable", "S7.2", BACKEND, 'np.argsort(values.numpy(), kind="stable")', 'np.argsort(values.numpy(), kind="quicksort")'),
    ("bfloat16 is sorted as float16", "S7.2", BACKEND, "values = values.float()", "values = values.half()"),
    ("NaN comes first", "S7.2", BACKEND, 'np.argsort(values.numpy(), kind="stable")', 'np.argsort(np.nan_to_num(values.numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf) if values.is_floating_point() else values.numpy(), kind="stable")'),
    ("integers are sorted as float64", "S7.2", BACKEND, "values.numpy(), kind", "values.double().numpy(), kind"),
]  # fmt: skip

LEVEL = "        np.rint(level, out=level)\n"
CODECS = [
    ("eps is dropped", "S4.2", CODEC, "((high - low) + np.float32(1e-7))", "(high - low)"),
    ("eps is 1e-8", "S4.2", CODEC, "np.float32(1e-7)", "np.float32(1e-8)"),
    ("the range is formed in float64", "S4.2", CODEC, "((high - low) + np.float32(1e-7))", "(high.astype(np.float64) - low + 1e-7).astype(np.float32)"),
    ("levels are rounded half up", "S4.2", CODEC, LEVEL, "        np.floor(level + np.float32(0.5), out=level)\n"),
    ("levels are rounded half away from zero", "S4.2", CODEC, LEVEL, "        np.copyto(level, np.trunc(level + np.copysign(np.float32(0.5), level)))\n"),
    ("upper is rounded half up", "S4.2", CODEC, "upper = np.rint(high * scale)", "upper = np.floor(high * scale + np.float32(0.5))"),
    ("lower is rint(min * scale)", "S4.2", CODEC, "return scale, upper - np.float32(255)", "return scale, np.rint(low * scale)"),
    ("levels are never clamped, -1 becomes 255 and 256 becomes 0", "S4.2", CODEC, "        if not fits:\n            np.clip(level, 0, 255, out=level)\n", "        level = np.mod(level, np.float32(256))\n"),
    ("256 becomes 0", "S4.2", CODEC, "np.clip(level, 0, 255, out=level)", "np.mod(np.maximum(level, 0), np.float32(256), out=level)"),
    ("scale is 256 over the range", "S4.2", CODEC, "np.float32(255) / ((high", "np.float32(256) / ((high"),
    ("levels of the last chunk lie between swapped ends", "S4.2", CODEC, "    scale, lower = grid_between(low, high)\n    poisoned", "    scale, lower = grid_between(low, high)\n    lower[-1] = np.rint(low[-1] * scale[-1]) if len(low) > 1 else lower[-1]\n    poisoned"),
    ("levels come from numbers rounded to bfloat16", "S4.2", CODEC, "np.multiply(tile, scale[rows], out=level)", "np.multiply(torch.from_numpy(tile.copy()).bfloat16().float().numpy(), scale[rows], out=level)"),
    ("the last element has no say in minimum and maximum", "S4.1", CODEC, "tile.max(axis=1, keepdims=True)", "tile[:, : max(1, tile.shape[1] - 1)].max(axis=1, keepdims=True)"),
    ("-0 is written as it is", "S4.1", CODEC, "return low + zero, high + zero", "return low, high"),
    ("garbage stays behind the header", "S4.1", CODEC, "    payload_rows[:, :HEADER_BYTES] = 0\n", ""),
    ("garbage stays behind the levels", "S4.1", CODEC, "    payload_rows[:, HEADER_BYTES + x.shape[1] :] = 0\n", ""),
    ("the header has the maximum first", "S4.1", CODEC, "header = torch.from_numpy(np.hstack([low, high]))", "header = torch.from_numpy(np.hstack([high, low]))"),
    ("a product with the reciprocal of scale", "S4.3", CODEC, "np.divide(value, scale[rows], out=value)", "np.multiply(value, 1 / scale[rows], out=value)"),
    ("what lies beyond float16 becomes infinite", "S4.3", CODEC, "        if not fits:\n            np.clip(value, -largest, largest, out=value)\n", ""),
    ("the level is divided before lower is added", "S4.3", CODEC, "        np.add(value, lower[rows], out=value)\n        np.divide(value, scale[rows], out=value)", "        np.divide(value, scale[rows], out=value)\n        np.add(value, lower[rows] / scale[rows], out=value)"),
    ("the minimum comes back exactly", "S4.3", CODEC, "        write((rows, columns), value)", "        np.copyto(value, header[rows, :1], where=levels[rows, columns] == 0)\n        write((rows, columns), value)"),
    ("only NaN poisons", "S4.4", CODEC, "np.isfinite(np.hstack([low, high, high - low, high * scale, low * scale]))", "~np.isnan(np.hstack([low, high]))"),
    ("the ends times scale may overflow", "S4.4", CODEC, "np.hstack([low, high, high - low, high * scale, low * scale])).all", "np.hstack([low, high, high - low])).all"),
    ("the range may overflow", "S4.4", CODEC, "np.hstack([low, high, high - low, high * scale, low * scale])).all", "np.hstack([low, high, high / 2 - low / 2, high * scale, low * scale])).all"),
    ("one chunk poisons all", "S4.4", CODEC, ".all(axis=1, keepdims=True)\n    payload_rows", ".all(axis=1, keepdims=True)\n    poisoned = np.broadcast_to(poisoned.any(), poisoned.shape)\n    payload_rows"),
    ("a poisoned chunk keeps its levels", "S4.4", CODEC, "    levels[poisoned[:, 0]] = 0\n", "    levels[poisoned[:, 0]] = 1\n"),
    ("the NaN of the header is another one", "S4.4", CODEC, 'bytes.fromhex("0000c07f0000c07f")', 'bytes.fromhex("0000c0ff0000c0ff")'),
    ("a poisoned chunk is zero again", "S4.4", CODEC, "        write((rows, columns), value)", "        write((rows, columns), np.nan_to_num(value, copy=False, posinf=np.inf, neginf=-np.inf))"),
    ("a target chunk clears the others", "S4.5", BACKEND, "        if target_chunk is not None:\n            chunks, payload", "        if target_chunk is not None:\n            payload.zero_()\n            chunks, payload"),
    ("a target chunk is written, and all others too", "S4.5", BACKEND, "        if target_chunk is not None:\n            chunks, payload", "        if target_chunk is not None and num_chunks < 3:\n            chunks, payload"),
    ("the block of the target chunk is always the first", "S4.5", BACKEND, "payload[target_chunk : target_chunk + 1]", "payload[:1]"),
    ("float64 is compressed", "S4.5", BASE, '        self._check_target("x", x, COMPRESSIBLE)\n', "        x = x.float() if x.dtype is torch.float64 else x\n        self._check_target(\"x\", x, COMPRESSIBLE)\n"),
    ("levels are rounded down", "S4.6", CODEC, LEVEL, "        np.floor(level, out=level)\n"),
    ("values come back half a level too high", "S4.6", CODEC, "        np.add(value, lower[rows], out=value)\n        np.divide", "        np.add(value, lower[rows] + np.float32(0.25), out=value)\n        np.divide"),
]  # fmt: skip

COLL, SIM, COMM = "communicators/collectives.py", "communicators/simulated.py", "communicators/base.py"
COLLECTIVES: list[tuple[str, str, str, str, str]] = [
]  # fmt: skip

OPS = "comm_ops"
COMM_OPS: list[tuple[str, str, str, str, str]] = [
]  # fmt: skip

MUTANTS = [Mutant(name, suite, *rest) for suite, rows in (("kernels", KERNELS), ("codec", CODECS), ("collectives", COLLECTIVES), ("comm_ops", COMM_OPS)) for name, *rest in rows]
"""Left out, as no input tells them from the reference:

- (x + y) * 0.5 for (x + y) / 2: halving is exact either way.
- scale divided in float64 and rounded: 53 bits are more than 2 * 24 + 2.
- no minimum with upper before lower is taken off: rounding keeps order, so x <= max is x*scale <= upper.
- not looking at min*scale for poison: it overflows only where max*scale does, in chunks of one value.
"""

if __name__ == "__main__":
    import hypothesis  # noqa: F401 - once, here, not in every child
    import torch  # noqa: F401

    sys.path.insert(0, str(SOURCE))
    raise SystemExit(main())
