"""Series of collectives on one communicator, tensors with gaps, and the barrier (S3.9)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, assert_equal
from bagua_ref.conformance.inputs.collective_cases import MOVABLE, REDUCTIONS, nothing, reduced, root_of, terms, values
from bagua_ref.conformance.inputs.strategies import Draw, seeds, worlds
from bagua_ref.conformance.lab.collective_script import script_of_ranks
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.ranks import run_ranks
from bagua_ref.conformance.lab.violation import Violation, literal, written_down
from bagua_ref.conformance.suites.checks import check
from bagua_ref.types import ReduceOp

_REDUCTIONS = ("allreduce_inplace", "allreduce", "reduce_inplace", "reduce", "reduce_scatter")
_MOVEMENTS = ("broadcast", "allgather", "gather", "scatter", "alltoall")


@dataclass(frozen=True)
class _CollectiveCall:
    """A collective with its arguments and expected tensors, by rank."""

    method: str
    brought: list[list[Any]]
    expected: list[list[Tensor]]
    tolerance: int = 0
    """n for SUM(n); 0: exact."""


def _call(method: str, op: ReduceOp, n: int, count: int, dtype: torch.dtype, root: int, start: int = 0) -> _CollectiveCall:
    """Return a call of ``method``, with ``op`` if it reduces; ``start`` selects the numbers."""
    everyone, reduces = range(n), method in _REDUCTIONS
    bring = partial(terms, op) if reduces else values
    few = [bring(rank, count, dtype, start) for rank in everyone]
    many = [bring(rank, n * count, dtype, start) for rank in everyone]
    one, all_of_them, gathered = nothing(count, dtype), nothing(n * count, dtype), torch.cat(few)
    total = reduced(op, n, count, dtype, start) if reduces else one
    totals = reduced(op, n, n * count, dtype, start) if reduces else all_of_them
    part = [slice(rank * count, (rank + 1) * count) for rank in everyone]
    cases: dict[str, tuple[Any, Any]] = {
        "allreduce_inplace": (lambda r: [few[r], op], lambda r: [total]),
        "allreduce": (lambda r: [few[r], one, op], lambda r: [few[r], total]),
        "reduce_inplace": (lambda r: [few[r], root, op], lambda r: [total if r == root else few[r]]),
        "reduce": (lambda r: [few[r], one, root, op], lambda r: [few[r], total if r == root else one]),
        "reduce_scatter": (lambda r: [many[r], one, op], lambda r: [many[r], totals[part[r]]]),
        "broadcast": (lambda r: [few[r], root], lambda r: [few[root]]),
        "allgather": (lambda r: [few[r], all_of_them], lambda r: [few[r], gathered]),
        "gather": (lambda r: [few[r], all_of_them, root], lambda r: [few[r], gathered if r == root else all_of_them]),
        "scatter": (lambda r: [many[r], one, root], lambda r: [many[r], many[root][part[r]]]),
        "alltoall": (lambda r: [many[r], all_of_them], lambda r: [many[r], torch.cat([sent[part[r]] for sent in many])]),
    }  # fmt: skip
    brought, expected = cases[method]
    several = n if reduces and dtype.is_floating_point and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) else 0
    return _CollectiveCall(method, [brought(rank) for rank in everyone], [expected(rank) for rank in everyone], several)


def _tensors(arguments: list[Any]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


def _written(arguments: list[Any]) -> list[Any]:
    return [int(argument) if isinstance(argument, ReduceOp) else argument for argument in arguments]


def _one_by_one(lab: Lab, nodes: tuple[int, ...], seed: int, calls: list[_CollectiveCall]) -> None:
    """Make the calls on one communicator; report a failure with as few of them as show it."""
    everyone, methods = range(sum(nodes)), [call.method for call in calls]
    shown = [[(call.method, _written(call.brought[rank])) for call in calls] for rank in everyone]
    script = script_of_ranks(
        lab.target, nodes, seed,
        ["from bagua_ref.conformance import SUM", f"brought = {literal(shown)}",
         f"expected = {literal([[call.expected[rank] for call in calls] for rank in everyone])}",
         f"near = {[call.tolerance for call in calls]}  # in SUM; 0: exact"],
        ["for method, arguments in brought[comm.rank()]:", "    getattr(comm, method)(*arguments)"],
        ["for mine, wanted in zip(brought, expected):", "    for (_, arguments), tensors, terms in zip(mine, wanted, near):",
         "        for tensor, want in zip([item for item in arguments if isinstance(item, torch.Tensor)], tensors):",
         "            assert_equal(tensor, want, SUM(terms) if terms else EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> list[list[Tensor]]:
        found = []
        for call in calls:
            mine = [item.clone() if isinstance(item, Tensor) else item for item in call.brought[comm.rank()]]
            getattr(comm, call.method)(*mine)
            found.append(_tensors(mine))
        return found

    with written_down(script):
        results = run_ranks(lab, nodes, program, f"{', '.join(methods[:9])}{', ...' * (len(methods) > 9)}", script, seed)
        for place, call in enumerate(calls):
            for rank in everyone:
                for tensor, want in zip(results[rank][place], call.expected[rank], strict=True):
                    try:
                        _same(
                            tensor,
                            want,
                            f"{call.method} on nodes {nodes}, call {place} of {len(calls)}, rank {rank}",
                            call.tolerance,
                        )
                    except Violation:
                        alike = [earlier for earlier in calls[: place + 1] if earlier.method == call.method]
                        for fewer in ([call], alike):
                            if len(fewer) < len(calls):
                                _one_by_one(lab, nodes, seed, fewer)
                        raise


@check("collectives", "S3.9", "one_after_another", effort=0.6)
def one_after_another(lab: Lab, draw: Draw) -> None:
    """A collective is not affected by earlier ones on the same communicator."""
    nodes, seed, turn = lab.world(draw, worlds()), draw(seeds), draw(seeds)
    methods = _REDUCTIONS + _MOVEMENTS
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    counts = [draw(st.integers(1, 4)) for _ in methods]
    calls = []
    for step in range(draw(st.integers(2, 3)) * len(methods)):
        place = (step * (3 if turn % 2 else 1) + turn) % len(methods)  # 3 and their number have no common divisor
        count = counts[place] if turn % 3 else counts[place] + step % 2
        calls.append(
            _call(methods[place], ReduceOp.SUM, sum(nodes), count, dtypes[(place + turn) % 4], root_of(draw, nodes), 13 * step)
        )
    _one_by_one(lab, nodes, seed, calls)


@check("collectives", "S3.9", "every_dtype", effort=0.4)
def every_dtype(lab: Lab, draw: Draw) -> None:
    """Every dtype moves bit for bit, and supports each of its reductions."""
    nodes, seed, count = lab.world(draw, worlds()), draw(seeds), draw(st.integers(1, 5))
    n, root, turn = sum(nodes), root_of(draw, nodes), draw(seeds)
    calls = [
        _call(_REDUCTIONS[(place + turn) % len(_REDUCTIONS)], op, n, count, getattr(torch, name), root)
        for place, (op, name) in enumerate(REDUCTIONS)
    ]
    for place, name in enumerate(MOVABLE):
        calls.append(_call(_MOVEMENTS[(place + turn) % len(_MOVEMENTS)], ReduceOp.SUM, n, count, getattr(torch, name), root))
    _one_by_one(lab, nodes, seed, calls)


@check("collectives", "S3.9", "gaps")
def gaps(lab: Lab, draw: Draw) -> None:
    """A non-contiguous tensor is either refused on every rank or gets the right result, and its gaps do not change."""
    nodes, seed, count = lab.world(draw, worlds()), draw(seeds), draw(st.integers(2, 7))
    n, root, dtype = sum(nodes), root_of(draw, nodes), draw(st.sampled_from([torch.float32, torch.int64]))
    method = draw(st.sampled_from(["allreduce_inplace", "broadcast", "allgather"]))
    call = _call(method, ReduceOp.SUM, n, count, dtype, root)
    brought, expected = call.brought, call.expected
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"brought = {literal(list(map(_written, brought)))}", f"expected = {literal(expected)}"],
        ["mine = [item if not isinstance(item, torch.Tensor) else torch.stack([item, item], dim=1)[:, 0]",
         "        for item in brought[comm.rank()]]",
         "try:", f"    comm.{method}(*mine)", "except (ValueError, TypeError, RuntimeError):", "    return []",
         "return [item for item in mine if isinstance(item, torch.Tensor)]"],
        ["for found, mine, wanted in zip(results, brought, expected):", "    for tensor, before, want in zip(found, mine, wanted):",
         "        assert_equal(tensor, want, EXACT)",
         "        assert_equal(tensor.as_strided(tensor.shape, tensor.stride(), 1), before, EXACT)  # the gaps"],
    )  # fmt: skip

    def program(comm: Any) -> list[Tensor]:
        mine = [torch.stack([item, item], dim=1)[:, 0] if isinstance(item, Tensor) else item for item in brought[comm.rank()]]
        try:
            getattr(comm, method)(*mine)
        except (ValueError, TypeError, RuntimeError):  # torch's own refusals are RuntimeErrors
            return []
        return _tensors(mine)

    with written_down(script):
        for rank, found in enumerate(run_ranks(lab, nodes, program, f"{method} of tensors with gaps", script, seed)):
            for number, (tensor, want) in enumerate(zip(found, expected[rank], strict=False)):
                where = f"{method} of tensors with gaps on nodes {nodes}: tensor {number} of rank {rank}"
                _same(tensor, want, where)
                before = _tensors(brought[rank])[number]
                _same(tensor.as_strided(tensor.shape, tensor.stride(), 1), before, f"{where}, the memory between its elements")


@check("collectives", "S3.9", "barrier")
def barrier(lab: Lab, draw: Draw) -> None:
    """No rank leaves a barrier before all ranks have reached it."""
    nodes, seed = lab.world(draw, worlds()), draw(seeds)
    n, rounds = sum(nodes), draw(st.integers(1, 3))
    arrived: list[int] = []
    lines = [
        "if hasattr(comm, 'barrier'):", f"    for number in range(1, {rounds} + 1):", "        arrived.append(comm.rank())",
        "        comm.barrier()", f"        assert len(arrived) >= number * {n}, (comm.rank(), number, arrived)",
    ]  # fmt: skip
    script = script_of_ranks(lab.target, nodes, seed, ["arrived = []"], lines, [])

    def program(comm: Any) -> str:
        for number in range(1, rounds + 1) if hasattr(comm, "barrier") else ():
            arrived.append(comm.rank())
            comm.barrier()
            if len(arrived) < number * n:
                return f"rank {comm.rank()} left barrier {number} when only ranks {arrived[(number - 1) * n :]} had reached it"
        return ""

    with written_down(script):
        for found in run_ranks(lab, nodes, program, "barrier", script, seed):
            if found:
                raise Violation(f"barrier on nodes {nodes}: {found}")


def _same(actual: Tensor, expected: Tensor, what: str, tolerance: int = 0) -> None:
    try:
        assert_equal(actual, expected, SUM(tolerance) if tolerance else EXACT)
    except AssertionError as error:
        raise Violation(f"{what}: {error}") from None
