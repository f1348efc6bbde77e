"""How ranks train together: one file an algorithm, and the registry of their names (S5)."""

from bagua_ref.algorithms import async_model_average, bytegrad, gradient_allreduce
from bagua_ref.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, TrainingContext
from bagua_ref.algorithms.bytegrad import ByteGradAlgorithm
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "TrainingContext",
    "async_model_average",
    "bytegrad",
    "gradient_allreduce",
]

GlobalAlgorithmRegistry.register("gradient_allreduce", GradientAllReduceAlgorithm)
GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm)
GlobalAlgorithmRegistry.register("async", AsyncModelAverageAlgorithm)
