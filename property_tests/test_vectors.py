"""Properties of golden vectors: written files are read back equal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, adversarial

from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.tensor_files import read_safetensors, write_safetensors
from bagua_ref.conformance.vectors.case import canonical


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_safetensors(Path(folder, "x.safetensors"), tensors)


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
def test_what_is_written_is_read(tensors):
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder, "x.safetensors"), tensors)
        found = read_safetensors(Path(folder, "x.safetensors"))
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_equal(found[name], x, EXACT)


@given(tensors=named_tensors())
def test_equal_tensors_give_equal_bytes_in_any_order(tensors):
    assert written(dict(reversed(tensors.items()))) == written(
        {name: x.clone() for name, x in tensors.items()}
    )


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
    assert (
        len(
            {
                number
                for number, nan in zip(
                    found.view(integer).tolist(), x.isnan().tolist(), strict=True
                )
                if nan
            }
        )
        <= 1
    )
