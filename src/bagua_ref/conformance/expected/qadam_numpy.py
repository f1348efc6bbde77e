"""QAdam on n ranks at once, from gradients to weights (S5.5).

The warm-up is the installed ``torch.optim.Adam``, because that is how S5.5 defines it: its fused operations are not the same on
every processor. All that follows is one number at a time.

A parameter is a flat list of numbers of the dtype. Ranks hold the same weights and moments at every step, so there is one copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bagua_ref.conformance.expected.algorithms_plain import one_byte
from bagua_ref.conformance.expected.kernels_scalar import arithmetic, divide, reduce_in_order, to, update_momentum

Parameters = list[list[float]]


class QAdam:
    """The weights and moments, which are the same on all ranks.

    Args:
        weights: each parameter's numbers.
        options: each parameter's ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        warmup_steps: the last step with exact gradients.
        nodes: number of ranks on each node.
        buckets: places of the parameters in each bucket, in order.
        hierarchical: compress between node leaders.
        dtype: of all parameters.
    """

    def __init__(
        self,
        weights: Parameters,
        options: list[dict[str, Any]],
        warmup_steps: int,
        nodes: list[int],
        buckets: list[list[int]],
        hierarchical: bool,
        dtype: str = "float32",
    ) -> None:
        self.weights, self.options, self.warmup_steps = [list(w) for w in weights], options, warmup_steps
        self.nodes, self.buckets, self.hierarchical, self.dtype = nodes, buckets, hierarchical, dtype
        self.m: Parameters = [[0.0] * len(w) for w in weights]
        self.v: Parameters = [[0.0] * len(w) for w in weights]
        self.s = 0
        self._in_torch = [torch.nn.Parameter(torch.tensor(w, dtype=getattr(torch, dtype))) for w in weights]
        groups = [{"params": [p], **o} for p, o in zip(self._in_torch, options, strict=True)]
        self._adam = torch.optim.Adam(groups, foreach=False)

    def step(self, gradients: list[Parameters], options: list[dict[str, Any]] | None = None) -> None:
        """Take a step with every rank's gradients; ``options`` replace the previous ones, as a scheduler does."""
        self.options = options or self.options
        self.s += 1
        if self.s > self.warmup_steps:
            self._exchange_momenta(gradients)
        if self.s < self.warmup_steps:
            self._step_adam(gradients)
        else:
            for place in range(len(self.weights)):
                self._step_frozen(place)

    def _step_adam(self, gradients: list[Parameters]) -> None:
        for place, parameter in enumerate(self._in_torch):
            columns = zip(*[rank[place] for rank in gradients], strict=True)
            mean = [reduce_in_order(self.dtype, list(column), True) for column in columns]
            parameter.grad = torch.tensor(mean, dtype=parameter.dtype)
            self._adam.param_groups[place].update(self.options[place])
        self._adam.step()
        for place, parameter in enumerate(self._in_torch):
            self.weights[place] = parameter.tolist()
            self.m[place] = self._adam.state[parameter]["exp_avg"].tolist()
            self.v[place] = self._adam.state[parameter]["exp_avg_sq"].tolist()

    def _exchange_momenta(self, gradients: list[Parameters]) -> None:
        exchange = one_byte(average=True, nodes=self.nodes, between_leaders=self.hierarchical)
        for bucket in self.buckets:
            xs = []
            for rank in gradients:
                x: list[float] = []
                for place in bucket:
                    beta1 = self.options[place]["betas"][0]
                    x += [update_momentum(self.dtype, m, g, beta1) for m, g in zip(self.m[place], rank[place], strict=True)]
                xs.append(x)
            results = exchange(xs, self.dtype)
            assert all(np.array_equal(result, results[0], equal_nan=True) for result in results)
            for place in bucket:
                size = len(self.m[place])
                self.m[place], results[0] = results[0][:size], results[0][size:]

    def _step_frozen(self, place: int) -> None:
        options = {name: self.options[place][name] for name in ("lr", "betas", "eps")}
        m, v, past = self.m[place], self.v[place], self.s > self.warmup_steps
        self.weights[place] = step_along_momentum(self.dtype, self.weights[place], m, v, self.s, keeps_zeros=past, **options)


def step_along_momentum(
    dtype: str,
    weights: list[float],
    m: list[float],
    v: list[float],
    s: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keeps_zeros: bool = True,
) -> list[float]:
    """Return one parameter's weights after step s of S5.5; where v is 0, they stay as they are if ``keeps_zeros``."""
    r = arithmetic(dtype)
    step_size, correction = r(-lr / (1 - betas[0] ** s)), r((1 - betas[1] ** s) ** 0.5)
    # A float16 denominator is formed in float32, where eps does not vanish.
    wide = "float32" if dtype == "float16" else dtype
    roots = torch.tensor(v, dtype=getattr(torch, wide)).sqrt().tolist()  # its last bit is torch's own (S1)
    moved = list(weights)
    for i, (p, momentum, root) in enumerate(zip(weights, m, roots, strict=True)):
        if root == 0 and keeps_zeros:
            continue
        denominator = to(wide, r(to(wide, r(divide(root, correction))) + to(wide, r(eps))))
        moved[i] = to(dtype, r(p + r(divide(r(step_size * momentum), denominator))))
    return moved
