"""Training algorithms, one file each, and the registry of their names (S5)."""

from bagua_ref.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from bagua_ref.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, TrainingContext
from bagua_ref.algorithms.bytegrad import ByteGradAlgorithm
from bagua_ref.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_ref.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "TrainingContext",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]

GlobalAlgorithmRegistry.register("gradient_allreduce", GradientAllReduceAlgorithm)
GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm)
GlobalAlgorithmRegistry.register("decentralized", DecentralizedAlgorithm)
GlobalAlgorithmRegistry.register("low_precision_decentralized", LowPrecisionDecentralizedAlgorithm)
GlobalAlgorithmRegistry.register("qadam", QAdamAlgorithm)
GlobalAlgorithmRegistry.register("async", AsyncModelAverageAlgorithm)
