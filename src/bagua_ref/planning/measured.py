"""Costs with their uncertainty: fits of measured times, and their JSON (S14.2 to S14.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import attrgetter
from statistics import median, stdev
from typing import Any, NamedTuple

import numpy as np

from bagua_ref.base.untrusted import check_form
from bagua_ref.formulas.costs import LinkCost, LinkCosts
from bagua_ref.planning.plans import Machine

__all__ = ["Estimate", "Fit", "MeasuredMachine", "exact", "fit_link", "median_of"]

_ERRORS = 2
"""Standard errors from an estimate to either end of its interval: 95 % of normal ones are
nearer.
"""


class Estimate(NamedTuple):
    """A number and its interval.

    >>> Estimate.with_error(2.0, 0.5)
    Estimate(low=1.0, value=2.0, high=3.0)
    """

    low: float
    value: float
    high: float

    @classmethod
    def with_error(cls, value: float, standard_error: float) -> Estimate:
        """Return an estimate with the interval of two standard errors, and never below 0."""
        return cls(
            max(0.0, value - _ERRORS * standard_error), value, value + _ERRORS * standard_error
        )


def exact(value: float) -> Estimate:
    """Return an estimate without an interval, as of a cost that a user gives."""
    return Estimate(value, value, value)


def median_of(times: Sequence[float]) -> Estimate:
    """Return the median of two or more times, which a single pause does not move, with the standard
    error of their mean.
    """
    return Estimate.with_error(median(times), stdev(times) / math.sqrt(len(times)))


class Fit(NamedTuple):
    """Alpha and beta of one kind of link, and for each time the part by which the fitted one
    differs from it.
    """

    alpha: Estimate
    beta: Estimate
    residuals: list[float]


def fit_link(rounds: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Return the alpha and beta with which ``rounds * alpha + nbytes * beta`` is nearest to
    ``seconds`` (S14.2).

    The sum of the relative errors is the least, so that short times count as much as long ones, and
    one size that a network treats otherwise, such as what it sends at once after a pause, does not
    move the rest. Neither cost is below 0.

    Args:
        rounds: of each operation.
        nbytes: of each operation, the sum over its rounds of the most bytes on a link.
        seconds: which they took; at least three, above 0.

    Raises:
        ValueError: the operations do not tell alpha from beta.

    >>> fit = fit_link([2, 2, 2], [0, 1000, 4000], [0.2, 0.3, 0.6])
    >>> round(fit.alpha.value, 9), round(fit.beta.value, 9)
    (0.1, 0.0001)

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994, for alpha and
    beta; Bloomfield and Steiger, "Least Absolute Deviations", 1983: a best line passes through two
    of the points.
    """
    times = np.asarray(seconds, dtype=np.float64)
    features = (
        np.stack(
            [np.asarray(rounds, dtype=np.float64), np.asarray(nbytes, dtype=np.float64)], axis=1
        )
        / times[:, None]
    )
    if len(times) < 3 or np.linalg.matrix_rank(features) < 2:
        raise ValueError(
            f"{len(times)} operations do not tell alpha from beta; use three or more, of different"
            " sizes"
        )
    pairs = [
        np.linalg.lstsq(features[list(two)], np.ones(2), rcond=None)[0]
        for two in combinations(range(len(times)), 2)
    ]
    alone = [np.eye(2)[place] / row[place] for row in features for place in (0, 1) if row[place]]
    lines = np.array([line for line in (*pairs, *alone) if (line >= 0).all()])
    residuals_of = lines @ features.T - 1
    best = np.abs(residuals_of).sum(axis=1).argmin()
    found, residuals = lines[best], residuals_of[best]
    variance = (residuals**2).sum() / (len(times) - 2)
    errors = np.sqrt(np.diag(np.linalg.inv(features.T @ features)) * variance)
    alpha, beta = (
        Estimate.with_error(float(value), float(error))
        for value, error in zip(found, errors, strict=True)
    )
    return Fit(alpha, beta, residuals.tolist())


@dataclass
class MeasuredMachine:
    """Costs with their intervals.

    Attributes:
        between: alpha and beta between nodes; None: not measured.
        inside: those inside a node; None: not measured.
        compute: seconds of a forward and backward pass; None: not measured.
        codec: seconds per element, by codec.
        operation: seconds of an operation on a bucket, by codec.
        shared_processor: whether the processor that computes does both.
        about: where the numbers come from.
    """

    between: tuple[Estimate, Estimate] | None
    inside: tuple[Estimate, Estimate] | None
    compute: Estimate | None = None
    codec: Mapping[str, Estimate] = field(default_factory=dict)
    operation: Mapping[str, Estimate] = field(default_factory=dict)
    shared_processor: bool = False
    about: str = ""

    def machine(
        self,
        end: Callable[[Estimate], float] = attrgetter("value"),
        /,
        slowest: float = 1.0,
        jitter: float = 0.0,
    ) -> Machine:
        """Return the likely costs, or those at the same end of all intervals, such as ``lambda
        estimate: estimate.low``.

        Raises:
            ValueError: some were not measured.
        """
        if self.compute is None or self.between is None or self.inside is None:
            lacking = [
                name for name in ("between", "inside", "compute") if getattr(self, name) is None
            ]
            raise ValueError(f"costs were not measured: {', '.join(lacking)}")
        links = LinkCosts(*(LinkCost(*map(end, link)) for link in (self.between, self.inside)))
        codec, operation = (
            {name: end(cost) for name, cost in costs.items()}
            for costs in (self.codec, self.operation)
        )
        return Machine(
            links,
            end(self.compute),
            0.0,
            codec,
            operation,
            self.shared_processor,
            slowest,
            jitter,
            at_once=True,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object that `from_json` reads."""
        measured = {"between": self.between, "inside": self.inside}
        links = {
            kind: link and {"alpha": list(link[0]), "beta": list(link[1])}
            for kind, link in measured.items()
        }
        codec, operation = (
            {name: list(cost) for name, cost in costs.items()}
            for costs in (self.codec, self.operation)
        )
        return {
            "links": links,
            "compute": self.compute and list(self.compute),
            "codec": codec,
            "operation": operation,
            "shared_processor": self.shared_processor,
            "about": self.about,
        }

    @classmethod
    def from_json(cls, value: Any) -> MeasuredMachine:
        """Return the costs that `as_json` wrote.

        Raises:
            ValueError: the object has another form, or a number is negative, not finite or outside
                its interval.

        >>> MeasuredMachine.from_json({"links": {}})
        Traceback (most recent call last):
        ...
        ValueError: the measured costs must have the key 'codec'
        """
        what, numbers = "the measured costs", [(int, float)] * 3
        link = {"alpha": numbers, "beta": numbers}
        by_codec = {str: numbers}
        form = {
            "links": {"between?": link, "inside?": link},
            "compute?": numbers,
            "codec": by_codec,
            "about?": str,
        }
        check_form(value, form | {"operation?": by_codec, "shared_processor?": bool}, what)

        def estimate(found: Sequence[float], name: str) -> Estimate:
            if not 0 <= found[0] <= found[1] <= found[2] < math.inf:
                raise ValueError(
                    f"{what}: {name}={found} must be three numbers from 0 on that do not fall: low,"
                    " value, high"
                )
            return Estimate(*map(float, found))

        links = {
            kind: (estimate(link["alpha"], f"alpha {kind}"), estimate(link["beta"], f"beta {kind}"))
            for kind in ("between", "inside")
            if (link := value["links"].get(kind)) is not None
        }
        codec, operation = (
            {
                name: estimate(cost, f"{kind} {name!r}")
                for name, cost in (value.get(kind) or {}).items()
            }
            for kind in ("codec", "operation")
        )
        compute = value.get("compute") and estimate(value["compute"], "compute")
        shared, about = bool(value.get("shared_processor")), value.get("about") or ""
        return cls(
            links.get("between"), links.get("inside"), compute, codec, operation, shared, about
        )
