"""Cases of collectives beyond the conformance suite, for every rank of any world (S3.9).

Each takes the communicator under test and returns nothing; a failed assertion on one rank fails the
world.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua_ref
from bagua_ref import ReduceOp
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.cases.collective_cases import (
    METHODS,
    REDUCTIONS,
    CollectiveCall,
    collective_call,
    terms,
)
from bagua_ref.conformance.expected.collectives_plain import combine
from bagua_ref.conformance.lab.lab import copies_of

EVERY_METHOD = [*METHODS, *(f"{name}_inplace" for name in METHODS if name != "broadcast")]


# the ranks of a simulated world make the same calls
collective_call = functools.lru_cache(maxsize=64)(collective_call)


def calls(n: int, count: int = 2, op: ReduceOp = ReduceOp.AVG) -> list[CollectiveCall]:
    """Return a call of every collective on n ranks."""
    return [collective_call(method, op, n, count, torch.float32, n - 1) for method in EVERY_METHOD]


def check(
    comm: Any, call: CollectiveCall, wrap: Callable[[Tensor], Any] = lambda x: x, owner: Any = None
) -> None:
    """Make a call with wrapped tensors, as a method of ``comm`` or as a function of ``owner``, and
    compare the tensors.
    """
    mine = copies_of(call.brought[comm.rank()])
    given = [wrap(item) if isinstance(item, Tensor) else item for item in mine]
    returned = (
        getattr(comm, call.method)(*given)
        if owner is None
        else getattr(owner, call.method)(*given, comm=comm)
    )
    assert returned is None
    tensors = [
        new if isinstance(new, Tensor) else old
        for old, new in zip(mine, given, strict=True)
        if isinstance(old, Tensor)
    ]
    for tensor, want in zip(tensors, call.expected[comm.rank()], strict=True):
        assert_equal(tensor, want, SUM(call.terms) if call.terms else EXACT)


def functions(comm) -> None:
    """Functions do what the communicator's methods do, and take tensors without dimensions."""
    n, rank = comm.nranks(), comm.rank()
    for call in calls(n):
        check(comm, call, owner=bagua_ref)
    scalar = torch.tensor(float(rank))
    bagua_ref.broadcast(scalar, n - 1, comm)
    assert scalar.item() == n - 1
    counts, displs = [2] * n, [2 * r for r in range(n)]
    x, received = torch.full((2 * n,), float(rank)), torch.empty(2 * n)
    bagua_ref.alltoall_v(x, counts, displs, received, counts, displs, comm)
    bagua_ref.alltoall_v_inplace(x, counts, displs, comm)
    assert x.tolist() == received.tolist() == [float(r) for r in range(n) for _ in range(2)]
    assert bagua_ref.broadcast_object({"rank": rank}, n - 1, comm) == {"rank": n - 1}
    if n > 1 and rank < 2:
        (bagua_ref.send if rank == 0 else bagua_ref.recv)(x := torch.tensor([rank]), 1 - rank, comm)
        assert x.item() == 0


def large_reductions(comm) -> None:
    """Sizes at which transports switch algorithms, and that no number of ranks divides: every dtype
    and every operation.
    """
    for op, name in REDUCTIONS:
        if op is not ReduceOp.SUM and name not in ("float32", "int32"):
            continue
        dtype = getattr(torch, name)
        check(
            comm,
            collective_call(
                "allreduce_inplace", op, comm.nranks(), 300_007 // dtype.itemsize, dtype, 0
            ),
        )


def coalesced(comm) -> None:
    n, rank = comm.nranks(), comm.rank()

    def tensors(r, large=False):
        return [
            torch.full((3, 2), float(r)),
            torch.full((2,), r, dtype=torch.int64),
            torch.full((4, 3), r + 0.5).t(),  # not contiguous
            torch.zeros(0),
            torch.full((2, 3, 4, 4), float(r), dtype=torch.bfloat16).to(
                memory_format=torch.channels_last
            ),
            torch.nn.Parameter(torch.full((5,), float(r))),
            torch.tensor(float(r)),
            # above the size up to which tensors are copied together
            torch.full((9_000_000 if large else 1,), float(r)),
        ]

    mine = tensors(rank, large=True)
    bagua_ref.broadcast_coalesced(mine, n - 1, comm)
    for actual, expected in zip(mine, tensors(n - 1, large=True), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
    mine = tensors(rank)
    bagua_ref.allreduce_coalesced_inplace(mine, comm=comm)
    for i, actual in enumerate(mine):
        assert torch.equal(
            actual, sum((tensors(r)[i] for r in range(1, n)), start=tensors(0)[i].detach())
        )
    bagua_ref.broadcast_coalesced([], 0, comm)
    for nan in (False, True):
        mine = [
            torch.full((2, 1), math.nan if nan else float(rank)).expand(2, 3),
            torch.full((1,), rank).expand(4),
            torch.zeros(3) + rank,
        ]
        bagua_ref.broadcast_coalesced(mine, 0, comm)
        assert str(mine[0].tolist()) == str([[math.nan if nan else 0.0] * 3] * 2)
        assert [t.tolist() for t in mine[1:]] == [[0] * 4, [0] * 3]
        assert [t.stride() for t in mine] == [(1, 0), (0,), (1,)]
    mine = [torch.full((1,), float(rank)).expand(4), torch.ones(2)]
    bagua_ref.allreduce_coalesced_inplace(mine, comm=comm)
    assert [t.tolist() for t in mine] == [[n * (n - 1) / 2] * 4, [n] * 2]
    apart = torch.arange(4.0) if rank == 0 else torch.zeros(1).expand(4)
    if rank == 0:
        bagua_ref.broadcast_coalesced([apart, torch.ones(2)], 0, comm)
    else:
        with pytest.raises(
            ValueError, match=r"shape \(4,\) and strides \(0,\) is expanded.*tensor.clone\(\)"
        ):
            bagua_ref.broadcast_coalesced([apart, torch.ones(2)], 0, comm)
        assert apart.tolist() == [0.0] * 4


def single_elements(comm) -> None:
    """Of a single element, any stride is contiguous."""
    n = comm.nranks()
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.full((2,), comm.rank() + 1.0, dtype=dtype)[::2] for _ in range(2))
        bagua_ref.broadcast(x, 0, comm)
        bagua_ref.allreduce_inplace(y, comm=comm)
        assert (x.item(), y.item()) == (1.0, n * (n + 1) / 2)


def parameters(comm) -> None:
    """Functions accept leaf tensors that require a gradient."""
    for count in (3, 200_000 // comm.nranks()):
        for call in calls(comm.nranks(), count):
            check(comm, call, wrap=torch.nn.Parameter, owner=bagua_ref)


def extremes_of_nan(comm) -> None:
    """NaNs of one rank make MIN and MAX NaN where they are, in tensors for which transports switch
    algorithms, and in several that are reduced together.
    """
    n, rank = comm.nranks(), comm.rank()
    for op, size in product((ReduceOp.MIN, ReduceOp.MAX), (35 * n, 100_000 * n)):
        rows = torch.stack([terms(op, r, size, torch.float32) for r in range(n)])
        rows[n - 1, n - 1 :: 3] = math.nan
        expected = combine(rows, op.name)
        assert expected.isnan().any()
        comm.allreduce(rows[rank], everywhere := torch.empty(size), op)
        comm.reduce(rows[rank], on_zero := torch.empty(size), 0, op)
        comm.reduce_scatter_inplace(scattered := rows[rank].clone(), op)
        together = rows[rank].clone()
        bagua_ref.allreduce_coalesced_inplace([together[:1], together[1:]], op, comm)
        for result in (everywhere, together, on_zero) if rank == 0 else (everywhere, together):
            assert_equal(result, expected, EXACT)
        assert_equal(scattered.chunk(n)[rank], expected.chunk(n)[rank], EXACT)


def backend_tensors(comm) -> None:
    """The original's calls:
    ``comm.allreduce_inplace(x.ensure_bagua_tensor().bagua_backend_tensor(), op)``, for each
    collective.
    """
    n, rank = comm.nranks(), comm.rank()
    for call in calls(n):
        check(comm, call, wrap=lambda x: x.ensure_bagua_tensor().bagua_backend_tensor())
    weight = torch.nn.Parameter(torch.zeros(2)).ensure_bagua_tensor(getter_closure=lambda p: p.grad)
    with pytest.raises(
        ValueError, match="no effective tensor; for a gradient call bagua_ensure_grad"
    ):
        comm.allreduce_inplace(weight.bagua_backend_tensor())
    backend_tensor = weight.bagua_backend_tensor()
    weight.grad = torch.full((2,), 10.0 * rank + 1)  # raised when the collective is called
    bagua_ref.allreduce_inplace(backend_tensor, ReduceOp.AVG, comm)
    assert weight.grad.tolist() == [10.0 * (n - 1) / 2 + 1] * 2
    assert weight.tolist() == [0.0] * 2
    counts, displs = [2] * n, [2 * r for r in range(n)]
    x = torch.full((2 * n,), float(rank))
    comm.alltoall_v_inplace(x.ensure_bagua_tensor().bagua_backend_tensor(), counts, displs)
    assert x.tolist() == [float(r) for r in range(n) for _ in range(2)]


def refusals(comm) -> None:
    """Bad input is refused before anything is sent, and the communicator stays usable."""
    n, rank = comm.nranks(), comm.rank()
    x, two, three, zeros = torch.ones(2 * n), torch.ones(2), torch.ones(3), [0] * n
    bad = [
        (ValueError, "contiguous", lambda: bagua_ref.broadcast(torch.ones(3, 2).t(), 0, comm)),
        (
            ValueError,
            "contiguous",
            lambda: bagua_ref.allreduce_inplace(torch.ones(4)[::2], comm=comm),
        ),
        (ValueError, "contiguous", lambda: bagua_ref.broadcast(torch.eye(2).to_sparse(), 0, comm)),
        (
            ValueError,
            "conjugated",
            lambda: bagua_ref.broadcast(torch.ones(2, dtype=torch.complex64).conj(), 0, comm),
        ),
        (ValueError, "src=-1", lambda: bagua_ref.broadcast(x, -1, comm)),
        (ValueError, f"src={n}", lambda: bagua_ref.broadcast_object(x, n, comm)),
        (ValueError, f"dst={n}", lambda: bagua_ref.send(x, n, comm)),
        (ValueError, f"src={rank}", lambda: bagua_ref.recv(x, comm.rank(), comm)),
        (TypeError, "src=1.0", lambda: bagua_ref.broadcast(x, 1.0, comm)),
        (ValueError, "op=4", lambda: bagua_ref.allreduce_inplace(x, 4, comm)),
        (TypeError, "AVG", lambda: bagua_ref.allreduce_inplace(x.long(), ReduceOp.AVG, comm)),
        (TypeError, "BXOR", lambda: bagua_ref.reduce_scatter_inplace(x, ReduceOp.BXOR, comm)),
        (TypeError, "torch.bool", lambda: bagua_ref.allreduce_inplace(x.bool(), comm=comm)),
        (
            TypeError,
            "torch.int16",
            lambda: bagua_ref.allreduce_coalesced_inplace([x, x.short()], comm=comm),
        ),
        (TypeError, "torch.float64", lambda: bagua_ref.allreduce(x, x.double(), comm=comm)),
        (ValueError, "elements", lambda: bagua_ref.allgather(x, torch.ones(2 * n * n + 1), comm)),
        (
            ValueError,
            "elements",
            lambda: bagua_ref.reduce_scatter(torch.ones(2 * n + 1), torch.ones(2), comm=comm),
        ),
        (ValueError, "count", lambda: bagua_ref.gather_inplace(torch.ones(n + 1), n, 0, comm)),
        (ValueError, "counts", lambda: bagua_ref.alltoall_v_inplace(x, [-1] * n, [0] * n, comm)),
        (ValueError, "displs", lambda: bagua_ref.alltoall_v_inplace(x, [1] * n, [2 * n] * n, comm)),
        (TypeError, "Tensor", lambda: bagua_ref.broadcast([1.0], 0, comm)),
        (TypeError, "comm='global'", lambda: bagua_ref.broadcast(x, 0, "global")),
        (
            ValueError,
            "'meta', which holds no values",
            lambda: bagua_ref.allreduce_inplace(torch.ones(2, device="meta"), comm=comm),
        ),
        (
            ValueError,
            f"exchange of rank {rank} with itself",
            lambda: comm.exchange([(two, rank)], [(three, rank)]),
        ),
        (
            ValueError,
            (
                rf"send_counts\[{rank}\]=2 and recv_counts\[{rank}\]=3 must be equal, as rank"
                rf" {rank} sends"
            ),
            lambda: comm.alltoall_v(two, [2] * n, zeros, three, [3] * n, zeros),
        ),
        (
            TypeError,
            "^send_tensor must be a torch.Tensor, not list",
            lambda: comm.alltoall_v([1.0], [1] * n, zeros, x, [1] * n, zeros),
        ),
        (
            ValueError,
            r"^displs((?!send).)*$",
            lambda: bagua_ref.alltoall_v_inplace(two, [3] * n, zeros, comm),
        ),
    ]
    for collective in (bagua_ref.allgather_inplace, bagua_ref.reduce_scatter_inplace):
        bad += [
            (
                ValueError,
                r"tensor of shape .* and strides .* must be contiguous",
                partial(collective, torch.ones(2, 2 * n).t(), comm=comm),
            ),
            (
                TypeError,
                "tensor must be a torch.Tensor, not list",
                partial(collective, [1.0], comm=comm),
            ),
        ]
    for collective, count in product(
        (bagua_ref.gather_inplace, bagua_ref.scatter_inplace), (-1, 1.0)
    ):
        bad.append(
            (
                ValueError,
                f"count={count} must be an int, 0 or more",
                partial(collective, torch.ones(1), count, 0, comm),
            )
        )
    if n > 1:
        odd = torch.ones(2 * n + 1)
        bad += [
            (ValueError, "chunks", lambda: bagua_ref.alltoall_inplace(odd, comm)),
            (ValueError, "chunks", lambda: bagua_ref.allgather_inplace(odd, comm)),
        ]
    for kind, message, call in bad:
        with pytest.raises(kind, match=message):
            call()
    bagua_ref.barrier(comm)
    bagua_ref.allreduce_inplace(x, comm=comm)
    assert torch.equal(x, torch.full((2 * n,), float(n)))


def outsiders_see_nothing(outside) -> None:
    """Every collective on a communicator without this rank returns immediately and changes
    nothing.
    """
    assert outside.rank() == -1
    for call in calls(outside.nranks()):
        mine = copies_of(call.brought[0])
        assert getattr(bagua_ref, call.method)(*mine, comm=outside) is None
        for before, after in zip(call.brought[0], mine, strict=True):
            assert before is after or torch.equal(before, after) or before.isnan().any()
    x, y = torch.arange(4.0), torch.arange(8.0)
    for more in (
        lambda: bagua_ref.send(x, 0, outside),
        lambda: bagua_ref.recv(x, 0, outside),
        lambda: bagua_ref.broadcast_coalesced([x, y], 0, outside),
        lambda: bagua_ref.allreduce_coalesced_inplace([x, y], comm=outside),
        lambda: bagua_ref.alltoall_v(x, [1], [0], y, [1], [0], outside),
        lambda: bagua_ref.alltoall_v_inplace(x, [1], [0], outside),
        lambda: bagua_ref.barrier(outside),
    ):
        assert more() is None
    assert bagua_ref.broadcast_object("mine", 0, outside) == "mine"
    assert (x.tolist(), y.tolist()) == ([0.0, 1.0, 2.0, 3.0], [float(i) for i in range(8)])


CASES = (
    functions,
    large_reductions,
    coalesced,
    single_elements,
    parameters,
    extremes_of_nan,
    backend_tensors,
    refusals,
)
