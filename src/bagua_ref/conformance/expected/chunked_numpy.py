"""Rounds of n ranks that exchange the largest elements of chunks, with error memory (S15): of one
tensor, and of a training with SparseLoCo.

Tensors are flat arrays of float32 in row-major order, and sums are Python's fsum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bagua_ref.conformance.expected.algorithms_numpy import restored
from bagua_ref.conformance.expected.codecs_scalar import compress_chunk
from bagua_ref.conformance.expected.compression_numpy import kept
from bagua_ref.conformance.expected.kernels_numpy import Array, added
from bagua_ref.conformance.expected.local_updates_numpy import DiLoCo, Weights


def side(s: int, chunk: int) -> int:
    """Return c(s), the side of a chunk along a dimension of size s."""
    return max(d for d in range(1, chunk + 1) if s % d == 0) if s else 1


def chunks(shape: tuple[int, ...], chunk: int) -> tuple[Array, tuple[int, int]]:
    """Return the element indices of each chunk, K x m, and its rows and columns (S15.1)."""
    *leading, rows, columns = (1, 1, *shape)
    h, w = side(rows, chunk), side(columns, chunk)
    blocks = [
        block[i : i + h, j : j + w]
        for block in np.arange(math.prod(shape)).reshape(math.prod(leading), rows, columns)
        for i in range(0, rows, h)
        for j in range(0, columns, w)
    ]
    return np.array(blocks, int).reshape(len(blocks), h * w), (h, w)


def packed(indices: list[int]) -> bytes:
    """Return indices packed into 12 bits each (S15.3)."""
    data = bytearray()
    for place in range(0, len(indices), 2):
        i, j = [*indices, 0][place : place + 2]
        data += bytes([i & 255, i >> 8 | (j & 15) << 4, j >> 4])
    return bytes(data) + bytes(-len(data) % 4)


def stat2(x: Array) -> tuple[bytes, Array]:
    """Return the Stat2 payload and its decoded values (S15.3)."""
    v, codes = x[x != 0], np.zeros(x.size + -x.size % 16, int)
    table, code = np.zeros(4, np.float32), codes[:0]
    if np.isfinite(v).all() and v.size:
        table[0] = math.fsum(v) / v.size
        c = v - table[0]
        if np.isfinite(c).all():
            spread = math.fsum(float(a) ** 2 for a in c) / max(v.size - 1, 1)
            scale = np.float32(1.5 * math.sqrt(spread) * (v.size > 1)) or np.float32(1)
            code = np.clip(np.rint(c / scale + np.float32(2)), 1, 3).astype(int)
            for b in (1, 2, 3):
                table[b] = math.fsum(c[code == b]) / max(np.sum(code == b), 1)
            table[0] *= np.float32(1) if np.isfinite(scale) else np.float32(np.inf)
    decoded = np.append(np.float32(0), table[1:] + table[0])
    if code.size < v.size or not np.isfinite(decoded).all():
        poison = 0x7FC00000.to_bytes(4, "little") + bytes(12 + codes.size // 4)
        return poison, np.full_like(x, np.nan)
    codes[np.flatnonzero(x)] = code
    four = (codes.reshape(-1, 4) << [0, 2, 4, 6]).sum(1).tolist()
    return table.tobytes() + bytes(four), decoded[codes[: x.size]]


def sent(y: Array, places: Array, k: int, codec: str | None) -> tuple[bytes, Array]:
    """Return a tensor's message and its decoded values (S15.2, S15.3)."""
    k, decoded = min(k, places.shape[1]), np.zeros_like(y)
    indices = [kept(y[row], k) for row in places]
    chosen = np.array([row[found] for row, found in zip(places, indices, strict=True)], int).ravel()
    head = packed([i for found in indices for i in found]) if k < places.shape[1] else b""
    values = y[chosen]
    if codec is None or not values.size:
        payload, decoded[chosen] = values.tobytes(), values
    elif codec == "Stat2":
        payload, decoded[chosen] = stat2(values)
    else:
        payload = compress_chunk(codec, values.tolist(), "float32")
        decoded[chosen] = restored(values, "float32", codec)
    return head + payload, decoded


def mean_of(ranks: list[Array], how: str) -> Array:
    """Return the mean D of the ranks' decoded values (S15.4)."""
    counts: Any = np.sum([x != 0 for x in ranks], 0) if how == "contributors" else len(ranks)
    found: Array = added(ranks) / np.maximum(counts, 1).astype(np.float32)
    return found


def cosine(x: Array, places: Array, sides: tuple[int, int], inverse: bool = False) -> Array:
    """Return the cosine transform T(x), or its inverse T'(x) (S15.6)."""
    found, (rows, columns) = np.zeros_like(x), map(_basis, sides)
    for row in places:
        block = x[row].astype(np.float64).reshape(sides)
        product = rows.T @ block @ columns if inverse else rows @ block @ columns.T
        found[row] = product.ravel()
    return found


def _basis(c: int) -> Array:
    i, odd = np.arange(c)[:, None], 2 * np.arange(c) + 1
    found: Array = np.sqrt(np.where(i == 0, 1, 2) / c) * np.cos(np.pi * i * odd / (2 * c))
    return np.where((i * odd) % (2 * c) == c, 0, found)


class Round(NamedTuple):
    """Results of a round of one tensor.

    Attributes:
        result: D, or T'(D), NaN throughout if it is not finite; not rounded to the dtype.
        errors: e by rank.
        messages: the bytes that each rank sends.
    """

    result: Array
    errors: list[Array]
    messages: list[bytes]


def sparse_round(
    inputs: list[Array],
    errors: list[Array],
    shape: tuple[int, ...],
    *,
    top_k: int,
    chunk: int,
    decay: float,
    mean: str,
    compression: str | None,
    transform: str | None = None,
    sign: bool = False,
) -> Round:
    """Return the results of one round for a tensor (S15.2 to S15.6).

    Args:
        inputs: differences, or gradients, by rank.
        errors: e by rank.
        shape: shape of the tensor.
        top_k: the algorithm's option, like the following arguments.
        chunk: likewise.
        decay: likewise.
        mean: likewise.
        compression: likewise.
        transform: likewise.
        sign: likewise.
    """
    places, sides = chunks(shape, chunk)

    def moved(x: Array, inverse: bool = False) -> Array:
        return x if transform is None else cosine(x, places, sides, inverse)

    given = [np.float32(decay) * e + x for x, e in zip(inputs, errors, strict=True)]
    messages, decoded = zip(
        *(sent(moved(p), places, top_k, compression) for p in given), strict=True
    )
    total = mean_of([*decoded], mean)
    result = moved(total, True)
    if not (np.isfinite(total).all() and np.isfinite(result).all()):
        return Round(np.full_like(result, np.nan), errors, [*messages])
    left = [p - moved(own, True) for p, own in zip(given, decoded, strict=True)]
    return Round(np.sign(result) if sign else result, left, [*messages])


@dataclass(kw_only=True)
class SparseDiLoCo(DiLoCo):
    """All ranks of a training with SparseLoCo (S15.5).

    Args:
        shapes: shapes of the parameters.
        orders: the row-major index of each parameter's elements.
        sparse: arguments of `sparse_round`.

    Attributes:
        errors: e by rank and parameter, in the order of the weights.
        messages: messages of each fragment sent, by rank.
    """

    shapes: list[tuple[int, ...]]
    orders: list[Array]
    sparse: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errors = [[np.zeros(x.size, np.float32) for x in rank] for rank in self.ranks]
        self.messages: list[list[bytes]] = []

    def _mean_difference(self, p: int) -> Weights:
        assert self.g is not None
        found, messages = {}, [b""] * len(self.ranks)
        for place in self.fragments[p]:
            back = np.argsort(self.orders[place])  # to row-major order

            def of(ranks: list[Weights], back: Array = back, place: int = place) -> list[Array]:
                return [x[place][back] for x in ranks]

            inputs = [self.g[place][back] - x for x in of(self.ranks)]
            found[place] = sparse_round(inputs, of(self.errors), self.shapes[place], **self.sparse)
            messages = [a + b for a, b in zip(messages, found[place].messages, strict=True)]
        self.messages.append(messages)
        if all(np.isfinite(each.result).all() for each in found.values()):
            for place, each in found.items():
                for mine, e in zip(self.errors, each.errors, strict=True):
                    mine[place] = e[self.orders[place]]
        return [each.result[self.orders[place]] for place, each in found.items()]
