"""Compilation of the CUDA sources by NVRTC, from wheels and without a card, for four GPU
generations.

Needs CuPy, NVRTC and CUDA's headers, all from wheels: ``pip install 'bagua_ref[nvrtc]'``. No driver
and no device.
"""

from __future__ import annotations

import os
import re

import pytest
from tests.cuda_emulation.build import KERNELS

from bagua_ref.backends.cuda import launcher

try:
    VERSION = ".".join(map(str, launcher._nvrtc().getVersion()))
    missing = "" if launcher.header_folder() else "CUDA's headers are missing"
except Exception as error:  # CuPy raises various errors where a library is missing
    missing = f"no NVRTC: {error}"

if missing and "CI" not in os.environ:
    pytest.skip(missing, allow_module_level=True)

ARCHITECTURES = (75, 80, 90, 100)
REGISTERS = 80  # per thread, so that three blocks fit on a multiprocessor
ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
    r" spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def uses(name: str, architecture: int) -> dict[str, dict[str, int]]:
    """Return the assembler's report on each kernel of a source."""
    cubin, log = launcher.compile_source(name, architecture)
    assert cubin[:4] == b"\x7fELF"
    found = {}
    for entry in ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        numbers = {key: int(entry[key]) for key in ("registers", "stack", "stores", "loads")}
        found[entry["kernel"]] = {**numbers, "shared": int(shared[1]) if shared else 0}
    assert "warning" not in log, log
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_and_none_spills(architecture, capsys):
    assert not missing, missing
    table = {kernel: use for name in KERNELS for kernel, use in uses(name, architecture).items()}
    assert set(table) == {kernel for kernels in KERNELS.values() for kernel in kernels}
    with capsys.disabled():
        print(f"\nsm_{architecture}, NVRTC {VERSION}")
        print(f"{'kernel':<28}registers  spilled  stack  shared")
        for kernel, use in table.items():
            print(
                f"{kernel:<28}{use['registers']:>9}{use['stores'] + use['loads']:>9}{use['stack']:>7}{use['shared']:>8}"
            )
    for kernel, use in table.items():
        assert use["stores"] == use["loads"] == use["stack"] == 0, kernel
        assert use["registers"] <= REGISTERS, kernel
        assert use["shared"] <= 1024, kernel


def test_the_compiler_s_words_reach_the_user(monkeypatch):
    assert not missing, missing
    monkeypatch.setattr(
        launcher, "source_of", lambda name: 'extern "C" __global__ void broken() { nonsense(); }'
    )
    with pytest.raises(
        RuntimeError, match=r"codec\.cu for sm_90: [\s\S]*\"nonsense\" is undefined"
    ):
        launcher.compile_source("codec", 90)


def test_a_spill_would_be_seen(monkeypatch):
    assert not missing, missing
    # Needs more registers than allowed, which the table must be able to show.
    live = (
        "".join(f"float v{i} = x[{i} * n];" for i in range(200))
        + "__syncthreads();"
        + "".join(f"x[{i}] = v{i};" for i in range(200))
    )
    text = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, int n) {'
        f" {live} }}"
    )
    monkeypatch.setattr(launcher, "source_of", lambda name: text)
    assert uses("codec", 80)["spilling"]["stores"] > 0


def test_a_card_from_the_future_gets_ptx(monkeypatch):
    assert not missing, missing
    monkeypatch.setattr(
        launcher, "source_of", lambda name: 'extern "C" __global__ void nothing() {}'
    )
    text, _ = launcher.compile_source("codec", 999)
    assert b".target sm_" in text
    assert text.endswith(b"\0")
    assert text.count(b"\0") == 1
