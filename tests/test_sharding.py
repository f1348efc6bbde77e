"""Tests of training what fully_shard (FSDP2) has sharded inside nodes: on a 2 x 2 mesh, against
plain HSDP and loops by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, on_every_process
from tests.trainings import by_name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
)
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow
STEPS = 6


def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def network(seed: int = 0) -> nn.Sequential:
    """Return layers of 8, 3 and 1 rows, so that shards are even, uneven and empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))


def sharded(mesh: Any, seed: int = 0) -> Any:
    from torch.distributed.fsdp import fully_shard

    module = network(seed)
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)  # has the last layer, which it keeps whole after a forward pass
    return module


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def shards(module: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach() for p in module.parameters()]  # type: ignore[attr-defined]


def copies(module: nn.Module) -> list[torch.Tensor]:
    return [shard.clone() for shard in shards(module)]


def made(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)


def loop(
    module: Any, optimizer: torch.optim.Optimizer, after: Callable[[int], None] = lambda step: None
) -> list[torch.Tensor]:
    """Train, in every other step with an accumulating backward pass before; return the shards."""
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        if step % 2:
            module.set_requires_all_reduce(False)  # of plain HSDP, in place of no_sync()
            with module.no_sync():
                module(batch(-step)).square().mean().backward()
            module.set_requires_all_reduce(True)
        module(batch(step)).square().mean().backward()
        optimizer.step()
        after(step)
    return copies(module)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def ours(mesh: Any, algorithm: Algorithm, in_context: bool) -> list[torch.Tensor]:
    # the first ranks' weights are broadcast
    module = sharded(mesh["shard"], seed=dist.get_rank() // 2)
    optimizer = made(module)
    if not in_context:
        module.with_bagua([optimizer], algorithm, mesh["replicate"])
        return loop(module, optimizer)
    with bagua_ref.train(module, [optimizer], algorithm, mesh["replicate"]):
        return loop(module, optimizer)


@on_every_process(4)
def test_gradient_allreduce_has_the_bits_of_plain_hsdp() -> None:
    mesh = mesh_of_four()
    plain = sharded(mesh)
    expected = loop(plain, made(plain))
    for in_context in (False, True):
        assert same(ours(mesh, GradientAllReduceAlgorithm(), in_context), expected)


def average(tensors: list[torch.Tensor], mesh: Any) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=mesh["replicate"].get_group())
        tensor.div_(2)


@on_every_process(4)
def test_local_sgd_and_diloco_have_the_bits_of_a_loop_on_local_shards() -> None:
    mesh = mesh_of_four()
    module = sharded(mesh["shard"])

    def average_weights(step: int) -> None:
        if step % 3 == 0:
            average(shards(module), mesh)

    expected = loop(module, made(module), average_weights)
    assert same(ours(mesh, LocalSGDAlgorithm(period=3), in_context=False), expected)

    module = sharded(mesh["shard"])
    copied = [nn.Parameter(shard) for shard in copies(module)]
    outer = torch.optim.SGD(copied, lr=0.7, momentum=0.9, nesterov=True)

    def outer_step(step: int) -> None:
        if step % 2 == 0:
            differences = [g.detach() - x for g, x in zip(copied, shards(module), strict=True)]
            average(differences, mesh)
            for g, difference in zip(copied, differences, strict=True):
                g.grad = difference
            outer.step()
            for x, g in zip(shards(module), copied, strict=True):
                x.copy_(g.detach())

    expected = loop(module, made(module), outer_step)
    assert same(ours(mesh, Algorithm.init("diloco", period=2), in_context=True), expected)
    # of which every element is selected
    sparse = DiLoCoAlgorithm(
        2, lambda g: torch.optim.SGD(g, lr=0.7, momentum=0.9, nesterov=True), top_k=4096
    )
    assert same(ours(mesh, sparse, in_context=False), expected)


GRADIENTS: list[tuple[str, dict[str, Any]]] = [
    ("bytegrad", {"hierarchical": False}),
    ("bytegrad", {"hierarchical": False, "compression": "OneBit", "error_feedback": True}),
    ("powersgd", {"warmup_steps": 2, "min_compression_rate": 0.1}),
    ("topk", {"ratio": 0.2}),
    ("demo", {"top_k": 3, "chunk": 4, "sign": False, "compression": "Stat2"}),
]


@pytest.mark.proof
@on_every_process(4)
def test_compressed_gradients_are_those_of_plain_parameters_of_the_shards_shapes() -> None:
    mesh = mesh_of_four()
    for name, options in GRADIENTS:
        found = ours(mesh, Algorithm.init(name, **options), in_context=False)
        # The same gradients, as those of plain parameters, which the algorithm exchanges.
        module = sharded(mesh["shard"])
        optimizer = made(module)
        stand_ins: Any = nn.ParameterList(copies(module))
        carrier: Any = nn.Module()
        carrier.inside = stand_ins
        carrier.forward = lambda grads, stand_ins=stand_ins: sum(
            (p * g).sum() for p, g in zip(stand_ins, grads, strict=True)
        )
        carrier.with_bagua(
            [torch.optim.SGD(stand_ins, lr=0.0)], Algorithm.init(name, **options), mesh["replicate"]
        )

        def exchange(optimizer: Any, *_: Any, module: Any = module, carrier: Any = carrier) -> None:
            grads = [p.grad.to_local() for p in module.parameters()]
            carrier.zero_grad()
            carrier([grad.clone() for grad in grads]).backward()
            for grad, exchanged in zip(grads, carrier.inside, strict=True):
                grad.copy_(exchanged.grad)
            carrier.bagua_optimizers[0].step()

        optimizer.register_step_pre_hook(exchange)
        assert same(loop(module, optimizer), found), name


@on_every_process(4)
def test_global_weights_are_gathered_anew_and_so_are_the_local_ones_after_them() -> None:
    mesh = mesh_of_four()
    module = sharded(mesh["shard"])
    optimizer = made(module)
    x = batch(0)
    begin = network()(x)
    module.with_bagua([optimizer], Algorithm.init("diloco", period=100), mesh["replicate"])
    for step in range(2):
        module(batch(step)).square().mean().backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        before = module(x)
        with module.bagua_algorithm.global_weights():
            shown = module(x)
        after = module(x)
    torch.testing.assert_close(shown, begin)
    assert torch.equal(before, after)
    assert not torch.equal(before, shown)


@on_every_process(4)
def test_weights_and_optimizer_state_of_the_first_node_are_taken_over() -> None:
    from torch.distributed.tensor import DTensor

    mesh = mesh_of_four()
    found = []
    for optimizer_class in (torch.optim.Adam, torch.optim.SGD):
        module = sharded(mesh["shard"], seed=dist.get_rank() // 2)
        optimizer = optimizer_class(
            module.parameters(),
            lr=0.1,
            **({} if optimizer_class is torch.optim.Adam else {"momentum": 0.9}),
        )
        for step in range(2):
            module(batch(step)).square().mean().backward()
            optimizer.step()
        module(batch(0))  # leaves the last layer whole
        module.with_bagua([optimizer], GradientAllReduceAlgorithm(), mesh["replicate"])
        kept = [
            value
            for p in module.parameters()
            for name, value in sorted(optimizer.state[p].items())
            if isinstance(value, torch.Tensor) and name != "step"
        ]
        assert all(isinstance(value, DTensor) for value in kept)
        found += copies(module) + [value.to_local().clone() for value in kept]
        module(batch(3)).square().mean().backward()
        optimizer.step()
        found += copies(module)
        module(batch(0))
        module.bagua_resynchronize()
        module(batch(4)).square().mean().backward()
        optimizer.step()
        found += copies(module)
    for place, tensor in enumerate(found):
        pair = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(pair, tensor.contiguous(), group=mesh["replicate"].get_group())
        assert torch.equal(*pair), place


@on_every_process(4)
def test_loaded_states_are_compared_with_those_of_the_same_shards() -> None:
    mesh = mesh_of_four()
    module = sharded(mesh["shard"])
    optimizer = made(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm(), mesh["replicate"])
    loop(module, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    loop(module, optimizer)
    if dist.get_rank() == 2:
        optimizer.state[module[0].weight]["momentum_buffer"].to_local().add_(1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    said = pytest.raises(CommunicationError, match="weights and optimizer state of checksum")
    with nullcontext() if dist.get_rank() % 2 else said:
        module(batch(0)).square().mean().backward()


@on_every_process(4)
def test_what_cannot_work_is_refused_by_name() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_of_four()
    mixed = network()
    fully_shard(mixed[0], mesh=mesh["shard"])
    in_columns = parallelize_module(
        nn.Sequential(nn.Linear(4, 4)), mesh["shard"], {"0": ColwiseParallel()}
    )
    group, weight = mesh["replicate"], "'0.weight'"
    over = (
        f"{weight} is a DTensor with placements (Replicate(), Shard(dim=0)) on a mesh of shape"
        " (2, 2)"
    )
    if dist.get_rank() == 0:
        too = (
            f"{weight} is a DTensor sharded over ranks [0, 1], of which process_group holds [0,"
            " 1], too"
        )
    else:
        too = f"{weight} is a DTensor sharded over ranks"
    for name, module, process_group, message in (
        ("gradient_allreduce", sharded(mesh["shard"]), None, too),
        (
            "gradient_allreduce",
            sharded(mesh["shard"]),
            mesh,
            "has 2 dimensions; pass the one along which ranks hold the same weights",
        ),
        ("gradient_allreduce", sharded(mesh), group, over),
        (
            "decentralized",
            sharded(mesh["shard"]),
            group,
            f"DecentralizedAlgorithm cannot train {weight}, which fully_shard (FSDP2) has sharded",
        ),
        (
            "low_precision_decentralized",
            sharded(mesh["shard"]),
            group,
            f"LowPrecisionDecentralizedAlgorithm cannot train {weight}",
        ),
        (
            "async",
            sharded(mesh["shard"]),
            group,
            f"AsyncModelAverageAlgorithm cannot train {weight}",
        ),
        ("qadam", sharded(mesh["shard"]), group, f"QAdamAlgorithm cannot train {weight}"),
        ("qadam", sharded(mesh["shard"]), group, "Use one of bytegrad, demo, diloco, gradient_"),
        ("gradient_allreduce", mixed, group, f"'2.weight' is not sharded while {weight} is"),
        (
            "gradient_allreduce",
            in_columns,
            group,
            f"{weight} is a DTensor that fully_shard (FSDP2) has not made",
        ),
    ):
        optimizer, algorithm = by_name(name, module)
        with pytest.raises((NotImplementedError, ValueError), match=re.escape(message)):
            module.with_bagua([optimizer], algorithm, process_group)
        assert "_bagua" not in module.__dict__

    module = sharded(mesh["shard"])
    wrapped = DistributedDataParallel(
        module, optimizers=[made(module)], process_group=group, broadcast_buffers=False
    )
    with (
        pytest.raises(NotImplementedError, match=r"cannot train inside join\(\)"),
        bagua_ref.join([wrapped]),
    ):
        pass


@on_every_process(4)
def test_a_state_belongs_to_a_shard() -> None:
    mesh = mesh_of_four()
    saved: list[Any] = []
    for module in (sharded(mesh["shard"]), sharded(mesh["shard"])):
        optimizer = made(module)
        module.with_bagua([optimizer], Algorithm.init("diloco", period=2), mesh["replicate"])
        loop(module, optimizer)
        saved.append(module.bagua_algorithm.state_dict())
        assert saved[-1]["shard"] == [dist.get_rank() % 2, 2]
    module.bagua_algorithm.load_state_dict(saved[0])
    with pytest.raises(ValueError, match=r"shard \[2, 3\], and this rank has shard"):
        module.bagua_algorithm.load_state_dict({**saved[0], "shard": [2, 3]})
    whole = network()
    whole.with_bagua([made(whole)], Algorithm.init("diloco", period=2), mesh["replicate"])
    with pytest.raises(ValueError):
        whole.bagua_algorithm.load_state_dict(saved[0])


def run_the_page(code: str) -> list[torch.Tensor]:
    bagua_ref.destroy_process_group()
    names: dict[str, Any] = {}
    exec(code, names)
    return copies(names["model"])


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[1] / "docs/data_parallel.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if "fully_shard" in block
    ]
    found = launch(run_the_page, 4, code)
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    assert not same(found[0], found[1])
