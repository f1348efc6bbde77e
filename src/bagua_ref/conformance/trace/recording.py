"""One rank's recording: the choice of executions, and records collected until their step ends."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bagua_ref.conformance.trace.files import Record, Writer

__all__ = ["Recording", "Sampling", "check_int"]


def check_int(name: str, value: Any, least: int | None = None, also: str = "") -> None:
    """Raise TypeError unless ``value`` is an int, and ValueError if it is less than ``least``; ``also`` says what else may be."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int{also}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} must be {least} or more{also}")


class Sampling:
    """The choice of executions to record. It is the same on all ranks, as it depends on step, bucket and seed only.

    Buckets are recorded whole or not at all: an element's level depends on the minimum and maximum of its whole chunk, so an
    operation cannot be replayed on some of its elements.

    Args:
        every: record the steps divisible by this number.
        buckets: names of the buckets to record, or the fraction of them to record, drawn for each step.
        seed: seed of that draw.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type.
    """

    def __init__(self, every: int, buckets: float | Collection[str], seed: int) -> None:
        check_int("every", every, 1)
        check_int("seed", seed)
        allowed = f"buckets={buckets!r} must be a fraction above 0 and up to 1, or a list of bucket names, at least one"
        if isinstance(buckets, bool | str):
            raise TypeError(allowed)
        self.every, self.seed = every, seed
        self.buckets: float | list[str]
        if isinstance(buckets, int | float):
            valid, self.buckets = 0 < buckets <= 1, buckets
        else:
            valid = bool(buckets) and all(isinstance(name, str) for name in buckets)
            self.buckets = sorted(buckets) if valid else []
        if not valid:
            raise ValueError(allowed)

    def takes(self, step: int, bucket: str) -> bool:
        """Return whether to record the bucket's execution in this step."""
        if step % self.every:
            return False
        if isinstance(self.buckets, list):
            return bucket in self.buckets
        drawn = hashlib.sha256(f"{self.seed}/{step}/{bucket}".encode()).digest()[:8]
        return int.from_bytes(drawn, "little") < self.buckets * 2**64

    def as_json(self) -> dict[str, Any]:
        """Return the choice as JSON values, for the manifest."""
        return {"every": self.every, "buckets": self.buckets, "seed": self.seed}


class Recording:
    """Collects the records of one rank and writes each step; may be used by several threads.

    A step ends at `advance`, or when a bucket runs a second time. It is written then, or as soon as all buckets of the previous
    step have run again, and once more if others follow. What cannot be written stops the recording, with a warning.

    Args:
        directory: ``rank<r>`` in it is the folder of this rank.
        sampling: the choice of executions to record.
        max_bytes: the most bytes to write; None: no limit.

    Attributes:
        directory: as given.
        stopped: why recording stopped early, or None.
        steps_written: number of steps written.
        bytes_written: size of their files.
    """

    def __init__(self, directory: Path, sampling: Sampling, max_bytes: int | None) -> None:
        self.directory = directory
        self.steps_written = self.bytes_written = 0
        self.stopped: str | None = None
        self._sampling, self._max_bytes = sampling, max_bytes
        self._lock = threading.RLock()  # buckets run on workers' threads
        self._writer: Writer | None = None
        self._manifest: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        """The first manifest, with what the user has said."""
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

    @property
    def recording(self) -> bool:
        """Whether it has been opened, and has neither stopped nor ended."""
        return self._writer is not None and self.stopped is None

    def open(self, manifest: dict[str, Any]) -> None:
        """Begin to record; ``manifest`` is the first one."""
        self._writer = Writer(self.directory / f"rank{manifest['rank']}", manifest)
        self._manifest, self._given = manifest, dict(manifest)

    def close(self, failed: bool) -> None:
        """End the recording; if training failed, the last step is written only if it is complete."""
        with self._lock:
            if self._writer is None:
                return
            if self.stopped is None and (not failed or self._is_complete()):
                self.advance()
            self._manifest["complete"] = not failed and self.stopped is None
            self._save_manifest()
            self._writer.close()
            self._writer = None

    def begin(self, bucket: str, inputs: Callable[[bool], Mapping[str, Tensor]], info: Mapping[str, Any]) -> None:
        """Begin a bucket's operation.

        Args:
            bucket: its name.
            inputs: called if it is recorded, with whether the previous execution was; returns copies.
            info: goes into the record.
        """
        with self._lock:
            if not self.recording:
                return
            if bucket in self._seen:
                self.advance()
            self._seen.add(bucket)
            execution = self._executions[bucket]
            self._executions[bucket] += 1
            self._open[bucket] = None
            if self._sampling.takes(self._step, bucket):
                follows = self._last.get(bucket) == execution - 1
                self._open[bucket] = Record(bucket, execution, dict(inputs(follows)), info=dict(info))

    def end(
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
                self._flush()  # now, not when the next step begins: the process may not live that long

    def drop(self, bucket: str) -> None:
        """Drop an operation that has begun: it failed or did nothing."""
        with self._lock:
            self._open.pop(bucket, None)

    def advance(self) -> None:
        """End the step."""
        with self._lock:
            self._flush()
            self._ended, self._flushed = [], 0
            self._seen_before, self._seen = self._seen, set()
            self._step += 1

    def describe(self, bucket: str, entry: dict[str, Any], algorithm: str | None, options: Mapping[str, Any]) -> None:
        """Describe a bucket in the manifest; what the user has said about the algorithm takes precedence."""
        with self._lock:
            described = {
                "buckets": {**self._manifest["buckets"], bucket: entry},
                "algorithm": self._given["algorithm"] or algorithm,
                "options": {**options, **self._given["options"]},
            }
            if self.recording and not described.items() <= self._manifest.items():
                self._manifest.update(described)
                self._save_manifest()

    def _is_complete(self) -> bool:
        """Return whether all operations have ended and every bucket of the previous step has run."""
        return not self._open and self._seen >= self._seen_before

    def _flush(self) -> None:
        records = list(self._ended)
        if len(records) == self._flushed or self._writer is None or self.stopped is not None:
            return
        size = sum(t.numel() * t.element_size() for r in records for t in (*r.inputs.values(), *r.outputs.values()))
        if self._max_bytes is not None and self.bytes_written + size > self._max_bytes:
            self._stop(f"step {self._step} would exceed max_bytes={self._max_bytes}")
            return
        try:
            self.bytes_written += self._writer.write_step(self._step, records)
        except OSError as error:
            self._stop(f"step {self._step} cannot be written: {error}")
            return
        self.steps_written += not self._flushed
        self._flushed = len(records)

    def _save_manifest(self) -> None:
        assert self._writer is not None
        try:
            self._writer.write_manifest(self._manifest)
        except OSError as error:
            if self.stopped is None:
                self._stop(f"the manifest cannot be written: {error}")

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._open.clear()
        self._ended.clear()
        self._manifest["stopped"] = {"step": self._step, "reason": reason}
        warnings.warn(
            f"recording into {str(self.directory)!r} has stopped: {reason}. Training continues. Use every=, buckets= or "
            "max_bytes= to change how much is recorded",
            RuntimeWarning,
            stacklevel=2,
        )
        self._save_manifest()
