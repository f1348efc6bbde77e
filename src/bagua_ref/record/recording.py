"""`Recording`: digests of the inputs, computations and changes of each step of a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.base.runtime import current_world
from bagua_ref.base.untrusted import load_json
from bagua_ref.base.utils import uncompiled
from bagua_ref.record.digests import digest, digest_of_text
from bagua_ref.record.files import FORMAT, INDEX, MANIFEST

_SAMPLE = 1024  # elements that tell whether values have been rounded to 16 bits
_ROUNDED = ("input", "output", "local", "grad")
"""Record kinds for which it is also recorded whether all values fit 16 bits."""


class Recording:
    """Context that records a run, for comparison with another by ``bagua-ref trace diff``.

    A step ends when the last of the optimizers has stepped. Its digests are those of random states,
    batch, the model's inputs and outputs, loss, gradients before and after communication, options
    and state of the optimizers, weights, and buffers before and after. Forwards without gradients
    are not recorded. The run computes the same bits as without it. If a file cannot be written,
    recording stops with a warning, and training goes on.

    Args:
        model: the called module: plain, in torch's DistributedDataParallel or FSDP2, or with an
            algorithm.
        optimizers: one or several, each of which steps once in a step.
        folder: this rank writes into ``folder/rank<r>``.
        loader: batches, which the context then yields: ``for batch in recording``; None: only the
            model's inputs are recorded.
        first_step: number of the first step, for a restarted run, whose steps are appended to the
            folder; None: 0, in a folder without a recording.
        rank: this rank; None: taken from bagua_ref, torch.distributed or the environment.
        world_size: number of ranks; None: likewise.

    Attributes:
        step: number of the current step.
        stopped: reason why recording stopped early, or None.

    Raises:
        ValueError: rank is not below world_size; on entering: the folder holds a recording of this
            rank.
        TypeError: there is no optimizer.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, Recording(model, optimizer, folder, [torch.ones(3, 2)] * 4) as recording:
    ...     for batch in recording:
    ...         recording.loss(model(batch).square().mean()).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     recording.step
    4
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        folder: str | Path,
        loader: Any = None,
        *,
        first_step: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if not listed or not all(isinstance(each, torch.optim.Optimizer) for each in listed):
            raise TypeError(
                f"optimizers={optimizers!r} must be a torch.optim.Optimizer or a list of at"
                " least one"
            )
        self.step = first_step or 0
        self.stopped: str | None = None
        self._loader, self._resume = loader, first_step is not None
        self._optimizers, self._model, self._inner = listed, model, _unwrapped(model)
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in self._inner.named_parameters()
        }
        self._manifest = self._describe(rank, world_size)
        self._folder = Path(folder) / f"rank{self._manifest['rank']}"
        self._index: TextIO | None = None  # None before and after recording
        self._hooks = contextlib.ExitStack()
        self._start: list[list[Any]] = []
        self._told: dict[str, str] = {}  # metadata that the index already has, by name
        self._clear()

    def __enter__(self) -> Recording:
        self._open()
        self._add_hooks()
        self._begun = True
        self._add_weights()
        self._start = self._entries
        self._clear(self._metadata)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording; after an exception, the unfinished step is written, too."""
        self._hooks.close()
        if self._index is None:
            return
        if kind is not None and self._entries:
            self._write(partial=True)
        self._manifest["complete"] = kind is None and self.stopped is None
        with contextlib.suppress(OSError), self._index:  # closing may write buffered lines
            self._write_manifest()
        self._index = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, and record them."""
        for batch in self._loader:
            yield self.batch(batch)

    def batch(self, batch: Any) -> Any:
        """Record a batch, of tensors in lists, tuples and mappings, and return it."""
        self._add_tree("batch", batch)
        return batch

    def loss(self, loss: Tensor) -> Tensor:
        """Record the loss before its backward pass, and return it."""
        self._add("loss:", loss)
        return loss

    # Times of recording.

    def _add_hooks(self) -> None:
        hooks = [
            self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self._model.register_forward_hook(self._after_forward),
            self._optimizers[-1].register_step_post_hook(lambda *_: self._end_step()),
            *(each.register_step_pre_hook(self._before_optimizer) for each in self._optimizers),
            *(
                parameter.register_hook(
                    lambda gradient, name=f"local:{name}": self._add(name, gradient)
                )
                for parameter, name in self._names.items()
                if parameter.requires_grad
            ),
        ]
        for hook in hooks:
            self._hooks.callback(hook.remove)

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self._begin()
            self._add_tree("input", [*args, kwargs] if kwargs else args)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # A generator that the forward pass draws from can be the cause of other outputs.
        for name, state in _random_states().items():
            if state != self._random[name] and not self._counts[f"drawn:{name}"]:
                self._note(f"drawn:{name}", state)
        self._add_tree("output", output)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor):
            self.loss(loss)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._add_gradients(optimizer)

        def recorded() -> Any:  # gradients exist only after the closure has run
            loss = closure()
            self._add_gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": recorded}

    def _add_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            options = {name: _plain(group[name]) for name in sorted(group) if name != "params"}
            text = json.dumps({"optimizer": type(optimizer).__name__, **options})
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._add(f"grad:{self._name(parameter)}", parameter.grad)
                self._say(f"option:{self._name(parameter)}", text)

    def _end_step(self) -> None:
        self._add_weights()
        self._add_buffers("buffer_after")
        self._write()
        self.step += 1

    def _begin(self) -> None:
        """Record random states, settings and buffers, once per step, before its first forward
        pass.
        """
        if self._begun:
            return
        self._begun = True
        self._random = _random_states()
        for name, state in self._random.items():
            self._note(f"rng:{name}", state)
        self._say("settings:", _settings_of(self._inner))
        self._add_buffers("buffer")

    def _add_weights(self) -> None:
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    self._add_tree(f"state:{self._name(parameter)}.{key}", value)
        for parameter, name in self._names.items():
            self._add(f"weight:{name}", parameter)

    def _add_buffers(self, kind: str) -> None:
        for name, buffer in self._inner.named_buffers():
            self._add(f"{kind}:{name}", buffer)

    # Contents of entries.

    def _name(self, parameter: Tensor) -> str:
        return self._names.setdefault(parameter, f"other{len(self._names)}")

    def _add_tree(self, kind: str, value: Any, path: str = "") -> None:
        name = kind if kind.startswith("state:") else f"{kind}:{path}"
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.as_tensor(value)
        if isinstance(value, Tensor):
            self._add(name, value)
        elif isinstance(value, Mapping | list | tuple):
            for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                self._add_tree(kind, inner, f"{path}.{key}" if path else str(key))
        elif value is None or isinstance(value, str | int | float | bytes):
            self._say(name, _plain(value))

    def _add(self, name: str, x: Tensor) -> None:
        """Record the digest, norm and metadata of a tensor."""
        x = x.detach()
        metadata = f"{_name_of(x.dtype)} {list(x.shape)} {x.device}"
        if hasattr(x, "to_local"):
            x = x.to_local()
            metadata += f" shard {list(x.shape)}"
        if x.layout is not torch.strided:
            x = x.to_dense()
        norm = None
        if x.is_floating_point() and x.numel():
            norm = _norm(x)
            rounded = name.partition(":")[0] in _ROUNDED
            if rounded and (narrow := _narrow(x.reshape(-1)[:_SAMPLE])):
                metadata += f" values of {narrow}"
        self._note(name, digest(x), norm, metadata)

    def _say(self, name: str, text: str) -> None:
        """Record the digest of a text, and the text."""
        self._note(name, digest_of_text(text), None, text)

    def _note(self, name: str, number: int, norm: float | None = None, metadata: str = "") -> None:
        if not name.startswith("batch:"):
            self._begin()
        self._counts[name] += 1
        if (count := self._counts[name]) > 1:
            name = f"{name}#{count}"
        shown = norm if norm is None or math.isfinite(norm) else str(norm)
        self._entries.append([name, f"{number:016x}", shown])
        if self._told.get(name, "") != metadata:
            self._told[name] = self._metadata[name] = metadata

    def _clear(self, metadata: dict[str, str] | None = None) -> None:
        """Clear the entries, for the next step."""
        self._entries: list[list[Any]] = []
        self._metadata: dict[str, str] = metadata or {}
        self._counts: Counter[str] = Counter()
        self._begun = False

    # Files.

    def _describe(self, rank: int | None, world_size: int | None) -> dict[str, Any]:
        """Return the manifest of the recording."""
        world = current_world()
        if world.transport is None and dist.is_available() and dist.is_initialized():
            known = dist.get_rank(), dist.get_world_size()
        else:
            known = world.identity.rank, world.identity.world_size
        rank = known[0] if rank is None else rank
        world_size = known[1] if world_size is None else world_size
        if rank >= world_size:
            raise ValueError(f"rank={rank} must be below world_size={world_size}")
        try:
            matmul = torch.get_float32_matmul_precision()
        except RuntimeError:  # set by torch.backends.fp32_precision, which newer versions have
            matmul = str(getattr(torch.backends, "fp32_precision", None))
        return {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            "command": sys.orig_argv,
            # Settings that change the order of summation, or the precision.
            "settings": {
                "bagua_ref": import_module("bagua_ref").__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "threads": torch.get_num_threads(),
                "cpu": torch.backends.cpu.get_cpu_capability(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "matmul": matmul,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            },
            "complete": False,
            "stopped": None,
        }

    def _open(self) -> None:
        path = self._folder / MANIFEST
        if path.exists():
            there = load_json(path.read_bytes())
            same = all(there.get(key) == self._manifest[key] for key in ("format", "world_size"))
            if not self._resume or not same:
                raise ValueError(
                    f"folder={str(self._folder.parent)!r} already holds a recording of this rank"
                    f"{' of another number of ranks or format' * self._resume};"
                    " choose another folder or empty it"
                )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_manifest()
        index = self._folder / INDEX
        if index.exists():  # remove a last line truncated by a crash
            os.truncate(index, index.read_bytes().rfind(b"\n") + 1)
        self._index = index.open("a", encoding="utf-8")

    def _write(self, partial: bool = False) -> None:
        """Append a step to the file as one line, so that a crash cannot damage earlier ones."""
        line: dict[str, Any] = {
            "step": self.step,
            "entries": self._entries,
            "metadata": self._metadata,
            "start": self._start,
            "partial": partial,
        }
        self._start = []
        self._clear()
        if self.stopped is not None or self._index is None:
            return
        try:
            self._index.write(json.dumps(line) + "\n")
            self._index.flush()
        except OSError as error:
            self.stopped = self._manifest["stopped"] = (
                f"step {self.step} cannot be written: {error}"
            )
            warnings.warn(
                f"recording into {str(self._folder)!r} has stopped: {self.stopped}. Training"
                " continues",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write_manifest(self) -> None:
        """Replace the manifest atomically."""
        partial = self._folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(self._manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._folder / MANIFEST)


record = Recording
"""The public name of `Recording`: ``with bagua_ref.record(model, optimizer, folder):``."""


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the innermost module inside compiled modules and wrappers, whose only child is
    ``module``.
    """
    model = uncompiled(model)
    while [name for name, _ in model.named_children()] == ["module"]:
        model = uncompiled(model.get_submodule("module"))
    return model


def _random_states() -> dict[str, int]:
    """Return digests of the global random generators' states, by name."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002  (the global generator has no other)
    numbers["state"] = {key: np.asarray(x).tolist() for key, x in numbers["state"].items()}
    found = {
        "python": digest_of_text(repr(random.getstate())),
        "numpy": digest_of_text(repr(numbers)),
        "torch": digest(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = digest(torch.cuda.get_rng_state())
    return found


def _settings_of(model: torch.nn.Module) -> str:
    """Return JSON of each module's class and numeric public attributes, such as dropout's p; for
    torch's modules also texts and tuples.

    A difference of settings does not count by itself, as it may have no effect.
    """
    found: dict[str, dict[str, str]] = {
        "torch.autocast": {
            device: str(torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        }
    }
    for name, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        found[name] = {
            "class": type(module).__name__,
            **{
                key: repr(value)
                for key, value in vars(module).items()
                if key[0] != "_"
                and (
                    isinstance(value, int | float) or (of_torch and isinstance(value, str | tuple))
                )
            },
        }
    return json.dumps(found)


def _norm(x: Tensor) -> float:
    """Return the L2 norm, for a single element its value; NaN or inf only if an element is."""
    if x.element_size() == 1:  # float8: torch has no norm of it
        x = x.float()
    return float(x if x.numel() == 1 else torch.linalg.vector_norm(x, dtype=torch.float64))


def _narrow(x: Tensor) -> str | None:
    """Return the 16-bit dtype that represents all values of a wider dtype exactly, or None; None
    for zeros.
    """
    if x.element_size() < 4 or not bool(x.any()):
        return None
    return next(
        (
            _name_of(dtype)
            for dtype in (torch.bfloat16, torch.float16)  # some values fit both
            if bool((x.to(dtype).to(x.dtype) == x).all())
        ),
        None,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
