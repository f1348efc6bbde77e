"""The strategies and the callback of `bagua_ref.integrations.lightning` for ``pytorch_lightning``,
registered on import.
"""

from __future__ import annotations

from bagua_ref.base.not_provided import require
from bagua_ref.integrations.lightning_parts import FabricPart, MonitorPart, TrainerPart

require("pytorch_lightning", __name__, "trainers")
from lightning_fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from pytorch_lightning import Callback  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry  # noqa: E402

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
