"""Tests of the CUDA launcher with stand-ins for CuPy and torch.cuda; the driver's launches go to
the emulation.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import emulator
from tests.threads import assert_right_on_threads

import bagua_ref.backends as registry
from bagua_ref.backends import available_backends, get_backend, get_codec
from bagua_ref.backends.cuda import launcher
from bagua_ref.backends.cuda.launch import source_of
from bagua_ref.backends.cuda.launcher import cached
from bagua_ref.base.not_provided import install_command
from bagua_ref.errors import BackendUnavailableError


class FakeCuda:
    """Stand-in for CuPy's three modules that records the calls."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.launched: list[tuple[str, int, int]] = []
        self.names: list[str] = []
        self.device, self.freed = 0, 0
        self.archs, self.fail = (75, 80, 90), ""
        self.nvrtc = ModuleType("cupy.cuda.nvrtc")
        self.driver = ModuleType("cupy.cuda.driver")
        self.runtime = ModuleType("cupy.cuda.runtime")
        self.nvrtc.__dict__.update(
            NVRTCError=self.NVRTCError,
            getVersion=lambda: (12, 9),
            getSupportedArchs=lambda: self.archs,
            createProgram=lambda text, name, headers, includes: (text, name),
            compileProgram=self.compile,
            getProgramLog=lambda program: "the log",
            getCUBIN=lambda program: b"cubin of " + program[1].encode(),
            getPTX=lambda program: b"ptx of " + program[1].encode(),
            destroyProgram=lambda program: None,
        )
        self.driver.__dict__.update(
            moduleLoadData=self.load, moduleGetFunction=self.function, launchKernel=self.launch
        )
        self.runtime.__dict__.update(
            getDeviceCount=lambda: 2,
            runtimeGetVersion=lambda: 12090,
            getDevice=lambda: self.device,
            setDevice=self.set_device,
            free=self.free,
        )

    def compile(self, program, options):
        if self.fail == "compile":
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION")
        self.compiled.append((program[1], options))

    def load(self, image):
        self.loaded.append(image)
        return len(self.loaded)

    def function(self, module, name):
        self.names.append(name)
        return len(self.names) - 1

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        if self.fail == "launch":
            raise RuntimeError(
                "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch"
            )
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        self.launched.append((self.names[function], self.device, stream))
        emulator().run_packed(self.names[function], gx, bx, shared, arguments)

    def set_device(self, index):
        self.device = index

    def free(self, address):
        assert address == 0
        self.freed += 1


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """Replace CuPy, the driver and two devices by stand-ins."""
    fake = FakeCuda()
    package, inner = ModuleType("cupy"), ModuleType("cupy.cuda")
    package.cuda = inner
    inner.__dict__.update(nvrtc=fake.nvrtc, driver=fake.driver, runtime=fake.runtime)
    for module in (package, inner, fake.nvrtc, fake.driver, fake.runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "toolkit" / "include").mkdir(parents=True)
    (tmp_path / "toolkit" / "include" / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    monkeypatch.setenv("BAGUA_REF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        launcher, "current_stream", lambda device: SimpleNamespace(cuda_stream=7000 + device.index)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=2)
    )
    for cached_function in (launcher._properties, launcher._nvrtc):
        cached_function.cache_clear()
    yield fake
    for cached_function in (launcher._properties, launcher._nvrtc):
        cached_function.cache_clear()


class OnCpu(launcher.CudaBackend):
    """Return the launcher, made to accept CPU tensors."""

    device_types = ("cpu",)

    def _workspace(self, size, index, stream):
        original, torch.empty = (
            torch.empty,
            lambda *shape, device, **options: original(*shape, **options),
        )
        try:
            return super()._workspace(size, index, stream)
        finally:
            torch.empty = original


@pytest.mark.proof
@build.needs_compiler
def test_launches_go_to_torch_s_stream_on_the_tensor_s_device_and_the_device_is_given_back(cuda):
    kernels, x = OnCpu(), torch.randn(50_000)
    payload = get_codec("MinMaxUInt8", kernels).compress(x, 1)
    assert torch.equal(payload, get_codec("MinMaxUInt8", get_backend("reference")).compress(x, 1))
    assert cuda.launched == [("find_ends_float32", 1, 7001), ("quantise_float32", 1, 7001)]
    assert cuda.device == 0
    kernels.add_(x, torch.ones(50_000))
    assert cuda.launched[2:] == [("add_float32", 1, 7001)]
    kernels.add_(torch.zeros(0), torch.zeros(0))
    assert len(cuda.launched) == 3


@pytest.mark.proof
@build.needs_compiler
def test_a_source_is_compiled_once_and_kept_on_disk_until_something_changes(
    cuda, monkeypatch, tmp_path
):
    def use() -> OnCpu:
        kernels = OnCpu()
        kernels.add_(torch.zeros(9), torch.ones(9))
        kernels.divide_(torch.ones(9), 3)
        return kernels

    use()
    assert [name for name, _ in cuda.compiled] == ["elementwise.cu"]
    options = cuda.compiled[0][1]
    assert "--gpu-architecture=sm_90" in options
    assert "--fmad=false" in options
    # S1, S12.1: subnormals are kept
    assert not any("ftz" in option or "fast" in option for option in options)
    assert f"-I{tmp_path / 'toolkit' / 'include'}" in options
    assert cuda.loaded == [b"cubin of elementwise.cu"]
    use()  # as in another process
    assert len(cuda.compiled) == 1
    assert len(cuda.loaded) == 2
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-1])  # damaged
    use()
    assert len(cuda.compiled) == 2
    monkeypatch.setattr(cuda.nvrtc, "getVersion", lambda: (12, 10))
    use()
    assert len(cuda.compiled) == 3


@pytest.mark.proof
@build.needs_compiler
def test_every_thread_takes_up_the_device_once(cuda):
    kernels = OnCpu()
    kernels.add_(torch.zeros(9), torch.ones(9))
    kernels.add_(torch.zeros(9), torch.ones(9))
    assert cuda.freed == 1
    thread = threading.Thread(target=lambda: kernels.add_(torch.zeros(9), torch.ones(9)))
    thread.start()
    thread.join()
    assert cuda.freed == 2


@pytest.mark.proof
@build.needs_compiler
def test_a_stream_keeps_its_workspace_until_it_is_too_small(cuda, monkeypatch):
    kernels = OnCpu()
    for _ in range(3):
        get_codec("MinMaxUInt8", kernels).compress(torch.randn(50_000), 1)
    assert [(key, value.numel()) for key, value in kernels._workspaces.items()] == [
        ((1, 7001), 65536)
    ]
    first = kernels._workspaces[1, 7001]
    kernels._workspace(65537, 1, 7001)
    assert kernels._workspaces[1, 7001].numel() == 131072
    monkeypatch.setattr(launcher, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    get_codec("MinMaxUInt8", kernels).compress(torch.randn(50_000), 1)
    assert len(kernels._workspaces) == 2
    assert first.numel() == 65536


@pytest.mark.proof
@build.needs_compiler
def test_threads_on_one_stream_do_not_take_each_other_s_workspace(cuda):
    kernels, reference = OnCpu(), get_backend("reference")
    inputs = [
        torch.randn(60_000, generator=torch.Generator().manual_seed(seed)) * 10**seed
        for seed in range(4)
    ]
    expected = [get_codec("MinMaxUInt8", reference).compress(x, 2) for x in inputs]
    assert_right_on_threads(
        lambda index: get_codec("MinMaxUInt8", kernels).compress(inputs[index], 2),
        expected,
        rounds=5,
    )


def test_what_cuda_refuses_is_an_error_with_its_words(cuda):
    cuda.fail = "compile"
    with pytest.raises(
        RuntimeError, match=r"elementwise\.cu for sm_90: NVRTC_ERROR_COMPILATION\nthe log"
    ):
        OnCpu().add_(torch.zeros(9), torch.ones(9))
    cuda.fail = "launch"
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        OnCpu().add_(torch.zeros(9), torch.ones(9))
    assert cuda.device == 0


def test_a_card_that_nvrtc_does_not_know_gets_ptx_for_the_newest_that_it_knows(cuda):
    assert launcher.compile_source("codec", 120) == (b"ptx of codec.cu\0", "the log")
    assert "--gpu-architecture=compute_90" in cuda.compiled[0][1]
    assert launcher.compile_source("codec", 80)[0] == b"cubin of codec.cu"


class TestUnavailable:
    def reason(self) -> str:
        with pytest.raises(BackendUnavailableError) as caught:
            get_backend("cuda")
        assert "cuda" in available_backends()
        return str(caught.value)

    @pytest.fixture(autouse=True)
    def _nobody_has_asked(self, monkeypatch):
        monkeypatch.setattr(registry, "_instances", {})

    @pytest.mark.parametrize(
        ("cuda_of_torch", "extra"), [(None, "cuda12"), ("12.8", "cuda12"), ("13.0", "cuda13")]
    )
    def test_without_cupy(self, monkeypatch, cuda_of_torch, extra):
        monkeypatch.setattr(torch.version, "cuda", cuda_of_torch)
        monkeypatch.setitem(sys.modules, "cupy", None)
        monkeypatch.setitem(sys.modules, "cupy.cuda", None)
        reason = self.reason()
        assert "CuPy cannot be imported" in reason
        assert reason.endswith(f"install with: {install_command(extra)}")

    def test_without_a_device(self, cuda, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        assert "torch finds no CUDA device" in self.reason()
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "this torch was built without CUDA" in self.reason()

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("cudaErrorInsufficientDriver"),
            ImportError("libnvrtc.so.12"),
            OSError("lib"),
        ],
    )
    def test_where_cupy_finds_nothing(self, cuda, monkeypatch, error):
        def fail():
            raise error

        monkeypatch.setattr(cuda.nvrtc, "getVersion", fail)
        assert f"CuPy finds no device or no compiler: {error}" in self.reason()

    @pytest.mark.parametrize(
        ("version", "wheel"),
        [((12, 9), "nvidia-cuda-runtime-cu12"), ((13, 0), "nvidia-cuda-runtime")],
    )
    def test_without_headers(self, cuda, monkeypatch, version, wheel):
        monkeypatch.setattr(cuda.nvrtc, "getVersion", lambda: version)
        monkeypatch.setattr(launcher, "header_folder", lambda: None)
        assert self.reason().endswith(f"pip install {wheel}")

    def test_with_everything_it_is_there(self, cuda):
        assert get_backend("cuda").name == "cuda"
        assert get_backend(None, device="cuda:0").name == "cuda"
        with pytest.raises(ValueError, match="x is on cpu; backend 'cuda' works on cuda tensors"):
            get_backend("cuda").add_(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(("major", "folder"), [(12, "cuda_runtime"), (13, "cu13")])
def test_headers_come_from_the_wheel_that_goes_with_the_compiler(
    cuda, monkeypatch, tmp_path, major, folder
):
    wheel = tmp_path / "site" / "nvidia" / folder / "include"
    wheel.mkdir(parents=True)
    (wheel / "cuda_fp16.h").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "site" / "nvidia")])
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cuda.nvrtc, "getVersion", lambda: (major, 0))
    assert launcher.header_folder() == str(wheel)
    monkeypatch.setattr(cuda.nvrtc, "getVersion", lambda: (25 - major, 0))
    assert launcher.header_folder() == str(tmp_path / "toolkit" / "include")


def test_the_compiler_s_library_is_loaded_from_its_wheel(cuda, monkeypatch, tmp_path):
    library = tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(OSError, match=r"libnvrtc\.so\.12"):  # found, although it is not a library
        launcher._nvrtc()
    library.unlink()
    assert launcher._nvrtc() is cuda.nvrtc


class TestDiskCache:
    def test_a_folder_that_cannot_be_written_only_costs_time(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("BAGUA_REF_CACHE_DIR", str(tmp_path / "file" / "below"))
        made: list[int] = []
        for _ in range(2):
            assert cached("name", 1, lambda: made.append(1) or b"result") == b"result"
        assert len(made) == 2

    def test_it_lies_in_the_user_s_cache_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("BAGUA_REF_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cached("name", 1, lambda: b"result")
        (file,) = (tmp_path / "bagua_ref").iterdir()
        assert file.name.startswith("name-")
        assert cached("name", 1, lambda: b"") == b"result"
        assert cached("name", 2, lambda: b"other") == b"other"
        assert len(list((tmp_path / "bagua_ref").iterdir())) == 2


def test_sources_stand_alone():
    for source in Path(launcher.__file__).parent.glob("kernels/*.cu"):
        assert '#include "' not in source_of(source.stem)
