"""Steps of a recording: which operations have begun and ended, and when a step is complete."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from bagua_ref.conformance.trace.files import Record

__all__ = ["Sampling", "Steps"]


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
        for name, value in (("every", every), ("seed", seed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be an int")
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more")
        if isinstance(buckets, bool | str):
            raise TypeError(f"buckets={buckets!r} must be a fraction above 0 and up to 1, or a list of bucket names")
        if isinstance(buckets, int | float):
            if not 0 < buckets <= 1:
                raise ValueError(f"buckets={buckets!r} must be a fraction above 0 and up to 1, or a list of bucket names")
        elif not buckets or not all(isinstance(name, str) for name in buckets):
            raise ValueError(f"buckets={buckets!r} must be a list of at least one bucket name, or a fraction above 0 and up to 1")
        self.every, self.seed = every, seed
        self.buckets: float | list[str] = buckets if isinstance(buckets, int | float) else sorted(buckets)

    def takes(self, step: int, bucket: str) -> bool:
        """Return whether to record the bucket's execution in this step."""
        if step % self.every:
            return False
        if isinstance(self.buckets, list):
            return bucket in self.buckets
        if self.buckets == 1:
            return True
        drawn = hashlib.sha256(f"{self.seed}/{step}/{bucket}".encode()).digest()[:8]
        return int.from_bytes(drawn, "little") < self.buckets * 2**64

    def as_json(self) -> dict[str, Any]:
        """Return the choice as JSON values, for the manifest."""
        return {"every": self.every, "buckets": self.buckets, "seed": self.seed}


class Steps:
    """Collects records until their step ends: at `advance`, or when a bucket runs a second time.

    Args:
        sampling: the choice of executions to record.
        write: called with a step's number and records as soon as all buckets of the previous step have run again, and once more
            if others follow.
    """

    def __init__(self, sampling: Sampling, write: Callable[[int, list[Record]], None]) -> None:
        self._sampling, self._write = sampling, write
        self.step = 0
        self._executions: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._before: set[str] = set()
        """Buckets of the previous step."""
        self._open: dict[str, Record | None] = {}
        """Operations that have begun; None: not recorded."""
        self._ended: list[Record] = []
        self._flushed = 0
        """The number of these already written."""
        self._last: dict[str, int] = {}
        """Each bucket's last recorded execution."""

    def is_open(self, bucket: str) -> bool:
        """Return whether the bucket's operation has begun and not ended."""
        return bucket in self._open

    def begin(
        self,
        bucket: str,
        inputs: Callable[[bool], Mapping[str, Tensor]],
        info: Mapping[str, Any],
    ) -> bool:
        """Note that the bucket's operation begins; return whether it is recorded.

        Args:
            bucket: its name.
            inputs: called if it is recorded, with whether the previous execution was; returns copies.
            info: goes into the record.
        """
        if bucket in self._seen:
            self.advance()
        self._seen.add(bucket)
        execution = self._executions[bucket]
        self._executions[bucket] += 1
        recorded = self._sampling.takes(self.step, bucket)
        follows = self._last.get(bucket) == execution - 1
        self._open[bucket] = Record(bucket, execution, dict(inputs(follows)), info=dict(info)) if recorded else None
        return recorded

    def end(
        self,
        bucket: str,
        outputs: Callable[[], Mapping[str, Tensor]],
        inputs: Callable[[], Mapping[str, Tensor]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Note that the bucket's operation, which has begun, has ended; both functions return copies.

        ``inputs`` returns inputs, and ``info`` holds information, that are known only now.
        """
        record = self._open.pop(bucket)
        if record is not None:
            record.info.update(info or {})
            if inputs is not None:
                record.inputs.update(inputs())
            record.outputs = dict(outputs())
            self._ended.append(record)
            self._last[bucket] = record.execution
        if self._before and self._is_whole():
            self._flush()  # now, not when the next step begins: the process may not live that long

    def forget(self, bucket: str) -> None:
        """Drop an operation that has begun: it failed or did nothing."""
        self._open.pop(bucket, None)

    def drop_all(self) -> None:
        """Drop what is held in memory: nothing more is recorded."""
        self._open.clear()
        self._ended.clear()

    def advance(self) -> None:
        """End the step."""
        self._flush()
        self._ended, self._flushed = [], 0
        self._before, self._seen = self._seen, set()
        self.step += 1

    def _is_whole(self) -> bool:
        """Return whether all operations have ended and every bucket of the previous step has run."""
        return not self._open and self._seen >= self._before

    def _flush(self) -> None:
        if len(self._ended) > self._flushed:
            self._flushed = len(self._ended)
            self._write(self.step, list(self._ended))

    def finish(self, failed: bool) -> None:
        """End the last step; if training failed, only if the step is complete."""
        if not failed or self._is_whole():
            self.advance()
