"""Codecs in tiled NumPy, one file each."""

from bagua_ref.backends.reference.codecs.microscaling import MXFP4, MXFP8, MXINT8
from bagua_ref.backends.reference.codecs.minmax_uint8 import MinMaxUInt8
from bagua_ref.backends.reference.codecs.one_bit import OneBit

__all__ = ["CODECS"]

CODECS = {codec.name: codec for codec in (MinMaxUInt8, MXFP8, MXFP4, MXINT8, OneBit)}
"""The codecs of the reference backend by name."""
