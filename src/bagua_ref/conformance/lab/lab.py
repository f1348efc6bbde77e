"""Harness of one check: the target's parts with counted calls, worlds of ranks, and comparisons.

Kernels are called between canaries: guard margins that detect writes outside of tensors.
"""

from __future__ import annotations

import copy
import functools
import random
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance, assert_equal
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.violation import (
    NotProvided,
    Skipped,
    Violation,
    assignments,
    literal,
)
from bagua_ref.conformance.targets import world as worlds
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.conformance.targets.target import LONG, Target, sizes_beyond
from bagua_ref.simulation import SimulatedWorld

__all__ = [
    "KERNELS",
    "Canary",
    "CountedPart",
    "KernelCall",
    "Lab",
    "copies_of",
    "smallest",
    "tensors_in",
]

KERNELS = sorted(name[1:] for name in KernelBackend.__abstractmethods__)
"""The names of all kernels."""

_KEYWORDS = ("target_chunk", "average", "out")
_NO_CALLS = ("rank", "nranks", "real_threads")
_PATTERN = 0x7F  # huge or NaN as a float, so that reads beyond the end tend to show, too
_MARGIN = 64
_CHANCES = 100
"""Number of oversized worlds after which a check counts as too large for the target, if none has
fitted.
"""
_KEPT = 4
"""Number of recent kernel calls that are checked again after later ones."""


class Canary:
    """A copy of a tensor, of the same shape and strides, between two guard margins in one storage.

    Args:
        values: values of the copy.
        shift: offset of the copy in elements, so that addresses are not always aligned.
        device: device of the copy.

    Attributes:
        tensor: the copy.

    >>> canary = Canary(torch.zeros(3)); canary.tensor[0] = 1; canary.changes()
    ([0], [])
    """

    def __init__(self, values: Tensor, shift: int = 0, device: torch.device | str = "cpu") -> None:
        self._place = (values.shape, values.stride(), _MARGIN + shift % 8)
        steps = zip(values.shape, values.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if values.numel() else 0
        nbytes = (self._place[2] + extent + _MARGIN) * values.element_size()
        pattern = torch.full((nbytes,), _PATTERN, dtype=torch.uint8, device=device)
        self._storage = pattern.view(values.dtype)
        self.tensor: Tensor = self._storage.as_strided(*self._place)
        self.tensor.copy_(values.detach())
        self._was = self._bytes().clone()

    def _bytes(self) -> Tensor:
        return self._storage.view(torch.uint8).cpu()

    def changes(self) -> tuple[list[int], list[int]]:
        """Return the memory offsets written since the previous call: those of the tensor's
        elements, and those outside of it, both relative to its start.
        """
        now, was = self._bytes(), self._was
        if torch.equal(now, was):
            return [], []
        self._was = now.clone()
        changed = (now != was).view(-1, self.tensor.element_size()).any(dim=1)
        inside = torch.zeros_like(changed)
        inside.as_strided(*self._place).fill_(True)
        places = torch.arange(len(changed)) - self._place[2]
        return places[changed & inside].tolist(), places[changed & ~inside].tolist()


@dataclass
class KernelCall:
    """A call of a kernel, with its arguments and results.

    Attributes:
        method: the kernel's name.
        arguments: arguments before the call, by name.
        results: written arguments after the call, by name, on the CPU; ``"result"`` is the returned
            value.
        canaries: the tensors that were passed, by name.
    """

    method: str
    arguments: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    canaries: dict[str, list[Canary]] = field(default_factory=dict)


class CountedPart:
    """Proxy that counts calls of a target's part, or of a communicator made by it; each attribute
    access counts as a call.

    Args:
        part: the part; a factory of communicators is called with a rank's world.
        name: its name.
        count: callback that counts a call.

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

    def __call__(self, world: worlds.RankWorld) -> CountedPart:
        """Return a rank's communicator, its calls counted."""
        return CountedPart(self._part(world), self._name, self._count)


class Lab:
    """Harness of one check of a target.

    Args:
        target: the implementation under test.
        dtype: the dtype of this run; None: the check has no dtypes.
        journal: records every call.
        large: whether long inputs exceed every block size of an implementation.
        most_ranks: the documented maximum of ranks in the check's suite.

    Attributes:
        draw: takes a Hypothesis strategy, and returns a value of the current input.
        comparisons: number of comparisons for the current input.
        reason: reason for skipped inputs; empty if none was skipped.
        drawn: values printed by violations, in addition to those drawn for the last call.
        messages: messages of the ranks in the last `on_ranks` with ``record``.
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
        self.long_sizes = sizes_beyond(target.tile_sizes) if large else LONG
        """Numbers of elements of long inputs; each input of a check for long tensors has all of
        them.
        """
        self._most_ranks, self._too_many, self._inputs = most_ranks, list[int](), 0
        self._fits = False
        self._kept: list[KernelCall] = []
        """Recent kernel calls, whose tensors must not change."""
        self.reason = ""
        self.draw: Callable[[Any], Any]
        self.begin()

    def begin(self) -> None:
        """Start counting calls and comparisons for the next input."""
        # Hypothesis gives these generators the same state for each input, and would so let a fault
        # that depends on them appear always or never.
        self._inputs += 1
        seed = zlib.crc32(f"{self.dtype_name} {self._inputs}".encode())
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the generator that targets use
        self._calls = self.comparisons = 0
        self._requests = 0 if self.target.requests is None else self.target.requests()
        self._seen: list[tuple[str, Tensor, Tensor]] = []
        self._last: tuple[str, dict[str, Any]] = ("", {})
        self.drawn: dict[str, Any] = {}
        self.messages: list[Any] = []

    def end(self) -> None:
        """Raise `Violation` if a returned tensor has changed since it was compared."""
        for where, now, then in self._seen:
            try:
                assert_equal(now, then, EXACT)
            except AssertionError as error:
                said = f"{where} changed after it had been returned: {error}"
                raise self.violation(said) from None
        self._look_again()

    @property
    def calls(self) -> int:
        """Number of calls that reached the target for the current input; arguments rejected by an
        adapter do not count.
        """
        return (
            self._calls if self.target.requests is None else self.target.requests() - self._requests
        )

    # Inputs.

    def integer(self, least: int, most: int) -> int:
        """Draw an integer from ``least`` to ``most``, inclusive."""
        return int(self.draw(_strategies().integers(least, most)))

    def choice(self, values: Sequence[Any]) -> Any:
        """Draw one of the values."""
        return self.draw(_strategies().sampled_from(values))

    def flag(self) -> bool:
        """Draw True or False."""
        return bool(self.choice([False, True]))

    def seed(self) -> int:
        """Draw any 32-bit number, all equally likely."""
        drawn = self.draw(_strategies().binary(min_size=4, max_size=4))
        return int.from_bytes(drawn, "big")

    # Parts.

    def part(self, name: str) -> Any:
        """Return a part of the target, its calls counted; a target without ``comm_ops`` or
        ``algorithms`` gets the package's with the target's kernels.
        """
        if name in self.target.parts:
            return CountedPart(self.target.parts[name], name, self._count)
        if name == "comm_ops":
            return ReferenceCommOps(self.kernels)
        return ReferenceAlgorithms(self.kernels, device=self.target.device)

    @functools.cached_property
    def kernels(self) -> Any:
        """The target's kernels, with counted calls, for the package's own operations."""
        counted = copy.copy(self.target.kernels)  # operations ask for a KernelBackend
        for name in KERNELS:
            vars(counted)[name] = functools.partial(
                self._call_kernel, getattr(self.target.kernels, name)
            )
        return counted

    def _call_kernel(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._count()
        return kernel(*arguments, **options)

    def _count(self) -> None:
        self._calls += 1

    # What the target's capabilities allow.

    def skip(self, reason: str) -> NoReturn:
        """Skip this input; a check that skips all of its inputs is reported as skipped for this
        reason.
        """
        self.reason = reason
        raise Skipped(reason)

    def world(self, worlds: Any) -> tuple[int, ...]:
        """Draw the number of ranks on each node, within the target's capabilities."""
        nodes: tuple[int, ...] = self.draw(worlds)
        self.need_ranks(sum(nodes))
        return nodes

    def need_ranks(self, ranks: int) -> None:
        """Skip this input if the target does not support this number of ranks; the first time, draw
        another input instead.
        """
        from hypothesis import reject

        assert self._most_ranks is None or ranks <= self._most_ranks, (
            f"a world of {ranks} ranks: MOST_RANKS and the pages say less"
        )
        most = self.target.max_ranks
        if most is None or ranks <= most:
            self._fits = True
            return
        self._too_many.append(ranks)
        needed = f"needs {min(self._too_many)} ranks, the target has at most {most}"
        if not self._fits and len(self._too_many) > _CHANCES:
            self.skip(needed)
        self.reason = self.reason or needed
        reject()

    @property
    def has_every_option(self) -> bool:
        """Whether the target's algorithms are the package's own, or extend them; others need not
        have options and actions that came later.
        """
        own = self.target.parts.get("algorithms")
        return own is None or isinstance(own, ReferenceAlgorithms)

    def need_dtypes(self, tensors: Iterable[Tensor]) -> None:
        """Skip this input if the target does not support a dtype of one of these tensors."""
        for x in tensors:
            self.dtypes((str(x.dtype).removeprefix("torch."),))

    def dtypes(self, names: Sequence[str]) -> list[str]:
        """Return the dtypes among ``names`` that the target supports; skip this input if there are
        none.
        """
        allowed = [
            name for name in names if self.target.dtypes is None or name in self.target.dtypes
        ]
        if not allowed:
            self.skip(f"the target's capabilities exclude {', '.join(names)}")
        return allowed

    # Calls.

    @contextmanager
    def calling(self, what: str, **drawn: Any) -> Iterator[None]:
        """Context for calls of the target: any exception is a violation.

        Args:
            what: the call in words, for messages until the next call.
            drawn: values drawn for the call, printed by violations.
        """
        self._last = what, {**self.drawn, **drawn}
        try:
            with self.journal.call(*self._last):
                yield
        except BaseException as error:  # whatever an implementation does, there is a verdict
            said = f"{what} raised {type(error).__name__}: {error}"
            raise Violation(said[:1000], self._source()) from error

    def on_ranks(
        self,
        part: str,
        method: str,
        nodes: tuple[int, ...],
        arguments: dict[str, list[Any]],
        options: dict[str, Any],
        *,
        record: bool = False,
        refusal: type[Exception] | tuple[type[Exception], ...] = (),
        seed: int | None = None,
    ) -> list[Any]:
        """Return the results of ``part.method(world, *arguments, **options)`` on the ranks of a
        simulated world.

        Args:
            part: name of the part of the target.
            method: name of the method.
            nodes: number of ranks on each node.
            arguments: name -> the argument of each rank. Ranks get copies.
            options: arguments of all ranks.
            record: whether to record the messages sent, as ``messages``.
            refusal: errors that a rank may raise; one then is the rank's result.
            seed: seed of the world; None: drawn.

        Raises:
            Violation: any other exception of any rank.
        """
        self.need_ranks(sum(nodes))
        self.need_dtypes(tensors_in([*arguments.values()]))
        owner, seed = self.part(part), self.seed() if seed is None else seed
        simulated = SimulatedWorld(sum(nodes), nodes=nodes, seed=seed)
        if record:
            self.messages = simulated.record()

        def program(comm: Any) -> Any:
            world = worlds.RankWorld(comm.rank(), sum(nodes), nodes, comm)
            mine = copies_of([of_ranks[world.rank] for of_ranks in arguments.values()])
            try:
                return getattr(owner, method)(world, *mine, **copies_of(options))
            except NotImplementedError:
                raise
            except refusal as error:
                return error

        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        given = {"nodes": nodes, "seed": seed, **arguments, "options": options}
        with self.calling(f"{method}({shown}) on nodes {nodes}", **given):
            return simulated.run(program)

    def with_communicators(
        self,
        what: str,
        nodes: tuple[int, ...],
        program: Callable[[Any], Any],
        **drawn: Any,
    ) -> list[Any]:
        """Run a program on every rank with the target's communicator; return the results by rank.

        Args:
            what: the program's calls in words, for messages.
            nodes: number of ranks on each node.
            program: called with a communicator.
            drawn: values that the program uses, printed by violations.

        Raises:
            Violation: any exception of any rank.
        """
        self.need_ranks(sum(nodes))
        self.need_dtypes(tensors_in([*drawn.values()]))
        factory, seed = self.part("communicator"), self.seed()
        with self.calling(f"{what} on nodes {nodes}", nodes=nodes, seed=seed, **drawn):
            return worlds.run_world(factory, nodes, program, seed)

    def call(
        self, method: str, arguments: dict[str, Any], writes: tuple[str, ...] = ()
    ) -> KernelCall:
        """Call a kernel with copies of the arguments; raise `Violation` if it writes outside of its
        outputs.

        Args:
            method: the kernel's name, or ``"CODEC.compress"`` or ``"CODEC.decompress"``.
            arguments: arguments in order; target_chunk, average and out are passed by keyword.
            writes: the arguments, tensors or lists of tensors, that the kernel may write.
        """
        call, passed = KernelCall(method, arguments), dict[str, Any]()
        for place, (name, value) in enumerate(arguments.items()):
            call.canaries[name] = made = [
                Canary(x, 3 * place + number + x.numel(), self.target.device)
                for number, x in enumerate(tensors_in(value))
            ]
            tensors = [canary.tensor for canary in made]
            passed[name] = tensors if isinstance(value, list) else tensors[0] if made else value
        keywords = {name: passed.pop(name) for name in _KEYWORDS if name in passed}
        try:
            with self.journal.call(method, arguments):
                codec, _, verb = method.rpartition(".")
                owner = self.target.codec(codec) if codec else self.target.kernels
                self._count()
                result = getattr(owner, verb)(*passed.values(), **keywords)
        except BaseException as error:  # whatever an implementation does, there is a verdict
            said = f"raised {type(error).__name__}: {error}"
            raise Violation(f"{method} {said}", self.script(call, comment=said)) from error
        for name, made in call.canaries.items():
            for inside, outside in (canary.changes() for canary in made):
                said = ""
                if outside:
                    said = (
                        f"memory beside {name} was written, {outside[0]:+} elements from its start"
                    )
                elif inside and name not in writes:
                    said = f"{name} is only read, but element {inside[0]} was changed"
                if said:
                    raise Violation(f"{method}: {said}", self.script(call, comment=said))
            if name in writes:
                found = [canary.tensor.detach().cpu().clone() for canary in made]
                call.results[name] = found if isinstance(arguments[name], list) else found[0]
        call.results["result"] = result.detach().cpu() if isinstance(result, Tensor) else result
        if isinstance(result, Tensor):
            call.results["result is out"] = result is keywords.get("out")
            self._watch(f"{method}: its result", result)
        self._look_again()
        self._kept = [*self._kept[1 - _KEPT :], call]
        return call

    def _look_again(self) -> None:
        """Raise `Violation` if a tensor of an earlier kernel call has changed since."""
        for call in self._kept:
            for name, made in call.canaries.items():
                if any(any(canary.changes()) for canary in made):
                    self._kept = []
                    said = f"{call.method}: {name} was written after the call had returned"
                    raise Violation(said, self.script(call, comment="and then another call"))

    # Comparisons.

    def assert_equal(
        self,
        actual: Any,
        expected: Any,
        tolerance: Tolerance = EXACT,
        *,
        magnitude: Tensor | float | None = None,
        where: str = "",
    ) -> None:
        """Raise `Violation` unless the target's result equals the expected one.

        Args:
            actual: the target's result.
            expected: a tensor, lists of tensors, or any other value, which must be equal.
            tolerance: tolerance of tensors.
            magnitude: as of `tolerances.assert_equal`.
            where: description of the result, for the message.
        """
        self.comparisons += 1
        if isinstance(expected, list | tuple) and tensors_in(expected):
            if not (isinstance(actual, list | tuple) and len(actual) == len(expected)):
                raise self.violation(f"{where}: {actual!r:.300} is no list of {len(expected)}")
            for index, (one, want) in enumerate(zip(actual, expected, strict=True)):
                inner = f"{where}[{index}]"
                self.assert_equal(one, want, tolerance, magnitude=magnitude, where=inner)
            return
        try:
            if not isinstance(expected, Tensor):
                if actual != expected:
                    raise AssertionError(f"{actual!r:.300} instead of {expected!r:.300}")
            elif not isinstance(actual, Tensor):
                raise AssertionError(f"{type(actual).__name__} instead of a tensor")
            else:
                assert_equal(actual, expected, tolerance, magnitude=magnitude)
                self._watch(where, actual)
        except AssertionError as error:
            raise self.violation(f"{where}: {error}" if where else str(error)) from None

    def assert_that(self, condition: bool, message: str) -> None:
        """Raise `Violation` unless a condition is true."""
        self.comparisons += 1
        if not condition:
            raise self.violation(message)

    def violation(self, message: str) -> Violation:
        """Return a violation by the last call."""
        what = self._last[0]
        return Violation(f"{what}: {message}" if what else message, self._source())

    def _source(self) -> str:
        what, drawn = self._last
        return f"{assignments(drawn)}# {what}\n" if what else ""

    def _watch(self, where: str, tensor: Tensor) -> None:
        self._seen.append((where or "the result", tensor, tensor.detach().clone()))

    def compare(
        self,
        call: KernelCall,
        name: str,
        expected: Tensor,
        tolerance: Tolerance = EXACT,
        field: str = "",
    ) -> None:
        """Raise `Violation` unless argument or result ``name`` of a kernel call equals
        ``expected``; messages also name ``field``.
        """
        actual, self.comparisons = call.results[name], self.comparisons + 1
        try:
            if not isinstance(actual, Tensor):
                raise AssertionError(f"{type(actual).__name__} instead of a tensor")
            assert_equal(actual, expected, tolerance)
        except AssertionError as error:
            line = f"assert_equal({name}, {literal(expected)}, {tolerance.name})"
            shown = f"{name.partition('.')[0]}, {field}" if field else name
            raise Violation(f"{call.method}: {shown}: {error}", self.script(call, line)) from None

    def script(self, call: KernelCall, *lines: str, comment: str = "") -> str:
        """Return a script that repeats a kernel call, with a comment beside it, and ends with
        ``lines``.
        """
        codec, _, verb = call.method.rpartition(".")
        passed = (f"{name}={name}" if name in _KEYWORDS else name for name in call.arguments)
        before = [
            "from math import inf, nan",
            "import torch",
            "from bagua_ref.conformance import EXACT, SUM, ULP, assert_equal",
            *self.target.setup,
            f"codec = kernels.codecs[{codec!r}](kernels)" if codec else "",
            assignments(call.arguments),
        ]
        owner = "codec" if codec else "kernels"
        made = f"result = {owner}.{verb}({', '.join(passed)})  # {comment}".splitlines()[0]
        return "\n".join([*before, made.removesuffix("  # "), *lines, ""])


def _strategies() -> Any:
    from hypothesis import strategies  # without which checks are listed, and reports are read

    return strategies


def smallest(judge: Callable[[int, int], None], size: int) -> None:
    """Check an input; on a difference, raise the `Violation` of the smallest failing part that
    bisection finds, first of its end, then of its start.

    Args:
        judge: checks the elements from the first to before the second number.
        size: the number of elements.
    """
    found: list[Violation] = []

    def fails(start: int, end: int) -> bool:
        try:
            judge(start, end)
        except Violation as violation:
            if violation.__cause__ is not None:
                raise  # an exception of the target, or the end of its process
            found.append(violation)
            return True
        return False

    if fails(0, size):
        end = 1 + bisect_left(range(1, size), True, key=lambda end: fails(0, end))
        bisect_left(range(1, end), True, key=lambda start: not fails(start, end))
        raise found[-1]


def copies_of(arguments: Any) -> Any:
    """Return arguments with copies of all tensors in them and in their lists, tuples and dicts."""
    if isinstance(arguments, Tensor):
        return arguments.clone()
    if isinstance(arguments, dict):
        return {name: copies_of(item) for name, item in arguments.items()}
    return (
        type(arguments)(map(copies_of, arguments))
        if isinstance(arguments, list | tuple)
        else arguments
    )


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors among arguments and in their lists and tuples, in order."""
    if isinstance(arguments, Tensor):
        return [arguments]
    return (
        [tensor for item in arguments for tensor in tensors_in(item)]
        if isinstance(arguments, list | tuple)
        else []
    )
