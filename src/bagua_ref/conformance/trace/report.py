"""Results of checking a trace, as text and as JSON values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Divergence", "Execution", "TraceReport"]


@dataclass(frozen=True)
class Divergence:
    """The first difference between recorded and replayed values.

    Attributes:
        step: the training step.
        rank: the lowest rank that differs.
        bucket: its name.
        tensor: the tensor in the bucket, or the output's name if it is not x.
        index: the element's index in the tensor.
        element: its index in the flat bucket.
        expected: the replayed value.
        got: the recorded value.
        ulps: their distance in units in the last place; None if one is NaN.
        tolerance: the tolerance that was applied.
        chunks: for operations that scatter chunks, those that hold wrong elements.
    """

    step: int
    rank: int
    bucket: str
    tensor: str
    index: list[int]
    element: int
    expected: float
    got: float
    ulps: int | None
    tolerance: str
    chunks: str | None = None

    def __str__(self) -> str:
        ulps = "" if self.ulps is None else f", {self.ulps:,} ulps away"
        chunks = f"; the wrong elements are in {self.chunks}" if self.chunks else ""
        return (
            f"step {self.step}, rank {self.rank}, bucket {self.bucket!r}, tensor {self.tensor!r}{self.index} (element "
            f"{self.element} of the bucket): expected {self.expected!r}, got {self.got!r}{ulps} (tolerance "
            f"{self.tolerance}){chunks}"
        )


@dataclass
class Execution:
    """One output of one execution of a bucket's operation, compared on all ranks.

    Attributes:
        step: the training step.
        bucket: its name.
        values: number of compared values, by rank.
        wrong: number of diverging values, by rank.
        errors: by rank, the largest difference relative to the largest value, expected or recorded.
        first: the first divergence.
        kind: its likely cause, if it is a known one.
    """

    step: int
    bucket: str
    values: list[int]
    wrong: list[int]
    errors: list[float]
    first: Divergence | None = None
    kind: str | None = None


@dataclass
class TraceReport:
    """The result of checking a trace.

    Attributes:
        algorithm: the algorithm of the replay.
        options: its options.
        nodes: number of ranks on each node.
        notes: notes about the recording.
        executions: all compared executions, in order.
        not_checked: step, bucket and reason of executions that could not be replayed.
    """

    algorithm: str
    options: dict[str, Any]
    nodes: tuple[int, ...]
    notes: list[str]
    executions: list[Execution] = field(default_factory=list)
    not_checked: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether values were compared and none diverges."""
        return bool(self.executions) and self.first is None

    @property
    def first(self) -> Divergence | None:
        """The first divergence, ordered by step, bucket and rank."""
        return next((execution.first for execution in self.executions if execution.first is not None), None)

    @property
    def values(self) -> int:
        """The number of compared values."""
        return sum(sum(execution.values) for execution in self.executions)

    @property
    def diverging(self) -> int:
        """The number of diverging values."""
        return sum(sum(execution.wrong) for execution in self.executions)

    @property
    def kinds(self) -> dict[str, int]:
        """Likely causes and numbers of diverging executions, in order of appearance; text after a colon is that of the first."""
        counts: Counter[str] = Counter()
        texts: dict[str, str] = {}
        for execution in self.executions:
            if execution.first is not None:
                name = (execution.kind or "like no known cause").partition(":")[0]
                texts.setdefault(name, execution.kind or name)
                counts[name] += 1
        return {texts[name]: count for name, count in counts.items()}

    @property
    def steps(self) -> list[int]:
        """The steps with compared values."""
        return sorted({execution.step for execution in self.executions})

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values, with infinities and NaN as text."""
        return {
            "passed": self.passed,
            "algorithm": self.algorithm,
            "options": self.options,
            "nodes": list(self.nodes),
            "values": self.values,
            "diverging": self.diverging,
            "first": None if self.first is None else {k: _finite(v) for k, v in vars(self.first).items()},
            "kinds": self.kinds,
            "notes": self.notes,
            "not_checked": [{"step": s, "bucket": b, "reason": reason} for s, b, reason in self.not_checked],
            "executions": [
                {
                    "step": e.step,
                    "bucket": e.bucket,
                    "values": e.values,
                    "diverging": e.wrong,
                    "errors": [_finite(x) for x in e.errors],
                }
                for e in self.executions
            ],
        }

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        buckets = len({execution.bucket for execution in self.executions})
        lines = [
            f"Replayed as {self.algorithm}({options}) on {sum(self.nodes)} ranks, nodes {list(self.nodes)}",
            f"Compared: {len(self.steps)} steps, {buckets} buckets, {self.values:,} values",
        ]
        lines += [f"Note: {note}" for note in self.notes]
        if self.not_checked:
            step, bucket, reason = self.not_checked[0]
            lines.append(f"Not checked: {len(self.not_checked)} executions; the first is step {step}, bucket {bucket!r}: {reason}")
        if self.first is None:
            return "\n".join([*lines, "NO DIVERGENCE"])
        wrong = sum(execution.first is not None for execution in self.executions)
        lines.append(f"First divergence: {self.first}")
        lines += [f"Looks {kind} ({count} of {wrong} diverging executions)" for kind, count in self.kinds.items()]
        share = self.diverging / self.values
        return "\n".join([*lines, f"DIVERGENCE: {self.diverging:,} of {self.values:,} values ({share:.2%})"])


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
