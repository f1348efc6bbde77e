"""The table of algorithms: each with options that matter, the ranks that it trains on, and what it
is capable of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tests.trainings import batch, network, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DemoAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopKAlgorithm,
)
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.formulas.graphs import MODES, hypercube, in_turn

ONE_BIT: dict[str, Any] = {"compression": "OneBit", "error_feedback": True}
MXFP4: dict[str, Any] = {"compression": "MXFP4", "error_feedback": True}


@dataclass(frozen=True)
class Case:
    """An algorithm with options, and what it is capable of.

    Attributes:
        make: returns the algorithm for an optimizer.
        nodes: ranks per node in simulated worlds.
        replicated: whether all ranks have the same weights after every step.
        float64: whether it takes float64.
        compresses: whether results depend on which elements share a bucket or a chunk.
        memory: whether ranks keep what compression has left out.
        counts: whether it counts steps that follow a backward pass.
        fixed_sums: whether sums over ranks have the same order everywhere.
        flat: whether it takes nothing but flat buckets.
        takes: whether it takes a world of these nodes.
        undone: whether a step that a scaler skips leaves no trace: no averaged weights, and no
            later random columns.
        kept: whether what is kept of a round outlives new buckets to the bit; a ring sends its
            weights anew.
    """

    make: Callable[[Any], Algorithm]
    nodes: tuple[int, ...] = (1, 2)
    replicated: bool = True
    float64: bool = True
    compresses: bool = False
    memory: bool = False
    counts: bool = False
    fixed_sums: bool = True
    flat: bool = False
    takes: Callable[[tuple[int, ...]], bool] = lambda nodes: True
    undone: bool = True
    kept: bool = True


def _compressed(make: Callable[[Any], Algorithm], memory: bool = False, **given: Any) -> Case:
    return Case(make, **{"float64": False, "compresses": True, "memory": memory, **given})


def _decentralized(
    nodes: tuple[int, ...], hierarchical: bool, mode: Any, interval: int = 1, **given: Any
) -> Case:
    def takes(nodes: tuple[int, ...]) -> bool:
        n = len(nodes) if hierarchical else sum(nodes)
        return MODES[mode].takes(n) if isinstance(mode, str) else n == 4

    given |= {"replicated": False, "undone": False, "takes": takes}
    return Case(lambda o: DecentralizedAlgorithm(hierarchical, mode, interval), nodes, **given)


def _ring(nodes: tuple[int, ...], *options: Any, **given: Any) -> Case:
    return _compressed(
        lambda o: LowPrecisionDecentralizedAlgorithm(*options, **given),
        nodes=nodes,
        replicated=False,
        kept=False,
    )


def _local(algorithm: Algorithm, compresses: bool = False, **given: Any) -> Case:
    own = {"float64": not compresses, "compresses": compresses, "counts": True, **given}
    return Case(lambda o: algorithm, replicated=False, **own)


def _adam(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.1)


def _powersgd(rank: int = 1, **given: Any) -> Case:
    options = {"warmup_steps": 0, "min_compression_rate": 0.1, **given}
    kept = {
        "memory": options.get("memory", "local") is not None,
        "undone": options.get("warm_start", True),
    }
    return Case(
        lambda o: PowerSGDAlgorithm(rank, **options),
        compresses=True,
        counts=True,
        fixed_sums=False,
        **kept,
    )


CASES: dict[str, Case] = {
    "gradient_allreduce": Case(lambda o: GradientAllReduceAlgorithm(), fixed_sums=False),
    "gradient_allreduce, hierarchical": Case(
        lambda o: GradientAllReduceAlgorithm(hierarchical=True), fixed_sums=False
    ),
    "bytegrad": _compressed(lambda o: ByteGradAlgorithm(hierarchical=False)),
    "bytegrad, hierarchical": _compressed(lambda o: ByteGradAlgorithm()),
    "bytegrad with memory": _compressed(
        lambda o: ByteGradAlgorithm(hierarchical=False, **ONE_BIT), memory=True
    ),
    "bytegrad with memory, hierarchical": _compressed(
        lambda o: ByteGradAlgorithm(**ONE_BIT), memory=True
    ),
    "qadam": _compressed(lambda o: QAdamAlgorithm(o, hierarchical=False), fixed_sums=False),
    "qadam, hierarchical": _compressed(
        lambda o: QAdamAlgorithm(o, compression="MXFP8"), fixed_sums=False
    ),
    "qadam with memory": _compressed(
        lambda o: QAdamAlgorithm(o, False, **ONE_BIT), memory=True, fixed_sums=False
    ),
    "qadam with memory, hierarchical": _compressed(
        lambda o: QAdamAlgorithm(o, **ONE_BIT), memory=True, fixed_sums=False
    ),
    "decentralized": _decentralized((3, 1), True, "all", 2, fixed_sums=False),
    "decentralized, shift_one": _decentralized((4,), False, "shift_one", 3),
    "decentralized, shift_one in nodes": _decentralized((3, 1), True, "shift_one"),
    "decentralized, one_peer_exponential": _decentralized((5,), False, "one_peer_exponential"),
    "decentralized, hypercube": _decentralized((4,), False, "hypercube", 2),
    "decentralized, function": _decentralized(
        (2, 1, 1, 1), True, in_turn([hypercube(t, 4) for t in range(2)])
    ),
    "low_precision_decentralized": _ring((4,), False, 2),
    "low_precision_decentralized, hierarchical": _ring((1, 2, 2), compression="MXINT8"),
    "local_sgd": _local(LocalSGDAlgorithm(3, warmup_steps=2, offset=1), fixed_sums=False),
    "local_sgd, hierarchical": _local(
        LocalSGDAlgorithm(2, warmup_steps=1, hierarchical=True), fixed_sums=False
    ),
    "diloco": _local(DiLoCoAlgorithm(3)),
    "diloco, streaming": _local(
        DiLoCoAlgorithm(6, fragments=2, delay=2, mix=0.3, warmup_steps=1), fixed_sums=False
    ),
    "diloco, compressed": _local(
        DiLoCoAlgorithm(6, _adam, fragments=3, delay=1, compression="MinMaxUInt8"), compresses=True
    ),
    "diloco with memory": _local(DiLoCoAlgorithm(2, fragments=2, **ONE_BIT), True, memory=True),
    "diloco with memory, streaming": _local(
        DiLoCoAlgorithm(2, delay=1, mix=0.5, **MXFP4), True, memory=True
    ),
    "diloco, sparse": _local(
        DiLoCoAlgorithm(
            6, _adam, 3, 1, 0.3, top_k=5, chunk=4, compression="Stat2", mean="contributors"
        ),
        float64=False,
        memory=True,
    ),
    "demo": _compressed(
        lambda o: DemoAlgorithm(3, 4, 0.9, compression="Stat2"), memory=True, counts=True
    ),
    "demo with warm-up": _compressed(
        lambda o: DemoAlgorithm(2, 8, sign=False, mean="contributors", warmup_steps=2),
        memory=True,
        counts=True,
        fixed_sums=False,
    ),
    "powersgd, averaged": _powersgd(memory="averaged", warm_start=False),
    "powersgd without memory": _powersgd(memory=None, warmup_steps=3),
    "powersgd": _powersgd(2, warmup_steps=2),
    "topk": _compressed(lambda o: TopKAlgorithm(0.2), memory=True, counts=True),
    "topk with warm-up": _compressed(
        lambda o: TopKAlgorithm(0.2, warmup_steps=2), memory=True, counts=True, fixed_sums=False
    ),
    "async in warm-up": Case(
        lambda o: AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=100),
        flat=True,
        fixed_sums=False,
    ),
}


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a `network` of which a weight is not row-major."""
    module = network(seed, dtype)
    module[0].weight.data = module[0].weight.data.t().contiguous().t()
    return module


def optimizer_for(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with state, of the kind that the algorithm takes."""
    if name.startswith("qadam"):
        return QAdamOptimizer(parameters, lr=0.01, warmup_steps=3, eps=1e-4)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Run:
    """One rank's training.

    Args:
        name: of the case.
        module: what it trains; None: a `model`, other weights on each rank.
        before: the state of module and optimizer to load before wrapping.
        options: of ``with_bagua``.
    """

    def __init__(self, name: str, module: Any = None, before: Any = None, **options: Any) -> None:
        self.name, self.module = name, model(bagua_ref.get_rank()) if module is None else module
        self.optimizer = optimizer_for(
            name, [p for n, p in self.module.named_parameters() if not n.startswith("ignored")]
        )
        for part, state in zip((self.module, self.optimizer), before or (), strict=False):
            part.load_state_dict(state)
        self.wrap(**options)

    def wrap(self, **options: Any) -> None:
        """Wrap the module, again if it is wrapped."""
        options["do_flatten"] = options.get("do_flatten", True) or CASES[self.name].flat
        self.module.with_bagua([self.optimizer], CASES[self.name].make(self.optimizer), **options)

    @property
    def algorithm(self) -> Any:
        return self.module.bagua_algorithm

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of batch ``number``."""
        dtype = next(self.module.parameters()).dtype
        return self.module(batch(bagua_ref.get_rank(), number, dtype)).square().mean()  # type: ignore[no-any-return]

    def step(self, *numbers: int) -> None:
        """Take a step with each of the batches."""
        for number in numbers:
            self.optimizer.zero_grad()
            self.loss(number).backward()
            self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return weights(self.module)

    def state(self) -> list[Any]:
        """Return the states of module and optimizer, copied, and of the algorithm, which shares
        nothing with training.
        """
        return [
            *copy.deepcopy([self.module.state_dict(), self.optimizer.state_dict()]),
            self.algorithm.state_dict(),
        ]

    def load(self, state: list[Any]) -> None:
        """Load what `state` has returned."""
        self.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(copy.deepcopy(state[1]))
        self.algorithm.load_state_dict(state[2])


def assert_same(mine: Any, theirs: Any, where: str = "state") -> None:
    """Assert that two trees have the same values and bits, but for the number of forward passes."""
    if isinstance(theirs, torch.Tensor):
        assert_equal(mine, theirs, EXACT)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), where
        for key in theirs.keys() - {"train_step_counter"}:
            assert_same(mine[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{where}[{place}]")
    else:
        assert mine == theirs, where
