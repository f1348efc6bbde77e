# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the fused optimizer: name, clause, file, original text, mutated text."""

from __future__ import annotations

OPTIMIZER, FUSER, RUN, VERIFY = (f"contrib/fuse/{name}.py" for name in ("optimizer", "fuser", "run", "verify"))
NO_GRAD = "    grad = p.grad\n    if grad is None or"
COPIED = "torch._foreach_copy_(self._copied, grads)"
FUSED_OPTIMIZERS: list[tuple[str, str, str, str, str]] = [
    ("offset 0 of a larger storage is taken for the weights", "S6", RUN, "(1,), offset // item)", "(1,), 0)"),
    ("tensors with gaps between them are taken for neighbours", "S6", RUN, "    if [tensor.data_ptr() for tensor in tensors] == list(itertools.accumulate(sizes[:-1], initial=start)):\n", "    if all(a.data_ptr() + size <= b.data_ptr() for a, b, size in zip(tensors, tensors[1:], sizes, strict=False)):\n"),
    ("tensors that overlap are put together", "S6", FUSER, "type(p) in PLAIN_TYPES and p.layout is torch.strided]) is not None", "p is None]) is not None"),
    ("a transposed weight is read row-major", "S6", RUN, "    return kind and tensor.is_contiguous() and", "    return kind and"),
    ("weights transposed in place are read row-major", "S6", FUSER, " or not all(map(is_contiguous, self._matrices)):", ":"),
    ("do_flatten=False moves weights", "S6", FUSER, "for group in groups if self._do_flatten else ():", "for group in groups:"),
    ("groups are exchanged in the wrong order", "S6", FUSER, "zip(optimizer.param_groups, plan.stepped, strict=True)", "zip(optimizer.param_groups, plan.stepped[::-1], strict=True)"),
    ("the learning rate of the first group is used for all", "S6", FUSER, '            group["params"] = stepped\n', '            group["params"] = stepped\n            group["lr"] = optimizer.param_groups[0]["lr"]\n'),
    ("momentum is not carried over to the next step", "S6", FUSER, "        optimizer.state.update({run.flat: dict(run.state) for run in plan.runs if run.state is not None})\n", ""),
    ("state comes to the first parameter of a run alone", "S6", RUN, "zip(self.states or (), parts, strict=True)", "zip((self.states or ())[:1], parts[:1], strict=True)"),
    ("steps are counted for the first parameter of a run alone", "S6", RUN, "            vector.copy_(found[key])\n", "            vector[0].copy_(found[key])\n"),
    ("parameters that have taken different numbers of steps are put together", "S6", RUN, "(value.shape, value.item()) if", "(value.shape,) if"),
    ("a gradient that is None counts as zero", "S6", FUSER, NO_GRAD, "    if p.grad is None and p.requires_grad:\n        p.grad = torch.zeros_like(p)\n" + NO_GRAD),
    ("new gradients are not copied into the flat one", "S6", RUN, "            if self._one_dimensional:\n", "            if self._copy_version:\n                pass\n            elif self._one_dimensional:\n"),
    ("gradients are always taken to lie as the weights do", "S6", RUN, "self._in_place = pointers[-1] == first + last and pointers == [first + offset for offset in self._offsets]", "self._in_place = True"),
    ("weights that were moved away are updated where they were", "S6", FUSER, " or (changed and pointers[:count] != self._pointers[:count]):", ":"),
    ("nobody is told of weights that were moved away", "S6", FUSER, "        if apart and self._check_flatten:\n", "        if False:\n"),
    ("groups that are added later are forgotten", "S6", FUSER, "        return len(optimizer.param_groups) == len(self._groups) and all(", "        optimizer.param_groups = optimizer.param_groups[: len(self._groups)]\n        return all("),
    ("state that was loaded is not seen", "S6", FUSER, "        if optimizer.state is not self.state:\n            return False\n", "        optimizer.state = self.state\n"),
    ("what ordinary steps did to the step count is not seen", "S6", RUN, "        for key, vector in self._vectors.items():\n            value = self.state[key]\n", "        for key, vector in ():\n            value = self.state[key]\n"),
    ("the closure runs after parameters were grouped", "S6", FUSER, "        if closure is not None:\n            with torch.enable_grad():\n", "        if closure is None and kwargs:\n            with torch.enable_grad():\n"),
    ("the closure's result is lost", "S6", FUSER, "            return result if self._loss is None else self._loss\n", "            return result\n"),
    ("hooks after a step see flat parameters", "S6", FUSER, "        after.move_to_end(_HOOK, last=False)\n", ""),
    ("hooks before a step do not run", "S6", FUSER, "        before[_HOOK] = self._exchange\n", "        before.clear()\n        before[_HOOK] = self._exchange\n"),
    ("each run is counted, not each group", "S6", FUSER, "+= plan.num_fused_groups", "+= len(plan.runs) + (len(plan.runs) > 1)"),
    ("nothing is counted where zero_grad took the gradients", "S6", FUSER, "+= plan.num_fused_groups", "+= plan.num_fused_groups * all(run._in_place for run in plan.runs)"),
    ("16-bit parameters are put together", "S6", FUSER, 'return not group.get("fused") and parameter.dtype in EXACT and', 'return not group.get("fused") and'),
    ("parameters with fused=True are put together", "S6", FUSER, 'return not group.get("fused") and parameter.dtype in EXACT and', "return parameter.dtype in EXACT and"),
    ("a running average that keeps nothing is put together", "S6", FUSER, " and not _replaces_average(group)", ""),
    ("Adafactor and its like are fused", "S6", VERIFY, "reason = known[cls] if cls in known else", "reason = None if cls in known else"),
    ("other classes are fused untried", "S6", VERIFY, "try_on_clones(optimizer, allow_inexact) if verify else None", "None"),
    ("an optimizer is fused twice", "S6", OPTIMIZER, "    if is_fused_optimizer(optimizer):\n        raise", "    if optimizer is None:\n        raise"),
    ("a gradient's order in memory is taken for its logical order unless it is square", "S6", RUN, COPIED, "torch._foreach_copy_(self._copied, [g if 0 in g.stride() or g.shape == g.shape[::-1] else g.permute(sorted(range(g.ndim), key=g.stride, reverse=True)).reshape(g.shape) for g in grads])"),
    ("gaps between the elements of a gradient are read", "S6", RUN, COPIED, "torch._foreach_copy_(self._copied, [g.as_strided(g.shape, p.stride()) if g.stride() == tuple(2 * s for s in p.stride()) else g for g, p in zip(grads, self.parameters, strict=True)])"),
    ("an expanded gradient counts for its first element alone", "S6", FUSER, NO_GRAD, "    if p.grad is not None and not p.grad.is_sparse and _is_expanded(p.grad):\n        p.grad = torch.zeros_like(p).flatten().index_fill_(0, torch.tensor([0]), float(p.grad.flatten()[0])).view(p.shape)\n" + NO_GRAD),
    ("an expanded gradient is taken for one number", "S6", FUSER, NO_GRAD, "    if p.grad is not None and not p.grad.is_sparse and _is_expanded(p.grad):\n        p.grad = torch.full_like(p, float(p.grad.flatten()[0]))\n" + NO_GRAD),
    ("gradients are None after a step", "S6", RUN, "        self.flat.grad = None\n", "        for tensor in (self.flat, *(self.parameters if self._copy is not None and self._copy._version == self._copy_version else ())):\n            tensor.grad = None\n"),
    ("a parameter with a sparse gradient is left out", "S6", FUSER, "if id(p) not in joined]", "if id(p) not in joined and not (p.grad is not None and p.grad.is_sparse)]"),
    ("rows that a sparse gradient repeats count once", "S6", FUSER, NO_GRAD, "    if p.grad is not None and p.grad.is_sparse:\n        p.grad = torch.zeros_like(p).index_copy_(0, p.grad._indices()[0], p.grad._values())\n" + NO_GRAD),
    ("sparse gradients are made dense where step() refuses them", "S6", FUSER, NO_GRAD, "    if p.grad is not None and p.grad.is_sparse:\n        p.grad = p.grad.to_dense()\n" + NO_GRAD),
    ("groups stay exchanged after a step that raised", "S6", FUSER, "            if self._exchanged is not None:  # the step raised\n", "            if self._exchanged is not None and self._plan is None:\n"),
    ("state of flat parameters stays after a step that raised", "S6", FUSER, "            if self._exchanged is not None:  # the step raised\n                self._restore(optimizer)\n", "            if self._exchanged is not None:\n                for group, parameters in zip(optimizer.param_groups, self._exchanged, strict=True):\n                    group[\"params\"] = parameters\n                self._exchanged = self._plan = None\n"),
    ("the loss of a step that raised is returned by the next one", "S6", FUSER, "            self._loss = None\n            if", "            if"),
    ("expanded gradients are copied together with others", "S6", FUSER, "    return any(size > 1 and not stride", "    return grad.ndim > 9 and any(size > 1 and not stride"),
]  # fmt: skip
