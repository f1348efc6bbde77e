"""Collectives in worlds of 1 to 9 ranks on 1 to 4 uneven nodes, with results computed from the rank
(S3.9).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.collective_cases import (
    BITWISE,
    FLOATS,
    METHODS,
    MOVABLE,
    REDUCED,
    REDUCING,
    REDUCTIONS,
    CollectiveCall,
    collective_call,
    counts,
    nothing,
    root_of,
    values,
)
from bagua_ref.conformance.cases.strategies import dtype_named, worlds
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import collectives_plain as plain
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.lab.lab import Lab, copies_of, tensors_in
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.types import ReduceOp

_MOVING = tuple(name for name in METHODS if name not in REDUCING)
_REDUCIBLE = (*FLOATS, *REDUCED)


def _drawn(lab: Lab, names: Sequence[str] = MOVABLE) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Draw a world, a dtype and a root."""
    nodes = lab.world(worlds())
    dtype = dtype_named(lab.choice(lab.dtypes(names)))
    return nodes, dtype, root_of(lab.draw, nodes)


def _reductions(names: Sequence[str]) -> list[tuple[ReduceOp, str]]:
    """Return pairs of reductions and dtypes."""
    return [(op, name) for op, name in REDUCTIONS if name in names]


def _after(comm: Any, method: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Call ``comm.method`` with copies of the arguments, parts of larger tensors; return their
    tensors after the call.
    """

    def placed(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return type(item)(map(placed, item))
        if not isinstance(item, Tensor):
            return item
        edge = nothing(2, item.dtype)
        return torch.cat([edge, item, edge])[2:-2]

    mine = placed(arguments)
    returned = getattr(comm, method)(*mine)
    assert returned is None, f"{method} returned {returned!r}"
    return tensors_in(mine)


def _edges(x: Tensor) -> Tensor:
    """Return the two elements before and after a tensor of `_after`."""
    room = x.as_strided((x.numel() + 4,), (1,), x.storage_offset() - 2)
    return room[[0, 1, -2, -1]]


def _run(lab: Lab, nodes: tuple[int, ...], calls: Sequence[CollectiveCall]) -> None:
    """Run calls on one communicator and compare the results; on failure, report a single call if it
    also fails alone.
    """
    names = [call.method for call in calls]
    brought = [[call.brought[rank] for call in calls] for rank in range(sum(nodes))]

    def program(comm: Any) -> list[list[Tensor]]:
        mine = brought[comm.rank()]
        return [_after(comm, name, given) for name, given in zip(names, mine, strict=True)]

    what = ", ".join(names[:9]) + ", ..." * (len(names) > 9)
    results = lab.with_communicators(what, nodes, program, methods=names, brought=brought)
    for place, call in enumerate(calls):
        found = [of_rank[place] for of_rank in results]
        beside = [[_edges(x) for x in mine] for mine in found]
        untouched = [[nothing(4, x.dtype) for x in mine] for mine in found]
        if call.brought[0][-1] is ReduceOp.AVG:
            found = [
                [_mean(*both, len(results)) for both in zip(mine, wanted, strict=True)]
                for mine, wanted in zip(found, call.expected, strict=True)
            ]
        tolerance = SUM(call.terms) if call.terms else EXACT
        where = f"{call.method}, call {place} of {len(calls)}: tensors by rank"
        try:
            lab.assert_equal(found, call.expected, tolerance, where=where)
            lab.assert_equal(beside, untouched, where=f"{where}, the memory beside them")
        except Violation:
            if len(calls) > 1:
                _run(lab, nodes, [call])
            raise


def _mean(found: Tensor, expected: Tensor, n: int) -> Tensor:
    """Return the actual mean with expected values in place of infinities from an overflow of the
    sum: S3.9 does not say whether division precedes summation.
    """
    overflows = expected.double().abs() * n > torch.finfo(expected.dtype).max
    return torch.where(overflows & (found == expected.sign() * math.inf), expected, found)


def _one_call(lab: Lab, name: str) -> None:
    """Check a single call of a collective, in place or not."""
    nodes = lab.world(worlds())
    dtypes = lab.dtypes(_REDUCIBLE if name in REDUCING else MOVABLE)
    kinds = _reductions(dtypes) if name in REDUCING else [(ReduceOp.SUM, of) for of in dtypes]
    op, dtype = lab.choice(kinds)
    method = name if name == "broadcast" or lab.flag() else f"{name}_inplace"
    given = lab.draw(counts), dtype_named(dtype), root_of(lab.draw, nodes)
    _run(lab, nodes, [collective_call(method, op, sum(nodes), *given)])


_SENTENCES = {
    "allreduce": "All ranks get the reduction over all ranks, in place or not.",
    "reduce": "Only dst gets the reduction over all ranks; the other ranks' tensors do not change.",
    "reduce_scatter": (
        "Rank r gets chunk r of the reduction; in place, the other chunks do not change."
    ),
    "broadcast": "Every rank gets src's tensor.",
    "allgather": "Every rank gathers all tensors in rank order; in place, chunk r is its own.",
    "gather": (
        "Only dst gathers all tensors in rank order; in place, its tensor is n times as long as the"
        " others."
    ),
    "scatter": "Rank r gets chunk r of src's tensor.",
    "alltoall": "Chunk d goes to rank d, and chunk s comes from rank s.",
}


for _name, _sentence in _SENTENCES.items():
    check(f"collectives.S3.9.{_name}", effort=1, sentence=_sentence)(partial(_one_call, name=_name))


@check("collectives.S3.9.alltoall_v")
def alltoall_v(lab: Lab) -> None:
    """Blocks of the given counts move between the given displacements, and gaps do not change."""
    nodes, dtype, _ = _drawn(lab)
    everyone, most = range(sum(nodes)), lab.integer(0, 3)
    sizes = [[(rank + peer) % (most + 1) for peer in everyone] for rank in everyone]

    def displacements(between: int) -> list[list[int]]:
        return [[sum(row[:peer]) + between * peer for peer in everyone] for row in sizes]

    # received blocks may have another layout than sent ones
    gap, other = lab.integer(0, 2), lab.integer(0, 2)
    shares, in_place = lab.flag(), lab.flag()
    sent_at, received_at = displacements(gap), displacements(gap if in_place else other)
    if shares and not in_place:  # blocks sent to different ranks may overlap
        sent_at = [[peer % 2 for peer in everyone] for _ in everyone]
    sent = [values(r, sum(sizes[r]) + gap * len(sizes) + shares, dtype) for r in everyone]
    received = sent if in_place else [nothing(sum(row) + other * len(row), dtype) for row in sizes]
    wanted = plain.alltoall_v(sent, received, sizes, sent_at, received_at)
    brought = [[sent[r], sizes[r], sent_at[r]] for r in everyone]
    expected = [[want] for want in wanted]
    if not in_place:
        for r in everyone:
            brought[r] += [received[r], sizes[r], received_at[r]]
            expected[r].insert(0, sent[r])
    method = "alltoall_v_inplace" if in_place else "alltoall_v"
    _run(lab, nodes, [CollectiveCall(method, brought, expected)])


_REDUCERS = ("allreduce", "allreduce_inplace", "reduce", "reduce_inplace", "reduce_scatter")


def _reduce(
    lab: Lab,
    kinds: Sequence[tuple[ReduceOp, str]],
    row: Callable[[ReduceOp, torch.dtype, int, int], Tensor],
) -> None:
    """Check reductions by each method; ``row`` makes a rank's data from operation, dtype, rank and
    number of ranks.
    """
    nodes = lab.world(worlds())
    n, root = sum(nodes), root_of(lab.draw, nodes)
    for method in _REDUCERS:
        calls, many = [], n if method == "reduce_scatter" else 1
        for op, name in kinds:
            dtype = dtype_named(name)
            x = torch.stack([row(op, dtype, rank, n).to(dtype) for rank in range(n)])
            given = (method, op, n, x.shape[1], dtype, root)
            calls.append(collective_call(*given, x=x.repeat(1, many)))
        _run(lab, nodes, calls)


@check("collectives.S3.9.wraps_around", effort=0.1)
def wraps_around(lab: Lab) -> None:
    """Sums and products of integers wrap around, however often."""
    turns = lab.draw(st.lists(st.integers(0, 5), min_size=9, max_size=9) | st.just([0] * 9))

    def extremes(op: ReduceOp, dtype: torch.dtype, rank: int, n: int) -> Tensor:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        found = [most, least, most - most // 5, least + most // 3, most // 2 + 1, 3]
        return torch.tensor(found, dtype=dtype).roll(turns[rank])

    both = (ReduceOp.SUM, ReduceOp.PRODUCT)
    _reduce(lab, [(op, name) for name in lab.dtypes(REDUCED) for op in both], extremes)


@check("collectives.S3.9.nan", effort=0.1)
def nan(lab: Lab) -> None:
    """The minimum and maximum of a NaN and any numbers is NaN, whichever rank has it; sums of
    infinities, of the largest numbers and of subnormal ones are as IEEE 754 says.
    """
    turn = lab.integer(0, 5)  # infinities of both signs meet in sums
    culprit = lab.integer(0, 8)

    def specials(op: ReduceOp, dtype: torch.dtype, rank: int, n: int) -> Tensor:
        info = torch.finfo(dtype)
        row = torch.tensor([1.0, -2.0, math.inf, -math.inf, 4.0, 0.5], dtype=torch.float64)
        row = row.roll(turn * rank)
        # x86 sets the sign bit in the NaN of an invalid operation
        nans = [math.nan, -math.nan] if rank == culprit % n else row[:2].tolist()
        fits, tiny = info.max / n * 0.9, info.smallest_normal / n / 4
        # the expected mean is also computed from a sum in float64
        overflows = fits if op is ReduceOp.AVG and info.bits == 64 else info.max * 0.75
        return torch.cat([row, row.new_tensor([*nans, fits, -fits, overflows, tiny, -tiny])])

    names = lab.dtypes(FLOATS)
    _reduce(lab, [kind for kind in REDUCTIONS if kind[1] in names], specials)


@check("collectives.S3.9.long", effort=0.025)
def long(lab: Lab) -> None:
    """Long tensors get the results of short ones."""
    nodes = lab.world(worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, root = sum(nodes), root_of(lab.draw, nodes)
    dtype = dtype_named(lab.choice(lab.dtypes(_REDUCIBLE)))
    of_all = ("allreduce_inplace", "broadcast", "reduce")
    of_chunks = ("allgather_inplace", "gather", "scatter", "alltoall_inplace", "reduce_scatter")
    for size, method in itertools.product(lab.long_sizes, (*of_all, *of_chunks)):
        chunk = size if method in of_all else -(-size // n)
        _run(lab, nodes, [collective_call(method, ReduceOp.MAX, n, chunk, dtype, root)])
    for size in lab.long_sizes:  # around the ring, as a message and as a block
        sent, received = [values(r, size, dtype) for r in range(n)], nothing(size, dtype)
        ends = [((r + 1) % n, (r - 1) % n) for r in range(n)]
        one = [[size * (peer == end) for peer in range(n)] for both in ends for end in both]
        brought = [[[(sent[r], dst)], [(received, src)]] for r, (dst, src) in enumerate(ends)]
        blocks = [
            [sent[r], one[2 * r], [0] * n, received, one[2 * r + 1], [0] * n] for r in range(n)
        ]
        expected = [[sent[r], sent[r - 1]] for r in range(n)]
        _run(lab, nodes, [CollectiveCall("exchange", brought, expected)])
        _run(lab, nodes, [CollectiveCall("alltoall_v", blocks, expected)])


@check("collectives.S3.9.one_after_another", effort=0.4)
def one_after_another(lab: Lab) -> None:
    """A collective is not affected by earlier ones on the same communicator."""
    nodes, chosen = lab.world(worlds()), random.Random(lab.seed())  # noqa: S311 - not secret
    reducing = ("allreduce_inplace", "allreduce", "reduce_inplace", "reduce", "reduce_scatter")
    methods, dtypes = [*reducing, *_MOVING], lab.dtypes(_REDUCIBLE)
    sizes, varies = {method: lab.integer(1, 4) for method in methods}, lab.flag()
    calls: list[CollectiveCall] = []
    for step in range(lab.integer(2, 3)):  # often of the same size again
        for method in chosen.sample(methods, len(methods)):
            count, dtype = sizes[method] + varies * step % 2, dtype_named(chosen.choice(dtypes))
            given = sum(nodes), count, dtype, root_of(lab.draw, nodes), 13 * len(calls)
            calls.append(collective_call(method, ReduceOp.SUM, *given))
    _run(lab, nodes, calls)


@check("collectives.S3.9.every_dtype", effort=0.3)
def every_dtype(lab: Lab) -> None:
    """Every dtype moves bit for bit, and supports each of its reductions."""
    nodes, turn = lab.world(worlds()), lab.seed()
    count, root, dtypes = lab.integer(1, 5), root_of(lab.draw, nodes), lab.dtypes(MOVABLE)
    reducing = (*REDUCING, "allreduce_inplace", "reduce_inplace")

    def call(place: int, methods: Sequence[str], op: ReduceOp, name: str) -> CollectiveCall:
        method = methods[(turn + place) % len(methods)]
        return collective_call(method, op, sum(nodes), count, dtype_named(name), root)

    kinds = [(reducing, *reduction) for reduction in _reductions(dtypes)]
    moves = [(_MOVING, ReduceOp.SUM, name) for name in dtypes]
    _run(lab, nodes, [call(place, *kind) for place, kind in enumerate([*kinds, *moves])])
    if "int16" in dtypes:  # not reduced by gloo and NCCL
        _right_or_refused(lab, nodes, call(0, reducing, ReduceOp.SUM, "int16"), Tensor.clone)


@check("collectives.S3.9.exchange")
def exchange(lab: Lab) -> None:
    """Every message arrives; messages between the same two ranks arrive in the order in which they
    were sent.
    """
    nodes, dtype, _ = _drawn(lab)
    ranks = st.integers(0, sum(nodes) - 1)
    messages = lab.draw(st.lists(st.tuples(ranks, ranks, counts), min_size=1, max_size=20))
    brought: list[list[Any]] = [[[], []] for _ in range(sum(nodes))]
    wanted: list[list[Tensor]] = [[] for _ in brought]
    for number, (src, dst, count) in enumerate(messages):
        message = values(number, count, dtype)
        brought[src][0].append((message, dst))
        brought[dst][1].append((nothing(count, dtype), src))
        wanted[dst].append(message)
    expected = [[*tensors_in(sent), *want] for (sent, _), want in zip(brought, wanted, strict=True)]
    _run(lab, nodes, [CollectiveCall("exchange", brought, expected)])


@check("collectives.S3.9.send_and_recv", effort=0.8)
def send_and_recv(lab: Lab) -> None:
    """A message forwarded from rank to rank reaches the last one."""
    nodes, dtype, _ = _drawn(lab)
    size = lab.draw(counts) if lab.integer(0, 4) else lab.long_sizes[-1]
    message = values(0, size, dtype)

    def program(comm: Any) -> list[Tensor]:
        tensor = message.clone() if comm.rank() == 0 else nothing(len(message), dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return [tensor]

    results = lab.with_communicators("send and recv", nodes, program, message=message)
    lab.assert_equal(results, [[message]] * sum(nodes), where="messages by rank")


@check("collectives.S3.9.broadcast_object")
def broadcast_object(lab: Lab) -> None:
    """Every rank gets src's object, whatever its size and whichever rank src is."""
    nodes = lab.world(worlds())
    lab.dtypes(("uint8",)), lab.dtypes(("int64",))  # the dtypes in which objects are sent
    src = root_of(lab.draw, nodes)
    simple = st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=300), st.binary(max_size=20)
    )
    value = lab.draw(
        st.recursive(
            simple,
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        )
    )
    if lab.integer(0, 3) == 3:  # more than fits one message
        value = [bytes(range(251)) * (lab.long_sizes[-1] // 251 + 1), value]

    def program(comm: Any) -> Any:
        return comm.broadcast_object(value if comm.rank() == src else comm.rank(), src)

    results = lab.with_communicators("broadcast_object", nodes, program, value=value, src=src)
    found = [(type(found), found) for found in results]
    lab.assert_equal(found, [(type(value), value)] * sum(nodes), where="objects by rank")


@check("collectives.S3.9.refuses")
def refuses(lab: Lab) -> None:
    """Invalid arguments raise a ValueError or TypeError before anything is sent, and the
    communicator continues to work.
    """
    nodes, dtypes = lab.world(worlds()), lab.dtypes(_REDUCIBLE)
    n, dtype = sum(nodes), dtype_named("float32" if "float32" in dtypes else dtypes[0])
    zeros, root = torch.zeros(2, dtype=dtype), lab.choice([-1, n, n + 3])  # no rank
    odd, each, add = zeros.new_zeros(2 * n + 1), zeros.new_zeros(2 * n), ReduceOp.SUM
    wrong: list[tuple[str, list[Any]]] = [
        ("broadcast", [zeros, root]),
        ("reduce", [zeros, zeros, root, add]),
        ("reduce_inplace", [zeros, root, add]),
        ("gather", [zeros, each, root]),
        ("gather_inplace", [zeros, 2, root]),
        ("scatter", [each, zeros, root]),
        ("scatter_inplace", [zeros, 2, root]),
        ("send", [zeros, root]),
        ("recv", [zeros, root]),
        ("exchange", [[(zeros, root)], []]),
        ("allgather", [zeros, odd]),
        ("allgather", [zeros, odd[:-2]]),
        ("allreduce", [zeros, odd[:1], add]),
        ("reduce_scatter", [odd, zeros, add]),
        ("reduce_scatter", [each, zeros[:1], add]),
        ("alltoall", [each, odd]),
        ("gather_inplace", [odd, 2, 0]),
        ("scatter_inplace", [odd, 2, 0]),
    ]
    if n > 1:  # what does not divide into chunks
        wrong += [("alltoall", [odd, odd.clone()]), ("alltoall_inplace", [odd])]
        wrong += [("allgather_inplace", [odd]), ("reduce_scatter_inplace", [odd, add])]
    ones, places = [1] * n, [*range(n)]
    for sizes, displs in (
        ([-1, *ones[1:]], places),
        (ones, [-1, *places[1:]]),
        (ones, [*places[1:], n]),
        ([2] * n, places),
        ([*ones, 0], [*places, 0]),
        (ones[1:], places[1:]),
    ):
        right, wide = [each[:n], ones, places], [each[:n], sizes, displs]
        wrong += [("alltoall_v", [*wide, *right]), ("alltoall_v", [*right, *wide])]
        wrong.append(("alltoall_v_inplace", wide))
    wrong.append(("alltoall_v", [each[:n], ones, places, each[n:], [0] * n, places]))
    for name in dtypes:
        other = torch.zeros(2, dtype=dtype_named(name))
        if other.dtype is not dtype:
            wrong.append(("allreduce", [zeros, other, ReduceOp.SUM]))
        for op in [ReduceOp.AVG] if name in REDUCED else BITWISE:
            wrong.append(("allreduce_inplace", [other, op]))

    calls = lab.draw(st.permutations(wrong))

    def program(comm: Any) -> list[Any]:
        accepted = []
        for method, arguments in calls:
            try:
                getattr(comm, method)(*copies_of(arguments))
            except (ValueError, TypeError, NotImplementedError):  # refused, or not provided
                continue
            accepted.append((method, arguments))
        return [accepted, _after(comm, "allreduce_inplace", [zeros[:1] + 1, ReduceOp.SUM])]

    results = lab.with_communicators("refusals", nodes, program, calls=calls)
    lab.assert_equal([found[0] for found in results], [[]] * n, where="accepted by rank")
    wanted = [[torch.tensor([n], dtype=dtype)]] * n
    lab.assert_equal([found[1] for found in results], wanted, where="the next allreduce by rank")


def _right_or_refused(
    lab: Lab,
    nodes: tuple[int, ...],
    call: CollectiveCall,
    change: Callable[[Tensor], Tensor],
) -> list[list[Tensor]]:
    """Call a collective with changed tensors; return them afterwards, or an empty list if every
    rank refused the call.
    """

    def program(comm: Any) -> list[Tensor] | None:
        brought = call.brought[comm.rank()]
        mine = [change(item) if isinstance(item, Tensor) else item for item in brought]
        try:
            getattr(comm, call.method)(*mine)
        except NotImplementedError:
            raise
        except (ValueError, TypeError, RuntimeError):  # torch's own refusals are RuntimeErrors
            return None
        return tensors_in(mine)

    results = lab.with_communicators(call.method, nodes, program, brought=call.brought)
    if all(mine is None for mine in results):
        lab.comparisons += 1
        return []
    lab.assert_equal(results, call.expected, where="tensors by rank (None: refused)")
    return results


@check("collectives.S3.9.gaps")
def gaps(lab: Lab) -> None:
    """A non-contiguous tensor is either refused on every rank or gets the right result, and its
    gaps do not change.
    """
    nodes, dtype, root = _drawn(lab, _REDUCIBLE)
    method = lab.choice(["allreduce_inplace", "broadcast", "allgather"])
    count = lab.integer(2, 7)
    call = collective_call(method, ReduceOp.SUM, sum(nodes), count, dtype, root)
    found = _right_or_refused(lab, nodes, call, lambda x: torch.stack([x, x], dim=1)[:, 0])
    if not found:
        _run(lab, nodes, [call])
    for mine, brought in zip(found, call.brought, strict=False):
        beside = [x.as_strided(x.shape, x.stride(), 1) for x in mine]
        lab.assert_equal(beside, tensors_in(brought), where="the memory between elements")


@check("collectives.S3.9.barrier")
def barrier(lab: Lab) -> None:
    """No rank leaves a barrier before all ranks have reached it."""
    nodes, count = lab.world(worlds()), lab.integer(1, 3)
    arrived: list[int] = []

    def program(comm: Any) -> list[int]:
        reached = []
        for number in range(count):
            arrived.append(comm.rank())
            comm.barrier()
            reached.append(len(arrived) - number * sum(nodes))
        return reached

    results = lab.with_communicators("barrier", nodes, program)
    said = f"ranks that had reached each barrier when a rank left it, by rank: {results}"
    lab.assert_that(min(map(min, results)) >= sum(nodes), said)
