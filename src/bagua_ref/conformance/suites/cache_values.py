"""Values that a cache returns, and values that it may store (S8.5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st

from bagua_ref.conformance.inputs.cache_values import (
    TENSORS,
    array_sources,
    long_sources,
    objects,
    plain_sources,
    tensor_sources,
    value_sources,
)
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.servers import LOADER, cache_script
from bagua_ref.conformance.suites.checks import check

_keys = st.one_of(st.integers(0, 11), st.text(max_size=5))
_sizes = st.integers(1, 5)


def _come_back(lab: Lab, draw: Draw, sources: list[str]) -> None:
    """Cache values and read them from the store, without pickle, and compare."""
    with cache_script(lab, 1, f"Source(dict(enumerate(values := [{', '.join(sources)}])))") as script:
        script.loader("d", draw(_sizes))
        for turn in ("made", "read"):
            script.do(
                "with without_pickle():\n    found = [loader.get(place, load) for place in range(len(values))]\n    loader.close()"
            )
            script.do("assert_same(found, values, 'values')")
            if turn == "made":
                script.loader("d")
        script.do("load.expect(*range(len(values)))")


@check("cache", "S8.5", "tensors", dtypes=TENSORS, needs=LOADER, effort=0.12)
def tensors(lab: Lab, draw: Draw) -> None:
    """Tensors of any shape and strides come back bit for bit, without pickle."""
    _come_back(lab, draw, draw(st.lists(tensor_sources(lab.dtype_name), min_size=1, max_size=3)))


_OTHERS: dict[str, tuple[Callable[[Lab], st.SearchStrategy[str]], int, str]] = {
    "arrays": (
        lambda lab: array_sources(), 4,
        "Arrays of any dtype, byte order, shape and strides come back bit for bit, without pickle.",
    ),
    "plain": (
        lambda lab: plain_sources(), 6,
        "None, bool, int, float, str and bytes come back unchanged, without pickle.",
    ),
    "long": (
        lambda lab: long_sources(), 2,
        "Values of more bytes, or entries, than 255 or 65,535 come back unchanged, without pickle.",
    ),
    "containers": (
        lambda lab: value_sources(lab.dtypes(TENSORS)), 2,
        "Tuples, lists and dicts of all these, however nested, come back unchanged, without pickle.",
    ),
}  # fmt: skip
"""Check -> draws its values, how many there are at most, and its sentence."""


def _others(lab: Lab, draw: Draw, name: str) -> None:
    values, most, _ = _OTHERS[name]
    _come_back(lab, draw, draw(st.lists(values(lab), min_size=1, max_size=most)))


for _name, _row in _OTHERS.items():
    check("cache", "S8.5", _name, needs=LOADER, effort=0.5, sentence=_row[2])(partial(_others, name=_name))


@check("cache", "S8.5", "needs_pickle", needs=LOADER, effort=0.5)
def needs_pickle(lab: Lab, draw: Draw) -> None:
    """Other objects raise an error that names allow_pickle, and nothing is stored; with allow_pickle=True they are stored."""
    value = draw(objects())
    with cache_script(lab, 1, f"Source({{'key': (value := {value})}})") as script:
        more = draw(st.sampled_from(["", ", allow_pickle=None", ", allow_pickle=False"]))
        script.loader("d", 1, more=more)
        script.do(
            "try:\n    loader.get('key', load)\nexcept Exception as error:\n"
            "    assert 'allow_pickle' in str(error), f'the error must name allow_pickle: {error}'\n"
            "else:\n    raise AssertionError('an object that needs pickle must raise an error')"
        )
        script.do("loader.flush()\nassert servers[0].keys() == [], f'{servers[0].keys()} were stored'")
        script.loader("d", 1, "other", more=", allow_pickle=True")
        script.do("load.calls.clear()\nother.get('key', load)\nother.close()")
        script.loader("d", 1, "other", more=", allow_pickle=True")
        script.do("found = other.get('key', load)\nload.expect('key')")
        script.do("assert str(found) == str(value) or found == value, f'{found!r} instead of {value!r}'")


@check("cache", "S8.5", "runs_nothing", needs=LOADER, effort=0.5)
def runs_nothing(lab: Lab, draw: Draw) -> None:
    """Reading a value runs no code from the store, unless allow_pickle=True."""
    bare = draw(st.booleans())
    nested = draw(st.sampled_from(["Trap()", "[1, Trap()]", "{'key': (None, Trap())}"]))
    with cache_script(lab) as script:
        if bare:
            script.do(f"import pickle\n\nservers[0].set('d_key', pickle.dumps({nested}, {draw(st.integers(0, 5))}))")
        else:
            script.loader("d", 1, "writer", more=", allow_pickle=True")
            script.do(f"writer.get('key', lambda key: {nested})\nwriter.close()")
        script.loader("d", 1, more=draw(st.sampled_from(["", ", allow_pickle=False"])))
        script.do(
            "try:\n    found = loader.get('key', lambda key: 'made anew')\n"
            "except (ValueError, TypeError) as error:\n    found = error"
        )
        script.do("Trap.assert_unsprung()")
        script.do("assert found == 'made anew' or 'allow_pickle' in str(found), f'found {found!r}'")
