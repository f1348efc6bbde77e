"""A training in a simulated world: run once, then compared number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance, assert_equal
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Script, Violation, literal
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.simulation import SimulatedWorld

__all__ = ["Training", "check_form"]


def check_form(results: list[Any], weights: list[list[Tensor]], inputs: list[list[Any]]) -> None:
    """Raise AssertionError unless every rank returned tensors like its weights for each of its inputs.

    Args:
        results: by rank.
        weights: by rank.
        inputs: by rank; there must be one result for each.
    """
    for rank, (found, mine, steps) in enumerate(zip(results, weights, inputs, strict=True)):
        if not isinstance(found, list | tuple) or len(found) != len(steps):
            length = f" of {len(found)}" if isinstance(found, list | tuple) else ""
            raise AssertionError(f"rank {rank} returned a {type(found).__name__}{length}, not a list of {len(steps)}")
        for step, tensors in enumerate(found):
            if not isinstance(tensors, list | tuple) or len(tensors) != len(mine):
                raise AssertionError(f"rank {rank} returned {type(tensors).__name__} as entry {step}, not {len(mine)} tensors")
            for place, (tensor, weight) in enumerate(zip(tensors, mine, strict=True)):
                if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (weight.shape, weight.dtype):
                    what = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                    raise AssertionError(
                        f"rank {rank} returned {what} as parameter {place} in entry {step}, not {weight.dtype} of shape "
                        f"{tuple(weight.shape)}"
                    )


class Training:
    """A run of a target's ``algorithms`` on given weights and gradients, and a script that repeats it.

    Args:
        lab: provides the target.
        method: name of a method of `ReferenceAlgorithms`.
        nodes: number of ranks on each node.
        weights: each rank's parameters.
        inputs: each rank's gradients by step, or its program.
        seed: seed of the interleaving.
        options: keyword arguments.
        form: raises AssertionError unless ``form(results, weights, inputs)`` are results of the right form.
        record: whether to note what is sent.

    Attributes:
        results: by rank, by step, by parameter.
        messages: of each collective its name, and what each rank sent, if asked for.

    Raises:
        Violation: the target raised an exception, or its results have the wrong form.
    """

    def __init__(
        self,
        lab: Lab,
        method: str,
        nodes: tuple[int, ...],
        weights: list[list[Tensor]],
        inputs: list[list[Any]],
        seed: int,
        options: dict[str, Any],
        form: Callable[[list[Any], list[list[Tensor]], list[list[Any]]], None] = check_form,
        record: bool = False,
    ) -> None:
        lab.need_ranks(sum(nodes))
        own = lab.target.parts.get("algorithms")
        self._algorithms = ReferenceAlgorithms(lab.target.kernels, lab.target.device) if own is None else own
        self._nodes, self._weights, self._inputs, self._seed = nodes, weights, inputs, seed
        self._method, self._options = method, options
        self.what = f"{method}({', '.join(f'{name}={value}' for name, value in options.items())}) on nodes {nodes}"
        self._script = self._write(lab, own is None, record)
        self.messages: list[tuple[str, list[Tensor]]] = []
        try:
            with lab.journal.call((self.what, str(self._script))):
                world = SimulatedWorld(sum(nodes), nodes=nodes, seed=seed)
                if record:
                    self.messages = world.record()
                self.results = world.run(self._run)
        except BaseException as error:  # whatever an implementation does, there is a verdict
            raise Violation(f"{self.what} raised {type(error).__name__}: {error}", str(self._script)) from error
        try:
            form(self.results, weights, inputs)
        except AssertionError as error:
            imports = f"from {form.__module__} import {form.__name__}"
            raise self._violation(str(error), f"{form.__name__}(results, weights, inputs)", imports=imports) from None

    def _run(self, comm: Any) -> Any:
        rank = comm.rank()
        world = RankWorld(rank, sum(self._nodes), self._nodes, comm)
        mine = [w.clone() for w in self._weights[rank]]
        return getattr(self._algorithms, self._method)(world, mine, _copy(self._inputs[rank]), **_copy(self._options))

    def _write(self, lab: Lab, is_reference: bool, record: bool) -> Script:
        if is_reference:
            device = "" if lab.target.device.type == "cpu" else f", {str(lab.target.device)!r}"
            setup = ["from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms", *lab.target.setup]
            setup.append(f"algorithms = ReferenceAlgorithms(kernels{device})")
        else:
            setup = [*lab.target.origin, "algorithms = target.algorithms"]
        setup[:0] = ["from bagua_ref.conformance.targets.world import RankWorld", "from bagua_ref.simulation import SimulatedWorld"]
        body = [
            "",
            f"nodes = {self._nodes!r}",
            f"weights = {_rows(self._weights)}",
            f"inputs = {_rows(self._inputs)}",
            f"options = {literal(self._options)}",
            "",
            "",
            "def program(comm):",
            f"    world = RankWorld(comm.rank(), {sum(self._nodes)}, nodes, comm)",
            f"    return algorithms.{self._method}(world, weights[comm.rank()], inputs[comm.rank()], **options)",
            "",
            "",
            f"world = SimulatedWorld({sum(self._nodes)}, nodes=nodes, seed={self._seed})",
            *(["messages = world.record()"] if record else []),
            "results = world.run(program)",
        ]
        return Script(setup, body)

    def _violation(
        self, message: str, *lines: str, imports: str = "from bagua_ref.conformance import EXACT, SUM, assert_equal"
    ) -> Violation:
        script = Script([imports, *self._script.setup], [*self._script.body, *lines])
        return Violation(f"{self.what}: {message}", str(script))

    def expect(
        self,
        rank: int,
        step: int,
        place: int,
        want: Tensor,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | None = None,
        why: str = "",
    ) -> None:
        """Raise `Violation` unless a rank's parameter after a step equals ``want``."""
        where = f"rank {rank}, {why or f'step {step}'}, parameter {place}"
        self.expect_that(f"results[{rank}][{step}][{place}]", self.results[rank][step][place], want, where, tolerance, magnitude)

    def expect_true(self, source: str, holds: bool, message: str) -> None:
        """Raise `Violation` unless ``holds``, which a script computes by ``source``."""
        if not holds:
            raise self._violation(message, f"assert {source}")

    def expect_that(
        self, source: str, found: Tensor, want: Tensor, where: str, tolerance: Tolerance = EXACT, magnitude: Tensor | None = None
    ) -> None:
        """Raise `Violation` unless ``found``, which a script computes by ``source``, equals ``want``."""
        try:
            assert_equal(found, want, tolerance, magnitude=magnitude)
        except AssertionError as error:
            more = "" if magnitude is None else f", magnitude={literal(magnitude)}"
            line = f"assert_equal({source}, {literal(want)}, {tolerance.name}{more})"
            raise self._violation(f"{where}: {error}", line) from None


def _copy(value: Any) -> Any:
    """Return a deep copy, which a target may change."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return type(value)(map(_copy, value)) if isinstance(value, list | tuple) else value


def _rows(by_rank: list[Any]) -> str:
    return "[\n" + "".join(f"    {literal(mine)},\n" for mine in by_rank) + "]"
