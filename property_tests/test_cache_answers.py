"""Properties of reading a server's answers: right ones arrive as they are, others are errors, and
memory is bounded (S8.3).
"""

from __future__ import annotations

import socket
import tracemalloc
from types import SimpleNamespace

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.contrib.cache.protocol import AnswerReader, Limit

singles = st.one_of(st.none(), st.binary(max_size=40), st.integers(-(2**63), 2**63 - 1))
answers = singles | st.lists(singles, max_size=8)


def written(answer) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    return b"*%d\r\n%b" % (len(answer), b"".join(map(written, answer)))


def reader_of(data: bytes) -> AnswerReader:
    """Return a reader of a connection on which the other end has sent ``data`` and closed."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    limit = Limit(5.0)
    limit.start(values=10)
    reader = AnswerReader(limit)
    reader.on_connect(SimpleNamespace(_sock=ours))
    return reader


@given(several=st.lists(answers, min_size=1, max_size=4), size=st.integers(1, 50))
def test_S8_3_answers_arrive_as_they_are_however_they_are_cut(several, size):
    reader = reader_of(b"".join(map(written, several)))
    reader._chunk = reader._chunk[:size]  # as if the network delivered so many bytes at a time
    with reader._sock:
        assert [reader.read_response() for _ in several] == several
        with pytest.raises(redis.ConnectionError, match="closed"):
            reader.can_read()


numbers = [
    "",
    "-1",
    "-2",
    "0",
    "1",
    "3",
    "536870912",
    "4294967295",
    "9" * 30,
    "1_0",
    " 1",
    "OOM full",
]
lines = st.builds("{}{}\r\n".format, st.sampled_from("$*:+-%_H"), st.sampled_from(numbers)).map(
    str.encode
)


@given(parts=st.lists(lines | st.binary(max_size=20) | answers.map(written), max_size=12))
def test_S8_3_whatever_arrives_is_an_answer_or_an_error_and_takes_memory_like_its_own_size(parts):
    data = b"".join(parts)
    reader = reader_of(data)
    tracemalloc.start()
    with reader._sock:
        try:
            answer = reader.read_response()
        except redis.RedisError:
            answer = None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak < 100_000 + 20 * len(data)
    for one in answer if isinstance(answer, list) else [answer]:
        assert one is None or isinstance(one, (bytes, int, redis.ResponseError))
