"""Communicators, operations and trainings with a fault, on simulated ranks: each is found by a
check of the clause that it breaks.
"""

from __future__ import annotations

import pytest
import torch
from tests.wrong_objects import Faults, Whole, assert_found

from bagua_ref.algorithms import Algorithm
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.types import ReduceOp

FAULTS = Faults()


def found_by(check):
    """Enter operations or algorithms into the table, with the check that must fail for them."""

    def enter(wrong):
        FAULTS.row(wrong.__name__, lambda: target_of(wrong), check)
        return wrong

    return enter


# Communicators


class OverTransport:
    """A right communicator, which sends through the one that works."""

    def __init__(self, world):
        self.world, self.inner = world, world.transport

    def __getattr__(self, name):
        return getattr(self.inner, name)


def communicator(method, check):
    """Return a decorator of a wrong collective, which gets the communicator that works and the
    arguments.
    """

    def enter(wrong):
        def replaced(self, *arguments, **options):
            return wrong(self.inner, *arguments, **options)

        made = type(wrong.__name__, (OverTransport,), {method: replaced})
        FAULTS.row(wrong.__name__, lambda: Whole(communicator=made), f"collectives.S3.9.{check}")
        return wrong

    return enter


@communicator("broadcast", "broadcast")
def broadcasts_from_rank_0(comm, tensor, src=0):
    comm.broadcast(tensor, 0)


@communicator("reduce", "reduce")
def reduces_to_the_next_rank(comm, send_tensor, recv_tensor, dst, op=ReduceOp.SUM):
    comm.reduce(send_tensor, recv_tensor, (dst + 1) % comm.nranks(), op)


@communicator("reduce", "reduce")
def reduces_on_every_rank(comm, send_tensor, recv_tensor, dst, op=ReduceOp.SUM):
    comm.allreduce(send_tensor, recv_tensor, op)


@communicator("reduce", "refuses")
def takes_any_root(comm, send_tensor, recv_tensor, dst, op=ReduceOp.SUM):
    comm.reduce(send_tensor, recv_tensor, dst % comm.nranks(), op)


@communicator("broadcast", "broadcast")
def writes_beside_the_tensor(comm, tensor, src=0):
    comm.broadcast(tensor, src)
    if tensor.storage_offset():
        tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).zero_()


@communicator("reduce", "long")
def reduces_100_000_elements(comm, send_tensor, recv_tensor, dst, op=ReduceOp.SUM):
    comm.reduce(send_tensor, recv_tensor, dst, op)
    recv_tensor.view(-1)[100_000:] = 0


@communicator("allreduce", "allreduce")
def forgets_the_operator(comm, send_tensor, recv_tensor, op=ReduceOp.SUM):
    comm.allreduce(send_tensor, recv_tensor, ReduceOp.SUM)


@communicator("allreduce", "every_dtype")
def adds_integers_as_floats(comm, send_tensor, recv_tensor, op=ReduceOp.SUM):
    if send_tensor.dtype is torch.int64:
        total = send_tensor.double()
        comm.allreduce(send_tensor.double(), total, op)
        recv_tensor.copy_(total)
    else:
        comm.allreduce(send_tensor, recv_tensor, op)


@communicator("allreduce", "nan")
def passes_over_nan(comm, send_tensor, recv_tensor, op=ReduceOp.SUM):
    if send_tensor.is_floating_point() and op is ReduceOp.MAX:
        lowest = torch.finfo(send_tensor.dtype).min
        send_tensor = send_tensor.nan_to_num(nan=lowest, posinf=torch.inf, neginf=-torch.inf)
    comm.allreduce(send_tensor, recv_tensor, op)


@communicator("allreduce_inplace", "nan")
def has_means_of_no_more_than_1e38(comm, tensor, op=ReduceOp.SUM):
    comm.allreduce_inplace(tensor, op)
    if op is ReduceOp.AVG and tensor.dtype is torch.float32:
        tensor[tensor.abs() > 3e37] = torch.inf


@communicator("allreduce", "nan")
def has_no_mean_of_a_sum_that_overflows(comm, send_tensor, recv_tensor, op=ReduceOp.SUM):
    comm.allreduce(send_tensor, recv_tensor, op)
    if op is ReduceOp.AVG and comm.nranks() > 1:
        total = send_tensor.clone()
        comm.allreduce_inplace(total)
        recv_tensor[total.isinf() & recv_tensor.isfinite()] = torch.nan


@communicator("allgather", "every_dtype")
def gathers_int16_as_bytes(comm, send_tensor, recv_tensor):
    comm.allgather(send_tensor, recv_tensor)
    if recv_tensor.dtype is torch.int16:
        recv_tensor.copy_(recv_tensor.to(torch.int8))


@communicator("allgather", "allgather")
def is_right_up_to_64(comm, send_tensor, recv_tensor):
    comm.allgather(send_tensor, recv_tensor)
    recv_tensor.view(comm.nranks(), -1)[:, 64:] = 0


@communicator("allgather", "allgather")
def gathers_in_reverse(comm, send_tensor, recv_tensor):
    comm.allgather(send_tensor, recv_tensor)
    chunks = recv_tensor.view(comm.nranks(), -1)
    chunks.copy_(chunks.flip(0))


@communicator("scatter", "scatter")
def scatters_the_next_chunk(comm, send_tensor, recv_tensor, src):
    rolled = send_tensor.view(comm.nranks(), -1).roll(-1, 0).reshape(-1)
    comm.scatter(rolled, recv_tensor, src)


@communicator("reduce_scatter", "reduce_scatter")
def keeps_the_first_chunk(comm, send_tensor, recv_tensor, op=ReduceOp.SUM):
    whole = torch.empty_like(send_tensor)
    comm.allreduce(send_tensor, whole, op)
    recv_tensor.copy_(whole.view(comm.nranks(), -1)[0])


@communicator("alltoall", "alltoall")
def exchanges_nothing(comm, send_tensor, recv_tensor, overlap=None):
    recv_tensor.copy_(send_tensor)


@communicator("alltoall_v", "alltoall_v")
def ignores_displacements(comm, send_tensor, send_counts, send_displs, *received):
    displs = [sum(send_counts[:rank]) for rank in range(len(send_counts))]
    long = torch.cat([send_tensor, send_tensor.new_zeros(sum(send_counts))])
    comm.alltoall_v(long, send_counts, displs, *received)


@communicator("broadcast_object", "broadcast_object")
def keeps_its_object(comm, obj, src=0):
    comm.broadcast_object(obj, src)
    return obj


@communicator("barrier", "barrier")
def does_not_wait(comm):
    return None


@communicator("send", "send_and_recv")
def sends_zeros(comm, tensor, dst):
    comm.send(torch.zeros_like(tensor), dst)


# Operations (S3, S13)


@found_by("comm_ops.S3.1.full_precision")
class ForgetsTheMean(ReferenceCommOps):
    def centralized(self, world, x, **options):
        return super().centralized(world, x, **{**options, "average": False})


@found_by("comm_ops.S3.1.scatter_gather")
class LetsOneRankDiffer(ReferenceCommOps):
    def centralized(self, world, x, **options):
        result = super().centralized(world, x, **options)
        if world.rank == world.world_size - 1 and world.rank:
            result = torch.nextafter(result, torch.full_like(result, torch.inf))
        return result


@found_by("comm_ops.S3.2.low_precision")
class SendsFullPrecision(ReferenceCommOps):
    def centralized(self, world, x, **options):
        return super().centralized(world, x, **{**options, "compression": None})


@found_by("comm_ops.S3.3.hierarchical")
class CountsEachLeaderOnce(ReferenceCommOps):
    def centralized(self, world, x, **options):
        leaders = len(world.nodes)
        if not (options["hierarchical"] and options["average"]):
            return super().centralized(world, x, **options)
        return super().centralized(world, x, **{**options, "average": False}) / leaders


@found_by("comm_ops.S3.4.shift_one")
class StartsAtTheSecondPeer(ReferenceCommOps):
    def decentralized(self, world, rounds, **options):
        return super().decentralized(world, [rounds[0], *rounds], **options)[1:]


@found_by("comm_ops.S3.4.all")
class AveragesPairsOnly(ReferenceCommOps):
    def decentralized(self, world, rounds, *, mode, hierarchical):
        if mode == "all" and world.world_size % 2 == 0 and not hierarchical:
            mode = "shift_one"
        return super().decentralized(world, rounds, mode=mode, hierarchical=hierarchical)


@found_by("comm_ops.S3.4.shift_one")
class SkipsTheCopyBack(ReferenceCommOps):
    def decentralized(self, world, rounds, **options):
        results = super().decentralized(world, rounds, **options)
        return [rounds[0], *results[:-1]]


@found_by("comm_ops.S3.4.shift_one")
class LetsTheOddRankBe(ReferenceCommOps):
    def decentralized(self, world, rounds, *, mode, hierarchical):
        if mode == "shift_one" and world.world_size % 2 and not hierarchical:
            return rounds
        return super().decentralized(world, rounds, mode=mode, hierarchical=hierarchical)


@found_by("comm_ops.S3.2.low_precision")
class CompressesNothingItDoesNotKnow(ReferenceCommOps):
    def centralized(self, world, x, **options):
        if options["compression"] != "MinMaxUInt8":
            options["compression"] = None
        return super().centralized(world, x, **options)


@found_by("comm_ops.S13.3.exponential")
class TakesTheRingForExponential(ReferenceCommOps):
    def decentralized_on_graph(self, world, rounds, *, graph, hierarchical):
        graph = "ring" if graph == "exponential" else graph
        return super().decentralized_on_graph(world, rounds, graph=graph, hierarchical=hierarchical)


@found_by("comm_ops.S13.4.weights")
class TransposesTheGraph(ReferenceCommOps):
    def decentralized_on_graph(self, world, rounds, *, graph, hierarchical):
        if not isinstance(graph, str):
            graph = [transposed(each) for each in graph]
        return super().decentralized_on_graph(world, rounds, graph=graph, hierarchical=hierarchical)


def transposed(graph):
    rows = [[] for _ in graph]
    for receiver, row in enumerate(graph):
        for source, weight in row:
            rows[source].append((receiver, weight))
    return rows


@found_by("comm_ops.S3.5.ring")
class CompressesTheRingToFourBits(ReferenceCommOps):
    def __init__(self, kernels, flatten=True):
        super().__init__(kernels, flatten, "MXFP4")


@found_by("comm_ops.S3.5.ring")
class TakesTheFirstStepOfTheRingTwice(ReferenceCommOps):
    def low_precision_decentralized(self, world, rounds, **options):
        twice = [*rounds[:2], *rounds[1:]]
        return super().low_precision_decentralized(world, twice, **options)[1:]


# Trainings (S5, S9 to S11, S13)


def altered(name, method, check, gradients=None, **changes):
    """Enter trainings whose ``method`` gets other arguments: values, or functions of the right one;
    ``gradients`` is a function of each gradient in a program.
    """

    def train(self, world, weights, given, **options):
        for option, change in changes.items():
            if option in options:
                right = options[option]
                options[option] = change(right) if callable(change) else change
        if gradients is not None:
            given = [
                (name, {place: gradients(g) for place, g in rest[0].items()})
                if name == "step"
                else (name, *rest)
                for name, *rest in given
            ]
        return getattr(ReferenceAlgorithms, method).__get__(self)(world, weights, given, **options)

    found_by(check)(type(name, (ReferenceAlgorithms,), {method: train}))


def later(value):
    return value + 1


def noisy(x):
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return x + 1e-3 * noise.to(x.dtype)


altered("SumsGradients", "gradient_allreduce", "algorithms.S5.1.gradients", average=False)
altered("HalvesTheStep", "gradient_allreduce", "algorithms.S5.1.gradients", lr=lambda lr: lr / 2)
altered("SumsCompressed", "bytegrad", "algorithms.S5.2.gradients", average=False)
altered("CompressesSmallBuckets", "bytegrad", "algorithms.S5.2.gradients", bucket_bytes=8)
altered("HasOnePeerOnly", "decentralized", "algorithms.S5.3.all", peer_selection_mode="ring")
altered(
    "SkipsEverySecondRound",
    "decentralized",
    "algorithms.S5.3.all",
    communication_interval=lambda interval: 2 * interval,
)
altered(
    "IgnoresTheInterval",
    "decentralized",
    "algorithms.S13.5.interval",
    communication_interval=1,
)
altered(
    "IgnoresTheIntervalOfTheRing",
    "low_precision_decentralized",
    "algorithms.S5.4.ring",
    communication_interval=later,
)
altered(
    "SendsOneByteOnTheRing",
    "low_precision_decentralized",
    "algorithms.S5.4.ring",
    compression="MinMaxUInt8",
)
altered("FreezesOneStepLate", "qadam", "algorithms.S5.5.steps", warmup_steps=later)
altered(
    "WarmsUpLongerAsynchronously",
    "async_model_average",
    "algorithms.S5.6.warmup",
    warmup_steps=later,
)
altered(
    "WaitsTwiceAsLong",
    "async_model_average",
    "algorithms.S3.6.nothing_lost",
    sync_interval_ms=lambda interval: 2 * interval,
)
altered("HasALongerPeriod", "local_sgd", "algorithms.S9.1.period", period=later)
altered("IgnoresTheOffset", "local_sgd", "algorithms.S9.1.offset", offset=0)
altered("WarmsUpLonger", "local_sgd", "algorithms.S9.1.warmup", warmup_steps=later)
altered("AveragesInsideNoNode", "local_sgd", "algorithms.S9.1.inside_nodes", hierarchical=False)
altered(
    "HasTheDefaultOuterOptimizer",
    "diloco",
    "algorithms.S9.2.outer_optimizer",
    outer_optimizer={"class": "SGD", "lr": 1.0},
)
altered("HasOneFragment", "diloco", "algorithms.S9.3.fragments", fragments=1)
altered("SwapsFragments", "diloco", "algorithms.S9.3.lists", fragments=lambda lists: lists[::-1])
altered("AppliesAtOnce", "diloco", "algorithms.S9.4.schedule", delay=0)
altered("HasItsOwnShareOfTheMix", "diloco", "algorithms.S9.4.mix", mix=lambda mix: 1 - mix)
altered("CompressesNothing", "diloco", "algorithms.S9.5.one_byte", compression=None)
altered("ForgetsErrorsOfFragments", "diloco", "algorithms.S9.5.one_byte", error_feedback=False)
altered("ForgetsInnerMomentum", "diloco", "algorithms.S9.2.inner_optimizer", momentum=0.0)
altered("HasAHigherRank", "powersgd", "algorithms.S10.2.rounds", matrix_approximation_rank=later)
altered("HasAnotherSeed", "powersgd", "algorithms.S10.2.rounds", seed=later)
altered("StartsQAnew", "powersgd", "algorithms.S10.2.rounds", warm_start=lambda warm: not warm)
altered(
    "CompressesAtAnotherRate",
    "powersgd",
    "algorithms.S10.1.compressed",
    min_compression_rate=lambda rate: rate * 2,
)
altered("WarmsUpLongerInLowRank", "powersgd", "algorithms.S10.1.warmup", warmup_steps=later)
altered("SendsMore", "topk", "algorithms.S11.2.count", ratio=lambda ratio: min(1.0, 2 * ratio))
altered("ForgetsWhatWasLeftOut", "topk", "algorithms.S11.2.rounds", error_feedback=False)
altered("WarmsUpLongerInTopK", "topk", "algorithms.S11.2.warmup", warmup_steps=later)
altered("WarmsUpLongerInFragments", "diloco", "algorithms.S9.warmup", warmup_steps=later)
altered("SharesOneOuterOptimizer", "diloco", "algorithms.S9.3.own_optimizers", fragments=1)
altered("NeverSeesZero", "powersgd", "algorithms.S10.2.zero_gradients", noisy)
altered("NeverSeesDependence", "powersgd", "algorithms.S10.3.dependent_columns", noisy)
altered("HidesInfinities", "powersgd", "algorithms.S10.4.not_finite", torch.nan_to_num)
altered("HidesInfinitiesInTopK", "topk", "algorithms.S11.2.not_finite", torch.nan_to_num)
altered("NeverForgets", "demo", "algorithms.S15.6.rounds", decay=lambda decay: decay or 1.0)


@found_by("algorithms.S11.2.restart")
class KeepsMemoriesThatAreDropped(ReferenceAlgorithms):
    def topk(self, world, weights, program, **options):
        kept = [
            ("restart",) if len(action) == 1 and "without" in action[0] else action
            for action in program
        ]
        return super().topk(world, weights, kept, **options)


@found_by("algorithms.S2.5.unused_parameters")
class StepsWhatNoRankHasUsed(ReferenceAlgorithms):
    def qadam(self, world, weights, program, **options):
        zeros = {place: torch.zeros_like(w) for place, w in enumerate(weights)}
        filled = [("step", zeros | given) for _, given in program]
        return super().qadam(world, weights, filled, **options)


@found_by("algorithms.S11.1.rounds")
class HasNoErrorMemory(ReferenceAlgorithms):
    def bytegrad(self, world, weights, program, **options):
        return super().bytegrad(world, weights, program, **{**options, "error_feedback": False})


@found_by("algorithms.S5.3.shift_one")
class MovesOneRank(ReferenceAlgorithms):
    def decentralized(self, world, weights, program, **options):
        history = super().decentralized(world, weights, program, **options)
        return history if world.rank else [[w + 0.25 for w in step] for step in history]


@found_by("algorithms.S5.4.restart")
class LosesReplicasAtARestart(ReferenceAlgorithms):
    def low_precision_decentralized(self, world, weights, program, **options):
        train = super().low_precision_decentralized
        if ("restart",) not in program:
            return train(world, weights, program, **options)
        place = program.index(("restart",))
        first = train(world, weights, program[:place], **options)
        rest = self.low_precision_decentralized(world, first[-1], program[place + 1 :], **options)
        return [*first, first[-1], *rest]


@found_by("algorithms.S9.restart")
class ForgetsARestart(ReferenceAlgorithms):
    def diloco(self, world, weights, program, **options):
        kept = [action for action in program if action[0] != "restart"]
        history = super().diloco(world, weights, kept, **options)
        return history + [history[-1]] * (len(program) - len(kept))


@found_by("algorithms.S9.6.global_weights")
class ShowsItsOwnWeights(ReferenceAlgorithms):
    def diloco(self, world, weights, program, **options):
        history = super().diloco(world, weights, program, **options)
        shown, last = [], weights
        for action, result in zip(program, history, strict=True):
            if action[0] == "global weights":
                result = last
            else:
                last = result
            shown.append(result)
        return shown


@found_by("algorithms.S9.1.unused_parameters")
class MovesWhatNoRankHasUsed(ReferenceAlgorithms):
    def local_sgd(self, world, weights, program, *, warmup_steps, **options):
        zeros = {place: torch.zeros_like(w) for place, w in enumerate(weights)}
        filled = [("step", zeros | given) for _, given in program[:warmup_steps]]
        program = filled + program[warmup_steps:]
        return super().local_sgd(world, weights, program, warmup_steps=warmup_steps, **options)


@found_by("algorithms.S2.1.order")
class ClosesBucketsEarly(ReferenceAlgorithms):
    def buckets(self, world, weights, *, bucket_bytes):
        return super().buckets(world, weights, bucket_bytes=1)


@found_by("algorithms.S2.1.order")
class ListsBucketsBackwards(ReferenceAlgorithms):
    def buckets(self, world, weights, *, bucket_bytes):
        return super().buckets(world, weights, bucket_bytes=bucket_bytes)[::-1]


def target_of(made):
    """Return a target whose operations or algorithms are wrong."""
    part = "algorithms" if issubclass(made, ReferenceAlgorithms) else "comm_ops"
    return type("Target", (Whole,), {part: made("reference")})()


@pytest.mark.proof
@pytest.mark.parametrize(("make", "check"), FAULTS)
def test_wrong_ranks_are_found(make, check):
    assert_found(make(), check)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "option", "wrong", "check"),
    [
        ("bytegrad", "hierarchical", False, "algorithms.S5.2.gradients"),
        ("decentralized", "communication_interval", 2, "algorithms.S13.5.interval"),
        ("powersgd", "memory", "averaged", "algorithms.S10.2.rounds"),
        ("topk", "ratio", 0.02, "algorithms.S11.2.count"),
        ("demo", "decay", 0.99, "algorithms.S15.6.rounds"),
    ],
)
def test_wrong_defaults_are_found(monkeypatch, name, option, wrong, check):
    right = Algorithm.init

    def init(algorithm, **options):
        return right(algorithm, **({option: wrong} if algorithm == name else {}) | options)

    monkeypatch.setattr(Algorithm, "init", init)
    assert run_conformance("reference", checks=[check]).failures()


def test_a_failure_of_ranks_is_shown_at_its_boundary():
    wrong = next(row for row in FAULTS if row.id == "is_right_up_to_64").values[0]()
    report = run_conformance(wrong, checks=["collectives.S3.9.allgather"])
    assert "of 65 elements" in report.failures()[0].message
