"""`record`: digests, or values, of what each step of any training takes in, computes and
changes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from bagua_ref.base.utils import uncompiled
from bagua_ref.checkpoint.training_state import random_states
from bagua_ref.conformance.formats import CODES, digest, digest_of_text, name_of
from bagua_ref.conformance.trace.files import check_int
from bagua_ref.conformance.trace.rank_recorder import RankRecorder

__all__ = ["WINDOW", "Recording", "record"]

WINDOW = "BAGUA_REF_RECORD"
"""The environment variable that lets a training record values: "12:14" of steps 12 and 13, into the
folder with "-12-14" added.
"""

_SAMPLE = 1024  # elements that tell whether values have been rounded to 16 bits
_NORMS = ("input", "module", "output", "loss", "local", "grad", "weight")
"""Kinds of which the norm is kept, which shows distances and NaNs."""


class Recording(RankRecorder):
    """A context in which a training is recorded, for ``bagua-ref trace diff`` to compare it with
    another.

    A step ends when the last of the optimizers has stepped. Its digests are those of random states,
    batch, the model's inputs and outputs, loss, gradients before and after communication, options
    and state of the optimizers, weights, and buffers before and after. Forwards without gradients
    are not recorded. The training computes the same bits as without it.

    Args:
        model: the module that is called: plain, in torch's DistributedDataParallel or FSDP2, or
            with an algorithm.
        optimizers: one or several, each of which steps once in a step.
        folder: this rank writes into ``folder/rank<r>``.
        loader: batches, which the context then yields: ``for batch in recording``; None: only the
            model's inputs are recorded.
        what: "digests", or "values" to keep the values of some steps too.
        window: first step with values and first one after; None: all. Only with "values".
        first_step: number of the first step, for a training that was restarted: its steps are added
            to what the folder holds; None: 0, in a folder without a record.
        rank: this rank; None: taken from bagua_ref, torch.distributed or the environment.
        world_size: number of ranks; None: likewise.

    Attributes:
        step: number of the step that is under way.
        stopped: why recording stopped early, or None.

    Raises:
        ValueError: an argument is out of range; on entering: the folder holds a record of this
            rank.
        TypeError: an argument has the wrong type.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, record(model, optimizer, folder, [torch.ones(3, 2)] * 4) as recording:
    ...     for batch in recording:
    ...         recording.loss(model(batch).square().mean()).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     recording.step
    4
    """

    _start: list[list[Any]]
    _entries: list[list[Any]]
    _about: dict[str, str]
    _kept: dict[str, Tensor]
    _counts: Counter[str]
    _begun: bool
    """Whether random states, mode and buffers of the step are recorded."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        folder: str | Path,
        loader: Any = None,
        what: str = "digests",
        *,
        window: tuple[int, int] | None = None,
        first_step: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model={model!r} must be a torch.nn.Module")
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"model: its parameter {lazy[0]!r} is not initialized yet; call the model once"
                " before"
            )
        listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if not listed or not all(
            isinstance(optimizer, torch.optim.Optimizer) for optimizer in listed
        ):
            raise TypeError(
                f"optimizers={optimizers!r} must be a torch.optim.Optimizer or a list of at"
                " least one"
            )
        if what not in ("digests", "values"):
            raise ValueError(f"what={what!r} must be 'digests' or 'values'")
        if window is not None and what != "values":
            raise ValueError(
                f"window={window!r} must be None with what='digests', which keeps no values"
            )
        if window is not None and (len(window) != 2 or not 0 <= window[0] < window[1]):
            raise ValueError(
                f"window={window!r} must be the first step with values and the first one after"
            )
        if first_step is not None:
            check_int("first_step", first_step, 0, " or None")
        folder = Path(folder)
        if asked := os.environ.get(WINDOW):
            found = re.fullmatch(r"(\d+):(\d+)", asked)
            if found is None or int(found[1]) >= int(found[2]):
                raise ValueError(
                    f"environment variable {WINDOW}={asked!r} must be two steps such as '12:14',"
                    " the first below the second"
                )
            what, window = "values", (int(found[1]), int(found[2]))
            folder = folder.with_name(f"{folder.name}-{found[1]}-{found[2]}")
        self.step = first_step or 0
        self.directory, self._loader, self._resume = folder, loader, first_step is not None
        self._values = range(0) if what == "digests" else range(*window) if window else range(2**63)
        self._identity, self._optimizers = (rank, world_size, None), listed
        self._model, self._inner = model, _unwrapped(model)
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in self._inner.named_parameters()
        }
        self._hooks = contextlib.ExitStack()
        self._told: dict[str, str] = {}
        self._clear()

    def __enter__(self) -> Recording:
        self._open_folder(
            {"what": "digests", "command": sys.orig_argv, "settings": _settings()}, self._resume
        )
        self._add_hooks()
        self._begun = True
        self._add_weights()
        start, about = self._entries, self._about
        self._clear()
        self._start, self._about = start, about
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the recording; after an exception, the step under way is written as far as it
        went.
        """
        self._hooks.close()
        if self._index is None:
            return
        if kind is not None and self._entries:
            self._write(partial=True)
        self._close_folder(kind is None)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, and record them."""
        if self._loader is None:
            raise ValueError("loader=None: pass the loader to record() to iterate over its batches")
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

    def _add_hooks(self) -> None:
        hooks: list[Any] = [
            self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self._model.register_forward_hook(
                lambda module, args, output: self._after_forward("", output)
            ),
            self._optimizers[-1].register_step_post_hook(lambda *_: self._end_step()),
        ]
        hooks += [
            optimizer.register_step_pre_hook(self._before_optimizer)
            for optimizer in self._optimizers
        ]
        for parameter, name in self._names.items():
            if parameter.requires_grad:
                hooks.append(
                    parameter.register_hook(
                        lambda gradient, name=f"local:{name}": self._add(name, gradient)
                    )
                )
        for name, module in self._inner.named_modules() if self._values else ():
            if name and not [*module.children()]:
                hooks.append(
                    module.register_forward_hook(
                        lambda module, args, output, name=name: self._after_forward(name, output)
                    )
                )
        for hook in hooks:
            self._hooks.callback(hook.remove)

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self._add_tree("input", [*args, kwargs] if kwargs else args)

    def _after_forward(self, name: str, output: Any) -> None:
        """Record the output of the model, or of an inner module in a step whose values are kept."""
        if torch.is_grad_enabled() and (not name or self.step in self._values):
            self._add_tree("module" if name else "output", output, name)
            loss = output.get("loss") if isinstance(output, Mapping) and not name else None
            if isinstance(loss, Tensor):
                self.loss(loss)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._add_gradients(optimizer)

        def recorded() -> Any:  # gradients are there only when it has run
            loss = closure()
            self._add_gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": recorded}

    def _add_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            options = " ".join(
                f"{name}={_plain(value)}"
                for name, value in sorted(group.items())
                if name != "params"
            )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._add(f"grad:{self._name(parameter)}", parameter.grad)
                self._say(
                    f"option:{self._name(parameter)}", f"{type(optimizer).__name__} {options}"
                )

    def _end_step(self) -> None:
        self._add_weights()
        self._add_buffers("buffer_after")
        self._write()
        self.step += 1

    def _begin(self) -> None:
        """Record random states, modes and buffers before the first forward of a step."""
        self._begun = True
        for name, state in random_states().items():
            parts = state if isinstance(state, Sequence) else [state]
            text = b" ".join(
                f"{digest(x):x}".encode() if isinstance(x, Tensor) else repr(x).encode()
                for x in parts
            )
            self._note(f"rng:{name}", digest_of_text(text))
        idle = [
            name or "the model"
            for name, module in self._inner.named_modules()
            if not module.training
        ]
        self._say("mode:", f"in eval mode: {', '.join(idle) or 'none'}")
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
        """Record a tensor."""
        x = x.detach()
        about = f"{name_of(x.dtype)} {list(x.shape)} {x.device}"
        if hasattr(x, "to_local"):
            x = x.to_local()
            about += f" shard {list(x.shape)}"
        if x.layout is not torch.strided:
            x = x.to_dense()
        kind, norm = name.partition(":")[0], None
        if x.is_floating_point() and x.numel():
            if kind in _NORMS:
                norm = _norm(x)
            if kind in ("local", "grad") and (narrow := _narrow(x.reshape(-1)[:_SAMPLE])):
                about += f" values of {narrow}"
        name = self._note(name, digest(x), norm, about)
        if self.step in self._values and x.dtype in CODES:
            self._kept[name] = x.to("cpu", copy=True)

    def _say(self, name: str, text: str) -> None:
        self._note(name, digest_of_text(text.encode()), None, text)

    def _note(self, name: str, number: int, norm: float | None = None, about: str = "") -> str:
        if not self._begun and not name.startswith("batch:"):
            self._begin()
        self._counts[name] += 1
        if (count := self._counts[name]) > 1:
            name = f"{name}#{count}"
        shown = norm if norm is None or math.isfinite(norm) else str(norm)
        self._entries.append([name, f"{number:016x}", shown])
        if self._told.get(name, "") != about:
            self._told[name] = self._about[name] = about
        return name

    def _write(self, partial: bool = False) -> None:
        line: dict[str, Any] = {"step": self.step, "entries": self._entries, "about": self._about}
        if self._start:
            line["start"] = self._start
        if partial:
            line["partial"] = True
        if self._kept:
            line["file"] = f"{self.step:08d}.safetensors"
        self._append(line, self._kept)
        self._clear()

    def _clear(self) -> None:
        """Clear the entries of the step that was written."""
        self._start, self._entries, self._about, self._kept = [], [], {}, {}
        self._counts = Counter()
        self._begun = False


record = Recording
"""The name by which trainings are recorded: ``with bagua_ref.record(model, optimizer,
folder):``.
"""


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside compiled modules and wrappers, whose only child is ``module``."""
    model = uncompiled(model)
    while [name for name, _ in model.named_children()] == ["module"]:
        model = uncompiled(model.get_submodule("module"))
    return model


def _settings() -> dict[str, Any]:
    """Return settings of this process that change the order of adding or the precision."""
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch.backends.fp32_precision, which newer versions have
        matmul = str(getattr(torch.backends, "fp32_precision", None))
    return {
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": matmul,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _norm(x: Tensor) -> float:
    """Return the Euclidean norm, of one element its value; NaN or inf only if a value is."""
    if x.numel() == 1:
        return float(x)
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float32 if x.element_size() < 4 else None))
    if not math.isfinite(norm) and bool(x.isfinite().all()):
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm


def _narrow(x: Tensor) -> str | None:
    """Return the 16-bit format that holds all values, of which some are not zero, of a wider dtype;
    or None.
    """
    if x.element_size() < 4 or not bool(x.any()):
        return None
    return next(
        (
            name_of(d)
            for d in (torch.float16, torch.bfloat16)
            if bool((x.to(d).to(x.dtype) == x).all())
        ),
        None,
    )


def _plain(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
