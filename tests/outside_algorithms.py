"""Trainers written as an outside user would, in plain torch over any communicator; one is correct,
the others are faulty.
"""

from __future__ import annotations

import os
import time

import torch

from bagua_ref.backends.reference import ReferenceBackend


class PlainAlgorithms:
    """Two of the six algorithms."""

    def gradient_allreduce(
        self, world, weights, gradients, *, lr, bucket_bytes, hierarchical, average
    ):
        self._share(world, weights)
        history = []
        for given in gradients:
            for place, w in enumerate(weights):
                total = self._of_all_ranks(world, given.get(place, torch.zeros_like(w))).sum(0)
                w -= lr * (total / world.world_size if average else total).to(w.dtype)
            history.append([w.clone() for w in weights])
        return history

    def decentralized(
        self,
        world,
        weights,
        gradients,
        *,
        lr,
        bucket_bytes,
        hierarchical,
        peer_selection_mode,
        communication_interval,
    ):
        self._share(world, weights)
        history = []
        for step, given in enumerate(gradients):
            for w in weights if step % communication_interval == 0 else []:
                times = step // communication_interval
                w.copy_(
                    self._average(
                        world, w, peer_selection_mode, world.nodes if hierarchical else None, times
                    )
                )
            for place, gradient in given.items():
                weights[place] -= lr * gradient
            history.append([w.clone() for w in weights])
        return history

    def _share(self, world, weights):
        for w in weights:
            world.transport.broadcast(w, 0)

    def _of_all_ranks(self, world, x):
        everything = torch.empty(world.world_size * x.numel(), dtype=x.dtype)
        world.transport.allgather(x.reshape(-1).contiguous(), everything)
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        return everything.view(world.world_size, *x.shape).to(wide)

    def _average(self, world, w, mode, nodes, times):
        ranks = self._of_all_ranks(world, w)
        if mode == "all":
            return ranks.mean(0).to(w.dtype)
        nodes = nodes or (1,) * world.world_size
        place = [node for node, size in enumerate(nodes) for _ in range(size)][world.rank]
        # Python's sum adds in rank order, as S3.3 requires; torch's does not.
        means = [
            sum(node).div(len(node)).to(w.dtype).to(ranks.dtype) for node in ranks.split(nodes)
        ]
        return ((means[place] + means[self._peer(place, len(nodes), times)]) / 2).to(w.dtype)

    def _peer(self, rank, n, times):
        half = n // 2
        return (times + rank) % half + half if rank < half else (rank - half - times) % half


class Right:
    algorithms = PlainAlgorithms()


def faulty(kind):
    """Return a target class whose ``algorithms`` is ``kind``, named after it."""
    return type(f"{kind.__name__}Target", (), {"algorithms": kind(), "__module__": __name__})


class SumsAlways(PlainAlgorithms):
    def gradient_allreduce(self, world, weights, gradients, *, average, **options):
        return super().gradient_allreduce(world, weights, gradients, average=False, **options)


class StaysWithItsPeer(PlainAlgorithms):
    def _peer(self, rank, n, times):
        return super()._peer(rank, n, 0)


class Raises(PlainAlgorithms):
    def gradient_allreduce(self, *arguments, **options):
        raise RuntimeError("out of cheese")


class Exits(PlainAlgorithms):
    def gradient_allreduce(self, *arguments, **options):
        raise SystemExit(3)


class Dies(PlainAlgorithms):
    def gradient_allreduce(self, *arguments, **options):
        os._exit(4)


class Sleeps(PlainAlgorithms):
    def gradient_allreduce(self, *arguments, **options):
        time.sleep(1000)


class LeavesOneRankWaiting(PlainAlgorithms):
    def gradient_allreduce(self, world, weights, gradients, **options):
        if world.rank == 1:
            return [weights for _ in gradients]
        return super().gradient_allreduce(world, weights, gradients, **options)


def returns(name, change):
    """Return a trainer whose gradient_allreduce returns something else than its history."""

    def gradient_allreduce(self, *arguments, **options):
        return change(PlainAlgorithms.gradient_allreduce(self, *arguments, **options))

    return type(name, (PlainAlgorithms,), {"gradient_allreduce": gradient_allreduce})


def each_weight(change):
    return lambda history: [[change(w) for w in tensors] for tensors in history]


ReturnsNothing = returns("ReturnsNothing", lambda history: None)
ReturnsTooFewSteps = returns("ReturnsTooFewSteps", lambda history: history[1:])
ReturnsTooFewParameters = returns(
    "ReturnsTooFewParameters", lambda history: [tensors[1:] for tensors in history]
)
ReturnsOneDimension = returns("ReturnsOneDimension", each_weight(lambda w: w.reshape(-1)[:, None]))
ReturnsAnotherDtype = returns("ReturnsAnotherDtype", each_weight(lambda w: w.to(torch.complex64)))
ReturnsNumbers = returns("ReturnsNumbers", each_weight(torch.Tensor.tolist))
ReturnsNaN = returns("ReturnsNaN", each_weight(lambda w: w * torch.nan))


class UsesUpItsArguments(PlainAlgorithms):
    """As correct as `PlainAlgorithms`."""

    def gradient_allreduce(self, world, weights, gradients, **options):
        history = super().gradient_allreduce(world, weights, gradients, **options)
        for given in gradients:
            for gradient in given.values():
                gradient.fill_(torch.nan)
            given.clear()
        gradients.clear()
        weights.clear()
        return history


(
    SumsAlwaysTarget,
    StaysWithItsPeerTarget,
    RaisesTarget,
    SleepsTarget,
    LeavesOneRankWaitingTarget,
    ReturnsTooFewStepsTarget,
) = map(
    faulty, (SumsAlways, StaysWithItsPeer, Raises, Sleeps, LeavesOneRankWaiting, ReturnsTooFewSteps)
)


class HalvesTwice(ReferenceBackend):
    """A kernel backend; the checks run the algorithms of `bagua_ref` with it."""

    def _average_(self, x, y):
        super()._average_(x, y)
        x.mul_(0.5)
