"""The outcomes of a search in their order, and what they say of a target whose results differ for the same input."""

from __future__ import annotations

from bagua_ref.conformance.lab.violation import Violation

__all__ = ["Story"]


class Story:
    """What each input has led to, in the order in which they were tried; rejected inputs do not count."""

    def __init__(self) -> None:
        self._outcomes: list[Violation | None] = []

    def add(self, outcome: Violation | None) -> None:
        """Note the outcome of an input; None: no violation."""
        self._outcomes.append(outcome)

    @property
    def until_failure(self) -> int:
        """Number of inputs up to the first violation, or of all inputs."""
        return next((place for place, outcome in enumerate(self._outcomes, 1) if outcome is not None), len(self._outcomes))

    def difference(self) -> Violation:
        """Return what to say of an input that Hypothesis tried again, with another outcome: that is always the last one."""
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        if not failures:
            return Violation("results differ for the same input")
        last = self._outcomes[-1]
        first = failures[-1] if last is None or len(failures) < 2 else failures[-2]
        then = "no violation" if last is None or last is first else str(last)
        return Violation(f"results differ for the same input: at first, {first}; when it was tried again, {then}", first.snippet)

    def failed_connection(self) -> Violation | None:
        """Return the first of at least two violations with which every input has failed since, all by errors of connections.

        The input that Hypothesis has shrunk does not matter then: any would have failed. None if the first input already failed,
        as nothing is known to have worked.
        """
        lost = [outcome is not None and _is_of_connection(outcome.__cause__) for outcome in self._outcomes]
        worked = len(lost) - lost[::-1].index(False) if False in lost else 0
        first = self._outcomes[worked] if 0 < worked < len(lost) - 1 else None
        if first is None:
            return None
        return Violation(
            f"{first}; {worked} inputs came through before, and all {len(lost) - worked} since have failed with errors of a "
            "connection: what the target is connected to seems to have died",
            first.snippet,
        )


def _is_of_connection(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is of a connection: by its class's name, as clients have their own."""
    while error is not None:
        names = [cls.__name__ for cls in type(error).__mro__]
        if any(word in name for name in names for word in ("Connection", "Timeout", "Network", "Unavailable")):
            return True
        error = error.__cause__ or error.__context__
    return False
