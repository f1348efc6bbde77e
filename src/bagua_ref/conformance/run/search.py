"""Search for an input that violates a check: Hypothesis draws and shrinks, the outcome is plain
data.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bagua_ref.conformance.checks.registry import Check
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Skipped, Violation
from bagua_ref.conformance.targets.target import Target
from bagua_ref.conformance.targets.world import MOST_RANKS

PROFILES = {"quick": 40, "full": 500, "large": 40}
"""Name -> number of inputs for each check and dtype, to be multiplied by the check's effort. In
"large", long inputs are longer.
"""


_FRESH = 9
"""Most inputs of one search by Hypothesis: after 10, five of six are variants of earlier ones, and
of 10, two are as small as possible.
"""


@dataclass
class Outcome:
    """The outcome of a search.

    Attributes:
        message: description of the violation; empty if no counterexample was found.
        snippet: Python source that reproduces the violation.
        examples: number of inputs up to the first failure, or of all inputs.
        seconds: duration.
        skipped: reason why the target was not judged; empty if it was.
    """

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
    from hypothesis.errors import Flaky, Unsatisfiable, UnsatisfiedAssumption

    lab = Lab(target, dtype, journal, how.profile == "large", MOST_RANKS.get(check.suite))
    begun, attempts = time.perf_counter(), _Attempts()

    def attempt(judge: Callable[[], None]) -> None:
        journal.mark()
        lab.begin()
        try:
            judge()
        except Violation as violation:
            if not violation.not_provided():
                attempts.outcomes.append(violation)
                raise
            attempts.not_provided = f"not provided: {violation}".splitlines()[0][:300]
        except Skipped:
            pass
        else:
            attempts.outcomes.append(None)
            attempts.called |= lab.calls > 0
            attempts.compared |= lab.calls > 0 and lab.comparisons > 0

    def run(data: Any) -> None:
        attempt(lambda: check.function(lab, data.draw))

    inputs = max(1, round(PROFILES[how.profile] * check.effort))
    searches = -(-inputs // _FRESH)
    configured = settings(
        max_examples=-(-inputs // searches),
        phases=[Phase.generate, *[Phase.shrink] * how.shrink],
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
        for number in range(searches):
            try:
                seed(own_seed + number)(configured(given(st.data())(run)))()
            except Unsatisfiable as error:  # others may still fit
                lab.reason = lab.reason or f"raised {type(error).__name__}: {error}"
        if check.walk is not None:  # at last, as drawn failures are made small
            with suppress(UnsatisfiedAssumption):  # a world of more ranks than the target has
                attempt(partial(check.walk, lab))
    except Violation as violation:
        message, snippet = str(violation), violation.snippet
    except Flaky:
        message, snippet = attempts.difference()
    except BaseException as error:  # whatever an implementation does, there is a verdict
        message = f"raised {type(error).__name__}: {error}"
        snippet = traceback.format_exc()
    if not message:
        unreached = "no call reached the target"
        if target.requests is not None:
            unreached = "cannot be asked: requests have valid arguments, so that none was sent"
        skipped = attempts.reason_to_skip(lab.reason, unreached)
    return Outcome(message, snippet, attempts.count, time.perf_counter() - begun, skipped)


@dataclass
class _Attempts:
    """The outcomes of inputs in the order of the attempts; rejected inputs do not count.

    Attributes:
        outcomes: None for each input without a violation.
        called: whether a call has reached the target in one of these.
        compared: whether a comparison followed.
        not_provided: the last NotImplementedError; empty if there was none.
    """

    outcomes: list[Violation | None] = field(default_factory=list)
    called: bool = False
    compared: bool = False
    not_provided: str = ""

    def reason_to_skip(self, left_out: str, unreached: str) -> str:
        """Return the reason for skipping a check without violations; empty if the target was
        judged.

        Args:
            left_out: reason for skipped inputs.
            unreached: message if no call has reached the target.
        """
        if self.not_provided:
            others = f"; {len(self.outcomes)} other inputs passed" if self.outcomes else ""
            return self.not_provided + others
        if not self.outcomes:
            return left_out
        if self.compared:
            return ""
        return "nothing was compared" if self.called else unreached

    @property
    def count(self) -> int:
        """Number of inputs up to the first violation, or of all inputs."""
        passed = [outcome is None for outcome in self.outcomes]
        return passed.index(False) + 1 if False in passed else len(passed)

    def difference(self) -> tuple[str, str]:
        """Return a message and a snippet about an input whose outcome differed when Hypothesis
        repeated it.
        """
        failures = [outcome for outcome in self.outcomes if outcome is not None]
        if not failures:
            return "results differ for the same input", ""
        last = self.outcomes[-1]
        first = failures[-1] if last is None or len(failures) < 2 else failures[-2]
        then = "no violation" if last is None or last is first else str(last)
        differ = f"at first, {first}; when it was tried again, {then}"
        return f"results differ for the same input: {differ}", first.snippet
