"""Plans of trainings: what each algorithm sends in each step, and how long a step takes (S14)."""

from bagua_ref.planning.exchanges import Cluster, Exchange
from bagua_ref.planning.plans import StepPlan, module_of, plan_of
from bagua_ref.planning.pricing import (
    Machine,
    Prediction,
    exchange_seconds,
    fit_link,
    predict,
    step_seconds,
)

__all__ = [
    "Cluster",
    "Exchange",
    "Machine",
    "Prediction",
    "StepPlan",
    "exchange_seconds",
    "fit_link",
    "module_of",
    "plan_of",
    "predict",
    "step_seconds",
]
