"""Tests of DistributedDataParallel: torch's interface over the same wrapping as with_bagua (S5)."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.trainings import equal, on_every_rank, sgd, simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.data_parallel import DistributedDataParallel, distributed
from bagua_ref.errors import CommunicationError, NotInitializedError, NotProvidedError
from bagua_ref.simulation import SimulatedWorld


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return 2 + torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def state_of(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in [*module.parameters(), *module.buffers()]]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        optimizer.step()


def assert_near(state: list[torch.Tensor], expected: list[torch.Tensor], roundings: int) -> None:
    for ours, theirs in zip(state, expected, strict=True):
        # Each step adds the rounding error of one mean to weights and statistics of magnitude at
        # most about 10.
        assert_equal(ours, theirs, SUM(roundings), magnitude=10.0)


# Results


@pytest.mark.slow
@pytest.mark.parametrize(("nranks", "gradient_as_bucket_view"), [(2, False), (4, True)])
@on_every_process()
def test_S5_1_the_wrapper_gives_torch_ddps_weights_and_buffers_after_20_steps(
    nranks: int, gradient_as_bucket_view: bool
) -> None:
    states, rank = [], bagua_ref.get_rank()
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = kind(network(seed=rank), gradient_as_bucket_view=gradient_as_bucket_view)
        train(model, sgd(model), rank, range(20))
        assert (
            not hasattr(model, "inner")
            or model.bagua_buckets[0].check_flatten() is gradient_as_bucket_view
        )
        states.append(state_of(model))
    assert_near(*states, roundings=20 * nranks)


@pytest.mark.slow
@on_every_process(2)
def test_gradient_accumulation_in_a_torch_group_is_as_with_torchs_class() -> None:
    states, rank = [], bagua_ref.get_rank()
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = kind(
            network(seed=rank), process_group=dist.new_group([0, 1]), find_unused_parameters=True
        )
        optimizer = sgd(model)
        for step in range(0, 12, 3):
            optimizer.zero_grad()
            with model.no_sync():
                for k in range(2):
                    model(batch(rank, step + k)).square().mean().backward()
            model(batch(rank, step + 2)).square().mean().backward()
            optimizer.step()
        # Which forward broadcasts after no_sync() differs, but rank 0's state does not.
        states.append(
            state_of(model) if rank == 0 else [p.detach().clone() for p in model.parameters()]
        )
    assert_near(*states, roundings=12 * 2)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
@on_every_rank(3)
def test_it_is_with_bagua_bit_for_bit(r: int, name: str) -> None:
    states = []
    for wraps in (True, False):
        module = network(seed=r)
        optimizer = sgd(module)
        arguments = ([optimizer], Algorithm.init(name))
        model = (
            DistributedDataParallel(
                module, optimizers=arguments[0], algorithm=arguments[1], broadcast_buffers=False
            )
            if wraps
            else module.with_bagua(*arguments)
        )
        train(model, optimizer, r, range(4))
        states.append(state_of(model))
    ours, plain = states
    for one, other in zip(ours, plain, strict=True):
        assert_equal(one, other, EXACT)


def test_a_step_may_go_through_the_wrapper_or_through_the_module_inside() -> None:
    def rank(r: int, alternate: bool) -> list[torch.Tensor]:
        model = DistributedDataParallel(network())
        optimizer = sgd(model)
        for step in range(4):
            train(
                model.module if alternate and step % 2 else model,
                optimizer,
                r,
                range(step, step + 1),
            )
        assert model.bagua_train_step_counter == 4
        return state_of(model)

    for mixed, usual in zip(
        *(simulate(2, lambda r, a=a: rank(r, a)) for a in (True, False)), strict=True
    ):
        assert all(map(torch.equal, mixed, usual))


@on_every_rank(2)
def test_every_hook_is_there_once_also_after_wrapping_again(r: int) -> None:
    module = network().with_bagua([], GradientAllReduceAlgorithm())
    model = DistributedDataParallel(module)
    assert model.with_bagua([], ByteGradAlgorithm()) is model
    for hooks in [
        module._forward_pre_hooks,
        *(p._post_accumulate_grad_hooks for p in module.parameters()),
    ]:
        assert len(hooks) == 1
    assert not model._forward_pre_hooks
    model.bagua_resynchronize()
    model(batch(r, 0)).sum().backward()
    assert model.bagua_train_step_counter == 1
    with pytest.raises(ValueError, match=r"module\.module is wrapped already"):
        DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"module\.0 is wrapped already"):
        nn.Sequential(module).with_bagua([], GradientAllReduceAlgorithm())


@on_every_rank(2)
def test_inputs_and_outputs_of_any_kind_pass_through(r: int) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, *, scale: float, skip: bool = False) -> dict[str, Any]:
            return {"y": self.layer(x) * scale, "skipped": skip}

    model = DistributedDataParallel(Several())
    result = model(torch.ones(1, 2), scale=2.0, skip=True)
    result["y"].sum().backward()
    assert (result["skipped"], model.module.layer.weight.grad.tolist()) == (True, [[2.0, 2.0]])


@on_every_rank(2)
def test_its_options_reach_the_training(r: int) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    strict = DistributedDataParallel(Partly())
    with pytest.raises(CommunicationError, match=r"unused\.bias"):
        strict(batch(r, 0)).sum().backward()
    model = DistributedDataParallel(
        Partly(), find_unused_parameters=True, timeout=7.0, backend="reference"
    )
    model(batch(r, 0)).sum().backward()
    assert model.module.unused.weight.grad is None
    assert model.inner.engine._worker.timeout == 7.0
    assert model.bagua_buckets[0].backend == "reference"
    small = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5))),
        bucket_cap_mb=2048 / 2**20,
    )
    assert [bucket.bytes() for bucket in small.bagua_buckets] == [2048, 2048, 1024]
    small.with_bagua([], ByteGradAlgorithm())
    assert len(small.bagua_buckets) == 3
    assert small.inner.bucket_bytes == 2048
    default = DistributedDataParallel(nn.Linear(2, 2))
    assert default.inner.bucket_bytes == 25 * 1024**2
    # newer torch's defaults
    torchs = DistributedDataParallel(nn.BatchNorm1d(2), bucket_cap_mb=None, broadcast_buffers=None)
    assert torchs.inner.bucket_bytes == 25 * 1024**2
    assert torchs.broadcast_buffers is torchs.will_sync_module_buffers() is True


@on_every_rank(1)
def test_it_names_what_with_bagua_names(r: int) -> None:
    module, optimizers = network(), [torch.optim.SGD(network().parameters(), lr=1.0)]
    module._ddp_params_and_buffers_to_ignore = ["0.bias", "1.running_mean"]
    model = DistributedDataParallel(module, optimizers=optimizers)
    assert model.module is module
    assert model.parameters_to_ignore == {"0.bias", "1.running_mean"}
    assert model.bagua_optimizers == optimizers
    assert type(model.bagua_algorithm).__name__ == "GradientAllReduceAlgorithmImpl"
    assert model.bagua_buckets is module.bagua_buckets
    assert model.inner.module is module
    assert model.bagua_module_name == module.bagua_module_name
    assert model.device == torch.device("cpu")
    assert model.process_group is bagua_ref.groups.communication._get_default_group()
    assert model.inner.process_group is not model.process_group


# Communication


def buffers_after(r: int, mode: str) -> list[float]:
    """Return the buffer during and after a forward in ``mode``; each rank adds its number to it."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("ignored", torch.zeros(()))
            self.seen: list[float] = []
            self._bagua_params_and_buffers_to_ignore = ["ignored"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.count.item())
            self.count += 1 + r
            self.ignored += r
            return self.layer(x)

    model = DistributedDataParallel(Counting(), broadcast_buffers=mode != "off")
    assert model.will_sync_module_buffers() is (mode != "off")
    model(torch.ones(1, 2))
    if mode == "eval":
        model.eval()
    if mode == "no_sync":
        with model.no_sync():
            assert not model.will_sync_module_buffers()
            model(torch.ones(1, 2))
    elif mode == "attribute":
        model.require_backward_grad_sync = False
        assert not model.will_sync_module_buffers()
        model(torch.ones(1, 2))
        model.require_backward_grad_sync = True
    elif mode == "replaced":
        model.module.count = model.module.count + 10 * r
        model(torch.ones(1, 2))
    else:
        model(torch.ones(1, 2))
    model.train()
    model(torch.ones(1, 2))
    assert model.module.ignored == 3 * r
    return model.module.seen


@pytest.mark.parametrize(
    ("mode", "seen"),
    [
        ("on", [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
        ("replaced", [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
        ("off", [[0, 1, 2], [0, 2, 4], [0, 3, 6]]),
        ("eval", [[0, 1, 2], [0, 2, 2], [0, 3, 2]]),
        ("no_sync", [[0, 1, 2], [0, 2, 2], [0, 3, 2]]),
        ("attribute", [[0, 1, 2], [0, 2, 2], [0, 3, 2]]),
    ],
)
def test_S5_buffers_are_broadcast_before_training_forwards_outside_no_sync(
    mode: str, seen: list[list[float]]
) -> None:
    assert simulate(3, lambda r: buffers_after(r, mode)) == seen


@on_every_rank(2)
def test_two_forwards_may_come_before_a_backward(r: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    # Batch normalisation saves its statistics for backward: autograd must not take the broadcast
    # for a change of them.
    (model(batch(r, 0)).sum() + model(batch(r, 1)).square().sum()).backward()
    assert any(parameter.grad.any() for parameter in model.parameters())
    return [parameter.grad for parameter in model.parameters()]


def test_a_wrapper_without_buffers_or_without_other_ranks_makes_no_connections_for_them() -> None:
    def rank(r: int) -> tuple[bool, bool]:
        bare, full = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(network())
        full(batch(r, 0)).sum().backward()
        assert not bare.will_sync_module_buffers()
        return bare.inner.buffers.group is None, full.inner.buffers.group is None

    assert simulate(2, rank) == [(True, False)] * 2
    assert simulate(1, rank) == [(True, True)]


def test_S5_6_with_async_ranks_keep_their_own_buffers_after_warm_up_and_need_not_keep_step() -> (
    None
):
    def rank(r: int) -> tuple[list[bool], float]:
        module = network(seed=r)
        optimizer = sgd(module)
        algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=10, warmup_steps=2)
        model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm)
        syncs = []
        for step in range(4 + 3 * r):
            syncs.append(model.will_sync_module_buffers())
            train(model, optimizer, r, range(step, step + 1))
        model.bagua_algorithm.abort(model)
        model.bagua_algorithm.resume(model)
        model.bagua_algorithm.abort(model.inner)
        return syncs[:5], module[1].running_mean.sum().item()

    (syncs, first), (_, second) = simulate(2, rank)
    assert syncs == [True, True, True, False]  # read before the forward that ends the warm-up
    assert first != second


def test_S5_a_group_of_some_ranks_trains_alone() -> None:
    def rank(r: int, *ranks: int) -> list[torch.Tensor] | None:
        group = bagua_ref.new_group(ranks)
        if r not in ranks:
            with pytest.raises(ValueError, match=f"does not hold this rank, {r}"):
                DistributedDataParallel(network(), process_group=group)
            return None
        model = DistributedDataParallel(network(seed=r), process_group=group)
        assert model.process_group is group
        train(model, sgd(model), ranks.index(r), range(3))
        return state_of(model)

    zero, _, two = simulate(3, lambda r: rank(r, 0, 2))
    assert equal([zero, two], simulate(2, lambda r: rank(r, 0, 1)))


# State dicts and copies


@on_every_rank(1)
def test_state_dict_has_torchs_names_and_load_state_dict_takes_both(r: int) -> None:
    model, torchs = DistributedDataParallel(network()), network(seed=1)
    assert [*model.state_dict()] == [f"module.{name}" for name in torchs.state_dict()]
    for state in (
        torchs.state_dict(),
        {f"module.{name}": value for name, value in torchs.state_dict().items()},
    ):
        model.module.load_state_dict(network().state_dict())
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert all(map(torch.equal, state_of(model), state_of(torchs)))
        model(batch(r, 0)).sum().backward()
    assert (
        model.load_state_dict({"0.bias": torch.zeros(8)}, strict=False).missing_keys[0]
        == "0.weight"
    )
    assert (
        model.load_state_dict({"module.0.bias": torch.zeros(8)}, strict=False).missing_keys[0]
        == "module.0.weight"
    )
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**torchs.state_dict(), "more": torch.ones(1)})
    model.load_state_dict(torchs.state_dict(), assign=True)
    with pytest.raises(
        RuntimeError, match=r"was wrapped before parameters '0.weight', .* replaced"
    ):
        model(batch(r, 0))


@on_every_rank(1)
def test_a_module_that_is_called_module_inside_is_no_trouble(r: int) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    model, other = DistributedDataParallel(Holder()), Holder()
    for state in (
        other.state_dict(),
        {f"module.{name}": value for name, value in other.state_dict().items()},
    ):
        model.module.load_state_dict(Holder().state_dict())
        model.load_state_dict(state)
        assert all(map(torch.equal, state_of(model), state_of(other)))


@on_every_rank(2)
def test_a_copy_or_pickle_is_a_wrapper_that_trains_alone(r: int) -> None:
    model = DistributedDataParallel(network())
    model(batch(r, 0)).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is DistributedDataParallel
        assert all(map(torch.equal, state_of(other), state_of(model)))
        if r == 1:  # the other ranks need not take part
            with other.no_sync():
                other(batch(r, 1)).sum().backward()
            other(batch(r, 1)).sum().backward()
        assert model.bagua_train_step_counter == model.bagua_metrics()["steps"] == 1
        assert not hasattr(other, "inner")
        assert [*other.state_dict()] == [*model.state_dict()]
    again = DistributedDataParallel(copy.deepcopy(model).module)
    again(batch(r, 1)).sum().backward()
    assert again.bagua_train_step_counter == 1


# Bad input

UNSUPPORTED: list[Any] = [
    ({"dim": 1}, NotImplementedError, "dim=1 is not supported"),
    ({"check_reduction": True}, NotImplementedError, "check_reduction=True is not supported"),
    (
        {"output_device": 0},
        NotImplementedError,
        "output_device=0 is not supported with device_ids=None",
    ),
    ({"static_graph": True}, NotImplementedError, "static_graph=True is not supported"),
    ({"mixed_precision": "bf16"}, NotImplementedError, "mixed_precision='bf16' is not supported"),
    ({"static_grph": True}, TypeError, "unexpected keyword argument 'static_grph'"),
    ({"device_ids": [0, 1]}, ValueError, r"device_ids=\[0, 1\] must be None or hold one device"),
    (
        {"device_ids": [0]},
        ValueError,
        (
            r"device_ids=\[0\] must be the CUDA device that all parameters are on, or None; they"
            r" are on cpu"
        ),
    ),
    ({"device_ids": ["cpu"]}, ValueError, r"device_ids=\['cpu'\] must be the CUDA device"),
    ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0 must be a positive number"),
    ({"bucket_cap_mb": True}, ValueError, "bucket_cap_mb=True"),
    ({"bucket_cap_mb": "much"}, ValueError, "bucket_cap_mb='much' must be a positive number"),
    (
        {"process_group": 3},
        TypeError,
        "process_group=3 must be a BaguaProcessGroup, a torch ProcessGroup",
    ),
    ({"module": 3}, TypeError, "module=3 must be a torch.nn.Module"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    UNSUPPORTED,
    ids=[next(iter(case[0])) for case in UNSUPPORTED],
)
@on_every_rank(2)
def test_what_is_not_supported_is_named(
    r: int, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    module = network()
    with pytest.raises(error, match=message):
        DistributedDataParallel(**{"module": module, **arguments})
    model = DistributedDataParallel(module, device_ids=[], static_graph=False)
    model(batch(r, 0)).sum().backward()
    assert model.bagua_train_step_counter == 1


@pytest.mark.parametrize("method", ["scatter", "to_kwargs", "gather", "register_comm_hook"])
@on_every_rank(1)
def test_a_method_of_torchs_that_is_not_supported_names_itself(r: int, method: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    needed = [
        p
        for p in inspect.signature(getattr(model, method)).parameters.values()
        if p.default is inspect.Parameter.empty
    ]
    with pytest.raises(NotProvidedError, match=rf"{method}\(\)"):
        getattr(model, method)(*[None] * len(needed))


@on_every_rank(2)
def test_settings_that_differ_between_ranks_are_an_error_on_all_of_them(r: int) -> None:
    for arguments in (
        {"bucket_cap_mb": 1 + r},
        {"broadcast_buffers": r == 0},
        {"find_unused_parameters": r == 1},
        {"algorithm": ByteGradAlgorithm() if r else None},
    ):
        with pytest.raises(ValueError, match="settings differ between ranks"):
            DistributedDataParallel(network(), **arguments)


def test_before_init_process_group_it_names_it() -> None:
    def rank(comm: Any) -> None:
        for name, wrap in (
            ("with_bagua", lambda m: m.with_bagua([], ByteGradAlgorithm())),
            ("DistributedDataParallel", DistributedDataParallel),
        ):
            with pytest.raises(
                NotInitializedError, match=rf"init_process_group\(\) before {name}\(\)"
            ):
                wrap(nn.Linear(2, 2))

    SimulatedWorld(1).run(rank)


def test_there_is_one_class_under_all_names() -> None:
    assert isinstance(DistributedDataParallel, type)
    assert issubclass(DistributedDataParallel, nn.Module)
    assert distributed.DistributedDataParallel is DistributedDataParallel
    assert distributed.DistributedDataParallel_V1_9_0 is DistributedDataParallel
    assert distributed.DistributedDataParallel_V1_9_0_Interface is DistributedDataParallel


# Devices


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_cuda_device_may_be_given_in_any_form(device: Any) -> None:
    # without a CUDA device
    module = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda", 1))])
    assert distributed._device_ids(module, [device], device) == [1]
    with pytest.raises(ValueError, match="they are on cuda:1"):
        distributed._device_ids(module, ["cuda"], None)


@pytest.mark.gpu
def test_device_ids_moves_inputs_and_state_finds_its_device() -> None:
    def rank(r: int) -> Any:
        torch.manual_seed(r)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).cuda()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1 + r, capturable=r == 0)
        if r == 0:
            module(batch(0, 0).cuda()).sum().backward()
            optimizer.step()
        model = DistributedDataParallel(
            module, device_ids=[0], output_device=0, optimizers=[optimizer]
        )
        train(model, optimizer, r, range(3))
        entry = optimizer.state[next(module.parameters())]
        return [t.cpu() for t in state_of(model)[:-3]], {
            name: str(value.device) for name, value in entry.items()
        }

    (zero, devices), (one, others) = simulate(2, rank)
    assert all(map(torch.equal, zero, one))
    assert devices == others
    assert devices["exp_avg"] == "cuda:0"
