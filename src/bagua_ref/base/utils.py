"""Helpers on lists of tensors, under the original's names; contiguity as S2.3 defines it."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.utils._pytree import tree_leaves

from bagua_ref.base.memory import by_dtype_and_device, overlapping
from bagua_ref.base.not_provided import explain_missing

__all__ = [
    "NotCopied",
    "OwnHook",
    "OwnList",
    "OwnName",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "inside_backward",
    "let_compiler_see_hooks",
    "overlapping",
    "readable_bytes",
    "tensors_with_graph",
    "tracked",
    "uncompiled",
    "unflatten",
    "untraced",
]


class NotCopied:
    """Base class of attributes of modules or tensors that are not copied: ``copy.deepcopy`` and
    ``pickle`` replace them with None.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class OwnList(NotCopied, list):  # type: ignore[type-arg]
    """A list that is not copied with its module."""


class OwnName(NotCopied, str):
    """A generated name that is not copied with its module."""


# Dynamo would also trace the hooks that autograd calls in a compiled step, which communicate.
# Unlike torch.compiler.disable, this imports torch._dynamo only when a function is first called.
untraced = torch._disable_dynamo  # type: ignore[attr-defined]


class OwnHook:
    """A hook that calls ``method`` as long as the method's object is alive.

    It holds that object weakly. If the module that has it is copied or pickled, the copy gets a
    hook that does nothing. torch.compile does not trace it.

    Args:
        method: a bound method; None makes a hook that does nothing.
    """

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @property
    def __name__(self) -> str:
        # torch.jit.script compiles a module's hooks, too, and asks for their names first.
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a module that bagua_ref trains. Script a"
            " new module of the same class after load_state_dict(model.state_dict()), or use"
            " torch.jit.trace or torch.export.export on this one"
        )

    @untraced
    def __call__(self, *args: Any) -> Any:
        """Call the method."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnHook, ()


def tensors_with_graph(output: Any) -> list[Tensor]:
    """Return the tensors in a module's ``output`` that have an autograd graph."""
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]


def inside_backward() -> bool:
    """Return whether this thread is running a backward pass, for example in a hook."""
    return torch._C._current_graph_task_id() != -1


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a ``torch.compile(module)`` wrapper; return any other module
    unchanged.
    """
    # not imported yet: there is no compiled module
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def let_compiler_see_hooks() -> None:
    """Make torch.compile check a module's hooks before it reuses code compiled for another module
    of the same class.

    By default, torch.compile treats modules of one class as equal: a wrapped one would run without
    its hooks if an unwrapped one had been compiled. The first call discards what was compiled
    before.
    """
    import torch._dynamo  # which the first training forward pass imports, too

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


def apply_flattened_call(
    bucket: Sequence[Tensor], call: Callable[..., object], extra_args: Sequence[Any] | None = None
) -> None:
    """Call ``call(flat, *extra_args)`` on the concatenated tensors, then copy the result back into
    them.

    Args:
        bucket: tensors of one dtype and device.
        call: works in place on a flat tensor.
        extra_args: further arguments of ``call``.

    >>> a, b = torch.ones(2), torch.ones(3)
    >>> apply_flattened_call([a, b], lambda flat: flat.mul_(2)); b
    tensor([2., 2., 2.])
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.detach().copy_(result)


def apply_flattened_call_all(tensors: Sequence[Tensor], call: Callable[[Tensor], object]) -> None:
    """`apply_flattened_call` for tensors of any dtypes and devices, with one call per dtype and
    device.
    """
    for bucket in by_dtype_and_device(tensors):
        apply_flattened_call(bucket, call)


def check_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether ``tensors`` lie row-major, adjacent and in order in one storage (S2.3); empty
    ones fit anywhere.

    >>> flat = torch.zeros(6); check_contiguous([flat[:2], flat[2:]])
    True
    """
    filled = [t for t in tensors if t.numel()]
    if not all(t.is_contiguous() for t in filled):
        return False
    return all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        for before, after in itertools.pairwise(filled)
    )


def readable_bytes(count: float) -> str:
    """Format ``count`` bytes in decimal units.

    >>> readable_bytes(229692)
    '229.7 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def tracked(items: Sequence[Any], title: str, visible: bool) -> Iterator[Any]:
    """Yield ``items``; if ``visible``, print progress to standard error after each tenth of
    them.
    """
    tenth = 0
    for done, item in enumerate(items, start=1):
        yield item
        if visible and 10 * done // len(items) > tenth:
            tenth = 10 * done // len(items)
            print(f"{title}: {10 * tenth} %", file=sys.stderr, flush=True)  # noqa: T201


def get_flattened_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate ``tensors``, which share dtype and device, into a new flat tensor."""
    if not tensors:
        raise ValueError("tensors=[] must hold at least one tensor")
    return torch.cat([t.detach().reshape(-1) for t in tensors])


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("utils")
