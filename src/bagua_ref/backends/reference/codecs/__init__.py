"""Codecs in tiled NumPy, one file each."""

from bagua_ref.backends.reference.codecs.minmax_uint8 import MinMaxUInt8
from bagua_ref.backends.reference.codecs.mxfp4 import MXFP4
from bagua_ref.backends.reference.codecs.mxfp8 import MXFP8
from bagua_ref.backends.reference.codecs.mxint8 import MXINT8
from bagua_ref.backends.reference.codecs.one_bit import OneBit

__all__ = ["CODECS"]

CODECS = {codec.name: codec for codec in (MinMaxUInt8, MXFP8, MXFP4, MXINT8, OneBit)}
"""The codecs of the reference backend by name."""
