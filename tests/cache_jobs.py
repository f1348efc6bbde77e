"""Datasets and small jobs for the cache's tests, importable by spawned workers and other
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bagua_ref.contrib import CachedDataset, CacheLoader


@dataclass
class Sample:
    """An object that needs pickle."""

    pixels: Any
    label: int = 0


class Numbers(Dataset):
    """Samples ``(tensor filled with i, i, text)``; ``made`` counts the samples made in all
    processes.
    """

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


def held_worker_job(host: dict[str, str], batch_size: int | None, context: str) -> None:
    """Exit while persistent workers still hold values to be written."""
    global kept  # Lives until the interpreter exits, as a script's variables do.
    dataset = CachedDataset(Plain(30), hosts=[host], writer_buffer_size=1000)
    kept = DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    assert epoch(kept) == list(range(30))


def waiting_main_job(host: dict[str, str]) -> None:
    loader = CacheLoader(hosts=[host], writer_buffer_size=1000)
    for i in range(30):
        loader.get(i, str)
    if os.fork() == 0:  # A child that exits as scripts do writes its own values, not its parent's.
        loader.get("child", str)
        sys.exit(0)
    os.wait()


def filled_while_forking_job(host: str, port: str, password: str) -> None:
    """Start workers while a thread asks the cache for the first time; print what was imported in
    the meantime, slowly.
    """
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
        loader = DataLoader(
            dataset, 8, num_workers=2, multiprocessing_context="fork", timeout=30, collate_fn=list
        )
        assert [sample.label for batch in loader for sample in batch] == list(range(60))
    filler.join()
    print(imported)


def daemon_job(host: dict[str, str]) -> None:
    """Start a daemon process outside any DataLoader that holds unwritten values; print how it
    ended.
    """
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=fill_and_wait, args=(host, ready), daemon=True)
    child.start()
    ready.wait()
    child.terminate()
    child.join()
    print(child.exitcode)


def fill_and_wait(host: dict[str, str], ready) -> None:
    loader = CacheLoader(hosts=[host], writer_buffer_size=1000)
    for i in range(30):
        loader.get(i, str)
    ready.set()
    time.sleep(60)


def server_job(pipe: Connection, has_child: bool) -> None:
    """Start a server, send its port and the id of a child, if it has one, and wait to be killed or
    told to end.
    """
    made: list[CacheLoader] = []
    # The server must outlive the thread that asked for it.
    thread = threading.Thread(target=lambda: made.append(CacheLoader("redis")))
    thread.start()
    thread.join()
    (loader,) = made
    loader.get("a", str)
    assert loader.num_keys() == 1
    child = os.fork() if has_child else None
    if child == 0:  # Keeps every open file of its parent.
        time.sleep(60)
        os._exit(0)
    pipe.send((loader.store.stores[0]._options["port"], child))
    pipe.recv()


def start_server_job(has_child: bool = False) -> tuple[multiprocessing.Process, Connection]:
    """Return a fork of the server process of `tests.launch` that runs `server_job`, and the other
    end of its pipe.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=server_job, args=(there, has_child))
    process.start()
    there.close()
    return process, here


def writer_job(host: str, port: str, password: str) -> None:
    """Write 400 samples in batches of 8; each rank starts 100 samples after the previous one."""
    hosts = [{"host": host, "port": port, "password": password}]
    with (
        CachedDataset(Plain(400), hosts=hosts, dataset_name="shared") as dataset,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        order = [(100 * int(os.environ["RANK"]) + i) % 400 for i in range(400)]
        assert epoch(DataLoader(dataset, batch_size=8, sampler=order)) == list(range(400))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
