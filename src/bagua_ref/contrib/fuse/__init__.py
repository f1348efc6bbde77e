"""The fused optimizer: many small parameters updated as one (S6)."""

from bagua_ref.contrib.fuse.optimizer import fuse_optimizer, fuse_step, is_fused_optimizer

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]
