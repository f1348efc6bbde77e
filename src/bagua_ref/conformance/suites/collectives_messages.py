"""Messages between ranks, objects, and arguments that communicators refuse (S3.9)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal
from bagua_ref.conformance.inputs.collective_cases import BITWISE, MOVABLE, counts, nothing, root_of, values
from bagua_ref.conformance.inputs.strategies import Draw, seeds, worlds
from bagua_ref.conformance.lab.collective_script import script_of_ranks
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.ranks import run_ranks
from bagua_ref.conformance.lab.violation import Violation, literal, written_down
from bagua_ref.conformance.suites.checks import check
from bagua_ref.types import ReduceOp


@check("collectives", "S3.9", "exchange")
def exchange(lab: Lab, draw: Draw) -> None:
    """Every message arrives; messages between the same two ranks arrive in the order in which they were sent."""
    nodes, dtype = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE)))
    ranks = st.integers(0, sum(nodes) - 1)
    messages = draw(st.lists(st.tuples(ranks, ranks, counts), max_size=20))

    everyone, listed, seed = range(sum(nodes)), list(enumerate(messages)), draw(seeds)
    sends = [[(values(number, count, dtype), dst) for number, (src, dst, count) in listed if src == rank] for rank in everyone]
    recvs = [[(nothing(count, dtype), src) for src, dst, count in messages if dst == rank] for rank in everyone]
    wanted = [[values(number, count, dtype) for number, (_, dst, count) in listed if dst == rank] for rank in everyone]
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

    with written_down(script):
        for rank, received in enumerate(run_ranks(lab, nodes, program, "exchange", script, seed)):
            for tensor, want in zip(received, wanted[rank], strict=True):
                _same(tensor, want, f"exchange of (src, dst, count) {messages} on nodes {nodes}, received by rank {rank}")


@check("collectives", "S3.9", "send_and_recv")
def send_and_recv(lab: Lab, draw: Draw) -> None:
    """A message passed from rank to rank reaches the last one."""
    nodes, dtype, count = lab.world(draw, worlds()), getattr(torch, draw(st.sampled_from(MOVABLE))), draw(counts)
    seed, message = draw(seeds), values(0, count, dtype)
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"message, nothing = {literal(message)}, {literal(nothing(count, dtype))}"],
        ["tensor = message if comm.rank() == 0 else nothing.clone()", "if comm.rank() > 0:",
         "    comm.recv(tensor, comm.rank() - 1)", f"if comm.rank() < {sum(nodes) - 1}:",
         "    comm.send(tensor, comm.rank() + 1)", "return tensor"],
        ["for tensor in results:", "    assert_equal(tensor, message, EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> Tensor:
        tensor = message.clone() if comm.rank() == 0 else nothing(count, dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return tensor

    with written_down(script):
        for rank, tensor in enumerate(run_ranks(lab, nodes, program, "send and recv", script, seed)):
            _same(tensor, message, f"a message of {count} {dtype} passed on nodes {nodes}, at rank {rank}")


@check("collectives", "S3.9", "broadcast_object")
def broadcast_object(lab: Lab, draw: Draw) -> None:
    """Every rank gets src's object, whatever its size and whichever rank src is."""
    nodes = lab.world(draw, worlds())
    src, seed = root_of(draw, nodes), draw(seeds)
    simple = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=300), st.binary(max_size=20))
    value = draw(st.recursive(simple, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=5))
    source = repr(value)
    if draw(st.integers(0, 3)) == 3:  # more than fits one message
        times = draw(st.sampled_from(lab.long_sizes)) // 251 + 1
        value, source = [bytes(range(251)) * times, value], f"[bytes(range(251)) * {times}, {source}]"
    program = lambda comm: comm.broadcast_object(value if comm.rank() == src else comm.rank(), src)  # noqa: E731
    script = script_of_ranks(
        lab.target, nodes, seed,
        [f"value = {source}"],
        [f"return comm.broadcast_object(value if comm.rank() == {src} else comm.rank(), {src})"],
        ["assert results == [value] * len(results), results"],
    )  # fmt: skip
    with written_down(script):
        for rank, found in enumerate(run_ranks(lab, nodes, program, "broadcast_object", script, seed)):
            if found != value or type(found) is not type(value):
                raise Violation(
                    f"broadcast_object from {src} on nodes {nodes}: rank {rank} got {found!r:.200} instead of {value!r:.200}"
                )


@check("collectives", "S3.9", "refuses")
def refuses(lab: Lab, draw: Draw) -> None:
    """Invalid arguments raise a ValueError or TypeError before anything is sent, and the communicator continues to work."""
    nodes = lab.world(draw, worlds())
    n = sum(nodes)
    case = draw(st.sampled_from(["src", "size", "dtype", "average of integers", "bits of floats"]))
    bad: dict[str, tuple[str, tuple[Any, ...]]] = {
        "src": ("broadcast", (torch.zeros(2), draw(st.sampled_from([-1, n, n + 3])))),
        "size": ("allgather", (torch.zeros(2), torch.zeros(2 * n + 1))),
        "dtype": ("allreduce", (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ReduceOp.SUM)),
        "average of integers": ("allreduce_inplace", (torch.zeros(2, dtype=torch.int32), ReduceOp.AVG)),
        "bits of floats": ("allreduce_inplace", (torch.zeros(2), draw(st.sampled_from(list(BITWISE))))),
    }
    method, arguments = bad[case]
    seed = draw(seeds)
    shown = ", ".join(str(int(item)) if isinstance(item, ReduceOp) else literal(item) for item in arguments)
    script = script_of_ranks(
        lab.target, nodes, seed, [],
        ["try:", f"    comm.{method}({shown})", "except (ValueError, TypeError):", "    tensor = torch.ones(1)",
         f"    comm.allreduce_inplace(tensor, {int(ReduceOp.SUM)})", "    return tensor",
         f"raise AssertionError({f'{method} accepted invalid arguments ({case})'!r})"],
        ["for tensor in results:", f"    assert_equal(tensor, torch.tensor([{float(n)}]), EXACT)"],
    )  # fmt: skip

    def program(comm: Any) -> Tensor | str:
        try:
            getattr(comm, method)(*arguments)
        except (ValueError, TypeError):
            tensor = torch.ones(1)
            comm.allreduce_inplace(tensor, ReduceOp.SUM)
            return tensor
        return f"{method} accepted invalid arguments ({case})"

    with written_down(script):
        for rank, found in enumerate(run_ranks(lab, nodes, program, method, script, seed)):
            if isinstance(found, str):
                raise Violation(f"{found} on nodes {nodes}, rank {rank}: {arguments!r}")
            what = f"allreduce after {method} refused its arguments, on nodes {nodes}, rank {rank}"
            _same(found, torch.full((1,), float(n)), what)


def _same(tensor: Any, want: Tensor, what: str) -> None:
    try:
        assert_equal(tensor, want, EXACT)
    except AssertionError as error:
        raise Violation(f"{what}: {error}") from None
