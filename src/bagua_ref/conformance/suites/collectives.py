"""Collectives in simulated worlds of 1 to 9 ranks on 1 to 4 uneven nodes, with results computed from the rank (S3.9).

Messages, objects and refusals are next door, and so are several collectives in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, assert_equal
from bagua_ref.conformance.inputs.collective_cases import (
    MOVABLE,
    counts,
    nothing,
    reduced,
    reductions,
    root_of,
    terms,
    values,
)
from bagua_ref.conformance.inputs.strategies import Draw, seeds, worlds
from bagua_ref.conformance.lab.collective_script import script_of_collective
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.ranks import run_ranks
from bagua_ref.conformance.lab.violation import Violation, written_down
from bagua_ref.conformance.suites.checks import check
from bagua_ref.types import ReduceOp


def _check(
    lab: Lab,
    draw: Draw,
    nodes: tuple[int, ...],
    method: str,
    arguments: Callable[[int], tuple[Any, ...]],
    wanted: Callable[[int], list[Tensor]],
    tolerance: int = 0,
) -> None:
    """Call ``comm.method(*arguments(rank))`` on every rank; its tensors must then equal ``wanted(rank)``, in order."""
    n, seed = sum(nodes), draw(seeds)
    brought = [arguments(rank) for rank in range(n)]

    def program(comm: Any) -> list[Tensor]:
        mine = tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in brought[comm.rank()])
        returned = getattr(comm, method)(*mine)
        assert returned is None, f"{method} returned {returned!r}"
        return [argument for argument in mine if isinstance(argument, Tensor)]

    expected = [wanted(rank) for rank in range(n)]
    script = script_of_collective(lab.target, nodes, seed, method, brought, expected)
    with written_down(script):
        found = run_ranks(lab, nodes, program, method, script, seed)
        for rank in range(n):
            for number, (tensor, want) in enumerate(zip(found[rank], expected[rank], strict=True)):
                try:
                    magnitude = want.double().abs() if tolerance else None
                    assert_equal(tensor, want, SUM(tolerance) if tolerance else EXACT, magnitude=magnitude)
                except AssertionError as error:
                    raise Violation(f"{method} on nodes {nodes}: tensor {number} of rank {rank}: {error}") from None


def _several(op: ReduceOp, n: int, dtype: torch.dtype) -> int:
    """Return n for SUM(n): libraries round 16-bit sums at each step, and products and means in another order; 0: exact."""
    return n if dtype.is_floating_point and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) else 0


@check("collectives", "S3.9", "allreduce", needs=(), effort=2)
def allreduce(lab: Lab, draw: Draw) -> None:
    """All ranks get the reduction over all ranks, in place or not."""
    nodes, (op, name), count = lab.world(draw, worlds()), draw(reductions), draw(counts)
    dtype, n = getattr(torch, name), sum(nodes)
    total, near = reduced(op, n, count, dtype), _several(op, n, dtype)
    if draw(st.booleans()):
        _check(lab, draw, nodes, "allreduce_inplace", lambda r: (terms(op, r, count, dtype), op), lambda r: [total], near)
        return
    _check(
        lab, draw, nodes, "allreduce", lambda r: (terms(op, r, count, dtype), nothing(count, dtype), op),
        lambda r: [terms(op, r, count, dtype), total], near,
    )  # fmt: skip


@check("collectives", "S3.9", "reduce", effort=2)
def reduce_(lab: Lab, draw: Draw) -> None:
    """Only dst gets the reduction over all ranks; the other ranks' tensors do not change."""
    nodes, (op, name), count = lab.world(draw, worlds()), draw(reductions), draw(counts)
    dtype, n, dst = getattr(torch, name), sum(nodes), root_of(draw, nodes)
    total, near = reduced(op, n, count, dtype), _several(op, n, dtype)
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "reduce_inplace", lambda r: (terms(op, r, count, dtype), dst, op),
            lambda r: [total if r == dst else terms(op, r, count, dtype)], near,
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "reduce", lambda r: (terms(op, r, count, dtype), nothing(count, dtype), dst, op),
        lambda r: [terms(op, r, count, dtype), total if r == dst else nothing(count, dtype)], near,
    )  # fmt: skip


@check("collectives", "S3.9", "reduce_scatter", effort=2)
def reduce_scatter(lab: Lab, draw: Draw) -> None:
    """Rank r gets chunk r of the reduction; in place, the other chunks do not change."""
    nodes, (op, name), count = lab.world(draw, worlds()), draw(reductions), draw(counts)
    dtype, n = getattr(torch, name), sum(nodes)
    near = _several(op, n, dtype)

    def inplace(rank: int) -> list[Tensor]:
        wanted = terms(op, rank, n * count, dtype)
        wanted[rank * count : (rank + 1) * count] = reduced(op, n, count, dtype, rank * count)
        return [wanted]

    if draw(st.booleans()):
        _check(lab, draw, nodes, "reduce_scatter_inplace", lambda r: (terms(op, r, n * count, dtype), op), inplace, near)
        return
    _check(
        lab, draw, nodes, "reduce_scatter", lambda r: (terms(op, r, n * count, dtype), nothing(count, dtype), op),
        lambda r: [terms(op, r, n * count, dtype), reduced(op, n, count, dtype, r * count)], near,
    )  # fmt: skip


@check("collectives", "S3.9", "broadcast")
def broadcast(lab: Lab, draw: Draw) -> None:
    """Every rank gets src's tensor."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    src = root_of(draw, nodes)
    _check(lab, draw, nodes, "broadcast", lambda r: (values(r, count, dtype), src), lambda r: [values(src, count, dtype)])


def _own_chunk(rank: int, n: int, count: int, dtype: torch.dtype) -> Tensor:
    tensor = nothing(n * count, dtype)
    tensor[rank * count : (rank + 1) * count] = values(rank, count, dtype)
    return tensor


@check("collectives", "S3.9", "allgather")
def allgather(lab: Lab, draw: Draw) -> None:
    """Every rank gathers all tensors in rank order; in place, chunk r is its own."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    n = sum(nodes)
    everything = torch.cat([values(rank, count, dtype) for rank in range(n)])
    if draw(st.booleans()):
        _check(lab, draw, nodes, "allgather_inplace", lambda r: (_own_chunk(r, n, count, dtype),), lambda r: [everything])
        return
    _check(
        lab, draw, nodes, "allgather", lambda r: (values(r, count, dtype), nothing(n * count, dtype)),
        lambda r: [values(r, count, dtype), everything],
    )  # fmt: skip


@check("collectives", "S3.9", "gather")
def gather(lab: Lab, draw: Draw) -> None:
    """Only dst gathers all tensors in rank order; in place, its tensor is n times as long as the others."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    n, dst = sum(nodes), root_of(draw, nodes)
    everything = torch.cat([values(rank, count, dtype) for rank in range(n)])
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "gather_inplace",
            lambda r: (_own_chunk(r, n, count, dtype) if r == dst else values(r, count, dtype), count, dst),
            lambda r: [everything if r == dst else values(r, count, dtype)],
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "gather", lambda r: (values(r, count, dtype), nothing(n * count, dtype), dst),
        lambda r: [values(r, count, dtype), everything if r == dst else nothing(n * count, dtype)],
    )  # fmt: skip


@check("collectives", "S3.9", "scatter")
def scatter(lab: Lab, draw: Draw) -> None:
    """Rank r gets chunk r of src's tensor."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    n, src = sum(nodes), root_of(draw, nodes)
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "scatter_inplace",
            lambda r: (values(r, n * count, dtype) if r == src else nothing(count, dtype), count, src),
            lambda r: [values(src, n * count, dtype) if r == src else values(src, count, dtype, r * count)],
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "scatter", lambda r: (values(r, n * count, dtype), nothing(count, dtype), src),
        lambda r: [values(r, n * count, dtype), values(src, count, dtype, r * count)],
    )  # fmt: skip


@check("collectives", "S3.9", "alltoall")
def alltoall(lab: Lab, draw: Draw) -> None:
    """Chunk d goes to rank d, and chunk s comes from rank s."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    n = sum(nodes)

    def transposed(rank: int) -> Tensor:
        return torch.cat([values(peer, count, dtype, rank * count) for peer in range(n)])

    if draw(st.booleans()):
        _check(lab, draw, nodes, "alltoall_inplace", lambda r: (values(r, n * count, dtype),), lambda r: [transposed(r)])
        return
    _check(
        lab, draw, nodes, "alltoall", lambda r: (values(r, n * count, dtype), nothing(n * count, dtype)),
        lambda r: [values(r, n * count, dtype), transposed(r)],
    )  # fmt: skip


@check("collectives", "S3.9", "long", effort=0.08)
def long(lab: Lab, draw: Draw) -> None:
    """What holds for short tensors holds for long ones."""
    nodes = lab.world(draw, worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, root, dtype = sum(nodes), root_of(draw, nodes), draw(st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]))
    count = -(-draw(st.sampled_from(lab.long_sizes)) // n)
    everything = torch.cat([values(rank, count, dtype) for rank in range(n)])
    empty, total = nothing(n * count, dtype), reduced(ReduceOp.MAX, n, n * count, dtype)
    cases: dict[str, tuple[Callable[[int], tuple[Any, ...]], Callable[[int], list[Tensor]]]] = {
        "allreduce_inplace": (lambda r: (terms(ReduceOp.MAX, r, n * count, dtype), ReduceOp.MAX), lambda r: [total]),
        "broadcast": (lambda r: (values(r, n * count, dtype), root), lambda r: [values(root, n * count, dtype)]),
        "allgather_inplace": (lambda r: (_own_chunk(r, n, count, dtype),), lambda r: [everything]),
        "gather": (
            lambda r: (values(r, count, dtype), empty, root),
            lambda r: [values(r, count, dtype), everything if r == root else empty],
        ),
        "scatter": (
            lambda r: (values(r, n * count, dtype), nothing(count, dtype), root),
            lambda r: [values(r, n * count, dtype), values(root, count, dtype, r * count)],
        ),
        "alltoall_inplace": (
            lambda r: (values(r, n * count, dtype),),
            lambda r: [torch.cat([values(peer, count, dtype, r * count) for peer in range(n)])],
        ),
    }
    for method, (arguments, wanted) in cases.items():
        _check(lab, draw, nodes, method, arguments, wanted)


@check("collectives", "S3.9", "alltoall_v")
def alltoall_v(lab: Lab, draw: Draw) -> None:
    """Blocks of the given counts move between the given displacements, and gaps do not change."""
    nodes, dtype = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE)))
    n, most, gap = sum(nodes), draw(st.integers(0, 3)), draw(st.integers(0, 2))

    other = draw(st.integers(0, 2))  # received blocks may have another layout than sent ones

    def layout(rank: int, between: int = gap) -> tuple[list[int], list[int], int]:
        sizes = [(rank + peer) % (most + 1) for peer in range(n)]
        return sizes, [sum(sizes[:peer]) + between * peer for peer in range(n)], sum(sizes) + between * n

    def filled(rank: int, tensor: Tensor, between: int) -> Tensor:
        sizes, displs, _ = layout(rank, between)
        for peer in range(n):
            block = values(peer, sizes[peer], dtype, layout(peer)[1][rank])
            tensor[displs[peer] : displs[peer] + sizes[peer]] = block
        return tensor

    def send(rank: int) -> Tensor:
        return values(rank, layout(rank)[2], dtype)

    def recv(rank: int) -> Tensor:
        return nothing(layout(rank, other)[2], dtype)

    if draw(st.booleans()):
        in_place = lambda r: [filled(r, send(r), gap)]  # noqa: E731
        _check(lab, draw, nodes, "alltoall_v_inplace", lambda r: (send(r), *layout(r)[:2]), in_place)
        return
    _check(
        lab, draw, nodes, "alltoall_v", lambda r: (send(r), *layout(r)[:2], recv(r), *layout(r, other)[:2]),
        lambda r: [send(r), filled(r, recv(r), other)],
    )  # fmt: skip
