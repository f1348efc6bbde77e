"""Properties of plans: what they say is sent is what communicators of simulated ranks send
(S14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bagua_ref
from bagua_ref import algorithms as of
from bagua_ref.formulas import costs
from bagua_ref.formulas.graphs import hypercube, in_turn
from bagua_ref.planning import Cluster, Machine, plan_of, step_seconds
from bagua_ref.simulation import SimulatedWorld

LINK = "1Gbit,1ms,10GB,10us"
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]

ALGORITHMS: dict[str, Callable[..., Any]] = {
    # By name: of an optimizer, whether it is hierarchical, and further arguments.
    "gradient_allreduce": lambda o, h: of.GradientAllReduceAlgorithm(h),
    "bytegrad with memory": lambda o, h: of.ByteGradAlgorithm(
        h, compression="OneBit", error_feedback=True
    ),
    "qadam": lambda o, h: of.QAdamAlgorithm(o, h),
    "decentralized": lambda o, h, graph, interval: of.DecentralizedAlgorithm(h, graph, interval),
    "low_precision_decentralized": lambda o, h: of.LowPrecisionDecentralizedAlgorithm(h, 2),
    "local_sgd": lambda o, h: of.LocalSGDAlgorithm(3, warmup_steps=2, offset=1, hierarchical=h),
    "diloco, streaming": lambda o, h: of.DiLoCoAlgorithm(
        4, fragments=2, delay=1, compression="MinMaxUInt8"
    ),
    "powersgd": lambda o, h: of.PowerSGDAlgorithm(2, warmup_steps=2, min_compression_rate=0.5),
    "diloco, sparse": lambda o, h: of.DiLoCoAlgorithm(
        4, fragments=2, top_k=3, chunk=4, compression="Stat2"
    ),
    "topk": lambda o, h: of.TopKAlgorithm(0.1, warmup_steps=1),
    "demo": lambda o, h: of.DemoAlgorithm(3, 4, compression="MXFP4", warmup_steps=1),
}
WITHOUT_FLOAT64 = ("bytegrad", "qadam", "low", "diloco, s", "topk", "demo")
IN_PAIRS = ("shift_one", "hypercube", in_turn([hypercube(t, 4) for t in range(2)]))
GRAPHS = ("all", "one_peer_exponential", "ring", "exponential", *IN_PAIRS)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "256")
        yield


class Given(torch.nn.Module):
    """A module whose parameters all get gradients, with weights of zero."""

    def __init__(self, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.zeros(shape, dtype=dtype) for shape, dtype in shapes
        )

    def forward(self) -> torch.Tensor:
        return sum(weight.sum().double() for weight in self.weights)  # type: ignore[return-value]


class Training(NamedTuple):
    """An algorithm of ALGORITHMS on ranks of nodes, with the parameters of a module."""

    name: str
    shapes: list[tuple[tuple[int, ...], torch.dtype]]
    nodes: tuple[int, ...]
    hierarchical: bool
    further: tuple[Any, ...]

    def make(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, of.Algorithm]:
        optimizer = optimizer_of(self.name, module)
        return optimizer, ALGORITHMS[self.name](optimizer, self.hierarchical, *self.further)


@st.composite
def trainings(draw, name):
    dtypes = draw(
        st.sampled_from(
            [[torch.float32], DTYPES[: -1 if name.startswith(WITHOUT_FLOAT64) else None]]
        )
    )
    shape = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    shapes = draw(st.lists(st.tuples(shape, st.sampled_from(dtypes)), min_size=2, max_size=6))
    hierarchical, nodes = (
        draw(st.booleans()),
        draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
    )
    further = (
        draw(st.tuples(st.sampled_from(GRAPHS), st.integers(1, 2)))
        if name == "decentralized"
        else ()
    )
    if further and further[0] in IN_PAIRS:
        nodes = (
            draw(st.lists(st.integers(1, 2), min_size=4, max_size=4))
            if hierarchical
            else draw(st.permutations([1, 3]))
        )
    return Training(name, shapes, tuple(nodes), hierarchical, further)


def optimizer_of(name, module):
    if name == "qadam":
        return of.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.SGD(module.parameters(), lr=0.0)


def trained(training, steps, compute):
    """Let ranks take steps; return the bytes that these sent, by the ranks' communicators, their
    messages and their seconds.
    """
    wrapped = []

    def rank(comm):
        bagua_ref.init_process_group()
        module = Given(training.shapes)
        optimizer, algorithm = training.make(module)
        module.with_bagua([optimizer], algorithm)
        comm.barrier()
        if not wrapped:  # the first rank to come here, when all have been wrapped
            wrapped.extend(
                (world.timeline.messages.copy(), bagua_ref.runtime.current_world().clock())
            )
        for _ in range(steps):
            optimizer.zero_grad()
            module().backward()
            optimizer.step()
        module.bagua_algorithm.state_dict()  # waits for what is in flight
        return module.bagua_metrics()["bytes_sent"]

    world = SimulatedWorld(sum(training.nodes), training.nodes, link=LINK, compute=compute)
    return (
        sum(world.run(rank)),
        world.timeline.messages - wrapped[0],
        world.virtual_time - wrapped[1],
    )


@pytest.mark.proof
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=min(20, settings.default.max_examples // 2))
@given(data=st.data(), steps=st.integers(1, 7), compute=st.floats(0.0, 0.5))
def test_S14_1_S14_4_a_plan_has_the_messages_and_the_time_of_simulated_ranks(
    name, data, steps, compute
):
    training = data.draw(trainings(name))
    nodes = training.nodes
    with torch.device("meta"):
        module = Given(training.shapes)
        plan = plan_of(training.make(module)[1], module, nodes)
    nbytes, sent, seconds = trained(training, steps, compute)
    exchanges = [plan.exchanges(step) for step in range(1, steps + 1)]
    assert sent == Counter(
        message
        for step in exchanges
        for exchange in step
        for messages in exchange.operation
        for message in messages
    )
    counts = [plan.traffic(step) for step in range(1, steps + 1)]
    summed = costs.traffic([list(sent.elements())], Cluster(nodes).node_of)
    for rank, kinds in enumerate(summed):
        for kind, count in kinds.items():
            assert count == tuple(
                map(sum, zip(*[per_step[rank][kind] for per_step in counts], strict=True))
            )
    total = sum(
        count[rank][kind].bytes_sent
        for count in counts
        for rank in range(sum(nodes))
        for kind in count[rank]
    )
    assert abs(nbytes - total) <= sum(nodes) / 2  # each rank's mean over ranks is rounded once

    machine = Machine(costs.LinkCosts.parse(LINK), compute)
    wanted = sum(step_seconds(step, machine)[0] for step in exchanges)
    # Simulated ranks mark weights ready after the time of forward has passed, not before it.
    late = steps * compute / 3 if name == "decentralized" else 0.0
    # A round of S14.2 takes the longest of its links on all nodes; inside them, simulated nodes do
    # not wait for each other.
    weights = sum(math.prod(shape) * dtype.itemsize for shape, dtype in training.shapes)
    early = 2 * steps * weights / 10e9 if training.hierarchical and len(set(nodes)) > 1 else 0.0
    # Nor where chunks of a ring differ by an element: a round of the plan sends the largest on all.
    itemsize = max(dtype.itemsize for _, dtype in training.shapes)
    early += steps * len(training.shapes) * 2 * sum(nodes) * itemsize * 8 / 1e9
    # S14.4 takes buckets in the order of gradients, in which those of several dtypes are not; later
    # steps hide what streams.
    if name != "diloco, streaming" and len({dtype for _, dtype in training.shapes}) == 1:
        assert wanted * (1 - 1e-6) - 1e-9 - early <= seconds <= wanted * (1 + 1e-6) + 1e-9 + late
