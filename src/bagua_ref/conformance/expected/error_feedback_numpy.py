"""Error memory of n ranks (S11.1), one bucket and one round at a time; codecs one number at a time."""

from __future__ import annotations

import numpy as np

from bagua_ref.conformance.expected.codecs_scalar import compress_chunk, decompress_chunk
from bagua_ref.conformance.expected.decentralized_numpy import Array, added, stored

__all__ = ["coded", "error_feedback_round"]


def coded(codec: str, chunk: Array) -> Array:
    """Return D(C(chunk)), in float32."""
    numbers = [float(value) for value in chunk]
    payload = compress_chunk(codec, numbers, "float32")
    return np.array(decompress_chunk(codec, payload, len(numbers), "float32"), np.float32)


def error_feedback_round(
    inputs: list[Array], workers: list[Array], servers: list[Array], codec: str, dtype: str, filled: int, average: bool = True
) -> tuple[Array, list[Array], list[Array]]:
    """Return the result, and what every rank keeps: e and f.

    Args:
        inputs: x by rank, m elements with padding, numbers of ``dtype`` held as float32.
        workers: e by rank, of m elements.
        servers: f by rank, of m / n elements.
        codec: its name.
        dtype: of the result.
        filled: the elements before the padding.
        average: the mean instead of the sum.
    """
    n, m = len(inputs), len(inputs[0])
    chunks = [slice(place * m // n, (place + 1) * m // n) for place in range(n)]
    sent = [x + e for x, e in zip(inputs, workers, strict=True)]
    arrived = [np.concatenate([coded(codec, p[chunk]) for chunk in chunks]) for p in sent]
    new_workers = [p - d for p, d in zip(sent, arrived, strict=True)]
    result, new_servers = np.zeros(m, np.float32), []
    for chunk, server in zip(chunks, servers, strict=True):
        total = added([d[chunk] for d in arrived])
        y = (total / np.float32(n) if average else total) + server
        result[chunk] = coded(codec, y)
        new_servers.append(y - result[chunk])
    for place in range(m):
        owner, within = divmod(place, m // n)
        if place >= filled:
            new_servers[owner][within] = 0
        elif np.isnan(result[place]):
            new_servers[owner][within] = servers[owner][within]
        for new, old in zip(new_workers, workers, strict=True):
            if place >= filled:
                new[place] = 0
            elif np.isnan(result[place]):
                new[place] = old[place]
    return stored(result, dtype), new_workers, new_servers
