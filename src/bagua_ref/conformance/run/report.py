"""Results of a run, one for each check and dtype, as a table, JSON or JUnit XML."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from xml.etree import ElementTree  # XML is written here, never read

STATUSES = (
    "passed",
    "failed",
    "error",
    "xfailed",
    "xpassed",
    "skipped",
    "not tried",
    "not covered",
)
"""Statuses of a result. error: no worker has reported it; xfailed: failed as expected; xpassed:
passed although expected to fail; not tried: another dtype of the check has ended its process, or
the run has ended before. Errors and xpassed count as failures.
"""

_FAILED = ("failed", "error", "xpassed")


@dataclass(frozen=True)
class Result:
    """One check for one dtype, or a clause that no check covers.

    Attributes:
        id: ``suite.clause.name`` or ``suite.clause.name[dtype]``; stable. The clause's number if
            nothing covers it.
        suite: the suite; empty for a clause that none covers.
        clause: clause of the specification.
        status: one of `STATUSES`.
        sentence: the property that the check tests.
        message: description of the failure, or the reason for skipping.
        counterexample: Python source that reproduces the failure, such as a script.
        examples: number of inputs up to the first failure.
        seconds: duration.
    """

    id: str
    suite: str
    clause: str
    status: str
    sentence: str = ""
    message: str = ""
    counterexample: str = ""
    examples: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this result makes the report fail."""
        return self.status in _FAILED


@dataclass
class Report:
    """All results of a run.

    Attributes:
        target: name of the implementation under test.
        results: results in the order of suites.
        profile: "quick", "full" or "large".
        seed: seed that repeats the run.
        versions: versions of the specification, the package, torch, Hypothesis and Python.
        seconds: duration of the whole run.
        max_ranks: the largest world that the target's capabilities allowed; None: any.

    >>> report = Report("mine", [Result("kernels.S1.add", "kernels", "S1", "passed")], "quick", 0)
    >>> report.passed, report.counts()["passed"]
    (True, 1)
    """

    target: str
    results: list[Result]
    profile: str
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    max_ranks: int | None = None

    @property
    def passed(self) -> bool:
        """Whether at least one check ran, and all results were as expected."""
        counts = self.counts()
        return counts["passed"] + counts["xfailed"] > 0 and not self.failures()

    @property
    def ran(self) -> bool:
        """Whether at least one check ran."""
        counts = self.counts()
        return sum(counts[status] for status in ("passed", "failed", "xfailed", "xpassed")) > 0

    def counts(self) -> Counter[str]:
        """Return the number of results by status."""
        return Counter(result.status for result in self.results)

    def failures(self) -> list[Result]:
        """Return the failing results."""
        return [result for result in self.results if result.failed]

    def causes(self) -> list[list[Result]]:
        """Group the failures by cause: errors with equal messages, or the same check for several
        dtypes.
        """
        groups: dict[str, list[Result]] = {}
        for result in self.failures():
            raised = re.search(
                r"raised \w+: .*|no answer within .*|ended the process.*", result.message
            )
            cause = re.sub(r"\d+", "0", raised[0]) if raised else result.id.partition("[")[0]
            groups.setdefault(f"{result.status} {cause}", []).append(result)
        return list(groups.values())

    def not_tried(self) -> list[str]:
        """Return the suites without any check run because the target lacks their part."""
        suites: dict[str, list[bool]] = {}
        for result in self.results:
            lacks = result.message.startswith(
                ("the target has no ", "the program lacks ", "cannot be asked: verify")
            )
            suites.setdefault(result.suite, []).append(lacks)
        return [suite for suite, lacks in suites.items() if all(lacks)]

    def __str__(self) -> str:
        """Return the table, each counterexample below it, and a summary in the last lines."""
        counts = self.counts()
        lines = [*self._table(), ""]
        for result, *others in self.causes():
            lines += [f"{result.id}: {result.sentence}", f"  {result.message}"]
            lines += [f"    {line}" for line in _clipped(result.counterexample).splitlines()]
            if others:
                names = ", ".join(other.id for other in others[:8])
                more = ", ..." if len(others) > 8 else ""
                lines.append(f"  {len(others)} more of this cause: {names}{more}")
            lines.append("")
        total = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        limit = "" if self.max_ranks is None else f", worlds of up to {self.max_ranks} ranks"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines += [
            (
                f"{'PASSED' if self.passed else 'FAILED' if self.ran else 'NOTHING RAN'}:"
                f" {self.target}: {total}"
            ),
            f"profile {self.profile}, seed {self.seed}{limit}, {self.seconds:.1f} s; {versions}",
        ]
        if suites := self.not_tried():
            lines.append(f"not tried, as the target lacks these parts: {', '.join(suites)}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return a line for each clause and status, with the reasons of skipped results."""
        rows: dict[tuple[str, str, str], list[Result]] = {}
        for result in self.results:
            if result.status == "not covered":
                rows.setdefault(("", result.status, result.message), []).append(result)
            else:
                because = result.message if result.status in ("skipped", "not tried") else ""
                rows.setdefault((result.clause, result.status, because), []).append(result)
        lines = []
        for (clause, status, because), results in rows.items():
            names: dict[str, list[str]] = {}
            for result in results:
                name, _, dtype = result.id.partition("[")
                names.setdefault(name, []).append(dtype.rstrip("]"))
            said = ", ".join(
                " ".join(filter(None, (name, *found))) for name, found in names.items()
            )
            if because:
                said += f": {because}"
            elif status == "passed":
                tried = sum(result.examples for result in results)
                said += f": {tried} inputs, {sum(result.seconds for result in results):.1f} s"
            lines.append(f"{clause:6} {status:11} {said}")
        return lines

    def to_json(self) -> str:
        """Return everything as JSON."""
        values = asdict(self) | {"passed": self.passed, "counts": dict(self.counts())}
        return json.dumps(values | {"seconds": round(self.seconds, 3)}, indent=1) + "\n"

    def to_junit(self) -> str:
        """Return JUnit XML: a test case for each result."""
        counts = self.counts()
        suite = ElementTree.Element(
            "testsuite",
            name=f"bagua_ref conformance of {self.target}",
            tests=str(len(self.results)),
            failures=str(len(self.failures())),
            errors="0",
            skipped=str(len(self.results) - len(self.failures()) - counts["passed"]),
            time=f"{self.seconds:.3f}",
        )
        for result in self.results:
            name = f"bagua_ref.{result.suite or 'specification'}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=name, name=result.id, time=f"{result.seconds:.3f}"
            )
            if result.failed:
                failure = ElementTree.SubElement(
                    case, "failure", message=_printable(result.message), type=result.status
                )
                failure.text = _printable(
                    f"{result.sentence}\n{result.message}\n{result.counterexample}"
                )
            elif result.status != "passed":
                ElementTree.SubElement(
                    case,
                    "skipped",
                    message=_printable(f"{result.status}: {result.message}".rstrip(": ")),
                )
        return ElementTree.tostring(suite, encoding="unicode") + "\n"


def _clipped(script: str, width: int = 400, lines: int = 40) -> str:
    shown = [
        (line if len(line) <= width else f"{line[:width]} ...  # cut off here")
        for line in script.splitlines()
    ]
    return "\n".join(shown[:lines] + (["..."] if len(shown) > lines else []))


def _printable(text: str) -> str:
    """Remove characters that are invalid in XML."""
    return "".join(
        character
        for character in text
        if character in "\t\n" or (character >= " " and character not in "\ufffe\uffff")
    )
