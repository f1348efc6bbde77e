"""Values that a cache returns, and values that it may store (S8.5); stores that are down, full, or
hold damaged values (S8.3).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st

from bagua_ref.conformance.inputs.cache_values import (
    ARRAYS,
    PLAIN,
    TENSORS,
    long_sources,
    objects,
    tensor_sources,
    value_sources,
)
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.servers import LOADER, cache_script
from bagua_ref.conformance.suites.cache import VALUES, buffer_sizes, store_of
from bagua_ref.conformance.suites.checks import check


def _come_back(lab: Lab, draw: Draw, sources: list[str]) -> None:
    """Cache values and read them from the store, without pickle, and compare."""
    with cache_script(
        lab,
        1,
        f"Source(dict(enumerate(values := [{', '.join(sources)}])))",
        dataset="d",
        size=draw(buffer_sizes),
    ) as script:
        for turn in ("made", "read"):
            script.do(
                "with without_pickle():\n    found = [loader.get(place, load) for place in"
                " range(len(values))]\n    loader.close()"
            )
            script.do("assert_same(found, values, 'values')")
            if turn == "made":
                script.loader("d")
        script.do("load.expect(*range(len(values)))")


@check("cache", "S8.5", "tensors", dtypes=TENSORS, needs=LOADER, effort=0.12)
def tensors(lab: Lab, draw: Draw) -> None:
    """Tensors of any shape and strides come back bit for bit, without pickle."""
    _come_back(lab, draw, draw(st.lists(tensor_sources(lab.dtype_name), min_size=1, max_size=3)))


_OTHERS: dict[str, tuple[Callable[[Lab], tuple[st.SearchStrategy[str], ...]], str]] = {
    "arrays": (
        lambda lab: ARRAYS,
        "Arrays of any dtype, byte order, shape and strides come back bit for bit, without pickle.",
    ),
    "plain": (
        lambda lab: PLAIN,
        "None, bool, int, float, str and bytes come back unchanged, without pickle.",
    ),
    "long": (
        lambda lab: long_sources(lab.dtypes(TENSORS)),
        "Values of more bytes, or entries, than 255 or 65,535 come back unchanged, without pickle.",
    ),
    "containers": (
        lambda lab: (value_sources(lab.dtypes(TENSORS)),) * 2,
        (
            "Tuples, lists and dicts of all these, however nested, come back unchanged, without"
            " pickle."
        ),
    ),
}
"""Check -> draws each of its values, and its sentence."""


def _others(lab: Lab, draw: Draw, name: str) -> None:
    kinds = _OTHERS[name][0](lab)
    alone = draw(st.integers(0, 9)) == 0  # what a counterexample becomes
    _come_back(lab, draw, [draw(st.one_of(kinds))] if alone else [draw(kind) for kind in kinds])


for _name, _row in _OTHERS.items():
    check("cache", "S8.5", _name, needs=LOADER, effort=0.5, sentence=_row[1])(
        partial(_others, name=_name)
    )


@check("cache", "S8.5", "needs_pickle", needs=LOADER, effort=0.5)
def needs_pickle(lab: Lab, draw: Draw) -> None:
    """Other objects raise an error that names allow_pickle, and nothing is stored; with
    allow_pickle=True they are stored.
    """
    value = draw(objects())
    with cache_script(lab, 1, f"Source({{'key': (value := {value})}})") as script:
        more = draw(st.sampled_from(["", ", allow_pickle=None", ", allow_pickle=False"]))
        script.loader("d", 1, more=more)
        script.do(
            "try:\n    loader.get('key', load)\nexcept Exception as error:\n    assert"
            " 'allow_pickle' in str(error), f'the error must name allow_pickle: {error}'\nelse:\n  "
            "  raise AssertionError('an object that needs pickle must raise an error')"
        )
        script.do(
            "loader.flush()\nassert servers[0].keys() == [], f'{servers[0].keys()} were stored'"
        )
        script.loader("d", 1, "other", more=", allow_pickle=True")
        script.do("load.calls.clear()\nother.get('key', load)\nother.close()")
        script.loader("d", 1, "other", more=", allow_pickle=True")
        script.do("found = other.get('key', load)\nload.expect('key')")
        script.do(
            "assert str(found) == str(value) or found == value, f'{found!r} instead of {value!r}'"
        )


@check("cache", "S8.5", "runs_nothing", needs=LOADER, effort=0.5)
def runs_nothing(lab: Lab, draw: Draw) -> None:
    """Reading a value runs no code from the store, unless allow_pickle=True."""
    bare = draw(st.booleans())
    nested = draw(st.sampled_from(["Trap()", "[1, Trap()]", "{'key': (None, Trap())}"]))
    with cache_script(lab) as script:
        if bare:
            script.do(
                f"import pickle\n\nservers[0].set('d_key', pickle.dumps({nested},"
                f" {draw(st.integers(0, 5))}))"
            )
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


# Stores that fail.


def _damaged(draw: Draw, server: str) -> str:
    """Return lines that damage the value of ``d_key`` on a server."""
    kind = draw(st.sampled_from(["changed", "changed", "cut", "longer", "foreign"]))
    if kind == "foreign":
        data = draw(
            st.one_of(
                st.binary(max_size=40), st.sampled_from([b"", b"OK", b"None", b"\x80\x04K\x01."])
            )
        )
        return f"{server}.set('d_key', {data!r})"
    place = f"len(data) * {draw(st.integers(0, 99))} // 100"
    bit = 1 << draw(st.integers(0, 7))
    data = {
        "changed": (
            f"bytes(byte ^ {bit} if place == {place} else byte for place, byte in enumerate(data))"
        ),
        "cut": f"data[: {place}]",
        "longer": f"data + {draw(st.binary(min_size=1, max_size=3))!r}",
    }[kind]
    return f"data = {server}.get('d_key')\n{server}.set('d_key', {data})"


@check("cache", "S8.3", "damage", needs=LOADER, effort=1.5)
def damage(lab: Lab, draw: Draw) -> None:
    """A truncated, altered or foreign value is loaded again: no exception is raised and no wrong
    value returned.
    """
    stores, dtypes = draw(st.integers(1, 2)), lab.dtypes(TENSORS)
    long = [
        "b'some bytes' * 5",
        "b'some bytes' * 50",
        *["tensor('int32', (8,), '0102030405060708' * 4)"] * ("int32" in dtypes),
    ]
    value = draw(st.one_of(st.sampled_from(long), value_sources(dtypes)))
    with cache_script(lab, stores, f"Source({{'key': {value}}})", dataset="d") as script:
        script.do("loader.get('key', load)\nloader.close()")
        script.do(_damaged(draw, f"servers[{store_of('d_key', stores)}]"))
        script.loader("d")
        script.do("load.calls.clear()")
        for _ in range(2):
            script.do(f"assert_same(loader.get('key', load), {value})")
        script.do(
            "errors = loader.stats().errors\nassert errors or not load.calls, f'stats().errors is"
            " {errors} after damage'"
        )


@check("cache", "S8.3", "down", needs=LOADER, effort=0.4)
def down(lab: Lab, draw: Draw) -> None:
    """When a store is down, load_fn is used instead, with one warning; the other stores continue to
    work.
    """
    stores, size, wanted = (
        draw(st.integers(1, 3)),
        draw(buffer_sizes),
        draw(st.lists(st.integers(0, 9), min_size=2, max_size=12)),
    )
    dead, early = draw(st.integers(0, stores - 1)), draw(st.booleans())
    with cache_script(lab, stores, VALUES) as script:
        script.do(f"dead = servers[{dead}]")
        if early:
            script.do("dead.kill()")
        script.loader("d", size)
        if not early:
            script.do(f"loader.get({draw(st.integers(0, 9))}, load)\ndead.kill()")
        script.warnings_of(
            f"for key in {wanted}:\n    assert_same(loader.get(key, load), f'value {{key}}')"
        )
        refused = any(store_of(f"d_{key}", stores) == dead for key in wanted)
        if refused:
            script.do("assert len(seen) == 1, f'there must be one warning, not {len(seen)}'")
            script.do(
                "errors = loader.stats().errors\nassert errors > 0, f'stats().errors is {errors}'"
            )
        else:
            script.do(
                "assert len(seen) <= 1, f'there must be one warning at most, not {len(seen)}'"
            )
        script.do("loader.num_keys()\nloader.close()")


@check("cache", "S8.3", "full", needs=LOADER, effort=0.3)
def full(lab: Lab, draw: Draw) -> None:
    """When a store is full, load_fn provides the missing values, with one warning."""
    size, old, new = draw(buffer_sizes), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    new = max(new, size)  # at least one value is written
    with cache_script(lab, 1, VALUES, dataset="d", size=size) as script:
        script.do(
            f"for key in range({old}):\n    loader.get(key,"
            " load)\nloader.flush()\nservers[0].refuse_writes()"
        )
        script.do(f"load.expect(*range({old}))")
        script.warnings_of(
            f"for key in range({old + new}):\n    assert_same(loader.get(key, load), f'value"
            " {key}')"
        )
        script.do(
            f"load.expect(*range({old}, {old + new}))\nassert len(seen) == 1, f'expected one"
            " warning, got {len(seen)}'"
        )


@check("cache", "S8.3", "warns_once", needs=LOADER, effort=0.05)
def warns_once(lab: Lab, draw: Draw) -> None:
    """A store that stays down causes one warning, however often it is accessed."""
    with cache_script(lab) as script:
        script.do("import time\n\nservers[0].kill()")
        script.loader("d", draw(buffer_sizes))
        script.warnings_of("for key in range(4):\n    loader.get(key, load)\n    time.sleep(0.15)")
        script.do("assert len(seen) == 1, f'there must be one warning, not {len(seen)}'")


@check("cache", "S8.3", "pauses", needs=LOADER, effort=0.05)
def pauses(lab: Lab, draw: Draw) -> None:
    """A store that has failed is left alone for a while: not every access connects to it."""
    with cache_script(lab, dataset="d", size=draw(buffer_sizes)) as script:
        script.do("loader.get('early', load)\nloader.flush()\nservers[0].kill()")
        lines = (
            "with Refusals(servers[0].host) as refusals:\n    for key in range(200):\n       "
            " loader.get(key, load)"
        )
        script.warnings_of(lines)
        script.do(
            "tried = refusals.count\nassert tried <= 100, f'200 accesses tried to connect {tried}"
            " times'"
        )


@check("cache", "S8.3", "back", needs=LOADER, effort=0.08)
def back(lab: Lab, draw: Draw) -> None:
    """A store that is back is used again, and no more than the write buffer holds was waiting for
    it.
    """
    size, made = draw(buffer_sizes), draw(st.integers(2, 5))
    with cache_script(lab) as script:
        script.do("import itertools\nimport time\n\nnumbers = itertools.count()")
        script.loader("d", size)
        script.do("loader.get('early', load)\nservers[0].kill()")
        script.do(
            f"for _ in range({made * size}):\n    loader.get(next(numbers),"
            " load)\nservers[0].start()"
        )
        script.do(
            "time.sleep(0.25)  # for those that leave a store alone that has failed\nloader.flush()"
        )
        script.do(
            f"kept = len(servers[0].keys())\nassert kept <= {size}, f'{{kept}} values had waited in"
            f" a buffer of {size}'"
        )
        script.do(
            "def is_used():\n    loader.get(next(numbers), load)\n    loader.flush()\n    return"
            " servers[0].keys()\n"
        )
        script.do("assert_within(8, is_used, 'the store is used again')")


@check("cache", "S8.3", "counters", needs=LOADER, effort=0.5)
def counters(lab: Lab, draw: Draw) -> None:
    """`stats()` reports hits and misses, and no errors when there are none."""
    wanted = draw(st.lists(st.integers(0, 5), min_size=1, max_size=10))
    with cache_script(lab, draw(st.integers(1, 2)), dataset="d", size=draw(buffer_sizes)) as script:
        script.do(f"for key in {wanted}:\n    loader.get(key, load)\nstats = loader.stats()")
        expected = (len(wanted) - len(set(wanted)), len(set(wanted)), 0)
        found = "(stats.hits, stats.misses, stats.errors)"
        script.do(
            f"assert {found} == {expected}, f'hits, misses, errors are {{{found}}}, not {expected}'"
        )
