"""Plans of trainings: what every algorithm sends in each step, and how long steps take, from
formulas alone (S14).
"""

from bagua_ref.planning.measured import (
    Estimate,
    Fit,
    MeasuredMachine,
    fit_link,
    median_of,
)
from bagua_ref.planning.plans import (
    Exchange,
    Machine,
    Prediction,
    StepPlan,
    exchange_seconds,
    plan_of,
    predict,
    step_seconds,
)
from bagua_ref.planning.shapes import Cluster, module_of

__all__ = [
    "Cluster",
    "Estimate",
    "Exchange",
    "Fit",
    "Machine",
    "MeasuredMachine",
    "Prediction",
    "StepPlan",
    "exchange_seconds",
    "fit_link",
    "median_of",
    "module_of",
    "plan_of",
    "predict",
    "step_seconds",
]
