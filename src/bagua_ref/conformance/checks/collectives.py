"""Collectives in worlds of 1 to 9 ranks on 1 to 4 uneven nodes, with results computed from the rank
(S3.9).
"""

from __future__ import annotations

import itertools
import math
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
from bagua_ref.conformance.cases.strategies import Draw, dtype_named, seeds, worlds
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import collectives_plain as plain
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.lab.lab import Lab, copies_of, tensors_in
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.types import ReduceOp

_MOVING = tuple(name for name in METHODS if name not in REDUCING)
_REDUCIBLE = (*FLOATS, *REDUCED)


def _drawn(
    lab: Lab, draw: Draw, names: Sequence[str] = MOVABLE
) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    """Draw a world, a dtype, a seed and a root."""
    nodes = lab.world(draw, worlds())
    dtype = dtype_named(draw(st.sampled_from(lab.dtypes(names))))
    return nodes, dtype, draw(seeds), root_of(draw, nodes)


def _reductions(names: Sequence[str]) -> list[tuple[ReduceOp, str]]:
    """Return the reductions of these dtypes."""
    return [(op, name) for op, name in REDUCTIONS if name in names]


def _after(comm: Any, method: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Call ``comm.method`` with copies of arguments; return the tensors among them."""
    mine = copies_of(arguments)
    returned = getattr(comm, method)(*mine)
    assert returned is None, f"{method} returned {returned!r}"
    return tensors_in(mine)


def _compare(
    lab: Lab,
    found: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[Tensor]],
    what: str,
    tolerance: Tolerance = EXACT,
) -> None:
    """Compare each rank's tensors."""
    for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        for place, (tensor, want) in enumerate(zip(mine, wanted, strict=True)):
            lab.assert_equal(
                tensor, want, tolerance, where=f"{what}: tensor {place} of rank {rank}"
            )


def _run(lab: Lab, nodes: tuple[int, ...], seed: int, calls: Sequence[CollectiveCall]) -> None:
    """Make calls on one communicator; show a failure with one of them, if that fails, too."""
    names = [call.method for call in calls]
    brought = [[call.brought[rank] for call in calls] for rank in range(sum(nodes))]

    def program(comm: Any) -> list[list[Tensor]]:
        mine = brought[comm.rank()]
        return [_after(comm, name, given) for name, given in zip(names, mine, strict=True)]

    what = ", ".join(names[:9]) + ", ..." * (len(names) > 9)
    results = lab.with_communicators(what, nodes, seed, program, methods=names, brought=brought)
    for place, call in enumerate(calls):
        found = [of_rank[place] for of_rank in results]
        try:
            which = f"{call.method}, call {place} of {len(calls)}"
            if call.brought[0][-1] is ReduceOp.AVG:
                pairs = [
                    zip(*of_rank, strict=True) for of_rank in zip(found, call.expected, strict=True)
                ]
                found = [[_mean(x, want, len(found)) for x, want in pair] for pair in pairs]
            _compare(lab, found, call.expected, which, SUM(call.terms) if call.terms else EXACT)
        except Violation:
            if len(calls) > 1:
                _run(lab, nodes, seed, [call])
            raise


def _mean(found: Tensor, expected: Tensor, n: int) -> Tensor:
    """Return what was found, with the mean where it is infinite as its sum overflows: S3.9 does not
    say whether a mean is divided before.
    """
    overflows = expected.double().abs() * n > torch.finfo(expected.dtype).max
    return torch.where(overflows & (found == expected.sign() * math.inf), expected, found)


def _one_call(lab: Lab, draw: Draw, name: str) -> None:
    """Check a collective, in place or not."""
    nodes = lab.world(draw, worlds())
    dtypes = lab.dtypes(_REDUCIBLE if name in REDUCING else MOVABLE)
    kinds = _reductions(dtypes) if name in REDUCING else [(ReduceOp.SUM, of) for of in dtypes]
    op, dtype = draw(st.sampled_from(kinds))
    method = name if name == "broadcast" or draw(st.booleans()) else f"{name}_inplace"
    given = draw(counts), dtype_named(dtype), root_of(draw, nodes)
    _run(lab, nodes, draw(seeds), [collective_call(method, op, sum(nodes), *given)])


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
    check("S3.9", _name, effort=2 if _name in REDUCING else 1, sentence=_sentence)(
        partial(_one_call, name=_name)
    )


@check("S3.9", "alltoall_v")
def alltoall_v(lab: Lab, draw: Draw) -> None:
    """Blocks of the given counts move between the given displacements, and gaps do not change."""
    nodes, dtype, seed, _ = _drawn(lab, draw)
    everyone, most = range(sum(nodes)), draw(st.integers(0, 3))
    sizes = [[(rank + peer) % (most + 1) for peer in everyone] for rank in everyone]

    def displacements(between: int) -> list[list[int]]:
        return [[sum(row[:peer]) + between * peer for peer in everyone] for row in sizes]

    # received blocks may have another layout than sent ones
    gap, other = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shares, in_place = draw(st.booleans()), draw(st.booleans())
    sent_at, received_at = displacements(gap), displacements(gap if in_place else other)
    if shares and not in_place:  # what is sent to one may also be sent to others
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
    _run(lab, nodes, seed, [CollectiveCall(method, brought, expected)])


_REDUCERS = ("allreduce", "allreduce_inplace", "reduce", "reduce_inplace", "reduce_scatter")


def _reduce(
    lab: Lab,
    draw: Draw,
    kinds: Sequence[tuple[ReduceOp, str]],
    row: Callable[[ReduceOp, torch.dtype, int, int], Tensor],
) -> None:
    """Check reductions of a row of each rank, which depends on the operation, the dtype, the rank,
    and the number of ranks, by each method.
    """
    nodes, seed = lab.world(draw, worlds()), draw(seeds)
    n, root = sum(nodes), root_of(draw, nodes)
    for method in _REDUCERS:
        calls, many = [], n if method == "reduce_scatter" else 1
        for op, name in kinds:
            dtype = dtype_named(name)
            x = torch.stack([row(op, dtype, rank, n).to(dtype) for rank in range(n)])
            given = (method, op, n, x.shape[1], dtype, root)
            calls.append(collective_call(*given, x=x.repeat(1, many)))
        _run(lab, nodes, seed, calls)


@check("S3.9", "wraps_around", effort=0.1)
def wraps_around(lab: Lab, draw: Draw) -> None:
    """Sums and products of integers wrap around, however often."""
    turns = draw(st.lists(st.integers(0, 5), min_size=9, max_size=9) | st.just([0] * 9))

    def extremes(op: ReduceOp, dtype: torch.dtype, rank: int, n: int) -> Tensor:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        found = [most, least, most - most // 5, least + most // 3, most // 2 + 1, 3]
        return torch.tensor(found, dtype=dtype).roll(turns[rank])

    both = (ReduceOp.SUM, ReduceOp.PRODUCT)
    _reduce(lab, draw, [(op, name) for name in lab.dtypes(REDUCED) for op in both], extremes)


@check("S3.9", "nan", effort=0.1)
def nan(lab: Lab, draw: Draw) -> None:
    """The minimum and maximum of a NaN and any numbers is NaN, whichever rank has it; sums of
    infinities, of the largest numbers and of subnormal ones are as IEEE 754 says.
    """
    turn = draw(st.integers(0, 5))  # infinities of both signs meet in sums
    culprit = draw(st.integers(0, 8))

    def specials(op: ReduceOp, dtype: torch.dtype, rank: int, n: int) -> Tensor:
        info = torch.finfo(dtype)
        row = torch.tensor([1.0, -2.0, math.inf, -math.inf, 4.0, 0.5], dtype=torch.float64)
        row = row.roll(turn * rank)
        # that of an invalid operation has its sign set on x86
        nans = [math.nan, -math.nan] if rank == culprit % n else row[:2].tolist()
        fits, tiny = info.max / n * 0.9, info.smallest_normal / n / 4
        # what is expected of a mean is a sum in float64, too
        overflows = fits if op is ReduceOp.AVG and info.bits == 64 else info.max * 0.75
        return torch.cat([row, row.new_tensor([*nans, fits, -fits, overflows, tiny, -tiny])])

    names = lab.dtypes(FLOATS)
    _reduce(lab, draw, [kind for kind in REDUCTIONS if kind[1] in names], specials)


@check("S3.9", "long", effort=0.025)
def long(lab: Lab, draw: Draw) -> None:
    """Long tensors get the results of short ones."""
    nodes = lab.world(draw, worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, root, seed = sum(nodes), root_of(draw, nodes), draw(seeds)
    dtype = dtype_named(draw(st.sampled_from(lab.dtypes(_REDUCIBLE))))
    of_all = ("allreduce_inplace", "broadcast")
    of_chunks = ("allgather_inplace", "gather", "scatter", "alltoall_inplace")
    for size, method in itertools.product(lab.long_sizes, (*of_all, *of_chunks)):
        chunk = size if method in of_all else -(-size // n)
        _run(lab, nodes, seed, [collective_call(method, ReduceOp.MAX, n, chunk, dtype, root)])


@check("S3.9", "one_after_another", effort=0.6)
def one_after_another(lab: Lab, draw: Draw) -> None:
    """A collective is not affected by earlier ones on the same communicator."""
    nodes, seed, turn = lab.world(draw, worlds()), draw(seeds), draw(seeds)
    methods = (
        "allreduce_inplace",
        "allreduce",
        "reduce_inplace",
        "reduce",
        "reduce_scatter",
        *_MOVING,
    )
    dtypes = lab.dtypes(_REDUCIBLE)
    sizes = [draw(st.integers(1, 4)) for _ in methods]
    calls = []
    for step in range(draw(st.integers(2, 3)) * len(methods)):
        # 3 and their number have no common divisor
        place = (step * (3 if turn % 2 else 1) + turn) % len(methods)
        count = sizes[place] if turn % 3 else sizes[place] + step % 2
        dtype, root = dtype_named(dtypes[(place + turn) % len(dtypes)]), root_of(draw, nodes)
        calls.append(
            collective_call(methods[place], ReduceOp.SUM, sum(nodes), count, dtype, root, 13 * step)
        )
    _run(lab, nodes, seed, calls)


@check("S3.9", "every_dtype", effort=0.4)
def every_dtype(lab: Lab, draw: Draw) -> None:
    """Every dtype moves bit for bit, and supports each of its reductions."""
    nodes, seed, turn = lab.world(draw, worlds()), draw(seeds), draw(seeds)
    given, dtypes = (draw(st.integers(1, 5)), root_of(draw, nodes)), lab.dtypes(MOVABLE)
    reducing = (*REDUCING, "allreduce_inplace", "reduce_inplace")
    kinds: list[tuple[Sequence[str], ReduceOp, str]]
    kinds = [(reducing, *reduction) for reduction in _reductions(dtypes)]
    kinds += [(_MOVING, ReduceOp.SUM, name) for name in dtypes]

    def call(place: int, methods: Sequence[str], op: ReduceOp, name: str) -> CollectiveCall:
        method, (count, root) = methods[(turn + place) % len(methods)], given
        return collective_call(method, op, sum(nodes), count, dtype_named(name), root)

    _run(lab, nodes, seed, [call(place, *kind) for place, kind in enumerate(kinds)])
    if "int16" in dtypes:  # which gloo and NCCL do not reduce
        _right_or_refused(lab, nodes, seed, call(0, reducing, ReduceOp.SUM, "int16"), Tensor.clone)


@check("S3.9", "exchange")
def exchange(lab: Lab, draw: Draw) -> None:
    """Every message arrives; messages between the same two ranks arrive in the order in which they
    were sent.
    """
    nodes, dtype, seed, _ = _drawn(lab, draw)
    ranks = st.integers(0, sum(nodes) - 1)
    messages = draw(st.lists(st.tuples(ranks, ranks, counts), min_size=1, max_size=20))
    brought: list[list[Any]] = [[[], []] for _ in range(sum(nodes))]
    wanted: list[list[Tensor]] = [[] for _ in brought]
    for number, (src, dst, count) in enumerate(messages):
        message = values(number, count, dtype)
        brought[src][0].append((message, dst))
        brought[dst][1].append((nothing(count, dtype), src))
        wanted[dst].append(message)
    expected = [[*tensors_in(sent), *want] for (sent, _), want in zip(brought, wanted, strict=True)]
    _run(lab, nodes, seed, [CollectiveCall("exchange", brought, expected)])


@check("S3.9", "send_and_recv")
def send_and_recv(lab: Lab, draw: Draw) -> None:
    """A message passed from rank to rank reaches the last one."""
    nodes, dtype, seed, _ = _drawn(lab, draw)
    message = values(0, draw(counts), dtype)

    def program(comm: Any) -> list[Tensor]:
        tensor = message.clone() if comm.rank() == 0 else nothing(len(message), dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return [tensor]

    what = "send and recv"
    results = lab.with_communicators(what, nodes, seed, program, message=message)
    _compare(lab, results, [[message]] * sum(nodes), what)


@check("S3.9", "broadcast_object")
def broadcast_object(lab: Lab, draw: Draw) -> None:
    """Every rank gets src's object, whatever its size and whichever rank src is."""
    nodes = lab.world(draw, worlds())
    lab.dtypes(("uint8",)), lab.dtypes(("int64",))  # in which it is sent
    src, seed = root_of(draw, nodes), draw(seeds)
    simple = st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=300), st.binary(max_size=20)
    )
    value = draw(
        st.recursive(
            simple,
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        )
    )
    if draw(st.integers(0, 3)) == 3:  # more than fits one message
        value = [bytes(range(251)) * (lab.long_sizes[-1] // 251 + 1), value]

    def program(comm: Any) -> Any:
        return comm.broadcast_object(value if comm.rank() == src else comm.rank(), src)

    results = lab.with_communicators("broadcast_object", nodes, seed, program, value=value, src=src)
    for rank, found in enumerate(results):
        same = type(found) is type(value) and found == value
        lab.assert_that(same, f"rank {rank} got {found!r:.200} instead of {value!r:.200}")


@check("S3.9", "refuses")
def refuses(lab: Lab, draw: Draw) -> None:
    """Invalid arguments raise a ValueError or TypeError before anything is sent, and the
    communicator continues to work.
    """
    nodes, dtypes = lab.world(draw, worlds()), lab.dtypes(_REDUCIBLE)
    n, dtype = sum(nodes), dtype_named("float32" if "float32" in dtypes else dtypes[0])
    zeros = torch.zeros(2, dtype=dtype)
    wrong: list[tuple[str, list[Any]]] = [
        ("broadcast", [zeros, draw(st.sampled_from([-1, n, n + 3]))]),
        ("allgather", [zeros, zeros.new_zeros(2 * n + 1)]),
    ]
    for name in dtypes:
        other = torch.zeros(2, dtype=dtype_named(name))
        if other.dtype is not dtype:
            wrong.append(("allreduce", [zeros, other, ReduceOp.SUM]))
        for op in [ReduceOp.AVG] if name in REDUCED else BITWISE:
            wrong.append(("allreduce_inplace", [other, op]))

    def program(comm: Any) -> list[Any]:
        for method, arguments in draw_order:
            try:
                getattr(comm, method)(*copies_of(arguments))
            except (ValueError, TypeError):
                continue
            return [f"{method} with invalid arguments {arguments}"]
        return _after(comm, "allreduce_inplace", [torch.ones(1, dtype=dtype), ReduceOp.SUM])

    draw_order = draw(st.permutations(wrong))
    results = lab.with_communicators("refusals", nodes, draw(seeds), program, calls=draw_order)
    accepted = {rank: found for rank, (found,) in enumerate(results) if isinstance(found, str)}
    lab.assert_that(not accepted, f"ranks accepted: {accepted}")
    _compare(lab, results, [[torch.tensor([n], dtype=dtype)]] * n, "the next allreduce")


def _right_or_refused(
    lab: Lab,
    nodes: tuple[int, ...],
    seed: int,
    call: CollectiveCall,
    change: Callable[[Tensor], Tensor],
) -> list[list[Tensor]]:
    """Make a call with changed tensors, which may be refused, but on every rank; return them after
    it.
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

    results = lab.with_communicators(call.method, nodes, seed, program, brought=call.brought)
    refused = [rank for rank, found in enumerate(results) if found is None]
    lab.assert_that(len(refused) in (0, sum(nodes)), f"refused on ranks {refused} only")
    found = [mine for mine in results if mine is not None]
    _compare(lab, found, call.expected if found else [], "the result")
    return found


@check("S3.9", "gaps")
def gaps(lab: Lab, draw: Draw) -> None:
    """A non-contiguous tensor is either refused on every rank or gets the right result, and its
    gaps do not change.
    """
    nodes, dtype, seed, root = _drawn(lab, draw, _REDUCIBLE)
    method = draw(st.sampled_from(["allreduce_inplace", "broadcast", "allgather"]))
    count = draw(st.integers(2, 7))
    call = collective_call(method, ReduceOp.SUM, sum(nodes), count, dtype, root)
    found = _right_or_refused(lab, nodes, seed, call, lambda x: torch.stack([x, x], dim=1)[:, 0])
    if not found:
        _run(lab, nodes, seed, [call])
    for mine, brought in zip(found, call.brought, strict=False):
        beside = [x.as_strided(x.shape, x.stride(), 1) for x in mine]
        _compare(lab, [beside], [tensors_in(brought)], "the memory between elements")


@check("S3.9", "barrier")
def barrier(lab: Lab, draw: Draw) -> None:
    """No rank leaves a barrier before all ranks have reached it."""
    nodes, seed, count = lab.world(draw, worlds()), draw(seeds), draw(st.integers(1, 3))
    arrived: list[int] = []

    def program(comm: Any) -> list[int]:
        reached = []
        for number in range(count):
            arrived.append(comm.rank())
            comm.barrier()
            reached.append(len(arrived) - number * sum(nodes))
        return reached

    for rank, left in enumerate(lab.with_communicators("barrier", nodes, seed, program)):
        for number, reached in enumerate(left):
            said = f"rank {rank} left barrier {number} when {reached} ranks had reached it"
            lab.assert_that(reached >= sum(nodes), said)
