"""`Recorder`: records the inputs and outputs of every bucket operation during training."""

from __future__ import annotations

import platform
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from bagua_ref import __version__
from bagua_ref.base.runtime import World, current_world
from bagua_ref.conformance.clauses import SPEC_VERSION
from bagua_ref.conformance.trace.files import FORMAT, TRACE_VERSION, Record, Writer
from bagua_ref.conformance.trace.identity import find_identity
from bagua_ref.conformance.trace.own_buckets import OwnBuckets
from bagua_ref.conformance.trace.steps import Sampling, Steps
from bagua_ref.conformance.trace.values import bucket_name, described, flat_copy, named_tensors, plain_values

__all__ = ["Recorder"]


class Recorder:
    """Records the inputs and outputs of every bucket operation on this rank, step by step, into files.

    Modules wrapped by ``with_bagua`` or `bagua_ref.data_parallel.DistributedDataParallel` are recorded automatically, whether they
    were wrapped before or after. In any other trainer, call `before_op`, `after_op` and `step`. Every rank records into the same
    directory; ``bagua-ref trace check`` then replays all ranks.

    A step ends at `step`, or when a bucket runs a second time. It is written then, or as soon as all buckets of the previous step
    have run again. After a crash, all complete steps are there. An error in writing the files never disturbs training: recording
    stops with a warning.

    Args:
        directory: this rank writes into ``directory/rank<r>``, which must not hold a trace yet.
        every: record the steps divisible by this number.
        buckets: names of the buckets to record, or the fraction of them to record, drawn for each step. Buckets are recorded whole.
        seed: seed of that draw; must be the same on all ranks.
        max_bytes: the most bytes that this rank may write; None: no limit. Recording stops at the limit, and the manifest says so.
        algorithm: name of the training algorithm, for the manifest; None: detected for the package's own algorithms.
        options: options of the algorithm, likewise: ``{"hierarchical": False}``.
        rank: this rank; None: taken from bagua_ref, torch.distributed or the environment.
        world_size: number of ranks; None: likewise.
        nodes: number of ranks on each node, in rank order; None: as bagua_ref knows them, otherwise all on one node.

    Raises:
        ValueError: an argument is out of range; on entering: the directory holds a trace of this rank.
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
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool)):
            raise TypeError(f"max_bytes={max_bytes!r} must be an int or None")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be 1 or more, or None for no limit")
        if algorithm is not None and not isinstance(algorithm, str):
            raise TypeError(f"algorithm={algorithm!r} must be a name or None")
        self.directory = Path(directory)
        self.steps_written = self.bytes_written = 0
        self.stopped: str | None = None
        """Why recording stopped early, or None."""
        self._max_bytes, self._asked = max_bytes, (rank, world_size, nodes)
        self._sampling = Sampling(every, buckets, seed)
        self._lock = threading.RLock()  # buckets run on workers' threads
        self._algorithm, self._options = algorithm, plain_values("options", {} if options is None else options)
        self._manifest: dict[str, Any] = {}
        self._written: set[int] = set()
        self._writer: Writer | None = None

    def __enter__(self) -> Recorder:
        if self._writer is not None:
            raise RuntimeError("this Recorder is already in use; create another one")
        self._world: World = current_world()
        identity = find_identity(self._world, *self._asked)
        self._manifest = {
            "format": FORMAT,
            "trace_version": TRACE_VERSION,
            "spec_version": SPEC_VERSION,
            "versions": {"bagua_ref": __version__, "torch": torch.__version__, "python": platform.python_version()},
            **identity,
            "algorithm": self._algorithm,
            "options": self._options,
            "sampling": self._sampling.as_json(),
            "max_bytes": self._max_bytes,
            "buckets": {},
            "complete": False,
            "stopped": None,
        }
        self._steps = Steps(self._sampling, self._write)
        self._writer = Writer(self.directory / f"rank{identity['rank']}", self._manifest)
        self._own = OwnBuckets(self)
        self._world.observers = (*self._world.observers, self._own)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._world.observers = tuple(observer for observer in self._world.observers if observer is not self._own)
        with self._lock:
            writer = self._writer
            if writer is None:
                return
            if self.stopped is None:
                self._steps.finish(failed=kind is not None)
            self._manifest["complete"] = kind is None and self.stopped is None
            self._save_manifest()
            writer.close()
            self._writer = None

    @property
    def recording(self) -> bool:
        """Whether the recorder has been entered and has not stopped."""
        return self._writer is not None and self.stopped is None

    def before_op(self, bucket: str | int, tensors: Any, **info: Any) -> None:
        """Record the input of a bucket's operation, before it runs.

        Args:
            bucket: its name, the same on all ranks.
            tensors: the input: a tensor or NumPy array; a list of them, taken as one flat tensor ``x``; or several by name, where
                ``x`` is the tensor that the operation works on (docs/traces.md lists the names for each algorithm).
            info: JSON values for the record; ``execution=t`` is the number of earlier executions, if recording did not begin with
                training.

        Raises:
            ValueError: the operation has already begun, a name is invalid, or dtypes are mixed.
            TypeError: a value is not a tensor, or its dtype is not supported.
        """
        with self._lock:
            self._check_entered("before_op")
            name = bucket_name(bucket)
            if self.stopped is not None:
                return
            if self._steps.is_open(name):
                raise ValueError(f"bucket={name!r}: before_op was called twice without after_op in between")
            given, info = named_tensors("tensors", tensors), plain_values("info", info)
            self.begin(name, lambda follows: {role: flat_copy(value) for role, value in given.items()}, info)
            if name not in self._manifest["buckets"]:
                self._manifest["buckets"][name] = described(given.get("x", next(iter(given.values()))))
                self._save_manifest()

    def after_op(self, bucket: str | int, tensors: Any) -> None:
        """Record the output of a bucket's operation.

        Args:
            bucket: as in `before_op`.
            tensors: likewise; ``x`` is the result.

        Raises:
            ValueError: `before_op` was not called for this bucket.
            TypeError: as there.
        """
        with self._lock:
            self._check_entered("after_op")
            name = bucket_name(bucket)
            if self.stopped is not None:
                return
            if not self._steps.is_open(name):
                raise ValueError(f"bucket={name!r}: after_op was called without before_op")
            given = named_tensors("tensors", tensors)
            self._steps.end(name, lambda: {role: flat_copy(value) for role, value in given.items()})

    def step(self) -> None:
        """End a training step; its records are written."""
        with self._lock:
            self._check_entered("step")
            if self.stopped is None:
                self._steps.advance()

    # `OwnBuckets` calls these, too.

    def begin(self, bucket: str, inputs: Any, info: Mapping[str, Any]) -> None:
        """As `Steps.begin`, while recording."""
        with self._lock:
            if self.recording:
                self._steps.begin(bucket, inputs, info)

    def end(self, bucket: str, outputs: Any, inputs: Any = None, info: Mapping[str, Any] | None = None) -> None:
        """As `Steps.end`, if the operation has begun."""
        with self._lock:
            if self.recording and self._steps.is_open(bucket):
                self._steps.end(bucket, outputs, inputs, info)

    def forget(self, bucket: str) -> None:
        """As `Steps.forget`."""
        with self._lock:
            if self.recording:
                self._steps.forget(bucket)

    def describe_own(self, bucket: str, entry: dict[str, Any], algorithm: str | None, options: Mapping[str, Any]) -> None:
        """Describe one of the package's buckets in the manifest; what the user said about the algorithm takes precedence."""
        with self._lock:
            if not self.recording:
                return
            known = (self._manifest["buckets"].get(bucket), self._manifest["algorithm"], self._manifest["options"])
            self._manifest["buckets"][bucket] = entry
            self._manifest["algorithm"] = self._algorithm or algorithm
            self._manifest["options"] = {**options, **self._options}
            if known != (entry, self._manifest["algorithm"], self._manifest["options"]):
                self._save_manifest()

    def _check_entered(self, method: str) -> None:
        if self._writer is None:
            raise RuntimeError(f"{method}() must be called inside `with Recorder(...) as recorder:`")

    def _write(self, step: int, records: list[Record]) -> None:
        if self.stopped is not None or self._writer is None:
            return
        size = sum(t.numel() * t.element_size() for r in records for t in (*r.inputs.values(), *r.outputs.values()))
        if self._max_bytes is not None and self.bytes_written + size > self._max_bytes:
            self._stop(f"step {step} would exceed max_bytes={self._max_bytes}", step)
            return
        try:
            self.bytes_written += self._writer.write_step(step, records)
        except OSError as error:
            self._stop(f"step {step} cannot be written: {error}", step)
            return
        self._written.add(step)
        self.steps_written = len(self._written)

    def _save_manifest(self) -> None:
        try:
            assert self._writer is not None
            self._writer.write_manifest(self._manifest)
        except OSError as error:
            if self.stopped is None:
                self._stop(f"the manifest cannot be written: {error}", self._steps.step)

    def _stop(self, reason: str, step: int) -> None:
        self.stopped = reason
        self._steps.drop_all()
        self._manifest["stopped"] = {"step": step, "reason": reason}
        warnings.warn(
            f"recording into {str(self.directory)!r} has stopped: {reason}. Training continues. Use every=, buckets= or "
            "max_bytes= to change how much is recorded",
            RuntimeWarning,
            stacklevel=2,
        )
        self._save_manifest()
