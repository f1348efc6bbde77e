"""The hash that places keys of the cache (S8.1), in plain Python, to check the library's with."""

from __future__ import annotations

__all__ = ["xxh64"]

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = 2**64 - 1


def xxh64(data: bytes) -> int:
    """Return the 64-bit xxHash of ``data`` with seed 0.

    >>> hex(xxh64(b""))
    '0xef46db3751d8e999'
    """
    place, length = 0, len(data)
    if length >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        while place + 32 <= length:
            lanes = [_round(lane, _word(data, place + 8 * i, 8)) for i, lane in enumerate(lanes)]
            place += 32
        total = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            total = ((total ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        total = _P5
    total = (total + length) & _MASK
    while place + 8 <= length:
        total = (_rotated(total ^ _round(0, _word(data, place, 8)), 27) * _P1 + _P4) & _MASK
        place += 8
    if place + 4 <= length:
        total = (_rotated(total ^ (_word(data, place, 4) * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        place += 4
    for byte in data[place:]:
        total = _rotated(total ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    total = (total ^ (total >> 33)) * _P2 & _MASK
    total = (total ^ (total >> 29)) * _P3 & _MASK
    return total ^ (total >> 32)


def _word(data: bytes, place: int, size: int) -> int:
    return int.from_bytes(data[place : place + size], "little")


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotated((lane + word * _P2) & _MASK, 31) * _P1 & _MASK
