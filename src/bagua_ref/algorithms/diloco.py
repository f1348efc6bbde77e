"""DiLoCo: local steps, and an outer optimizer on the mean of what they changed; streaming in fragments (S9.2 to S9.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm
from bagua_ref.algorithms.diloco_impl import DiLoCoAlgorithmImpl
from bagua_ref.algorithms.error_memories import check_error_feedback
from bagua_ref.algorithms.fragments import Schedule, named_fragments
from bagua_ref.algorithms.local_updates import check_optimizers, check_whole
from bagua_ref.buckets.compression import check_compression
from bagua_ref.types import Group

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl"]


class DiLoCoAlgorithm(Algorithm):
    """Every rank trains on its own gradients; now and then an outer optimizer moves shared global weights (S9.2 to S9.6).

    The global weights g start as the weights x of the first local step. Every ``period`` steps, ``D = mean over ranks of (g - x)``
    becomes the gradient with which the outer optimizer updates g, and x becomes g. The state of the inner optimizers stays local.

    Streaming: with P fragments, each is sent once per period, ``gap = period/P`` steps after the one before. Its mean is computed
    in the background during the next ``delay`` steps and applied after them: ``x <- g + mix*(x - g)``. With t' the steps after the
    warm-up, from 1, fragment p is sent after the step with ``t' = (p+1)*gap - delay (mod period)``.

    Each rank sends ``8 (n-1)/n`` bytes per float32 weight every ``period`` steps, about a quarter with compression. It keeps g in
    float32 (float64 for float64 weights), the outer optimizer's state, and one fragment while it is in flight.

    Args:
        period: steps after which every fragment has been sent once.
        outer_optimizer: makes an optimizer of a list of tensors, the part of g in a fragment; called for each fragment when the
            module is wrapped. None: ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        fragments: their number P, which splits the parameters into contiguous parts of about equal size, or lists of parameter
            names in which each trained parameter stands exactly once.
        delay: steps from sending a fragment to applying its mean, from 0 to gap - 1. With 0, training waits for the mean.
        mix: the share of x that a rank keeps when a fragment is applied, from 0 (x becomes g) to 1 (x stays).
        warmup_steps: steps on averaged gradients first, as `GradientAllReduceAlgorithm` takes them, bit for bit.
        compression: None, or the name of a codec, one of `bagua_ref.list_codecs` (S3.2, S4, S12).
        error_feedback: keep what compression leaves out, in float32, and add it to the fragment's next difference (S11.1).

    Raises:
        ValueError: an argument is out of range; on wrapping: no optimizer was passed, more fragments than parameters, lists of
            names that do not fit the module, an outer optimizer of other tensors.
        TypeError: an argument is of another type; on wrapping: float64 parameters with compression, an ``outer_optimizer`` that
            returns something else.

    >>> DiLoCoAlgorithm(period=32, fragments=4, delay=2, mix=0.5).schedule()
    Schedule(period=32, count=4, delay=2)

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv:2311.08105), and
    "Streaming DiLoCo with overlapping communication", 2025 (arXiv:2501.18512).
    """

    takes_shards = True

    def __init__(
        self,
        period: int = 500,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        delay: int = 0,
        mix: float = 0.0,
        warmup_steps: int = 0,
        compression: str | None = None,
        error_feedback: bool = False,
    ) -> None:
        check_whole("period", period, 1)
        check_whole("delay", delay, 0)
        check_whole("warmup_steps", warmup_steps, 0)
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise TypeError(f"outer_optimizer={outer_optimizer!r} must be None, or make an optimizer of a list of tensors")
        if not isinstance(mix, (int, float)) or isinstance(mix, bool):
            raise TypeError(f"mix={mix!r} must be a number from 0 to 1")
        if not 0 <= mix <= 1:
            raise ValueError(f"mix={mix} must be from 0 to 1")
        check_compression(compression, optional=True)
        check_error_feedback(error_feedback)
        if error_feedback and compression is None:
            raise ValueError("error_feedback=True keeps what compression leaves out, and compression is None; name a codec")
        self.period, self.outer_optimizer, self.fragments = period, outer_optimizer, _checked_fragments(fragments)
        self.delay, self.mix, self.warmup_steps = delay, mix, warmup_steps
        self.compression, self.error_feedback = compression, error_feedback
        self.schedule()  # raises if these do not fit together

    def schedule(self) -> Schedule:
        """Return which fragment is sent, and which is applied, after which step."""
        count = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return Schedule(self.period, count, self.delay)

    def check(self, parameters: list[tuple[str, torch.nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse fragments that do not fit the module, float64 with compression, and a training without optimizers."""
        check_optimizers("diloco", optimizers)
        named_fragments(self.fragments, parameters)
        for name, parameter in parameters:
            if self.compression is not None and parameter.dtype is torch.float64:
                raise TypeError(
                    f"parameter {name!r} is float64, which compression={self.compression!r} does not take; use compression=None"
                )

    def reify(self, process_group: Group) -> DiLoCoAlgorithmImpl:
        """Return the implementation for one module."""
        make = _default_outer_optimizer if self.outer_optimizer is None else self.outer_optimizer
        return DiLoCoAlgorithmImpl(
            process_group,
            self.schedule(),
            make,
            self.fragments,
            self.mix,
            self.warmup_steps,
            self.compression,
            self.error_feedback,
        )


def _default_outer_optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _checked_fragments(fragments: int | Sequence[Sequence[str]]) -> int | list[list[str]]:
    """Return a number or lists of names; whether the names fit a module is not known yet."""
    if isinstance(fragments, int):
        check_whole("fragments", fragments, 1)
        return fragments
    lists = isinstance(fragments, (list, tuple)) and all(isinstance(names, (list, tuple)) for names in fragments)
    if not lists or not all(isinstance(name, str) for names in fragments for name in names):
        raise TypeError(f"fragments={fragments!r} must be an int, or a list of lists of parameter names")
    if not fragments:
        raise ValueError("fragments=[] must hold at least one list of parameter names")
    for place, names in enumerate(fragments):
        if not names:
            raise ValueError(f"fragments[{place}] is empty; each fragment must have at least one parameter")
    return [list(names) for names in fragments]
