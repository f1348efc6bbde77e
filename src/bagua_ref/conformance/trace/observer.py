"""Recording of the operations of the package's own buckets."""

from __future__ import annotations

import json
import weakref
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import registration
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
from bagua_ref.conformance.formats import name_of

__all__ = ["TraceObserver"]

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


class TraceObserver:
    """An observer of this rank's buckets, which records the input and output of each operation.

    Buckets keep their names; those of the second module that communicates are called ``"1/0"``,
    ``"1/1"``, ... A bucket's second operation is recorded as a bucket ``"0#2"``.

    Args:
        recorder: the `Recorder` that receives the records.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._modules: list[str] = []
        self._algorithm: str | None = None
        self._described: dict[str, tuple[BaguaBucket, Any]] = {}
        # some live for one round
        self._ops: MutableMapping[BaguaBucket, list[Any]] = weakref.WeakKeyDictionary()

    def before_op(self, bucket: BaguaBucket, op: Any, flat: Tensor) -> None:
        """Record the input: the flat tensor and, for a ring, its replicas unless they are the
        outputs of the previous step.
        """
        if not self._recorder.recording or not isinstance(op, CommOp | PythonOp):
            return
        if isinstance(op, PythonOp):
            self._algorithm = "qadam" if _QADAM in repr(op) else self._algorithm
            return
        if isinstance(op, AsynchronousModelAverage):
            # Its input is the snapshot, which is known only afterwards.
            self._recorder._begin(
                self._name(bucket, op), lambda follows: {}, {"operation": type(op).__name__}
            )
            return
        inner = op.leaders_op if isinstance(op, Hierarchical) else op
        options = _options_of(op, inner)
        of_round = {name: value for name, value in bucket.about.items() if name in _ABOUT_ROUNDS}
        info = {
            "operation": type(inner).__name__ if inner is not None else "another rank's",
            **options,
            **_info_of(op),
            **of_round,
        }
        options = {
            **options,
            **{
                name: x
                for name, x in bucket.about.items()
                if name not in ("algorithm", *_ABOUT_ROUNDS)
            },
        }
        if self._algorithm not in _LASTING:
            self._algorithm = (
                bucket.about.get("algorithm") or _ALGORITHMS.get(type(inner)) or self._algorithm
            )

        def inputs(follows: bool) -> dict[str, Tensor]:
            if isinstance(inner, LowPrecisionDecentralized) and not follows:
                return _copies(
                    x=flat,
                    weight=inner.weight,
                    left=inner.left_peer_weight,
                    right=inner.right_peer_weight,
                )
            return _state(op, flat)

        name = self._name(bucket, op)
        self._recorder._begin(name, inputs, info)
        self._describe(name, bucket, op, flat, options)

    def after_op(self, bucket: BaguaBucket, op: Any, flat: Tensor) -> None:
        """Record the output; the result of a decentralized operation is recorded after its
        copy-back.
        """
        if (
            not self._recorder.recording
            or not isinstance(op, CommOp)
            or isinstance(op, Decentralized)
        ):
            return
        name = self._name(bucket, op)
        if not isinstance(op, AsynchronousModelAverage):
            self._recorder._end(name, lambda: _state(op, flat))
        elif op.get_status() == "stopped":
            self._recorder._drop(name)
        else:
            snapshot, reduced = op.last_round
            self._recorder._end(
                name, lambda: _copies(reduced=reduced), lambda: _copies(snapshot=snapshot)
            )
            self._algorithm = "async"
            self._describe(name, bucket, op, flat, {})

    def after_copy(self, bucket: BaguaBucket, flat: Tensor) -> None:
        """Record a decentralized operation's result, and its graph if it came from a function."""
        op = bucket.running
        if self._recorder.recording and isinstance(op, Decentralized):
            info = {"graph": json.dumps(op.graph)} if callable(op.peer_selection_mode) else None
            self._recorder._end(self._name(bucket, op), lambda: _copies(x=flat), info=info)

    def _describe(
        self, name: str, bucket: BaguaBucket, op: Any, flat: Tensor, options: dict[str, Any]
    ) -> None:
        if self._described.get(name) == (bucket, op):
            return
        self._described[name] = bucket, op
        tensors = [{"name": registration(t).name, "shape": list(t.shape)} for t in bucket.tensors]
        if bucket.padding_tensor is not None:
            tensors.append(
                {
                    "name": registration(bucket.padding_tensor).name,
                    "shape": [bucket.padding_tensor.numel()],
                }
            )
        entry = {"dtype": name_of(flat.dtype), "elements": flat.numel(), "tensors": tensors}
        self._recorder._describe(name, entry, self._algorithm, options)

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


def _options_of(op: Any, inner: Any) -> dict[str, Any]:
    """Return the options of the algorithm that can be read off an operation, or off what it runs
    between leaders.
    """
    if isinstance(op, Decentralized):
        mode = "function" if callable(op.peer_selection_mode) else op.peer_selection_mode
        return {"hierarchical": op.intra is not None, "peer_selection_mode": mode}
    if isinstance(op, LowRank | TopK):
        return op.options
    options: dict[str, Any] = {"hierarchical": isinstance(op, Hierarchical)}
    if isinstance(
        inner,
        CentralizedFullPrecision
        | CentralizedScatterGather
        | CentralizedLowPrecision
        | CentralizedErrorFeedback,
    ):
        options["average"] = inner.average
    if isinstance(
        inner, CentralizedLowPrecision | CentralizedErrorFeedback | LowPrecisionDecentralized
    ):
        options["compression"] = inner.codec.name
    if isinstance(inner, CentralizedScatterGather):
        options["scattergather"] = True
    return options


def _info_of(op: CommOp) -> dict[str, Any]:
    """Return the information that a replay needs of one execution."""
    if isinstance(op, Hierarchical):
        return {}
    if isinstance(op, Decentralized):
        return {"ranks": op.num_ranks, "execution": op.step}
    return {
        "ranks": op.comm.nranks(),
        **(op.about_round() if isinstance(op, LowRank | TopK) else {}),
    }


def _state(op: CommOp, flat: Tensor) -> dict[str, Tensor]:
    """Return copies of ``flat``, with matrices row-major as is what is kept of them, and of what
    the operation keeps.
    """
    kept = op.kept() if isinstance(op, LowRank | TopK) else {}
    return _copies(x=op.row_major(flat) if isinstance(op, LowRank) else flat, **kept)


def _copies(**tensors: Tensor) -> dict[str, Tensor]:
    return {role: tensor.detach().to("cpu", copy=True) for role, tensor in tensors.items()}
