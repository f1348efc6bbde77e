"""Datasets and small jobs for the cache's tests, importable by spawned workers and other processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings

import torch
from tests.cache_values import Sample
from torch.utils.data import DataLoader, Dataset

from bagua_ref.contrib import CachedDataset, CacheLoader


class Numbers(Dataset):
    """Samples ``(tensor filled with i, i, text)``; ``made`` counts the samples made in all processes."""

    def __init__(self, size: int = 100, delay: float = 0.0) -> None:
        self.size, self.delay = size, delay
        self.made = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        time.sleep(self.delay)
        self.made[index] += 1
        return torch.full((3,), float(index)), index, f"sample {index}"


class Plain(Dataset):
    """`Numbers` without shared memory."""

    def __init__(self, size: int = 100, delay: float = 0.0) -> None:
        self.size, self.delay = size, delay

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.delay)
        return torch.full((3,), float(index)), index, f"sample {index}"


class Objects(Plain):
    """`Plain` with samples that need pickle, with a row of a larger tensor."""

    def __getitem__(self, index):
        return Sample(torch.arange(self.size).expand(3, -1)[:, index], index)


def epoch(loader) -> list[int]:
    """Run an epoch, check every sample, and return the indices."""
    seen = []
    for pixels, index, text in loader:
        if isinstance(index, int):
            pixels, index, text = pixels[None], torch.tensor([index]), [text]
        assert pixels.dtype == torch.float32
        for row, number, line in zip(pixels, index.tolist(), text, strict=True):
            assert row.tolist() == [number] * 3
            assert line == f"sample {number}"
            seen.append(number)
    return sorted(seen)


def held_worker_job(host: str, port: str, password: str, batch_size: str, context: str) -> None:
    """Exit while persistent workers still hold values to be written."""
    global kept  # Lives until the interpreter exits, as a script's variables do.
    hosts = [{"host": host, "port": port, "password": password}]
    dataset = CachedDataset(Plain(30), hosts=hosts, writer_buffer_size=1000)
    size = None if batch_size == "None" else int(batch_size)
    kept = DataLoader(dataset, batch_size=size, num_workers=2, persistent_workers=True, multiprocessing_context=context)
    assert epoch(kept) == list(range(30))


def waiting_main_job(host: str, port: str, password: str) -> None:
    loader = CacheLoader(hosts=[{"host": host, "port": port, "password": password}], writer_buffer_size=1000)
    for i in range(30):
        loader.get(i, str)
    if os.fork() == 0:  # A child that exits as scripts do writes its own values, not its parent's.
        loader.get("child", str)
        sys.exit(0)
    os.wait()


def filled_while_forking_job(host: str, port: str, password: str, batch_size: str) -> None:
    """Start workers while a thread asks the cache for the first time; print what was imported in the meantime, slowly."""
    hosts = [{"host": host, "port": port, "password": password}]
    dataset = CachedDataset(Objects(60), hosts=hosts, writer_buffer_size=5, allow_pickle=True)
    imported = []

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if threading.current_thread() is filler:
                imported.append(name)
                time.sleep(0.3)

    def fill() -> None:
        for index in range(30):
            assert dataset[index].pixels.tolist() == [index] * 3

    filler = threading.Thread(target=fill)
    sys.meta_path.insert(0, Slow())
    filler.start()
    time.sleep(0.1)
    for _ in range(3):
        loader = DataLoader(dataset, int(batch_size), num_workers=2, multiprocessing_context="fork", timeout=30, collate_fn=list)
        assert [sample.label for batch in loader for sample in batch] == list(range(60))
    filler.join()
    print(imported)


def daemon_job(host: str, port: str, password: str) -> None:
    """Start a daemon process outside any DataLoader that holds unwritten values; print how it ended."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=fill_and_wait, args=(host, port, password, ready), daemon=True)
    child.start()
    ready.wait()
    child.terminate()
    child.join()
    print(child.exitcode)


def fill_and_wait(host: str, port: str, password: str, ready) -> None:
    loader = CacheLoader(hosts=[{"host": host, "port": port, "password": password}], writer_buffer_size=1000)
    for i in range(30):
        loader.get(i, str)
    ready.set()
    time.sleep(60)


def server_job(backend: str) -> None:
    """Start a server, print its port, and wait to be killed or told to end."""
    made: list[CacheLoader] = []
    # A parent-death signal would fire when this thread ends.
    thread = threading.Thread(target=lambda: made.append(CacheLoader(backend)))
    thread.start()
    thread.join()
    (loader,) = made
    loader.get("a", str)
    assert loader.num_keys() == 1
    children = os.environ.get("TEST_CHILDREN")
    if children and os.fork() == 0:  # Keeps every open file of its parent.
        time.sleep(60)
        os._exit(0)
    print(loader.store.stores[0]._options["port"], flush=True)
    sys.stdin.read()


def writer_job(host: str, port: str, password: str) -> None:
    """Write 400 samples in batches of 8; each rank starts 100 samples after the previous one."""
    hosts = [{"host": host, "port": port, "password": password}]
    with CachedDataset(Plain(400), hosts=hosts, dataset_name="shared") as dataset, warnings.catch_warnings():
        warnings.simplefilter("error")
        order = [(100 * int(os.environ["RANK"]) + i) % 400 for i in range(400)]
        assert epoch(DataLoader(dataset, batch_size=8, sampler=order)) == list(range(400))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
