"""Comparison of a training step on several ranks with one process: a sample or token must have the
same weight on any rank and in any microbatch.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from bagua_ref.simulation import SimulatedWorld
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.tasks import is_distributed
from bagua_ref.simulation.timing import after_steps

IGNORED = -100
"""The label of a token to ignore, as in `torch.nn.functional.cross_entropy`."""

SUMS_IN_ANOTHER_ORDER = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 2e-4}
"""The largest difference due to the order of summation, relative to a tensor's largest magnitude;
1e-9 for other dtypes.
"""

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes of parameter names in wrapped models."""


@dataclass(frozen=True)
class Layout:
    """The division of one step's global batch between ranks and microbatches.

    Args:
        ranks: the number of ranks.
        microbatches: the number of parts of each rank's share.
        tokens: ``"equal"``; ``"unequal"``: labels are ignored so that shares have different numbers
            of tokens; ``"none"``: so that the last rank has none.
    """

    ranks: int = 1
    microbatches: int = 1
    tokens: str = "equal"

    def __str__(self) -> str:
        more = {"unequal": ", unequal tokens", "none": ", a rank without tokens"}
        return f"{self.ranks} x {self.microbatches}{more.get(self.tokens, '')}"


LAYOUTS = (
    Layout(2),
    Layout(4),
    Layout(1, 2),
    Layout(2, 2),
    Layout(1, 2, "unequal"),
    Layout(2, 1, "unequal"),
    Layout(2, 2, "unequal"),
    Layout(2, 1, "none"),
)
"""Default layouts of `same_as_one`: ranks x microbatches."""


@dataclass
class SameAsOne:
    """The result of `same_as_one`.

    Attributes:
        layouts: the layouts compared with one rank and one microbatch.
        differences: for each differing layout, the first tensor and the kind of difference in
            words.
        notes: omissions and changes, with their reasons.
        is_comparable: whether at least one layout could be compared.
    """

    layouts: list[Layout] = field(default_factory=list)
    differences: dict[Layout, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    is_comparable: bool = True

    def __str__(self) -> str:
        same = "the same" if self.is_comparable else "not compared"
        rows = [f"{layout}: {self.differences.get(layout, same)}" for layout in self.layouts]
        return "\n".join(["ranks x microbatches", *rows, *(f"note: {note}" for note in self.notes)])


@dataclass
class _Step:
    """One rank's tensors in a step: gradients after the last backward, gradients used by the
    optimizer, and updated weights; keyed by the parameter's identity during the step, then by name.
    """

    touched: dict[Any, Tensor] = field(default_factory=dict)
    raw: dict[Any, Tensor] = field(default_factory=dict)
    used: dict[Any, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def finish(self, model: Any) -> None:
        """Store the weights of a model after its step, and rename all tensors."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"step returned {type(model).__name__}: with one parameter it must return the model"
            )
        named = {}
        for name, p in model.named_parameters():
            while name.startswith(_WRAPPERS):
                name = name.partition(".")[2]
            named[name] = p
        if not self.used:
            self.used = {id(p): _full(p.grad) for p in named.values() if p.grad is not None}
        self.weights = {name: _full(p) for name, p in named.items()}
        self.used = {n: self.used[id(p)] for n, p in named.items() if id(p) in self.used}
        self.raw = {n: _full(self.raw[id(p)]) for n, p in named.items() if id(p) in self.raw}


def split(batch: Any, n: int) -> list[Any]:
    """Split a batch into ``n`` equal parts: its tensors along their first dimension, in dicts,
    lists and tuples.

    >>> split({"x": torch.arange(4)}, 2)
    [{'x': tensor([0, 1])}, {'x': tensor([2, 3])}]
    """
    if isinstance(batch, Tensor):
        if len(batch) % n:
            raise ValueError(f"batch: its {len(batch)} samples must be a multiple of {n}")
        return list(batch.chunk(n))
    if isinstance(batch, Mapping):
        parts = zip(*(split(value, n) for value in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    if isinstance(batch, list | tuple):
        return [type(batch)(part) for part in zip(*(split(v, n) for v in batch), strict=True)]
    raise TypeError(
        f"batch={type(batch).__name__} must be a tensor, or a dict, list or tuple of such"
    )


def same_as_one(
    step: Callable[..., Any],
    batch: Any,
    layouts: Sequence[Layout] = LAYOUTS,
    *,
    model: Callable[[], torch.nn.Module] | None = None,
    labels: str | int = "labels",
) -> SameAsOne:
    """Compare a training step in several layouts of one global batch with that of one process:
    gradients, their norm and updated weights must agree up to the order of summation.

    Args:
        step: ``step(model, microbatches)``, which makes one optimizer step on a rank's list of
            microbatches, or only the backward passes, or returns the loss of them all. With one
            parameter, ``step(microbatches)`` makes the model, and returns it.
        batch: a tensor, or a dict, list or tuple of them, with samples along the first dimension;
            their number must be a multiple of 4 for the default layouts.
        layouts: layouts to compare.
        model: makes the model on each rank, inside `DistributedDataParallel`, FSDP2 or
            ``with_bagua`` if it is to be trained so; all start from the same seed.
        labels: the key or index of integer labels, of which -100 counts for nothing. Without them,
            layouts with other numbers of tokens are left out.

    Returns:
        the differences by layout.

    Raises:
        ValueError: a layout does not divide the batch.
        TypeError: ``step`` needs a model, but ``model`` is missing.

    >>> def step(model, microbatches):
    ...     for x in microbatches:
    ...         (model(x).sum() / len(x) / len(microbatches)).backward()
    >>> def model():
    ...     return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> print(same_as_one(step, torch.ones(8, 2), [Layout(2), Layout(2, 2)], model=model))
    ranks x microbatches
    2 x 1: the same
    2 x 2: the same
    """
    needs_model = len(inspect.signature(step).parameters) > 1
    if needs_model and model is None:
        raise TypeError("model=None: step takes a model, so model must be a function that makes it")
    report, alone = SameAsOne(), dict[str, _Step]()
    run = partial(_run, step, model if needs_model else None, report)
    integers = _labels(batch, labels)
    for layout in layouts:
        if layout.tokens != "equal" and integers is None:
            report.notes[
                f"no integer labels {labels!r}: layouts with other tokens are left out"
            ] = None
            continue
        masked = batch if layout.tokens == "equal" else _masked(batch, labels, layout)
        shares = split(masked, layout.ranks * layout.microbatches)
        key = f"{layout.tokens} {len(shares)}" if layout.tokens != "equal" else ""
        if key not in alone:
            [alone[key]] = run([[masked]])
        report.layouts.append(layout)
        n = layout.microbatches
        try:
            steps = run([shares[rank * n : (rank + 1) * n] for rank in range(layout.ranks)])
        except Exception as error:
            report.differences[layout] = f"fails: {type(error).__name__}: {error}"
            continue
        if report.is_comparable:
            difference = _difference(
                alone[key], steps, layout, partial(_by_share, run, shares, labels)
            )
            report.differences |= {layout: difference} if difference else {}
    return report


def _run(step: Any, model: Any, report: SameAsOne, shares: Sequence[Any]) -> list[_Step]:
    """Return each simulated rank's step on its microbatches; add notes on values that cannot be
    compared.
    """
    steps = [_Step() for _ in shares]
    backward: Any = Tensor.backward

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # which would compile this, too
            return
        steps[rank_world().identity.rank].touched |= {id(p): p for p in module.parameters()}
        if isinstance(module, _DropoutNd) and module.training and module.p:
            module.p = 0.0
            report.notes["dropout is switched off"] = None
        is_local = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        if is_local and module.training:
            report.is_comparable = False
            report.notes[
                "not compared: BatchNorm's statistics are those of each rank's microbatch"
            ] = None

    def after_backward(loss: Tensor, *args: Any, **options: Any) -> None:
        backward(loss, *args, **options)
        own = steps[rank_world().identity.rank]
        gradients = {key: p.grad for key, p in own.touched.items()}
        own.raw = {key: g.detach().clone() for key, g in gradients.items() if g is not None}

    def before_step(optimizer: Any) -> None:
        used = steps[rank_world().identity.rank].used
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            if p.grad is not None and id(p) not in used:
                used[id(p)] = _full(p.grad)

    def main() -> None:
        rank = rank_world().identity.rank
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 # the generator that programs use
        if model is None:
            steps[rank].finish(step(shares[rank]))
            return
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        made = model()
        loss = step(made, shares[rank])
        is_left = isinstance(loss, Tensor) and loss.requires_grad
        if is_left and all(p.grad is None for p in made.parameters()):
            loss.backward()
        steps[rank].finish(made)

    hook = register_module_forward_pre_hook(before_forward)
    try:
        with (
            after_steps(before_step, lambda optimizer: None),
            mock.patch.object(Tensor, "backward", after_backward),
        ):
            SimulatedWorld(len(shares), torch_distributed=True).run(main)
    finally:
        hook.remove()
    return steps


def _full(tensor: Tensor) -> Tensor:
    whole: Any = tensor.detach()
    return (whole.full_tensor() if is_distributed(whole) else whole).clone()  # type: ignore[no-any-return]


def _labels(batch: Any, labels: str | int) -> Tensor | None:
    try:
        found = batch[labels]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    is_one = isinstance(found, Tensor) and not isinstance(batch, Tensor)
    return found if is_one and found.dtype == torch.int64 else None


def _masked(batch: Any, labels: str | int, layout: Layout) -> Any:
    """Return the batch with some labels ignored, as a layout requires."""
    own = batch[labels].clone()
    if layout.tokens == "none":
        own[len(own) - len(own) // layout.ranks :] = IGNORED
    else:
        for number, part in enumerate(own.chunk(layout.ranks * layout.microbatches)):
            part.view(-1)[max(1, part.numel() // (1 + 2 * number)) :] = IGNORED
    if isinstance(batch, Mapping):
        return {**batch, labels: own}
    return type(batch)(own if i == labels else value for i, value in enumerate(batch))


def _by_share(run: Any, shares: Sequence[Any], labels: str | int) -> list[_Step | None]:
    """Return the step of one process on each share separately; None for a share without tokens."""
    tokens = [_labels(share, labels) for share in shares]
    return [
        None if own is not None and bool((own == IGNORED).all()) else run([[share]])[0]
        for share, own in zip(shares, tokens, strict=True)
    ]


def _flat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])


def _is_close(actual: Tensor, expected: Tensor, scale: float) -> bool:
    limit = SUMS_IN_ANOTHER_ORDER.get(expected.dtype, 1e-9) * scale
    return bool(((actual - expected).abs() <= limit).all())


def _scale(tensors: Mapping[str, Tensor], name: str) -> float:
    """Return a tensor's largest magnitude, at least a thousandth of the largest of all tensors."""
    largest = max(float(t.abs().max()) for t in tensors.values() if t.numel())
    return max(float(tensors[name].abs().max()), largest / 1000)


def _difference(
    one: _Step,
    steps: Sequence[_Step],
    layout: Layout,
    by_share: Callable[[], Sequence[_Step | None]],
) -> str:
    """Describe the first tensor that differs from that of one process, and the likely reason; empty
    if there is none.
    """
    for rank, own in enumerate(steps):
        for name in one.used.keys() - own.used.keys():
            return f"there is no gradient of {name!r} on rank {rank}"
    wrong = [
        (name, rank)
        for name in one.used
        for rank, own in enumerate(steps)
        if not _is_close(own.used[name], one.used[name], _scale(one.used, name))
    ]
    if wrong:
        name, rank = wrong[0]
        kind = _kind(one, steps, layout, {name for name, _ in wrong}, rank, by_share)
        return f"the gradient of {name!r} on rank {rank} differs: {kind}"
    for name, weight in one.weights.items():
        for rank, own in enumerate(steps):
            gradient = one.used.get(name, torch.zeros(()))
            # an optimizer such as Adam makes large steps of gradients that are only rounding
            counts = gradient.abs() > 1e-2 * gradient.abs().max()
            actual, expected = (torch.where(counts, w, 0 * w) for w in (own.weights[name], weight))
            if not _is_close(actual, expected, float(weight.abs().max())):
                return (
                    f"the weight {name!r} on rank {rank} differs after the step, though gradients"
                    " agree: the optimizer's options or state depend on the layout"
                )
    return ""


def _kind(
    one: _Step,
    steps: Sequence[_Step],
    layout: Layout,
    wrong: set[str],
    rank: int,
    by_share: Callable[[], Sequence[_Step | None]],
) -> str:
    own, names = steps[rank].used, list(one.used)
    if not all(bool(own[name].isfinite().all()) for name in names):
        return "it is not finite; is a loss divided by a rank's own number of tokens, which is 0?"
    flat, expected = _flat(own, names), _flat(one.used, names)
    ratio = float(flat @ expected / (expected @ expected))
    if _is_close((flat / ratio).float(), expected.float(), float(expected.abs().max())):
        return _ratio_text(ratio, one, steps[rank], layout)
    if wrong != set(names) and any(
        not torch.equal(step.used[name], own[name]) for step in steps for name in wrong
    ):
        rest = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        return f"only {min(wrong)!r}{rest} differ, also between ranks: not synchronised"
    if any(not torch.equal(step.used[name], own[name]) for step in steps for name in names):
        return "the ranks' gradients differ from each other: not synchronised"
    alone = dict(enumerate(by_share()))
    shares = {place: share for place, share in alone.items() if share is not None}
    matrix = torch.stack([_flat(share.used, names) for share in shares.values()], 1)
    weights, due = (torch.linalg.lstsq(matrix, v[:, None]).solution[:, 0] for v in (flat, expected))
    fits = all(
        _is_close((matrix @ w).float(), v.float(), 5 * float(v.abs().max()))
        for w, v in ((weights, flat), (due, expected))
    )
    if fits and bool((due.abs() > 1e-3).all()):
        texts = []
        for place, value in zip(shares, (weights / due).tolist(), strict=True):
            where = f"rank {place // layout.microbatches}"
            where += f"'s microbatch {place % layout.microbatches}" * (layout.microbatches > 1)
            texts.append(f"{where}: {value:.3g} x")
        return f"tokens do not weigh as in one process ({', '.join(texts)})"
    return (
        f"by up to {float((flat - expected).abs().max() / expected.abs().max()):.2g} of the largest"
    )


def _ratio_text(ratio: float, one: _Step, own: _Step, layout: Layout) -> str:
    n, k = layout.ranks, layout.microbatches
    if own.raw and all(
        name in own.raw and _is_close(own.raw[name], value, _scale(one.raw, name))
        for name, value in one.raw.items()
    ):
        return f"it agrees before clipping, and is {ratio:.3g} x after: the norm is another one"
    parts = [("ranks", n), ("microbatches", k), ("ranks and microbatches", n * k)]
    reasons = [
        f"{verb} {name}{end}"
        for name, count in parts
        for factor, verb, end in (
            (count, "summed over", ", not averaged"),
            (1 / count, "divided once too often by the number of", ""),
        )
        if count > 1 and abs(ratio / factor - 1) < 1e-3
    ]
    if layout.tokens == "none" and abs(ratio * n / (n - 1) - 1) < 1e-3:
        reasons = ["the mean over ranks counts the one that has no tokens"]
    why = f": {' or '.join(reasons)}" * bool(reasons)
    return f"all gradients are {ratio:.3g} x those of one process{why}"
