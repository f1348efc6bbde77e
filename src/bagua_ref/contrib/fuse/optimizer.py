"""The public functions that fuse an element-wise optimizer, and the check whether it is one (S6).

Fusing steps a few flat parameters instead of many small ones. Known classes are in a table, others
are tried on small clones.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagua_ref.algorithms.q_adam_optimizer import QAdamOptimizer
from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.plan import NUMBERS, attributes

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_logger = logging.getLogger(__name__)

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of torch.optim in which each element's update depends only on that element, its gradient
and its state.
"""

NOT_ELEMENTWISE = {
    "Adafactor": (
        "it keeps one second moment per row and column, and scales by the root mean square of the"
        " whole parameter"
    ),
    "LBFGS": "its direction and step length come from all parameters together",
    "Muon": "it makes each weight's update orthogonal, which needs its shape as a matrix",
    "SparseAdam": "it takes sparse gradients, whose indices are those of one parameter",
}
"""Classes of torch.optim that cannot be fused, and the reasons."""

SHAPES = ((3, 5), (7,), (2, 3, 4), (1,), (64,), (4, 4), (5,), (2, 3, 2, 2), (2, 1, 2, 3, 2))
LONG = (128, 128)
"""Shapes of the clones: some optimizers treat only convolution weights, or only large tensors,
differently. Long ones are tried last, as a step can take hours if an optimizer takes roots of a
matrix with a row per element.
"""

STEPS, ORDINARY_STEP = 12, 3  # the fused clone takes one ordinary step, as both kinds may be mixed
MOST_SECONDS = 60.0  # for a whole trial
UNTRIED = "If you know that it updates each element independently, pass verify=False"


def fuse_optimizer(
    optimizer: torch.optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    verify: bool = True,
    allow_inexact: bool = False,
    replace_step: bool = False,
) -> torch.optim.Optimizer:
    """Add a method ``fuse_step`` to ``optimizer``, which updates small adjacent parameters as one
    (S6); return it.

    ``optimizer.step()`` is unchanged by default, and the two may be mixed: results are equal bit
    for bit. Schedulers, hooks, ``state_dict`` and ``load_state_dict`` work as before; a deep copy
    or pickle is an ordinary optimizer. Fuse after moving the
    model to its device: ``.to()`` moves parameters apart. Small weights move here and in
    ``add_param_group``, never in a step.

    Args:
        optimizer: an optimizer that updates each element independently. torch's own are known;
            other classes are tried on small clones.
        do_flatten: move the small weights of each group beside each other, and gradients that are
            kept between steps; False: update only parameters as one that are already adjacent.
            Memory of a Bagua bucket is never moved.
        check_flatten: warn when weights have left the place to which ``do_flatten`` moved them.
        verify: False: do not try classes that are not torch's, at your own risk. True: try them
            now, and again when groups or options have changed.
        allow_inexact: also fuse 16-bit parameters on a CPU and groups with ``fused=True``, for
            which the last bit of an element depends on its place in memory. Otherwise they are
            stepped one by one.
        replace_step: let ``optimizer.step()`` do the same as ``fuse_step``, for trainers and
            `torch.amp.GradScaler`, which call it.

    Raises:
        TypeError: optimizer is not a torch optimizer.
        RuntimeError: it is already fused.
        ValueError: its elements affect each other, it depends on shapes, or it cannot be tried; the
            message says which.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    >>> optimizer = bagua_ref.contrib.fuse_optimizer(torch.optim.Adam(model.parameters()))
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.fuse_step()
    >>> optimizer._bagua_fused_count
    1

    Source: ``bagua/torch_api/contrib/fuse/optimizer.py`` of Bagua 0.9.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if is_fused_optimizer(optimizer):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is already fused; call fuse_optimizer only once"
        )
    check = partial(check_elementwise, allow_inexact=allow_inexact, verify=verify)
    fuser = Fuser(do_flatten, check_flatten, allow_inexact, check)
    fuser.check(optimizer)
    fuser.flatten(optimizer.param_groups)
    if any(
        group["params"] and "fused" in group and not group["fused"]
        for group in optimizer.param_groups
    ):
        _logger.info(
            "%s has fused=True, which is faster unless most parameters are small",
            type(optimizer).__name__,
        )
    optimizer._bagua_fused_optimizer = fuser  # type: ignore[attr-defined]
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    optimizer.fuse_step = MethodType(fuse_step, optimizer)  # type: ignore[attr-defined]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    if hasattr(optimizer.step, "takes_fused_steps"):  # a copy's
        del optimizer.step
    if replace_step:
        fuser.replaced = optimizer.step  # that of its class, or a scheduler's around it
        optimizer.step = MethodType(_fused(fuser.replaced), optimizer)  # type: ignore[method-assign]
    return optimizer


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step as ``optimizer.step(closure)`` does, updating small parameters that are adjacent
    in memory as one (S6).

    ``closure`` computes loss and gradients; it is called first, and its result is returned.

    Raises:
        TypeError: closure is not callable.
        ValueError: the optimizer is not fused.
    """
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is None:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} is not fused; call fuse_optimizer(optimizer)"
            " first"
        )
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r} must be callable, or None")
    # A scheduler may have wrapped the step that replaced the optimizer's own.
    return fuser.step(optimizer, closure) if fuser.replaced is None else optimizer.step(closure)


def _fused(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes fused steps and has the attributes of the one that it replaces,
    which schedulers look for.
    """

    @wraps(replaced)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        fuser = getattr(optimizer, "_bagua_fused_optimizer", None)  # a copy has none
        return (
            type(optimizer).step(optimizer, closure)
            if fuser is None
            else fuser.step(optimizer, closure)
        )

    step.takes_fused_steps = True  # type: ignore[attr-defined]
    return step


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` has been through `fuse_optimizer`.

    >>> is_fused_optimizer(torch.optim.SGD([torch.zeros(1)]))
    False
    """
    return getattr(optimizer, "_bagua_fused_optimizer", None) is not None


def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Add a group as the optimizer's class does; if ``optimizer``, maybe a copy, is fused, flatten
    its weights.
    """
    type(optimizer).add_param_group(optimizer, param_group)
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is not None:
        fuser.flatten(optimizer.param_groups[-1:])


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
    reason = (
        known[cls] if cls in known else try_on_clones(optimizer, allow_inexact) if verify else None
    )
    if reason is not None:
        raise ValueError(f"optimizer={cls.__name__} cannot be fused: {reason}")


def try_on_clones(optimizer: torch.optim.Optimizer, allow_inexact: bool = False) -> str | None:
    """Step two clones of ``optimizer`` with small parameters, one of them fused; return why it
    cannot be fused, or None.

    The plain one may not combine elements or take too long, and both must stay equal. The
    optimizer, its parameters and torch's random number generators are not changed.
    """
    deadline = time.monotonic() + MOST_SECONDS
    devices = {
        p.device
        for group in optimizer.param_groups
        for p in group["params"]
        if p.device.type == "cuda"
    }
    with warnings.catch_warnings(), torch.random.fork_rng(devices=list(devices)):
        warnings.simplefilter("ignore")
        # Compiled functions run uncompiled while they are watched, so that only a trial without a
        # watch shows differences.
        for shapes, watch in (
            (SHAPES, _Watch(deadline)),
            ((*SHAPES, LONG), _Watch(deadline)),
            ((*SHAPES, LONG), None),
        ):
            try:
                _try_shapes(optimizer, allow_inexact, shapes, watch)
            except _RefusedError as refused:
                return str(refused)
    return None


class _RefusedError(BaseException):
    """A trial shows that an optimizer cannot be fused, or takes too much; no optimizer that handles
    errors stops it.
    """


class _Watch(TorchDispatchMode):
    """Raises in the middle of a step, after an operation that combines elements, or when the time
    of a trial is over.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deadline = deadline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        # An operation on lists works on their first members, their second ones, and so on.
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for place, one in enumerate(results):
            parts = [
                x[place] if isinstance(x, (list, tuple)) and len(x) == len(results) else x
                for x in args
            ]
            most = max((x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor)), default=0)
            size = one.numel() if isinstance(one, Tensor) else most if one is None else 1
            if most > 1 and size != most and not name.startswith("new_"):
                raise _RefusedError(
                    f"its step combines elements of a parameter, or takes only some, by {name}()."
                    f" {UNTRIED}"
                )
        if time.monotonic() > self._deadline:
            raise _RefusedError(
                f"a trial with small parameters takes more than {MOST_SECONDS:g} s. {UNTRIED}"
            )
        return result


@contextmanager
def _refusing(what: str, advice: str = f". {UNTRIED}") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _RefusedError(f"{what} raised {type(error).__name__}: {error}{advice}") from error


def _try_shapes(
    optimizer: Any, allow_inexact: bool, shapes: Sequence[tuple[int, ...]], watch: _Watch | None
) -> None:
    with _refusing("copying it for a trial"):
        plain, fused = _clone(optimizer, shapes), _clone(optimizer, shapes)
    fuser = Fuser(True, False, allow_inexact, check=lambda _: None)
    fused._bagua_fused_count = 0
    fuser.flatten(fused.param_groups)
    generator = torch.Generator().manual_seed(1000)  # not the seed of the weights
    for step in range(STEPS):
        for place, (p, q) in enumerate(zip(_parameters(plain), _parameters(fused), strict=True)):
            grad = (
                torch.randn(p.shape, generator=generator).to(p)
                * (1.0, 100.0, 1e-3, 0.0)[(step + place) % 4]
            )
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
        _compare(
            f"step {step + 1} of a small copy of it with flat parameters gave different",
            plain,
            fused,
            allow_inexact,
        )
    if not fused._bagua_fused_count:
        raise _RefusedError("its state or its options do not allow any parameters to be fused")


def _clone(optimizer: torch.optim.Optimizer, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an optimizer with the same class, options and attributes, and with small
    parameters.
    """
    cls, store = type(optimizer), defaultdict[Any, Any](dict)
    # Attributes that refer to a parameter get a stand-in: the clones must not touch the model.
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(torch.zeros(2)) for p in _parameters(optimizer)
    }
    memo |= {id(optimizer.param_groups): [], id(optimizer.state): store}
    kept = {
        k: v
        for k, v in vars(optimizer).items()
        if not (k.startswith("_bagua") or (callable(v) and hasattr(cls, k)))
    }
    # hooks
    memo |= {
        id(v): OrderedDict()
        for k, v in kept.items()
        if k.startswith("_optimizer_") and isinstance(v, OrderedDict)
    }
    clone = cls.__new__(cls)
    clone.__dict__.update(copy.deepcopy(kept, memo))
    store.update(
        copy.deepcopy(
            {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
            memo,
        )
    )
    # parameters that differ in learning rates are tried once
    distinct: dict[Any, tuple[dict[str, Any], list[Tensor]]] = {}
    for group in optimizer.param_groups:
        options = {
            name: value for name, value in group.items() if name not in ("params", "param_names")
        }
        told = repr(
            [item for item in options.items() if item[0] not in ("lr", "initial_lr", "name")]
        )
        for p in group["params"]:
            dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
            distinct.setdefault((told, dtype, attributes(p)), (options, []))[1].append(p)
    for number, ((_, dtype, own), (options, members)) in enumerate(distinct.items()):
        generator = torch.Generator().manual_seed(number)
        clone.param_groups.append({"params": (parameters := []), **copy.deepcopy(options, memo)})
        model = next((p for p in members if p.numel() > 1 and optimizer.state.get(p)), None)
        for place, shape in enumerate(shapes):
            # in small weights, last bits of updates show
            value = torch.randn(shape, generator=generator) * (1, 1e-6)[place % 2]
            parameters.append(torch.nn.Parameter(value.to(members[0].device, dtype)))
            for name, _, attribute in own or ():
                setattr(parameters[-1], name, attribute)
            if model is not None:
                store[parameters[-1]] = {
                    key: _resize(kept, model, value) for key, kept in optimizer.state[model].items()
                }
    return clone


def _resize(value: Any, model: Tensor, parameter: Tensor) -> Any:
    """Return a copy of a state of ``model``, resized for ``parameter``."""
    if isinstance(value, Tensor) and value.shape == model.shape:
        values = value.detach().reshape(-1)
        return (
            values[torch.arange(parameter.numel()) % len(values)]
            .view(parameter.shape)
            .to(value.dtype)
        )
    return copy.deepcopy(value)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _compare(what: str, plain: Any, fused: Any, allow_inexact: bool) -> None:
    """Raise `_RefusedError` at the first difference between two clones."""
    names = [key for key in plain.state if not isinstance(key, Tensor)]
    pairs = [(f"state {name!r}", fused.state.get(name), plain.state[name]) for name in names]
    for p, q in zip(_parameters(plain), _parameters(fused), strict=True):
        ours, theirs, of = (
            fused.state.get(q, {}),
            plain.state.get(p, {}),
            f"for a parameter of shape {tuple(p.shape)}",
        )
        pairs += [
            (f"weights {of}", q.detach(), p.detach()),
            (f"attributes {of}", str(attributes(q)), str(attributes(p))),
        ]
        pairs += [(f"keys of state {of}", str(list(ours)), str(list(theirs)))]
        pairs += [
            (f"state {key!r} {of}", ours[key], value)
            for key, value in theirs.items()
            if key in ours
        ]
    for name, mine, right in pairs:
        if not _same(mine, right, allow_inexact):
            why = "its elements affect each other, or it depends on shapes or order"
            if _same(mine, right, True):
                why = (
                    "it rounds differently in the body of a vector loop than at its end, or sums"
                    " elements"
                )
                why += "; if last bits do not matter to you, pass allow_inexact=True"
            raise _RefusedError(f"{what} {name}: {why}")


def _same(ours: Any, theirs: Any, allow_inexact: bool) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return type(ours) is type(theirs) and (type(ours) not in NUMBERS or bool(ours == theirs))
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    eps = (
        torch.finfo(theirs.dtype).eps
        if allow_inexact and theirs.is_floating_point() and theirs.numel()
        else 0.0
    )
    close = torch.allclose(
        ours, theirs, 64 * eps, 8 * eps * theirs.abs().max().item() if eps else 0.0, equal_nan=True
    )
    return close and (eps > 0 or torch.equal(ours.signbit(), theirs.signbit()))


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.fuse.optimizer")
