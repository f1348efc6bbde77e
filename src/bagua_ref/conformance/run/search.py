"""Search for an input that violates a check: Hypothesis draws and shrinks, the outcome is plain
data.
"""

from __future__ import annotations

import time
import traceback
import zlib
from dataclasses import dataclass
from typing import Any

from bagua_ref.conformance.checks.registry import Check
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Skipped, Violation
from bagua_ref.conformance.targets.target import Target
from bagua_ref.conformance.targets.world import MOST_RANKS

__all__ = ["PROFILES", "Outcome", "Search", "search"]

PROFILES = {"quick": 40, "full": 500, "large": 40}
"""Name -> number of inputs for each check and dtype, to be multiplied by the check's effort. In
"large", long inputs are longer.
"""


@dataclass
class Outcome:
    """The outcome of a search.

    Attributes:
        passed: whether no counterexample was found.
        message: description of the violation.
        snippet: a script that shows it.
        examples: number of inputs up to the first failure, or of all inputs.
        seconds: duration.
        skipped: why the target was not judged; empty if it was.
    """

    passed: bool
    message: str = ""
    snippet: str = ""
    examples: int = 0
    seconds: float = 0.0
    skipped: str = ""


@dataclass(frozen=True)
class Search:
    """Settings of a search.

    Attributes:
        profile: a name in `PROFILES`.
        seed: seed from which each check and dtype derives its own.
        shrink: whether to make counterexamples as small as possible.
    """

    profile: str = "quick"
    seed: int = 0
    shrink: bool = True


def search(
    check: Check, dtype: str | None, target: Target, how: Search, journal: Journal
) -> Outcome:
    """Run a check for one dtype; exceptions of the target become violations."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky, Unsatisfiable

    lab = Lab(target, dtype, journal, how.profile == "large", MOST_RANKS.get(check.suite))
    begun, attempts = time.perf_counter(), _Attempts()

    def run(data: Any) -> None:
        journal.rehearse(lambda: check.function(lab, data.draw))
        lab.begin()
        try:
            check.function(lab, data.draw)
        except Violation as violation:
            if not violation.not_provided():
                attempts.add(violation)
                raise
            attempts.not_provided = f"not provided: {violation}".splitlines()[0][:300]
        except Skipped:
            pass
        else:
            attempts.add(None, lab.calls, lab.comparisons)

    phases = [Phase.generate, Phase.shrink] if how.shrink else [Phase.generate]
    configured = settings(
        max_examples=max(1, round(PROFILES[how.profile] * check.effort)),
        phases=phases,
        database=None,
        derandomize=False,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    own_seed = zlib.crc32(f"{how.seed} {check.id} {dtype}".encode())
    message = snippet = skipped = ""
    try:
        with lab.resources:
            seed(own_seed)(configured(given(st.data())(run)))()
    except Violation as violation:
        found = attempts.failed_connection() or violation
        message, snippet = str(found), found.snippet
    except Flaky:
        found = attempts.failed_connection() or attempts.difference()
        message, snippet = str(found), found.snippet
    except Unsatisfiable as error:
        skipped = lab.reason
        message = "" if skipped else f"raised {type(error).__name__}: {error}"
    except BaseException as error:  # whatever an implementation does, there is a verdict
        message = f"raised {type(error).__name__}: {error}"
        snippet = traceback.format_exc()
    if not message:
        skipped = skipped or attempts.reason_to_skip(lab.reason)
    return Outcome(
        not message, message, snippet, attempts.until_failure, time.perf_counter() - begun, skipped
    )


class _Attempts:
    """The outcomes of inputs in the order in which they were tried; rejected inputs do not
    count.
    """

    def __init__(self) -> None:
        self._outcomes: list[Violation | None] = []
        self._counts: list[tuple[int, int]] = []
        self.not_provided = ""
        """The last NotImplementedError; empty if there was none."""

    def add(self, outcome: Violation | None, calls: int = 0, comparisons: int = 0) -> None:
        """Note the outcome of an input; None: no violation, after so many calls of the target and
        comparisons.
        """
        self._outcomes.append(outcome)
        self._counts.append((calls, comparisons))

    def reason_to_skip(self, left_out: str) -> str:
        """Return why the target is not judged although no input was a violation; empty if it is.

        Args:
            left_out: why inputs were left out.
        """
        if self.not_provided:
            return self.not_provided + f"; {len(self._outcomes)} other inputs passed" * bool(
                self._outcomes
            )
        if not self._outcomes:
            return left_out
        if any(calls and comparisons for calls, comparisons in self._counts):
            return ""
        return (
            "nothing was compared"
            if any(calls for calls, _ in self._counts)
            else "no call reached the target"
        )

    @property
    def until_failure(self) -> int:
        """Number of inputs up to the first violation, or of all inputs."""
        return next(
            (place for place, outcome in enumerate(self._outcomes, 1) if outcome is not None),
            len(self._outcomes),
        )

    def difference(self) -> Violation:
        """Return a violation about the last input, which Hypothesis tried again, with another
        outcome.
        """
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        if not failures:
            return Violation("results differ for the same input")
        last = self._outcomes[-1]
        first = failures[-1] if last is None or len(failures) < 2 else failures[-2]
        then = "no violation" if last is None or last is first else str(last)
        return Violation(
            f"results differ for the same input: at first, {first}; when it was tried again,"
            f" {then}",
            first.snippet,
        )

    def failed_connection(self) -> Violation | None:
        """Return the first of at least two violations with which every input has failed since, all
        by errors of connections.

        The input that Hypothesis has shrunk does not matter then: any would have failed. None if
        the first input already failed, as nothing is known to have worked.
        """
        lost = [
            outcome is not None and _is_of_connection(outcome.__cause__)
            for outcome in self._outcomes
        ]
        worked = len(lost) - lost[::-1].index(False) if False in lost else 0
        first = self._outcomes[worked] if 0 < worked < len(lost) - 1 else None
        if first is None:
            return None
        return Violation(
            f"{first}; {worked} inputs passed, then {len(lost) - worked} failed with connection"
            " errors: the server behind the target is probably down",
            first.snippet,
        )


def _is_of_connection(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is of a connection: by its class's name, as
    clients have their own.

    What ``raise ... from None`` hides is none: a program that ends is started again, and has
    crashed.
    """
    while error is not None:
        names = [cls.__name__ for cls in type(error).__mro__]
        if any(
            word in name
            for name in names
            for word in ("Connection", "Timeout", "Network", "Unavailable")
        ):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
