"""Registry of kernel backends and their codecs, and selection of a backend.

The choice follows this order: the argument ``backend=``; `use_backend`; the environment variable
BAGUA_REF_BACKEND; ``"cuda"`` for CUDA tensors if it can run; else ``"reference"``. If the requested
backend cannot run, an error is raised; no other backend replaces it. Backends are registered as
"module:Class" and imported only when needed. Other packages add theirs with `register_backend` or
with the entry point group ``bagua_ref.backends``. Each backend has its own codecs, in its attribute
``codecs``.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.base.runtime import current_world
from bagua_ref.errors import BackendUnavailableError

__all__ = [
    "Codec",
    "KernelBackend",
    "available_backends",
    "get_backend",
    "get_codec",
    "is_codec",
    "list_codecs",
    "register_backend",
    "use_backend",
]

_VARIABLE = "BAGUA_REF_BACKEND"


@dataclass(frozen=True)
class _Registration:
    target: str
    hint: str


_registered: dict[str, _Registration] = {}
_instances: dict[str, KernelBackend] = {}
_lock = threading.RLock()
_process_wide: list[use_backend] = []
_in_context: ContextVar[use_backend | None] = ContextVar("bagua_ref_backend", default=None)


def register_backend(name: str, target: str, *, hint: str = "") -> None:
    """Register a backend under a name; its module is imported at first use.

    Args:
        name: the backend's name for `get_backend`.
        target: ``"module:Class"``; the class is a `KernelBackend` that is instantiated once,
            without arguments.
        hint: advice on installation if it cannot run, such as ``"pip install my-kernels"``.

    Raises:
        ValueError: target does not have this form, or name is registered for another target.
        TypeError: name or target is not a string.
    """
    for argument, value in (("name", name), ("target", target)):
        if not isinstance(value, str):
            raise TypeError(f"{argument}={value!r} must be a string")
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"target={target!r} must be of the form 'module:Class'")
    with _lock:
        known = _registered.get(name)
        if known is not None and known.target != target:
            raise ValueError(
                f"name={name!r} is already registered for {known.target!r}; choose another name for"
                f" {target!r}"
            )
        _registered[name] = _Registration(target, hint)


def get_codec(name: str, backend: str | KernelBackend | None = None) -> Codec:
    """Return a codec by name.

    Args:
        name: one of `list_codecs`.
        backend: the backend that runs the codec, as for `get_backend`.

    Raises:
        ValueError: no codec has this name; the message lists those that exist.
        BackendUnavailableError: the backend has no such codec.

    >>> get_codec("OneBit").payload_bytes(1000, torch.float32)
    160
    """
    kernels = get_backend(backend)
    if isinstance(name, str) and name in kernels.codecs:
        return kernels.codecs[name](kernels)
    if not is_codec(name):
        raise ValueError(
            f"name={name!r} is not a known codec; there are {', '.join(map(repr, list_codecs()))}"
        )
    names = ", ".join(map(repr, list_codecs(kernels)))
    raise BackendUnavailableError(
        f"codec {name!r} cannot run: backend {kernels.name!r} does not have it; it has {names}"
    )


def list_codecs(backend: str | KernelBackend | None = None) -> list[str]:
    """Return the names of a backend's codecs.

    Args:
        backend: a name or a backend; None: all backends that have been used, and the reference.

    >>> {"MXFP4", "MXFP8", "MXINT8", "MinMaxUInt8", "OneBit"} <= set(list_codecs("reference"))
    True
    """
    used = (
        [get_backend("reference"), *_instances.values()]
        if backend is None
        else [get_backend(backend)]
    )
    return sorted({name for kernels in used for name in kernels.codecs})


def is_codec(name: object) -> bool:
    """Return whether ``name`` is one of `list_codecs`.

    >>> is_codec("MXFP8"), is_codec("MXFP9"), is_codec(None)
    (True, False, False)
    """
    return name in list_codecs()


def get_backend(
    backend: str | KernelBackend | None = None, device: torch.device | str | None = None
) -> KernelBackend:
    """Return a kernel backend: the named one, or the default.

    Args:
        backend: a name, or a backend, which is returned unchanged; None: the choice of
            `use_backend` or BAGUA_REF_BACKEND, else ``"cuda"`` if ``device`` is a CUDA device and
            it can run, else ``"reference"``.
        device: the device of the tensors; it matters only if nothing else decides.

    Raises:
        ValueError: no backend has this name; the message lists those that are installed.
        BackendUnavailableError: the backend cannot run here; the message says why and what to
            install.

    >>> get_backend("reference")
    ReferenceBackend()
    """
    if isinstance(backend, KernelBackend):
        return backend
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} must be a name, a KernelBackend or None")
    if backend is not None:
        return _load(backend, f"backend={backend!r}")
    choice = _in_context.get() or (_process_wide[-1] if _process_wide else None)
    if choice is not None and choice.name is not None:
        return _load(choice.name, f"use_backend({choice.name!r})")
    variable = os.environ.get(_VARIABLE)
    if variable:
        return _load(variable, f"{_VARIABLE}={variable!r}")
    if device is not None and torch.device(device).type == "cuda":
        try:
            return _load("cuda", "backend='cuda'")
        except BackendUnavailableError:
            pass  # it was not asked for by name, and the reference works on CUDA tensors, too
    return _load("reference", "backend='reference'")


class use_backend:  # noqa: N801 - reads as the verb it is
    """Set the default kernel backend, for the process or inside a ``with`` block.

    Called as a function, the choice is valid for the whole process until the next call. As a
    context manager, it is valid inside the block only, for this thread and the threads that a
    `bagua_ref.runtime.World` starts from it, and overrides the process's.

    Args:
        name: a backend's name; None: undo the choice, so that BAGUA_REF_BACKEND and the device
            decide.

    Raises:
        ValueError: no backend has this name; the message lists those that are installed.
        BackendUnavailableError: the backend cannot run here; the message says why and what to
            install.

    >>> with use_backend("reference"):
    ...     get_backend()
    ReferenceBackend()
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._tokens: list[Token[use_backend | None]] = []
        if name is not None:
            _load(name, f"use_backend({name!r})")
        with _lock:
            _process_wide.append(self)

    def __enter__(self) -> use_backend:
        # Only now is it known that this is a context manager, so the process's choice is restored.
        with _lock:
            if self in _process_wide:
                _process_wide.remove(self)
        self._tokens.append(_in_context.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _in_context.reset(self._tokens.pop())


def available_backends() -> dict[str, str | None]:
    """Map the name of every registered backend to the reason why it cannot run here, or None.

    This imports all of them.

    >>> available_backends()["reference"] is None
    True
    """
    reasons: dict[str, str | None] = {}
    for name in sorted({*_registered, *_installed()}):
        try:
            _load(name, f"backend={name!r}")
            reasons[name] = None
        except BackendUnavailableError as error:
            reasons[name] = str(error)
    return reasons


def _installed() -> dict[str, _Registration]:
    """Return backends registered by other packages as entry points; reads a file of every installed
    package.
    """
    return {
        point.name: _Registration(
            point.value,
            f"it comes from {point.dist.name if point.dist else 'an installed package'}",
        )
        for point in entry_points(group="bagua_ref.backends")
    }


def _load(name: str, asked: str) -> KernelBackend:
    """Return the single instance of a backend; ``asked`` is the user's choice, for messages."""
    instance = _instances.get(name)
    if instance is not None:
        return instance
    registration = _registered.get(name) or _installed().get(name)
    if registration is None:
        names = ", ".join(map(repr, sorted({*_registered, *_installed()})))
        advice = ""
        if name in current_world().engines:
            advice = (
                f"; the engine of the wrapped module {name!r} is"
                f" bagua_ref.communication.get_backend({name!r})"
            )
        raise ValueError(f"{asked} is not a known kernel backend; installed are {names}{advice}")
    with _lock:
        if name not in _instances:
            backend_class = _import_class(registration, asked)
            if (reason := backend_class.unavailable_reason()) is not None:
                advice = f"; {registration.hint}" if registration.hint else ""
                raise BackendUnavailableError(f"{asked} cannot run: {reason}{advice}")
            _instances[name] = backend_class()
        return _instances[name]


def _import_class(registration: _Registration, asked: str) -> type[KernelBackend]:
    module, _, attribute = registration.target.partition(":")
    advice = f"; {registration.hint}" if registration.hint else ""
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise BackendUnavailableError(
                f"{asked} cannot run: {module} is not installed"
            ) from error
        raise BackendUnavailableError(f"{asked} cannot run: {error}{advice}") from error
    except Exception as error:  # a foreign module's import may fail in any way
        raise BackendUnavailableError(
            f"{asked} cannot run: importing {module}: {type(error).__name__}: {error}{advice}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, KernelBackend)):
        raise BackendUnavailableError(
            f"{asked} cannot run: {registration.target} is not a KernelBackend class"
        )
    return found


register_backend("reference", "bagua_ref.backends.reference:ReferenceBackend")
register_backend("cuda", "bagua_ref.backends.cuda.launcher:CudaBackend")
