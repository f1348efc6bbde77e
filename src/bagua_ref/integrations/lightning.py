"""Strategies for Lightning 2 and Fabric, registered as ``strategy="bagua"`` when this module is
imported, and a callback.

They are for the package ``lightning``, or without it for ``pytorch_lightning``. With both
installed, both know the name.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from bagua_ref.base.not_provided import require
from bagua_ref.integrations.lightning_parts import FabricPart, MonitorPart, TrainerPart

__all__ = ["BaguaMonitor", "BaguaStrategy", "FabricBaguaStrategy"]

if find_spec("lightning") is not None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    class BaguaStrategy(TrainerPart, DDPStrategy):
        """Training of a LightningModule with an algorithm of bagua_ref:
        ``Trainer(strategy=BaguaStrategy("bytegrad"))``.

        It is Lightning's DDPStrategy, with `bagua_ref.distributed.BaguaModule.with_bagua` in place
        of torch's
        DistributedDataParallel: gradients accumulate without communication, checkpoints have the
        algorithm's state, and asynchronous averaging begins and ends with the training. Where
        weights or states belong to single ranks, every rank but the first writes a checkpoint of
        its own beside the first one's: ``last.ckpt.rank1``. Fitting loads each rank's own;
        validating and testing load the first one's.

        Args:
            algorithm: a registered name, such as "gradient_allreduce", "bytegrad", "decentralized",
                "low_precision_decentralized", "qadam", "async", "local_sgd", "diloco", "powersgd"
                or "topk".
            flatten: keep the tensors of each bucket in one storage.
            accelerator: as Lightning's; so are parallel_devices, cluster_environment, checkpoint_io
                and precision_plugin.
            find_unused_parameters: treat parameters that a backward pass does not reach as having
                zero gradients, as training with several optimizers often needs.
            bagua_kwargs: the algorithm's options. "qadam" takes the module's optimizer, a
                `bagua_ref.algorithms.q_adam.QAdamOptimizer`.

        Raises:
            ValueError: there is no such algorithm, or an option is out of range.

        >>> from lightning.pytorch import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(strategy=BaguaStrategy("bytegrad", hierarchical=False), devices=2)  # doctest: +SKIP

        Source: ``BaguaStrategy`` of Lightning 1.9.
        """

        strategy_name = "bagua"

    class BaguaMonitor(MonitorPart, Callback):
        """A callback that logs `bagua_ref.distributed.BaguaModule.bagua_metrics` to the Trainer's
        loggers.

        The names begin with "bagua/". The values appear with the module's own, every
        ``log_every_n_steps`` of the Trainer; loggers get those of the first rank. Nothing is
        communicated.

        Raises:
            ValueError: the Trainer that fits has another strategy than `BaguaStrategy`.

        >>> from lightning.pytorch import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(strategy=BaguaStrategy("bytegrad"), callbacks=[BaguaMonitor()])  # doctest: +SKIP
        """

    class FabricBaguaStrategy(FabricPart, FabricDDPStrategy):
        """Training with Fabric and an algorithm of bagua_ref:
        ``Fabric(strategy=FabricBaguaStrategy("bytegrad"))``.

        Set up each module together with its optimizers: ``fabric.setup(module, optimizer)``.
        ``fabric.save`` and ``fabric.load`` of a state that contains the module also save and load
        the algorithm's state, each rank's own where ranks differ. Call ``fabric.strategy.abort()``
        at the end of a training with "async".

        Args:
            algorithm: as for `BaguaStrategy`; so are the other arguments.
            flatten: keep the tensors of each bucket in one storage.
            accelerator: as Fabric's; so are parallel_devices, cluster_environment, checkpoint_io
                and precision.
            find_unused_parameters: treat parameters that a backward pass does not reach as having
                zero gradients.
            bagua_kwargs: the algorithm's options.

        Raises:
            ValueError: there is no such algorithm, or an option is out of range.

        >>> from lightning.fabric import Fabric  # doctest: +SKIP
        >>> fabric = Fabric(strategy=FabricBaguaStrategy("local_sgd", period=8), devices=2)  # doctest: +SKIP
        """

    for registry, strategy in (
        (StrategyRegistry, BaguaStrategy),
        (STRATEGY_REGISTRY, FabricBaguaStrategy),
    ):
        registry.register("bagua", strategy, description="Algorithms of bagua_ref", override=True)
    if find_spec("pytorch_lightning") is not None:
        import_module("bagua_ref.integrations.pytorch_lightning")
elif find_spec("pytorch_lightning") is not None:
    from bagua_ref.integrations.pytorch_lightning import (
        BaguaMonitor,
        BaguaStrategy,
        FabricBaguaStrategy,
    )
else:
    require("lightning", __name__, "lightning")
