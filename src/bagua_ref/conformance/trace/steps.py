"""Steps of a recording: which operations have begun and ended, and when a step is complete."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from bagua_ref.conformance.trace.files import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

__all__ = ["Sampling", "Steps"]


class Sampling:
    """Which executions are recorded. All ranks choose alike, as the choice depends on step, bucket and seed alone.

    Buckets are recorded whole or not at all: an element's level depends on the least and the largest of its whole chunk, so an
    operation cannot be replayed on some of the elements.

    Args:
        every: record steps divisible by it.
        buckets: names of those to record, or the share of them, above 0 up to 1, drawn anew for each step.
        seed: of the draw.

    Raises:
        ValueError: an argument is out of range.
        TypeError: it is of another type.
    """

    def __init__(self, every: int, buckets: float | Collection[str], seed: int) -> None:
        for name, value in (("every", every), ("seed", seed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be an int")
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more: each every-th step is recorded")
        if isinstance(buckets, bool | str):
            raise TypeError(f"buckets={buckets!r} must be a share above 0 up to 1, or names of buckets in a list")
        if isinstance(buckets, int | float):
            if not 0 < buckets <= 1:
                raise ValueError(f"buckets={buckets!r} must be a share above 0 up to 1, or names of buckets in a list")
        elif not buckets or not all(isinstance(name, str) for name in buckets):
            raise ValueError(f"buckets={buckets!r} must be names of buckets, at least one, or a share above 0 up to 1")
        self.every, self.seed = every, seed
        self.buckets: float | list[str] = buckets if isinstance(buckets, int | float) else sorted(buckets)

    def takes(self, step: int, bucket: str) -> bool:
        """Return whether the bucket's execution in this step is recorded."""
        if step % self.every:
            return False
        if isinstance(self.buckets, list):
            return bucket in self.buckets
        if self.buckets == 1:
            return True
        drawn = hashlib.sha256(f"{self.seed}/{step}/{bucket}".encode()).digest()[:8]
        return int.from_bytes(drawn, "little") < self.buckets * 2**64

    def as_json(self) -> dict[str, Any]:
        """Return it for the manifest."""
        return {"every": self.every, "buckets": self.buckets, "seed": self.seed}


class Steps:
    """Collects records until their step is over: when told so, or when a bucket comes that this step has seen already.

    Args:
        sampling: what is recorded.
        write: called with a step's number and records, as soon as all buckets of the step before have come again, and once more
            if others follow.
    """

    def __init__(self, sampling: Sampling, write: Callable[[int, list[Record]], None]) -> None:
        self._sampling, self._write = sampling, write
        self.step = 0
        self._executions: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._before: set[str] = set()
        """What the step before saw."""
        self._open: dict[str, Record | None] = {}
        """Operations that have begun; None: not to be recorded."""
        self._ended: list[Record] = []
        self._flushed = 0
        """How many of these were written."""
        self._last: dict[str, int] = {}
        """Each bucket's last execution that was recorded."""

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
            inputs: called if it is recorded, with whether the execution before was; returns copies.
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
        self, bucket: str, outputs: Callable[[], Mapping[str, Tensor]], inputs: Callable[[], Mapping[str, Tensor]] | None = None
    ) -> None:
        """Note that the bucket's operation, which has begun, has ended; both functions return copies.

        ``inputs`` are those that are known only now.
        """
        record = self._open.pop(bucket)
        if record is not None:
            if inputs is not None:
                record.inputs.update(inputs())
            record.outputs = dict(outputs())
            self._ended.append(record)
            self._last[bucket] = record.execution
        if self._before and self._is_whole():
            self._flush()  # now, not when the next step begins: the process may not live that long

    def forget(self, bucket: str) -> None:
        """Drop an operation that has begun: it failed, or was none."""
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
        """Return whether all that has begun has ended, and no bucket of the step before lacks."""
        return not self._open and self._seen >= self._before

    def _flush(self) -> None:
        if len(self._ended) > self._flushed:
            self._flushed = len(self._ended)
            self._write(self.step, list(self._ended))

    def finish(self, failed: bool) -> None:
        """End the last step; if training failed, only if it is whole."""
        if not failed or self._is_whole():
            self.advance()
