"""The exceptions of bagua_ref that are not plain ``ValueError`` or ``TypeError``."""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "BaguaError",
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "NotInitializedError",
    "NotProvidedError",
    "SimulationError",
]


class BaguaError(RuntimeError):
    """Base of every exception that bagua_ref defines."""


class NotInitializedError(BaguaError):
    """A process group is needed, but ``init_process_group()`` has not been called."""


class NotProvidedError(BaguaError, ImportError):
    """A part of the original that bagua_ref does not provide was imported; the message names a replacement."""


class BackendUnavailableError(BaguaError):
    """A kernel backend that was asked for by name cannot run here; the message says why and what to install."""


class CommunicationError(BaguaError):
    """A bucket operation or collective failed; the message names bucket and operation (S2.5)."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """No progress within the timeout; the message names what was waited for (S2.5)."""


class CheckpointError(BaguaError):
    """A checkpoint is damaged, incomplete or missing, or was not saved because another rank failed; the message names the file."""


class SimulationError(BaguaError):
    """The simulated world cannot continue: ranks wait for each other, or in different collectives."""
