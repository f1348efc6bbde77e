"""The backend ``cuda-emulated``: the package's CUDA sources and plans, on CPU tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from tests.cuda_emulation import build

from bagua_ref.backends.cuda.backend import PlannedBackend
from bagua_ref.backends.cuda.launch import Card, Launch, Plan, pack


class Emulator:
    """A library that `build` has made, loaded."""

    def __init__(self, path) -> None:
        self._run = ctypes.CDLL(str(path)).emulation_run
        self._run.argtypes = [
            ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p,
            ctypes.c_size_t,
        ]  # fmt: skip

    def run(self, launch: Launch, workspace: int = 0, order: int = 0) -> None:
        """Run a launch; ``order`` is that of the threads: 0 as numbered, 1 backwards, else shuffled by it."""
        arguments, keep = pack(launch, workspace)
        error = ctypes.create_string_buffer(1000)
        if self._run(launch.kernel.encode(), launch.grid, launch.block, launch.shared, arguments, order, error, len(error)):
            raise RuntimeError(f"{launch.kernel}: {error.value.decode()}")
        del keep


@functools.cache
def emulator() -> Emulator:
    """Compile the kernels where that has not been done, and load them."""
    return Emulator(build.library())


class EmulatedBackend(PlannedBackend):
    """What the CUDA backend computes, without CUDA: slow, and equal to the bit.

    Args:
        multiprocessors: of the card that it pretends to be; few, so that blocks have more than one thing to do.
        order: of the threads of a block.
    """

    name = "cuda-emulated"
    device_types = ("cpu",)

    def __init__(self, multiprocessors: int = 2, order: int = 0) -> None:
        self.card, self.order = Card(multiprocessors), order

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None if build.compiler() else "there is no g++, which compiles the CUDA sources for the CPU"

    def _card(self, device: torch.device) -> Card:
        return self.card

    def _submit(self, plan: Plan, device: torch.device) -> None:
        # Of any content; float2 wants 8 bytes, which torch's memory has.
        workspace = torch.full((plan.workspace,), 0xA5, dtype=torch.uint8)
        for launch in plan.launches:
            emulator().run(launch, workspace.data_ptr(), self.order)
