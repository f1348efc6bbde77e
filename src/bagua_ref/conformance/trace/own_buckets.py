"""Recording of the package's own buckets."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol

from torch import Tensor

from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import registration
from bagua_ref.comm_ops import (
    AsynchronousModelAverage,
    CentralizedErrorFeedback,
    CentralizedFullPrecision,
    CentralizedLowPrecision,
    CentralizedScatterGather,
    CommOp,
    Decentralized,
    Hierarchical,
    LowPrecisionDecentralized,
    LowRank,
    PythonOp,
    TopK,
)

__all__ = ["Notebook", "OwnBuckets"]

_ALGORITHMS: dict[type, str] = {
    CentralizedFullPrecision: "gradient_allreduce",
    CentralizedScatterGather: "gradient_allreduce",
    CentralizedLowPrecision: "bytegrad",
    CentralizedErrorFeedback: "bytegrad",
    Decentralized: "decentralized",
    LowPrecisionDecentralized: "low_precision_decentralized",
    AsynchronousModelAverage: "async",
    LowRank: "powersgd",
    TopK: "topk",
}
_QADAM = "MomentumBucket"
_LASTING = ("qadam", "async", "local_sgd", "diloco")
"""Once recognised, they remain the algorithm, whatever other operations they use."""
_ABOUT_ROUNDS = ("t", "fragment", "averages")
"""Of a bucket's ``about``, what changes from round to round; the others are options."""


class Notebook(Protocol):
    """The part of a `Recorder` that `OwnBuckets` writes to."""

    @property
    def recording(self) -> bool: ...  # noqa: D102 - each as in Recorder
    def begin(self, bucket: str, inputs: Any, info: Mapping[str, Any]) -> None: ...  # noqa: D102
    def end(self, bucket: str, outputs: Any, inputs: Any = None, info: Any = None) -> None: ...  # noqa: D102
    def forget(self, bucket: str) -> None: ...  # noqa: D102
    def describe_own(  # noqa: D102
        self, bucket: str, entry: dict[str, Any], algorithm: str | None, options: Mapping[str, Any]
    ) -> None: ...


class OwnBuckets:
    """An observer of this rank's buckets, which records the input and output of each operation.

    Buckets keep their names; those of the second module that communicates are called ``"1/0"``, ``"1/1"``, ... A bucket's second
    operation is recorded as a bucket ``"0#2"``.

    Args:
        recorder: receives the records.
    """

    def __init__(self, recorder: Notebook) -> None:
        self._recorder = recorder
        self._modules: list[str] = []
        self._algorithm: str | None = None
        self._described: dict[str, tuple[BaguaBucket, Any]] = {}
        self._ops: MutableMapping[BaguaBucket, list[Any]] = weakref.WeakKeyDictionary()  # some live for one round

    def before_op(self, bucket: BaguaBucket, op: Any, flat: Tensor) -> None:
        """Record the input: the flat tensor and, for a ring, its replicas unless they are the outputs of the previous step."""
        if not self._recorder.recording or not isinstance(op, CommOp | PythonOp):
            return
        if isinstance(op, PythonOp):
            if _QADAM in repr(op):
                self._algorithm = "qadam"
            return
        if isinstance(op, AsynchronousModelAverage):
            # Its input is the snapshot, which is known only afterwards.
            self._recorder.begin(self._name(bucket, op), lambda follows: {}, {"operation": type(op).__name__})
            return
        inner = op.leaders_op if isinstance(op, Hierarchical) else op
        options = _options_of(op)
        info: dict[str, Any] = {"operation": type(inner).__name__ if inner is not None else "another rank's", **options}
        if isinstance(op, Decentralized):
            info["ranks"] = op.num_ranks
        elif not isinstance(op, Hierarchical):
            info["ranks"] = op.comm.nranks()
        if isinstance(op, Decentralized):
            info["execution"] = op.step
        if isinstance(op, LowRank | TopK):
            info |= op.about_round()
        info.update({name: bucket.about[name] for name in _ABOUT_ROUNDS if name in bucket.about})
        options.update({name: value for name, value in bucket.about.items() if name not in ("algorithm", *_ABOUT_ROUNDS)})
        if self._algorithm not in _LASTING:
            self._algorithm = bucket.about.get("algorithm") or _ALGORITHMS.get(type(inner)) or self._algorithm
        name = self._name(bucket, op)

        def inputs(follows: bool) -> dict[str, Tensor]:
            found = {"x": _copy(_as_recorded(op, flat))}
            if isinstance(inner, LowPrecisionDecentralized) and not follows:
                replicas = {"weight": inner.weight, "left": inner.left_peer_weight, "right": inner.right_peer_weight}
                found.update({role: _copy(replica) for role, replica in replicas.items()})
            if isinstance(op, LowRank | TopK):
                found |= {role: _copy(kept) for role, kept in op.kept().items()}
            return found

        self._recorder.begin(name, inputs, info)
        self._describe(name, bucket, op, flat, options)

    def after_op(self, bucket: BaguaBucket, op: Any, flat: Tensor) -> None:
        """Record the output; the result of a decentralized operation is recorded after its copy-back."""
        if not self._recorder.recording or not isinstance(op, CommOp) or isinstance(op, Decentralized):
            return
        name = self._name(bucket, op)
        if not isinstance(op, AsynchronousModelAverage):
            kept = op.kept() if isinstance(op, LowRank | TopK) else {}
            self._recorder.end(name, lambda: {"x": _copy(_as_recorded(op, flat)), **{role: _copy(x) for role, x in kept.items()}})
        elif op.get_status() == "stopped":
            self._recorder.forget(name)
        else:
            snapshot, reduced = op.last_round
            self._recorder.end(name, lambda: {"reduced": _copy(reduced)}, lambda: {"snapshot": _copy(snapshot)})
            self._algorithm = "async"
            self._describe(name, bucket, op, flat, {})

    def after_copy(self, bucket: BaguaBucket, flat: Tensor) -> None:
        """Record a decentralized operation's result, and its graph if it came from a function."""
        op = bucket.running
        if self._recorder.recording and isinstance(op, Decentralized):
            info = {"graph": json.dumps(op.graph)} if callable(op.peer_selection_mode) else None
            self._recorder.end(self._name(bucket, op), lambda: {"x": _copy(flat)}, info=info)

    def _describe(self, name: str, bucket: BaguaBucket, op: Any, flat: Tensor, options: dict[str, Any]) -> None:
        if self._described.get(name) != (bucket, op):
            self._described[name] = bucket, op
            self._recorder.describe_own(name, _entry(bucket, flat), self._algorithm, options)

    def _name(self, bucket: BaguaBucket, op: Any) -> str:
        module = registration(bucket.tensors[0]).module_name
        if module not in self._modules:
            self._modules.append(module)
        place = self._modules.index(module)
        ops = self._ops.setdefault(bucket, [])
        if op not in ops:
            ops.append(op)
        number = f"#{ops.index(op) + 1}" if ops[0] is not op else ""
        return f"{place}/{bucket.name}{number}" if place else f"{bucket.name}{number}"


def _options_of(op: Any) -> dict[str, Any]:
    """Return the options of the algorithm that can be read off an operation."""
    inner = op.leaders_op if isinstance(op, Hierarchical) else op
    if isinstance(op, Decentralized):
        mode = "function" if callable(op.peer_selection_mode) else op.peer_selection_mode
        return {"hierarchical": op.intra is not None, "peer_selection_mode": mode}
    if isinstance(op, LowRank | TopK):
        return op.options
    options: dict[str, Any] = {"hierarchical": isinstance(op, Hierarchical)}
    if isinstance(inner, CentralizedFullPrecision | CentralizedScatterGather | CentralizedLowPrecision | CentralizedErrorFeedback):
        options["average"] = inner.average
    if isinstance(inner, CentralizedLowPrecision | CentralizedErrorFeedback | LowPrecisionDecentralized):
        options["compression"] = inner.codec.name
    if isinstance(inner, CentralizedScatterGather):
        options["scattergather"] = True
    return options


def _as_recorded(op: Any, flat: Tensor) -> Tensor:
    """Return ``flat`` in the order that is recorded: that of the wire, but matrices row-major, as is what is kept of them."""
    return op.row_major(flat) if isinstance(op, LowRank) else flat


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _entry(bucket: BaguaBucket, flat: Tensor) -> dict[str, Any]:
    tensors = [{"name": registration(t).name, "shape": list(t.shape)} for t in bucket.tensors]
    if bucket.padding_tensor is not None:
        tensors.append({"name": registration(bucket.padding_tensor).name, "shape": [bucket.padding_tensor.numel()]})
    return {"dtype": str(flat.dtype).removeprefix("torch."), "elements": flat.numel(), "tensors": tensors}
