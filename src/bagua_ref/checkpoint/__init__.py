"""Checkpoints of training runs: saved by all ranks together, ignored if incomplete, and loaded by
each rank on its own.
"""

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.checkpoint.contents import detached
from bagua_ref.checkpoint.saving_and_loading import Checkpoint, load, save

__all__ = ["Checkpoint", "detached", "load", "save"]

__getattr__ = explain_missing("checkpoint")
