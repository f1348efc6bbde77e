"""The check whether an optimizer may be fused: a table for torch's own classes, a trial on small clones for others (S6)."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.run import NUMBERS
from bagua_ref.contrib.fuse.sizes import WHOLE, Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["ELEMENTWISE", "NOT_ELEMENTWISE", "check_elementwise", "has_fused_kernel", "try_on_clones"]

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim in which each element's update depends only on that element, its gradient and its state."""

NOT_ELEMENTWISE = {
    "Adafactor": "it keeps one second moment per row and column, and scales by the root mean square of the whole parameter",
    "LBFGS": "its direction and step length come from all parameters together",
    "Muon": "it makes each weight's update orthogonal, which needs its shape as a matrix",
    "SparseAdam": "it takes sparse gradients, whose indices are those of one parameter",
}
"""Classes of torch.optim that cannot be fused, and the reasons."""

SHORT: tuple[tuple[int, ...], ...] = ((3, 5), (7,), (2, 3, 4), (1,), (64,), (4, 4), (), (2, 3, 2, 2), (2, 1, 2, 3, 2))
SHAPES = (*SHORT[:3], (130, 129), *SHORT[3:])
"""Shapes of the clones: matrices and others, with sizes that are and are not multiples of vector lengths. Some optimizers treat
only convolution weights, or only large tensors, differently."""

JOINED, CUT = Sizes(WHOLE, WHOLE, WHOLE), Sizes(64, WHOLE, 1024)
TRIALS = ((SHORT, JOINED), (SHAPES, JOINED), (SHAPES, CUT))
"""Shapes, and how they are stepped. Short ones are first: with long ones, a single step can take hours if an optimizer takes roots
of a matrix with a row per element, as Shampoo does for vectors."""

MOST_SECONDS = 60.0
MOST_STATE = 16
MOST_ELEMENTS = 2**24
"""A trial may take so long, keep so many numbers per element, and make tensors of so many elements."""

STEPS = 16
ORDINARY_STEP = 3
"""The fused clone takes one ordinary step, as both kinds may be mixed."""


def check_elementwise(optimizer: torch.optim.Optimizer, allow_inexact: bool, verify: bool) -> None:
    """Raise if fusing would change the steps of an optimizer.

    Args:
        optimizer: the optimizer; torch's own are known, others are tried.
        allow_inexact: allow differences in the last bits.
        verify: False: do not try it.

    Raises:
        ValueError: it is not element-wise, or it could not be tried.
    """
    cls = type(optimizer)
    if cls in {getattr(torch.optim, name, None) for name in ELEMENTWISE}:
        return
    known = {getattr(torch.optim, name, None): reason for name, reason in NOT_ELEMENTWISE.items()}
    reason = known[cls] if cls in known else try_on_clones(optimizer, allow_inexact) if verify else None
    if reason is not None:
        raise ValueError(f"optimizer={cls.__name__} cannot be fused: {reason}")


def has_fused_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``fused=True``, which a group does not use, is possible for an optimizer of torch and its parameters."""
    parameters = _parameters(optimizer)
    used = any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
    if used or not parameters or type(optimizer) not in {getattr(torch.optim, name, None) for name in ELEMENTWISE}:
        return False
    try:
        type(optimizer)(parameters, lr=1e-3, fused=True)  # type: ignore[call-arg]
    except (TypeError, RuntimeError):  # no such flag, or no kernel for a parameter's dtype or device
        return False
    return True


def try_on_clones(optimizer: torch.optim.Optimizer, allow_inexact: bool = False) -> str | None:
    """Step two clones of ``optimizer`` with small parameters, one of them fused; return their first difference, or None.

    The optimizer, its parameters and torch's random number generators are not changed. Clones that take too long or keep too much
    state differ, too.
    """
    deadline = time.monotonic() + MOST_SECONDS
    for shapes, sizes in TRIALS:
        # Compiled functions run uncompiled while they are watched, so that only a trial without a watch shows differences.
        with _Watch(deadline) as watch:
            _try_shapes(optimizer, allow_inexact, shapes, sizes, deadline)
        difference = watch.excess or _try_shapes(optimizer, allow_inexact, shapes, sizes, deadline)
        if difference is not None:
            return difference
    return None


class _ExcessError(Exception):
    """A trial takes too much."""


class _Watch(TorchDispatchMode):
    """Ends a step in its middle, after the operation that exceeds the limits of a trial.

    Attributes:
        excess: in which way it takes too much; None if it does not.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deadline = deadline
        self.excess: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        most = max((x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)), default=0)
        if most > MOST_ELEMENTS:
            self.excess = f"a trial with small parameters makes a tensor of {most} elements. {UNTRIED}"
        elif time.monotonic() > self._deadline:
            self.excess = _too_slow()
        if self.excess is not None:
            raise _ExcessError
        return result


def _too_slow() -> str:
    return f"a trial with small parameters takes more than {MOST_SECONDS:g} s. {UNTRIED}"


def _try_shapes(
    optimizer: torch.optim.Optimizer, allow_inexact: bool, shapes: Sequence[tuple[int, ...]], sizes: Sizes, deadline: float
) -> str | None:
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        warnings.simplefilter("ignore")
        try:
            plain, fused = _clone(optimizer, shapes), _clone(optimizer, shapes)
        except Exception as error:
            return f"it cannot be copied for a trial, {type(error).__name__}: {error}. {UNTRIED}"
        fuser = Fuser(True, False, allow_inexact, check=lambda _: None, sizes=lambda _: sizes)
        fused._bagua_fused_count = 0
        for step, gradients in enumerate(_gradients(_parameters(plain))):
            _give(gradients, plain, fused, in_place=step % 2 == 1)
            torch.manual_seed(step)
            try:
                plain.step()
            except Exception as error:
                return f"step() of a small copy of it raised {type(error).__name__}: {error}. {UNTRIED}"
            if (excess := _excess(plain, deadline)) is not None:
                return excess
            torch.manual_seed(step)
            try:
                if step == 0:
                    fuser.flatten(fused, fused.param_groups)
                fused.step() if step == ORDINARY_STEP else fuser.step(fused, None)
            except Exception as error:
                return f"step() with flat parameters raised {type(error).__name__}: {error}"
            if (difference := _compare(plain, fused, allow_inexact)) is not None:
                return f"step {step + 1} of a small copy of it with flat parameters gave {difference}"
        if not fused._bagua_fused_count:
            return "its state or its options do not allow any parameters to be fused"
    return None


def _excess(clone: Any, deadline: float) -> str | None:
    """Return in which way a trial of ``clone`` takes too much, None if it does not."""
    if time.monotonic() > deadline:
        return _too_slow()
    for parameter, state in clone.state.items():
        kept = sum(value.numel() for value in tree_leaves(state) if isinstance(value, torch.Tensor))
        if kept > MOST_STATE * (parameter.numel() + 1):
            return f"it keeps {kept} numbers for a parameter of shape {tuple(parameter.shape)}. {UNTRIED}"
    return None


UNTRIED = "If you know that it updates each element independently, pass verify=False"


def _clone(optimizer: torch.optim.Optimizer, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an optimizer with the same class, options and attributes, and with small parameters."""
    small: dict[int, Any] = {}
    groups: list[tuple[dict[str, Any], list[Tensor]]] = []
    for group in _distinct(optimizer.param_groups):
        generator = torch.Generator().manual_seed(len(groups))
        dtypes = {p.dtype for p in group["params"]} & {torch.float32, torch.float64} or {torch.float32}
        device = next((p.device for p in group["params"]), torch.device("cpu"))
        parameters: list[Tensor] = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
            for dtype, shape in itertools.product(sorted(dtypes, key=str), shapes)
        ]
        groups.append((group, parameters))
    for group in optimizer.param_groups:
        # Attributes that refer to a parameter get a stand-in: the clones must not touch the model.
        small.update({id(p): torch.nn.Parameter(torch.zeros(2)) for p in group["params"]})
    store: defaultdict[Any, Any] = defaultdict(dict)
    memo = {**small, id(optimizer.state): store}
    own: dict[str, Any] = {"state": store, "param_groups": []}
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in own and not name.startswith("_bagua") and not (callable(value) and hasattr(type(optimizer), name))
    }
    clone = type(optimizer).__new__(type(optimizer))
    for name, value in attributes.items():
        is_hooks = name.startswith("_optimizer_") and isinstance(value, OrderedDict)
        clone.__dict__[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    clone.__dict__.update(own)
    for group, parameters in groups:
        options = {name: copy.deepcopy(value, memo) for name, value in group.items() if name not in ("params", "param_names")}
        clone.param_groups.append({"params": parameters, **options})
        model = next((p for p in group["params"] if p.numel() > 1 and optimizer.state.get(p)), None)
        for parameter in parameters if model is not None else ():
            assert model is not None
            store[parameter] = {key: _resize(value, model, parameter) for key, value in optimizer.state[model].items()}
    return clone


def _distinct(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one of each set of groups that differ only in parameters and learning rates."""
    seen = set()
    for group in groups:
        dtypes = sorted({str(p.dtype) for p in group["params"]})
        options = repr(
            (dtypes, [(k, v) for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr", "name")])
        )
        if options not in seen:
            seen.add(options)
            yield group


def _resize(value: Any, model: Tensor, parameter: Tensor) -> Any:
    """Return a copy of a state of ``model``, resized for ``parameter``."""
    if isinstance(value, torch.Tensor) and value.shape == model.shape:
        values = value.detach().reshape(-1)[: parameter.numel()]
        return values.repeat(-(-parameter.numel() // len(values)))[: parameter.numel()].view(parameter.shape).clone()
    return copy.deepcopy(value)


def _gradients(parameters: list[Tensor]) -> Iterator[list[Tensor | None]]:
    """Yield gradients for STEPS steps of ``parameters`` that trigger the special cases of optimizers.

    First, they lead steadily to a minimum, from which some optimizers estimate a learning rate. Then they are small, large, zero,
    None, and orthogonal to their parameter, for which some optimizers project.
    """
    generator = torch.Generator().manual_seed(1000)  # not the seed of the weights
    targets = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
    for step in range(STEPS):
        gradients: list[Tensor | None] = []
        for place, (parameter, target) in enumerate(zip(parameters, targets, strict=True)):
            weight = parameter.detach()
            grad = torch.randn(weight.shape, generator=generator).to(weight)
            if step < STEPS // 2:
                grad = weight - target
            elif step == STEPS - 1:
                grad -= weight * ((grad * weight).sum() / (weight * weight).sum())
            else:
                grad *= (1.0, 100.0, 1e-3, 0.0)[(step + place) % 4]
            gradients.append(None if step == STEPS - 2 and place == 0 else grad)
        yield gradients


def _give(gradients: list[Tensor | None], plain: Any, fused: Any, in_place: bool) -> None:
    """Set the gradients of both optimizers' parameters, in place or as new tensors."""
    for grad, *twins in zip(gradients, _parameters(plain), _parameters(fused), strict=True):
        for parameter in twins:
            if grad is not None and parameter.grad is not None and in_place:
                parameter.grad.copy_(grad)
            else:
                parameter.grad = None if grad is None else grad.clone()


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _compare(plain: Any, fused: Any, allow_inexact: bool) -> str | None:
    """Return a description of the first difference, None if there is none."""
    for p, q in zip(_parameters(plain), _parameters(fused), strict=True):
        ours, theirs = fused.state.get(q, {}), plain.state.get(p, {})
        if not isinstance(ours, dict) or not isinstance(theirs, dict) or ours.keys() != theirs.keys():
            return f"different state keys for a parameter of shape {tuple(p.shape)}"
        pairs = [("weights", q.detach(), p.detach())] + [(f"state {key!r}", ours[key], value) for key, value in theirs.items()]
        for name, mine, right in pairs:
            if not _same(mine, right, allow_inexact):
                why = "its elements affect each other, or it depends on shapes or order"
                if _same(mine, right, True):
                    why = "it rounds differently in the body of a vector loop than at its end, or sums elements"
                    why += "; if last bits do not matter to you, pass allow_inexact=True"
                return f"different {name} for a parameter of shape {tuple(p.shape)}: {why}"
    return None


def _same(ours: Any, theirs: Any, allow_inexact: bool) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], value, allow_inexact) for key, value in theirs.items())
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(_same(a, b, allow_inexact) for a, b in zip(ours, theirs, strict=True))
    if not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs) and (type(ours) not in NUMBERS or bool(ours == theirs))
    if not isinstance(ours, torch.Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if allow_inexact and theirs.is_floating_point() and theirs.numel():
        eps = torch.finfo(theirs.dtype).eps
        return torch.allclose(ours, theirs, rtol=64 * eps, atol=8 * eps * theirs.abs().max().item(), equal_nan=True)
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()) and torch.equal(ours.signbit(), theirs.signbit())
