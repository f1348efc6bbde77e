"""Operations of a background thread beside those of everyone else on a device, and how each waits for the other (S2.4, S2.5).

On a CUDA device what is called is only queued, on the calling thread's current stream, and streams go on side by side. An event
marks how far one has come, and another can wait for it without the host. On a CPU what was called is done: streams and events are
None.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["current_stream", "order_after", "record", "side_stream", "use_stream"]


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's stream on ``device``."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def side_stream(device: torch.device) -> Any:
    """Return a new stream whose operations go before those of others where both could be next."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def record(stream: Any) -> Any:
    """Return an event: all that is queued on ``stream`` now is done."""
    return None if stream is None else stream.record_event()


def order_after(events: Iterable[Any], device: torch.device) -> None:
    """Keep what is called from now on, on the calling thread's stream, from beginning before ``events``; the host does not wait."""
    for event in events:
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def use_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """Make ``stream`` the calling thread's on ``device``, which becomes its current device; None: leave the stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
