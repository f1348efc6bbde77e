"""Kernel calls: each is journalled, made between canaries (margins that show writes beside
tensors), and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance, assert_equal
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.violation import NotProvided, Script, Skipped, Violation, literal
from bagua_ref.conformance.targets.target import LONG, Target, sizes_beyond

__all__ = ["KERNELS", "Canary", "CountedPart", "KernelCall", "Lab", "script_of_call"]

KERNELS = sorted(name[1:] for name in KernelBackend.__abstractmethods__)
"""The names of all kernels."""

_KEYWORDS = ("target_chunk", "average", "out")
_NO_CALLS = ("rank", "nranks", "real_threads")
_PATTERN = 0x7F  # huge or NaN as a float, so that reads beyond the end tend to show, too
_MARGIN = 64
_CHANCES = 100
"""So many worlds may be larger than the target allows, if none has fitted, before a check counts as
too large for it.
"""


class Canary:
    """A copy of a tensor, with the same shape and strides, between two margins in one storage.

    Args:
        values: values of the copy.
        shift: offset of the copy in elements, so that addresses are not always aligned.
        device: device of the copy.

    Attributes:
        tensor: the copy.

    >>> canary = Canary(torch.zeros(3)); canary.tensor[0] = 1; canary.changed_inside(), canary.changed_outside()
    ([0], [])
    """

    def __init__(self, values: Tensor, shift: int = 0, device: torch.device | str = "cpu") -> None:
        before = _MARGIN + shift % 8
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)
        )
        total = before + (extent if values.numel() else 0) + _MARGIN
        item = values.element_size()
        storage = torch.full((total * item,), _PATTERN, dtype=torch.uint8).view(values.dtype)
        inside = torch.zeros(total, dtype=torch.bool)
        inside.as_strided(values.shape, values.stride(), before).fill_(True)
        storage.as_strided(values.shape, values.stride(), before).copy_(values.detach())
        self._item, self._inside, self._start = item, inside, before
        self._was = storage.view(torch.uint8).clone()
        self._storage = storage.to(device)
        self.tensor: Tensor = self._storage.as_strided(values.shape, values.stride(), before)

    def changed_inside(self) -> list[int]:
        """Return the places in the tensor's memory whose bits have changed."""
        return self._changed(self._inside)

    def changed_outside(self) -> list[int]:
        """Return the places outside the tensor that were written, relative to its first element."""
        return self._changed(~self._inside)

    def _changed(self, where: Tensor) -> list[int]:
        now = self._storage.cpu().view(torch.uint8)
        if torch.equal(now, self._was):
            return []
        changed = (now != self._was).view(-1, self._item).any(dim=1) & where
        return (changed.nonzero().view(-1) - self._start).tolist()

    def assert_unchanged(self, name: str = "tensor") -> None:
        """Raise AssertionError if anything was written, in the tensor or beside it."""
        self.assert_only_inside_changed(name)
        if places := self.changed_inside():
            raise AssertionError(
                f"{name} is only read, but element {places[0]} was changed ({len(places)} in all)"
            )

    def assert_only_inside_changed(self, name: str = "tensor") -> None:
        """Raise AssertionError if anything outside the tensor was written."""
        if places := self.changed_outside():
            first = f"first {places[0]:+} elements from its start"
            raise AssertionError(
                f"memory beside {name} was written, {first} ({len(places)} in all)"
            )


@dataclass
class KernelCall:
    """A call of a kernel, with its arguments and results.

    Attributes:
        method: the kernel's name.
        arguments: arguments before the call, by name.
        results: written arguments after the call, by name, on the CPU; ``"result"`` is the returned
            value.
    """

    method: str
    arguments: dict[str, Any]
    results: dict[str, Any]


class CountedPart:
    """A part of a target, or a communicator that it makes, as scripts use it: what they fetch from
    it is counted as a call.

    Args:
        part: the part; the factory of communicators is called with a rank's world.
        name: its name.
        count: counts a call.

    Raises:
        NotProvided: the part has no attribute of that name.
    """

    def __init__(self, part: Any, name: str, count: Callable[[], None]) -> None:
        self._part, self._name, self._count = part, name, count

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._part, name)
        except AttributeError as error:
            raise NotProvided(f"the target's {self._name} has no {name}") from error
        if name not in _NO_CALLS:
            self._count()
        return found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the part returns; a communicator's calls are counted, too."""
        returned = self._part(*arguments, **options)
        if self._name == "communicator":
            return CountedPart(returned, self._name, self._count)
        self._count()
        return returned


class Lab:
    """One check's view of a target.

    Args:
        target: the implementation under test.
        dtype: the dtype of this run; None: the check has no dtypes.
        journal: records every call.
        large: whether long inputs go beyond every block in which an implementation may work.
        most_ranks: the largest world that the check's suite is said to use.

    Attributes:
        comparisons: number of comparisons for the current input.
        reason: why inputs were left out; empty if none was.
    """

    def __init__(
        self,
        target: Target,
        dtype: str | None,
        journal: Journal,
        large: bool = False,
        most_ranks: int | None = None,
    ) -> None:
        self.target, self.journal = target, journal
        self.dtype_name = dtype or ""
        self.dtype: torch.dtype = getattr(torch, dtype) if dtype else torch.float32
        self.resources = ExitStack()
        """Resources that all inputs of the check share; closed when it ends."""
        self.long_sizes = (
            sizes_beyond(target.tile_sizes, [*target.parts.values()]) if large else LONG
        )
        """Numbers of elements of long inputs; each input of a check about these has all of them."""
        self._most_ranks, self._smallest_world = most_ranks, 0
        self._chances: float = _CHANCES
        self.comparisons, self.reason = 0, ""
        self._calls, self._requests, self._counts_kernels = 0, 0, False

    def begin(self) -> None:
        """Start to count calls and comparisons for the next input."""
        self._calls = self.comparisons = 0
        self._requests = 0 if self.target.requests is None else self.target.requests()

    @property
    def calls(self) -> int:
        """Number of calls that have reached the target for the current input; an adapter's own
        refusals are none.
        """
        return (
            self._calls if self.target.requests is None else self.target.requests() - self._requests
        )

    def _count(self) -> None:
        self._calls += 1

    def part(self, name: str) -> CountedPart:
        """Return a part of the target whose calls are counted."""
        return CountedPart(self.target.parts[name], name, self._count)

    def kernels(self) -> Any:
        """Return the target's kernels, for the package's own operations; their calls are counted
        until the check ends.
        """
        kernels = self.target.kernels
        for name in () if self._counts_kernels else KERNELS:
            original = getattr(kernels, name)
            own = vars(kernels).get(name)
            # its class stays: operations ask for a KernelBackend
            vars(kernels)[name] = partial(self._call_kernel, original)
            restore = (
                partial(vars(kernels).pop, name)
                if own is None
                else partial(vars(kernels).__setitem__, name, own)
            )
            self.resources.callback(restore)
        self._counts_kernels = True
        return kernels

    def _call_kernel(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._count()
        return kernel(*arguments, **options)

    def skip(self, reason: str) -> NoReturn:
        """Leave the input out; a check that leaves all out is skipped for this reason."""
        self.reason = reason
        raise Skipped(reason)

    def world(self, draw: Callable[[Any], Any], worlds: Any) -> tuple[int, ...]:
        """Draw the number of ranks on each node; reject worlds that are larger than the target's
        capabilities allow.
        """
        nodes: tuple[int, ...] = draw(worlds)
        self.need_ranks(sum(nodes))
        return nodes

    def need_ranks(self, ranks: int) -> None:
        """Leave the input out if the target's capabilities do not allow so many ranks; at first,
        another one is drawn instead.
        """
        from hypothesis import reject

        assert self._most_ranks is None or ranks <= self._most_ranks, (
            f"a world of {ranks} ranks: MOST_RANKS and the pages say less"
        )
        if self.target.max_ranks is None or ranks <= self.target.max_ranks:
            self._chances = math.inf
            return
        self._smallest_world = min(ranks, self._smallest_world or ranks)
        self.reason = (
            f"needs {self._smallest_world} ranks, the target has at most {self.target.max_ranks}"
        )
        self._chances -= 1
        if self._chances < 0:
            self.skip(self.reason)
        reject()

    def need_dtypes(self, tensors: Iterable[Tensor]) -> None:
        """Leave the input out if the target's capabilities exclude a dtype of one of these
        tensors.
        """
        for x in tensors:
            self.dtypes((str(x.dtype).removeprefix("torch."),))

    def dtypes(self, names: Sequence[str]) -> list[str]:
        """Return those of the dtypes that the target's capabilities allow, to draw from; leave the
        input out if there are none.
        """
        allowed = [
            name for name in names if self.target.dtypes is None or name in self.target.dtypes
        ]
        if not allowed:
            self.skip(f"the target's capabilities exclude {', '.join(names)}")
        return allowed

    def call(
        self, method: str, arguments: dict[str, Any], writes: tuple[str, ...] = ()
    ) -> KernelCall:
        """Call a kernel with copies of the arguments; raise `Violation` if it writes anything that
        it must not.

        Args:
            method: the kernel's name, or ``"CODEC.compress"`` or ``"CODEC.decompress"``.
            arguments: arguments in order; target_chunk, average and out are passed by keyword.
            writes: the arguments, tensors or lists of tensors, that the kernel may write.
        """
        canaries: dict[str, list[Canary]] = {}
        passed: dict[str, Any] = {}
        for place, (name, value) in enumerate(arguments.items()):
            if isinstance(value, Tensor):
                canaries[name] = [Canary(value, 3 * place + value.numel(), self.target.device)]
                passed[name] = canaries[name][0].tensor
            elif isinstance(value, list) and all(isinstance(item, Tensor) for item in value):
                canaries[name] = [
                    Canary(item, place + number, self.target.device)
                    for number, item in enumerate(value)
                ]
                passed[name] = [canary.tensor for canary in canaries[name]]
            else:
                passed[name] = value
        keywords = {name: passed.pop(name) for name in _KEYWORDS if name in passed}
        call = KernelCall(method, arguments, {})
        try:
            with self.journal.call((method, arguments)):
                codec, _, verb = method.rpartition(".")
                owner = self.target.codec(codec) if codec else self.target.kernels
                self._count()
                result = getattr(owner, verb)(*passed.values(), **keywords)
                for name in writes:
                    found = [canary.tensor.detach().cpu().clone() for canary in canaries[name]]
                    call.results[name] = found if isinstance(arguments[name], list) else found[0]
                self._check_canaries(call, canaries, writes)
        except Violation:
            raise
        except BaseException as error:  # whatever an implementation does, there is a verdict
            message = f"{method} raised {type(error).__name__}: {error}"
            raise Violation(
                message, self.script(call, comment=f"raised {type(error).__name__}: {error}")
            ) from error
        call.results["result"] = result.detach().cpu() if isinstance(result, Tensor) else result
        if "out" in keywords and isinstance(result, Tensor):
            call.results["result is out"] = result is keywords["out"]
        return call

    def _check_canaries(
        self, call: KernelCall, canaries: dict[str, list[Canary]], writes: tuple[str, ...]
    ) -> None:
        for name, group in canaries.items():
            for number, canary in enumerate(group):
                shown = name if len(group) == 1 else f"{name}[{number}]"
                try:
                    if name in writes:
                        canary.assert_only_inside_changed(shown)
                    else:
                        canary.assert_unchanged(shown)
                except AssertionError as error:
                    script = script_of_call(
                        self.target.setup, call.method, call.arguments, canaries=writes
                    )
                    raise Violation(f"{call.method}: {error}", str(script)) from None

    def compare(
        self,
        call: KernelCall,
        name: str,
        expected: Tensor,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | None = None,
        field: str = "",
    ) -> None:
        """Raise `Violation` unless ``name`` equals ``expected`` after the call; messages say
        ``field`` in addition.
        """
        actual, self.comparisons = call.results[name], self.comparisons + 1
        try:
            if not isinstance(actual, Tensor):
                raise AssertionError(f"{type(actual).__name__} instead of a tensor")
            assert_equal(actual, expected, tolerance, magnitude=magnitude)
        except AssertionError as error:
            line = f"assert_equal({name}, {literal(expected)}, {tolerance.name})"
            shown = f"{name.partition('.')[0]}, {field}" if field else name
            raise Violation(f"{call.method}: {shown}: {error}", self.script(call, line)) from None

    def script(self, call: KernelCall, *lines: str, comment: str = "") -> str:
        """Return a script that repeats the call and ends with ``lines``."""
        script = script_of_call(self.target.setup, call.method, call.arguments, comment)
        if any("assert_equal(" in line for line in lines):
            names = [
                name for name in ("EXACT", "SUM", "ULP") if any(name in line for line in lines)
            ]
            script.setup.insert(
                0, f"from bagua_ref.conformance import {', '.join(names)}, assert_equal"
            )
        script.body += lines
        return str(script)

    def script_of_refusal(self, method: str, arguments: dict[str, Any]) -> str:
        """Return a script that fails unless a call raises a TypeError that names the dtype."""
        script = script_of_call(self.target.setup, method, arguments)
        script.body += [
            (
                f"try:\n    {script.body.pop()}\nexcept TypeError as error:\n    assert"
                f" {self.dtype_name!r} in str(error), error"
            ),
            (
                f"else:\n    raise AssertionError('{method} must raise a TypeError that says"
                f" {self.dtype_name}')"
            ),
        ]
        return str(script)


def script_of_call(
    setup: list[str],
    method: str,
    arguments: dict[str, Any],
    comment: str = "",
    canaries: tuple[str, ...] | None = None,
) -> Script:
    """Return a script that makes a call.

    Args:
        setup: lines that make ``kernels``.
        method: the kernel, as for `Lab.call`.
        arguments: arguments by name, in order.
        comment: comment on the line of the call.
        canaries: if given, tensors are put between canaries, and those not named here must not
            change.
    """
    codec, _, verb = method.rpartition(".")
    script = Script(
        [*setup, *([f"codec = kernels.codecs[{codec!r}](kernels)"] if codec else []), ""]
    )
    checks: list[str] = []
    passed: list[str] = []
    for name, value in arguments.items():
        is_list = isinstance(value, list) and all(isinstance(item, Tensor) for item in value)
        if canaries is None or not (isinstance(value, Tensor) or is_list):
            source = name
            script.body.append(f"{name} = {literal(value)}")
        else:
            rule = "assert_only_inside_changed" if name in canaries else "assert_unchanged"
            if is_list:
                script.body.append(f"{name} = [Canary(tensor) for tensor in {literal(value)}]")
                checks.append(f"for canary in {name}:\n    canary.{rule}('{name}')")
                source = f"[canary.tensor for canary in {name}]"
            else:
                script.body.append(f"{name} = Canary({literal(value)})")
                checks.append(f"{name}.{rule}('{name}')")
                source = f"{name}.tensor"
        passed.append(f"{name}={source}" if name in _KEYWORDS else source)
    if canaries is not None:
        script.setup.insert(0, "from bagua_ref.conformance.lab.lab import Canary")
    script.body.append(
        f"result = {'codec' if codec else 'kernels'}.{verb}({', '.join(passed)})"
        + (f"  # {comment}".splitlines()[0] if comment else "")
    )
    script.body += checks
    return script
