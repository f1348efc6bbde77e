"""Tests of `bagua_ref.install` on DDP, FSDP2 and HSDP, against the steps of S16 and plain torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.install_programs import (
    POLICIES,
    ReplicaSteps,
    Steps,
    assert_same,
    batch,
    network,
    sharded,
    simulate,
    train,
    units,
    zoo,
)
from tests.launch import launch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bagua_ref
from bagua_ref.cli.demo import Digits

pytestmark = pytest.mark.filterwarnings("ignore")

CODED = [
    *itertools.product(("MinMaxUInt8", "MXFP8"), (False, True)),
    ("OneBit", True),
]
FEW = [("MinMaxUInt8", False), ("MXFP8", True)]


def options_of(codec: str | None, feedback: bool) -> tuple[str, dict[str, Any]]:
    if codec is None:
        return "gradient_allreduce", {}
    return "bytegrad", {"compression": codec, "error_feedback": feedback}


def shards_equal_the_steps(policies: list[str], coded: Any = ((None, False), *CODED)) -> None:
    for policy, (codec, feedback) in itertools.product(policies, coded):
        plain, ours = sharded(policy=policy), sharded(policy=policy)
        for unit in units(plain):
            unit.set_custom_reduce_scatter(Steps(codec, feedback))
            unit.set_reduce_scatter_unused_params(feedback)
        name, options = options_of(codec, feedback)
        bagua_ref.install(ours, name, **options)
        assert_same(train(ours), train(plain), f"{policy}, {codec}, {feedback}")


@pytest.mark.slow
def test_S16_2_shards_equal_the_steps_on_the_same_rows() -> None:
    simulate(3, shards_equal_the_steps, ["float16"], FEW)


@pytest.mark.proof
@pytest.mark.parametrize(("n", "policies"), [(2, list(POLICIES)), (4, ["bfloat16"])])
def test_S16_2_shards_equal_the_steps_over_gloo(n: int, policies: list[str]) -> None:
    launch(shards_equal_the_steps, n, policies)


def uncompressed_is_plain(policies: list[str], clip: float | None) -> None:
    for policy in policies:
        plain, ours = sharded(policy=policy), sharded(policy=policy)
        bagua_ref.install(ours, "gradient_allreduce")
        assert_same(train(ours, clip=clip), train(plain, clip=clip), policy)


@pytest.mark.slow
def test_uncompressed_has_the_bits_of_plain_fsdp2_and_hsdp() -> None:
    simulate(2, uncompressed_is_plain, ["bfloat16"], 0.1)
    simulate(4, uncompressed_is_hsdp)


@pytest.mark.proof
def test_uncompressed_has_the_bits_of_plain_fsdp2_and_hsdp_over_gloo() -> None:
    launch(uncompressed_is_plain, 2, list(POLICIES), 0.1)
    launch(uncompressed_is_hsdp, 4)


def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicas_equal_the_steps(policies: list[str], coded: Any = ((None, False), *CODED)) -> None:
    mesh = mesh_of_four()
    for policy, (codec, feedback) in itertools.product(policies, coded):
        plain, ours = sharded(mesh["shard"], policy), sharded(mesh["shard"], policy)
        for unit in units(plain):
            unit.set_all_reduce_hook(ReplicaSteps(codec, feedback, mesh["replicate"].get_group()))
            unit.set_reduce_scatter_unused_params(feedback)
        name, options = options_of(codec, feedback)
        bagua_ref.install(ours, name, mesh["replicate"], **options)
        found = train(ours)
        assert_same(found, train(plain), f"{policy}, {codec}, {feedback}")
        for x in found:
            both = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(both, x, group=mesh["replicate"].get_group())
            assert torch.equal(*both)


@pytest.mark.slow
def test_S16_4_replicas_equal_the_steps_on_the_same_shards() -> None:
    simulate(4, replicas_equal_the_steps, ["bfloat16"], FEW)


@pytest.mark.proof
def test_S16_4_replicas_equal_the_steps_over_gloo() -> None:
    launch(replicas_equal_the_steps, 4, ["float32", "float16"])


def uncompressed_is_hsdp() -> None:
    mesh = mesh_of_four()
    plain, ours = sharded(mesh), sharded(mesh["shard"])
    bagua_ref.install(ours, "gradient_allreduce", mesh["replicate"].get_group())
    assert_same(train(ours, clip=0.1), train(plain, clip=0.1))


def ddp_is_hooked() -> None:
    for name, options in {
        "gradient_allreduce": {},
        "bytegrad": {"hierarchical": False, "error_feedback": True},
        "powersgd": {"warmup_steps": 1},
        "topk": {"ratio": 0.1},
    }.items():
        hooked, ours = (DistributedDataParallel(network()) for _ in range(2))
        hooked.register_comm_hook(*bagua_ref.ddp_comm_hook(name, **options))
        installation = bagua_ref.install(ours, name, **options)
        assert_same(train(ours), train(hooked), name)
        assert installation.reductions == 3
        installation.remove()
        plain = DistributedDataParallel(ours.module)
        found = [p.grad.clone() for p in train_once(ours)]
        assert_same(found, [p.grad for p in train_once(plain)], f"{name}, removed")
        assert installation.reductions == 3
        again = bagua_ref.install(ours, name, **options)
        train_once(ours)
        assert again.reductions == 1


def train_once(module: nn.Module) -> list[nn.Parameter]:
    module.zero_grad()
    module(batch(0)).square().mean().backward()
    return [*module.parameters()]


@pytest.mark.slow
def test_S16_1_ddp_averages_as_by_the_hook() -> None:
    launch(ddp_is_hooked, 2)


def error_of(call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def refusals() -> list[tuple[str, str]]:
    """Return kind and message of what S16.5 refuses; nothing was set, as plain training shows."""
    mesh, found = mesh_of_four(), []
    plain = train(sharded(mesh["shard"]), [0])

    def refuse(module: Any, name: str = "bytegrad", *args: Any, **options: Any) -> None:
        error = error_of(lambda: bagua_ref.install(module, name, *args, **options))
        found.append((type(error).__name__, str(error)))

    def refuse_shards(name: str = "bytegrad", *args: Any, **options: Any) -> None:
        refuse(module := sharded(mesh["shard"]), name, *args, **options)
        assert_same(train(module, [0]), plain)

    refuse(network())
    refuse(sharded(mesh))
    refuse_shards("bytegrad", hierarchical=True)
    refuse_shards("gradient_allreduce", mesh["replicate"], average=False)
    refuse_shards("powersgd")
    refuse_shards("bytegrd")
    refuse_shards("bytegrad", compression="MinMaxUInt9")
    refuse_shards("bytegrad", levels=4)
    refuse_shards("bytegrad", mesh["shard"])
    refuse_shards("bytegrad", mesh)
    refuse(fully_shard(network().double()))
    mixed = network()
    mixed[0].weight.data = mixed[0].weight.data.bfloat16()
    refuse(fully_shard(mixed))
    other = parallelize_module(network(), mesh["shard"], {"0": ColwiseParallel()})
    refuse(fully_shard(other, mesh=mesh["replicate"]))
    own = sharded()
    own.set_custom_reduce_scatter(Steps(None, False))
    refuse(own)
    ddp = DistributedDataParallel(network())
    refuse(ddp, "bytegrad", mesh["shard"])
    refuse(ddp, "local_sgd", period=2)
    ddp.register_comm_hook(*bagua_ref.ddp_comm_hook("gradient_allreduce"))
    refuse(ddp)
    refuse(nn.ModuleList([DistributedDataParallel(network()), sharded()]))
    refuse(DistributedDataParallel(network().double()))
    return found


@pytest.mark.slow
def test_S16_5_refuses_by_name_before_anything_is_set() -> None:
    everyone = simulate(4, refusals)
    expected = [
        (
            "TypeError",
            "must contain a DistributedDataParallel, or modules with parameters that ful",
        ),
        (
            "ValueError",
            "'(root)' is sharded over a mesh of 2 dimensions; for HSDP, call fully_shard(",
        ),
        ("ValueError", "hierarchical=True is for DistributedDataParallel; leave it out"),
        ("ValueError", "average=False is for DistributedDataParallel; leave it out"),
        ("ValueError", "name='powersgd' cannot reduce shards; for FSDP2 and HSDP, there are 'grad"),
        ("ValueError", "name='bytegrd' cannot reduce shards"),
        ("ValueError", "compression='MinMaxUInt9' is not a known codec"),
        ("TypeError", "levels"),
        ("ValueError", "which process_group has, too, though their shards differ; for HSDP, call"),
        ("ValueError", "has 2 dimensions; pass the one along which ranks hold the same weights"),
        ("TypeError", "takes float16, bfloat16 or float32, and there are gradients of torch.fl"),
        ("ValueError", "with parameters of torch.bfloat16 and torch.float32; call fully_shard for"),
        ("ValueError", "after its parameters had become DTensors, as tensor parallelism makes the"),
        ("RuntimeError", "has a communication hook of its own, which install() would repl"),
        ("ValueError", "and DistributedDataParallel [0, 1, 2, 3]; leave it out"),
        ("ValueError", "name='local_sgd' is no communication hook; there are 'gradient_allreduce'"),
        ("RuntimeError", "has a communication hook of its own, which install() would replace"),
        (
            "ValueError",
            "must contain one DistributedDataParallel, or only modules that fully_shard",
        ),
        ("TypeError", "takes float16, bfloat16 or float32, and there are gradients of torch.fl"),
    ]
    for found in everyone:
        for (kind, message), (wanted, part) in zip(found, expected, strict=True):
            assert kind == wanted, message
            assert part in message


def without(method: str) -> list[str]:
    """Return messages of a torch that lacks a method of FSDP2."""
    feedback = method == "set_reduce_scatter_unused_params"
    group = dist.new_group([dist.get_rank()]) if method == "set_all_reduce_hook" else None
    saved = getattr(FSDPModule, method)
    delattr(FSDPModule, method)
    try:
        module = sharded()
        error = error_of(
            lambda: bagua_ref.install(module, "bytegrad", group, error_feedback=feedback)
        )
        return [type(error).__name__, str(error)]
    finally:
        setattr(FSDPModule, method, saved)


@pytest.mark.parametrize(
    "method",
    ["set_custom_reduce_scatter", "set_all_reduce_hook", "set_reduce_scatter_unused_params"],
)
def test_a_torch_without_a_method_is_refused_by_its_name(method: str) -> None:
    ((kind, message),) = simulate(1, without, method)
    assert kind == "RuntimeError"
    assert f"FSDPModule.{method}, which torch" in message


def disagreements() -> list[tuple[str, str]]:
    rank, mesh, found = dist.get_rank(), mesh_of_four(), []

    def refuse(module: Any, name: str, *args: Any, **options: Any) -> None:
        error = error_of(lambda: bagua_ref.install(module, name, *args, **options))
        found.append((type(error).__name__, str(error)))

    refuse(sharded(), "bytegrad", compression="MXFP8" if rank == 1 else "MinMaxUInt8")
    refuse(sharded(), "gradient_allreduce" if rank == 3 else "bytegrad")
    refuse(sharded(), "bytegrad", **({"levels": 3} if rank == 2 else {}))
    # the other replica has the same options in its own half, and all hear of it
    refuse(sharded(mesh["shard"]), "bytegrad", mesh["replicate"], error_feedback=rank < 2)
    refuse(sharded(mesh["shard"]), "bytegrd" if rank == 0 else "bytegrad", mesh["replicate"])
    network_of = nn.Linear(3, 5 if rank == 1 else 4)
    refuse(fully_shard(network_of), "bytegrad")
    refuse(DistributedDataParallel(network()), "powersgd", warmup_steps=rank)
    refuse(DistributedDataParallel(network()), "bytegrad", **({"bits": 3} if rank == 2 else {}))
    twice = sharded()
    bagua_ref.install(twice, "bytegrad")
    refuse(twice, "bytegrad")
    refuse(twice[0], "bytegrad")
    return found


@pytest.mark.slow
def test_S16_5_ranks_that_differ_all_get_an_error() -> None:
    everyone = simulate(4, disagreements)
    expected = [
        "rank 1 has compression: 'MXFP8', ranks 0, 2, 3 have compression: 'MinMaxUInt8'",
        "rank 3 has name: 'gradient_allreduce', ranks 0, 1, 2 have name: 'bytegrad'",
        "rank 2 has levels: 3, ranks 0, 1, 3 have levels: not given",
        " error_feedback: ",
        "rank 0 has name: 'bytegrd', rank",
        "rank 1 has (root): ",
        " warmup_steps: ",
        "rank 2 has bits: 3, ranks 0, 1, 3 have bits: not given",
        "install() was called for this model before; call remove()",
        "install() was called for this model before; call remove()",
    ]
    for rank, found in enumerate(everyone):
        for place, ((kind, message), part) in enumerate(zip(found, expected, strict=True)):
            if (rank, place) in ((2, 2), (0, 4), (2, 7)):  # its own mistake is what it hears of
                assert kind in ("TypeError", "ValueError"), message
            else:
                assert kind in ("CommunicationError", "RuntimeError")
                assert part in message


def backward(module: nn.Module, step: int = 0) -> None:
    module(batch(step)).float().square().mean().backward()


def misuses() -> list[str]:
    """Return messages of errors in backward passes, on every rank."""
    found = []
    divided = sharded()
    bagua_ref.install(divided, "bytegrad")
    divided.set_gradient_divide_factor(3.0)
    found.append(str(error_of(lambda: backward(divided))))
    mistaken = sharded()
    bagua_ref.install(mistaken, "bytegrad")
    if dist.get_rank() == 1:
        mistaken[2].bias.requires_grad_(False)
    found.append(str(error_of(lambda: backward(mistaken))))
    mistaken.reset_iter_state()
    found.append(str(error_of(lambda: backward(mistaken))))
    forgetful = sharded()
    bagua_ref.install(forgetful, "bytegrad", error_feedback=True)
    forgetful.set_reduce_scatter_unused_params(False)
    forgetful[2].forward = lambda x: nn.functional.linear(x, forgetful[2].weight)
    found.append(str(error_of(lambda: backward(forgetful))))
    mesh = mesh_of_four()
    different = sharded(mesh["shard"], seed=dist.get_rank() // 2)
    bagua_ref.install(different, "bytegrad", mesh["replicate"])
    found.append(str(error_of(lambda: backward(different))))
    return found


@pytest.mark.slow
def test_S16_5_mistakes_in_a_backward_pass_are_errors_on_every_rank() -> None:
    expected = [
        "leave out set_gradient_divide_factor(), and scale the loss instead",
        " of gradients for it",
        "cannot train on",
        "leave set_reduce_scatter_unused_params(True) as it is",
        "weights of checksum",
    ]
    for found in simulate(4, misuses):
        for message, part in zip(found, expected, strict=True):
            assert part in message


def random_models(seeds: list[int]) -> None:
    for seed in seeds:
        codec, feedback = [(None, False), *CODED][seed % (len(CODED) + 1)]
        plain, ours = zoo(seed), zoo(seed)
        for unit in units(plain):
            unit.set_custom_reduce_scatter(Steps(codec, feedback))
            unit.set_reduce_scatter_unused_params(feedback)
        name, options = options_of(codec, feedback)
        installation = bagua_ref.install(ours, name, **options)
        assert_same(train(ours, clip=1.0), train(plain, clip=1.0), f"{seed}, {codec}, {feedback}")
        counted = installation.metrics()
        assert counted["steps"] == 3
        if feedback or (codec is None and ours.unused is None):
            assert counted["bytes_sent"] == 3 * sum(unit.costs()[0] for unit in installation._units)


def random_uncompressed_models(seeds: list[int]) -> None:
    for seed in seeds:
        plain, ours = zoo(seed), zoo(seed)
        bagua_ref.install(ours, "gradient_allreduce")
        assert_same(train(ours, clip=1.0), train(plain, clip=1.0), f"{seed}")


@pytest.mark.slow
def test_random_models_have_the_bits_of_the_steps() -> None:
    simulate(3, random_models, [0, 1])


@pytest.mark.proof
@pytest.mark.parametrize("n", [2, 4])
def test_many_random_models_have_the_bits_of_the_steps(n: int) -> None:
    launch(random_models, n, list(range(20)))


@pytest.mark.proof
def test_random_models_have_the_bits_of_plain_fsdp2() -> None:
    launch(random_uncompressed_models, 2, list(range(20)))


def installed(kind: str, seed: int) -> tuple[Any, Any]:
    if kind.startswith("DDP"):
        options = {"warmup_steps": 1, "min_compression_rate": 1.0} if "memory" in kind else {}
        module = DistributedDataParallel(network(seed))
        name = "powersgd" if options else "gradient_allreduce"
        return module, bagua_ref.install(module, name, **options)
    feedback = {"error_feedback": "memory" in kind}
    if kind.startswith("HSDP"):
        mesh = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )
        module = sharded(mesh["shard"], seed=seed)
        return module, bagua_ref.install(module, "bytegrad", mesh["replicate"], **feedback)
    module = sharded(seed=seed)
    return module, bagua_ref.install(module, "bytegrad", **feedback)


def saved(kind: str, folder: str) -> list[torch.Tensor]:
    """Return what is trained after a checkpoint was saved in the middle."""
    module, installation = installed(kind, 0)
    train(module, range(3))
    state = {"model": get_model_state_dict(module), "bagua": installation}
    checkpoint.save(state, checkpoint_id=folder)
    return train(module, range(3, 5))


def resumed(kind: str, folder: str) -> list[torch.Tensor]:
    module, installation = installed(kind, 7)
    state = {"model": get_model_state_dict(module), "bagua": installation}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"])
    return train(module, range(3, 5))


def refused(kind: str, folder: str) -> str:
    with pytest.raises(checkpoint.CheckpointException) as caught:
        resumed(kind, folder)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n"), [("FSDP2, memory", 2), ("HSDP, memory", 4), ("FSDP2", 2)])
def test_training_goes_on_from_a_checkpoint_of_torch(kind: str, n: int, tmp_path: Path) -> None:
    expected = simulate(n, saved, kind, str(tmp_path))
    for ours, theirs in zip(simulate(n, resumed, kind, str(tmp_path)), expected, strict=True):
        assert_same(ours, theirs)
    if "memory" in kind:
        messages = simulate(n + 2, refused, kind, str(tmp_path))
        missing = "Missing key in checkpoint state_dict: bagua.bytegrad, version 1, rank"
        assert [f"{missing} {rank} of" in text for rank, text in enumerate(messages)] == [True] * (
            n + 2
        )
    else:
        assert len(simulate(n + 1, resumed, kind, str(tmp_path))) == n + 1


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "n"), [("DDP", 2), ("DDP, memory", 2), ("FSDP2, memory", 2), ("HSDP, memory", 4)]
)
def test_training_goes_on_from_a_checkpoint_over_gloo(kind: str, n: int, tmp_path: Path) -> None:
    expected = launch(saved, n, kind, str(tmp_path))
    for ours, theirs in zip(launch(resumed, n, kind, str(tmp_path)), expected, strict=True):
        assert_same(ours, theirs)


def states() -> None:
    module, installation = installed("FSDP2, memory", 0)
    state = installation.state_dict()
    train(module)
    assert not any(
        values.any() for unit in next(iter(state.values())).values() for values in unit.values()
    )
    after = installation.state_dict()
    ours, theirs = train(module, [3]), after
    again, other = installed("FSDP2, memory", 0)
    train(again)
    other.load_state_dict(theirs)
    assert_same(train(again, [3]), ours)
    own = "bytegrad, version 1, rank 0 of 1"
    for key in ("bytegrad, version 0, rank 0 of 1", "bytegrad, version 1, rank 1 of 2"):
        with pytest.raises(ValueError, match=f"state is that of {key}, and this is {own}"):
            other.load_state_dict({key: after[own]})
    other.load_state_dict({"bytegrad, version 1, rank 1 of 2": after[own]}, drop_local=True)
    assert not any(x.any() for unit in other.state_dict()[own].values() for x in unit.values())
    without = {name: values for name, values in after[own].items() if name != "0"}
    with pytest.raises(ValueError, match="state holds units of another model: it lacks"):
        other.load_state_dict({own: without})
    wrong = {**after[own], "0": {name: x[:1] for name, x in after[own]["0"].items()}}
    with pytest.raises(ValueError, match="error memories of '0' that are not this model's"):
        other.load_state_dict({own: wrong})


def test_states_are_checked_before_they_are_loaded() -> None:
    simulate(1, states)


def accuracy_on_digits(codec: str | None, feedback: bool, replicated: bool) -> float:
    """Return the share of test digits that are read right after 60 steps."""
    digits, mesh = Digits.load(), mesh_of_four()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    for part in (model[1], model):
        fully_shard(part, mesh=mesh["shard"] if replicated else None)
    name, options = options_of(codec, feedback)
    bagua_ref.install(model, name, mesh["replicate"] if replicated else None, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        chosen = torch.randint(len(digits.train_labels), (16,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(digits.train_images[chosen]), digits.train_labels[chosen]
        )
        loss.backward()
        optimizer.step()
    read = model(digits.test_images).argmax(1)
    return (read == digits.test_labels).float().mean().item()


@pytest.mark.proof
@pytest.mark.parametrize("replicated", [False, True])
def test_training_of_digits_is_as_accurate_as_without_compression(replicated: bool) -> None:
    exact = simulate(4, accuracy_on_digits, None, False, replicated)[0]
    assert exact > 0.9
    for codec, feedback in (("MinMaxUInt8", False), ("MXFP8", True)):
        found = simulate(4, accuracy_on_digits, codec, feedback, replicated)
        assert len(set(found)) == 1
        assert found[0] > exact - 0.03, (codec, feedback)


def rarer_cases() -> None:
    """Modules sharded together, a compiled model, float64, NaN, and all frozen but one."""
    rank, pairs = dist.get_rank(), []
    for _ in range(2):
        together, compiled = network(), sharded()
        fully_shard([together[2], together[4]])
        fully_shard(together)
        double, frozen = network().double(), network()
        frozen[0].requires_grad_(False)
        for layer in frozen[0], frozen[2], frozen:
            fully_shard(layer)
        pairs.append((together, compiled, fully_shard(double), frozen))
    for place, (plain, ours) in enumerate(zip(*pairs, strict=True)):
        codec = None if place == 2 else "MXFP8"
        for unit in units(plain):
            unit.set_custom_reduce_scatter(Steps(codec, codec is not None))
            unit.set_reduce_scatter_unused_params(codec is not None)
        name, options = options_of(codec, codec is not None)
        wrapped = torch.compile(ours, backend="eager") if place == 1 else ours
        installation = bagua_ref.install(wrapped, name, **options)
        if place == 2:
            ours_found, plain_found = (found_in_double(module) for module in (ours, plain))
            assert all(torch.allclose(*pair) for pair in zip(ours_found, plain_found, strict=True))
        else:
            assert_same(train(wrapped), train(plain), str(place))
        assert "_orig_mod" not in repr(installation)
    poisoned = sharded()
    installation = bagua_ref.install(poisoned, "bytegrad", error_feedback=True)
    backward(poisoned)
    before = installation.state_dict()
    kept = {unit: values["worker"].clone() for unit, values in next(iter(before.values())).items()}
    poisoned.zero_grad()
    (poisoned(batch(0)).square().mean() * (torch.nan if rank == 1 else 1.0)).backward()
    after = next(iter(installation.state_dict().values()))
    assert all(not values["worker"].isnan().any() for values in after.values())
    if rank == 1:
        assert all(torch.equal(after[unit]["worker"], values) for unit, values in kept.items())
    assert nn.utils.get_total_norm([p.grad for p in poisoned.parameters()]).full_tensor().isnan()


def found_in_double(module: Any) -> list[torch.Tensor]:
    module(batch(0).double()).square().mean().backward()
    return [p.grad.to_local() for p in module.parameters()]


@pytest.mark.slow
def test_rarer_models_and_gradients() -> None:
    simulate(2, rarer_cases)


def even() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def settled(setting: str) -> Any:
    """Return a model with a setting of FSDP2's that is not its default."""
    options: dict[str, Any] = {}
    if setting == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(1)
    if setting == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model: Any = even()
    inner = {"mesh": mesh_of_pair()} if setting == "two meshes" else {}
    fully_shard(model[0], **options, **inner)
    fully_shard(model, **options)
    for unit in units(model):
        if setting == "sums":
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(3.0)
        if setting == "factor":
            unit.set_gradient_divide_factor(float(dist.get_world_size()))
    return model


def mesh_of_pair() -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))["shard"]


def settings() -> None:
    for setting in ("columns", "offloaded", "two meshes", "sums", "factor"):
        plain, ours = settled(setting), settled(setting)
        for unit in units(plain):
            unit.set_custom_reduce_scatter(Steps("MXFP8", False))
        installation = bagua_ref.install(ours, "bytegrad", compression="MXFP8")
        assert_same(train(ours), train(plain), setting)
        sent = sum(unit.costs()[0] for unit in installation._units)
        assert installation.metrics()["bytes_sent"] == 3 * sent


@pytest.mark.proof
def test_settings_of_fsdp2_are_kept() -> None:
    simulate(2, settings)
