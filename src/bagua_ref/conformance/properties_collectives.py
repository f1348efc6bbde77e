"""Every collective in simulated worlds of 1 to 9 ranks on 1 to 4 uneven nodes, against values computed from the rank (S3.9)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.checks import Draw, check
from bagua_ref.conformance.collective_script import script_of_collective, script_of_ranks
from bagua_ref.conformance.strategies import seeds, worlds
from bagua_ref.conformance.tolerances import EXACT, SUM, assert_equal
from bagua_ref.conformance.violation import Violation, literal
from bagua_ref.conformance.world import run_ranks
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bagua_ref.conformance.lab import Lab

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("uint8", "int8", "int32", "int64")
_MOVABLE = (*_FLOATS, *_INTEGERS, "bool")
_BITWISE: dict[ReduceOp, Any] = {
    ReduceOp.BAND: lambda a, b: a & b, ReduceOp.BOR: lambda a, b: a | b, ReduceOp.BXOR: lambda a, b: a ^ b,
}  # fmt: skip
_COMBINE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: lambda a, b: a + b, ReduceOp.AVG: lambda a, b: a + b, ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min, ReduceOp.MAX: max, **_BITWISE,
}  # fmt: skip
_reductions = st.one_of(
    st.tuples(st.sampled_from([op for op in ReduceOp if op not in _BITWISE]), st.sampled_from(_FLOATS)),
    st.tuples(st.sampled_from([op for op in ReduceOp if op is not ReduceOp.AVG]), st.sampled_from(_INTEGERS)),
)
_counts = st.integers(0, 7)


def _value(rank: int, index: int) -> int:
    return (2 * rank + 3 * index + rank * index) % 5 + 1


def _values(rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return what rank ``rank`` brings; every rank's and place's numbers differ."""
    numbers = torch.tensor([_value(rank, index) for index in range(start, start + count)], dtype=torch.int64)
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype)


def _reduced(op: ReduceOp, n: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Integers are exact in float32; one rounding follows, or the wrapping of an integer type."""
    exact = [reduce(_COMBINE[op], [_value(rank, index) for rank in range(n)]) for index in range(start, start + count)]
    if not dtype.is_floating_point:
        return torch.tensor(exact, dtype=torch.int64).to(dtype)
    wide = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(np.array(exact, dtype=wide) / wide(n if op is ReduceOp.AVG else 1)).to(dtype)


def _nothing(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 99).to(dtype)


def _check(
    lab: Lab,
    draw: Draw,
    nodes: tuple[int, ...],
    method: str,
    arguments: Callable[[int], tuple[Any, ...]],
    wanted: Callable[[int], list[Tensor]],
    tolerance: int = 0,
) -> None:
    """Call ``comm.method(*arguments(rank))`` on every rank; its tensors must then be ``wanted(rank)``, in their order."""
    n, seed = sum(nodes), draw(seeds)
    brought = [arguments(rank) for rank in range(n)]

    def program(comm: Any) -> list[Tensor]:
        mine = tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in brought[comm.rank()])
        returned = getattr(comm, method)(*mine)
        assert returned is None, f"{method} returned {returned!r}"
        return [argument for argument in mine if isinstance(argument, Tensor)]

    expected = [wanted(rank) for rank in range(n)]
    script = script_of_collective(lab.target, nodes, seed, method, brought, expected)
    with _written_down(script):
        found = run_ranks(lab, nodes, program, method, brought, seed)
        for rank in range(n):
            for number, (tensor, want) in enumerate(zip(found[rank], expected[rank], strict=True)):
                try:
                    magnitude = want.double().abs() if tolerance else None
                    assert_equal(tensor, want, SUM(tolerance) if tolerance else EXACT, magnitude=magnitude)
                except AssertionError as error:
                    raise Violation(f"{method} on nodes {nodes}: tensor {number} of rank {rank}: {error}") from None


def _root(draw: Draw, nodes: tuple[int, ...]) -> int:
    return int(draw(st.integers(0, sum(nodes) - 1)))


def _several(op: ReduceOp, n: int, dtype: torch.dtype) -> int:
    """Return the tolerance in SUM: a library rounds 16-bit sums as it goes, and products and means in an order of its own."""
    return n if dtype.is_floating_point and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) else 0


@check("collectives", "S3.9", "allreduce", needs=(), effort=2)
def allreduce(lab: Lab, draw: Draw) -> None:
    """All ranks get what is combined over all ranks, in place or not."""
    nodes, (op, name), count = draw(worlds()), draw(_reductions), draw(_counts)
    dtype, n = getattr(torch, name), sum(nodes)
    total, near = _reduced(op, n, count, dtype), _several(op, n, dtype)
    if draw(st.booleans()):
        _check(lab, draw, nodes, "allreduce_inplace", lambda r: (_values(r, count, dtype), op), lambda r: [total], near)
        return
    _check(
        lab, draw, nodes, "allreduce", lambda r: (_values(r, count, dtype), _nothing(count, dtype), op),
        lambda r: [_values(r, count, dtype), total], near,
    )  # fmt: skip


@check("collectives", "S3.9", "reduce", effort=2)
def reduce_(lab: Lab, draw: Draw) -> None:
    """Dst alone gets what is combined over all ranks, the other ranks' tensors stay as they were."""
    nodes, (op, name), count = draw(worlds()), draw(_reductions), draw(_counts)
    dtype, n, dst = getattr(torch, name), sum(nodes), _root(draw, nodes)
    total, near = _reduced(op, n, count, dtype), _several(op, n, dtype)
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "reduce_inplace", lambda r: (_values(r, count, dtype), dst, op),
            lambda r: [total if r == dst else _values(r, count, dtype)], near,
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "reduce", lambda r: (_values(r, count, dtype), _nothing(count, dtype), dst, op),
        lambda r: [_values(r, count, dtype), total if r == dst else _nothing(count, dtype)], near,
    )  # fmt: skip


@check("collectives", "S3.9", "reduce_scatter", effort=2)
def reduce_scatter(lab: Lab, draw: Draw) -> None:
    """Rank r gets chunk r of what is combined; in place the other chunks stay as they were."""
    nodes, (op, name), count = draw(worlds()), draw(_reductions), draw(_counts)
    dtype, n = getattr(torch, name), sum(nodes)
    near = _several(op, n, dtype)

    def inplace(rank: int) -> list[Tensor]:
        wanted = _values(rank, n * count, dtype)
        wanted[rank * count : (rank + 1) * count] = _reduced(op, n, count, dtype, rank * count)
        return [wanted]

    if draw(st.booleans()):
        _check(lab, draw, nodes, "reduce_scatter_inplace", lambda r: (_values(r, n * count, dtype), op), inplace, near)
        return
    _check(
        lab, draw, nodes, "reduce_scatter", lambda r: (_values(r, n * count, dtype), _nothing(count, dtype), op),
        lambda r: [_values(r, n * count, dtype), _reduced(op, n, count, dtype, r * count)], near,
    )  # fmt: skip


@check("collectives", "S3.9", "broadcast")
def broadcast(lab: Lab, draw: Draw) -> None:
    """Every rank gets what src has."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    src = _root(draw, nodes)
    _check(lab, draw, nodes, "broadcast", lambda r: (_values(r, count, dtype), src), lambda r: [_values(src, count, dtype)])


def _own_chunk(rank: int, n: int, count: int, dtype: torch.dtype) -> Tensor:
    tensor = _nothing(n * count, dtype)
    tensor[rank * count : (rank + 1) * count] = _values(rank, count, dtype)
    return tensor


@check("collectives", "S3.9", "allgather")
def allgather(lab: Lab, draw: Draw) -> None:
    """Every rank collects all tensors in rank order; in place its own is chunk r."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    n = sum(nodes)
    everything = torch.cat([_values(rank, count, dtype) for rank in range(n)])
    if draw(st.booleans()):
        _check(lab, draw, nodes, "allgather_inplace", lambda r: (_own_chunk(r, n, count, dtype),), lambda r: [everything])
        return
    _check(
        lab, draw, nodes, "allgather", lambda r: (_values(r, count, dtype), _nothing(n * count, dtype)),
        lambda r: [_values(r, count, dtype), everything],
    )  # fmt: skip


@check("collectives", "S3.9", "gather")
def gather(lab: Lab, draw: Draw) -> None:
    """Dst alone collects all tensors in rank order; in place it holds n times as much as the others."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    n, dst = sum(nodes), _root(draw, nodes)
    everything = torch.cat([_values(rank, count, dtype) for rank in range(n)])
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "gather_inplace",
            lambda r: (_own_chunk(r, n, count, dtype) if r == dst else _values(r, count, dtype), count, dst),
            lambda r: [everything if r == dst else _values(r, count, dtype)],
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "gather", lambda r: (_values(r, count, dtype), _nothing(n * count, dtype), dst),
        lambda r: [_values(r, count, dtype), everything if r == dst else _nothing(n * count, dtype)],
    )  # fmt: skip


@check("collectives", "S3.9", "scatter")
def scatter(lab: Lab, draw: Draw) -> None:
    """Rank r gets chunk r of what src has."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    n, src = sum(nodes), _root(draw, nodes)
    if draw(st.booleans()):
        _check(
            lab, draw, nodes, "scatter_inplace",
            lambda r: (_values(r, n * count, dtype) if r == src else _nothing(count, dtype), count, src),
            lambda r: [_values(src, n * count, dtype) if r == src else _values(src, count, dtype, r * count)],
        )  # fmt: skip
        return
    _check(
        lab, draw, nodes, "scatter", lambda r: (_values(r, n * count, dtype), _nothing(count, dtype), src),
        lambda r: [_values(r, n * count, dtype), _values(src, count, dtype, r * count)],
    )  # fmt: skip


@check("collectives", "S3.9", "alltoall")
def alltoall(lab: Lab, draw: Draw) -> None:
    """Chunk d goes to rank d, and chunk s comes from rank s."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    n = sum(nodes)

    def transposed(rank: int) -> Tensor:
        return torch.cat([_values(peer, count, dtype, rank * count) for peer in range(n)])

    if draw(st.booleans()):
        _check(lab, draw, nodes, "alltoall_inplace", lambda r: (_values(r, n * count, dtype),), lambda r: [transposed(r)])
        return
    _check(
        lab, draw, nodes, "alltoall", lambda r: (_values(r, n * count, dtype), _nothing(n * count, dtype)),
        lambda r: [_values(r, n * count, dtype), transposed(r)],
    )  # fmt: skip


@check("collectives", "S3.9", "alltoall_v")
def alltoall_v(lab: Lab, draw: Draw) -> None:
    """Counts of elements move from displacements to displacements, and gaps stay as they were."""
    nodes, dtype = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE)))
    n, most, gap = sum(nodes), draw(st.integers(0, 3)), draw(st.integers(0, 2))

    other = draw(st.integers(0, 2))  # received blocks need not lie as sent ones do

    def layout(rank: int, between: int = gap) -> tuple[list[int], list[int], int]:
        sizes = [(rank + peer) % (most + 1) for peer in range(n)]
        return sizes, [sum(sizes[:peer]) + between * peer for peer in range(n)], sum(sizes) + between * n

    def filled(rank: int, tensor: Tensor, between: int) -> Tensor:
        sizes, displs, _ = layout(rank, between)
        for peer in range(n):
            block = _values(peer, sizes[peer], dtype, layout(peer)[1][rank])
            tensor[displs[peer] : displs[peer] + sizes[peer]] = block
        return tensor

    def send(rank: int) -> Tensor:
        return _values(rank, layout(rank)[2], dtype)

    def recv(rank: int) -> Tensor:
        return _nothing(layout(rank, other)[2], dtype)

    if draw(st.booleans()):
        in_place = lambda r: [filled(r, send(r), gap)]  # noqa: E731
        _check(lab, draw, nodes, "alltoall_v_inplace", lambda r: (send(r), *layout(r)[:2]), in_place)
        return
    _check(
        lab, draw, nodes, "alltoall_v", lambda r: (send(r), *layout(r)[:2], recv(r), *layout(r, other)[:2]),
        lambda r: [send(r), filled(r, recv(r), other)],
    )  # fmt: skip


@check("collectives", "S3.9", "exchange")
def exchange(lab: Lab, draw: Draw) -> None:
    """Each message arrives, two from one rank to another in the order in which they were sent."""
    nodes, dtype = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE)))
    ranks = st.integers(0, sum(nodes) - 1)
    messages = draw(st.lists(st.tuples(ranks, ranks, _counts), max_size=20))

    everyone, listed, seed = range(sum(nodes)), list(enumerate(messages)), draw(seeds)
    sends = [[(_values(number, count, dtype), dst) for number, (src, dst, count) in listed if src == rank] for rank in everyone]
    recvs = [[(_nothing(count, dtype), src) for src, dst, count in messages if dst == rank] for rank in everyone]
    wanted = [[_values(number, count, dtype) for number, (_, dst, count) in listed if dst == rank] for rank in everyone]
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"sends = {literal(sends)}", f"recvs = {literal(recvs)}", f"expected = {literal(wanted)}"],
        ["comm.exchange(sends[comm.rank()], recvs[comm.rank()])"],
        ["for mine, wanted in zip(recvs, expected):", "    for (tensor, _), want in zip(mine, wanted):",
         "        assert_equal(tensor, want, EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> list[Tensor]:
        mine = [(tensor.clone(), src) for tensor, src in recvs[comm.rank()]]
        comm.exchange(sends[comm.rank()], mine)
        return [tensor for tensor, _ in mine]

    with _written_down(script):
        for rank, received in enumerate(run_ranks(lab, nodes, program, "exchange", messages, seed)):
            for tensor, want in zip(received, wanted[rank], strict=True):
                _same(tensor, want, f"exchange of (src, dst, count) {messages} on nodes {nodes}, received by rank {rank}")


@check("collectives", "S3.9", "send_and_recv")
def send_and_recv(lab: Lab, draw: Draw) -> None:
    """A message passed along the ranks arrives at the last."""
    nodes, dtype, count = draw(worlds()), getattr(torch, draw(st.sampled_from(_MOVABLE))), draw(_counts)
    seed, message = draw(seeds), _values(0, count, dtype)
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"message, nothing = {literal(message)}, {literal(_nothing(count, dtype))}"],
        ["tensor = message if comm.rank() == 0 else nothing.clone()", "if comm.rank() > 0:",
         "    comm.recv(tensor, comm.rank() - 1)", f"if comm.rank() < {sum(nodes) - 1}:",
         "    comm.send(tensor, comm.rank() + 1)", "return tensor"],
        ["for tensor in results:", "    assert_equal(tensor, message, EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> Tensor:
        tensor = message.clone() if comm.rank() == 0 else _nothing(count, dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return tensor

    with _written_down(script):
        for rank, tensor in enumerate(run_ranks(lab, nodes, program, "send and recv", (count, str(dtype)), seed)):
            _same(tensor, message, f"a message of {count} {dtype} passed on nodes {nodes}, at rank {rank}")


@check("collectives", "S3.9", "broadcast_object")
def broadcast_object(lab: Lab, draw: Draw) -> None:
    """Every rank gets src's object, whichever rank src is, however large."""
    nodes = draw(worlds())
    src, seed = _root(draw, nodes), draw(seeds)
    simple = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=300), st.binary(max_size=20))
    value = draw(st.recursive(simple, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=5))
    program = lambda comm: comm.broadcast_object(value if comm.rank() == src else comm.rank(), src)  # noqa: E731
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"value = {value!r}"],
        [f"return comm.broadcast_object(value if comm.rank() == {src} else comm.rank(), {src})"],
        ["assert results == [value] * len(results), results"],
    )  # fmt: skip
    with _written_down(script):
        for rank, found in enumerate(run_ranks(lab, nodes, program, "broadcast_object", value, seed)):
            if found != value or type(found) is not type(value):
                raise Violation(f"broadcast_object from {src} on nodes {nodes}: rank {rank} got {found!r} instead of {value!r}")


@check("collectives", "S3.9", "refuses")
def refuses(lab: Lab, draw: Draw) -> None:
    """What does not fit is a ValueError or TypeError before anything is sent, and the communicator goes on working."""
    nodes = draw(worlds())
    n = sum(nodes)
    case = draw(st.sampled_from(["src", "size", "dtype", "average of integers", "bits of floats"]))
    bad: dict[str, tuple[str, tuple[Any, ...]]] = {
        "src": ("broadcast", (torch.zeros(2), draw(st.sampled_from([-1, n, n + 3])))),
        "size": ("allgather", (torch.zeros(2), torch.zeros(2 * n + 1))),
        "dtype": ("allreduce", (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ReduceOp.SUM)),
        "average of integers": ("allreduce_inplace", (torch.zeros(2, dtype=torch.int32), ReduceOp.AVG)),
        "bits of floats": ("allreduce_inplace", (torch.zeros(2), draw(st.sampled_from(list(_BITWISE))))),
    }
    method, arguments = bad[case]
    seed = draw(seeds)
    shown = ", ".join(str(int(item)) if isinstance(item, ReduceOp) else literal(item) for item in arguments)
    script = script_of_ranks(
        lab.target, nodes, seed, [],
        ["try:", f"    comm.{method}({shown})", "except (ValueError, TypeError):", "    tensor = torch.ones(1)",
         f"    comm.allreduce_inplace(tensor, {int(ReduceOp.SUM)})", "    return tensor",
         f"raise AssertionError({f'{method} took what does not fit ({case})'!r})"],
        ["for tensor in results:", f"    assert_equal(tensor, torch.tensor([{float(n)}]), EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> Tensor | str:
        try:
            getattr(comm, method)(*arguments)
        except (ValueError, TypeError):
            tensor = torch.ones(1)
            comm.allreduce_inplace(tensor, ReduceOp.SUM)
            return tensor
        return f"{method} took what does not fit ({case})"

    with _written_down(script):
        for rank, found in enumerate(run_ranks(lab, nodes, program, method, case, seed)):
            if isinstance(found, str):
                raise Violation(f"{found} on nodes {nodes}, rank {rank}: {arguments!r}")
            what = f"allreduce after {method} refused its arguments, on nodes {nodes}, rank {rank}"
            _same(found, torch.full((1,), float(n)), what)


@contextmanager
def _written_down(script: str) -> Iterator[None]:
    """Give a violation the script that shows it."""
    try:
        yield
    except Violation as violation:
        violation.snippet = script
        raise


def _same(tensor: Any, want: Tensor, what: str) -> None:
    try:
        assert_equal(tensor, want, EXACT)
    except AssertionError as error:
        raise Violation(f"{what}: {error}") from None
