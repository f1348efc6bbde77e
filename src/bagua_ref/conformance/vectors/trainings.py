"""Trainings on all ranks of a simulated world, on given gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from bagua_ref.algorithms import Algorithm
from bagua_ref.conformance.vectors.case import canonical
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import wrap
from bagua_ref.groups.process_group import init_process_group
from bagua_ref.simulation import SimulatedWorld

__all__ = ["trained"]


class _GivenGradients(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([w.clone() for w in weights])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """Return a sum whose gradients are the given ones."""
        return torch.stack([(w * g).sum().double() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def trained(
    algorithm: str, nodes: tuple[int, ...], weights: list[Tensor], gradients: list[list[list[Tensor]]], parameters: dict[str, Any]
) -> dict[str, Tensor]:
    """Return every rank's weights after each step, and of diloco the global weights, joined.

    Args:
        algorithm: its name.
        nodes: number of ranks on each node.
        weights: that all ranks start from.
        gradients: by step, rank and parameter.
        parameters: of the case.
    """
    options = {name: value for name, value in parameters.items() if name not in ("nodes", "sizes", "lr", "momentum")}
    if algorithm == "diloco":
        settings = {name: options.pop(f"outer_{name}") for name in ("lr", "momentum", "nesterov")}
        options["outer_optimizer"] = lambda tensors: torch.optim.SGD(tensors, **settings)
        if not isinstance(options["fragments"], int):
            options["fragments"] = [[f"weights.{place}" for place in places] for places in options["fragments"]]

    def program(comm: Any) -> tuple[Tensor, Tensor]:
        init_process_group()
        module = _GivenGradients(weights)
        optimizer = torch.optim.SGD(module.parameters(), lr=parameters["lr"], momentum=parameters.get("momentum", 0.0))
        made = Algorithm.init(algorithm, **options)
        wrap(module, [optimizer], made, None, Options(backend="reference"))
        seen, seen_globally = [], []
        for of_ranks in gradients:
            optimizer.zero_grad()
            module(of_ranks[comm.rank()]).backward()
            optimizer.step()
            seen.append(_joined(module))
            if algorithm == "diloco":
                with cast("Any", module).bagua_algorithm.global_weights():
                    seen_globally.append(_joined(module))
        return torch.stack(seen), torch.stack(seen_globally or seen)

    results = SimulatedWorld(sum(nodes), nodes=nodes).run(program)
    outputs = {"x": canonical(torch.stack([x for x, _ in results], dim=1))}
    return outputs if algorithm != "diloco" else {**outputs, "g": canonical(torch.stack([g for _, g in results], dim=1))}


def _joined(module: _GivenGradients) -> Tensor:
    return torch.cat([w.detach() for w in module.weights])
