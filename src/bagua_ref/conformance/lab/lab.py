"""Kernel calls: each is journalled, made between canaries (margins that show writes beside tensors), and compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance, assert_equal
from bagua_ref.conformance.inputs.long_sizes import LONG, sizes_beyond
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.violation import Script, Violation, literal
from bagua_ref.conformance.targets.target import Target

__all__ = ["Canary", "KernelCall", "Lab", "script_of_call"]

_KEYWORDS = ("target_chunk", "average", "out")
_PATTERN = 0x7F  # huge or NaN as a float, so that reads beyond the end tend to show, too
_MARGIN = 64


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
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
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
            raise AssertionError(f"{name} is only read, but element {places[0]} was changed ({len(places)} in all)")

    def assert_only_inside_changed(self, name: str = "tensor") -> None:
        """Raise AssertionError if anything outside the tensor was written."""
        if places := self.changed_outside():
            first = f"first {places[0]:+} elements from its start"
            raise AssertionError(f"memory beside {name} was written, {first} ({len(places)} in all)")


@dataclass
class KernelCall:
    """A call of a kernel, with its arguments and results.

    Attributes:
        method: the kernel's name.
        arguments: arguments before the call, by name.
        results: written arguments after the call, by name, on the CPU; ``"result"`` is the returned value.
    """

    method: str
    arguments: dict[str, Any]
    results: dict[str, Any]


class Lab:
    """One check's view of a target.

    Args:
        target: the implementation under test.
        dtype: the dtype of this run; None: the check has no dtypes.
        journal: records every call.
        large: whether long inputs go beyond every block in which an implementation may work.
        most_ranks: the largest world that the check's suite is said to use.
    """

    def __init__(
        self, target: Target, dtype: str | None, journal: Journal, large: bool = False, most_ranks: int | None = None
    ) -> None:
        self.target, self.journal = target, journal
        self.dtype_name = dtype or ""
        self.dtype: torch.dtype = getattr(torch, dtype) if dtype else torch.float32
        self.resources = ExitStack()
        """Resources that all inputs of the check share; closed when it ends."""
        self.long_sizes = sizes_beyond(target.tile_sizes, [*target.parts.values()]) if large else LONG
        """Numbers of elements of long inputs; each input of a check about these has all of them."""
        self._most_ranks = most_ranks
        self.smallest_world: int | None = None
        """Number of ranks of the smallest world that the target was too small for; None: it was large enough for all."""
        self.lacks = ""
        """Dtypes of which the target has none, though each input needs one."""

    def world(self, draw: Callable[[Any], Any], worlds: Any) -> tuple[int, ...]:
        """Draw the number of ranks on each node; reject worlds that are larger than the target's capabilities allow."""
        nodes: tuple[int, ...] = draw(worlds)
        self.need_ranks(sum(nodes))
        return nodes

    def need_ranks(self, ranks: int) -> None:
        """Reject the input if the target's capabilities do not allow so many ranks."""
        from hypothesis import reject

        assert self._most_ranks is None or ranks <= self._most_ranks, f"a world of {ranks} ranks: MOST_RANKS and the pages say less"
        if self.target.max_ranks is not None and ranks > self.target.max_ranks:
            self.smallest_world = min(ranks, self.smallest_world or ranks)
            reject()

    def usable(self, dtypes: tuple[str, ...]) -> list[str]:
        """Return the names of those dtypes that the target's capabilities allow; reject the input if there are none."""
        from hypothesis import reject

        allowed = [name for name in dtypes if self.target.dtypes is None or name in self.target.dtypes]
        if not allowed:
            self.lacks = ", ".join(dtypes)
            reject()
        return allowed

    def call(self, method: str, arguments: dict[str, Any], writes: tuple[str, ...] = ()) -> KernelCall:
        """Call a kernel with copies of the arguments; raise `Violation` if it writes anything that it must not.

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
                canaries[name] = [Canary(item, place + number, self.target.device) for number, item in enumerate(value)]
                passed[name] = [canary.tensor for canary in canaries[name]]
            else:
                passed[name] = value
        keywords = {name: passed.pop(name) for name in _KEYWORDS if name in passed}
        call = KernelCall(method, arguments, {})
        try:
            with self.journal.call((method, arguments)):
                codec, _, verb = method.rpartition(".")
                owner = self.target.codec(codec) if codec else self.target.kernels
                result = getattr(owner, verb)(*passed.values(), **keywords)
                for name in writes:
                    found = [canary.tensor.detach().cpu().clone() for canary in canaries[name]]
                    call.results[name] = found if isinstance(arguments[name], list) else found[0]
                self._check_canaries(call, canaries, writes)
        except Violation:
            raise
        except BaseException as error:  # whatever an implementation does, there is a verdict
            message = f"{method} raised {type(error).__name__}: {error}"
            raise Violation(message, self.script(call, comment=f"raised {type(error).__name__}: {error}")) from error
        call.results["result"] = result.detach().cpu() if isinstance(result, Tensor) else result
        if "out" in keywords and isinstance(result, Tensor):
            call.results["result is out"] = result is keywords["out"]
        return call

    def _check_canaries(self, call: KernelCall, canaries: dict[str, list[Canary]], writes: tuple[str, ...]) -> None:
        for name, group in canaries.items():
            for number, canary in enumerate(group):
                shown = name if len(group) == 1 else f"{name}[{number}]"
                try:
                    if name in writes:
                        canary.assert_only_inside_changed(shown)
                    else:
                        canary.assert_unchanged(shown)
                except AssertionError as error:
                    script = script_of_call(self.target.setup, call.method, call.arguments, canaries=writes)
                    raise Violation(f"{call.method}: {error}", str(script)) from None

    def compare(
        self,
        call: KernelCall,
        name: str,
        expected: Tensor,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | None = None,
    ) -> None:
        """Raise `Violation` unless ``name`` equals ``expected`` after the call."""
        actual = call.results[name]
        try:
            if not isinstance(actual, Tensor):
                raise AssertionError(f"{type(actual).__name__} instead of a tensor")
            assert_equal(actual, expected, tolerance, magnitude=magnitude)
        except AssertionError as error:
            allowed = "" if tolerance is EXACT else f"  # up to {tolerance.name}"
            line = f"assert_equal({name}, {literal(expected)}, EXACT){allowed}"
            raise Violation(f"{call.method}: {name}: {error}", self.script(call, line)) from None

    def script(self, call: KernelCall, *lines: str, comment: str = "") -> str:
        """Return a script that repeats the call and ends with ``lines``."""
        script = script_of_call(self.target.setup, call.method, call.arguments, comment)
        if any("assert_equal(" in line for line in lines):
            script.setup.insert(0, "from bagua_ref.conformance import EXACT, assert_equal")
        script.body += lines
        return str(script)

    def elementwise(self, method: str, arguments: dict[str, Any], scalar: Callable[..., float], *more: Any) -> None:
        """Check a kernel ``first <- scalar(first, others)`` element by element.

        Args:
            method: the kernel's name.
            arguments: tensors of one size, of which the first is written, then numbers.
            scalar: computes one element from the dtype's name, the tensors' elements and ``more``.
            more: further arguments of scalar; by default the numbers among the arguments.
        """
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        more = more or tuple(value for value in arguments.values() if not isinstance(value, Tensor))
        call = self.call(method, arguments, (names[0],))
        rows = zip(*(arguments[name].tolist() for name in names), strict=True)
        wanted = torch.tensor([scalar(self.dtype_name, *row, *more) for row in rows], dtype=torch.float64).to(self.dtype)
        try:
            self.compare(call, names[0], wanted)
        except Violation:
            # A single element makes a smaller counterexample, if it is wrong by itself, too.
            place = _first_difference(call.results[names[0]], wanted)
            if place is not None and wanted.numel() > 1:
                one = {name: value[place : place + 1] if name in names else value for name, value in arguments.items()}
                self.compare(self.call(method, one, (names[0],)), names[0], wanted[place : place + 1])
            raise


def _first_difference(actual: Any, expected: Tensor) -> int | None:
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return None
    for place in range(expected.numel()):
        try:
            assert_equal(actual[place], expected[place], EXACT)
        except AssertionError:
            return place
    return None


def script_of_call(
    setup: list[str], method: str, arguments: dict[str, Any], comment: str = "", canaries: tuple[str, ...] | None = None
) -> Script:
    """Return a script that makes a call.

    Args:
        setup: lines that make ``kernels``.
        method: the kernel, as for `Lab.call`.
        arguments: arguments by name, in order.
        comment: comment on the line of the call.
        canaries: if given, tensors are put between canaries, and those not named here must not change.
    """
    codec, _, verb = method.rpartition(".")
    script = Script([*setup, *([f"codec = kernels.codecs[{codec!r}](kernels)"] if codec else []), ""])
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
