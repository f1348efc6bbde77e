"""Properties of local SGD and DiLoCo in simulated worlds: bits equal to the second implementation's, identities, restarts (S9)."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import adversarial, inputs, name_of
from property_tests.test_qadam import Given

import bagua_ref
from bagua_ref.algorithms import DiLoCoAlgorithm, GradientAllReduceAlgorithm, LocalSGDAlgorithm
from bagua_ref.algorithms.fragments import Fragment, FragmentSchedule, split_into_fragments
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import local_updates_numpy as oracle
from bagua_ref.conformance.inputs.strategies import worlds
from bagua_ref.simulation import SimulatedWorld

STEPS = 12
LR = 0.5  # a power of two: its products are exact, so that torch's fused addition rounds as two operations do

shapes = st.sampled_from([(), (0,), (1,), (3, 2), (17,), (2, 1, 5)])
dtypes = st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), min_size=1, max_size=4)


class Problem:
    """Weights at the beginning, and gradients by step, rank and parameter."""

    def __init__(self, nodes, weights, seed, steps=STEPS):
        self.nodes, self.weights = nodes, weights
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [
            [[torch.randn(w.shape, generator=generator).to(w.dtype) for w in weights] for _ in range(sum(nodes))]
            for _ in range(steps)
        ]

    def train(self, algorithm, seed=0, bucket_size=2**20, look=lambda module: None):
        """Return by rank and step the weights, and what ``look(module)`` returns."""

        def rank(comm):
            bagua_ref.init_process_group()
            module = Given(self.weights)
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            module.with_bagua([optimizer], algorithm)
            seen = []
            for gradients in self.gradients:
                optimizer.zero_grad()
                module(gradients[comm.rank()]).backward()
                optimizer.step()
                seen.append(([w.detach().clone() for w in module.weights], look(module)))
            return seen

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_size))
            return SimulatedWorld(sum(self.nodes), nodes=self.nodes, seed=seed).run(rank)

    @property
    def names(self):
        return [name_of(w.dtype) for w in self.weights]

    def for_oracle(self):
        """Return start and gradients as NumPy arrays."""

        def array(t):
            return (t if t.dtype is torch.float64 else t.float()).reshape(-1).numpy()

        gradients = [[[array(g) for g in rank] for rank in ranks] for ranks in self.gradients]
        return [array(w) for w in self.weights], gradients


@st.composite
def problems(draw, nodes=worlds(6), kinds=dtypes):  # noqa: B008
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(draw(shapes), generator=generator).to(dtype) for dtype in draw(kinds)]
    return Problem(draw(nodes), weights, seed)


def assert_same(found, expected, tolerance=EXACT, magnitude=None):
    for mine, numbers in zip(found, expected, strict=True):
        wanted = torch.as_tensor(numbers).to(mine.dtype).reshape(mine.shape)
        assert_equal(mine, wanted, tolerance, magnitude=magnitude)


buckets = st.sampled_from([1, 40, 2**20])


@given(
    problem=problems(),
    period=st.integers(1, 5),
    warmup_steps=st.integers(0, 4),
    offset=st.integers(0, 4),
    hierarchical=st.booleans(),
    bucket_size=buckets,
    seed=st.integers(0, 2**32),
)
def test_S9_1_local_sgd_follows_the_oracle(problem, period, warmup_steps, offset, hierarchical, bucket_size, seed):
    options = {"period": period, "warmup_steps": warmup_steps, "offset": offset % period, "hierarchical": hierarchical}
    results = problem.train(LocalSGDAlgorithm(**options), seed, bucket_size)
    start, gradients = problem.for_oracle()
    history = oracle.local_sgd(start, gradients, LR, problem.names, list(problem.nodes), **options)
    for (rank, seen), step in itertools.product(enumerate(results), range(STEPS)):
        assert_same(seen[step][0], history[step][rank])


@st.composite
def streams(draw, count, kinds):
    """Options of DiLoCo for ``count`` parameters."""
    fragments = draw(st.integers(1, count))
    gap = draw(st.integers(1, 4))
    options = {
        "period": gap * fragments,
        "fragments": fragments,
        "delay": draw(st.integers(0, gap - 1)),
        "mix": draw(st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.9, 1.0])),
        "warmup_steps": draw(st.integers(0, 3)),
    }
    if draw(st.booleans()):  # lists of names instead of a number
        order = draw(st.permutations(range(count)))
        cuts = [0, *sorted(draw(st.permutations(range(1, count)))[: fragments - 1]), count]
        options["fragments"] = [[f"weights.{i}" for i in order[a:b]] for a, b in itertools.pairwise(cuts)]
    if torch.float64 not in kinds and draw(st.booleans()):
        options["compression"] = "MinMaxUInt8"
    return options


OUTER = {
    "default": None,
    "plain": lambda tensors: torch.optim.SGD(tensors, lr=1.0),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.1),
}


def g_of(module):
    return module.bagua_algorithm.state_dict()["global_weights"]


@given(data=st.data(), problem=problems(), outer=st.sampled_from(list(OUTER)), bucket_size=buckets, seed=st.integers(0, 2**32))
def test_S9_4_diloco_follows_the_oracle_on_every_rank(data, problem, outer, bucket_size, seed):
    count = len(problem.weights)
    options = data.draw(streams(count, {w.dtype for w in problem.weights}))
    algorithm = DiLoCoAlgorithm(outer_optimizer=OUTER[outer], **options)
    results = problem.train(algorithm, seed, bucket_size, g_of)
    start, gradients = problem.for_oracle()
    given_fragments, known = options.pop("fragments"), [f"weights.{place}" for place in range(count)]
    if isinstance(given_fragments, int):
        places = oracle.fragment_of([w.nbytes for w in problem.weights], given_fragments)
        found = [[i for i in range(count) if places[i] == p] for p in range(given_fragments)]
    else:
        found = [[known.index(name) for name in names] for names in given_fragments]
    default = lambda tensors: torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)  # noqa: E731
    ranks = sum(problem.nodes)
    theirs = oracle.DiLoCo(start, ranks, LR, problem.names, found, OUTER[outer] or default, **options)
    for step, grads in enumerate(gradients):
        theirs.step(grads)
        for rank, seen in enumerate(results):
            weights, g = seen[step]
            assert_same(weights, theirs.ranks[rank])
            assert (g is None) == (theirs.g is None)
            if g is not None:
                assert_same([g[name] for name in known], theirs.g)


@inputs(3)
@given(seed=st.integers(0, 2**32), nodes=st.sampled_from([(64,), (16, 48), (1, 31, 32)]))
def test_S9_4_sixty_four_ranks_agree_on_g_to_the_bit(seed, nodes):
    weights = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)), torch.zeros(3)]
    problem = Problem(nodes, weights, seed, steps=7)
    results = problem.train(DiLoCoAlgorithm(period=4, fragments=2, delay=1, mix=0.0), seed, look=g_of)
    for seen in results[1:]:
        for (_, g), (_, first) in zip(seen, results[0], strict=True):
            assert all(torch.equal(g[name], first[name]) for name in g)
    for step, names in ((1, ["weights.0"]), (3, ["weights.1"]), (5, ["weights.0"])):  # after an apply, x is g
        for seen in results:
            now = dict(zip(["weights.0", "weights.1"], seen[step][0], strict=True))
            assert all(torch.equal(now[name], seen[step][1][name]) for name in names)


@given(sizes=st.lists(st.integers(0, 2**40) | st.integers(0, 9), min_size=1, max_size=40), data=st.data())
@example(sizes=[0, 0, 0], data=None)
def test_S9_3_fragments_are_in_order_and_none_is_empty(sizes, data):
    count = 2 if data is None else data.draw(st.integers(1, len(sizes)))
    found = split_into_fragments(sizes, count)
    assert found == oracle.fragment_of(sizes, count)
    assert found == sorted(found)
    assert set(found) == set(range(count))


@given(count=st.integers(1, 6), gap=st.integers(1, 6), data=st.data())
def test_S9_4_a_period_sends_and_applies_each_fragment_once_and_at_most_one_is_in_flight(count, gap, data):
    schedule = FragmentSchedule(period=count * gap, count=count, delay=data.draw(st.integers(0, gap - 1)))
    in_flight, applied = None, []
    for step in range(1, 3 * schedule.period + 1):
        for p in range(count):  # as S9.4 prints it
            assert (schedule.sent_after(step) == p) == ((step - ((p + 1) * gap - schedule.delay)) % schedule.period == 0)
            assert (schedule.applied_after(step) == p) == ((step - (p + 1) * gap) % schedule.period == 0)
        if (sent := schedule.sent_after(step)) is not None:
            assert in_flight is None
            in_flight = sent
        if (now := schedule.applied_after(step)) is not None:
            assert in_flight == now
            applied.append(now)
            in_flight = None
    assert applied == list(range(count)) * 3


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mix=st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1),
    data=st.data(),
)
def test_S9_4_mixing_rounds_each_operation_for_any_numbers(dtype, mix, data):
    x = data.draw(adversarial(dtype, 12, finite=True))
    g = data.draw(adversarial(dtype if dtype is torch.float64 else torch.float32, 12, finite=True))
    fragment = Fragment(["x"], [torch.nn.Parameter(x.clone())], OUTER["plain"])
    with torch.no_grad():
        fragment.copies[0].copy_(g)
    fragment.mix(mix)
    with np.errstate(all="ignore"):
        wanted = oracle.mixed(x.to(g.dtype).numpy(), g.numpy(), mix, name_of(dtype))
    assert_same(fragment._parameters, [wanted])


exact = st.just([torch.float32]) | st.just([torch.float64, torch.float32])


def close(problem, found, expected):
    """Compare trainings that differ by rounding: in each step of a few sums of n numbers, or of weights."""
    known = [w for seen in found for weights, _ in seen for w in weights if w.numel()]
    size = max((w.abs().max().item() for w in known), default=0.0) + 1
    for seen, wanted in zip(found, expected, strict=True):
        for (mine, _), (other, _) in zip(seen, wanted, strict=True):
            assert_same(mine, other, SUM(4 * STEPS * sum(problem.nodes)), size)


@inputs(15)
@given(problem=problems(kinds=exact))
def test_S9_6_a_period_of_one_step_and_a_plain_outer_optimizer_is_gradient_averaging(problem):
    close(problem, problem.train(DiLoCoAlgorithm(1, OUTER["plain"])), problem.train(GradientAllReduceAlgorithm()))


@inputs(15)
@given(problem=problems(kinds=exact), period=st.integers(1, 5), warmup_steps=st.integers(0, 3))
def test_S9_6_with_a_plain_outer_optimizer_it_is_local_sgd(problem, period, warmup_steps):
    diloco = DiLoCoAlgorithm(period, OUTER["plain"], warmup_steps=warmup_steps)
    close(problem, problem.train(diloco), problem.train(LocalSGDAlgorithm(period, warmup_steps)))


@inputs(25)
@given(data=st.data(), problem=problems(nodes=st.just((1,)), kinds=exact))
def test_S9_6_one_rank_with_a_plain_outer_optimizer_trains_plainly(data, problem):
    options = data.draw(streams(len(problem.weights), set()))
    options.update(delay=0, compression=None)
    plain = problem.train(GradientAllReduceAlgorithm())
    close(problem, problem.train(DiLoCoAlgorithm(outer_optimizer=OUTER["plain"], **options)), plain)


@inputs(25)
@given(data=st.data(), problem=problems())
def test_S9_6_in_the_warm_up_it_is_gradient_allreduce_and_before_the_first_apply_training_alone(data, problem):
    options = data.draw(streams(len(problem.weights), {w.dtype for w in problem.weights}))
    warmup, gap = (
        options["warmup_steps"],
        options["period"] // (options["fragments"] if isinstance(options["fragments"], int) else len(options["fragments"])),
    )
    averaged = problem.train(GradientAllReduceAlgorithm())
    for algorithm in (DiLoCoAlgorithm(**options), LocalSGDAlgorithm(gap, warmup_steps=warmup)):
        for rank, seen in enumerate(problem.train(algorithm)):
            weights = problem.weights
            for step in range(min(warmup + gap - 1, STEPS)):
                if step < warmup:
                    weights = averaged[rank][step][0]
                else:
                    alone = [torch.nn.Parameter(w.clone()) for w in weights]
                    for w, gradient in zip(alone, problem.gradients[step][rank], strict=True):
                        w.grad = gradient.clone()
                    torch.optim.SGD(alone, lr=LR).step()
                    weights = [w.detach() for w in alone]
                assert_same(seen[step][0], weights)


class Run:
    """One rank's training on batches, with an inner and an outer optimizer that have state."""

    def __init__(self, algorithm):
        torch.manual_seed(bagua_ref.get_rank())  # wrapping or loading makes ranks agree
        self.module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.1)
        self.module.with_bagua([self.optimizer], algorithm)
        self.parts = (self.module, self.optimizer, self.module.bagua_algorithm)

    def step(self, number):
        generator = torch.Generator().manual_seed(100 * bagua_ref.get_rank() + number)
        self.optimizer.zero_grad()
        self.module(torch.randn(5, 3, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def save(self):
        return copy.deepcopy([part.state_dict() for part in self.parts])

    def load(self, saved):
        for part, state in zip(self.parts, copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)


def simulate(ranks, function, seed=0):
    def main(comm):
        bagua_ref.init_process_group()
        return function(comm.rank())

    return SimulatedWorld(ranks, nodes=(1, ranks - 1), seed=seed).run(main)


RESTARTED = {
    "local_sgd": LocalSGDAlgorithm(3, warmup_steps=2, offset=1),
    "hierarchical": LocalSGDAlgorithm(2, warmup_steps=1, hierarchical=True),
    "diloco": DiLoCoAlgorithm(3, warmup_steps=2),
    "streaming": DiLoCoAlgorithm(8, fragments=2, delay=3, mix=0.3, warmup_steps=2),
    "compressed": DiLoCoAlgorithm(9, fragments=3, delay=1, compression="MinMaxUInt8", outer_optimizer=OUTER["adam"]),
}


@pytest.mark.parametrize("algorithm", RESTARTED.values(), ids=RESTARTED)
@inputs(4)
@given(seed=st.integers(0, 2**32))
def test_S9_a_restart_at_any_step_equals_an_undisturbed_run_to_the_bit(algorithm, seed):
    steps = 14

    def undisturbed(rank):
        run = Run(algorithm)
        states = [run.save()]
        for number in range(steps):
            run.step(number)
            states.append(run.save())
        return states

    def restarted(rank, at):
        run = Run(algorithm)
        run.step(99)  # a script may have trained before it loads
        run.load(expected[rank][at])
        for number in range(at, min(at + 5, steps)):  # until the next apply at the latest
            run.step(number)
        return run.save()

    def untouched(rank):
        run = Run(algorithm)
        for number in range(steps):
            run.step(number)
        return run.save()

    expected = simulate(3, undisturbed, seed)
    for mine, wanted in zip(simulate(3, untouched, seed), expected, strict=True):
        assert_states_equal(mine, wanted[-1])  # saving changes nothing
    for at in range(steps):
        for mine, wanted in zip(simulate(3, lambda rank, at=at: restarted(rank, at), seed + at), expected, strict=True):
            assert_states_equal(mine, wanted[min(at + 5, steps)])


def assert_states_equal(mine, theirs, where="state"):
    if isinstance(theirs, torch.Tensor):
        assert_equal(mine, theirs, EXACT)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), where
        for key in theirs:
            if key != "train_step_counter":  # Run.step(99) before loading counts forwards alone
                assert_states_equal(mine[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_states_equal(a, b, f"{where}[{place}]")
    else:
        assert mine == theirs, where
