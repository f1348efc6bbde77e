"""Training algorithms, one file each, and the registry of their names (S5)."""

from bagua_ref.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua_ref.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    TrainingContext,
)
from bagua_ref.algorithms.bytegrad import ByteGradAlgorithm
from bagua_ref.algorithms.decentralized import (
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_ref.algorithms.demo import DemoAlgorithm
from bagua_ref.algorithms.diloco import DiLoCoAlgorithm
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_ref.algorithms.local_sgd import LocalSGDAlgorithm
from bagua_ref.algorithms.power_sgd import PowerSGDAlgorithm
from bagua_ref.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua_ref.algorithms.topk import TopKAlgorithm
from bagua_ref.algorithms.traits import Rounds, Traits, WithoutBatch

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "DemoAlgorithm",
    "DiLoCoAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LocalSGDAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "Rounds",
    "TopKAlgorithm",
    "TrainingContext",
    "Traits",
    "WithoutBatch",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "demo",
    "diloco",
    "gradient_allreduce",
    "local_sgd",
    "power_sgd",
    "q_adam",
    "topk",
]
