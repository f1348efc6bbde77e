"""The backend ``"cuda"``: compiles the kernels through CuPy and runs their launches on torch's
current stream.

This is the only file that imports CuPy, and only when the backend is first used. CuPy gives access
to NVRTC and to the driver; torch manages memory, streams and devices.

NVRTC is called here, not through ``cupy.RawModule``, which always compiles with ``-ftz=true``: that
flushes subnormal numbers to zero, against S1. It also needs a device to compile, and raises if it
cannot create its cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bagua_ref.backends.cuda.backend import PlannedBackend
from bagua_ref.backends.cuda.launch import DeviceProperties, KernelLaunch, Plan, pack, source_of
from bagua_ref.base.not_provided import install_command
from bagua_ref.base.runtime import current_stream

__all__ = ["CudaBackend", "cached", "compile_source", "folder", "header_folder"]

_OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # S1; the sources also use intrinsics that forbid it
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
)


class CudaBackend(PlannedBackend):
    """Kernel backend for CUDA tensors, with kernels in CUDA C++.

    Launches are asynchronous, on torch's current stream of the tensors' device. As with torch's own
    operations, tensors of another stream need an event or `torch.Tensor.record_stream`. The host
    never waits for the device, and memory is allocated only when the workspace of a stream (some
    KiB) has to grow. Any number of threads may use the backend.

    Raises, in addition to `bagua_ref.backends.KernelBackend`:
        BackendUnavailableError: (when it is first used) CuPy, driver, device or headers are
            missing.
        RuntimeError: CUDA could not compile, load or launch a kernel; with the compiler's messages
            or the name of the error.
    """

    name = "cuda"
    device_types = ("cuda",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: dict[tuple[str, int], int] = {}
        self._functions: dict[tuple[str, int], int] = {}
        self._workspaces: dict[tuple[int, int], torch.Tensor] = {}
        self._threads = threading.local()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return the reason why the kernels cannot run here, or None."""
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            extra = "cuda13" if (torch.version.cuda or "").startswith("13.") else "cuda12"
            return f"CuPy cannot be imported: {error}; install with: {install_command(extra)}"
        if not torch.cuda.is_available():
            if torch.version.cuda is None:
                return (
                    "this torch was built without CUDA; install a CUDA build of torch, then CuPy"
                    " for the same CUDA version"
                )
            return "torch finds no CUDA device: there is none, or its driver is missing"
        try:
            runtime.getDeviceCount()
            major, _ = _nvrtc().getVersion()
        except (RuntimeError, ImportError, OSError) as error:  # CuPy's own errors are RuntimeErrors
            return f"CuPy finds no device or no compiler: {error}"
        if header_folder() is None:
            wheel = "nvidia-cuda-runtime" + ("-cu12" if major < 13 else "")
            return (
                "CUDA's header cuda_fp16.h is neither in a wheel nor under CUDA_PATH; pip install"
                f" {wheel}"
            )
        return None

    def _properties(self, device: torch.device) -> DeviceProperties:
        return _properties(_index(device))

    def _submit(self, plan: Plan, device: torch.device) -> None:
        if not plan.launches:
            return
        index = _index(device)
        with self._current(index):
            stream = current_stream(torch.device("cuda", index)).cuda_stream
            functions = [self._function(launch, index) for launch in plan.launches]
            if not plan.workspace:
                _queue(plan, functions, stream, 0)
                return
            # the workspace belongs to the stream: launches of other threads must not come in
            # between
            with self._lock:
                _queue(plan, functions, stream, self._workspace(plan.workspace, index, stream))

    def _workspace(self, size: int, index: int, stream: int) -> int:
        """Return the address of a stream's workspace of at least ``size`` bytes. A smaller one is
        freed: torch reuses its memory in stream order.
        """
        workspace = self._workspaces.get((index, stream))
        if workspace is None or workspace.numel() < size:
            rounded = max(65536, 1 << (size - 1).bit_length())
            workspace = torch.empty(rounded, dtype=torch.uint8, device=torch.device("cuda", index))
            self._workspaces[index, stream] = workspace
        return workspace.data_ptr()

    def _function(self, launch: KernelLaunch, index: int) -> int:
        """Return the driver's function handle of a kernel on a device."""
        from cupy.cuda import driver

        function = self._functions.get((launch.kernel, index))
        if function is None:
            # compiling takes seconds; other threads that need the module wait for it
            with self._lock:
                module = self._modules.get((launch.source, index))
                if module is None:
                    module = self._modules[launch.source, index] = driver.moduleLoadData(
                        _image(launch.source, index)
                    )
            function = self._functions[launch.kernel, index] = driver.moduleGetFunction(
                module, launch.kernel
            )
        return function

    @contextmanager
    def _current(self, index: int) -> Iterator[None]:
        """Context that makes the device current for CuPy; the first use in a thread also binds the
        CUDA context.
        """
        from cupy.cuda import runtime

        before = runtime.getDevice()
        if before != index:
            runtime.setDevice(index)
        try:
            seen = self._threads.__dict__.setdefault("devices", set())
            if index not in seen:
                runtime.free(0)  # frees nothing, but binds the device's context to this thread
                seen.add(index)
            yield
        finally:
            if before != index:
                runtime.setDevice(before)


def compile_source(name: str, architecture: int) -> tuple[bytes, str]:
    """Compile ``kernels/<name>.cu`` with NVRTC; needs neither driver nor device.

    Args:
        name: one of the sources.
        architecture: the compute capability, such as 90. If NVRTC does not support it, the result
            is PTX for the next older one, which the driver translates.

    Returns:
        The cubin (or PTX), and the assembler's report on registers, spills and shared memory.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    nvrtc = _nvrtc()
    known = nvrtc.getSupportedArchs()
    older = [number for number in known if number < architecture]
    target = (
        f"compute_{max(older)}" if architecture not in known and older else f"sm_{architecture}"
    )
    include = header_folder()
    program = nvrtc.createProgram(source_of(name), f"{name}.cu", (), ())
    try:
        options = (
            f"--gpu-architecture={target}",
            *_OPTIONS,
            *([] if include is None else [f"-I{include}"]),
        )
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(
                f"{name}.cu for {target}: {error}\n{nvrtc.getProgramLog(program)}"
            ) from error
        if target.startswith("sm_"):
            return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
        # the driver expects a terminating zero
        return nvrtc.getPTX(program).rstrip(b"\0") + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def header_folder() -> str | None:
    """Return the folder that contains cuda_fp16.h: in the wheel that belongs to CuPy's NVRTC, else
    in a CUDA installation, else None.
    """
    major, _ = _nvrtc().getVersion()
    candidates = [wheel / "include" for wheel in _wheels("cuda_runtime", major)]
    roots = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    candidates += [Path(root) / "include" for root in roots if root]
    return next((str(place) for place in candidates if (place / "cuda_fp16.h").exists()), None)


@functools.cache
def _nvrtc() -> Any:
    """Return CuPy's NVRTC module, after loading the library from its wheel, which older versions of
    CuPy do not search.
    """
    from cupy.cuda import nvrtc, runtime

    major = runtime.runtimeGetVersion() // 1000
    for wheel in _wheels("cuda_nvrtc", major):
        library = wheel / "lib" / f"libnvrtc.so.{major}"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # from now on it is found by name
            break
    return nvrtc


def _wheels(part: str, major: int) -> list[Path]:
    """Return the folders where NVIDIA's wheels install a CUDA library."""
    nvidia = importlib.util.find_spec("nvidia")
    places = (nvidia.submodule_search_locations or ()) if nvidia else ()
    return [Path(place) / (part if major < 13 else f"cu{major}") for place in places]


def _queue(plan: Plan, functions: list[int], stream: int, workspace: int) -> None:
    from cupy.cuda import driver

    for launch, function in zip(plan.launches, functions, strict=True):
        arguments, _values = pack(launch, workspace)
        # The driver copies the arguments; CuPy raises an exception if it returns an error.
        driver.launchKernel(
            function,
            launch.grid,
            1,
            1,
            launch.block,
            1,
            1,
            launch.shared,
            stream,
            ctypes.addressof(arguments),
            0,
        )


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _properties(index: int) -> DeviceProperties:
    return DeviceProperties(torch.cuda.get_device_properties(index).multi_processor_count)


def _image(source: str, index: int) -> bytes:
    """Return a compiled source for a device, from the disk cache if possible."""
    major, minor = torch.cuda.get_device_capability(index)
    architecture = 10 * major + minor
    made_of = (source_of(source), architecture, _OPTIONS, _nvrtc().getVersion(), header_folder())
    return cached(
        f"{source}-sm{architecture}", made_of, lambda: compile_source(source, architecture)[0]
    )


_DIGEST = 32


def folder() -> Path:
    """Return the cache folder: BAGUA_REF_CACHE_DIR, else ``bagua_ref`` in the user's cache
    folder.
    """
    chosen = os.environ.get("BAGUA_REF_CACHE_DIR")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bagua_ref"


def cached(name: str, made_of: object, make: Callable[[], bytes]) -> bytes:
    """Return the result of ``make``, from the disk cache if its inputs are unchanged.

    A folder that cannot be read or written only costs time.

    Args:
        name: the beginning of the file's name.
        made_of: everything that determines the result; its repr is hashed.
        make: computes the result.
    """
    path = folder() / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:_DIGEST]}"
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    result = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may read or write the same file: they must see either all of the old or
        # all of the new one.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(result).digest() + result)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    return result
