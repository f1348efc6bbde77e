"""Asynchronous averaging of weights between ranks during training (S3.6)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.base import runtime
from bagua_ref.base.runtime import World
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.observe.meter import profiled
from bagua_ref.types import ReduceOp

_GLANCE = 0.01
"""Polling interval, in seconds, of a round that waits for training to release the weights."""


class WeightLock:
    """A fair lock on the weights: they are either used by training or changed by an averaging
    round, never both at once.

    Training may hold it several times (a closure's forward inside ``optimizer.step``), and another
    thread may release what training holds. Only one thread trains.

    On CUDA, the next holder's stream waits for the work that the last holder has queued; the host
    does not wait.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._lock = world.lock()
        self._device = device
        self._training: Any = runtime.current_stream(device)
        """Stream of the training thread that holds or last held the lock."""
        self._used: Any = runtime.record_event(device)
        """CUDA event at the end of training's last use of the weights."""
        self._changed: Any = None
        """CUDA event at the end of the last round's changes of the weights."""
        self._holds = 0
        self._counting = threading.Lock()
        self.on_wait: Callable[[], None] | None = None
        """Callback, called repeatedly while a round waits; it may release weights that training no
        longer needs.
        """

    def hold(self) -> None:
        """Acquire the lock for training; can be nested."""
        with self._counting:
            if self._holds:
                self._holds += 1
                return
        self._lock.acquire()
        self._training = runtime.current_stream(self._device)
        runtime.order_after(self._changed, self._device)
        with self._counting:
            self._holds = 1

    def release(self) -> None:
        """Undo one `hold`."""
        with self._counting:
            if not self._holds:
                raise RuntimeError("unlock_weight() without lock_weight()")
            self._holds -= 1
            last = self._holds == 0
        if last:
            self._used = None if self._training is None else self._training.record_event()
            self._lock.release()

    def take_for_round(self) -> None:
        """Acquire the lock for an averaging round, which changes the weights."""
        while not self._lock.acquire(timeout=_GLANCE):
            if self.on_wait is not None:
                self.on_wait()
        self.wait_for_training()

    def release_from_round(self) -> None:
        """Release the lock after an averaging round."""
        self._changed = runtime.record_event(self._device)
        self._lock.release()

    def wait_for_training(self) -> None:
        """Make the current CUDA stream wait for the work that training queued before its last
        release of the weights.
        """
        runtime.order_after(self._used, self._device)


class AsynchronousModelAverage(CommOp):
    """One round of asynchronous averaging: ``x <- x + (mean over ranks of s - s)`` with the
    snapshot ``s <- x`` (S3.6).

    agree on stopping -> s <- x -> r <- sum over ranks of s, in float32 -> under the weight lock x
    <- x + (r/n - s)

    Changes that training makes to x between snapshot and update are kept. Each rank sends 2 (n-1)/n
    of x in float32 and 4 bytes to agree; scratch is the snapshot and the sum. All ranks stop at the
    same round, once all have called `abort`.

    As a context manager, it holds the weight lock: ``with op: evaluate(model)``.

    Args:
        comm: the communicator; no other thread uses it.
        kernels: kernel backend.
        world: this rank's world, which creates the lock.
        device: the device of the weights.

    Source: asynchronous model average of Bagua 0.9; Lian et al., "Asynchronous Decentralized
    Parallel SGD", ICML 2018 (arXiv:1710.06952).
    """

    def __init__(
        self, comm: Communicator, kernels: KernelBackend, world: World, device: torch.device
    ) -> None:
        super().__init__(comm, kernels)
        self.lock = WeightLock(world, device)
        self._wants_to_stop = self._stopped = False
        self._snapshot: Tensor | None = None
        self._reduced: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        """Run one round on ``x``, or agree with the other ranks to stop."""
        if self._stopped:
            return
        flag = torch.tensor([int(self._wants_to_stop)], dtype=torch.int32, device=x.device)
        self.comm.allreduce_inplace(flag, ReduceOp.MIN)
        if flag.item():
            self._stopped = True
            return
        if self._snapshot is None or self._reduced is None or self._snapshot.numel() != x.numel():
            self._snapshot = torch.empty_like(x)
            self._reduced = torch.empty_like(
                x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
            )
        # the snapshot must not be taken before the weights are written
        self.lock.wait_for_training()
        self._snapshot.copy_(x)
        self._reduced.copy_(self._snapshot)
        self.comm.allreduce_inplace(self._reduced, ReduceOp.SUM)
        self.lock.take_for_round()
        try:
            with profiled("bagua_ref::update"):
                self.kernels.async_average_(x, self._reduced, self._snapshot, self.comm.nranks())
        finally:
            self.lock.release_from_round()

    def lock_weight(self) -> None:
        """Lock the weights for training: rounds cannot change them until `unlock_weight`."""
        self.lock.hold()

    def unlock_weight(self) -> None:
        """Unlock the weights, so that rounds can change them again."""
        self.lock.release()

    def __enter__(self) -> AsynchronousModelAverage:
        self.lock_weight()
        return self

    def __exit__(self, *exc: object) -> None:
        self.unlock_weight()

    def abort(self) -> None:
        """Request a stop; rounds continue until all ranks have requested it."""
        self._wants_to_stop = True

    def reset(self) -> None:
        """Allow rounds again after all ranks have stopped."""
        self._wants_to_stop = self._stopped = False

    def get_status(self) -> str:
        """Return "running", "stopping" (this rank has asked to stop) or "stopped" (all have)."""
        return "stopped" if self._stopped else "stopping" if self._wants_to_stop else "running"
