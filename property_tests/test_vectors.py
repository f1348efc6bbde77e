"""Properties of golden vectors: written files are read back equal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, adversarial

from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.case import canonical
from bagua_ref.conformance.cases.tensor_files import read_safetensors, write_safetensors


@st.composite
def named_tensors(draw):
    names = draw(
        st.lists(st.text(max_size=5), max_size=4, unique=True).filter(
            lambda names: "__metadata__" not in names
        )
    )
    return {
        name: draw(adversarial(draw(st.sampled_from(COMPRESSIBLE)), draw(st.integers(0, 5))))
        for name in names
    }


@given(tensors=named_tensors())
def test_what_is_written_is_read_and_has_the_same_bytes_in_any_order(tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        written = write_safetensors(path, tensors)
        found = read_safetensors(path)
        assert write_safetensors(path, dict(reversed(tensors.items()))) == written
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_equal(found[name], x, EXACT)


@given(dtype=st.sampled_from(COMPRESSIBLE), data=st.data())
def test_no_nan_keeps_bits_of_its_own(dtype, data):
    bits = data.draw(
        st.lists(
            st.integers(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1),
            max_size=8,
        )
    )
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    x = torch.tensor(bits, dtype=integer).view(dtype)
    found = canonical(x)
    assert_equal(found, x, EXACT)
    assert len(found.view(integer)[x.isnan()].unique()) <= 1
