"""`Recorder`: records the inputs and outputs of every bucket operation during training."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.runtime import World, current_world
from bagua_ref.conformance.formats import name_of
from bagua_ref.conformance.trace.files import Record, check_int, json_values, line_of, named_tensors
from bagua_ref.conformance.trace.observer import TraceObserver
from bagua_ref.conformance.trace.rank_recorder import RankRecorder

__all__ = ["Recorder"]


class Recorder(RankRecorder):
    """Records the inputs and outputs of every bucket operation on this rank, step by step, into
    files.

    Modules wrapped by ``with_bagua`` or `bagua_ref.data_parallel.DistributedDataParallel` are
    recorded automatically, whether they were wrapped before or after. In any other trainer, call
    `before_op`, `after_op` and `step`. Every rank records into the same directory; ``bagua-ref
    trace check`` then replays all ranks.

    A step ends at `step`, or when a bucket runs a second time. It is written then, or as soon as
    all buckets of the previous step have run again. After a crash, all complete steps are there. An
    error in writing the files never disturbs training: recording stops with a warning.

    Args:
        directory: this rank writes into ``directory/rank<r>``, which must not hold a trace yet.
        every: record the steps divisible by this number.
        buckets: names of the buckets to record, or the fraction of them to record, drawn for each
            step. Buckets are recorded whole.
        seed: seed of that draw; must be the same on all ranks.
        max_bytes: the most bytes that this rank may write; None: no limit. Recording stops at the
            limit, and the manifest says so.
        algorithm: name of the training algorithm, for the manifest; None: detected for the
            package's own algorithms.
        options: options of the algorithm, likewise: ``{"hierarchical": False}``.
        rank: this rank; None: taken from bagua_ref, torch.distributed or the environment.
        world_size: number of ranks; None: likewise.
        nodes: number of ranks on each node, in rank order; None: as bagua_ref knows them, otherwise
            all on one node.

    Attributes:
        directory: as given.
        stopped: why recording stopped early, or None.
        steps_written: number of steps written.
        bytes_written: size of their files.

    Raises:
        ValueError: an argument is out of range; on entering: the directory holds a trace of this
            rank.
        TypeError: an argument is of another type.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with Recorder(directory, rank=0, world_size=1) as recorder:
    ...         recorder.before_op("all", torch.ones(3))
    ...         recorder.after_op("all", torch.ones(3))
    ...         recorder.step()
    ...     recorder.steps_written
    1
    """

    _advice = ". Use every=, buckets= or max_bytes= to change how much is recorded"

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        buckets: float | Collection[str] = 1.0,
        seed: int = 0,
        max_bytes: int | None = 2**30,
        algorithm: str | None = None,
        options: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        nodes: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(directory, str | Path):
            raise TypeError(f"directory={directory!r} must be a path")
        check_int("every", every, 1)
        check_int("seed", seed)
        allowed = (
            f"buckets={buckets!r} must be a fraction above 0 and up to 1, or a list of bucket"
            " names, at least one"
        )
        if isinstance(buckets, bool | str):
            raise TypeError(allowed)
        if isinstance(buckets, int | float):
            valid = 0 < buckets <= 1
        else:
            valid = bool(buckets) and all(isinstance(name, str) for name in buckets)
        if not valid:
            raise ValueError(allowed)
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, 1, " or None")
        if algorithm is not None and not isinstance(algorithm, str):
            raise TypeError(f"algorithm={algorithm!r} must be a name or None")
        self.directory = Path(directory)
        self.steps_written = self.bytes_written = 0
        chosen = buckets if isinstance(buckets, int | float) else sorted(buckets)
        self._sampling: dict[str, Any] = {"every": every, "buckets": chosen, "seed": seed}
        self._max_bytes = max_bytes
        self._algorithm, self._options = (
            algorithm,
            json_values("options", {} if options is None else options),
        )
        self._identity = (rank, world_size, nodes)
        self._lock = threading.RLock()  # buckets run on workers' threads
        self._step = 0
        self._executions: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._seen_before: set[str] = set()
        """Buckets of the previous step."""
        self._open: dict[str, Record | None] = {}
        """Operations that have begun; None: not recorded."""
        self._ended: list[Record] = []
        self._flushed = 0
        """The number of these already written."""
        self._last: dict[str, int] = {}
        """Each bucket's last recorded execution."""

    def __enter__(self) -> Recorder:
        self._world: World = current_world()
        about = {
            "algorithm": self._algorithm,
            "options": self._options,
            "sampling": self._sampling,
            "max_bytes": self._max_bytes,
            "buckets": {},
        }
        self._open_folder(about)
        self._observer = TraceObserver(self)
        self._world.observers = (*self._world.observers, self._observer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the recording; if training failed, the last step is written only if it is
        complete.
        """
        self._world.observers = tuple(
            observer for observer in self._world.observers if observer is not self._observer
        )
        with self._lock:
            if self._index is None:
                return
            if self.stopped is None and (kind is None or self._is_complete()):
                self._advance()
            self._close_folder(kind is None)

    def before_op(self, bucket: str | int, tensors: Any, **info: Any) -> None:
        """Record the input of a bucket's operation, before it runs.

        Args:
            bucket: its name, the same on all ranks.
            tensors: the input: a tensor or NumPy array; a list of them, taken as one flat tensor
                ``x``; or several by name, where ``x`` is the tensor that the operation works on
                (docs/traces.md lists the names for each algorithm).
            info: JSON values for the record; ``execution=t`` is the number of earlier executions,
                if recording did not begin with training.

        Raises:
            ValueError: the operation has already begun, a name is invalid, or dtypes are mixed.
            TypeError: a value is not a tensor, or its dtype is not supported.
        """
        with self._lock:
            name = self._bucket_name("before_op", bucket)
            if not self.recording:
                return
            if name in self._open:
                raise ValueError(
                    f"bucket={name!r}: before_op was called twice without after_op in between"
                )
            given, info = named_tensors("tensors", tensors), json_values("info", info)
            self._begin(name, lambda follows: _flat_copies(given), info)
            if name not in self._manifest["buckets"]:
                entry = _description(given.get("x", next(iter(given.values()))))
                self._describe(name, entry, self._manifest["algorithm"], self._manifest["options"])

    def after_op(self, bucket: str | int, tensors: Any, **info: Any) -> None:
        """Record the output of a bucket's operation.

        Args:
            bucket: as in `before_op`.
            tensors: likewise; ``x`` is the result.
            info: likewise, of what is known only now.

        Raises:
            ValueError: `before_op` was not called for this bucket.
            TypeError: as there.
        """
        with self._lock:
            name = self._bucket_name("after_op", bucket)
            if not self.recording:
                return
            if name not in self._open:
                raise ValueError(f"bucket={name!r}: after_op was called without before_op")
            given, info = named_tensors("tensors", tensors), json_values("info", info)
            self._end(name, lambda: _flat_copies(given), info=info)

    def step(self) -> None:
        """End a training step; its records are written."""
        with self._lock:
            self._check_entered("step")
            if self.recording:
                self._advance()

    def _check_entered(self, method: str) -> None:
        if self._index is None:
            raise RuntimeError(
                f"{method}() must be called inside `with Recorder(...) as recorder:`"
            )

    def _bucket_name(self, method: str, bucket: Any) -> str:
        self._check_entered(method)
        if not isinstance(bucket, str | int) or isinstance(bucket, bool):
            raise TypeError(f"bucket={bucket!r} must be a name or a number")
        return str(bucket)

    def _begin(
        self, bucket: str, inputs: Callable[[bool], Mapping[str, Tensor]], info: Mapping[str, Any]
    ) -> None:
        """Begin a bucket's operation.

        Args:
            bucket: its name.
            inputs: called if it is recorded, with whether the previous execution was; returns
                copies.
            info: goes into the record.
        """
        with self._lock:
            if not self.recording:
                return
            if bucket in self._seen:
                self._advance()
            self._seen.add(bucket)
            execution = self._executions[bucket]
            self._executions[bucket] += 1
            self._open[bucket] = None
            if self._is_sampled(bucket):
                follows = self._last.get(bucket) == execution - 1
                self._open[bucket] = Record(
                    bucket, execution, dict(inputs(follows)), info=dict(info)
                )

    def _is_sampled(self, bucket: str) -> bool:
        """Return whether to record a bucket in this step: alike on all ranks, as it depends on
        step, bucket and seed only.

        Buckets are recorded whole or not at all: an element's level depends on the minimum and
        maximum of its whole chunk, so an operation cannot be replayed on some of its elements.
        """
        every, chosen, seed = self._sampling.values()
        if self._step % every:
            return False
        if isinstance(chosen, list):
            return bucket in chosen
        drawn = hashlib.sha256(f"{seed}/{self._step}/{bucket}".encode()).digest()[:8]
        return bool(int.from_bytes(drawn, "little") < chosen * 2**64)

    def _end(
        self,
        bucket: str,
        outputs: Callable[[], Mapping[str, Tensor]],
        inputs: Callable[[], Mapping[str, Tensor]] = dict,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """End a bucket's operation, if it has begun; both functions return copies.

        ``inputs`` returns inputs, and ``info`` holds information, that are known only now.
        """
        with self._lock:
            if not self.recording or bucket not in self._open:
                return
            record = self._open.pop(bucket)
            if record is not None:
                record.info.update(info or {})
                record.inputs.update(inputs())
                record.outputs = dict(outputs())
                self._ended.append(record)
                self._last[bucket] = record.execution
            if self._seen_before and self._is_complete():
                # now, not when the next step begins: the process may not live that long
                self._flush()

    def _drop(self, bucket: str) -> None:
        """Drop an operation that has begun: it failed or did nothing."""
        with self._lock:
            self._open.pop(bucket, None)

    def _advance(self) -> None:
        """End the step."""
        self._flush()
        self._ended, self._flushed = [], 0
        self._seen_before, self._seen = self._seen, set()
        self._step += 1

    def _describe(
        self, bucket: str, entry: dict[str, Any], algorithm: str | None, options: Mapping[str, Any]
    ) -> None:
        """Describe a bucket in the manifest; what the user has said about the algorithm takes
        precedence.
        """
        with self._lock:
            described = {
                "buckets": {**self._manifest["buckets"], bucket: entry},
                "algorithm": self._algorithm or algorithm,
                "options": {**options, **self._options},
            }
            if self.recording and not described.items() <= self._manifest.items():
                self._manifest.update(described)
                self._save_manifest()

    def _is_complete(self) -> bool:
        """Return whether all operations have ended and every bucket of the previous step has
        run.
        """
        return not self._open and self._seen >= self._seen_before

    def _flush(self) -> None:
        if len(self._ended) == self._flushed or not self.recording:
            return
        size = sum(
            t.nbytes
            for record in self._ended
            for t in (*record.inputs.values(), *record.outputs.values())
        )
        if self._max_bytes is not None and self.bytes_written + size > self._max_bytes:
            self._stop(self._step, f"step {self._step} would exceed max_bytes={self._max_bytes}")
            return
        written = self._append(*line_of(self._step, self._ended))
        if written is not None:
            self.bytes_written += written
            self.steps_written += not self._flushed
            self._flushed = len(self._ended)

    def _stop(self, step: int | None, reason: str) -> None:
        self._open.clear()
        self._ended.clear()
        super()._stop(step, reason)


def _description(parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the manifest's description of a bucket with input x."""
    return {
        "dtype": name_of(next(iter(parts.values())).dtype),
        "elements": sum(part.numel() for part in parts.values()),
        "tensors": [{"name": name, "shape": list(part.shape)} for name, part in parts.items()],
    }


def _flat_copies(named: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return flat copies in main memory."""
    return {
        role: torch.cat([part.detach().reshape(-1) for part in parts.values()]).cpu()
        for role, parts in named.items()
    }
