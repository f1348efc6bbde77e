"""Streams and events, which order a background thread's operations on a device with those of other threads (S2.4, S2.5).

On a CUDA device, operations are queued on the calling thread's current stream, and streams run concurrently. An event marks a
point in a stream, for which another stream can wait without the host. On a CPU, operations are synchronous: streams and events
are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["current_stream", "hold", "order_after", "record", "side_stream", "use_stream"]


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's stream on ``device``."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def side_stream(device: torch.device) -> Any:
    """Return a new high-priority stream."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def record(stream: Any) -> Any:
    """Return an event that marks the end of everything queued on ``stream`` so far."""
    return None if stream is None else stream.record_event()


def order_after(events: Iterable[Any], device: torch.device) -> None:
    """Make later operations on the calling thread's stream wait for ``events``; the host does not wait."""
    for event in events:
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)


def hold(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Keep the memory of ``tensors`` from being reused before the work queued on the calling thread's stream is done."""
    if device.type == "cuda":
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(device))


@contextmanager
def use_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """Make ``device`` current and ``stream`` its current stream, for the calling thread; None: keep the stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
