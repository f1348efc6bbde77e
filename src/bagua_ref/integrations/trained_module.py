"""Wrapping of a trainer's module with an algorithm that is given by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import context_of, named, wrap

__all__ = ["Recipe", "call_if_there"]


class Recipe:
    """An algorithm's name and options, before there is a module and its optimizers.

    Args:
        algorithm: a registered name.
        options: the algorithm's.
        caller: what the user called, for messages.
        do_flatten: as for `bagua_ref.distributed.BaguaModule.with_bagua`; so is find_unused_parameters.

    Raises:
        ValueError: there is no such algorithm, or an option is out of range; raised here rather than in processes that start later.
        TypeError: the algorithm has no such option.
    """

    def __init__(
        self, algorithm: str, options: dict[str, Any], caller: str, *, do_flatten: bool = True, find_unused_parameters: bool = False
    ) -> None:
        GlobalAlgorithmRegistry.get(algorithm)
        if algorithm != "qadam":  # which needs its optimizer
            Algorithm.init(algorithm, **options)
        self.algorithm, self.options, self._caller = algorithm, options, caller
        self.do_flatten, self.find_unused_parameters = do_flatten, find_unused_parameters

    def wrap(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Wrap ``module``; "qadam" takes the one optimizer.

        Raises:
            ValueError: "qadam" has another optimizer than one QAdamOptimizer.
        """
        algorithm = named(self.algorithm, optimizers, **self.options)
        of_training = Options(self.do_flatten, find_unused_parameters=self.find_unused_parameters)
        wrap(module, list(optimizers), algorithm, None, of_training, self._caller)


def call_if_there(name: str, module: torch.nn.Module) -> None:
    """Call ``abort`` or ``resume`` of the algorithm of ``module``, if it is wrapped and its algorithm has such a method."""
    context = context_of(module)
    method = None if context is None else getattr(context.bagua_algorithm, name, None)
    if method is not None:
        method(context)
