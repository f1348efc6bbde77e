"""Recordings of runs: digests of everything that each step computes, and the first divergence of
two recordings.

``with bagua_ref.record(model, optimizer, folder):`` records a run; ``bagua-ref trace diff A B``, or
`diff_records`, compares two.
"""

import sys as _sys
from types import ModuleType as _ModuleType
from typing import Any as _Any

from bagua_ref.record.callbacks import lightning_callback, transformers_callback
from bagua_ref.record.differences import (
    Difference,
    DifferenceReport,
    diff_records,
    draw_distances,
)
from bagua_ref.record.digests import digest
from bagua_ref.record.files import RankRecording, RecordingError, read_recording
from bagua_ref.record.recording import Recording, record

__all__ = [
    "Difference",
    "DifferenceReport",
    "RankRecording",
    "Recording",
    "RecordingError",
    "diff_records",
    "digest",
    "draw_distances",
    "lightning_callback",
    "read_recording",
    "record",
    "transformers_callback",
]


class _CallableModule(_ModuleType):
    """Module type that makes this package callable like `Recording`, because importing it rebinds
    the attribute ``bagua_ref.record``.
    """

    def __call__(self, *args: _Any, **options: _Any) -> Recording:
        return Recording(*args, **options)


_sys.modules[__name__].__class__ = _CallableModule
