"""Tests of errors in programs for torch.distributed: what the simulated world finds, with rank,
line and group.
"""

from __future__ import annotations

import datetime
import inspect
import os
import random
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from bagua_ref.errors import SimulationError
from bagua_ref.simulation import SimulatedWorld, scheduler


def run(function, n: int = 2, **options):
    return SimulatedWorld(n, torch_distributed=True, **options).run(function)


def init() -> int:
    dist.init_process_group("nccl")
    return dist.get_rank()


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def found(function, kind: str, n: int = 2) -> SimulationError:
    with pytest.raises(SimulationError) as error:
        run(function, n)
    assert error.value.kind == kind
    return error.value


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(1))),
        (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX),
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
        ),
        (lambda: dist.send(torch.ones(1), 1), lambda: dist.recv(torch.ones(2), 0)),
    ],
    ids=["operation", "reduction", "splits", "message"],
)
def test_calls_that_do_not_match(first, second):
    def main():
        rank = init()
        (second if rank else first)()

    assert {(call.rank, call.file) for call in found(main, "mismatch").calls} == {
        (0, __file__),
        (1, __file__),
    }


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sizes_of_all_gather_may_differ_over_nccl_only(backend):
    def main():
        dist.init_process_group(backend)
        own, parts = torch.ones(1 + dist.get_rank()), [torch.zeros(1), torch.zeros(2)]
        dist.all_gather(parts, own, group=dist.new_group())
        return [part.tolist() for part in parts]

    if backend == "nccl":
        assert run(main) == [[[1.0], [1.0, 1.0]]] * 2
    else:
        with pytest.raises(ValueError, match="goes with one of"):
            run(main)


def test_a_call_on_a_group_that_the_rank_is_not_in_warns_as_torch_does():
    def main():
        init()
        group = dist.new_group([0])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for call in (dist.all_reduce, dist.broadcast):
                call(torch.ones(1), **{"src": 0} if call is dist.broadcast else {}, group=group)
            dist.barrier(group)
            dist.monitored_barrier(group)
        return len([w for w in seen if "does not belong to the given group" in str(w.message)])

    assert SimulatedWorld(2, torch_distributed=True).run(main) == [0, 4]


def test_an_error_passes_the_programs_handlers():
    def main():
        rank = init()
        try:
            dist.all_reduce(torch.ones(1 + rank))
        except Exception:
            return "handled"

    assert {call.rank for call in found(main, "mismatch").calls} == {0, 1}


def test_results_are_delivered_as_late_as_torch_allows():
    def main():
        rank = init()
        x = torch.tensor([rank + 1.0, 2.0])
        work = dist.all_reduce(x, async_op=True)
        assert x[0].isnan()
        assert x._version == 0
        work.wait()
        assert (x.tolist(), x._version) == ([3.0, 4.0], 0)
        source = torch.tensor([float(rank)])
        work = dist.broadcast(source, 0, async_op=True)
        assert source.item() == 0.0 if rank == 0 else source.isnan()
        while not work.is_completed():
            pass
        ints = torch.tensor([rank])
        dist.all_reduce(ints, async_op=True).get_future().wait()
        sent = dist.isend(torch.tensor([7.0 + rank]), 1 - rank)
        received = dist.irecv(y := torch.zeros(1), 1 - rank)
        assert y.isnan()
        received.wait()
        sent.wait()
        assert (source.item(), ints.item(), y.item()) == (0.0, 1, 8.0 - rank)

    run(main)


def test_store_waits_time_out_in_virtual_time():
    def main():
        store = dist.TCPStore("127.0.0.1", 1234, 2, dist.is_initialized())
        with pytest.raises(dist.DistStoreError, match="wait timeout after 3600 s"):
            store.wait(["missing"], datetime.timedelta(hours=1))
        store.set("a", "1")
        assert store.add("counter", 2) in (2, 4)
        assert store.compare_set("b", "", "x") == b"x"
        return store.get("a"), dist.PrefixStore("p", store).check(["a"]), store.num_keys()

    assert run(main) == [(b"1", False, 3)] * 2


def test_monitored_barrier_names_the_missing_ranks():
    def main():
        if init() == 0:
            with pytest.raises(
                RuntimeError,
                match=r"timed out after 5.0 s waiting in monitored_barrier\(\) .* for rank 1",
            ):
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))

    run(main)


def test_a_tensor_on_another_device_is_refused():
    def main():
        init()
        dist.all_reduce(torch.ones(1, device="meta"))

    assert "CPU tensors only" in str(found(main, "unsupported"))


def test_other_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(SimulationError, match=r"supports torch 2.13 and 2.14, not 2.5.1"):
        run(print)


def test_a_rank_that_does_not_yield_is_reported_with_its_stack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "_UNYIELDING", 0.5)
    blocked, environment = threading.Lock(), dict(os.environ)
    blocked.acquire()

    def main():
        if init() == 1:
            blocked.acquire()  # not simulated
        dist.barrier()

    try:
        error = found(main, "unyielding")
        assert "# not simulated" in str(error)
        assert [(call.rank, call.line) for call in error.calls] == [
            (1, line_of(main, "# not simulated"))
        ]
    finally:
        blocked.release()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(10)
    assert dict(os.environ) == environment


def test_a_rank_that_computes_for_long_is_no_hang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "_SIGNALS", 0.25)
    monkeypatch.setattr(scheduler, "_UNYIELDING", 0.5)
    monkeypatch.setattr(scheduler, "_IDLE", 0.001)  # a busy machine may give it little time

    def compute(turns):
        for _ in range(turns):  # without a look at a clock, which would let other ranks go on
            pass

    began = time.thread_time()
    compute(10**6)
    seconds = time.thread_time() - began

    def main():
        if init() == 1:
            compute(int(1.5e6 / seconds))
        dist.barrier()

    assert run(main) == [None, None]


def test_many_runs_of_one_seed_have_one_result():
    def main():
        rank = init()
        work = dist.all_reduce(x := torch.tensor([rank + 0.1]), async_op=True)
        order = (
            [dist.recv(torch.zeros(1)) for _ in range(2)]
            if rank == 0
            else dist.send(torch.ones(1), 0)
        )
        work.wait()
        return x.item(), order, random.random(), time.monotonic()

    assert len({repr(run(main, 3, seed=7)) for _ in range(30)}) == 1
