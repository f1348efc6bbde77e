"""redis-py clients with the cache's settings, and detection of exceptions that a signal handler
raised.
"""

from __future__ import annotations

import importlib.util
import signal
import traceback
from collections.abc import Mapping
from typing import Any


def connect(options: Mapping[str, Any], timeout: float) -> Any:
    """Return a new `redis.Redis` client, which connects at first use.

    Args:
        options: arguments of `redis.Redis` that name the server.
        timeout: seconds to wait for a connection, and then for each part of an answer.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    # Its name and version are not sent to the server: looking them up takes milliseconds.
    unnamed: dict[str, Any] = {"lib_name": None, "lib_version": None}
    if importlib.util.find_spec("redis.driver_info"):  # redis-py 7 and newer
        unnamed = {"driver_info": None}
    return redis.Redis(
        **options,
        **unnamed,
        protocol=2,  # the same replies from every release of redis-py, and no round trip to negotiate
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),  # the cache decides when to try again
    )


def of_signal_handler(error: BaseException | None, handled: object) -> BaseException | None:
    """Return the exception of a signal handler that ``error`` is or wraps, or None.

    redis-py attributes every OSError to its socket, even the TimeoutError that the signal handler
    of an alarm raises.

    Args:
        error: an exception that looks like a failure of a server or a value.
        handled: the exception that was being handled before, which is ignored.
    """
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while error is not None and error is not handled:
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
            return error
        error = error.__context__
    return None


def _code(handler: object) -> object:
    function = getattr(handler, "func", handler)  # of a functools.partial
    return getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
