"""Tests of training through with_bagua in the simulated world: hooks, buckets, changes to models
(S2.1, S2.5, S5).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.trainings import (
    FailsInBackward,
    batch,
    network,
    on_every_rank,
    sgd,
    simulate,
    train,
    weights,
    wrap,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AlgorithmImpl,
    ByteGradAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import CommunicationError


def by_hand(ranks: int, steps: int) -> torch.Tensor:
    """Return the weights after data-parallel SGD with momentum, computed with one model and the
    mean of the ranks' gradients.
    """
    module = network()
    optimizer = sgd(module)
    for step in range(steps):
        optimizer.zero_grad()
        sum(module(batch(rank, step)).square().mean() for rank in range(ranks)).div(
            ranks
        ).backward()
        optimizer.step()
    return weights(module)


@on_every_rank(5, nodes=(1, 2, 2))
def test_S5_2_buckets_are_aligned_to_ranks_and_leaders(r: int) -> None:
    for hierarchical, size in ((False, 85), (True, 90)):  # 83 parameters; 5 ranks, lcm(5, 3)
        module, _ = wrapped(ByteGradAlgorithm(hierarchical=hierarchical))
        assert module.bagua_buckets[0].flattened_tensor().numel() == size


@on_every_rank(1)
def test_S5_hooks_are_called_in_order_and_only_in_training(r: int) -> None:
    calls: list[str] = []

    class Spy(AlgorithmImpl):
        def need_reset(self) -> bool:
            calls.append("reset?")
            return False

        def init_forward_pre_hook(self, ctx: Any) -> Any:
            return lambda input: calls.append(f"forward {tuple(input[0].shape)}")

        def init_backward_hook(self, ctx: Any) -> Any:
            return lambda name, parameter: calls.append(name)

        def init_post_backward_hook(self, ctx: Any) -> Any:
            return lambda: calls.append("post-backward")

        def init_post_optimizer_step_hook(self, ctx: Any) -> Any:
            return lambda optimizer: calls.append(type(optimizer).__name__)

    class SpyAlgorithm(Algorithm):
        def reify(self, process_group: Any) -> Spy:
            return Spy(process_group)

    module, optimizer = wrap(network(), SpyAlgorithm(), lr=0.1)
    train(module, optimizer, r, range(1))
    assert calls[:2] == ["reset?", "forward (4, 6)"]
    assert calls[6:] == ["post-backward", "SGD"]
    assert sorted(calls[2:6]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    calls.clear()
    module.eval()
    module(batch(r, 0)).sum().backward()
    assert calls == []
    optimizer.zero_grad()
    assert module.bagua_train_step_counter == 1
    module.train()
    with module.no_sync():
        output = module(batch(r, 0))
    output.sum().backward()
    optimizer.step()
    assert calls == ["reset?"]
    assert module.bagua_train_step_counter == 2


def test_S5_a_custom_algorithm_written_as_a_user_would() -> None:
    class SignSum(AlgorithmImpl):
        """Majority vote: communicates the gradient's sign."""

        def init_operations(self, ctx: Any, bucket: BaguaBucket) -> None:
            def to_sign(name: str) -> None:
                for tensor in bucket.tensors:
                    tensor.grad.sign_()

            bucket.append_python_op(to_sign)
            bucket.append_centralized_synchronous_op(average=False)  # in the default group
            bucket.append_python_op(to_sign)

    class Majority(Algorithm):
        def __init__(self, scale: int = 1) -> None:
            self.scale = scale

        def reify(self, process_group: Any) -> SignSum:
            return SignSum(process_group)

    GlobalAlgorithmRegistry.register("majority", Majority, "signs only")
    try:

        def rank(r: int) -> torch.Tensor:
            module = nn.Linear(3, 1, bias=False)
            module.with_bagua([], Algorithm.init("majority", scale=2))
            module(torch.tensor([[1.0, -1.0, 1.0 if r else -3.0]])).sum().backward()
            return module.weight.grad

        for grad in simulate(3, rank):
            assert grad.tolist() == [[1, -1, 1]]
        assert "majority: signs only" in str(GlobalAlgorithmRegistry)
        assert "majority" in GlobalAlgorithmRegistry.available_algorithms()
        with pytest.raises(ValueError, match="'majority' is already registered"):
            GlobalAlgorithmRegistry.register("majority", GradientAllReduceAlgorithm)
    finally:
        del GlobalAlgorithmRegistry["majority"]


@on_every_rank(2)
def test_need_reset_makes_buckets_and_operations_anew_but_does_not_broadcast(r: int) -> None:
    class Resetting(AlgorithmImpl):
        made = 0
        wanted = False

        def need_reset(self) -> bool:
            wanted, self.wanted = self.wanted, False
            return wanted

        def init_operations(self, ctx: Any, bucket: BaguaBucket) -> None:
            self.made += 1
            bucket.append_centralized_synchronous_op(group=self.process_group)

    class ResettingAlgorithm(Algorithm):
        def reify(self, process_group: Any) -> Resetting:
            return Resetting(process_group)

    module, optimizer = wrapped(ResettingAlgorithm())
    train(module, optimizer, r, range(2))
    module.bagua_algorithm.wanted = True
    with torch.no_grad():
        module[0].bias[0] = r
    train(module, optimizer, r, range(2, 3))
    assert module.bagua_algorithm.made == 2
    assert module[0].bias[0].round() == r
    train(module, optimizer, r, range(3, 5))


def test_no_sync_on_a_plain_module_does_nothing() -> None:
    module = nn.Linear(2, 2)
    with module.no_sync():
        module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[1, 1], [1, 1]]


@on_every_rank(2)
def test_several_models_at_once_do_not_mix(r: int) -> None:
    (one, first), (two, second) = (
        wrapped(GradientAllReduceAlgorithm()),
        wrapped(GradientAllReduceAlgorithm()),
    )
    assert one.bagua_module_name != two.bagua_module_name
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        sum(module(batch(r, step)).square().mean() for module in (one, two)).backward()
        first.step()
        second.step()
    assert torch.equal(weights(one), weights(two))
    torch.testing.assert_close(weights(one), by_hand(2, 3))


@on_every_rank(1)
def test_S2_1_bucket_size_from_the_environment(r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(name: str = "gradient_allreduce") -> list[list[str]]:
        module = nn.Sequential(
            nn.Linear(4, 4),
            nn.Linear(4, 4).to(torch.float64),
            nn.Linear(4, 2).to(torch.bfloat16),
            nn.Linear(4, 4),
        )
        module.with_bagua([], Algorithm.init(name))
        return [
            [t.bagua_backend_tensor().name for t in bucket.tensors]
            for bucket in module.bagua_buckets
        ]

    whole = [
        ["2.bias", "2.weight"],
        ["3.bias", "3.weight", "0.bias", "0.weight"],
        ["1.bias", "1.weight"],
    ]
    assert sizes() == whole
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "64")
    assert sizes("decentralized") == whole  # S5.3: one bucket per dtype
    assert sizes() == [
        ["2.bias", "2.weight"],
        ["3.bias", "3.weight"],
        ["0.bias", "0.weight"],
        ["1.bias", "1.weight"],
    ]
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1")
    assert [len(bucket) for bucket in sizes()] == [1] * 8
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1k")
    with pytest.raises(ValueError, match="BAGUA_DEFAULT_BUCKET_SIZE='1k'"):
        sizes()


@on_every_rank(2)
def test_S2_5_post_backward_runs_once_with_a_checkpoint_in_a_checkpoint_and_around_the_module(
    r: int,
) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                lambda t: checkpoint(self.a, self.b(t), use_reentrant=True),
                self.c(x),
                use_reentrant=True,
            )

    for around in (False, True):
        module = Nested()
        module.with_bagua([], GradientAllReduceAlgorithm())
        ends = []
        original = module._bagua._post_backward_hook
        module._bagua._post_backward_hook = lambda ends=ends, original=original: (
            ends.append(1),
            original(),
        )
        x = torch.randn(2, 4, requires_grad=True)
        output = checkpoint(module, x, use_reentrant=True) if around else module(x)
        output.sum().backward()
        assert ends == [1]
        assert module.bagua_train_step_counter == 1


# in the first case there is one bucket; in the second, the layer's must wait for those of "first"
@pytest.mark.parametrize(
    ("order", "size", "fails"),
    [("layer first", "1000", False), ("layer first", "1", False), ("first layer", "1", True)],
)
@on_every_rank(1)
def test_S2_4_a_layer_in_two_reentrant_checkpoints_is_an_error_once_its_bucket_has_run(
    r: int, order: str, size: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in order.split():
                setattr(self, name, nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, self.first(x), use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", size)
    module = Twice()
    module.with_bagua([], GradientAllReduceAlgorithm())
    marked_again = pytest.raises(ValueError, match=r"'layer\.(bias|weight)' was marked again")
    with marked_again if fails else nullcontext():
        module(torch.randn(2, 4)).sum().backward()


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        return self.used(x) + (self.unused(x) if both else 0)


@on_every_rank(2)
def test_S2_5_an_unused_parameter_is_an_error_that_names_it_and_training_can_go_on_together(
    r: int,
) -> None:
    module = Partly()
    module.with_bagua([], GradientAllReduceAlgorithm())
    for _ in range(2):
        with pytest.raises(
            CommunicationError,
            match=r"bucket '0': 'unused\.bias', 'unused\.weight'.*find_unused_parameters=True",
        ):
            module(batch(r, 0)).sum().backward()
        with pytest.raises(
            CommunicationError, match=r"cannot train on: .*unused\.bias.*bagua_resynchronize"
        ):
            module(batch(r, 0), both=True)
        module.bagua_resynchronize()
        module.zero_grad()
        module(batch(r, 0), both=True).sum().backward()


def test_an_algorithm_without_a_training_says_so() -> None:
    class Unfinished(Algorithm):
        pass

    with pytest.raises(NotImplementedError, match=r"Unfinished must define reify\(process_group\)"):
        Unfinished().reify(None)
    with pytest.raises(RuntimeError, match="takes part in no training"):
        GradientAllReduceAlgorithm().reify(None).context  # noqa: B018


@on_every_rank(2)
def test_a_backend_that_cannot_run_is_refused_before_weights_are_broadcast(r: int) -> None:
    module = network(seed=r)
    with pytest.raises(ValueError, match="backend='abacus'"):
        module.with_bagua([], GradientAllReduceAlgorithm(), backend="abacus")
    assert torch.equal(module[0].weight, network(seed=r)[0].weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_after_an_exception_in_backward_alone_or_resynchronized(
    ranks: int,
) -> None:
    class Sometimes(nn.Module):
        fail = True

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(FailsInBackward.apply(x) if self.fail else x)

    def rank(r: int) -> None:
        module = Sometimes()
        module.with_bagua([], GradientAllReduceAlgorithm())
        for _ in range(2):
            module.fail = True
            with pytest.raises(ArithmeticError):
                module(batch(r, 0)).sum().backward()
            module.fail = False
            module.zero_grad()
            if ranks > 1:
                with pytest.raises(
                    CommunicationError,
                    match=r"backward passes failed after .*bagua_resynchronize\(\)",
                ):
                    module(batch(r, 0))
                module.bagua_resynchronize()
            module(batch(r, 0)).sum().backward()

    simulate(ranks, rank)


BAD_ARGUMENTS: list[Any] = [
    (
        {"algorithm": torch.optim.SGD},
        TypeError,
        "algorithm=.*SGD.* must be an Algorithm or a registered name",
    ),
    ({"algorithm": "bytegrd"}, ValueError, "did you mean .bytegrad."),
    ({"optimizers": None}, TypeError, "optimizers=None"),
    ({"optimizers": ["SGD"]}, TypeError, r"optimizers=\['SGD'\]"),
    ({"process_group": 3}, TypeError, "process_group=3"),
    ({"timeout": 0}, ValueError, "timeout=0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
@on_every_rank(2)
def test_bad_arguments_are_refused(
    r: int, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    module = network()
    with pytest.raises(error, match=message):
        module.with_bagua(
            **{"optimizers": [], "algorithm": GradientAllReduceAlgorithm(), **arguments}
        )
    module.with_bagua([], GradientAllReduceAlgorithm())
    module(batch(r, 0)).sum().backward()


def frozen() -> nn.Module:
    return nn.Linear(4, 2).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "frozen": (frozen, ValueError, "no parameter that needs a gradient"),
    "empty": (nn.ReLU, ValueError, "no parameter that needs a gradient"),
    "not initialized": (lambda: nn.LazyLinear(2), ValueError, "'weight' is not initialized yet"),
    "sparse": (
        lambda: nn.Embedding(4, 2, sparse=True),
        NotImplementedError,
        "'weight' .* sparse gradients",
    ),
    "complex": (
        lambda: nn.Linear(4, 2, dtype=torch.complex64),
        TypeError,
        "'weight' is torch.complex64.*view_as_real",
    ),
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 2)), NotImplementedError, "takes no hooks"),
}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_one_rank_cannot_train_is_refused_on_every_rank_at_once(
    kind: str, algorithm: str
) -> None:
    make, error, message = REFUSED[kind]

    def rank(r: int) -> torch.Tensor:
        for _ in range(2):
            module = make() if r == 1 else network()
            with pytest.raises(error if r == 1 else ValueError, match=message) as refused:
                type(network()).with_bagua(module, [], Algorithm.init(algorithm))
            assert r == 1 or "rank 1 cannot train its module" in str(refused.value)
        # the ranks' next call is the same one
        module = network().with_bagua([], Algorithm.init(algorithm))  # type: ignore[operator]
        module(batch(r, 0)).sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    first, *others = simulate(3, rank)
    assert all(torch.equal(first, other) for other in others)


@on_every_rank(2)
def test_an_algorithm_that_one_rank_cannot_use_is_refused_on_every_rank(r: int) -> None:
    module = network()
    optimizers = [sgd(module)] if r else []
    with pytest.raises(ValueError, match="local_sgd"):
        module.with_bagua(optimizers, Algorithm.init("local_sgd", period=1))


class Spectral(nn.Module):
    """Has complex weights by the recipe of the error, and others that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.view_as_real(torch.randn(4, dtype=torch.complex64)))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("phases", torch.ones(4, dtype=torch.complex64))
        self.ignored = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self._bagua_params_and_buffers_to_ignore = ["ignored"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (torch.view_as_complex(self.weight) * self.frozen * self.phases * x)
            .abs()
            .square()
            .mean()
        )


@on_every_rank(2)
def test_S2_1_complex_weights_train_as_the_error_says(r: int) -> None:
    module = Spectral()
    with torch.no_grad():
        module.phases.fill_(1 + r)
    _, optimizer = wrap(module, GradientAllReduceAlgorithm(), lr=0.1)
    assert torch.equal(module.phases, torch.ones(4, dtype=torch.complex64))
    for step in range(3):
        optimizer.zero_grad()
        module(torch.full((4,), 1.0 + r + step)).backward()
        optimizer.step()
    alone = Spectral()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(alone(torch.full((4,), 1.0 + r + step)) for r in range(2)) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(module.weight.detach().clone(), alone.weight.detach())


class LookUp(nn.Module):
    """Gets sparse gradients from the function, which no attribute tells; its own ``sparse`` means
    something else.
    """

    sparse = True

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self._sparse = nn.Parameter(torch.randn(5, 3)), sparse

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.weight, sparse=self._sparse)


class Scaled(nn.Embedding):
    """An embedding with a parameter of its own, which gets dense gradients."""

    def __init__(self) -> None:
        super().__init__(5, 3, sparse=True)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * self.factor


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized", "local_sgd"])
@on_every_rank(2)
def test_S2_1_only_an_embeddings_sparse_counts(r: int, name: str) -> None:
    algorithm = Algorithm.init(name, **({"period": 2} if name == "local_sgd" else {}))
    for made in (nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True), Scaled()):
        with pytest.raises(NotImplementedError, match=r"'0\.weight'.*sparse=False"):
            nn.Sequential(made).with_bagua([], algorithm)
    module = nn.Sequential(LookUp(sparse=False), Scaled())
    module[1]._bagua_params_and_buffers_to_ignore = module._bagua_params_and_buffers_to_ignore = [
        "1.weight",
        "weight",
    ]
    for part in module:
        _, optimizer = wrap(part, algorithm, lr=0.1)
        part(torch.tensor([r, 1 + r])).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "powersgd", "topk"])
@on_every_rank(2)
def test_S2_1_a_sparse_gradient_that_comes_all_the_same_is_refused_by_name(
    r: int, name: str, do_flatten: bool
) -> None:
    module = LookUp()
    module.with_bagua(
        [torch.optim.SGD(module.parameters(), lr=0.1)], Algorithm.init(name), do_flatten=do_flatten
    )
    with pytest.raises(NotImplementedError, match=r"'weight' is torch\.sparse_coo.*sparse=False"):
        module(torch.tensor([r, 1 + r])).square().sum().backward()


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "bytegrd",
            {},
            ValueError,
            (
                r"name='bytegrd' is not a registered algorithm \(did you mean 'bytegrad'\?\); there"
                r" are 'async'"
            ),
        ),
        (
            "bytegrad",
            {"hierarchial": True},
            TypeError,
            r"hierarchial=True is no option of bytegrad \(did you mean 'hierarchical'\?\)",
        ),
        ("topk", {"zzz": 1}, TypeError, r"zzz=1 is no option of topk; there are 'ratio'"),
        ("gradient_allreduce", {"averages": 1}, TypeError, "there are 'hierarchical', 'average'$"),
    ],
)
def test_a_misspelt_name_or_option_suggests_the_right_one(
    name: str, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        Algorithm.init(name, **options)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "diloco", "qadam"])
@on_every_rank(2)
def test_an_algorithm_is_given_by_its_name_and_one_optimizer_by_itself(r: int, name: str) -> None:
    modules = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    modules[1].load_state_dict(modules[0].state_dict())
    make = QAdamOptimizer if name == "qadam" else torch.optim.SGD
    optimizers = [make(module.parameters(), lr=0.1) for module in modules]
    options = {"q_adam_optimizer": optimizers[1]} if name == "qadam" else {}
    modules[0].with_bagua(optimizers[0], name)
    modules[1].with_bagua([optimizers[1]], Algorithm.init(name, **options))
    for module, optimizer in zip(modules, optimizers, strict=True):
        module(torch.arange(3.0) + r).sum().backward()
        optimizer.step()
    assert (
        repr(modules[0]._bagua.algorithm).partition("optimizer")[0]
        == repr(modules[1]._bagua.algorithm).partition("optimizer")[0]
    )
    assert torch.equal(modules[0].weight, modules[1].weight)


@on_every_rank(1)
def test_qadam_by_its_name_needs_its_own_optimizer(r: int) -> None:
    module = torch.nn.Linear(3, 2)
    with pytest.raises(
        ValueError,
        match="algorithm='qadam' needs exactly one optimizer, a QAdamOptimizer; there are: SGD",
    ):
        module.with_bagua(torch.optim.SGD(module.parameters()), "qadam")


def test_what_cannot_be_an_algorithm_is_not_registered() -> None:
    with pytest.raises(TypeError, match="name=3 must be a string"):
        GlobalAlgorithmRegistry.register(3, GradientAllReduceAlgorithm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="algorithm=3 must be an Algorithm class"):
        GlobalAlgorithmRegistry.register("three", 3)  # type: ignore[arg-type]
    assert "three" not in GlobalAlgorithmRegistry


@pytest.mark.proof
@on_every_rank(1024)
def test_1024_ranks_train(r: int) -> float:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 9))  # 2,509 parameters
    _, optimizer = wrap(module, GradientAllReduceAlgorithm(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        module(torch.full((2, 40), float(r + step) / 1024)).square().mean().backward()
        optimizer.step()
    return weights(module).sum().item()


@on_every_rank(4)
def test_a_models_group_counts_the_bytes_of_everything_it_sends(r: int) -> None:
    module = nn.Linear(6, 4, bias=False)  # 96 bytes of gradient
    module.with_bagua([], GradientAllReduceAlgorithm())
    group = module._bagua.process_group
    before = group.bytes_sent
    for step in range(3):
        module(batch(r, step)).sum().backward()
    one = group.bytes_sent - before
    sibling = group.sibling()
    sibling.get_global_communicator().broadcast(torch.zeros(8), 0)
    # All-reduce sends 2 (n-1)/n of 96 bytes, three times; broadcast (n-1)/n of 32.
    assert (one, group.bytes_sent - before - one) == (3 * 2 * 72, 24)


@on_every_rank(3)
def test_means_over_ranks_are_rounded_once_for_all_communicators(r: int) -> None:
    group = bagua_ref.new_group()
    for comm in (group.get_global_communicator(), group.get_intra_node_communicator()):
        comm.broadcast(torch.zeros(1), 0)  # 8/3 bytes
    assert group.bytes_sent == 5
