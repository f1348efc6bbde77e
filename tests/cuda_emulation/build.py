"""Cached compilation of the CUDA sources for the emulation, in files named by a hash of all
inputs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua_ref.backends.cuda.launch import source_of

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_ELEMENTWISE = (
    "add",
    "subtract",
    "add_scaled",
    "average",
    "divide",
    "combine_ring",
    "async_average",
    "update_momentum",
)
_CODECS = {
    "codec": ("find_ends", "quantise", "compress_on_chip", "decompress"),
    "microscaling": (
        "find_largest",
        *(
            f"{way}_{codec}"
            for way in ("compress", "decompress")
            for codec in ("MXFP8", "MXFP4", "MXINT8", "NVFP4")
        ),
    ),
    "one_bit": ("sum_squares", "write_signs", "restore_signs"),
}

KERNELS: dict[str, tuple[str, ...]] = {
    "elementwise": tuple(f"{name}_{dtype}" for name in _ELEMENTWISE for dtype in _FLOATS),
    "chunks": tuple(f"reduce_chunks_{dtype}" for dtype in _FLOATS),
    **{
        source: tuple(
            f"{name}_{dtype}" for name in names for dtype in _FLOATS if dtype != "float64"
        )
        for source, names in _CODECS.items()
    },
    "movement": (
        "gather_segments",
        "scatter_segments",
        *(f"{way}_strided_{size}" for way in ("gather", "scatter") for size in (1, 2, 4, 8, 16)),
        *(f"order_keys_{dtype}" for dtype in _FLOATS),
    ),
}
"""The names of the kernels in each source ``kernels/<source>.cu``."""

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("BAGUA_REF_EMULATION_CACHE", HERE.parents[1] / "build" / "cuda_emulation")
)
FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
)


def compiler() -> str | None:
    """Return the compiler, or None without one."""
    return shutil.which(os.environ.get("CXX", "g++"))


needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no g++")
proofs = [pytest.mark.proof, needs_compiler]
"""Marks of files that compile the CUDA sources: `make test` needs no compiler."""


def build(
    target: str,
    sources: dict[str, tuple[str, tuple[str, ...]]],
    flags: tuple[str, ...],
    own: tuple[str, ...] = ("runtime.cpp",),
    own_flags: tuple[str, ...] | None = None,
) -> Path:
    """Compile and link, unless that has been done before.

    Args:
        target: the file's name; with the suffix ``.so`` a library.
        sources: name -> CUDA C++ text and its kernels.
        flags: for compiler and linker, in addition to FLAGS.
        own: files of this folder to compile as well.
        own_flags: flags for those files, instead of ``flags``.
    """
    program = compiler()
    assert program is not None, "no g++"
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout
    headers = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.h"))]
    its_own = flags if own_flags is None else own_flags

    def compiled(path: Path, made: Path, its_flags: tuple[str, ...]) -> Path:
        run(
            [
                program,
                *FLAGS,
                *its_flags,
                f"-I{HERE}",
                f"-I{path.parent}",
                "-c",
                str(path),
                "-o",
                str(made),
            ]
        )
        return made

    def made_of(name: str) -> Path:
        path = HERE / name
        inputs = version, headers, path.read_text(encoding="utf-8"), its_own, FLAGS
        return _once(
            f"{path.stem}.o",
            inputs,
            lambda folder: compiled(path, folder / f"{path.stem}.o", its_own),
        )

    def linked(folder: Path) -> Path:
        for name, (text, kernels) in sources.items():
            (folder / f"{name}.cu").write_text(text, encoding="utf-8")
            # The sanitizer puts red zones around shared arrays only if they have internal linkage.
            unit = f'#include "emulation.h"\nnamespace {{\n#include "{name}.cu"\n}}\n'
            unit += "".join(f"EMULATED({kernel});\n" for kernel in kernels)
            (folder / f"{name}.cpp").write_text(unit, encoding="utf-8")
        with ThreadPoolExecutor(2) as pool:
            objects = list(
                pool.map(
                    lambda name: compiled(folder / f"{name}.cpp", folder / f"{name}.o", flags),
                    sources,
                )
            )
        shared = ("-shared",) if target.endswith(".so") else ()
        run(
            [
                program,
                *flags,
                *shared,
                "-o",
                str(folder / target),
                *map(str, (*objects, *map(made_of, own))),
                "-lpthread",
            ]
        )
        return folder / target

    files = [(HERE / name).read_text(encoding="utf-8") for name in own]
    return _once(target, (version, headers, files, sources, flags, own_flags, FLAGS), linked)


def _once(target: str, inputs: object, make: Callable[[Path], Path]) -> Path:
    """Return the file ``target`` that ``make`` has made of ``inputs`` in the folder that it is
    given, now or earlier.
    """
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:24]
    result = CACHE / key / target
    if result.exists():
        return result
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{key}.lock").open("w") as lock:
        # pytest's workers come at the same time; only one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                made = make(Path(folder))
                result.parent.mkdir(exist_ok=True)
                made.replace(result)
    return result


def run(command: list[str]) -> None:
    """Run a compiler; raise an error with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def kernel_sources() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the package's own sources."""
    return {name: (source_of(name), kernels) for name, kernels in KERNELS.items()}


def library() -> Path:
    """Return the library with all of the package's kernels."""
    return build("kernels.so", kernel_sources(), ("-O2",))
