"""Replay of the launcher's plans by a program under a sanitizer, in memory that ends where the
tensors end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from tests.cuda_emulation import build
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.backends.cuda.backend import PlannedBackend
from bagua_ref.backends.cuda.launch import WORKSPACE, DeviceProperties, KernelLaunch, Plan
from bagua_ref.backends.cuda.movement import Segments

SANITIZERS = {
    # Without stack checks: a fibre's stack is ordinary memory.
    "address": (("-O1", "-fsanitize=address", "-fno-omit-frame-pointer"), None),
    # The runtime, which turns fibres into threads, is not instrumented itself.
    "thread": (("-O1", "-fsanitize=thread", "-DEMULATION_THREADS"), ("-O1", "-DEMULATION_THREADS")),
}


class Recorder(PlannedBackend):
    """Records the plans of the calls that it receives, on CPU tensors."""

    name = "recorder"
    device_types = ("cpu",)

    def __init__(self, device: DeviceProperties) -> None:
        self.properties, self.plans = device, []

    def _properties(self, device: torch.device) -> DeviceProperties:
        return self.properties

    def _submit(self, plan: Plan, device: torch.device) -> None:
        self.plans.append(plan)


def program(sanitizer: str, sources: dict[str, tuple[str, tuple[str, ...]]]) -> Path:
    """Return the program that replays launches of these sources under a sanitizer from
    `SANITIZERS`.
    """
    flags, own_flags = SANITIZERS[sanitizer]
    return build.build(
        f"replay-{sanitizer}", sources, flags, ("runtime.cpp", "replay.cpp"), own_flags
    )


def replay(
    path: Path,
    folder: Path,
    work: Callable[[object], object],
    tensors: list[Tensor],
    *,
    multiprocessors: int = 1,
    order: int = 0,
    change: Callable[[KernelLaunch], KernelLaunch] = lambda launch: launch,
) -> tuple[subprocess.CompletedProcess, bool]:
    """Run ``work(kernels)`` in the program and on the reference.

    Args:
        path: the result of `program`.
        folder: for the trace.
        work: calls kernels on ``tensors`` only.
        tensors: all tensors that it reads or writes.
        multiprocessors: of the card for which launches are planned.
        order: of the threads, as in `tests.cuda_emulation.backend.Emulator.run`.
        change: replaces each launch, to plant a fault in the plan.

    Returns:
        How the program ended, and whether the tensors equal the reference's.
    """
    recorder = Recorder(DeviceProperties(multiprocessors))
    work(recorder)
    spans = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    buffers = [(start % 64, ctypes.string_at(start, size)) for start, size in spans]
    launches = b""
    for plan in recorder.plans:
        buffers.append((0, b"\xa5" * plan.workspace))
        for launch in map(change, plan.launches):
            launches += _launch(launch, spans, len(buffers) - 1)
    trace, results = folder / "trace", folder / "results"
    head = _number(order, len(buffers)) + b"".join(
        _number(skip) + _text(content) for skip, content in buffers
    )
    trace.write_bytes(head + _number(sum(len(plan.launches) for plan in recorder.plans)) + launches)
    # Older ThreadSanitizers fail where newer systems randomize addresses.
    plain = [setarch, "-R"] if (setarch := shutil.which("setarch")) else []
    options = {
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    run = subprocess.run(
        [*plain, str(path), str(trace), str(results)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **options},
    )
    if run.returncode:
        return run, False
    found, place, same = results.read_bytes(), 0, True
    work(get_backend("reference"))
    for start, size in spans:
        same &= found[place : place + size] == ctypes.string_at(start, size)
        place += size
    return run, same


def _launch(launch: KernelLaunch, spans: list[tuple[int, int]], workspace: int) -> bytes:
    made = _text(launch.kernel.encode()) + _number(
        launch.grid, launch.block, launch.shared, len(launch.args)
    )
    for value in launch.args:
        if value is WORKSPACE:
            made += _text(bytes(8)) + _number(1, 0, workspace, 0)
            continue
        places = []
        if isinstance(value, ctypes.c_void_p):
            places = [(0, value.value)]
        elif isinstance(value, Segments):
            places = [(8 * number, value.there[number]) for number in range(value.count)]
        made += _text(bytes(value)) + _number(len(places))
        for place, address in places:
            buffer, offset = _locate(address or 0, spans)
            made += _number(place, buffer, offset)
    return made


def _locate(address: int, spans: list[tuple[int, int]]) -> tuple[int, int]:
    for number, (start, size) in enumerate(spans):
        if start <= address < start + size or (start == address and size == 0):
            return number, address - start
    raise ValueError(f"address {address:#x} is in none of the tensors that were named")


def _number(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _text(content: bytes) -> bytes:
    return _number(len(content)) + content
