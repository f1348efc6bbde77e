"""Caches compared with the contents of their stores (S8): a target's ``cache`` has `CacheLoader`,
with our parameters.

`cache_values` has stores that fail (S8.3), and the values that come back (S8.5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hypothesis import strategies as st

from bagua_ref.conformance.expected.samplers_plain import hash_of, stored_key
from bagua_ref.conformance.inputs.cache_values import NO_KEYS, TENSORS, key_sources
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.servers import LOADER, cache_script, reason_to_skip
from bagua_ref.conformance.suites.checks import check

__all__ = ["VALUES", "buffer_sizes", "prepare", "reason_to_skip", "store_of"]

VALUES = "Source({key: f'value {key}' for key in range(20)})"
"""Source of a load_fn, as of each script."""
buffer_sizes = st.integers(1, 5)

_names = st.one_of(st.sampled_from(["", "data", "a_b"]), st.text(max_size=6))
_keys = st.one_of(st.integers(0, 11), st.text(max_size=5))


def prepare() -> None:
    """Import the clients of servers."""
    import redis  # noqa: F401

    with contextlib.suppress(ImportError):
        import fakeredis  # noqa: F401


def _stored_name(dataset: str, key: object) -> str:
    """Return the name in the stores."""
    return stored_key(dataset, key if isinstance(key, str) else repr(key)).decode(
        "utf-8", "surrogatepass"
    )


def _placed(names: Sequence[str], stores: int) -> list[list[str]]:
    """Return the keys that each store has."""
    placed: list[list[str]] = [[] for _ in range(stores)]
    for name in dict.fromkeys(names):
        placed[store_of(name, stores)].append(name)
    return placed


def store_of(name: str, stores: int) -> int:
    """Return the store that has a name."""
    return hash_of(name.encode("utf-8", "surrogatepass")) % stores


@check("cache", "S8.1", "keys", needs=LOADER)
def keys(lab: Lab, draw: Draw) -> None:
    """A value is stored under "{dataset_name}_{key}", "%" and "_" of the name escaped, in the store
    that xxh64 of it selects.
    """
    name, wanted, stores = (
        draw(_names),
        draw(st.lists(key_sources(), min_size=1, max_size=8)),
        draw(st.integers(1, 4)),
    )
    with cache_script(lab, stores) as script:
        script.do("import pathlib\n\nimport numpy")
        script.loader(name, draw(buffer_sizes))
        script.do(
            f"for key in [{', '.join(source for source, _ in wanted)}]:\n    loader.get(key, load)"
        )
        script.do("loader.close()")
        script.do(
            "assert_keys(servers,"
            f" {_placed([_stored_name(name, key) for _, key in wanted], stores)!r})"
        )


@check("cache", "S8.1", "names", needs=LOADER, effort=0.5)
def names(lab: Lab, draw: Draw) -> None:
    """Loaders with the same dataset name share values; others do not."""
    both = draw(st.lists(st.sampled_from(["", "a", "b", "a_1", "a%5F1"]), min_size=2, max_size=3))
    wanted = draw(st.lists(st.sampled_from([1, 2, "1", "1_2"]), min_size=1, max_size=4))
    with cache_script(lab, draw(st.integers(1, 2))) as script:
        made: set[str] = set()
        for number, name in enumerate(both):
            script.loader(name, 1, f"loader{number}")
            for key in wanted:
                full = _stored_name(name, key)
                known = full in made
                script.do(f"loader{number}.get({key!r}, load)")
                script.do(
                    f"load.expect({'' if known else repr(key)})  # {full!r} is"
                    f" {'known' if known else 'new'}"
                )
                made.add(full)


@check("cache", "S8.1", "one_store_per_node", needs=LOADER, effort=0.5)
def one_store_per_node(lab: Lab, draw: Draw) -> None:
    """With cluster_mode=False, node k keeps all values in store k modulo the number of stores."""
    stores, node, wanted = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 4)),
        draw(st.lists(_keys, min_size=1, max_size=5)),
    )
    with cache_script(lab, stores) as script:
        script.do("import os\nfrom unittest import mock")
        made = (
            "loader = cache.CacheLoader(backend='redis', hosts=hosts, cluster_mode=False,"
            " dataset_name='d')"
        )
        script.do(
            f"with mock.patch.dict(os.environ, GROUP_RANK='{node}'):  # this node\n    {made}"
        )
        script.do(f"for key in {wanted!r}:\n    loader.get(key, load)\nloader.close()")
        expected: list[list[str]] = [[] for _ in range(stores)]
        expected[node % stores] = list(dict.fromkeys(f"d_{key}" for key in wanted))
        script.do(f"assert_keys(servers, {expected!r})")


@check("cache", "S8.1", "surrogates", needs=LOADER, effort=0.3)
def surrogates(lab: Lab, draw: Draw) -> None:
    """Lone surrogates, as in names of files that are not UTF-8, may be in keys and names; UTF-8
    encodes them with surrogatepass.
    """
    lone = st.tuples(
        st.text(max_size=2), st.sampled_from(["\ud800", "\udce9", "\udfff"]), st.text(max_size=2)
    ).map("".join)
    name, key = draw(
        st.one_of(
            st.tuples(lone, lone), st.tuples(_names, lone), st.tuples(lone, st.text(max_size=3))
        )
    )
    stores = draw(st.integers(1, 3))
    with cache_script(lab, stores, dataset=name, size=draw(buffer_sizes)) as script:
        script.do(f"found = [loader.get(key, load) for key in ({key!a}, 1, {key!a})]")
        script.do(
            f"load.expect({key!a}, 1)\nassert found[0] == found[2] != found[1],"
            " ascii(found)\nloader.close()"
        )
        script.do(
            "assert_keys(servers,"
            f" {_placed([_stored_name(name, key), _stored_name(name, 1)], stores)!a})"
        )


@check("cache", "S8.1", "other_keys", needs=LOADER, effort=0.3)
def other_keys(lab: Lab, draw: Draw) -> None:
    """Other keys, whose text need not identify them, are a TypeError, also in tuples and lists;
    nothing is stored for them.
    """
    key = draw(st.sampled_from(["{}", "(1, {})", "['a', [{}]]"])).format(
        draw(st.sampled_from(NO_KEYS))
    )
    with cache_script(lab) as script:
        script.do("import numpy")
        script.loader("d", draw(buffer_sizes))
        script.refuses(
            f"loader.get({key}, load)", "TypeError", repr(f"the key {key} must raise a TypeError")
        )
        script.do(
            "loader.get('key', load)\nload.expect('key')\nfound = loader.num_keys()\nassert found"
            " == 1, f'num_keys() is {found}'"
        )


_CHANGEABLE = (
    "[1, [2, 3]]",
    "{'a': [1], 'b': 2}",
    "tensor('int16', (3,), '010002000300')",
    "array('<i2', (3,), '010002000300')",
    "{'a': tensor('int16', (1,), '0100'), 'b': [array('<i2', (1,), '0100')]}",
)


@check("cache", "S8.2", "own", needs=LOADER, effort=0.3)
def own(lab: Lab, draw: Draw) -> None:
    """A value from `get()` is the caller's own: changing it changes neither the copy waiting to be
    written nor the stored one.
    """
    sources = [
        source for source in _CHANGEABLE if "tensor" not in source or "int16" in lab.dtypes(TENSORS)
    ]
    source, moves = draw(st.sampled_from(sources)), st.sampled_from(["", "flush", "close"])
    with cache_script(
        lab, 1, f"Source({{'key': {source}}})", dataset="d", size=draw(buffer_sizes)
    ) as script:
        for move in draw(st.lists(moves, min_size=2, max_size=5)):
            script.do(
                f"found = loader.get('key', load)\nassert_same(found, {source})\nspoil(found)"
            )
            if move:
                script.do(f"loader.{move}()")
            if move == "close":
                script.loader("d")
        script.do(f"assert_same(loader.get('key', load), {source})\nload.expect('key')")


@check("cache", "S8.2", "get", needs=LOADER, effort=1.5)
def get(lab: Lab, draw: Draw) -> None:
    """`get()` returns the value of a key, whichever loader made it; load_fn is called for new keys
    only; writes are buffered.
    """
    stores, size, name = (
        draw(st.integers(1, 3)),
        draw(buffer_sizes),
        draw(st.sampled_from(["data", "d", ""])),
    )
    moves = draw(
        st.lists(
            st.one_of(st.integers(0, 5), st.sampled_from(["flush", "close", "num_keys"])),
            min_size=2,
            max_size=16,
        )
    )
    with cache_script(lab, stores, dataset=name, size=size) as script:
        stored: dict[int, str] = {}
        waiting: dict[int, str] = {}
        calls = 0
        for move in moves:
            if isinstance(move, int):
                known = {**stored, **waiting}
                if move not in known:
                    calls += 1
                    waiting[move] = f"{move}, made by call {calls}"
                script.do(
                    f"found = loader.get({move},"
                    f" load)\nload.expect({'' if move in known else move})"
                )
                script.do(f"assert_same(found, {({**known, **waiting})[move]!r})")
            elif move == "num_keys":
                script.do(
                    f"found = loader.num_keys()\nassert found == {len({**stored, **waiting})},"
                    " f'num_keys() is {found}'"
                )
            else:
                script.do(f"loader.{move}()")
            if move == "close":
                script.loader(name, size)
            if not isinstance(move, int) or len(waiting) >= size:
                stored |= waiting
                waiting = {}
            script.do(
                "assert_keys(servers,"
                f" {_placed([_stored_name(name, key) for key in stored], stores)!r})"
            )


@check("cache", "S8.2", "none", needs=LOADER, effort=0.2)
def none(lab: Lab, draw: Draw) -> None:
    """A cached None is a hit."""
    with cache_script(
        lab, 1, "Source({'key': None})", dataset="d", size=draw(buffer_sizes)
    ) as script:
        for _ in range(2):
            script.do("assert loader.get('key', load) is None")
            script.do(
                "assert loader.get('key', load) is None\nassert load.calls == ['key'], f'load_fn"
                " was called for {load.calls}'"
            )
            script.do("loader.close()")
            script.loader("d")


@check("cache", "S8.2", "num_keys", needs=LOADER, effort=0.5)
def num_keys(lab: Lab, draw: Draw) -> None:
    """`num_keys()` flushes the write buffer and counts the keys of all datasets in all stores."""
    stores, counts = (
        draw(st.integers(1, 3)),
        draw(st.lists(st.sampled_from([0, 1, 2, 5, 70]), min_size=1, max_size=3)),
    )
    with cache_script(lab, stores) as script:
        for number, count in enumerate(counts):
            script.loader(f"set {number}", 100, f"loader{number}")
            script.do(f"for key in range({count}):\n    loader{number}.get(key, load)")
            total = sum(counts[: number + 1])
            script.do(
                f"found = loader{number}.num_keys()\nassert found == {total}, f'num_keys() is"
                f" {{found}}, not {total}'"
            )


@check("cache", "S8.2", "worker", needs=LOADER, effort=0.2)
def worker(lab: Lab, draw: Draw) -> None:
    """A worker process writes its buffered values when it ends, and its parent's buffered values
    are not lost.
    """
    size, mine, theirs = draw(st.integers(2, 6)), draw(st.integers(0, 3)), draw(st.integers(1, 9))
    with cache_script(lab, dataset="d", size=size) as script:
        script.do(f"for key in range({mine}):\n    loader.get(key, load)")
        script.do(
            f"def work():\n    for key in range(100, {100 + theirs}):\n        loader.get(key,"
            " load)\n"
        )
        script.do("in_worker(work)")
        written = [f"d_{key}" for key in (*range(mine // size * size), *range(100, 100 + theirs))]
        script.do(f"assert_keys(servers, {[written]!r})")
        script.do("loader.close()")
        script.do(
            "assert_keys(servers,"
            f" {[[f'd_{key}' for key in (*range(mine), *range(100, 100 + theirs))]]!r})"
        )


@check("cache", "S8.2", "exit", needs=LOADER, effort=0.1)
def at_exit(lab: Lab, draw: Draw) -> None:
    """Values that are buffered when a script ends are written."""
    count, kept = draw(st.integers(1, 5)), draw(st.booleans())
    with cache_script(lab) as script:
        lines = ["def work():", *["    global kept"] * kept]
        lines.append(
            f"    {'kept = ' * kept}loader = cache.CacheLoader('redis', 'd', 100, hosts=hosts)"
        )
        script.do(
            "\n".join([*lines, f"    for key in range({count}):\n        loader.get(key, load)\n"])
        )
        script.do(
            "in_worker(work, as_script=True)\nassert_keys(servers,"
            f" {[[f'd_{key}' for key in range(count)]]!r})"
        )
        script.loader("d")
        script.do(f"for key in range({count}):\n    loader.get(key, load)\nload.expect()")


@check("cache", "S8.2", "connections", needs=LOADER, effort=0.1)
def connections(lab: Lab, draw: Draw) -> None:
    """A forked worker and its parent, which had connections already, each get the answers to their
    own requests.
    """
    with cache_script(lab, draw(st.integers(1, 2)), VALUES, dataset="d") as script:
        script.do("for key in range(20):\n    loader.get(key, load)\nload.calls.clear()")
        script.do(
            "def read(keys):\n    for key in [*keys] * 15:\n        assert_same(loader.get(key,"
            " load), f'value {key}')\n"
        )
        script.do("def work():\n    read(range(20))\n    load.expect()\n")
        script.do("in_worker(work, meanwhile=lambda: read(range(19, -1, -1)))\nload.expect()")


@check("cache", "S8.2", "raises", needs=LOADER, effort=0.3)
def load_raises(lab: Lab, draw: Draw) -> None:
    """An exception of load_fn passes on, and nothing is cached: the next access calls load_fn
    again.
    """
    kinds = st.sampled_from(
        [
            "KeyError",
            "ValueError",
            "ConnectionError",
            "TimeoutError",
            "Stop",
            "redis.ConnectionError",
        ]
    )
    with cache_script(lab) as script:
        script.do("import redis\n\nclass Stop(BaseException):\n    pass\n")
        script.loader("d", draw(buffer_sizes))
        for kind in draw(st.lists(kinds, min_size=1, max_size=4)):
            script.do(f"def fail(key):\n    raise {kind}(key)\n")
            script.refuses(
                "found = loader.get('key', fail)",
                kind,
                f"f'get() returned {{found!r}} when load_fn raised {kind}'",
            )
        script.do(
            "found = loader.num_keys()\nassert found == 0, f'num_keys() is {found} after load_fn"
            " raised'"
        )
        script.do(
            "loader.get('key', load)\nload.expect('key')\nassert loader.stats().errors == 0, 'an"
            " error was counted'"
        )


@check("cache", "S8.2", "lasting", needs=LOADER, effort=0.1)
def lasting(lab: Lab, draw: Draw) -> None:
    """Stored values have no time to live."""
    stores = draw(st.integers(1, 2))
    with cache_script(lab, stores, dataset="d", size=draw(buffer_sizes)) as script:
        script.do("for key in range(7):\n    loader.get(key, load)\nloader.close()")
        script.do(
            "found = [server.expiring() for server in servers]\nassert not any(found), f'keys"
            " expire: {found}'"
        )


@check("cache", "S8.2", "dataset", needs=(*LOADER, "CachedDataset"), effort=0.5)
def dataset(lab: Lab, draw: Draw) -> None:
    """A cached dataset has the samples of the dataset and loads each of them once."""
    length, name = draw(st.integers(4, 12)), draw(_names)
    lab.dtypes(("int64",))
    with cache_script(lab, draw(st.integers(1, 3))) as script:
        script.do(
            "class Squares(torch.utils.data.Dataset):\n    made = []\n\n    def __len__(self):\n  "
            f"      return {length}\n\n    def __getitem__(self, index):\n       "
            " self.made.append(index)\n        return torch.tensor(index) ** 2\n"
        )
        size = draw(buffer_sizes)
        made = (
            f"cache.CachedDataset(Squares(), backend='redis', dataset_name={name!r},"
            f" writer_buffer_size={size}, hosts=hosts)"
        )
        script.do(f"samples = {made}\nloader = samples.cache_loader")
        script.do(f"assert len(samples) == {length}")
        script.do("from torch.utils.data import DataLoader\n")
        wanted = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=10))
        twice = (
            f"next(iter(DataLoader(samples, batch_size=2, sampler=[{wanted[0]}] * 2,"
            " collate_fn=list)))"
        )
        for _ in range(2):  # new, then cached
            script.do(
                f"batch = {twice}\nbatch[0].fill_(-1)\nassert_same(batch[1],"
                f" torch.tensor({wanted[0] ** 2}), 'its twin')"
            )
        script.do(
            f"for index in {wanted}:\n    assert_same(samples[index], torch.tensor(index**2))"
        )
        batches = f"DataLoader(samples, batch_size={draw(st.integers(2, 5))})"
        script.do(
            f"for _ in range(2):\n    assert torch.cat(list({batches})).tolist() == [index**2 for"
            f" index in range({length})]"
        )
        script.do(
            f"assert sorted(Squares.made) == list(range({length})), f'samples were made at"
            " {Squares.made}'"
        )
