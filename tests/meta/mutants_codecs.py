# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the codecs of S12: name, clause, file, original text, mutated text."""

from __future__ import annotations

_FOLDER = "backends/reference/codecs"
MX, FLOAT, FP8, FP4, INT8, BIT = (
    f"{_FOLDER}/{name}.py" for name in ("microscaling", "mxfloat", "mxfp8", "mxfp4", "mxint8", "one_bit")
)
FORMAT = "backends/formats.py"
SCALE = "scale = np.maximum((largest >> 23) - self.emax, 0)"

OF_CODEC: list[tuple[str, str, str, str, str]] = [
    ("the exponent is float32's log2", "S12.1", MX, SCALE, "scale = np.clip(np.floor(np.log2(largest.view(np.float32))).clip(-200, 200).astype(np.int32) + 127 - self.emax, 0, 254) if (largest < _INFINITY_BITS).all() else np.maximum((largest >> 23) - self.emax, 0)"),
    ("the exponent is rounded up", "S12.1", MX, SCALE, "scale = np.where(largest >= _INFINITY_BITS, 255, np.clip((largest + 0x7FFFFF >> 23) - self.emax, 0, 254))"),
    ("small scales wrap around", "S12.1", MX, SCALE, "scale = ((largest >> 23) - self.emax) % 256"),
    ("the scale of zeros is 1", "S12.1", MX, SCALE, "scale = np.where(largest == 0, 127, np.maximum((largest >> 23) - self.emax, 0))"),
    ("the sign of the largest decides about its block", "S12.1", MX, "np.bitwise_and(tile.view(np.int32), 0x7FFFFFFF, out=magnitude.view(np.int32))", "np.maximum(tile, 0, out=magnitude)"),
    ("garbage stays behind the elements", "S12.1", MX, "        payload.numpy()[:, scales.shape[1] + elements.shape[1] :] = 0\n", ""),
    ("the last, shorter block takes part in the one before", "S12.1", MX, "            scales[rows, blocks] = scale.reshape(count, -1)\n", "            scales[rows, blocks] = scale.reshape(count, -1)\n            scales[rows, -1:] = scales[rows, -2:-1] if scales.shape[1] > 1 and x.shape[1] % BLOCK_SIZE else scales[rows, -1:]\n"),
    ("the largest element is one less", "S12.1", FLOAT, "clamp_(max=self.largest)", "clamp_(max=self.largest - 1)"),
    ("what saturates becomes E4M3's NaN", "S12.1", FLOAT, "clamp_(max=self.largest)", "clamp_(max=127)"),
    ("halves are rounded down", "S12.1", FLOAT, "        np.add(magnitude, anchor, out=magnitude)\n", "        magnitude.view(np.int32)[magnitude > 0] -= 1\n        np.add(magnitude, anchor, out=magnitude)\n"),
    ("halves are rounded up", "S12.1", FLOAT, "        np.add(magnitude, anchor, out=magnitude)\n", "        magnitude.view(np.int32)[magnitude > 0] += 1\n        np.add(magnitude, anchor, out=magnitude)\n"),
    ("subnormals of the element format are lost", "S12.1", FLOAT, "        scaled(magnitude, -exponent, out=magnitude)\n", "        scaled(magnitude, -exponent, out=magnitude)\n        magnitude[magnitude < 2.0 ** (1 - self.bias)] = 0\n"),
    ("-0 loses its sign", "S12.1", FLOAT, "sign = np.signbit(tile)", "sign = tile < 0"),
    ("what rounds to -0 loses its sign", "S12.1", FLOAT, "        sign = np.signbit(tile)\n", "        sign = np.signbit(tile) & ((code != 0) | (tile == 0))\n"),
    ("float32 subnormals are flushed", "S12.1", MX, "            magnitude = buffers.like(2, tile)\n", "            tile = np.where(np.abs(tile) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), tile), tile)\n            magnitude = buffers.like(2, tile)\n"),
    ("the first of a pair is in the high nibble", "S12.1", FP4, "np.bitwise_or(pairs, pairs >> 4, out=pairs)", "np.bitwise_or(pairs << 4, pairs >> 8, out=pairs)"),
    ("E4M3's NaN is 480", "S12.1", FP8, "        if is_nan.any():\n", "        if False:\n"),
    ("integers are rounded half up", "S12.1", INT8, "np.rint(level, out=level)", "np.floor(level + np.float32(0.5), out=level)"),
    ("integers reach -128", "S12.1", INT8, "clamp_(-127, 127)", "clamp_(-128, 127)"),
    ("-128 decodes to +2", "S12.1", INT8, "np.copyto(out, codes.view(np.int8))", "np.copyto(out, codes.view(np.int8))\n        out[codes == 128] = 128"),
    ("scales beyond 2^127 are infinite", "S12.1", FLOAT, "np.minimum(exponent, 127), out=out)", "exponent, out=out)"),
    ("what lies beyond the dtype becomes infinite", "S12.1", MX, "np.clip(tile, np.float32(-largest), np.float32(largest), out=tile)", "pass"),
    ("payloads are not padded", "S12.1", FORMAT, "return _padded(-(-c // BLOCK_SIZE) + -(-c * self.bits // 8))", "return -(-c // BLOCK_SIZE) + -(-c * self.bits // 8)"),
    ("s is the mean of magnitudes", "S12.2", BIT, 'np.einsum("ij,ij->i", wide, wide)', 'np.abs(wide).sum(1) ** 2 / max(c, 1)'),
    ("squares are summed in float32", "S12.2", BIT, 'np.einsum("ij,ij->i", wide, wide)', 'np.einsum("ij,ij->i", wide.astype(np.float32), wide.astype(np.float32))'),
    ("the divisor is c - 1", "S12.2", BIT, "np.sqrt(squares / c)", "np.sqrt(squares / max(c - 1, 1))"),
    ("the padding counts in c", "S12.2", BIT, "np.sqrt(squares / c)", "np.sqrt(squares / (-(-c // 8) * 8))"),
    ("zeros are negative", "S12.2", BIT, "np.packbits(tile >= 0, axis=1)", "np.packbits(tile > 0, axis=1)"),
    ("-0 is negative", "S12.2", BIT, "np.packbits(tile >= 0, axis=1)", "np.packbits(~np.signbit(tile), axis=1)"),
    ("the first element is in the lowest bit", "S12.2", BIT, "np.packbits(tile >= 0, axis=1)", 'np.packbits(tile >= 0, axis=1, bitorder="little")'),
    ("garbage stays in the header", "S12.2", BIT, "        array[:, :HEADER_BYTES], array[:, HEADER_BYTES + bits.shape[1] :] = 0, 0\n", "        array[:, HEADER_BYTES + bits.shape[1] :] = 0\n"),
    ("garbage stays behind the bits", "S12.2", BIT, "        array[:, :HEADER_BYTES], array[:, HEADER_BYTES + bits.shape[1] :] = 0, 0\n", "        array[:, :HEADER_BYTES] = 0\n"),
    ("infinities poison nothing", "S12.3", MX, "poisoned = largest >= _INFINITY_BITS", "poisoned = largest > _INFINITY_BITS"),
    ("a poisoned block keeps its elements", "S12.3", MX, "scale[poisoned], codes[poisoned[:, 0]] = _POISON, 0", "scale[poisoned] = _POISON"),
    ("one block poisons its chunk", "S12.3", MX, "            if poisoned.any():\n", "            if poisoned.any():\n                poisoned[:] = True\n"),
    ("scale 255 is 2^128", "S12.3", MX, "            if (scale == _POISON).any():\n                tile[scale[:, 0] == _POISON] = np.nan\n", ""),
    ("a poisoned chunk keeps its bits", "S12.3", BIT, "        bits[poisoned] = 0\n", ""),
    ("one bit's NaN is another one", "S12.3", BIT, "_NAN = np.uint32(0x7FC00000)", "_NAN = np.uint32(0xFFC00000)"),
    ("errors are twice as large", "S12.3", FLOAT, "        np.subtract(code, np.uint8(exponents_of_the_anchor % 256), out=code)\n", "        np.subtract(code, np.uint8(exponents_of_the_anchor % 256), out=code)\n        code &= 0xFE\n"),
]  # fmt: skip
