"""Targets: a backend's name, a KernelBackend, or any object with some of the parts that suites
check; and sizes of long inputs for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch

from bagua_ref.backends import get_backend
from bagua_ref.backends.base import KernelBackend
from bagua_ref.errors import BackendUnavailableError

PARTS = ("kernels", "communicator", "comm_ops", "algorithms", "samplers")
"""The attributes of a target that suites check."""

_KERNELS = ("codecs", *(name[1:] for name in KernelBackend.__abstractmethods__))

TAIL = 7
"""Number of elements beyond a block: fewer than any vector has, and no multiple of that."""

LONG = (2**18 + 96 + TAIL,)
"""Numbers of elements of long inputs in all profiles but "large": some of MX's blocks
beyond the reference's own.
"""


@dataclass
class Target:
    """A target, resolved into its parts.

    Attributes:
        name: name for reports.
        parts: the target's parts by name; parts that it lacks are missing.
        setup: lines of a script that create ``kernels``.
        dtypes: names of the dtypes that its capabilities allow; None: all.
        device: device of its kernels' tensors.
        max_ranks: the largest world that its capabilities allow; None: any.
        external: whether it uses an external resource, which two processes must not use at once.
        requests: function that returns the number of requests sent to a program, for parts that may
            reject arguments without a request; None: every call reaches the target.
        cannot_be_asked: parts for which the protocol has no request.
        tile_sizes: numbers of elements that the kernels process at once.
    """

    name: str
    parts: dict[str, Any]
    setup: list[str] = field(default_factory=list)
    dtypes: tuple[str, ...] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_ranks: int | None = None
    external: bool = False
    requests: Callable[[], int] | None = None
    cannot_be_asked: tuple[str, ...] = ()
    tile_sizes: tuple[int, ...] = ()

    @property
    def kernels(self) -> Any:
        """The kernels; None if the target has none."""
        return self.parts.get("kernels")

    def codec(self, name: str) -> Any:
        """Return a codec, made from the kernels' mapping ``codecs`` of names to factories."""
        return self.kernels.codecs[name](self.kernels)


def resolve(target: Any) -> Target:
    """Return the parts of a target.

    Args:
        target: a backend's name or ``"pkg.mod:Class"``, an object with some of the methods of a
            KernelBackend (or its class), or one with some of `PARTS`; optionally with
            ``capabilities``, a mapping with any of ``"dtypes"`` and ``"max_ranks"``, which limit
            what is tried, ``"external"`` and ``"tile_sizes"``.

    Raises:
        ValueError: no backend has this name, or capabilities are invalid.
        BackendUnavailableError: the backend cannot run here.
        ImportError, AttributeError: ``"pkg.mod:Class"`` is not there.
        TypeError: the object has no part that a suite checks, or a capability is of the wrong type.
    """
    if isinstance(target, str):
        named = resolve(load(target) if ":" in target else get_backend(target))
        if ":" not in target:
            named.setup = _setup(target)
        named.name = target
        return named
    if isinstance(target, type):
        reason = target.unavailable_reason() if issubclass(target, KernelBackend) else None
        if reason is not None:
            raise BackendUnavailableError(f"target={target.__name__} cannot run: {reason}")
        target = target()
    parts = {
        part: getattr(target, part) for part in PARTS if getattr(target, part, None) is not None
    }
    setup = _setup(parts.get("kernels")) if isinstance(parts.get("kernels"), str) else []
    # Kernels need not be a KernelBackend: those of a program or in C are not.
    is_backend = isinstance(target, KernelBackend)
    if is_backend or (not parts and any(hasattr(target, name) for name in _KERNELS)):
        parts, setup = {"kernels": target}, _setup(target)
    elif not parts:
        raise TypeError(
            f"target={target!r} must be a backend's name, have a kernel or one of"
            f" {', '.join(PARTS)}"
        )
    kernels = parts.get("kernels")
    if isinstance(kernels, str):
        kernels = parts["kernels"] = get_backend(kernels)
    if not setup:
        *imports, last = _setup(target)
        setup = [*imports, f"{last}.kernels"]
    return Target(
        str(getattr(target, "name", type(target).__name__)),
        parts,
        setup,
        device=_device(kernels),
        requests=getattr(target, "requests", None),
        cannot_be_asked=getattr(target, "cannot_be_asked", ()),
        **{**capabilities_of(kernels), **capabilities_of(target)},
    )


def load(path: str) -> Any:
    """Import the object named ``"pkg.mod:name"``.

    Raises:
        ImportError: the module does not exist.
        AttributeError: the module has no such name.
        ValueError: the path does not have this form.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} must be of the form 'pkg.mod:name'")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _setup(target: Any) -> list[str]:
    """Return lines of Python that create ``kernels``: a backend of this name, or an object like
    this one.
    """
    if isinstance(target, str):
        return ["from bagua_ref.backends import get_backend", f"kernels = get_backend({target!r})"]
    kind = type(target)
    name = kind.__qualname__
    # its repr is the call that creates it, unless a field has none
    call = repr(target) if is_dataclass(target) and "<" not in repr(target) else f"{name}()"
    if "<locals>" in name or kind.__module__ == "__main__":
        return [f"kernels = {call.rpartition('>.')[2]}"]
    return [f"from {kind.__module__} import {name.partition('.')[0]}", f"kernels = {call}"]


def capabilities_of(part: Any) -> dict[str, Any]:
    """Return the ``capabilities`` of a target, its kernels or its factory of communicators, as
    fields of `Target`.
    """
    said = getattr(part, "capabilities", None)
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not said.keys() <= {
        "dtypes",
        "max_ranks",
        "external",
        "tile_sizes",
    }:
        raise ValueError(
            f"capabilities={said!r} must be a mapping with any of the keys 'dtypes', 'max_ranks',"
            " 'external' and 'tile_sizes'"
        )
    found = dict(said)
    if "dtypes" in found:
        found["dtypes"] = names = tuple(
            str(dtype).removeprefix("torch.") for dtype in found["dtypes"]
        )
        for name in names:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"capabilities['dtypes'] has {name!r}, which is not a torch dtype")
    ranks, external = found.get("max_ranks", 1), found.get("external", False)
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"capabilities['max_ranks']={ranks!r} must be an int")
    if ranks < 1:
        raise ValueError(f"capabilities['max_ranks']={ranks} must be at least 1")
    if not isinstance(external, bool):
        raise TypeError(f"capabilities['external']={external!r} must be a bool")
    found["tile_sizes"] = tuple(found.get("tile_sizes", ()))
    if not all(isinstance(size, int) and 0 < size <= 2**24 for size in found["tile_sizes"]):
        raise ValueError(
            f"capabilities['tile_sizes']={found['tile_sizes']} must be ints from 1 to 2**24"
        )
    return found


def _device(kernels: Any) -> torch.device:
    types = getattr(kernels, "device_types", None)
    return torch.device("cpu" if not types or "cpu" in types else types[0])


def sizes_beyond(tile_sizes: Iterable[int]) -> tuple[int, ...]:
    """Return sizes that end `TAIL` elements beyond a tile: declared tile sizes, and powers of two
    up to 2^20.

    >>> sizes_beyond([1000])[3:6]
    (519, 1007, 1031)
    """
    found = {*tile_sizes, *(2**power for power in range(6, 21))}
    return tuple(size + TAIL for size in sorted(found))
