"""Decent-DP's groups of parameters: which of them are decayed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from findings.common import Row, judged
from torch import nn

from bagua_ref.conformance.expected.tolerances import ULP, assert_equal

PEER = "decent-dp==0.2.3"
NAMES = ("optim_fn_adam", "optim_fn_adamw", "optim_fn_accum_adam", "optim_fn_accum_adamw")


def complaint(make: str) -> str | None:
    """Return how a step with gradients of zero, which only decays, leaves weights and biases other
    than AdamW's rule does.
    """
    from decent_dp import optim

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(optim, make)(
        [(f"{'fc' if n[0] == '0' else 'bn'}.{n[2:]}", p) for n, p in model.named_parameters()]
    )
    decays = {
        place: group["weight_decay"]
        for group in optimizer.param_groups
        for place in map(id, group["params"])
    }
    rates = {name: decays[id(parameter)] for name, parameter in model.named_parameters()}
    try:
        for name, rate in rates.items():
            wanted = max(rates.values()) if name == "0.weight" else 0.0
            assert_equal(torch.tensor(rate), torch.tensor(wanted), ULP(1))
    except AssertionError as error:
        return f"weight_decay of {name!r}: {error} (of all: {rates})"
    return None


def find() -> Iterator[Row]:
    for make in NAMES:
        yield judged(
            f"Decent-DP {make} ({PEER})",
            "none: its own documentation",
            "which parameters are decayed",
            complaint(make),
            why=(
                "Names with `bias` or `bn` get the weight decay, and weights get none: the two"
                " lists are swapped."
            ),
            promise=(
                "Its helper returns, by its description, one group with weight decay and one"
                " without; the usual rule decays weights and spares biases and norms, and the names"
                " of its variables say the same."
            ),
            given="A Linear and a BatchNorm layer, named `fc` and `bn`, default arguments",
            effect=(
                "Weights are trained without weight decay, and biases and the scales of norms are"
                " pulled to zero."
            ),
        )
