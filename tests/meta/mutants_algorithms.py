# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of whole algorithms: name, clause, file, original text, mutated text."""

from __future__ import annotations

BASE, BYTES, FULL, DEC, QADAM, OPTIMIZER, MOMENTUM, ASYNC = (
    f"algorithms/{name}.py"
    for name in (
        "base",
        "bytegrad",
        "gradient_allreduce",
        "decentralized",
        "q_adam",
        "q_adam_optimizer",
        "momentum",
        "async_model_average",
    )
)
STATE, BUCKETS, WRAPPED = (f"data_parallel/{name}.py" for name in ("state_broadcast", "bucketing", "wrapped_module"))
FLAT, READY, ROUND, RINGOP = (
    "flat_storage.py",
    "scheduling/readiness.py",
    "comm_ops/asynchronous.py",
    "comm_ops/low_precision_decentralized.py",
)
OPEN = "            filled = bucket_bytes  # nothing is open at a change of dtype or device\n            for tensor in tensors:\n                if (tensor.dtype, tensor.device) == (dtype, device):\n                    if filled >= bucket_bytes:\n"
IN_ORDER = "        if self._missing[place] or place > self._next:\n            return []\n        while self._next < len(self._items) and self._missing[self._next] == 0:\n            self._next += 1\n        return list(range(place, self._next))\n"
MARKED = '        if place < self._next:\n            if self.hold or not self.complete:\n                raise ValueError(f"{item} was marked again in a round in which its bucket had already been scheduled")\n            self.reset()\n        if self._unmarked.pop(item, None) is None:\n            return []\n        self._missing[place] -= 1\n'
DIVIDED = 'root.div_(correction).add_(group["eps"])'

ALGORITHMS: list[tuple[str, str, str, str, str]] = [
    ("each rank starts from its own weights", "S5", STATE, "    broadcast_coalesced([local(tensor).detach() for tensor in tensors], source, comm)", "    comm.barrier()"),
    ("weights are the last rank's", "S5", STATE, "for tensor in tensors], source, comm)", "for tensor in tensors], comm.nranks() - 1, comm)"),
    ("parameters enter buckets from the first to the last", "S2.1", BASE, "for name, parameter in reversed(bagua_ddp.bagua_build_params())", "for name, parameter in bagua_ddp.bagua_build_params()"),
    ("a bucket is closed before it would be too large", "S2.1", BUCKETS, "if filled >= bucket_bytes:", "if filled >= bucket_bytes or 0 < filled < filled + tensor.numel() * tensor.element_size() > bucket_bytes:"),
    ("a bucket that is just full takes one more", "S2.1", BUCKETS, OPEN, OPEN.replace("bucket_bytes  #", "bucket_bytes + 1  #").replace("filled >= bucket_bytes", "filled > bucket_bytes")),
    ("elements are counted, not bytes", "S2.1", BUCKETS, "filled += tensor.numel() * tensor.element_size()", "filled += tensor.numel()"),
    ("padding is one", "S2.2", FLAT, "            self._flat[self.filled :] = 0\n        effective =", "            self._flat[self.filled :] = 1\n        effective ="),
    ("padding repeats the last element", "S2.2", FLAT, "            self._flat[self.filled :] = 0\n        effective =", "            self._flat[self.filled :] = self._flat[self.filled - 1]\n        effective ="),
    ("twice the alignment", "S2.2", FLAT, "self.filled + -self.filled % alignment", "self.filled + -self.filled % (2 * alignment if alignment > 1 else 1)"),
    ("a bucket is scheduled as soon as it is complete", "S2.4", READY, MARKED + IN_ORDER, MARKED.replace("place < self._next", "self._missing[place] == 0") + "        if self._missing[place]:\n            return []\n        self._next += 1\n        return [place]\n"),
    ("marks are not cleared", "S2.4", READY, "self._unmarked = self._bucket_of.copy()", "self._unmarked = getattr(self, \"_unmarked\", self._bucket_of.copy())"),
    ("only the first complete bucket is scheduled", "S2.4", READY, "        while self._next < len", "        if self._next < len"),
    ("what a rank does not use is an error", "S2.5", WRAPPED, "end_backward(self._find_unused_parameters)", "end_backward(False)"),
    ("a parameter that is not used sends its last gradient again", "S2.5", FLAT, "tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)", "tensor = self._views[place].clone()"),
    ("always the sum", "S5.1", FULL, "average=self.average, group=", "average=False, group="),
    ("always the mean of gradients", "S5.1", FULL, "average=self.average, group=", "average=True, group="),
    ("the optimizer does not wait for the exchange", "S5.1", BASE, "return bagua_ddp._bagua_backend.wait_pending_comm_ops", "return lambda: None"),
    ("steps before the first are skipped", "S5.1", WRAPPED, "self._synchronizing = not skipping", "self._synchronizing = not skipping and self.bagua_train_step_counter > 0"),
    ("bytegrad never is hierarchical", "S5.2", BYTES, "            hierarchical=self.hierarchical,\n", "            hierarchical=False,\n"),
    ("bytegrad always averages", "S5.2", BYTES, "            average=self.average,\n", "            average=True,\n"),
    ("bytegrad does not compress", "S5.2", BYTES, "            compression=self.compression,\n            group=", "            compression=None,\n            group="),
    ("hierarchical, buckets are aligned for leaders only", "S5.2", BYTES, "math.lcm(alignment, self.process_group.get_inter_node_communicator().nranks())", "math.lcm(self.process_group.get_inter_node_communicator().nranks())"),
    ("weights are averaged one step late", "S5.3", DEC, "self._averaging = step % self.communication_interval == 0", "self._averaging = (step + 1) % self.communication_interval == 0"),
    ("the interval has no say", "S5.3", DEC, "self._averaging = step % self.communication_interval == 0", "self._averaging = True"),
    ("the average is not copied back", "S5.3", DEC, "            bucket._decentralized_op.copy_back_peer_weight(bucket)\n", "            del bucket\n"),
    ("the average is copied back before it is there", "S5.3", DEC, "                bagua_ddp._bagua_backend.wait_pending_comm_ops()\n                self._copy_back()", "                self._copy_back()"),
    ("steps without averaging change the peer, too", "S5.3", DEC, "            self._averaging = step % self.communication_interval == 0\n", "            self._averaging = step % self.communication_interval == 0\n            for bucket in bagua_ddp.bagua_buckets:\n                bucket._decentralized_op.step = step\n"),
    ("the peer is the same at every step", "S5.3", DEC, "            self._averaging = step % self.communication_interval == 0\n", "            self._averaging = step % self.communication_interval == 0\n            for bucket in bagua_ddp.bagua_buckets:\n                bucket._decentralized_op.step = 0\n"),
    ("decentralized never is hierarchical", "S5.3", DEC, "bagua_tensor(bucket.flattened_tensor()), self.hierarchical, self", "bagua_tensor(bucket.flattened_tensor()), False, self"),
    ("a step on the ring comes one optimizer step late", "S5.4", DEC, "            if step % self.communication_interval == 0:", "            if (step + 1) % self.communication_interval == 0:"),
    ("neighbours' replicas start at zero", "S5.4", DEC, "(weight.clone(), weight.clone()) if ring.rank() < 0 else trade_with_neighbours(weight, ring)", "(weight * 0, weight * 0)"),
    ("the ring never is hierarchical", "S5.4", DEC, "            self.hierarchical,\n            self.compression,\n", "            False,\n            self.compression,\n"),
    ("a replica is updated before the change is decoded", "S5.4", RINGOP, "            codec.decompress(change, 1, out=x)  # x can be scratch until it gets its own change\n            kernels.add_(replica, x)\n", "            kernels.add_(replica, x)\n            codec.decompress(change, 1, out=x)\n"),
    ("replicas are made anew after every step", "S5.4", RINGOP, "        W.copy_(x)\n", "        W.copy_(x); L.copy_(x); R.copy_(x)\n"),
    ("the warm-up is one step longer", "S5.5", QADAM, "return self.optimizer_step_id >= self.warmup_steps", "return self.optimizer_step_id > self.warmup_steps"),
    ("compression begins one step early", "S5.5", QADAM, "return self.optimizer_step_id >= self.warmup_steps", "return self.optimizer_step_id >= self.warmup_steps - 1"),
    ("moments are renewed at the last step of the warm-up, too", "S5.5", OPTIMIZER, "            if s < self.warmup_steps:\n", "            if s <= self.warmup_steps:\n"),
    ("momenta lose bits in warm-up already", "S5.5", QADAM, "bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)", "bucket.append_centralized_synchronous_op(False, True, True, \"MinMaxUInt8\", self.process_group)"),
    ("eps is added before the correction", "S5.5", OPTIMIZER, DIVIDED, "root.add_(group[\"eps\"]).div_(correction)"),
    ("eps is under the root", "S5.5", OPTIMIZER, DIVIDED, "(v + group[\"eps\"]).sqrt().div_(correction)"),
    ("m is not corrected for its start", "S5.5", OPTIMIZER, "float(group[\"lr\"]) / (1 - beta1**s)", "float(group[\"lr\"])"),
    ("v is corrected as of the end of the warm-up", "S5.5", OPTIMIZER, "(1 - beta2**s) ** 0.5", "(1 - beta2 ** group[\"warmup_steps\"]) ** 0.5"),
    ("v goes on", "S5.5", OPTIMIZER, "        state[\"step\"] += 1\n", "        state[\"step\"] += 1\n        state[\"exp_avg_sq\"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)\n"),
    ("weight decay goes on", "S5.5", OPTIMIZER, "        state[\"step\"] += 1\n", "        state[\"step\"] += 1\n        parameter.mul_(1 - group[\"lr\"] * group[\"weight_decay\"])\n"),
    ("beta1 is group 0's", "S5.5", MOMENTUM, "gradients, beta1[run[0]])", "gradients, self._optimizer.param_groups[0][\"betas\"][0])"),
    ("what is left of momenta is added twice", "S5.5", MOMENTUM, "            self._kernels.update_momentum_(momenta[start : start + len(gradients)], gradients, beta1[run[0]])\n", "            self._kernels.update_momentum_(momenta[start : start + len(gradients)], gradients, beta1[run[0]])\n            self._kernels.update_momentum_(momenta[start : start + len(gradients)], gradients, beta1[run[0]])\n"),
    ("the averaged warm-up is one step longer", "S5.6", ASYNC, "if self._warming_up and self.step >= self.warmup_steps:", "if self._warming_up and self.step > self.warmup_steps:"),
    ("rounds begin at the first forward after the warm-up", "S5.6", ASYNC, "self.step > self.warmup_steps:", "self.step >= self.warmup_steps:"),
    ("rounds begin in the warm-up", "S5.6", ASYNC, "self.step > self.warmup_steps:", "self.step > 0:"),
    ("abort does not wait for the last round", "S5.6", ASYNC, "            self._thread.join()\n", ""),
    ("a forward after an abort starts rounds again", "S5.6", ASYNC, "        if self.state is State.IDLE:\n            self._go(State.RUNNING)", "        self.resume()\n        if self.state is State.IDLE:\n            self._go(State.RUNNING)"),
    ("an abort before the first round is forgotten", "S5.6", ASYNC, "        if self.state in (State.IDLE, State.RUNNING):\n            idle", "        if self.state is State.RUNNING:\n            idle"),
    ("resume does not", "S5.6", ASYNC, "        if self.state is State.ABORTED:\n            for op in self.ops:\n                op.reset()", "        if False:\n            for op in self.ops:\n                op.reset()"),
    ("an abort ends with an average", "S5.6", ROUND, "            self._stopped = True\n            return", "            self._stopped = True\n            self.comm.allreduce_inplace(x, ReduceOp.AVG)\n            return"),
    ("ranks stop by themselves", "S5.6", ROUND, "self.comm.allreduce_inplace(flag, ReduceOp.MIN)", "self.comm.allreduce_inplace(flag.clone(), ReduceOp.MIN)"),
    ("the mean takes the place of the weights", "S3.6", ROUND, "self.kernels.async_average_(x, self._reduced, self._snapshot, self.comm.nranks())", "x.copy_(self._reduced / self.comm.nranks())"),
    ("the snapshot is taken after the sum", "S3.6", ROUND, "self.kernels.async_average_(x, self._reduced, self._snapshot, self.comm.nranks())", "self.kernels.async_average_(x, self._reduced, x.clone(), self.comm.nranks())"),
    ("rounds add the sum", "S3.6", ROUND, "self._snapshot, self.comm.nranks())", "self._snapshot, 1)"),
    ("the first snapshot serves all rounds", "S3.6", ROUND, "        self._snapshot.copy_(x)\n", "        if not hasattr(self, \"_first\"):\n            self._first = self._snapshot.copy_(x)\n"),
    ("one rank's weights are left out", "S3.6", ROUND, "        self._reduced.copy_(self._snapshot)\n", "        self._reduced.copy_(self._snapshot * (self.comm.rank() > 0))\n"),
]  # fmt: skip
"""Left out, as no training distinguishes them from the reference:

- gradient_allreduce and qadam's warm-up never or always hierarchical: the same mean up to rounding.
- the order in which buckets of different dtypes are scheduled: it is the same on all ranks.
- no zero gradient for a parameter that this rank does not use: it is replaced when the bucket is loaded.
- padding that keeps the last round's result: it comes back as zero, since zero is a level of every chunk that contains it; it is
  NaN only after an overflow, when the weights of its chunk are NaN already.
- rounds that do not take the weight lock: gradients do not depend on the weights here, and a simulated rank's step is never
  interrupted.
- another sync_interval_ms: only the time of the first round is checked.
"""
