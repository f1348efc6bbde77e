# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults that the checks must find: ``python tests/meta/mutants.py`` prints the table of what killed each.

A mutant is the package with one line of one file changed. It runs in a separate process that imports the changed package; the
checks of the clause that it breaks must find it with any seed, in the quick profile or, where it says so, in the large one.
"""

from __future__ import annotations

import argparse
import gc
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
FEW = (4, 12)
"""Inputs of each check that are tried first: most faults need few, and the checks before the one that finds them would try all."""
sys.path.insert(0, str(Path(__file__).parent))

from mutants_algorithms import ALGORITHMS  # noqa: E402
from mutants_cache import CACHES  # noqa: E402
from mutants_codecs import OF_CODEC  # noqa: E402
from mutants_fused_optimizer import FUSED_OPTIMIZERS  # noqa: E402
from mutants_graphs import OF_ALGORITHMS, OF_COMM_OPS  # noqa: E402
from mutants_large import LATE  # noqa: E402
from mutants_local_updates import LOCAL_UPDATES  # noqa: E402
from mutants_low_rank import LOW_RANK  # noqa: E402


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong.
        suite: the part of the package that contains it.
        clause: the clause that it breaks.
        file: under src/bagua_ref.
        old: the original text, which occurs once in the file.
        new: the mutated text.
        profile: of the checks that must find it.
    """

    name: str
    suite: str
    clause: str
    file: str
    old: str
    new: str
    profile: str = "quick"

    def source(self) -> str:
        text = (SOURCE / "bagua_ref" / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} contains {self.old!r} {text.count(self.old)} times"
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


@dataclass(frozen=True)
class Kill:
    """The fate of a mutant; ``by`` is empty if it survived."""

    mutant: str
    suite: str
    clause: str
    by: str
    examples: int
    seconds: float
    message: str


class _Patched(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module of the package from changed source."""

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
    from bagua_ref.conformance.run.search import PROFILES
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget

    for inputs in (*FEW, PROFILES[mutant.profile]):
        PROFILES[mutant.profile] = inputs
        report = run_conformance(
            ReferenceTarget(), [mutant.suite], checks=[mutant.clause], profile=mutant.profile, seed=seed,
            fail_fast=True, shrink=False, jobs=1, time_limit=10,
        )  # fmt: skip
        if report.failures():
            break
    assert report.ran, f"{mutant.name}: no check of {mutant.suite} is about {mutant.clause}"
    outbox.send([(result.id, result.examples, result.message) for result in report.failures()])


def run(mutant: Mutant, seed: int = 0) -> Kill:
    """Run the checks of the mutant's clause."""
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


BACKEND, CODEC, ROWS, BLOCKS, BASE, CONTRACT = (
    f"backends/{name}.py"
    for name in ("reference/backend", "reference/codecs/minmax_uint8", "reference/codecs/rows", "reference/blocks", "base", "codec")
)
ADD = "                np.add(a, b, out=a)\n\n"
RING = (
    "        terms = ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3))\n"
    "        if x.element_size() == 2:  # then each sum is rounded to 16 bits\n"
    "            for y, factor in terms:\n"
    "                self.add_scaled_(x, y, factor)\n"
    "            return\n"
    "        with scratch() as buffers:\n"
    "            for a, *others in blocks(buffers, x, *(y for y, _ in terms)):\n"
    "                for b, (_, factor) in zip(others, terms, strict=True):\n"
    "                    product = np.multiply(b, a.dtype.type(factor), out=buffers.like(4, b))\n"
    "                    np.add(a, product, out=a)\n"
)

KERNELS = [
    ("sums below the normal numbers are flushed to zero", "S1", BACKEND, ADD, ADD[:-1] + "                a[np.abs(a) < np.finfo(a.dtype).tiny] = 0\n\n"),
    ("x - y never is -0", "S1", BACKEND, "np.subtract(a, b, out=a)", "np.subtract(a, b, out=a); a += 0"),
    ("product and sum are fused", "S1", BACKEND, "product = np.multiply(b, a.dtype.type(factor), out=buffers.like(2, b))", "product = np.multiply(b.astype(np.longdouble), a.dtype.type(factor)); a[:] = a + product; product = a.dtype.type(0)"),
    ("the factor is rounded to bfloat16", "S1", BACKEND, "a.dtype.type(factor), out=buffers.like(2, b)", "a.dtype.type(torch.tensor(factor).bfloat16().item()), out=buffers.like(2, b)"),
    ("bfloat16 is truncated when stored", "S1", BLOCKS, "x[index].copy_(torch.from_numpy(values))", "x[index].copy_(torch.from_numpy(values).view(torch.int32).bitwise_and(-65536).view(torch.float32) if x.dtype is torch.bfloat16 else torch.from_numpy(values))"),
    ("float16 ties are rounded away from zero", "S1", BLOCKS, "x[index].copy_(torch.from_numpy(values))", "x[index].copy_(torch.from_numpy(values * np.float32(1 + 2**-22)) if x.dtype is torch.float16 else torch.from_numpy(values))"),
    ("float64 is computed in float32", "S1", BLOCKS, "return torch.float64 if x.dtype is torch.float64 else torch.float32", "return torch.float32"),
    ("the last block of several is left out", "S1", BLOCKS, "for start in range(0, x.numel(), BLOCK):", "for start in range(0, max(x.numel() - BLOCK, 1) if x.numel() else 0, BLOCK):", "large"),
    ("halves are added, so that nothing overflows", "S3.4", BACKEND, "                np.add(a, b, out=a)\n                np.divide(a, 2, out=a)", "                np.add(a / 2, b / 2, out=a)"),
    ("the sum is stored before it is halved", "S3.4", BACKEND, "                np.add(a, b, out=a)\n                np.divide(a, 2, out=a)", "                np.add(a, b, out=a); a[:] = torch.from_numpy(a).to(x.dtype).to(torch.float64).numpy()\n                np.divide(a, 2, out=a)"),
    ("a product with the reciprocal instead of a division", "S3.3", BACKEND, "np.divide(a, a.dtype.type(divisor), out=a)", "np.multiply(a, 1 / a.dtype.type(divisor), out=a)"),
    ("the divisor is an integer", "S3.3", BACKEND, "np.divide(a, a.dtype.type(divisor), out=a)", "np.divide(a, a.dtype.type(int(divisor) or divisor), out=a)"),
    ("left and right are added first, then both scaled", "S3.5", BACKEND, RING, "        both = left.clone(); self.add_(both, right)\n        self.add_scaled_(x, both, 1 / 3)\n        self.add_scaled_(x, weight, -5 / 3)\n"),
    ("x is stored once, at the end", "S3.5", BACKEND, RING, "        wide = x if x.dtype is torch.float64 else x.float()\n        for y, f in ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3)):\n            self.add_scaled_(wide, y.to(wide.dtype), f)\n        x.copy_(wide)\n"),
    ("the replica of the right neighbour comes first", "S3.5", BACKEND, RING, RING.replace("(left, 1 / 3), (right, 1 / 3)", "(right, 1 / 3), (left, 1 / 3)")),
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
    ("a mean of bfloat16 by a reciprocal, in chunks", "S3.7", BACKEND, "total /= total.dtype.type(num_chunks)", "total = total * (total.dtype.type(1) / total.dtype.type(num_chunks)) if x.dtype is torch.bfloat16 else total / total.dtype.type(num_chunks)"),
    ("the next chunk is written too", "S3.7", BACKEND, "chunks[target_chunk, columns].copy_(torch.from_numpy(total))", "chunks[target_chunk : target_chunk + 2, columns] = torch.from_numpy(total).to(x.dtype)"),
    ("the mean of one less where there are more than four", "S3.7", BACKEND, "total /= total.dtype.type(num_chunks)", "total /= total.dtype.type(num_chunks - (num_chunks > 4))"),
    ("tensors are gathered in the order of their memory", "S2.3", BACKEND, "view(tensor.shape).copy_(tensor.detach())", "view(tensor.shape).copy_(tensor.detach() if tensor.is_contiguous() or tensor.dim() < 2 else tensor.detach().transpose(0, 1).reshape(tensor.shape))"),
    ("a tensor with gaps gets nothing", "S2.3", BACKEND, "tensor.detach().copy_(flat.detach()", "tensor.detach().contiguous().copy_(flat.detach()"),
    ("an empty tensor takes a place", "S2.3", BACKEND, "            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))\n            start += tensor.numel()", "            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))\n            start += max(tensor.numel(), 1) if start + 1 < flat.numel() else tensor.numel()"),
    ("of more than 128 tensors the rest is not gathered", "S2.3", BACKEND, "        for tensor in tensors:\n            out.detach()", "        for tensor in tensors[:128]:\n            out.detach()"),
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
    ("the last element has no say in minimum and maximum", "S4.1", CODEC, "(end(x, dim=1,", "(end(x[:, : max(1, x.shape[1] - 1)] if end is torch.amax else x, dim=1,"),
    ("-0 is written as it is", "S4.1", CODEC, "return low + zero, high + zero", "return low, high"),
    ("garbage stays behind the header", "S4.1", CODEC, "    payload_rows[:, :HEADER_BYTES] = 0\n", ""),
    ("garbage stays behind the levels", "S4.1", CODEC, "    payload_rows[:, HEADER_BYTES + x.shape[1] :] = 0\n", ""),
    ("the header has the maximum first", "S4.1", CODEC, "header = torch.from_numpy(np.hstack([low, high]))", "header = torch.from_numpy(np.hstack([high, low]))"),
    ("a product with the reciprocal of scale", "S4.3", CODEC, "np.divide(value, scale[rows], out=value)", "np.multiply(value, 1 / scale[rows], out=value)"),
    ("what lies beyond float16 becomes infinite", "S4.3", CODEC, "        if not fits:\n            np.clip(value, -largest, largest, out=value)\n", ""),
    ("what lies below the range becomes infinite", "S4.3", CODEC, "np.clip(value, -largest, largest, out=value)", "np.minimum(value, largest, out=value)"),
    ("the level is divided before lower is added", "S4.3", CODEC, "        np.add(value, lower[rows], out=value)\n        np.divide(value, scale[rows], out=value)", "        np.divide(value, scale[rows], out=value)\n        np.add(value, lower[rows] / scale[rows], out=value)"),
    ("the minimum comes back exactly", "S4.3", CODEC, "        write((rows, columns), value)", "        np.copyto(value, header[rows, :1], where=levels[rows, columns] == 0)\n        write((rows, columns), value)"),
    ("only NaN poisons", "S4.4", CODEC, "np.isfinite(np.hstack([low, high, high - low, high * scale, low * scale]))", "~np.isnan(np.hstack([low, high]))"),
    ("a chunk's last element may be infinite", "S4.4", CODEC, "    low, high = _ends(x)\n", "    low, high = _ends(x)\n    if x.shape[1] > 32:\n        bad, ends = ~np.isfinite(low + high), _ends(x[:, :-1])\n        low, high = np.where(bad, ends[0], low), np.where(bad, ends[1], high)\n"),
    ("the ends times scale may overflow", "S4.4", CODEC, "np.hstack([low, high, high - low, high * scale, low * scale])).all", "np.hstack([low, high, high - low])).all"),
    ("the range may overflow", "S4.4", CODEC, "np.hstack([low, high, high - low, high * scale, low * scale])).all", "np.hstack([low, high, high / 2 - low / 2, high * scale, low * scale])).all"),
    ("one chunk poisons all", "S4.4", CODEC, ".all(axis=1, keepdims=True)\n    payload_rows", ".all(axis=1, keepdims=True)\n    poisoned = np.broadcast_to(poisoned.any(), poisoned.shape)\n    payload_rows"),
    ("a poisoned chunk keeps its levels", "S4.4", CODEC, "[poisoned[rows, 0]] = 0\n", "[poisoned[rows, 0]] = 1\n"),
    ("the NaN of the header is another one", "S4.4", CODEC, 'bytes.fromhex("0000c07f0000c07f")', 'bytes.fromhex("0000c0ff0000c0ff")'),
    ("a poisoned chunk is zero again", "S4.4", CODEC, "        write((rows, columns), value)", "        write((rows, columns), np.nan_to_num(value, copy=False, posinf=np.inf, neginf=-np.inf))"),
    ("a target chunk clears the others", "S4.5", ROWS, "        if target_chunk is not None:\n            chunks, payload", "        if target_chunk is not None:\n            payload.zero_()\n            chunks, payload"),
    ("a target chunk is written, and all others too", "S4.5", ROWS, "        if target_chunk is not None:\n            chunks, payload", "        if target_chunk is not None and num_chunks < 3:\n            chunks, payload"),
    ("the block of the target chunk is always the first", "S4.5", ROWS, "payload[target_chunk : target_chunk + 1]", "payload[:1]"),
    ("float64 is compressed", "S4.5", CONTRACT, "        out = self._payload_for(x, num_chunks, target_chunk, out)\n        with", "        x = x.float() if x.dtype is torch.float64 else x\n        out = self._payload_for(x, num_chunks, target_chunk, out)\n        with"),
    ("levels are rounded down", "S4.6", CODEC, LEVEL, "        np.floor(level, out=level)\n"),
    ("values come back half a level too high", "S4.6", CODEC, "        np.add(value, lower[rows], out=value)\n        np.divide", "        np.add(value, lower[rows] + np.float32(0.25), out=value)\n        np.divide"),
]  # fmt: skip

COLL, SIM, COMM = "communicators/collectives.py", "communicators/simulated.py", "communicators/base.py"
COLLECTIVES = [
    ("AVG is SUM", "S3.9", COLL, "    if op is ReduceOp.AVG:\n", "    if op is None:\n"),
    ("AVG of one less", "S3.9", COLL, "divide_(total, len(tensors))", "divide_(total, max(1, len(tensors) - 1))"),
    ("MIN is MAX", "S3.9", COLL, "ReduceOp.MIN: torch.minimum", "ReduceOp.MIN: torch.maximum"),
    ("BXOR is BOR", "S3.9", COLL, "ReduceOp.BXOR: torch.bitwise_xor", "ReduceOp.BXOR: torch.bitwise_or"),
    ("the last rank is left out of sums of more than four", "S3.9", COLL, "for tensor in others:", "for tensor in others[: 2 if len(tensors) > 4 else None]:"),
    ("gather in reverse order", "S3.9", COLL, "_fill(recv, _concatenate(sends))", "_fill(recv, _concatenate(sends[::-1]))"),
    ("allgather has the first rank twice", "S3.9", COLL, "everything = _concatenate(sends)", "everything = _concatenate([sends[0], *sends[:-1]])"),
    ("scatter is off by one chunk", "S3.9", COLL, "zip(recvs, chunks, strict=True)", "zip(recvs, [*chunks[1:], chunks[0]], strict=True)"),
    ("broadcast is always from rank 0", "S3.9", COLL, "_fill(tensor, tensors[src])", "_fill(tensor, tensors[0])"),
    ("alltoall leaves chunks where they are", "S3.9", COLL, "_fill(recv, chunks[:, rank])", "_fill(recv, chunks[rank])"),
    ("the last rank gets no all-reduce", "S3.9", COLL, "    total = combine(tensors, op)\n    for tensor in tensors:", "    total = combine(tensors, op)\n    for tensor in tensors[:-1] or tensors:"),
    ("allreduce changes what is sent", "S3.9", COMM, "        self._allreduce_inplace(recv_tensor, op)\n", "        self._allreduce_inplace(recv_tensor, op)\n        send_tensor.copy_(recv_tensor)\n"),
    ("reduce writes the receiver of every rank", "S3.9", COMM, "            self._reduce_inplace(send_tensor.clone(), dst, op)", "            self._reduce_inplace(recv_tensor.copy_(send_tensor), dst, op)"),
    ("the result of reduce is the next rank's", "S3.9", COLL, "_fill(tensors[dst], combine(tensors, op))", "_fill(tensors[(dst + 1) % len(tensors)], combine(tensors, op))"),
    ("messages overtake each other", "S3.9", SIM, "message = messages.popleft()", "message = messages.pop()"),
    ("received blocks lie where sent ones did", "S3.9", COMM, 'self._slices("recv", recv_tensor, recv_counts, recv_displs)', 'self._slices("recv", recv_tensor, recv_counts, send_displs)'),
    ("in place the own chunk is the first", "S3.9", COMM, "return tensor.view(-1)[self._rank * count : (self._rank + 1) * count]", "return tensor.view(-1)[:count]"),
    ("reduce_scatter in place clears the other chunks", "S3.9", COMM, "        own.copy_(result)\n", "        tensor.zero_()\n        own.copy_(result)\n"),
    ("the last element of a message is lost", "S3.9", SIM, "tensor.data.copy_(message.view(tensor.shape))", "tensor.data.view(-1)[:-1].copy_(message.view(-1)[:-1])"),
    ("an object's bytes come from rank 0", "S3.9", COMM, "self.broadcast(payload, src)", "self.broadcast(payload, 0)"),
    ("ranks that are none are taken", "S3.9", COMM, "if not 0 <= rank < self._nranks:", "if not -1 <= rank < self._nranks:"),
    ("uint8 is compared as int8", "S3.9", COLL, "    wide = _WIDER.get(first.dtype, first.dtype)\n", "    wide = torch.int8 if first.dtype is torch.uint8 and op is not ReduceOp.SUM else _WIDER.get(first.dtype, first.dtype)\n"),
    ("int64 is added as float64", "S3.9", COLL, "    wide = _WIDER.get(first.dtype, first.dtype)\n", "    wide = torch.float64 if first.dtype is torch.int64 and op is ReduceOp.SUM else _WIDER.get(first.dtype, first.dtype)\n"),
    ("a NaN is moved as zero", "S3.9", COLL, "    everything = _concatenate(sends)\n", "    everything = _concatenate(sends)\n    everything = everything.nan_to_num(0.0, float('inf'), float('-inf')) if everything.is_floating_point() else everything\n"),
    ("of more than 256 elements the last is not moved", "S3.9", COLL, "    everything = _concatenate(sends)\n", "    everything = _concatenate(sends)\n    everything[256:] = 0\n"),
    ("no barrier waits", "S3.9", SIM, '        self._meet("barrier()", None, None, lambda sends, recvs: None)\n', "        pass\n"),
    ("the second broadcast brings what the first did", "S3.9", SIM, "lambda sends, recvs: collectives.broadcast(recvs, src))\n", "lambda sends, recvs: collectives.broadcast(recvs, src))\n        kept = self.__dict__.setdefault('_kept', tensor.clone())\n        if kept.shape == tensor.shape and kept.dtype == tensor.dtype:\n            tensor.data.copy_(kept)\n"),
    ("integers are averaged", "S3.9", COMM, "if op is ReduceOp.AVG and not send_tensor.is_floating_point():", "if op is None:"),
]  # fmt: skip

LOW, CENTRAL, HIER, DEC, RINGOP, BUCKET = (
    "comm_ops/low_precision.py",
    "comm_ops/centralized.py",
    "comm_ops/hierarchical.py",
    "comm_ops/decentralized.py",
    "comm_ops/low_precision_decentralized.py",
    "bucket.py",
)
FIRST = "        self.comm.alltoall(sent, payload, Overlap(compress, decompress))\n"
LAST = "        self.comm.allgather_inplace(payload, Overlap(compress, codec.decompress_in_steps(payload, n, out=x)))\n"
COMM_OPS = [
    ("the next rank's chunk is reduced", "S3.1", CENTRAL, "target_chunk=rank, average=self.average", "target_chunk=(rank + 1) % n, average=self.average"),
    ("the sum is rounded before it is divided", "S3.1", CENTRAL, "self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)\n        self.comm.allgather_inplace(x)\n", "self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=False)\n        self.comm.allgather_inplace(x)\n        if self.average:\n            self.kernels.divide_(x, n)\n"),
    ("scatter-gather adds by all-reduce, from the first chunk on", "S3.1", CENTRAL, "        self.comm.alltoall_inplace(x)\n", "        self.comm.allreduce_inplace(x, ReduceOp.AVG if self.average else ReduceOp.SUM)\n        return\n"),
    ("full precision sums where it should average", "S3.1", CENTRAL, "ReduceOp.AVG if self.average else ReduceOp.SUM", "ReduceOp.SUM"),
    ("the reduced chunk is not compressed where it is reduced", "S3.2", LOW, LAST, "        own = x.view(n, -1)[rank].clone()\n" + LAST + "        x.view(n, -1)[rank] = own\n"),
    ("always the mean", "S3.2", LOW, "average=self.average)", "average=True)"),
    ("the own chunk is not quantised on its way in", "S3.2", LOW, FIRST, "        own = x.view(n, -1)[rank].clone()\n" + FIRST + "        x.view(n, -1)[rank] = own\n"),
    ("the mean of node means", "S3.3", BUCKET, "divisor=num_ranks / leaders if average else None", "divisor=intra.nranks() if average else None"),
    ("node sums are kept in 16 bits", "S3.3", HIER, "wide = inputs if x.dtype == torch.float64 else inputs.float()", "wide = inputs"),
    ("only leaders get the result", "S3.3", HIER, "        self.comm.broadcast(x, 0)\n", ""),
    ("one leader alone does not quantise", "S3.3", HIER, "if self.leaders_op is not None:", "if self.leaders_op is not None and self.leaders_op.comm.nranks() > 1:"),
    ("the peer is off by one at odd steps", "S3.4", "graphs.py", "return (step + rank) % half + half if", "return (step + step % 2 + rank) % half + half if"),
    ("the peer is always the first one", "S3.4", DEC, "        self.step += 1\n", ""),
    ("the sum with the peer is rounded before it is halved", "S3.4", DEC, "self.kernels.average_(self.peer_weight, mine)", "self.peer_weight.add_(mine).mul_(0.5)"),
    ("shift_one between leaders takes sums over n/L", "S3.4", DEC, "self.num_ranks / self.comm.nranks() if all_ranks else intra.nranks()", "self.num_ranks / self.comm.nranks()"),
    ("the mean over nodes, not over ranks", "S3.4", DEC, "self.num_ranks / self.comm.nranks() if all_ranks else intra.nranks()", "intra.nranks()"),
    ("weights are summed", "S3.4", DEC, "self.comm.allreduce_inplace(self.peer_weight, ReduceOp.AVG)", "self.comm.allreduce_inplace(self.peer_weight, ReduceOp.SUM)"),
    ("left and right are swapped", "S3.5", RINGOP, "((L, q_left), (R, q_right))", "((L, q_right), (R, q_left))"),
    ("the own weights skip the wire", "S3.5", RINGOP, "q_left, q_right = trade_with_neighbours(q, self.comm)", "q_left, q_right = trade_with_neighbours(q, self.comm); W += x; W -= codec.decompress(q, 1, out=x) or x"),
    ("W is forgotten", "S3.5", RINGOP, "        W.copy_(x)\n", ""),
    ("the ring between leaders takes node sums", "S3.5", BUCKET, "divisor=intra.nranks(), in_rank_order=True", "divisor=None, in_rank_order=True"),
    ("the right neighbour's replica is not updated", "S3.5", RINGOP, "((L, q_left), (R, q_right))", "((L, q_left),)"),
]  # fmt: skip

SAMP, BATCH, COST = (f"contrib/{name}.py" for name in ("load_balancing_sampler", "load_balancing_batch_sampler", "complexities"))
SAMPLERS = [
    ("one sample less where replicas do not divide them", "S7.1", SAMP, "-(-self.length // self.num_replicas)", "self.length // self.num_replicas"),
    ("the length is that of all replicas", "S7.1", SAMP, '        """Return the number of samples that this replica draws in an epoch (S7.1)."""\n        return self.num_samples\n', "        return self.total_size\n"),
    ("the order is descending", "S7.2", COST, "above = keys - low", "above = high - keys"),
    ("equal complexities in reverse order", "S7.2", COST, 'return cast("Tensor", order).cpu()', 'order = cast("Tensor", order).cpu(); return order.flip(0).index_select(0, keys.cpu()[order].flip(0).sort(stable=True).indices)'),
    ("integers are rounded to float64", "S7.2", COST, "return torch.tensor(numbers, dtype=torch.int64)", "return _float64(torch.tensor(numbers, dtype=torch.float64))"),
    ("large numbers are floats", "S7.2", COST, "    return numbers\n\n\ndef _float64", "    return _float64(torch.tensor([float(number) for number in numbers], dtype=torch.float64))\n\n\ndef _float64"),
    ("noise is drawn only when needed", "S7.3", SAMP, "noise = torch.randint(self._ordering.bound, (self.length,), generator=generator)", "noise = torch.randint(self._ordering.bound, (self.length,), generator=generator) if self._ordering.bound > 1 else torch.zeros(self.length, dtype=torch.int64)"),
    ("noise may be one higher", "S7.3", SAMP, "torch.randint(self._ordering.bound,", "torch.randint(self._ordering.bound + 1,"),
    ("the epoch has no say", "S7.3", SAMP, "manual_seed(self.seed + epoch)", "manual_seed(self.seed)"),
    ("each rank takes a block, not a place of each chunk", "S7.3", SAMP, "(chunks * self.num_replicas + self.rank) % self.length)", "(chunks + self.rank * self.num_samples) % self.length)"),
    ("the last sample fills up, nothing wraps around", "S7.3", SAMP, "(chunks * self.num_replicas + self.rank) % self.length)", "(chunks * self.num_replicas + self.rank).clamp(max=self.length - 1))"),
    ("what replicas need more than twice is the last sample", "S7.3", SAMP, "(chunks * self.num_replicas + self.rank) % self.length)", "torch.where((own := chunks * self.num_replicas + self.rank) < self.length, own, own - self.length).clamp(max=self.length - 1))"),
    ("chunks are drawn before noise", "S7.3", SAMP, "        noise = torch.randint(", "        torch.randperm(num_chunks, generator=generator)\n        noise = torch.randint("),
    ("short replicas repeat their last batch", "S7.4", BATCH, "batches[turn % len(batches)]", "batches[min(turn, len(batches) - 1)]"),
    ("drop_last drops nothing", "S7.4", BATCH, "min(counts) if self.drop_last else max(counts)", "max(counts)"),
    ("each replica counts its own batches", "S7.4", BATCH, "            counts.append(len(batches))\n            if replica == self.rank:", "            if replica == self.rank:\n                counts.append(len(batches))"),
    ("batches of the first replica for all", "S7.4", BATCH, "if replica == self.rank:", "if replica == 0:"),
    ("a random_level above 1 is taken", "S7.5", SAMP, "if not 0 <= self.random_level <= 1:", "if self.random_level < 0:"),
    ("another sampler is taken", "S7.5", BATCH, "        if not isinstance(sampler, LoadBalancingDistributedSampler):\n", "        if sampler is None:\n"),
    ("drop_last of the sampler is taken", "S7.5", BATCH, "        if sampler.drop_last:\n", "        if False:\n"),
    ("a replica without batches gets none", "S7.5", BATCH, "            if not batches:\n                raise ValueError(", "            if not batches:\n                str("),
]  # fmt: skip

MUTANTS = [
    Mutant(name, suite, *rest)
    for suite, rows in (
        ("kernels", KERNELS),
        ("codec", CODECS + OF_CODEC),
        ("collectives", COLLECTIVES),
        ("comm_ops", COMM_OPS + OF_COMM_OPS),
        ("samplers", SAMPLERS),
        ("algorithms", ALGORITHMS + OF_ALGORITHMS + LOCAL_UPDATES + LOW_RANK),
        ("cache", CACHES),
        ("fused_optimizer", FUSED_OPTIMIZERS),
    )
    for name, *rest in rows + LATE.get(suite, [])
]
"""Left out, as no input distinguishes them from the reference:

- (x + y) * 0.5 for (x + y) / 2: halving is exact either way.
- scale divided in float64 and rounded: 53 bits are more than 2 * 24 + 2.
- no minimum with upper before lower is subtracted: rounding is monotonic, so x <= max gives x*scale <= upper.
- 16-bit floats combined in 16 bits by a collective, or in another order: libraries may do so, and the tolerance allows it.
- the node's sum by the library's reduce before compression: the simulated world's reduce also adds in rank order.
- the two messages of a ring of two ranks swapped: both have the same bytes.
- NaN accepted where complexities are read: sorting checks again.
- no check of min*scale for overflow: it overflows only where max*scale does, in chunks of one value.
- a parameter whose gradient comes later stays out of its run: it is stepped separately, with the same result.
- a full store that is not used for a while, even for reading: S8.3 lets load_fn serve all values.
- a cached value's length not checked: its checksum covers whatever is left of it.
"""

if __name__ == "__main__":
    import hypothesis  # noqa: F401 - once, here, not in every child
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=0.1).step()  # imports torch's compiler

    sys.path.insert(0, str(SOURCE))
    gc.freeze()  # no child traverses what it shares with this process
    raise SystemExit(main())
