"""A GradScaler that skips the same steps on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from bagua_ref.data_parallel.guard import trainings_of
from bagua_ref.data_parallel.rounds import STEP

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, with agreement between ranks on skipped steps where their gradients
    differ.

    found_inf <- maximum over the ranks of found_inf

    Under algorithms that need equally many optimizer steps on all ranks but leave gradients local,
    such as low_precision_decentralized, a step is skipped on all ranks if gradients overflow on
    any; so the scale stays equal, too. That takes one small message to each other rank per step.
    Where ranks have equal gradients (gradient_allreduce, bytegrad, qadam) or may take different
    steps (decentralized, async), this is torch's GradScaler. It finds the wrapped modules through
    the optimizer's parameters.

    Inside `bagua_ref.join` it must be among the ``joinables``, so that ranks that run out of
    batches load its scale.

    Its arguments are those of ``torch.amp.GradScaler``: ``device`` ("cuda" or "cpu"),
    ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` (in steps) and
    ``enabled``.

    >>> import bagua_ref
    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model = model.with_bagua([optimizer], bagua_ref.algorithms.LowPrecisionDecentralizedAlgorithm(hierarchical=False))
    >>> scaler = bagua_ref.GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(model(torch.full((1, 4), torch.inf)).sum()).backward()
    >>> scaler.step(optimizer); scaler.update(); scaler.get_scale()
    4.0
    >>> bagua_ref.destroy_process_group()

    Source: ``torch.amp.GradScaler``.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale gradients as torch's class does; an overflow found on one rank counts on all
        ranks.
        """
        found_inf = super()._unscale_grads_(optimizer, *args, **kwargs)
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for training in trainings_of(held):
            rounds, algorithm = training.rounds, training.bagua_algorithm
            if rounds.joining is not None and self not in rounds.joining.others:
                raise RuntimeError(
                    "a GradScaler used inside join() must be among its joinables, so that ranks"
                    " without batches take over its scale: join([model, scaler])"
                )
            if not algorithm.traits.same_steps or algorithm.traits.same_replicas:
                continue
            overflows = any(found.item() for found in found_inf.values())
            if rounds.announce(STEP, overflows).flag:
                for found in found_inf.values():
                    found.fill_(1)
        return found_inf
