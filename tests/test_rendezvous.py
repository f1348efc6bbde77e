"""Tests of the rendezvous of ranks in a store that may hold earlier attempts' keys (S1)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from bagua_ref.communicators.rendezvous import rendezvous
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError


def meet_all(store, order, timeout=20.0, attempt=""):
    """Run the rendezvous, one thread per rank, started in this order; return each rank's result."""
    with ThreadPoolExecutor(len(order)) as pool:
        futures = {}
        for rank in order:
            futures[rank] = pool.submit(
                rendezvous, store, rank, len(order), f"{attempt}card{rank}", timeout
            )
            threading.Event().wait(0.01)
        return [futures[rank].result() for rank in sorted(order)]


@pytest.mark.parametrize("order", [(0,), (0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_all_learn_all_cards(order):
    met = meet_all(dist.HashStore(), order)
    names = {name for name, _ in met}
    assert len(names) == 1
    assert [cards for _, cards in met] == [[f"card{rank}" for rank in range(len(order))]] * len(
        order
    )


def test_each_meeting_has_a_name_of_its_own():
    store = dist.HashStore()
    names = [meet_all(store, (1, 0), attempt=str(k))[0][0] for k in range(5)]
    assert len(set(names)) == 5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("died", [(0,), (1,), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_an_attempt_that_failed_does_no_harm(died, order):
    """Only the ranks in ``died`` came to the first attempt (or all did); their keys must not be
    taken for new ones.
    """
    store = dist.HashStore()
    if len(died) == 3:
        meet_all(store, died, attempt="old")
    else:
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(rendezvous, store, rank, 3, "old", 0.1) for rank in died]:
                with pytest.raises(CommunicationTimeoutError):
                    future.result()
    met = meet_all(store, order, attempt="new")
    assert [cards for _, cards in met] == [["newcard0", "newcard1", "newcard2"]] * 3


def test_who_is_missing_is_named():
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"^rank 0 timed out after \d\.\d s waiting for ranks 1-2 of 3 in the store at ",
    ):
        rendezvous(dist.HashStore(), 0, 3, None, 0.1)
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"^rank 1 timed out after \d\.\d s waiting for rank 0 of 2 in the store at ",
    ):
        rendezvous(dist.HashStore(), 1, 2, None, 0.1)


@pytest.mark.parametrize("wrote", [b"", b"{", b"[]", b'{"1": [1, "card"]}'])
def test_an_invalid_message_is_named(wrote):
    store = dist.HashStore()
    store.set("proposed", "m")
    store.set("m/all", wrote)
    with pytest.raises(CommunicationError, match=r"^rank 0 wrote an invalid message"):
        rendezvous(store, 1, 2, "card", 5.0)
