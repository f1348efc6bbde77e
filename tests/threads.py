"""Kernel calls from many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_right_on_threads(
    work: Callable[[int], Tensor], expected: Sequence[Tensor], rounds: int
) -> None:
    """Raise AssertionError unless ``work(i)`` is ``expected[i]`` in every round, with one thread
    per ``i``.
    """
    wrong: list[int] = []

    def run(index: int) -> None:
        for _ in range(rounds):
            if not torch.equal(work(index), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(expected))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
