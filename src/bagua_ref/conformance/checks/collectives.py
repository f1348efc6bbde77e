"""Collectives in worlds of 1 to 9 ranks on 1 to 4 uneven nodes, with results computed from the rank
(S3.9).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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


def _dtype(lab: Lab, draw: Draw, names: Sequence[str] = MOVABLE) -> torch.dtype:
    return dtype_named(draw(st.sampled_from(lab.dtypes(names))))


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
            _compare(lab, found, call.expected, which, SUM(call.terms) if call.terms else EXACT)
        except Violation:
            if len(calls) > 1:
                _run(lab, nodes, seed, [call])
            raise


def _one_call(lab: Lab, draw: Draw, name: str) -> None:
    """Check a collective, in place or not."""
    nodes, count = lab.world(draw, worlds()), draw(counts)
    dtypes = lab.dtypes(_REDUCIBLE if name in REDUCING else MOVABLE)
    op, dtype = draw(
        st.sampled_from(
            _reductions(dtypes) if name in REDUCING else [(ReduceOp.SUM, of) for of in dtypes]
        )
    )
    method = name if name == "broadcast" or draw(st.booleans()) else f"{name}_inplace"
    root = root_of(draw, nodes)
    _run(
        lab,
        nodes,
        draw(seeds),
        [collective_call(method, op, sum(nodes), count, getattr(torch, dtype), root)],
    )


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
    nodes, dtype = lab.world(draw, worlds()), _dtype(lab, draw)
    n, most = sum(nodes), draw(st.integers(0, 3))
    # received blocks may have another layout than sent ones
    gap, other = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    sizes = [[(rank + peer) % (most + 1) for peer in range(n)] for rank in range(n)]
    shares = draw(st.booleans())  # what is sent to one may also be sent to others

    def displacements(between: int) -> list[list[int]]:
        return [[sum(row[:peer]) + between * peer for peer in range(n)] for row in sizes]

    in_place = draw(st.booleans())
    sent_at, received_at = displacements(gap), displacements(gap if in_place else other)
    if shares and not in_place:
        sent_at = [[peer % 2 for peer in range(n)]] * n
    # shared blocks may begin at 1
    sent = [values(rank, sum(sizes[rank]) + gap * n + shares, dtype) for rank in range(n)]
    received = sent if in_place else [nothing(sum(row) + other * n, dtype) for row in sizes]
    wanted = plain.alltoall_v(sent, received, sizes, sent_at, received_at)
    if in_place:
        brought = [[sent[r], sizes[r], sent_at[r]] for r in range(n)]
        call = CollectiveCall("alltoall_v_inplace", brought, [[want] for want in wanted])
    else:
        brought = [
            [sent[r], sizes[r], sent_at[r], received[r], sizes[r], received_at[r]] for r in range(n)
        ]
        call = CollectiveCall(
            "alltoall_v", brought, [[mine, want] for mine, want in zip(sent, wanted, strict=True)]
        )
    _run(lab, nodes, draw(seeds), [call])


_REDUCING = st.sampled_from(
    ["allreduce", "allreduce_inplace", "reduce", "reduce_inplace", "reduce_scatter"]
)


@check("S3.9", "wraps_around", effort=0.3)
def wraps_around(lab: Lab, draw: Draw) -> None:
    """Sums and products of integers wrap around, however often."""
    nodes, method, seed = lab.world(draw, worlds()), draw(_REDUCING), draw(seeds)
    root, turns = (
        root_of(draw, nodes),
        [draw(st.integers(0, 5)) if draw(st.booleans()) else 0 for _ in range(sum(nodes))],
    )
    calls = []
    for name, op in itertools.product(lab.dtypes(REDUCED), (ReduceOp.SUM, ReduceOp.PRODUCT)):
        dtype = getattr(torch, name)
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        extremes = torch.tensor(
            [most, least, most - most // 5, least + most // 3, most // 2 + 1, 3], dtype=dtype
        )
        calls.append(
            _reduction(method, op, torch.stack([extremes.roll(turn) for turn in turns]), root)
        )
    _run(lab, nodes, seed, calls)


@check("S3.9", "nan", effort=0.3)
def nan(lab: Lab, draw: Draw) -> None:
    """The minimum and maximum of a NaN and any numbers is NaN, whichever rank has it."""
    nodes, method, seed = lab.world(draw, worlds()), draw(_REDUCING), draw(seeds)
    row, turn = torch.tensor([1.0, -2.0, math.inf, -math.inf, 4.0, 0.5]), draw(st.integers(0, 5))
    # infinities of both signs meet in sums
    x = torch.stack([row.roll(turn * rank) for rank in range(sum(nodes))])
    for place in range(draw(st.integers(0, 6))):
        # that of an invalid operation has its sign set on x86
        sign = draw(st.sampled_from([-1.0, 1.0]))
        x[root_of(draw, nodes), place] = math.copysign(math.nan, sign)
    root, calls = root_of(draw, nodes), []
    for name, op in itertools.product(lab.dtypes(FLOATS), ReduceOp):
        if op not in BITWISE:
            calls.append(_reduction(method, op, x.to(getattr(torch, name)), root))
    _run(lab, nodes, seed, calls)


def _reduction(method: str, op: ReduceOp, x: Tensor, root: int) -> CollectiveCall:
    """Return a reduction of each rank's row; where results are scattered, of n such rows."""
    n, size = x.shape
    return collective_call(
        method, op, n, size, x.dtype, root, x=x.repeat(1, n) if method == "reduce_scatter" else x
    )


@check("S3.9", "long", effort=0.025)
def long(lab: Lab, draw: Draw) -> None:
    """What holds for short tensors holds for long ones."""
    nodes = lab.world(draw, worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, root, dtype = sum(nodes), root_of(draw, nodes), _dtype(lab, draw, _REDUCIBLE)
    methods, seed = (
        (
            "allreduce_inplace",
            "broadcast",
            "allgather_inplace",
            "gather",
            "scatter",
            "alltoall_inplace",
        ),
        draw(seeds),
    )
    for size, method in itertools.product(lab.long_sizes, methods):
        chunk = -(-size // n) if method not in ("allreduce_inplace", "broadcast") else size
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
    nodes, seed, count = lab.world(draw, worlds()), draw(seeds), draw(st.integers(1, 5))
    root, turn = root_of(draw, nodes), draw(seeds)
    reducing = (*REDUCING, "allreduce_inplace", "reduce_inplace")
    dtypes = lab.dtypes(MOVABLE)
    cases = [
        (reducing[(turn + place) % len(reducing)], *reduction)
        for place, reduction in enumerate(_reductions(dtypes))
    ]
    cases += [
        (_MOVING[(turn + place) % len(_MOVING)], ReduceOp.SUM, name)
        for place, name in enumerate(dtypes)
    ]
    _run(
        lab,
        nodes,
        seed,
        [
            collective_call(method, op, sum(nodes), count, getattr(torch, name), root)
            for method, op, name in cases
        ],
    )


@check("S3.9", "exchange")
def exchange(lab: Lab, draw: Draw) -> None:
    """Every message arrives; messages between the same two ranks arrive in the order in which they
    were sent.
    """
    nodes, dtype = lab.world(draw, worlds()), _dtype(lab, draw)
    ranks = st.integers(0, sum(nodes) - 1)
    messages = draw(st.lists(st.tuples(ranks, ranks, counts), min_size=1, max_size=20))
    sends: list[list[tuple[Tensor, int]]] = [[] for _ in range(sum(nodes))]
    receives: list[list[tuple[Tensor, int]]] = [[] for _ in sends]
    wanted: list[list[Tensor]] = [[] for _ in sends]
    for number, (src, dst, count) in enumerate(messages):
        sends[src].append((values(number, count, dtype), dst))
        receives[dst].append((nothing(count, dtype), src))
        wanted[dst].append(values(number, count, dtype))
    expected = [[*tensors_in(sent), *want] for sent, want in zip(sends, wanted, strict=True)]
    brought = [[sent, received] for sent, received in zip(sends, receives, strict=True)]
    _run(lab, nodes, draw(seeds), [CollectiveCall("exchange", brought, expected)])


@check("S3.9", "send_and_recv")
def send_and_recv(lab: Lab, draw: Draw) -> None:
    """A message passed from rank to rank reaches the last one."""
    nodes, dtype, count = lab.world(draw, worlds()), _dtype(lab, draw), draw(counts)
    message = values(0, count, dtype)

    def program(comm: Any) -> list[Tensor]:
        tensor = message.clone() if comm.rank() == 0 else nothing(count, dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return [tensor]

    what = "send and recv"
    results = lab.with_communicators(what, nodes, draw(seeds), program, message=message)
    _compare(lab, results, [[message]] * sum(nodes), what)


@check("S3.9", "broadcast_object")
def broadcast_object(lab: Lab, draw: Draw) -> None:
    """Every rank gets src's object, whatever its size and whichever rank src is."""
    nodes = lab.world(draw, worlds())
    # in which it is sent
    lab.need_dtypes([torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)])
    src, seed = root_of(draw, nodes), draw(seeds)
    simple = st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=300), st.binary(max_size=20)
    )
    value = draw(
        st.recursive(
            simple,
            lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
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
    n, dtype = (
        sum(nodes),
        dtype_named(draw(st.sampled_from(["float32"] if "float32" in dtypes else dtypes))),
    )
    zeros, others = (
        torch.zeros(2, dtype=dtype),
        [name for name in dtypes if dtype_named(name) is not dtype],
    )
    wrong: list[tuple[str, list[Any]]] = [
        ("broadcast", [zeros, draw(st.sampled_from([-1, n, n + 3]))]),
        ("allgather", [zeros, zeros.new_zeros(2 * n + 1)]),
    ]
    if others:
        wrong.append(
            (
                "allreduce",
                [
                    zeros,
                    torch.zeros(2, dtype=dtype_named(draw(st.sampled_from(others)))),
                    ReduceOp.SUM,
                ],
            )
        )
    for name in dtypes:
        op = ReduceOp.AVG if name in REDUCED else draw(st.sampled_from(BITWISE))
        wrong.append(("allreduce_inplace", [torch.zeros(2, dtype=dtype_named(name)), op]))
    method, arguments = draw(st.sampled_from(wrong))

    def program(comm: Any) -> list[Tensor] | None:
        try:
            getattr(comm, method)(*copies_of(arguments))
        except (ValueError, TypeError):
            return _after(comm, "allreduce_inplace", [torch.ones(1, dtype=dtype), ReduceOp.SUM])
        return None

    results = lab.with_communicators(method, nodes, draw(seeds), program, arguments=arguments)
    accepted = [rank for rank, found in enumerate(results) if found is None]
    lab.assert_that(not accepted, f"ranks {accepted} accepted invalid arguments")
    _compare(lab, results, [[torch.tensor([n], dtype=dtype)]] * n, "the next allreduce")


@check("S3.9", "gaps")
def gaps(lab: Lab, draw: Draw) -> None:
    """A non-contiguous tensor is either refused on every rank or gets the right result, and its
    gaps do not change.
    """
    nodes, seed, count = lab.world(draw, worlds()), draw(seeds), draw(st.integers(2, 7))
    dtype, method = (
        _dtype(lab, draw, _REDUCIBLE),
        draw(st.sampled_from(["allreduce_inplace", "broadcast", "allgather"])),
    )
    call = collective_call(method, ReduceOp.SUM, sum(nodes), count, dtype, root_of(draw, nodes))

    def program(comm: Any) -> list[list[Tensor]]:
        brought = call.brought[comm.rank()]
        mine = [
            torch.stack([item, item], dim=1)[:, 0] if isinstance(item, Tensor) else item
            for item in brought
        ]
        try:
            getattr(comm, method)(*mine)
        except NotImplementedError:
            raise
        except (ValueError, TypeError, RuntimeError):  # torch's own refusals are RuntimeErrors
            return [_after(comm, method, brought)]
        found = tensors_in(mine)
        return [found, [tensor.as_strided(tensor.shape, tensor.stride(), 1) for tensor in found]]

    what = f"{method} of tensors with gaps"
    results = lab.with_communicators(what, nodes, seed, program, brought=call.brought)
    refused = [rank for rank, found in enumerate(results) if len(found) == 1]
    lab.assert_that(len(refused) in (0, sum(nodes)), f"refused on ranks {refused} only")
    _compare(lab, [found[0] for found in results], call.expected, "the result")
    if not refused:
        before = [tensors_in(mine) for mine in call.brought]
        _compare(lab, [found[1] for found in results], before, "the memory between elements")


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

    results = lab.with_communicators("barrier", nodes, seed, program)
    for rank, number in itertools.product(range(sum(nodes)), range(count)):
        reached = results[rank][number]
        said = f"rank {rank} left barrier {number} when {reached} ranks had reached it"
        lab.assert_that(reached >= sum(nodes), said)
