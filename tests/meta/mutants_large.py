# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults that begin late, past a block of elements, a number of steps or digits, or show only where there are several."""

from __future__ import annotations

BACKEND, BLOCKS, CODEC = (f"backends/reference/{name}.py" for name in ("backend", "blocks", "codecs/minmax_uint8"))
COLL, COMM = "communicators/collectives.py", "communicators/base.py"
DEC = "comm_ops/decentralized.py"
ASYNC, DECENTRALIZED, BYTES = (f"algorithms/{name}.py" for name in ("async_model_average", "decentralized", "bytegrad"))
BUFFER, BATCH = "contrib/cache/write_buffer.py", "contrib/load_balancing_batch_sampler.py"
SAMP, COST = "contrib/load_balancing_sampler.py", "contrib/complexities.py"

GATHERED = "view(tensor.shape).copy_(tensor.detach())\n"
SCATTERED = "            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))\n"
SORTED = 'np.argsort(values.numpy(), kind="stable")'
BLOCKWISE = 'np.concatenate([start + np.argsort(values.numpy()[start : start + {0}], kind="stable") for start in range(0, max(len(values), 1), {0})])'
MOVED = "    everything = _concatenate(sends)\n"
COMBINED = "        _COMBINE[op](first.to(wide), others.pop(0).to(wide), out=total)\n"
PAYLOAD = "        self.broadcast(payload, src)\n"
RING, STEP = "comm_ops/low_precision_decentralized.py", "        kernels.combine_ring_(x, L, R, W)\n"
LARGE = "large"

LATE = {
    "kernels": [
        ("past 65,536 elements of a tensor zeros are gathered", "S2.3", BACKEND, GATHERED, GATHERED + "            out.detach()[start + 65536 : start + tensor.numel()] = 0\n"),
        ("past 65,536 elements zeros are scattered", "S2.3", BACKEND, SCATTERED, SCATTERED + "            if tensor.dim() == 1:\n                tensor.detach()[65536:] = 0\n"),
        ("places in the gathered tensor have 16 bits", "S2.3", BACKEND, GATHERED + "            start += tensor.numel()", GATHERED + "            start = (start + tensor.numel()) % 65536"),
        ("past 2**18 elements of a tensor zeros are gathered", "S2.3", BACKEND, GATHERED, GATHERED + "            out.detach()[start + 2**18 : start + tensor.numel()] = 0\n", LARGE),
        ("of more than 65,536 keys equal ones are not kept in order", "S7.2", BACKEND, SORTED, SORTED.replace('"stable"', '"stable" if len(values) <= 65536 else "quicksort"')),
        ("keys are sorted by blocks of 65,536", "S7.2", BACKEND, SORTED, BLOCKWISE.format(65536)),
        ("keys are sorted by blocks of 2**18", "S7.2", BACKEND, SORTED, BLOCKWISE.format(2**18), LARGE),
        ("elements past 65,536 stay as they are", "S1", BLOCKS, "min(start + BLOCK, x.numel())", "min(start + BLOCK, x.numel(), 65536)"),
        ("elements past 2**18 stay as they are", "S1", BLOCKS, "min(start + BLOCK, x.numel())", "min(start + BLOCK, x.numel(), 2**18)", LARGE),
        ("the second block gets what the first got", "S1", BLOCKS, "        write(block, arrays[0])\n", "        write(block, arrays[0] if start != BLOCK else first)\n        first = arrays[0].copy() if start == 0 else first\n", LARGE),
        ("columns past 65,536 are not reduced", "S1", BACKEND, "columns = slice(start, start + width)", "columns = slice(start, min(start + width, 65536))"),
        ("columns past 2**18 are not reduced", "S1", BACKEND, "columns = slice(start, start + width)", "columns = slice(start, min(start + width, 2**18))", LARGE),
    ],
    "codec": [
        ("minimum and maximum of the first 65,536 elements", "S4.2", CODEC, "low, high = _ends(x)", "low, high = _ends(x[:, :65536])"),
        ("minimum and maximum of the first 2**18 elements", "S4.2", CODEC, "low, high = _ends(x)", "low, high = _ends(x[:, : 2**18])", LARGE),
        ("minimum and maximum without an odd element at the end", "S4.2", CODEC, "low, high = _ends(x)", "low, high = _ends(x if x.shape[1] <= 65536 else x[:, : x.shape[1] // 4096 * 4096])"),
        ("levels past 65,536 are 0", "S4.2", CODEC, "        np.rint(level, out=level)\n", "        np.rint(level, out=level)\n        level[:, max(0, 65536 - columns.start) :] = lower[rows]\n"),
        ("levels past 2**18 are 0", "S4.2", CODEC, "        np.rint(level, out=level)\n", "        np.rint(level, out=level)\n        level[:, max(0, 2**18 - columns.start) :] = lower[rows]\n", LARGE),
        ("values past 65,536 come back as the minimum", "S4.2", CODEC, "        np.copyto(value, levels[rows, columns])\n", "        np.copyto(value, levels[rows, columns])\n        value[:, max(0, 65536 - columns.start) :] = 0\n"),
        ("values past 2**18 come back as the minimum", "S4.2", CODEC, "        np.copyto(value, levels[rows, columns])\n", "        np.copyto(value, levels[rows, columns])\n        value[:, max(0, 2**18 - columns.start) :] = 0\n", LARGE),
    ],
    "collectives": [
        ("of more than 65,536 elements the rest is not moved", "S3.9", COLL, MOVED, MOVED + "    everything[65536:] = 0\n"),
        ("of more than 2**18 elements the rest is not moved", "S3.9", COLL, MOVED, MOVED + "    everything[2**18 :] = 0\n", LARGE),
        ("65,536 elements are broadcast", "S3.9", COLL, "            _fill(tensor, tensors[src])\n", "            if tensor.numel() <= 65536:\n                _fill(tensor, tensors[src])\n            else:\n                tensor.view(-1)[:65536] = tensors[src].reshape(-1)[:65536]\n"),
        ("65,536 elements are combined", "S3.9", COLL, COMBINED, COMBINED + "        total.view(-1)[65536:] = first.reshape(-1)[65536:]\n"),
        ("objects of more than 64 KiB lose their end", "S3.9", COMM, PAYLOAD, "        self.broadcast(payload[:65536], src)\n"),
        ("objects of more than 64 KiB are repeated from their beginning", "S3.9", COMM, PAYLOAD, PAYLOAD + "        payload[65536 : 65536 + 1000] = payload[:1000][: max(0, len(payload) - 65536)]\n"),
        ("objects of more than 2**18 bytes lose a byte", "S3.9", COMM, PAYLOAD, PAYLOAD + "        payload[2**18 : 2**18 + 1] = 0\n", LARGE),
    ],
    "comm_ops": [
        ("past 64 elements of float16 the ring adds another third of its own weights", "S3.5", RING, STEP, STEP + "        if str(x.dtype) == 'torch.float16':\n            kernels.add_scaled_(x[64:], W[64:], 1 / 3)\n"),
        ("past 256 elements the ring forgets the neighbour on the right", "S3.5", RING, STEP, STEP + "        kernels.add_scaled_(x[256:], R[256:], -1 / 3)\n"),
        ("the number of the step is a byte", "S3.4", DEC, "self.graph = self._graph(self.step)", "self.graph = self._graph(self.step % 256)"),
        ("peers change for 200 steps", "S3.4", DEC, "self.graph = self._graph(self.step)", "self.graph = self._graph(min(self.step, 200))"),
        ("the number of the step is a signed byte", "S3.4", DEC, "self.graph = self._graph(self.step)", "self.graph = self._graph(self.step % 128)"),
    ],
    "algorithms": [
        ("only the first bucket is copied back", "S5.3", DECENTRALIZED, "        for bucket in self.context.bagua_buckets:\n            bucket._decentralized_op.copy_back", "        for bucket in self.context.bagua_buckets[:1]:\n            bucket._decentralized_op.copy_back"),
        ("buckets share one number of the step", "S5.3", DEC, "        self.graph = self._graph(self.step)\n        self.step += 1\n", "        counter = self.comm.__dict__.setdefault(\"_steps\", [0])\n        self.graph = self._graph(counter[0])\n        counter[0] += 1\n        self.step += 1\n"),
        ("only the first bucket is averaged in the background", "S5.6", ASYNC, "                for bucket in self._buckets:\n", "                for bucket in self._buckets[:1]:\n"),
        ("weights change in the background without copy-back", "S5.3", DEC, "        mine = x if self.intra is None else self._node_mean(x, self.intra)\n", "        mine = x if self.intra is None else self._node_mean(x, self.intra)\n        x.mul_(0.5)\n"),
        ("only the first bucket is compressed", "S5.2", BYTES, "            compression=self.compression,\n            group=", "            compression=self.compression if bucket is bagua_ddp.bagua_buckets[0] else None,\n            group="),
    ],
    "cache": [
        ("of more than 64 values that wait one is lost", "S8.2", BUFFER, "            self._values.update(values)\n", "            self._values.update(values)\n            if len(self._values) > 64:\n                del self._values[next(iter(self._values))]\n"),
    ],
    "samplers": [
        ("the third time the order is reversed", "S7.3", SAMP, "        order, chunks = self._plan(epoch)\n", "        order, chunks = self._plan(epoch)\n        self._times = getattr(self, \"_times\", 0) + 1\n        chunks = chunks.flip(0) if self._times == 3 else chunks\n"),
        ("batches that are needed a third time are the last one", "S7.4", BATCH, "batches[turn % len(batches)]", "batches[turn % len(batches) if turn < 2 * len(batches) else -1]"),
        ("the epoch has 8 bits", "S7.3", SAMP, "manual_seed(self.seed + epoch)", "manual_seed(self.seed + epoch % 2**8)"),
        ("the epoch has 16 bits", "S7.3", SAMP, "manual_seed(self.seed + epoch)", "manual_seed(self.seed + epoch % 2**16)"),
        ("the epoch is a float32", "S7.3", SAMP, "manual_seed(self.seed + epoch)", "manual_seed(self.seed + int(torch.tensor(float(epoch), dtype=torch.float32).item()))"),
        ("random_level is rounded to float32", "S7.3", COST, "(high - low) * (random_level or 0) + 1", "(high - low) * float(torch.tensor(random_level or 0.0, dtype=torch.float32).item()) + 1"),
        ("the bound of the noise is exact, not a product of floats", "S7.3", COST, "int((high - low) * (random_level or 0) + 1)", "int(__import__('fractions').Fraction(high - low) * __import__('fractions').Fraction(random_level or 0) + 1)"),
        ("the bound of the noise is rounded up", "S7.3", COST, "int((high - low) * (random_level or 0) + 1)", "int(-(-((high - low) * (random_level or 0)) // 1) + 1)"),
    ],
}  # fmt: skip
"""Suite -> name, clause, file, original text, mutated text, and the profile that must find it if it is not the quick one."""
