"""Rendezvous of a job's processes through a store, which may contain keys of earlier jobs and
attempts.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import format_ranks
from bagua_ref.base.untrusted import check_form, load_json
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

T = TypeVar("T")
_PAUSE = 0.2  # seconds between checks of the store, at most
_GRACE = 2.0  # seconds after its timeout in which the rendezvous finds out who is missing


class Prefixed(dist.PrefixStore):  # type: ignore[name-defined,misc]
    """View of ``store`` whose keys all start with ``name``; unlike torch's PrefixStore, it reveals
    its prefix.
    """

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name, store)
        self.prefix, self.whole = name, store


def another_connection(store: Store) -> Store:
    """Open a new connection to ``store``: a connection serves one request at a time, and some
    requests wait for other ranks.

    Connecting looks up the server's host name, which can take seconds, so reuse connections.

    Args:
        store: a torch store, or a `Prefixed` view of one.

    Raises:
        CommunicationError: the store's server cannot be reached.
    """
    try:
        if hasattr(store, "clone"):
            clone: Store = store.clone()
            return clone
        # torch 2.6 and similar versions
        if isinstance(store, Prefixed):
            return Prefixed(store.prefix, another_connection(store.whole))
        if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
            return dist.TCPStore(  # type: ignore[attr-defined]
                store.host,
                store.port,
                timeout=store.timeout,  # type: ignore[attr-defined]
                wait_for_workers=False,
            )
        return store  # stores in files and memory serve concurrent requests
    except RuntimeError as error:
        raise CommunicationError(
            f"the store through which the ranks find each other cannot be reached: {error}"
        ) from error


def ask(
    store: Store, use: Callable[[Store], T], otherwise: T, limit: float = 5.0, anew: bool = True
) -> T:
    """Return the result of ``use`` on ``store``, or ``otherwise`` if the store does not answer in
    time.

    Args:
        store: a torch store, or a `Prefixed` view of one.
        use: function of a store that reads or writes it.
        otherwise: the result if the store fails.
        limit: seconds after which ``otherwise`` is returned.
        anew: whether to open a new connection, which needs free descriptors, instead of using
            ``store`` itself.
    """

    def run() -> T:
        server = getattr(store, "_underlying_non_prefix_store", store)
        if anew and isinstance(server, dist.TCPStore):  # type: ignore[attr-defined]
            # If the server is gone, torch would try again and again, for the store's whole timeout.
            socket.create_connection((server.host, server.port), limit).close()
        return use(another_connection(store) if anew else store)

    try:
        return within(run, limit)
    except (NoReply, RuntimeError, OSError):
        return otherwise


def address_of(store: Store) -> str:
    """Return the address of ``store``, for messages."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))


def host_of(store: Store) -> str:
    """Return the name of the host that serves ``store``; this host if there is no server."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    return store.host if isinstance(store, dist.TCPStore) else socket.gethostname()  # type: ignore[attr-defined]


def first_sentence(error: Exception) -> str:
    """Return the first sentence of a torch error message, without source location and C++ stack
    trace.
    """
    text = re.sub(r"^\[[^\]]*\.(cc|cpp):\d+\]\s*", "", str(error)) or type(error).__name__
    return text.split(". This is typically", 1)[0].splitlines()[0].rstrip(".")


class StoreLostError(CommunicationError):
    """Raised if the process that served the store has ended: this job's store, or an earlier job's
    that was still running.
    """


class NoReply(Exception):  # noqa: N818  it is never raised to a user
    """Raised if a call did not return within the time limit."""


def within(function: Callable[[], T], seconds: float) -> T:
    """Return ``function()``, run on another thread with a time limit, since torch's stores wait
    forever for a stopped server.

    Raises:
        NoReply: ``function`` did not return within ``seconds``; its thread continues.
    """
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= deadline:
            raise NoReply

    return interruptible(function, check, seconds)


def interruptible(function: Callable[[], T], check: Callable[[], None], pause: float) -> T:
    """Return ``function()``, run on another thread; give up if ``check()``, called every ``pause``
    seconds, raises.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="bagua_ref rendezvous", daemon=True).start()
    while not wait([future], pause).done:
        check()
    try:
        return future.result()
    finally:
        # an exception's traceback refers to this variable: the cycle would keep a store that has
        # failed
        future = Future()


def parse_message(data: bytes, form: Any, whose: str) -> Any:
    """Parse and validate the JSON that another rank wrote into the store.

    Args:
        data: the message.
        form: the expected form; see `check_form`.
        whose: the name of the rank or node, for messages.

    Raises:
        CommunicationError: the message has another form.
    """
    try:
        value = load_json(data)
        check_form(value, form, "it")
    except ValueError as error:
        raise CommunicationError(
            f"{whose} wrote an invalid message into the job's store: {error}. All ranks must run"
            " the same version of bagua_ref"
        ) from None
    return value


def rendezvous(
    store: Store, rank: int, world_size: int, info: Any, timeout: float, form: Any = object
) -> tuple[str, list[Any]]:
    """Exchange ``info`` among all ranks; return a unique name of this rendezvous, and every rank's
    ``info`` in rank order. Collective.

    Rank 0 proposes a new name, the other ranks answer under that name with a random mark each, and
    rank 0 publishes the answers. A rank that does not find its own mark has read the keys of an
    earlier rendezvous and tries again. A launcher that restarts its workers may give them the store
    of the failed attempt, so names and counts from outside cannot be trusted.

    Args:
        store: shared by all ranks.
        rank: this rank.
        world_size: the number of ranks.
        info: information for the other ranks, as JSON values.
        timeout: seconds to wait for the others.
        form: the expected form of the others' ``info``; see `bagua_ref.base.untrusted.check_form`.

    Raises:
        CommunicationTimeoutError: ranks did not arrive in time; the message names them as far as
            they are known.
        StoreLostError: the store failed, as when the process that serves it ends.
        CommunicationError: a rank wrote an invalid message.
    """
    began = time.monotonic()
    try:
        mark, messages = within(
            partial(_rendezvous, store, rank, world_size, info, timeout, form), timeout + _GRACE
        )
    except NoReply:
        raise CommunicationTimeoutError(
            f"rank {rank} timed out after {timeout:g} s: the store at {address_of(store)} does not"
            " answer; the process that serves it has stopped or cannot be reached"
        ) from None
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise StoreLostError(
            f"rank {rank} lost the store at {address_of(store)} after"
            f" {time.monotonic() - began:.1f} s of waiting for the other ranks; the process that"
            f" serves it, often rank 0's, has ended ({first_sentence(error)})"
        ) from error
    missing = [r for r, message in enumerate(messages) if message is None]
    if missing:
        waited = time.monotonic() - began
        if rank == 0 and len(missing) < world_size - 1:
            # the store may end with this process, so let the others read who is missing
            time.sleep(2 * _PAUSE)
        raise CommunicationTimeoutError(
            f"rank {rank} timed out after {waited:.1f} s waiting for {format_ranks(missing)} of"
            f" {world_size} in the store at {address_of(store)}"
        )
    return mark, [info for _, info in messages]


def _rendezvous(
    store: Store, rank: int, world_size: int, info: Any, timeout: float, form: Any
) -> tuple[str, list[Any]]:
    """Return the name of the rendezvous, and each rank's mark and info; None for ranks that did not
    come.
    """
    mark = uuid.uuid4().hex
    if rank == 0:
        answers = {r: f"{mark}/answer{r}" for r in range(1, world_size)}
        store.set("proposed", mark)
        # if not for the timeout, the store fails in the next line, too
        with suppress(RuntimeError):
            store.wait(list(answers.values()), timedelta(seconds=timeout))
        wrote = [
            (
                parse_message(store.get(answer), [str, form], f"rank {r}")
                if store.check([answer])
                else None
            )
            for r, answer in answers.items()
        ]
        messages = [[mark, info], *wrote]
        store.set(
            f"{mark}/all",
            json.dumps({r: message for r, message in enumerate(messages) if message is not None}),
        )
        return mark, messages
    answered, pause, deadline = "", 0.002, time.monotonic() + timeout
    while time.monotonic() < deadline:
        proposed = (
            store.get("proposed").decode(errors="replace") if store.check(["proposed"]) else ""
        )
        if proposed != answered:
            store.set(f"{proposed}/answer{rank}", json.dumps([mark, info]))
            answered, pause = proposed, 0.002
        if answered and store.check([f"{answered}/all"]):
            found = parse_message(store.get(f"{answered}/all"), {str: [str, form]}, "rank 0")
            if str(rank) in found and found[str(rank)][0] == mark:
                return answered, [found.get(str(r)) for r in range(world_size)]
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(1.5 * pause, _PAUSE)
    came = [
        bool(answered),
        *(not answered or store.check([f"{answered}/answer{r}"]) for r in range(1, world_size)),
    ]
    if all(came):  # rank 0 has left, or its proposal is an earlier attempt's
        came[0] = False
    return answered, [[mark, info] if here else None for here in came]
