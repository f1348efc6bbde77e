"""Rows of the table of findings, and the ranks that living implementations run on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tests.launch import launch

from bagua_ref.conformance.expected.tolerances import Tolerance, assert_equal

DIFFERS = "differs by design"
RANKS = 2


@dataclass(frozen=True)
class Row:
    """What an implementation does in one case of a clause.

    Args:
        implementation: its name and version.
        clause: of the specification.
        case: what was run.
        verdict: "agrees", "differs by design", "fault" or "not judged".
        why: what is wrong, what the design is, or why it was not judged; empty where it agrees.
        promise: what its documentation says of the case, in our words.
        given: the input.
        complaint: of the check that failed: expected and got.
        effect: on training.
    """

    implementation: str
    clause: str
    case: str
    verdict: str
    why: str = ""
    promise: str = ""
    given: str = ""
    complaint: str = ""
    effect: str = ""


def judged(
    implementation: str,
    clause: str,
    case: str,
    complaint: str | None,
    otherwise: str = "fault",
    **words: str,
) -> Row:
    """Return a row: it agrees if no check complained, else the verdict is ``otherwise``."""
    if complaint is None:
        return Row(implementation, clause, case, "agrees", given=words.get("given", ""))
    return Row(implementation, clause, case, otherwise, complaint=complaint, **words)


def missing(peer: str) -> str | None:
    """Return why ``peer``, a name==version, cannot be run, or None."""
    name, _, pinned = peer.partition("==")
    try:
        version = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    return (
        None
        if version == pinned
        else f"{name} {version} is installed, and the script is about {pinned}"
    )


def on_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``function(*arguments)`` on two ranks over gloo."""
    return launch(function, RANKS, *arguments)


class Given(torch.nn.Module):
    """A module of parameters of ones whose gradients are its inputs."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]
        ).sum()


def gradients(sizes: list[int], steps: int, ranks: int = RANKS) -> list[list[list[torch.Tensor]]]:
    """Return gradients by step, rank and parameter, drawn from N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    return [
        [[torch.randn(size, generator=generator) for size in sizes] for _ in range(ranks)]
        for _ in range(steps)
    ]


def first_difference(found: list[Any], wanted: list[Any], tolerance: Tolerance) -> str | None:
    """Return where weights, by rank, step and parameter, first leave the expected ones, by step,
    rank and parameter.
    """
    for step, of_ranks in enumerate(wanted):
        for rank, weights in enumerate(of_ranks):
            for place, w in enumerate(weights):
                try:
                    assert_equal(
                        found[rank][step][place], torch.as_tensor(w), tolerance, magnitude=1.0
                    )
                except AssertionError as error:
                    return f"after step {step + 1}, rank {rank}, parameter {place}: {error}"
    return None
