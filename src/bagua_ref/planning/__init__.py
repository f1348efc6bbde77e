"""Plans of trainings: what every algorithm sends in each step, and how long steps take, from
formulas alone (S14).
"""

from bagua_ref.planning.measured import (
    Estimate,
    Fit,
    MeasuredMachine,
    costs_of_job,
    fit_link,
    median_of,
)
from bagua_ref.planning.plans import plan_of
from bagua_ref.planning.shapes import BucketShape, Cluster, Parameters, module_of
from bagua_ref.planning.steps import (
    Exchange,
    Machine,
    Prediction,
    StepPlan,
    exchange_seconds,
    predict,
    step_seconds,
)

__all__ = [
    "BucketShape",
    "Cluster",
    "Estimate",
    "Exchange",
    "Fit",
    "Machine",
    "MeasuredMachine",
    "Parameters",
    "Prediction",
    "StepPlan",
    "costs_of_job",
    "exchange_seconds",
    "fit_link",
    "median_of",
    "module_of",
    "plan_of",
    "predict",
    "step_seconds",
]
