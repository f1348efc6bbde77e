"""The backend ``cuda-emulated``: the package's CUDA sources and plans, on CPU tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from tests.cuda_emulation import build

from bagua_ref.backends.cuda.backend import PlannedBackend
from bagua_ref.backends.cuda.launch import DeviceProperties, KernelLaunch, Plan, pack


class Emulator:
    """A loaded library that `build` has made."""

    def __init__(self, path) -> None:
        self._run = ctypes.CDLL(str(path)).emulation_run
        number, size = ctypes.c_uint, ctypes.c_size_t
        self._run.argtypes = [
            ctypes.c_char_p,
            number,
            number,
            number,
            number,
            size,
            ctypes.c_void_p,
            number,
            ctypes.c_char_p,
            size,
        ]

    def run(
        self, launch: KernelLaunch, workspace: int = 0, order: int = 0, blocks: range | None = None
    ) -> None:
        """Run a launch, or some of its blocks; ``order`` of the threads: 0 as numbered, 1 reversed,
        else the seed of a shuffle.
        """
        arguments, _values = pack(launch, workspace)
        self.run_packed(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.shared,
            ctypes.addressof(arguments),
            order,
            blocks,
        )

    def run_packed(
        self,
        kernel: str,
        grid: int,
        block: int,
        shared: int,
        arguments: int,
        order: int = 0,
        blocks: range | None = None,
    ) -> None:
        """Run a kernel on the addresses of its arguments, which is how a CUDA driver takes them."""
        some = blocks or range(grid)
        error = ctypes.create_string_buffer(1000)
        if self._run(
            kernel.encode(),
            some.start,
            some.stop,
            grid,
            block,
            shared,
            arguments,
            order,
            error,
            len(error),
        ):
            raise RuntimeError(f"{kernel}: {error.value.decode()}")


@functools.cache
def emulator() -> Emulator:
    """Compile the kernels unless that has been done, and load them."""
    return Emulator(build.library())


class EmulatedBackend(PlannedBackend):
    """The CUDA backend without CUDA: slow, and equal to the bit.

    Args:
        multiprocessors: of the emulated card; few, so that each block has several pieces of work.
        order: of the threads of a block.
    """

    name = "cuda-emulated"
    device_types = ("cpu",)

    def __init__(self, multiprocessors: int = 2, order: int = 0) -> None:
        if build.compiler():  # without one, files can still be collected
            emulator()  # compile now, as the first call of a kernel may have a time limit
        self.properties, self.order = DeviceProperties(multiprocessors), order

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return (
            None
            if build.compiler()
            else "there is no g++, which compiles the CUDA sources for the CPU"
        )

    def _properties(self, device: torch.device) -> DeviceProperties:
        return self.properties

    def _submit(self, plan: Plan, device: torch.device) -> None:
        # Uninitialized; float2 needs an alignment of 8 bytes, which torch's memory has.
        workspace = torch.full((plan.workspace,), 0xA5, dtype=torch.uint8)
        for launch in plan.launches:
            emulator().run(launch, workspace.data_ptr(), self.order)
