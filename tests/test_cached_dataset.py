"""Tests of CachedDataset with every kind of DataLoader, and of filling the cache jointly (S8.2)."""

from __future__ import annotations

import pickle
import sys
import tempfile
import traceback

import numpy as np
import pytest
import torch
from tests.cache_jobs import Numbers, Plain, epoch, writer_job
from tests.cache_servers import Server, servers
from tests.launch import launch, run_script
from tests.same import assert_same
from tests.scripts import load_script, run_python
from tests.trainings import simulate
from torch.utils.data import DataLoader, IterableDataset, Subset

from bagua_ref.contrib import CachedDataset
from bagua_ref.contrib.utils.redis_store import shutdown_redis_server

pytestmark = pytest.mark.slow


def fresh(dataset=None, backend: str = "fakeredis", **options) -> CachedDataset:
    cached = CachedDataset(Numbers() if dataset is None else dataset, backend, **options)
    cached.cache_loader.store.clear()
    return cached


def run_job(call: str) -> str:
    """Return what a script prints that calls one of `tests.cache_jobs`."""
    imports = (
        "import tempfile, warnings\nfrom tests import cache_jobs\nwarnings.simplefilter('error',"
        " UserWarning)\n"
    )
    ended = run_script(f"{imports}{call}")
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def held_workers(server: Server, context: str, batch_size: int | None) -> None:
    """Run a job that ends while its workers hold values; multiprocessing terminates them and leaves
    their temporary folders.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_job(
            f"tempfile.tempdir = {folder!r}\ncache_jobs.held_worker_job({server.host},"
            f" {batch_size}, {context!r})"
        )


@pytest.mark.parametrize(
    ("batch_size", "context", "options"),
    [
        (16, None, {}),
        (None, None, {}),
        (16, "fork", {}),
        (None, "fork", {"persistent_workers": True}),
        # forkserver pickles the workers' arguments, as spawn does
        (16, "forkserver", {"persistent_workers": True}),
        pytest.param(None, "spawn", {"persistent_workers": True}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_S8_2_each_sample_is_made_once_whoever_asks(batch_size, context, options):
    if context:
        options = {"num_workers": 2, "multiprocessing_context": context, **options}
    dataset = fresh(backend="redis")
    for _ in range(2):
        loader = DataLoader(dataset, batch_size=batch_size, **options)
        assert epoch(loader) == list(range(100))
        del loader  # its workers end and write their waiting values
    assert dataset.dataset.made.tolist() == [1] * 100
    assert dataset.cache_loader.num_keys() == 100
    stats = dataset.stats()  # of this process
    assert (stats.hits, stats.misses, stats.errors) == ((0, 0, 0) if context else (100, 100, 0))


@pytest.mark.parametrize(
    ("context", "batch_size"),
    [("fork", None), ("fork", 8)],
)
def test_S8_2_persistent_workers_that_nobody_ends_lose_nothing(context, batch_size):
    with servers(1) as (server,):
        held_workers(server, context, batch_size)
        assert sorted(server.client().keys("*")) == sorted(f"_{i}".encode() for i in range(30))


@pytest.mark.proof
def test_workers_that_are_forked_while_a_thread_fills_the_cache_do_not_hang():
    with servers(1) as (server,):  # a fork would have imported what the thread imports
        ended = run_python(
            "-W",
            "error::UserWarning",
            "-m",
            "tests.cache_jobs",
            "filled_while_forking_job",
            *server.host.values(),
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
        assert server.client().dbsize() == 60


def test_a_daemon_process_that_is_terminated_writes_what_waits_and_ends_by_the_signal():
    with servers(1) as (server,):
        assert run_job(f"cache_jobs.daemon_job({server.host})") == "-15\n"
        assert server.client().dbsize() == 30


def test_what_waits_is_written_when_the_interpreter_ends_by_each_process_its_own():
    with servers(1) as (server,):
        run_job(f"cache_jobs.waiting_main_job({server.host})")
        assert sorted(server.client().keys("*")) == sorted(
            [b"_child", *(f"_{i}".encode() for i in range(30))]
        )
        assert server.calls("mset") == 2


def test_four_processes_fill_one_cache_at_once():
    with servers(1) as (server,):
        launch(writer_job, 4, *map(str, server.host.values()), init=False)
        assert server.client().dbsize() == 400
        dataset = CachedDataset(Numbers(400), hosts=[server.host], dataset_name="shared")
        assert epoch(DataLoader(dataset, batch_size=50)) == list(range(400))
        assert dataset.stats().hits == 400


def test_an_index_is_its_number_whatever_its_type():
    dataset = fresh()
    for index in (5, np.int64(5), torch.tensor(5), np.array(5)):
        assert dataset[index][1] == 5
    assert dataset.dataset.made.sum() == 1
    assert [sample[1] for sample in dataset] == list(range(100))  # ends where the dataset ends
    with pytest.raises(IndexError):
        dataset[100]


class Batched(Plain):
    calls: list[list[int]]

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


def test_a_dataset_that_makes_batches_makes_what_is_missing_in_one():
    inner = Batched()
    inner.calls = []
    dataset = fresh(inner)
    dataset[3]
    assert epoch(DataLoader(dataset, batch_size=5, sampler=range(10))) == list(range(10))
    assert inner.calls == [[0, 1, 2, 4], [5, 6, 7, 8, 9]]


class Augmented(CachedDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[1] + 1000


class AugmentedBatches(Augmented):
    def __getitems__(self, indices):
        return [number + 5000 for _, number, _ in super().__getitems__(indices)]


class SingleSamples(CachedDataset):
    __getitems__ = None


@pytest.mark.parametrize(
    ("kind", "wanted", "workers"),
    [
        (Augmented, lambda index: index + 1000, 0),
        (Augmented, lambda index: index + 1000, 1),
        (AugmentedBatches, lambda index: index + 5000, 0),
        (SingleSamples, lambda index: Plain()[index], 0),
    ],
)
def test_a_subclass_makes_its_own_samples_of_the_cached_ones(kind, wanted, workers):
    dataset = kind(Numbers(20), "redis", dataset_name=kind.__name__)
    dataset.cache_loader.store.clear()
    for samples in (dataset, Subset(dataset, range(20))):
        loader = DataLoader(
            samples,
            5,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            collate_fn=list,
        )
        for _ in range(2):
            found = [sample for batch in loader for sample in batch]
            assert_same(found, list(map(wanted, range(20))))
    assert dataset.dataset.made.tolist() == [1] * 20


def test_an_index_without_a_number_needs_a_key():
    with pytest.raises(TypeError, match=r"a key of a cache cannot be or have tensor\(\[1, 2\]\)"):
        fresh()[torch.tensor([1, 2])]


def test_prefill_makes_what_is_missing_and_tells_how_much(capfd):
    dataset = fresh()
    dataset[7]
    dataset.flush()
    assert dataset.prefill() == 99
    assert "filling the cache" in capfd.readouterr().err
    assert dataset.prefill(progress=False) == 0
    assert capfd.readouterr().err == ""
    assert dataset.dataset.made.tolist() == [1] * 100
    assert dataset.cache_loader.num_keys() == 100


def test_ranks_that_prefill_together_share_the_work():
    inner = Numbers(101)

    def fill(r: int):
        return CachedDataset(inner, "fakeredis", dataset_name="together").prefill()

    assert simulate(4, fill) == [26, 25, 25, 25]
    assert inner.made.tolist() == [1] * 101


def test_what_has_no_indices_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    for dataset in (Stream(), iter([1])):
        with pytest.raises(TypeError, match="cannot be indexed"):
            CachedDataset(dataset, "fakeredis")


def test_a_pickled_dataset_carries_no_connection():
    dataset = fresh(Plain())
    dataset[3]
    data = pickle.dumps(dataset)
    assert b"socket" not in data.lower()
    assert pickle.loads(data)[3][1] == 3


class Maker(Plain):
    """Creates its cache in a worker, which is an error."""

    def __getitem__(self, index):
        return CachedDataset(Plain(), dataset_name="late")[index]


def test_a_worker_that_would_start_a_server_is_told_where_to():
    shutdown_redis_server()
    with pytest.raises(
        RuntimeError, match="make the CacheLoader or CachedDataset before the DataLoader"
    ) as raised:
        epoch(DataLoader(Maker(), num_workers=1, multiprocessing_context="fork"))
    # ends its worker now, as the garbage collector would after a wait of five seconds
    traceback.clear_frames(raised.tb)
    first = CachedDataset(Plain(), dataset_name="early")
    assert epoch(DataLoader(Maker(5), num_workers=1, multiprocessing_context="fork")) == list(
        range(5)
    )
    assert first.cache_loader.num_keys() == 5


def test_a_worker_with_fakeredis_says_that_it_shares_nothing(recwarn):
    dataset = fresh()
    assert epoch(dataset) == list(range(100))
    code = (
        "from tests.cache_jobs import Plain, epoch\nfrom torch.utils.data import DataLoader\n"
        "from bagua_ref.contrib import CachedDataset\n"
        "options = {'num_workers': 1, 'multiprocessing_context': 'fork'}\n"
        "print(epoch(DataLoader(CachedDataset(Plain(9), 'fakeredis'), 3, **options)))"
    )
    ended = run_script(code)
    assert ended.stdout == f"{list(range(9))}\n"
    assert "pip install 'bagua_ref[cache]' and use backend='redis' to share them" in ended.stderr


def test_the_example_trains_twice_and_the_second_time_from_the_cache(capsys):
    example = load_script("examples/cached_dataset.py")
    fresh()
    example.main(["--backend", "fakeredis", "--samples", "96"])
    printed = capsys.readouterr().out
    assert "epoch 1: " in printed
    assert "hits=96, misses=96, errors=0" in printed
    assert "times as fast" in printed


def test_a_cached_sample_runs_through_three_files():
    """docs/reading.md says which."""
    dataset = fresh(backend="redis")
    expected = dataset[3], dataset[3]
    files = set()

    def note(frame, event, argument):
        package, _, name = frame.f_code.co_filename.partition("/bagua_ref/contrib/")
        if name or "/bagua_ref/" in package:
            files.add(name or package)

    sys.setprofile(note)
    try:
        found = dataset[3]
    finally:
        sys.setprofile(None)
    assert_same((found, found), expected)
    assert files == {"cached_dataset.py", "cache_loader.py", "cache/codec.py"}
