# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the fused optimizer: name, clause, file, original text, mutated text."""

from __future__ import annotations

OPTIMIZER, FUSER, GROUPING, LAYOUT, PLAN, RUN, VERIFY = (
    f"contrib/fuse/{name}.py" for name in ("optimizer", "fuser", "grouping", "layout", "plan", "run", "verify")
)
FUSED_OPTIMIZERS: list[tuple[str, str, str, str, str]] = [
    ("offset 0 of a larger storage is taken for the weights", "S6", LAYOUT, "// tensors[0].element_size(),), (1,))", "// tensors[0].element_size(),), (1,), 0)"),
    ("tensors with gaps between them are taken for neighbours", "S6", LAYOUT, "before.element_size() == after.data_ptr()", "before.element_size() <= after.data_ptr()"),
    ("tensors that overlap are put together", "S6", LAYOUT, "        if start < furthest[0]:\n", "        if False:\n"),
    ("a transposed weight is read row-major", "S6", LAYOUT, "        and tensor.is_contiguous()\n", ""),
    ("do_flatten=False moves weights", "S6", FUSER, "        if not self._do_flatten:\n            return\n", ""),
    ("groups are exchanged in the wrong order", "S6", FUSER, "zip(optimizer.param_groups, plan.groups, strict=True)", "zip(optimizer.param_groups, plan.groups[::-1], strict=True)"),
    ("the learning rate of the first group is used for all", "S6", FUSER, '            group["params"] = planned.stepped\n', '            group["params"] = planned.stepped\n            group["lr"] = optimizer.param_groups[0]["lr"]\n'),
    ("momentum is not carried over to the next step", "S6", FUSER, "            if run.block_states is not None:\n", "            if False:\n"),
    ("state comes to the first parameter of a run alone", "S6", RUN, "zip(self.states, parts, strict=True)", "zip(self.states[:1], parts[:1], strict=True)"),
    ("steps are counted for the first parameter of a run alone", "S6", RUN, "        self._vector.copy_(self._repeated)\n", "        self._vector[0].copy_(self.values[0])\n"),
    ("parameters that have taken different numbers of steps are put together", "S6", GROUPING, "value.shape, value.item()))", "value.shape))"),
    ("a gradient that is None counts as zero", "S6", PLAN, "                if grad is None:\n", "                if grad is None and parameter.requires_grad:\n                    grad = parameter.grad = torch.zeros_like(parameter)\n                if grad is None:\n"),
    ("new gradients are not copied into the flat one", "S6", RUN, "        with torch.no_grad():\n            if self._one_dimensional:\n", "        with torch.no_grad():\n            if self._copy_version:\n                pass\n            elif self._one_dimensional:\n"),
    ("gradients are always taken to lie as the weights do", "S6", RUN, "self._in_place = pointers[-1] == first + self._offsets[-1] and pointers == [first + offset for offset in self._offsets]", "self._in_place = True"),
    ("weights that were moved away are updated where they were", "S6", PLAN, "            if pointers[:count] != self._pointers[:count]:\n                return False\n", ""),
    ("nobody is told of weights that were moved away", "S6", FUSER, "        if left and self._check_flatten:\n", "        if False:\n"),
    ("groups that are added later are forgotten", "S6", PLAN, "        if len(optimizer.param_groups) != len(self.groups):\n            return False\n        for group, planned in zip(optimizer.param_groups, self.groups, strict=True):", "        for group, planned in zip(optimizer.param_groups, self.groups):"),
    ("state that was loaded is not seen", "S6", PLAN, "        if optimizer.state is not self.state or len(self.state) != len(self._states):\n            return False\n        if self.state.untouched:\n            return True\n", "        optimizer.state = self.state\n        return True\n"),
    ("what ordinary steps did to the step count is not seen", "S6", RUN, "        if torch.equal(self._vector, self._repeated):\n            return True\n        self._of_blocks[:] = self._vector[0]\n        return torch.equal(self._vector, self._repeated)\n", "        return True\n"),
    ("the closure runs after parameters were grouped", "S6", FUSER, "        if closure is not None:\n            with torch.enable_grad():\n", "        if closure is None and kwargs:\n            with torch.enable_grad():\n"),
    ("the closure's result is lost", "S6", FUSER, "            return result if self._loss is None else self._loss\n", "            return result\n"),
    ("hooks after a step see flat parameters", "S6", FUSER, "        after.move_to_end(_HOOK, last=False)\n", ""),
    ("hooks before a step do not run", "S6", FUSER, "        before[_HOOK] = self._exchange\n", "        before.clear()\n        before[_HOOK] = self._exchange\n"),
    ("each run is counted, not each group", "S6", FUSER, "+= plan.num_fused_groups", "+= len(plan.runs) + (len(plan.runs) > 1)"),
    ("nothing is counted where zero_grad took the gradients", "S6", FUSER, "+= plan.num_fused_groups", "+= plan.num_fused_groups * all(run._in_place for run in plan.runs)"),
    ("16-bit parameters are put together", "S6", PLAN, 'return not group.get("fused") and dtype in EXACT and', 'return not group.get("fused") and'),
    ("parameters with fused=True are put together", "S6", PLAN, 'return not group.get("fused") and dtype in EXACT and', "return dtype in EXACT and"),
    ("a running average that keeps nothing is put together", "S6", PLAN, " and not _replaces_average(group)", ""),
    ("Adafactor and its like are fused", "S6", VERIFY, "reason = known[cls] if cls in known else", "reason = None if cls in known else"),
    ("other classes are fused untried", "S6", VERIFY, "try_on_clones(optimizer, allow_inexact) if verify else None", "None"),
    ("an optimizer is fused twice", "S6", OPTIMIZER, "    if is_fused_optimizer(optimizer):\n        raise", "    if optimizer is None:\n        raise"),
    ("a gradient's order in memory is taken for its logical order unless it is square", "S6", RUN, "torch._foreach_copy_(self._copied, grads)", "torch._foreach_copy_(self._copied, [g if 0 in g.stride() or g.shape == g.shape[::-1] else g.permute(sorted(range(g.ndim), key=g.stride, reverse=True)).reshape(g.shape) for g in grads])"),
    ("gaps between the elements of a gradient are read", "S6", RUN, "torch._foreach_copy_(self._copied, grads)", "torch._foreach_copy_(self._copied, [g.as_strided(g.shape, p.stride()) if g.stride() == tuple(2 * s for s in p.stride()) else g for g, p in zip(grads, self.parameters, strict=True)])"),
    ("an expanded gradient counts for its first element alone", "S6", PLAN, "                grad = parameter.grad\n                if grad is None:\n", "                grad = parameter.grad\n                if grad is not None and not grad.is_sparse and _is_expanded(grad):\n                    grad = parameter.grad = torch.zeros_like(parameter).flatten().index_fill_(0, torch.tensor([0]), float(grad.flatten()[0])).view(parameter.shape)\n                if grad is None:\n"),
    ("an expanded gradient is taken for one number", "S6", PLAN, "                grad = parameter.grad\n                if grad is None:\n", "                grad = parameter.grad\n                if grad is not None and not grad.is_sparse and _is_expanded(grad):\n                    grad = parameter.grad = torch.full_like(parameter, float(grad.flatten()[0]))\n                if grad is None:\n"),
    ("gradients are None after a step", "S6", RUN, "        copy = self._copy\n        for block in self.blocks:\n            block.grad = None\n", "        copy = self._copy\n        for tensor in (*self.blocks, *(self.parameters if copy is not None and copy._version == self._copy_version else ())):\n            tensor.grad = None\n"),
    ("a parameter with a sparse gradient is left out", "S6", PLAN, "if id(parameter) not in in_runs]", "if id(parameter) not in in_runs and not (parameter.grad is not None and parameter.grad.is_sparse)]"),
    ("rows that a sparse gradient repeats count once", "S6", PLAN, "                grad = parameter.grad\n                if grad is None:\n", "                grad = parameter.grad\n                if grad is not None and grad.is_sparse:\n                    grad = parameter.grad = torch.zeros_like(parameter).index_copy_(0, grad._indices()[0], grad._values())\n                if grad is None:\n"),
    ("sparse gradients are made dense where step() refuses them", "S6", PLAN, "                grad = parameter.grad\n                if grad is None:\n", "                grad = parameter.grad\n                if grad is not None and grad.is_sparse:\n                    grad = parameter.grad = grad.to_dense()\n                if grad is None:\n"),
    ("groups stay exchanged after a step that raised", "S6", FUSER, "            if self._groups is not None:  # the step raised\n", "            if self._groups is not None and self._plan is None:\n"),
    ("state of flat parameters stays after a step that raised", "S6", FUSER, "                self._put_back_partly(optimizer)\n", "                for group, parameters in self._groups:\n                    group[\"params\"] = parameters\n                self._groups = self._plan = None\n"),
    ("a group's step is not counted if a later group raises", "S6", FUSER, "            with contextlib.suppress(RuntimeError):  # it raised between two blocks, so that their counts differ\n                run.push(states, optimizer.state)\n", "            pass\n"),
    ("the loss of a step that raised is returned by the next one", "S6", FUSER, "            self._loss = None\n            if", "            if"),
    ("expanded gradients are copied together with others", "S6", PLAN, "    return any(size > 1 and not stride", "    return grad.ndim > 9 and any(size > 1 and not stride"),
]  # fmt: skip
