# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of powersgd and topk (S10, S11.2): name, clause, file, original text, mutated text."""

from __future__ import annotations

COLUMNS, ROUND, SPARSE = "low_rank.py", "comm_ops/low_rank.py", "comm_ops/top_k.py"
POWERSGD, TOPK, BOTH = (f"algorithms/{name}.py" for name in ("power_sgd", "topk", "compressed_gradients"))
COMPRESSED = "return (n, m, r) if (n + m) * r * min_compression_rate < n * m else None"
NORMALIZED = "torch.where(norm > THRESHOLD * before[:, place : place + 1], column / norm, 0)"
STACKED = "        columns = torch.stack([matrix.mT for matrix in alike]).double()  # each column is contiguous now\n"
SEED = "seed + 1000003 * round_number + 7919 * place"
REPLACED = "columns[:, empty] = fresh.to(columns)[:, empty]"
USABLE = "[a and b for a, b in zip(usable, _are_finite(right_flat, right), strict=True)]"
OWN = 'own = [q.clone() for q in right] if self._memory == "local" else right'
FIRST = "        self.comm.allreduce_inplace(message, ReduceOp.SUM)\n"
BUCKET = "options, matrices, start = self.options, [], 0"
NAMES = "        names = [registration(proxy).name for proxy in bucket.tensors]\n"
RANKED = "size = (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=0x7F800001)"
TIED = "chosen[tied[: k - int(chosen.sum())]] = True"
FORGOTTEN = "            error[own] = 0\n"
FINITE = "if error is not None and values.isfinite().all():"
IN_ORDER = "zip(indices.view(n, self.k), values.view(n, self.k), strict=True)"
ADDED = "            total.index_add_(0, one_rank, its_values)  # no index twice, so their order does not matter\n"
DIVIDED = "        self.kernels.divide_(total, n)\n"

LOW_RANK: list[tuple[str, str, str, str, str]] = [
    # what is compressed
    ("the columns of a gradient are its last dimension", "S10.1", COLUMNS, "n, m = shape[0], math.prod(shape[1:])", "n, m = math.prod(shape[:-1]), shape[-1]"),
    ("a gradient is compressed where that saves just the rate", "S10.1", COLUMNS, COMPRESSED, COMPRESSED.replace("if ", "if r and ").replace("<", "<=")),
    ("the rate has no say", "S10.1", COLUMNS, COMPRESSED, COMPRESSED.replace(" * min_compression_rate", "")),
    ("the rate is for what is left, not for what is sent", "S10.1", COLUMNS, COMPRESSED, COMPRESSED.replace("(n + m) * r * min_compression_rate < n * m", "(n + m) * r < n * m * min_compression_rate")),
    ("the rank asked for decides what is compressed", "S10.1", COLUMNS, COMPRESSED, COMPRESSED.replace("* r *", "* matrix_approximation_rank *")),
    ("only matrices of two dimensions are compressed", "S10.1", COLUMNS, "if len(shape) < 2:", "if len(shape) != 2:"),
    ("what is not compressed has a memory, as in torch's hook", "S10.1", POWERSGD, "            start += layout.shape.numel()\n", "            start += layout.shape.numel()\n            if shape is None and self.has_memory:\n                self.memories.expect(registration(proxy).name, torch.empty((), dtype=wide).expand(layout.shape))\n"),
    ("what is not compressed is summed", "S10.1", ROUND, "        self.kernels.divide_(plain, self.comm.nranks())\n", ""),
    ("what is not compressed stays local", "S10.1", ROUND, "        torch._foreach_copy_(others, plain", "        torch._foreach_copy_([other.clone() for other in others], plain"),
    ("in compressed gradients, the warm-up is one step longer", "S10.1", BOTH, "steps_of_optimizers[-1] >= self.warmup_steps", "steps_of_optimizers[-1] > self.warmup_steps"),
    ("the warm-up never ends", "S10.1", BOTH, "steps_of_optimizers[-1] >= self.warmup_steps", "steps_of_optimizers[-1] < 0"),
    ("steps of the warm-up count as rounds", "S10.1", BOTH, "            self.rounds += self.compressing\n", "            self.rounds += 1\n"),
    ("new buckets have new memories", "S10.1", POWERSGD, BUCKET, BUCKET + "; self.memories.load({})"),
    ("new buckets have new factors", "S10.1", POWERSGD, BUCKET, BUCKET + "; self.factors.load({})"),
    ("a restart forgets the memories", "S10.1", BOTH, "        self.memories.load(state.get(\"memories\", {}))\n", ""),
    ("a restart forgets the factors", "S10.1", BOTH, '        self.factors.load(state["factors"])\n', ""),
    ("a restart counts rounds from 0", "S10.1", BOTH, '        self.rounds = state["rounds"]\n', ""),
    # rounds
    ("a gradient of zero gives NaN, as in torch's hook", "S10.2", COLUMNS, NORMALIZED, "column / norm"),
    ("an epsilon keeps columns from being orthonormal", "S10.2", COLUMNS, NORMALIZED, "column / (norm + 1e-2)"),
    ("columns that are 0 stay 0, but in the first round", "S10.2", COLUMNS, "if empty.any():", "if empty.all() and not round_number:"),
    ("columns that are 0 stay 0 unless all are", "S10.2", COLUMNS, "if empty.any():", "if empty.all():"),
    ("one column that is 0 replaces all", "S10.2", COLUMNS, REPLACED, "columns.copy_(fresh)"),
    ("columns that are 0 are replaced by the first random ones", "S10.2", COLUMNS, REPLACED, "columns[:, empty] = fresh.to(columns)[:, : int(empty.sum())]"),
    ("random columns do not depend on the round", "S10.2", COLUMNS, SEED, "seed + 7919 * place"),
    ("random columns do not depend on the parameter", "S10.2", COLUMNS, SEED, "seed + 1000003 * round_number"),
    ("random columns do not depend on the seed", "S10.2", COLUMNS, SEED, "1000003 * round_number + 7919 * place"),
    ("the parameter's place counts compressed ones only", "S10.2", POWERSGD, "self._places[name], layout))", "len(matrices), layout))"),
    ("random columns are uniform", "S10.2", COLUMNS, "torch.randn(m, r, generator", "torch.rand(m, r, generator"),
    ("random columns are drawn in float64", "S10.2", COLUMNS, "generator=generator, dtype=torch.float32)", "generator=generator, dtype=torch.float64)"),
    ("random columns are drawn as rows", "S10.2", COLUMNS, "torch.randn(m, r, generator=generator, dtype=torch.float32)", "torch.randn(r, m, generator=generator, dtype=torch.float32).T"),
    ("Q starts anew in every round", "S10.2", ROUND, "if not self._warm_start:", "if True:"),
    ("Q is kept without warm_start", "S10.2", ROUND, "if not self._warm_start:", "if False:"),
    ("Q is not kept", "S10.2", ROUND, "        self._factors[name].copy_(q)\n", ""),
    ("the memory is never added", "S10.2", ROUND, "torch._foreach_add_(gradients, [", "torch._foreach_add_([g.clone() for g in gradients], ["),
    ("the memory is subtracted", "S10.2", ROUND, "torch._foreach_add_(gradients, [", "torch._foreach_sub_(gradients, ["),
    ("what is left out piles up in the memory", "S10.2", ROUND, "self._errors[name].copy_(gradient)", "self._errors[name].add_(gradient)"),
    ("the memory keeps everything", "S10.2", ROUND, ".addmm_(p, own.T, alpha=-1)", ""),
    ("the memory of rank 1 keeps everything", "S10.2", ROUND, "value=-1, out=", "value=0, out="),
    ("the memory of rank 1 has the wrong sign", "S10.2", ROUND, "value=-1, out=", "value=1, out="),
    ("a local memory is that of the mean", "S10.2", ROUND, OWN, "own = right"),
    ("an averaged memory is local", "S10.2", ROUND, OWN, "own = [q.clone() for q in right]"),
    ("Q is summed", "S10.2", ROUND, "        self.kernels.divide_(right_flat, self.comm.nranks())\n", ""),
    ("each rank has its own Q", "S10.2", ROUND, "        self.comm.allreduce_inplace(right_flat, ReduceOp.SUM)\n        self.kernels.divide_(right_flat, self.comm.nranks())\n", ""),
    ("P is not orthonormalized", "S10.2", ROUND, "            orthonormalize(left)\n", ""),
    ("the result is made with the old Q", "S10.2", ROUND, "self._decompress(a.name, gradient, left[place], right[place], own[place])", "self._decompress(a.name, gradient, left[place], right[place], own[place]); gradient.copy_(left[place] @ (gradient.T @ left[place]).T) if place % 2 else gradient.copy_(left[place] @ queries[place].T)"),
    # orthonormal columns
    ("projections are taken from the next column only", "S10.3", COLUMNS, "columns[:, place + 1 :]\n", "columns[:, place + 1 : place + 2]\n"),
    ("no projections are taken", "S10.3", COLUMNS, "            later -= (later @ column.mT) @ column\n", "            pass\n"),
    ("half of the projections is taken", "S10.3", COLUMNS, "later -= (later @ column.mT) @ column", "later -= (later @ column.mT) @ column / 2"),
    ("in float32 what rounding leaves is a direction, as in torch's hook", "S10.3", COLUMNS, STACKED, STACKED.replace("        columns", "        global THRESHOLD\n        THRESHOLD = 0.0\n        columns").replace(".double()", ".float()")),
    ("columns below an absolute size become 0", "S10.3", COLUMNS, STACKED, STACKED.replace(".double()  # each column is contiguous now", ".double()\n        columns[(columns.square().sum(-1, keepdim=True) < 1e-12).expand_as(columns)] = 0")),
    ("squares overflow in float32", "S10.3", COLUMNS, STACKED, STACKED.replace(".double()  # each column is contiguous now", ".double()\n        columns[~columns.float().square().sum(-1, keepdim=True).isfinite().expand_as(columns)] = 0")),
    ("columns that keep a tenth of their size become 0", "S10.3", COLUMNS, "THRESHOLD = 1e-6", "THRESHOLD = 0.3"),
    # values that are not finite
    ("a memory is poisoned for ever", "S10.4", ROUND, "            if usable[place]:\n", "            if True:\n"),
    ("only P is looked at", "S10.4", ROUND, USABLE, "list(usable)"),
    ("one gradient poisons all of its bucket", "S10.4", ROUND, USABLE, USABLE.replace("[a and b", "[all(usable) and b")),
    ("what is not finite becomes zero without a word", "S10.4", ROUND, "gradient.fill_(torch.nan)", "gradient.zero_()"),
    ("what is not finite stays local", "S10.4", ROUND, "                gradient.fill_(torch.nan)\n", "                pass\n"),
    ("Q starts anew after a gradient that is not finite", "S10.4", ROUND, "                gradient.fill_(torch.nan)\n", "                gradient.fill_(torch.nan)\n                self._factors[a.name].zero_()\n"),
    ("the memory is dropped after a gradient that is not finite", "S10.4", ROUND, "                gradient.fill_(torch.nan)\n", "                gradient.fill_(torch.nan)\n                if self._memory is not None:\n                    self._errors[a.name].zero_()\n"),
    # messages and identities
    ("what is not compressed has a message of its own", "S10.5", ROUND, FIRST, "        self.comm.allreduce_inplace(summed, ReduceOp.SUM)\n        self.comm.allreduce_inplace(plain, ReduceOp.SUM)\n"),
    ("each Q has a message of its own", "S10.5", ROUND, "        self.comm.allreduce_inplace(right_flat, ReduceOp.SUM)\n", "        for part in right_flat.split([q.numel() for q in right]):\n            self.comm.allreduce_inplace(part, ReduceOp.SUM)\n"),
    ("what is compressed is sent uncompressed, too", "S10.5", ROUND, FIRST, FIRST + "        self.comm.allreduce_inplace(x.clone(), ReduceOp.SUM)\n"),
    ("a hundredth of what is left out is lost", "S10.5", ROUND, ".addmm_(p, own.T, alpha=-1)", ".addmm_(p, own.T, alpha=-1).mul_(0.99)"),
    ("each rank applies its own approximation", "S10.5", ROUND, "torch.mm(p, q.T, out=gradient)", "torch.mm(p, own.T, out=gradient)"),
    # topk
    ("k is rounded down", "S11.2", SPARSE, "return min(m, max(1, math.ceil(ratio * m)))", "return min(m, max(1, int(ratio * m)))"),
    ("k is rounded to nearest", "S11.2", SPARSE, "return min(m, max(1, math.ceil(ratio * m)))", "return min(m, max(1, round(ratio * m)))"),
    ("k is computed without rounding errors", "S11.2", SPARSE, "return min(m, max(1, math.ceil(ratio * m)))", "return min(m, max(1, math.ceil(round(ratio * m, 9))))"),
    ("of equal values the last are sent", "S11.2", SPARSE, TIED, "chosen[tied.flip(0)[: k - int(chosen.sum())]] = True"),
    ("all equal values are sent, up to k", "S11.2", SPARSE, "chosen = size > least", "chosen = size > least + 1"),
    ("NaN counts as zero", "S11.2", SPARSE, RANKED, "size = x.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int32) & 0x7FFFFFFF"),
    ("NaN counts as infinity", "S11.2", SPARSE, RANKED, RANKED.replace("0x7F800001", "0x7F800000")),
    ("infinity counts as NaN", "S11.2", SPARSE, RANKED, RANKED.replace("(max=0x7F800001)", "(max=0x7F7FFFFF)")),
    ("the sign counts", "S11.2", SPARSE, RANKED, "size = torch.where(x > 0, x, 0).view(torch.int32)"),
    ("divided by how many ranks have sent", "S11.2", SPARSE, DIVIDED, "        total /= torch.zeros_like(total).index_add_(0, indices, torch.ones_like(values)).clamp_(min=1)\n"),
    ("summed", "S11.2", SPARSE, DIVIDED, ""),
    ("multiplied by 1/n", "S11.2", SPARSE, DIVIDED, "        total *= 1 / n\n"),
    ("added from the last rank on", "S11.2", SPARSE, IN_ORDER, "zip(indices.view(n, self.k).flip(0), values.view(n, self.k).flip(0), strict=True)"),
    ("sums are rounded to 16 bits", "S11.2", SPARSE, ADDED, ADDED + "            total.copy_(total.to(x.dtype))\n"),
    ("the last rank to send a coordinate overwrites the others", "S11.2", SPARSE, ADDED, "            total[one_rank.long()] = its_values\n"),
    ("values are sent in 16 bits", "S11.2", SPARSE, "self.comm.allgather(p[own], values)", "self.comm.allgather(p[own].bfloat16().float(), values)"),
    ("the gradient is sent, not p", "S11.2", SPARSE, "self.comm.allgather(p[own], values)", "self.comm.allgather((p if error is None else p - error)[own], values)"),
    ("indices are sent in another order", "S11.2", SPARSE, "own = largest(p, self.k)", "own = largest(p, self.k).flip(0)"),
    ("values are sent before indices", "S11.2", SPARSE, "        self.comm.allgather(own.int(), indices)\n        self.comm.allgather(p[own], values)\n", "        self.comm.allgather(p[own], values)\n        self.comm.allgather(own.int(), indices)\n"),
    ("what was sent stays in the memory", "S11.2", SPARSE, FORGOTTEN, "            pass\n"),
    ("the memory is forgotten", "S11.2", SPARSE, FORGOTTEN, "            error.zero_()\n"),
    ("what overflowed stays in the memory", "S11.2", SPARSE, FINITE, "if error is not None:"),
    ("another rank's overflow goes unnoticed", "S11.2", SPARSE, FINITE, FINITE.replace("values", "p")),
    ("an overflow clears the memory", "S11.2", SPARSE, FINITE, FINITE[:-1] + " or (error is not None and error.zero_() is None):"),
    ("infinity is no overflow", "S11.2", SPARSE, FINITE, FINITE.replace("values.isfinite().all()", "not values.isnan().any()")),
    ("NaNs are in the order of their bits", "S11.2", SPARSE, RANKED, "size = x.view(torch.int32) & 0x7FFFFFFF"),
    ("what is applied is taken from the memory", "S11.2", SPARSE, FORGOTTEN, "            error[own] -= p[own] / n\n"),
    ("there is no memory", "S11.2", TOPK, "(lambda: self.memories.flat(names)) if self.has_memory else None", "None"),
    ("new buckets have new memories of topk", "S11.2", TOPK, NAMES, NAMES + "        self.memories.load({})\n"),
    ("gradients of the warm-up are remembered", "S11.2", SPARSE, "        if not self._compresses():\n", "        if not self._compresses():\n            if self._error is not None:\n                self._error().add_(x[: self._numel])\n"),
    ("the warm-up of topk is one step longer", "S11.2", BOTH, "steps_of_optimizers[-1] >= self.warmup_steps", "steps_of_optimizers[-1] > self.warmup_steps"),
    ("a restart of topk forgets the memories", "S11.2", BOTH, "        self.memories.load(state.get(\"memories\", {}))\n", ""),
]  # fmt: skip
"""Left out, as nothing here distinguishes them from the reference:

- P averaged, not summed: orthonormalizing it takes the factor away.
- Q not orthonormalized, at all or after columns were replaced: M Q spans the same.
- no threshold for dependent columns in float64: what rounding leaves is orthogonal there, so the result is the same.
- finite values looked at in Q alone: what is not finite in P makes Q NaN.
- ``max(1, ...)`` left out of k: the product is above 0, and is rounded up.
- another size of topk's sample: it decides only how many elements are sorted.
"""
