"""Exceptions of bagua_ref other than plain ``ValueError`` and ``TypeError``."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BackendUnavailableError",
    "BaguaError",
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "NotInitializedError",
    "NotProvidedError",
    "RankCall",
    "SimulationError",
]


class BaguaError(RuntimeError):
    """Base of every exception that bagua_ref defines."""


class NotInitializedError(BaguaError):
    """A process group is needed, but ``init_process_group()`` has not been called."""


class NotProvidedError(BaguaError, ImportError):
    """A part of the original that bagua_ref does not provide was imported; the message names a
    replacement.
    """


class BackendUnavailableError(BaguaError):
    """A kernel backend that was asked for by name cannot run here; the message says why and what to
    install.
    """


class CommunicationError(BaguaError):
    """A bucket operation or collective failed; the message names bucket and operation (S2.5)."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """No progress within the timeout; the message names the awaited event (S2.5)."""


class CheckpointError(BaguaError):
    """A checkpoint is damaged, incomplete or missing, or was not saved because another rank failed;
    the message names the file.
    """


class RankCall(NamedTuple):
    """One rank's part in an error of a simulated world: its thread's activity, and the line of user
    code.

    Attributes:
        rank: the global rank.
        thread: the thread's name; empty for the rank's main thread.
        operation: the operation with its arguments that the rank called or waits in.
        group: name of the group; empty if none is concerned.
        file: file of the user's code; empty if there is none.
        line: line in that file.
        waits_for: the global ranks that have not joined the operation yet.
        module: the module whose parameters FSDP2 gathers or reduces in this operation, or empty.
    """

    rank: int
    thread: str
    operation: str
    group: str
    file: str
    line: int
    waits_for: tuple[int, ...] = ()
    module: str = ""


class SimulationError(BaguaError):
    """The simulated world cannot continue: ranks wait for each other, or in different collectives.

    Attributes:
        kind: ``"deadlock"``; ``"ended"``, if a rank has returned for which others wait;
            ``"mismatch"``, if calls do not fit together; ``"unyielding"``;
            ``"unsupported"``; empty for an error of another kind.
        calls: the calls of the ranks concerned.
    """

    def __init__(self, message: str, kind: str = "", calls: tuple[RankCall, ...] = ()) -> None:
        super().__init__(message)
        self.kind, self.calls = kind, calls
