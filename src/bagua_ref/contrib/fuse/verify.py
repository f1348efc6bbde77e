"""The check whether an optimizer may be fused: a table for known classes, a trial on small clones for others (S6)."""

from __future__ import annotations

import copy
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagua_ref.algorithms.q_adam_optimizer import QAdamOptimizer
from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.plan import NUMBERS, attributes

__all__ = ["ELEMENTWISE", "NOT_ELEMENTWISE", "check_elementwise", "try_on_clones"]

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim in which each element's update depends only on that element, its gradient and its state."""

NOT_ELEMENTWISE = {
    "Adafactor": "it keeps one second moment per row and column, and scales by the root mean square of the whole parameter",
    "LBFGS": "its direction and step length come from all parameters together",
    "Muon": "it makes each weight's update orthogonal, which needs its shape as a matrix",
    "SparseAdam": "it takes sparse gradients, whose indices are those of one parameter",
}
"""Classes of torch.optim that cannot be fused, and the reasons."""

SHAPES = ((3, 5), (7,), (2, 3, 4), (1,), (64,), (4, 4), (5,), (2, 3, 2, 2), (2, 1, 2, 3, 2))
TRIALS = (SHAPES, (*SHAPES, (130, 129)))
"""Shapes of the clones: some optimizers treat only convolution weights, or only large tensors, differently. Long ones are tried
last, as a step can take hours if an optimizer takes roots of a matrix with a row per element."""

STEPS, ORDINARY_STEP = 12, 3  # the fused clone takes one ordinary step, as both kinds may be mixed
MOST_SECONDS = 60.0  # for a whole trial
UNTRIED = "If you know that it updates each element independently, pass verify=False"


def check_elementwise(optimizer: torch.optim.Optimizer, allow_inexact: bool, verify: bool) -> None:
    """Raise if fusing would change the steps of an optimizer.

    Args:
        optimizer: the optimizer; torch's own and `QAdamOptimizer` are known, others are tried.
        allow_inexact: allow differences in the last bits.
        verify: False: do not try it.

    Raises:
        ValueError: it is not element-wise, or it could not be tried.
    """
    cls = type(optimizer)
    if cls is QAdamOptimizer or cls in {getattr(torch.optim, name, None) for name in ELEMENTWISE}:
        return
    known = {getattr(torch.optim, name, None): reason for name, reason in NOT_ELEMENTWISE.items()}
    reason = known[cls] if cls in known else try_on_clones(optimizer, allow_inexact) if verify else None
    if reason is not None:
        raise ValueError(f"optimizer={cls.__name__} cannot be fused: {reason}")


def try_on_clones(optimizer: torch.optim.Optimizer, allow_inexact: bool = False) -> str | None:
    """Step two clones of ``optimizer`` with small parameters, one of them fused; return why it cannot be fused, or None.

    The plain one may not combine elements or take too long, and both must stay equal. The optimizer, its parameters
    and torch's random number generators are not changed.
    """
    deadline = time.monotonic() + MOST_SECONDS
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=list(devices)):
        warnings.simplefilter("ignore")
        for shapes in TRIALS:
            # Compiled functions run uncompiled while they are watched, so that only a trial without a watch shows differences.
            for watch in (_Watch(deadline), None):
                try:
                    _try_shapes(optimizer, allow_inexact, shapes, watch)
                except _RefusedError as refused:
                    return str(refused)
    return None


class _RefusedError(BaseException):
    """A trial shows that an optimizer cannot be fused, or takes too much; no optimizer that handles errors stops it."""


class _Watch(TorchDispatchMode):
    """Raises in the middle of a step, after an operation that combines elements, or when the time of a trial is over."""

    def __init__(self, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deadline = deadline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        # An operation on lists works on their first members, their second ones, and so on.
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for place, one in enumerate(results):
            parts = [x[place] if isinstance(x, (list, tuple)) and len(x) == len(results) else x for x in args]
            most = max((x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor)), default=0)
            size = one.numel() if isinstance(one, Tensor) else most if one is None else 1
            if most > 1 and size != most and not name.startswith("new_"):
                raise _RefusedError(f"its step combines elements of a parameter, or takes only some, by {name}(). {UNTRIED}")
        if time.monotonic() > self._deadline:
            raise _RefusedError(f"a trial with small parameters takes more than {MOST_SECONDS:g} s. {UNTRIED}")
        return result


@contextmanager
def _refusing(what: str, advice: str = f". {UNTRIED}") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _RefusedError(f"{what} raised {type(error).__name__}: {error}{advice}") from error


def _try_shapes(optimizer: Any, allow_inexact: bool, shapes: Sequence[tuple[int, ...]], watch: _Watch | None) -> None:
    with _refusing("copying it for a trial"):
        plain, fused = _clone(optimizer, shapes), _clone(optimizer, shapes)
    fuser = Fuser(True, False, allow_inexact, check=lambda _: None, small=2**62)
    fused._bagua_fused_count = 0
    fuser.flatten(fused.param_groups)
    generator = torch.Generator().manual_seed(1000)  # not the seed of the weights
    for step in range(STEPS):
        for place, (p, q) in enumerate(zip(_parameters(plain), _parameters(fused), strict=True)):
            grad = torch.randn(p.shape, generator=generator).to(p) * (1.0, 100.0, 1e-3, 0.0)[(step + place) % 4]
            for twin in (p, q):
                if twin.grad is not None and step % 2 and place:
                    twin.grad.copy_(grad)
                else:
                    twin.grad = None if step == STEPS - 2 and place == 0 else grad.clone()
        torch.manual_seed(step)
        with _refusing("step() of a small copy of it"), watch or nullcontext():
            plain.step()
        torch.manual_seed(step)
        with _refusing("step() with flat parameters", advice=""):
            fused.step() if step == ORDINARY_STEP else fuser.step(fused, None)
        _compare(f"step {step + 1} of a small copy of it with flat parameters gave different", plain, fused, allow_inexact)
    if not fused._bagua_fused_count:
        raise _RefusedError("its state or its options do not allow any parameters to be fused")


def _clone(optimizer: torch.optim.Optimizer, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an optimizer with the same class, options and attributes, and with small parameters."""
    # Attributes that refer to a parameter get a stand-in: the clones must not touch the model.
    memo: dict[int, Any] = {id(p): torch.nn.Parameter(torch.zeros(2)) for p in _parameters(optimizer)}
    store: defaultdict[Any, Any] = defaultdict(dict)
    memo[id(optimizer.state)] = store
    clone = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if not name.startswith("_bagua") and not (callable(value) and hasattr(type(optimizer), name)) and name != "param_groups":
            is_hooks = name.startswith("_optimizer_") and isinstance(value, OrderedDict)
            clone.__dict__[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    clone.param_groups = []
    store.update({key: copy.deepcopy(value, memo) for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    distinct: dict[Any, tuple[dict[str, Any], list[Tensor]]] = {}  # parameters that differ in learning rates are tried once
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        told = repr([item for item in options.items() if item[0] not in ("lr", "initial_lr", "name")])
        for p in group["params"]:
            dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
            distinct.setdefault((told, dtype, attributes(p)), (options, []))[1].append(p)
    for number, ((_, dtype, own), (options, members)) in enumerate(distinct.items()):
        generator = torch.Generator().manual_seed(number)
        clone.param_groups.append({"params": (parameters := []), **copy.deepcopy(options, memo)})
        model = next((p for p in members if p.numel() > 1 and optimizer.state.get(p)), None)
        for place, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator) * (1, 1e-6)[place % 2]  # in small weights, last bits of updates show
            parameters.append(torch.nn.Parameter(value.to(members[0].device, dtype)))
            for name, _, attribute in own or ():
                setattr(parameters[-1], name, attribute)
            if model is not None:
                store[parameters[-1]] = {key: _resize(kept, model, value) for key, kept in optimizer.state[model].items()}
    return clone


def _resize(value: Any, model: Tensor, parameter: Tensor) -> Any:
    """Return a copy of a state of ``model``, resized for ``parameter``."""
    if isinstance(value, Tensor) and value.shape == model.shape:
        values = value.detach().reshape(-1)
        return values[torch.arange(parameter.numel()) % len(values)].view(parameter.shape).to(value.dtype)
    return copy.deepcopy(value)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _compare(what: str, plain: Any, fused: Any, allow_inexact: bool) -> None:
    """Raise `_RefusedError` at the first difference between two clones."""
    names = [key for key in plain.state if not isinstance(key, Tensor)]
    pairs = [(f"state {name!r}", fused.state.get(name), plain.state[name]) for name in names]
    for p, q in zip(_parameters(plain), _parameters(fused), strict=True):
        ours, theirs, of = fused.state.get(q, {}), plain.state.get(p, {}), f"for a parameter of shape {tuple(p.shape)}"
        pairs += [(f"weights {of}", q.detach(), p.detach()), (f"attributes {of}", str(attributes(q)), str(attributes(p)))]
        pairs += [(f"keys of state {of}", str(list(ours)), str(list(theirs)))]
        pairs += [(f"state {key!r} {of}", ours[key], value) for key, value in theirs.items() if key in ours]
    for name, mine, right in pairs:
        if not _same(mine, right, allow_inexact):
            why = "its elements affect each other, or it depends on shapes or order"
            if _same(mine, right, True):
                why = "it rounds differently in the body of a vector loop than at its end, or sums elements"
                why += "; if last bits do not matter to you, pass allow_inexact=True"
            raise _RefusedError(f"{what} {name}: {why}")


def _same(ours: Any, theirs: Any, allow_inexact: bool) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return type(ours) is type(theirs) and (type(ours) not in NUMBERS or bool(ours == theirs))
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if allow_inexact and theirs.is_floating_point() and theirs.numel():
        eps = torch.finfo(theirs.dtype).eps
        return torch.allclose(ours, theirs, rtol=64 * eps, atol=8 * eps * theirs.abs().max().item(), equal_nan=True)
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()) and torch.equal(ours.signbit(), theirs.signbit())
