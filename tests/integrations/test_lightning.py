"""Tests of the strategies for Lightning and Fabric: equal to a training by hand, over gloo, under
both package names.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.trainings import (
    ALGORITHMS,
    CASES,
    STEPS,
    batches,
    by_hand,
    network,
    optimizer_of,
    weights_of,
)
from tests.launch import launch, preload

import bagua_ref
from bagua_ref.algorithms import Algorithm

PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
for package in PACKAGES.values():
    preload(*package)
TRAINED = {
    "lightning": CASES,
    "pytorch_lightning": [case for case in CASES if case[0] in ("bytegrad", "local_sgd")],
}
"""By package; the strategies of both are made of the same parts."""


def rank() -> int:
    return int(os.environ["RANK"])


def strategies(package: str) -> Any:
    return import_module(f"bagua_ref.integrations.{package}")


def module_of(package: str, name: str, **overridden: Any) -> Any:
    """Return a LightningModule that trains as `by_hand` does, with what is ``overridden``."""
    parts: dict[str, Any] = {
        "forward": lambda self, batch: self.net(batch),
        "training_step": lambda self, batch, index: self(batch).square().mean(),
        "validation_step": lambda self, batch, index: self.seen.append(
            self(batch).square().mean().item()
        ),
        "configure_optimizers": lambda self: optimizer_of(name, self),
        "train_dataloader": lambda self: torch.utils.data.DataLoader(
            batches(rank(), 2 * STEPS), batch_size=None
        ),
        "val_dataloader": lambda self: torch.utils.data.DataLoader(batches(9, 1), batch_size=None),
        **overridden,
    }
    module = type("Module", (import_module(PACKAGES[package][0]).LightningModule,), parts)()
    module.net, module.seen = network(rank()), []
    return module


def trainer_of(package: str, strategy: Any, **options: Any) -> Any:
    # Lightning then takes rank and world size from the environment, as under torchrun
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    warnings.simplefilter("ignore")
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": STEPS,
        "use_distributed_sampler": False,
    }
    return import_module(PACKAGES[package][0]).Trainer(
        strategy=strategy, **{**defaults, **quiet, **options}
    )


def fit_with_each(package: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, accumulate in TRAINED[package]:
        module = module_of(package, name)
        strategy = strategies(package).BaguaStrategy(name, **ALGORITHMS[name])
        trainer_of(package, strategy, accumulate_grad_batches=accumulate, val_check_interval=2).fit(
            module
        )
        assert len(module.seen) >= STEPS // 2
        assert not hasattr(module, "_bagua")
        found[f"{name}, {accumulate} batches"] = (
            weights_of(module),
            by_hand(rank(), name, accumulate),
        )
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_trains_to_the_weights_of_a_loop_by_hand(package: str) -> None:
    for of_rank in launch(fit_with_each, 2, package, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name


def test_importing_registers_the_strategies_in_both_packages() -> None:
    ours = strategies("lightning")
    for package, (pytorch, fabric) in PACKAGES.items():
        registry = import_module(f"{pytorch}.strategies").StrategyRegistry
        assert type(registry.get("bagua")) is strategies(package).BaguaStrategy
        registry = import_module(f"{fabric}.strategies").STRATEGY_REGISTRY
        assert type(registry.get("bagua")) is strategies(package).FabricBaguaStrategy
    assert ours.BaguaStrategy is not strategies("pytorch_lightning").BaguaStrategy


def import_with(monkeypatch: pytest.MonkeyPatch, *installed: str) -> Any:
    """Return a copy of the module, executed as if only these packages were installed; other tests'
    imports do not find it.
    """
    spec = importlib.util.find_spec("bagua_ref.integrations.lightning")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in installed else None
    )
    spec.loader.exec_module(module)
    return module


def test_without_lightning_the_strategies_are_those_of_pytorch_lightning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = strategies("pytorch_lightning")
    assert import_with(monkeypatch, "pytorch_lightning").BaguaStrategy is other.BaguaStrategy


def test_without_both_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ImportError, match=r"needs lightning; install with: pip install .*lightning"
    ):
        import_with(monkeypatch)


@pytest.mark.parametrize("name", ["BaguaStrategy", "FabricBaguaStrategy"])
def test_what_is_wrong_with_the_arguments_is_an_error_at_once(name: str) -> None:
    with pytest.raises(TypeError, match="devices"):
        getattr(strategies("lightning"), name)("bytegrad", devices=2)
    with pytest.raises(ValueError, match="period=0"):
        getattr(strategies("lightning"), name)("local_sgd", period=0)
    with pytest.raises(
        ValueError, match="'nonsense' is not a registered algorithm; there are 'async', 'bytegrad'"
    ):
        getattr(strategies("lightning"), name)("nonsense")


def train_two() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a manual optimization with two optimizers, and of the same by hand."""

    def optimizers_of(self: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.Adam(self.net[2].parameters(), lr=0.01),
        ]

    def training_step(self: Any, batch: torch.Tensor, index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean() + number)
            optimizer.step()

    module = module_of(
        "lightning", "", configure_optimizers=optimizers_of, training_step=training_step
    )
    module.automatic_optimization = False
    strategy = strategies("lightning").BaguaStrategy("bytegrad", hierarchical=False)
    trainer_of("lightning", strategy, max_steps=2 * STEPS).fit(module)

    net = network(rank())
    chosen = optimizers_of(type("Module", (), {"net": net}))
    net.with_bagua(chosen, Algorithm.init("bytegrad", hierarchical=False))
    for batch in batches(rank(), 2 * STEPS)[:STEPS]:
        for number, optimizer in enumerate(chosen):
            optimizer.zero_grad()
            (net(batch).square().mean() + number).backward()
            optimizer.step()
    return weights_of(module), weights_of(net)


def test_several_optimizers_are_stepped_by_hand() -> None:
    for ours, theirs in launch(train_two, 2, init=False):
        assert torch.equal(ours, theirs)


def epoch_of(self: Any) -> list[torch.Tensor]:
    """Return half of the batches, so that two epochs see all."""
    half, epoch = STEPS // 2, self.trainer.current_epoch
    return torch.utils.data.DataLoader(
        batches(rank())[half * epoch : half * epoch + half], batch_size=None
    )


def fit_epochs(
    name: str,
    folder: Path,
    epochs: int,
    options: dict[str, Any],
    logger: Any = False,
    callbacks: Any = (),
    **of_fit: Any,
) -> torch.Tensor:
    """Return the weights after ``epochs`` epochs, of which each has written a checkpoint."""
    pytorch = import_module("lightning.pytorch")
    checkpoint = pytorch.callbacks.ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    trainer = trainer_of(
        "lightning",
        strategies("lightning").BaguaStrategy(name, **options),
        max_steps=-1,
        max_epochs=epochs,
        callbacks=[checkpoint, *callbacks],
        enable_checkpointing=True,
        reload_dataloaders_every_n_epochs=1,
        logger=logger,
        log_every_n_steps=1,
    )
    module = module_of("lightning", name, train_dataloader=epoch_of)
    trainer.fit(module, **of_fit)
    return weights_of(module)


def resume_each(folder: Path) -> dict[str, Any]:
    found = {}
    for name, options in ALGORITHMS.items():
        fit_epochs(name, folder / name, 1, options)
        written = sorted(path.name for path in (folder / name).iterdir())
        resumed = fit_epochs(
            name, folder / name, 2, options, ckpt_path=folder / name / "epoch=0.ckpt"
        )
        found[name] = written, resumed, by_hand(rank(), name)
    return found


def test_a_training_resumes_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    for of_rank in launch(resume_each, 2, tmp_path, init=False):
        for name, (written, ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name
            equal = name in ("gradient_allreduce", "bytegrad", "qadam")
            assert (
                written == ["epoch=0.ckpt"] if equal else ["epoch=0.ckpt", "epoch=0.ckpt.rank1"]
            ), name


def resume_otherwise(folder: Path) -> list[Any]:
    """Return what comes of checkpoints that do not fit."""
    fit_epochs("decentralized", folder, 1, {"hierarchical": False})
    path = folder / "epoch=0.ckpt"
    found = []
    if rank():
        Path(f"{path}.rank1").rename(folder / "elsewhere")
    for name, options in (("decentralized", {"hierarchical": False}), ("diloco", {"period": 2})):
        try:
            fit_epochs(name, folder, 2, options, ckpt_path=path)
        except ValueError as error:
            found.append(str(error))
    checkpoint = torch.load(path)
    bagua_ref.barrier()
    del checkpoint["bagua"]
    if not rank():
        torch.save(checkpoint, path)
    bagua_ref.barrier()
    ours = fit_epochs(
        "low_precision_decentralized", folder / "plain", 2, {"hierarchical": False}, ckpt_path=path
    )

    net = network(rank())
    optimizer = optimizer_of("", net)
    net.load_state_dict(
        {name.removeprefix("net."): weight for name, weight in checkpoint["state_dict"].items()}
    )
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    net.with_bagua([optimizer], Algorithm.init("low_precision_decentralized", hierarchical=False))
    for batch in batches(rank())[STEPS // 2 :]:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [*found, ours, weights_of(net)]


def test_a_checkpoint_that_does_not_fit_is_an_error_or_a_beginning_on_every_rank(
    tmp_path: Path,
) -> None:
    for lost, other, ours, theirs in launch(resume_otherwise, 2, tmp_path, init=False):
        assert "rank 1 of 2 found the state of rank 0 of 2" in lost
        assert (
            "saved with DecentralizedAlgorithmImpl, but this training uses DiLoCoAlgorithmImpl"
            in other
        )
        assert torch.equal(ours, theirs)


def logged(folder: Path, *names: str) -> list[tuple[float, ...]]:
    """Return what a CSVLogger has written, a tuple for each step."""
    with (folder / "metrics.csv").open() as file:
        return [tuple(float(row[name] or "nan") for name in names) for row in csv.DictReader(file)]


def monitor(package: str, folder: Path) -> list[Any]:
    """Return, for each way to train, the steps and bytes that were logged, and the last of all
    values beside the metrics.
    """
    found: list[Any] = []
    ours, pytorch = strategies(package), import_module(PACKAGES[package][0])
    for every, accumulate in ((2, 1), (3, 1), (2, 2)):
        metrics: dict[str, Any] = {}
        module = module_of(
            package,
            "",
            on_train_end=lambda self, metrics=metrics: metrics.update(
                self.trainer.strategy.model.bagua_metrics()
            ),
        )
        logger = pytorch.loggers.CSVLogger(folder, name=f"{every}-{accumulate}", version="")
        trainer_of(
            package,
            ours.BaguaStrategy("local_sgd", period=3),
            accumulate_grad_batches=accumulate,
            log_every_n_steps=every,
            # it would wait for the other rank forever
            logger=logger,
            callbacks=[] if rank() else [ours.BaguaMonitor()],
        ).fit(module)
        if not rank():
            del metrics["seconds_since_last_exchange"]
            last = logged(Path(logger.log_dir), *(f"bagua/{name}" for name in metrics))[-1]
            found.append(
                (
                    logged(Path(logger.log_dir), "step", "bagua/steps", "bagua/bytes_sent"),
                    last,
                    tuple(metrics.values()),
                )
            )
    other = trainer_of(package, "ddp", callbacks=[ours.BaguaMonitor()])
    other.validate(module_of(package, ""))
    try:
        other.fit(module_of(package, ""))
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_monitor_logs_the_metrics_of_the_first_rank_whenever_the_trainer_logs(
    package: str, tmp_path: Path
) -> None:
    first, second = launch(monitor, 2, package, tmp_path, init=False)
    size = 4 * sum(p.numel() for p in network(0).parameters())
    by_twos = [(1, 2, 0), (3, 4, size), (5, 6, 2 * size)]
    assert [rows for rows, _, _ in first[:3]] == [
        by_twos,
        [(2, 3, size), (5, 6, 2 * size)],
        by_twos,
    ]
    for _, last, metrics in first[:3]:
        assert last == metrics
    assert first[3:] == second
    assert (
        "this Trainer's strategy is DDPStrategy; call Trainer(strategy=BaguaStrategy(...))"
        in second[0]
    )


def fabric_of(package: str, strategy: Any) -> Any:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    fabric = import_module(PACKAGES[package][1]).Fabric(
        accelerator="cpu", devices=2, strategy=strategy
    )
    fabric.launch()
    return fabric


def train_in_fabric(folder: str, package: str) -> dict[str, Any]:
    found = {}
    for name, accumulate in TRAINED[package]:
        fabric = fabric_of(
            package, strategies(package).FabricBaguaStrategy(name, **ALGORITHMS[name])
        )

        def set_up(fabric: Any = fabric, name: str = name) -> tuple[Any, Any]:
            net = network(rank())
            return fabric.setup(net, optimizer_of(name, net))

        model, optimizer = set_up()
        for number, batch in enumerate(batches(rank(), STEPS * accumulate)):
            if number == STEPS * accumulate // 2:
                fabric.save(
                    f"{folder}/{name}.ckpt",
                    {"model": model, "optimizer": optimizer, "number": number},
                )
                fabric.strategy.teardown()
                model, optimizer = set_up()
                state = {"model": model, "optimizer": optimizer, "number": 0}
                assert fabric.load(f"{folder}/{name}.ckpt", state) == {}
                assert state["number"] == number
            last = number % accumulate == accumulate - 1
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(model(batch).square().mean() / accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        found[f"{name}, {accumulate} batches"] = (
            weights_of(model),
            by_hand(rank(), name, accumulate),
        )
        fabric.strategy.teardown()
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_fabric_trains_and_resumes_to_the_weights_of_a_loop_by_hand(
    package: str, tmp_path: Path
) -> None:
    for of_rank in launch(train_in_fabric, 2, str(tmp_path), package, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name
