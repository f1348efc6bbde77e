"""Redis's protocol between redis-py and a server that may be slow, foreign or hostile: commands,
answers and their limits.

redis-py's own parser bounds neither the time nor the size of an answer and fails our tests of
hostile servers, and its packer takes three to ten times as long to write.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (or Python imports it when it first looks up a host)
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import redis

__all__ = ["AnswerReader", "CommandPacker", "Limit"]

_PIECE_BYTES = 128 * 1024
# bytes per system call: redis-py's 64 kB cost a third of the speed for large values
_READ_SIZE = 1024**2
_SLOWEST = 1024**2
_MOST_EXTENDED = 10
_LONGEST_LINE = 64 * 1024
_LONGEST_VALUE = 512 * 1024**2


class Limit(threading.local):
    """The time that this thread's current request may take: ``seconds``, and a second more for each
    MiB that has moved.

    It is never more than ten times ``seconds``. A limit for each system call would not do: a server
    that sends a byte a second keeps within it for days.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start()

    def start(self, values: int = 0) -> None:
        """Begin a request whose answers are lists of ``values`` at most."""
        self.values = values
        now = time.monotonic()
        self._until, self._latest = now + self.seconds, now + _MOST_EXTENDED * self.seconds

    def extend(self, size: int) -> None:
        """Allow the time that ``size`` bytes may take."""
        self._until = min(self._until + size / _SLOWEST, self._latest)

    def left(self) -> float:
        """Return the seconds that are left.

        Raises:
            redis.TimeoutError: none is.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise redis.TimeoutError("the answer is not complete")
        return left


class CommandPacker:
    """Packs commands piece by piece: hiredis takes longer to join megabytes of values than the
    server takes to store them.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit

    def pack(self, *args: Any) -> Iterator[bytes]:
        """Yield the bytes of a command; ``args`` are its name, which may have several words, and
        its arguments.
        """
        words = [*args[0].encode().split(), *args[1:]]
        parts, size = [b"*%d\r\n" % len(words)], 0
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
            size += len(data)
            if size >= _PIECE_BYTES:
                self._limit.left()
                self._limit.extend(size)
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join(parts)


class AnswerReader:
    """A parser for redis-py's connections that keeps to a limit and takes no more memory than the
    bytes that have arrived.

    An answer is a status or value (both as bytes), an integer, None, an error, or a list of these,
    but not of lists.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._chunk = memoryview(bytearray(_READ_SIZE))
        self._forget()

    def on_connect(self, connection: Any) -> None:
        """Read from ``connection`` from now on."""
        self._sock = connection._sock

    def on_disconnect(self) -> None:
        """Forget what has arrived."""
        self._forget()

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether anything has arrived or does within ``timeout`` seconds."""
        try:
            if self._at == len(self._arrived):
                self._receive(timeout)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return False
        return True

    def read_response(self, **options: Any) -> Any:
        """Return the next answer; errors that concern the connection are raised, other errors
        returned.

        Raises:
            redis.RedisError: the limit is over, the connection is closed, or this is no answer of a
            Redis.
        """
        answer = self._answer()
        if self._at == len(self._arrived):
            self._forget()
        return answer

    def _forget(self) -> None:
        self._arrived, self._at = bytearray(), 0

    def _answer(self) -> Any:
        line = self._line()
        if line[:1] != b"*":
            return self._single(line)
        count = self._number(line)
        if count > self._limit.values:
            raise redis.InvalidResponse(
                f"a list of {count} is longer than the {self._limit.values} that were asked for"
            )
        return None if count < 0 else [self._single(self._line()) for _ in range(count)]

    def _single(self, line: bytearray) -> Any:
        kind = line[:1]
        if kind == b"$":
            return self._value(self._number(line))
        if kind == b":":
            return self._number(line)
        if kind == b"+":
            return bytes(line[1:])
        if kind != b"-":
            raise redis.InvalidResponse(
                f"{bytes(line[:40])!r} is not the beginning of an expected answer; is this a Redis?"
            )
        text = line[1:].decode(errors="replace")
        error = redis.connection.DefaultParser.parse_error(text)  # type: ignore[no-untyped-call]
        if isinstance(error, redis.ConnectionError):
            raise error
        return error

    def _number(self, line: bytearray) -> int:
        digits = line[1:]
        if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
            raise redis.InvalidResponse(f"{bytes(line[:40])!r} should have a number")
        return int(digits)

    def _value(self, size: int) -> bytes | None:
        if size == -1:
            return None
        if not 0 <= size <= _LONGEST_VALUE:
            raise redis.InvalidResponse(f"a value cannot have {size} bytes")
        while len(self._arrived) - self._at < size + 2:
            self._receive(self._limit.left())
        end = self._at + size
        if self._arrived[end : end + 2] != b"\r\n":
            raise redis.InvalidResponse(f"a value does not end after {size} bytes")
        value = bytes(memoryview(self._arrived)[self._at : end])
        self._at = end + 2
        return value

    def _line(self) -> bytearray:
        while (end := self._arrived.find(b"\r\n", self._at, self._at + _LONGEST_LINE)) < 0:
            if len(self._arrived) - self._at >= _LONGEST_LINE:
                beginning = bytes(self._arrived[self._at : self._at + 40])
                raise redis.InvalidResponse(f"{beginning!r}... has no end; is this a Redis?")
            self._receive(self._limit.left())
        line = self._arrived[self._at : end]
        self._at = end + 2
        return line

    def _receive(self, seconds: float) -> None:
        self._sock.settimeout(seconds)
        try:
            size = self._sock.recv_into(self._chunk)
        finally:
            self._sock.settimeout(self._limit.seconds)
        if not size:
            raise redis.ConnectionError("the server has closed the connection")
        self._limit.extend(size)
        del self._arrived[: self._at]
        self._at = 0
        self._arrived += self._chunk[:size]
