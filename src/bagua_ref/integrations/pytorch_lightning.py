"""The strategies and the callback of `bagua_ref.integrations.lightning` for ``pytorch_lightning``,
registered on import.
"""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from bagua_ref.integrations.lightning_parts import FabricPart, MonitorPart, TrainerPart

__all__ = ["BaguaMonitor", "BaguaStrategy", "FabricBaguaStrategy"]


class BaguaStrategy(TrainerPart, DDPStrategy):
    """`bagua_ref.integrations.lightning.BaguaStrategy` for ``pytorch_lightning.Trainer``."""

    strategy_name = "bagua"


class BaguaMonitor(MonitorPart, Callback):
    """`bagua_ref.integrations.lightning.BaguaMonitor` for ``pytorch_lightning.Trainer``."""


class FabricBaguaStrategy(FabricPart, FabricDDPStrategy):
    """`bagua_ref.integrations.lightning.FabricBaguaStrategy` for ``lightning_fabric.Fabric``."""


for registry, strategy in (
    (StrategyRegistry, BaguaStrategy),
    (STRATEGY_REGISTRY, FabricBaguaStrategy),
):
    registry.register("bagua", strategy, description="Algorithms of bagua_ref", override=True)
