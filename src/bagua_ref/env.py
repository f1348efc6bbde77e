"""This rank's position and settings from the environment (S1), mostly under the original's
names.
"""

from __future__ import annotations

import os
from numbers import Real
from typing import TYPE_CHECKING

from bagua_ref.base.launch_environment import read_launch
from bagua_ref.base.not_provided import explain_missing
from bagua_ref.base.runtime import current_world, find_free_port

__all__ = [
    "checked_timeout",
    "find_free_network_port",
    "get_default_bucket_size",
    "get_default_timeout",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "shares_memory",
]

# gloo counts milliseconds, and 0 of them are no limit
_SECONDS = "a number of seconds from 0.001 to 1e9"


def get_rank() -> int:
    """Return this rank among all ranks, 0 without a launcher (S1)."""
    return current_world().identity.rank


def get_world_size() -> int:
    """Return the number of ranks, 1 without a launcher (S1)."""
    return current_world().identity.world_size


def get_local_rank() -> int:
    """Return this rank's index on its node (S1)."""
    return current_world().identity.local_rank


def get_local_size() -> int:
    """Return the number of ranks on this node (S1)."""
    return current_world().identity.local_world_size


def get_node_rank() -> int:
    """Return the index of this rank's node (S1)."""
    return current_world().identity.node_rank


def get_default_bucket_size() -> int:
    """Return BAGUA_DEFAULT_BUCKET_SIZE in bytes, 10 MiB if unset (S1).

    Raises:
        ValueError: the variable is not a positive integer.
    """
    text = os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE", str(10 * 1024**2))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"BAGUA_DEFAULT_BUCKET_SIZE={text!r} must be a positive number of bytes")
    return int(text)


def shares_memory() -> bool:
    """Return whether ranks on one machine may share memory: True unless BAGUA_REF_SHARED_MEMORY is
    0.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = os.environ.get("BAGUA_REF_SHARED_MEMORY", "1")
    if text not in ("0", "1"):
        raise ValueError(f"BAGUA_REF_SHARED_MEMORY={text!r} must be 0 or 1")
    return text == "1"


def get_default_timeout() -> float:
    """Return BAGUA_REF_TIMEOUT in seconds, 300 if unset (S2.5).

    Raises:
        ValueError: the variable is not a number of seconds that `checked_timeout` allows.
    """
    text = os.environ.get("BAGUA_REF_TIMEOUT", "300")
    try:
        return checked_timeout(float(text))
    except ValueError:
        raise ValueError(f"BAGUA_REF_TIMEOUT={text!r} must be {_SECONDS}") from None


def checked_timeout(timeout: float) -> float:
    """Validate ``timeout``, a number of seconds from 0.001 to 1e9, and return it (S2.5).

    Raises:
        ValueError: ``timeout`` is not such a number.
    """
    if not isinstance(timeout, Real) or isinstance(timeout, bool) or not 0.001 <= timeout <= 1e9:
        raise ValueError(f"timeout={timeout!r} must be {_SECONDS}")
    return float(timeout)


def get_master_addr() -> str:
    """Return MASTER_ADDR; if unset, the address of rank 0 from mpirun's or srun's variables, else
    127.0.0.1 (S1).

    Raises:
        ValueError: mpirun started processes on several nodes, and MASTER_ADDR is not set.
    """
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    launch = read_launch(os.environ)
    return "127.0.0.1" if launch is None else launch.master_address()


def find_free_network_port() -> int:
    """Return a TCP port of this machine that was free a moment ago."""
    return find_free_port()


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("env")
