"""Properties of golden vectors: arbitrary input files are read or refused, and written files read back equal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, adversarial

from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.formats.safetensors_file import DamagedFileError, read_safetensors, write_safetensors
from bagua_ref.conformance.vectors.case import canonical
from bagua_ref.conformance.vectors.independent import solve


def read(data: bytes) -> dict[str, torch.Tensor] | None:
    """Return the tensors in these bytes, or None if they are refused; other errors are raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(data)
        try:
            return read_safetensors(path)
        except DamagedFileError:
            return None


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_safetensors(Path(folder, "x.safetensors"), tensors)


@st.composite
def named_tensors(draw):
    names = draw(st.lists(st.text(max_size=5), max_size=4, unique=True).filter(lambda names: "__metadata__" not in names))
    return {name: draw(adversarial(draw(st.sampled_from(COMPRESSIBLE)), draw(st.integers(0, 5)))) for name in names}


@given(tensors=named_tensors())
def test_what_is_written_is_read(tensors):
    found = read(written(tensors))
    assert found is not None
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_equal(found[name], x, EXACT)


@given(tensors=named_tensors())
def test_equal_tensors_give_equal_bytes_in_any_order(tensors):
    assert written(dict(reversed(tensors.items()))) == written({name: x.clone() for name, x in tensors.items()})


@given(data=st.binary(max_size=200), length=st.integers(0, 250))
def test_any_bytes_are_read_or_refused(data, length):
    read(data)
    read(length.to_bytes(8, "little") + data)


@given(tensors=named_tensors(), data=st.data())
def test_a_changed_file_is_read_or_refused(tensors, data):
    whole = bytearray(written(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(whole))


@given(dtype=st.sampled_from(COMPRESSIBLE), data=st.data())
def test_no_nan_keeps_bits_of_its_own(dtype, data):
    bits = data.draw(st.lists(st.integers(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1), max_size=8))
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    x = torch.tensor(bits, dtype=integer).view(dtype)
    found = canonical(x)
    assert_equal(found, x, EXACT)
    assert len({number for number, nan in zip(found.view(integer).tolist(), x.isnan().tolist(), strict=True) if nan}) <= 1


@given(nranks=st.integers(1, 40).map(lambda half: 2 * half), step=st.integers(0, 2**62), data=st.data())
def test_S3_4_the_second_opinion_on_peers_is_an_involution(nranks, step, data):
    rank = data.draw(st.integers(0, nranks - 1))

    def peer(of: int) -> int:
        inputs = {"rank": torch.tensor([of]), "step": torch.tensor([step])}
        return int(solve("peers", "shift_one_peer", "int64", {"nranks": nranks}, inputs)["peer"])

    assert peer(peer(rank)) == rank
