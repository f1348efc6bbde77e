"""Optimizer twins, one of them fused, that take the same steps (S6); scripts use these functions,
too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance, assert_equal

__all__ = [
    "LAMB",
    "LAYOUTS",
    "Lion",
    "StepHooks",
    "assert_gradients",
    "assert_place",
    "assert_raises",
    "assert_refused",
    "assert_same_state_dict",
    "assert_twins",
    "copies",
    "expect_warning",
    "give_gradients",
    "lay_gradients",
    "no_warning",
    "numbers",
    "parameters",
    "sparse_gradients",
    "step_or_refuse",
    "stop",
    "takes_later_parameters",
]


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, with zeros of both signs among them."""
    drawn = torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.where(drawn.abs() < 0.2, torch.zeros_like(drawn).copysign(drawn), drawn).to(dtype)


def parameters(
    seed: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Return parameters of the given shapes, each in its own storage."""
    return [
        torch.nn.Parameter(numbers(seed + place, shape, dtype))
        for place, shape in enumerate(shapes)
    ]


@functools.cache
def takes_later_parameters(cls: Any) -> bool:
    """Return whether an optimizer updates parameters that are added later; Adagrad of older torch
    releases does not.
    """
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = cls([first], lr=0.1)
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def copies(parameters: Sequence[Tensor]) -> list[Any]:
    """Return parameters with the same values, each in its own storage."""
    return [
        torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    ]


def give_gradients(
    seed: int,
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    kept: bool = False,
    without: Sequence[int] = (),
    order: Sequence[int] | None = None,
) -> None:
    """Give twins the same gradients.

    Args:
        seed: seed of the gradients.
        ours: parameters; frozen ones get no gradient.
        theirs: their twins.
        kept: write into existing gradients, as backward does after
            ``zero_grad(set_to_none=False)``; otherwise create new ones.
        without: places of parameters that get no gradient.
        order: put new gradients side by side into one storage, in this order of places, as in
            buckets; None: each in its own storage.
    """
    if order is not None:
        for side in (ours, theirs):
            memory = torch.zeros(2, sum(p.numel() for p in side), dtype=side[0].dtype)
            parts = dict(
                zip(order, memory[0].split([side[place].numel() for place in order]), strict=True)
            )
            for place, p in enumerate(side):
                p.grad = parts[place].view(p.shape)
        kept = True
    for place, pair in enumerate(zip(ours, theirs, strict=True)):
        grad = numbers(1000 * (seed + 1) + place, pair[0].shape, pair[0].dtype)
        for twin in pair:
            if place in without or not twin.requires_grad:
                twin.grad = None
            elif kept and twin.grad is not None:
                with torch.no_grad():
                    twin.grad.copy_(grad)
            else:
                twin.grad = grad.clone()


LAYOUTS = ("transposed", "gaps", "offset", "expanded", "rows", "columns")
"""Ways in which `lay_gradients` puts a gradient into memory; with the last three, elements share
memory.
"""


def lay_gradients(layouts: Sequence[str], *sides: Sequence[Tensor]) -> None:
    """Put gradients into memory anew: each in one of `LAYOUTS`, or where it is if that is ``""`` or
    there is none.
    """
    for side in sides:
        for p, layout in zip(side, layouts, strict=True):
            if p.grad is not None and layout:
                p.grad = _laid(p.grad, layout)


def _laid(grad: Tensor, layout: str) -> Tensor:
    backwards = tuple(reversed(range(grad.ndim)))
    if layout == "transposed":
        return grad.permute(backwards).contiguous().permute(backwards)
    if layout == "gaps":
        return torch.stack([grad, grad * 3 + 1], -1)[..., 0]
    if layout == "offset":
        return torch.cat([grad.new_ones(3), grad.reshape(-1)])[3:].view(grad.shape)
    if layout == "expanded":  # as autograd gives it for a sum
        return grad.reshape(-1)[:1].clone().view([1] * grad.ndim).expand(grad.shape)
    first = grad[:1] if layout == "rows" else grad[..., :1]
    return first.clone().expand(grad.shape)


def sparse_gradients(seed: int, rows: Sequence[int], place: int, *sides: Sequence[Tensor]) -> None:
    """Give the parameter at ``place`` of each side the sparse gradient of an embedding in which
    ``rows`` were looked up.
    """
    for side in sides:
        found = torch.nn.functional.embedding(torch.tensor(rows), side[place], sparse=True)
        side[place].grad = None
        (found * numbers(seed, found.shape, found.dtype)).sum().backward()


def assert_gradients(
    given: Sequence[Tensor | None], ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> None:
    """Raise AssertionError unless gradients are as they were given, or as torch's own step has left
    those of the twins.
    """
    for place, (grad, p, q) in enumerate(zip(given, ours, theirs, strict=True)):
        if grad is None or p.grad is None:
            assert grad is p.grad, (
                f"after the step, the gradient of parameter {place} is {p.grad} instead of {grad}"
            )
            continue
        assert p.grad.shape == grad.shape, (
            f"the gradient of parameter {place} has the shape {tuple(p.grad.shape)}"
        )
        allowed = [_bits(x) for x in (grad, q.grad) if x is not None]
        assert any(map(functools.partial(torch.equal, _bits(p.grad)), allowed)), (
            f"the step has changed the gradient of parameter {place}: {p.grad} instead of {grad}"
        )


class Stop(BaseException):
    """What a script interrupts a step with; like KeyboardInterrupt, it is no Exception."""


def stop(*_: Any) -> None:
    """Raise `Stop`; a hook."""
    raise Stop


def assert_raises(step: Callable[[], Any], error: type[BaseException] = Stop) -> None:
    """Raise AssertionError unless ``step`` raises ``error``; gradients must be enabled after it as
    before.
    """
    enabled = torch.is_grad_enabled()
    try:
        step()
    except error:
        assert torch.is_grad_enabled() == enabled, (
            "a step that raised must leave gradients enabled as they were"
        )
        return
    raise AssertionError(f"the step must raise {error.__name__}")


def step_or_refuse(fused: Any, plain: Optimizer) -> bool:
    """Step twins; return whether both did. A fused step must raise an error where step() does, and
    may where it does not.
    """
    try:
        plain.step()
    except RuntimeError as error:
        try:
            fused.fuse_step()
        except Exception:
            return False
        raise AssertionError(f"fuse_step() raised nothing where step() raises {error}") from None
    try:
        fused.fuse_step()
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


def assert_twins(fused: Optimizer, plain: Optimizer, tolerance: Tolerance = EXACT) -> None:
    """Raise AssertionError unless weights, options and state of ``fused`` equal those of ``plain``.

    Args:
        fused: the optimizer under test.
        plain: torch's own optimizer after the same steps.
        tolerance: tolerance of the weights; state is compared only if it is `EXACT`.
    """
    assert len(fused.param_groups) == len(plain.param_groups), f"{len(fused.param_groups)} groups"
    for number, (ours, theirs) in enumerate(
        zip(fused.param_groups, plain.param_groups, strict=True)
    ):
        assert len(ours["params"]) == len(theirs["params"]), (
            f"{len(ours['params'])} parameters in group {number}"
        )
        mine, wanted = (
            {k: v for k, v in group.items() if k != "params"} for group in (ours, theirs)
        )
        assert mine == wanted, f"options of group {number}: {mine} instead of {wanted}"
        for place, (p, q) in enumerate(zip(ours["params"], theirs["params"], strict=True)):
            what = f"parameter {place} of group {number}"
            _compare(f"weights of {what}", p, q, tolerance)
            if tolerance is EXACT:
                _compare_state(f"state of {what}", fused.state.get(p, {}), plain.state.get(q, {}))


def assert_same_state_dict(fused: Optimizer, plain: Optimizer) -> None:
    """Raise AssertionError unless ``state_dict()`` has the keys and values of the unfused
    optimizer.
    """
    ours, theirs = fused.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys(), (
        f"state_dict has the keys {list(ours)} instead of {list(theirs)}"
    )
    assert ours["param_groups"] == theirs["param_groups"], (
        f"{ours['param_groups']} instead of {theirs['param_groups']}"
    )
    assert ours["state"].keys() == theirs["state"].keys(), (
        f"state of {list(ours['state'])} instead of {list(theirs['state'])}"
    )
    for place, state in theirs["state"].items():
        _compare_state(f"state_dict of parameter {place}", ours["state"][place], state)


def _compare_state(what: str, ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys(), (
        f"{what} has the keys {list(ours)} instead of {list(theirs)}"
    )
    for key, value in theirs.items():
        if isinstance(value, Tensor):
            _compare(f"{what}, {key!r}", ours[key], value, EXACT)
        else:
            assert type(ours[key]) is type(value), (
                f"{what}, {key!r}: {ours[key]!r} instead of {value!r}"
            )
            assert ours[key] == value, f"{what}, {key!r}: {ours[key]!r} instead of {value!r}"


def _compare(what: str, ours: Any, theirs: Tensor, tolerance: Tolerance) -> None:
    assert isinstance(ours, Tensor), f"{what}: {type(ours).__name__} instead of a tensor"
    if ours.dtype is theirs.dtype and torch.equal(_bits(ours), _bits(theirs)):
        return  # the common case, faster than a full comparison
    magnitude = (
        theirs.detach().abs().max() + 1 if theirs.numel() and tolerance is not EXACT else None
    )
    try:
        assert_equal(ours.to_dense(), theirs.to_dense(), tolerance, magnitude=magnitude)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_place(parameters: Sequence[Tensor], pointers: Sequence[int]) -> None:
    """Raise AssertionError if parameters have moved in memory."""
    moved = [
        place
        for place, (p, at) in enumerate(zip(parameters, pointers, strict=True))
        if p.data_ptr() != at
    ]
    assert not moved, f"do_flatten=False must move nothing, but parameters {moved} were moved"


def assert_refused(fuse_optimizer: Callable[..., Any], optimizer: Optimizer) -> None:
    """Raise AssertionError unless fusing, or the first fused step, raises an error that names the
    optimizer's class.
    """
    name = type(optimizer).__name__
    try:
        fuse_optimizer(optimizer).fuse_step(lambda: torch.tensor(1.0))
    except (ValueError, TypeError, RuntimeError) as error:
        if name not in str(error):
            raise AssertionError(f"the error must name {name}: {error}") from error
        return
    raise AssertionError(f"{name} is not element-wise, and must be refused")


@contextmanager
def no_warning() -> Iterator[None]:
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def expect_warning() -> Iterator[None]:
    """Raise AssertionError unless there is a warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert seen, "there must be a warning"


class StepHooks:
    """Hooks before and after an optimizer's steps, which record what they see.

    Args:
        optimizer: the optimizer to observe.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = _ids(optimizer)
        self.seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: self._see("before", optimizer))
        optimizer.register_step_post_hook(lambda *_: self._see("after", optimizer))

    def _see(self, when: str, optimizer: Optimizer) -> None:
        self.seen.append(
            when if _ids(optimizer) == self.parameters else f"{when}, with other parameters"
        )

    def assert_one_step(self) -> None:
        """Raise AssertionError unless each hook ran once since the last call and saw the original
        parameters.
        """
        seen, self.seen = self.seen, []
        assert seen == ["before", "after"], f"hooks before and after a step saw {seen}"


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


class Lion(Optimizer):
    """An element-wise optimizer that is not part of torch: it steps along the sign of a running
    average.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(
                        (average * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign()
                        * -group["lr"]
                    )
                    average.mul_(group["betas"][1]).add_(p.grad * (1 - group["betas"][1]))


class LAMB(Lion):
    """An optimizer that is not element-wise: it scales steps by the norm of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-group["lr"])
