"""Observation of one run of a program: its optimizer steps, communication, and end."""

from __future__ import annotations

import builtins
import hashlib
import inspect
import io
import os
import pickle
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from bagua_ref.base.ranks import format_ranks
from bagua_ref.errors import RankCall, SimulationError
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.simulation.group import Call
from bagua_ref.simulation.programs import Program, RankOutput, uses_hashes
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.schedules import Fault, Schedule
from bagua_ref.simulation.tasks import call_site, is_called_directly, is_distributed, place
from bagua_ref.simulation.timing import Timeline, after_steps
from bagua_ref.simulation.torch_distributed.cpu import replace_cuda
from bagua_ref.simulation.torch_distributed.in_flight import (
    FilledMemory,
    WatchedOperations,
    replace_readers,
)
from bagua_ref.simulation.torch_distributed.processes import Replacements
from bagua_ref.simulation.torch_distributed.torch_hooks import current_backward
from bagua_ref.simulation.torch_distributed.work import promptly

_NEEDS_CUDA = re.compile(
    r"_cuda_\w+|not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|CUDA (driver|is not available)"
    r"|torch_cpu.*cuda|required?s? CUDA|without CUDA|accelerator device when none|_for_cpu\b"
)
"""Pattern of torch's errors about a missing GPU."""

_SOURCE = re.compile(r"(?:broadcast|scatter)\(src=(\d+)")


@dataclass(frozen=True)
class Order:
    """An order for one run: its schedule and settings.

    Attributes:
        schedule: schedule of the run.
        prompt: the lines whose asynchronous operations take effect at once, see `promptly`.
        shows: whether to show the ranks' output.
        fault: fault of a rank, or None.
        hash_seed: PYTHONHASHSEED of a new interpreter; None: that of this process.
        measures: whether compute takes measured CPU time, with links.
        again: whether the run is a repetition, in a process of its own: memory that is not
            initialised differs there.
        fills: whether `torch.empty` and similar functions return other values.
    """

    schedule: Schedule = field(default_factory=Schedule)
    prompt: Container[tuple[str, int]] = ()
    shows: bool = False
    fault: Fault | None = None
    hash_seed: int | None = None
    measures: bool = False
    again: bool = False
    fills: bool = False


@dataclass(frozen=True)
class Step:
    """Digests of a rank's parameters after an optimizer step.

    Attributes:
        file: file of the user's code that called the step.
        line: line in that file.
        parameters: digest of each parameter, by name.
        gradients: digest of each non-zero gradient, by the parameter's name.
        replicas: the ranks that must have equal parameters, by the parameter's name.
        reduced: the ranks that must have equal parameters if all their gradients are equal.
        joined: whether the ranks may make different numbers of steps.
        is_finite: whether all parameters are finite.
        before: the digest of each parameter before a rank's first step; empty for later ones.
        elements: the number of elements of each parameter.
        largest: the maximal number of elements in one communication of the rank since its last
            step.
    """

    file: str
    line: int
    parameters: dict[str, str]
    gradients: dict[str, str]
    replicas: dict[str, tuple[int, ...]]
    reduced: tuple[int, ...]
    joined: bool
    is_finite: bool
    before: dict[str, str]
    elements: dict[str, int]
    largest: int


@dataclass
class Observation:
    """The record of a run.

    Attributes:
        order: the order of the run, with the choices of its schedule.
        steps: optimizer steps of each rank.
        log: communications of each rank.
        sent: for each rank, a digest of each communication and its data.
        stdout: output of each rank.
        returned: digest of each rank's return value.
        uses_hashes: whether the program, or a library that it imports, uses sets or ``hash()``.
        values: result of each rank in the first run of a function, pickled.
        hints: observations that are odd, but not errors.
        largest: the maximal number of elements in one communication of each rank after its last
            step.
        kind: kind of the error that ended the run; empty: all ranks returned.
        message: message of that error.
        calls: the calls of the ranks concerned.
        timeline: the times of the run, if it has links.
        exceptions: in a run with a fault, the exception that ended each rank; empty: it returned.
    """

    order: Order
    steps: list[list[Step]] = field(default_factory=list)
    log: list[list[RankCall]] = field(default_factory=list)
    sent: list[list[str]] = field(default_factory=list)
    stdout: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    uses_hashes: bool = True
    values: dict[int, bytes] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)
    kind: str = ""
    message: str = ""
    calls: tuple[RankCall, ...] = ()
    timeline: Timeline | None = None


def observe(program: Program, nodes: Sequence[int], order: Order) -> Observation:
    """Run a program once on simulated ranks, and return the record; ``order`` says whether to show
    the output.
    """
    n = sum(nodes)
    output, errors = (
        RankOutput(stream if order.shows else None, n) for stream in (sys.stdout, sys.stderr)
    )
    seen = Observation(
        order,
        steps=[[] for _ in range(n)],
        log=[[] for _ in range(n)],
        sent=[[] for _ in range(n)],
        stdout=output.written,
        exceptions=[""] * n,
    )
    watch = _RunWatch(seen, n, program)
    compute = "measured" if order.measures else program.compute
    world = SimulatedWorld(
        n,
        nodes,
        schedule=order.schedule,
        torch_distributed=True,
        link=program.link,
        compute=compute,
    )
    world.observe = watch.communicates
    try:
        with (
            watch.installed(),
            promptly(order.prompt),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            seen.returned = world.run(watch.run, program)
        seen.hints = watch.hints()
        seen.largest = [rank.largest for rank in watch.ranks]
    except SimulationError as error:
        seen.kind, seen.message, seen.calls = error.kind or "error", str(error), error.calls
    except (Exception, SystemExit) as error:  # the program's
        seen.kind, seen.message = "exception", _text(error)
        if not torch.cuda.is_available() and _NEEDS_CUDA.search(seen.message):
            seen.kind = "unsupported"
            seen.message = (
                f"the program needs a GPU ({seen.message.splitlines()[0]}); simulated ranks compute"
                " on the CPU: "
                + (
                    "--cpu does not replace that"
                    if program.cpu
                    else "run it with --cpu, which maps its devices to the CPU"
                )
            )
        seen.calls = (world.failed_call,) if world.failed_call else ()
    output.finish()
    errors.finish()
    seen.timeline = None if seen.kind else world.timeline
    return seen


_OBJECT_COLLECTIVES = {
    inspect.unwrap(value).__code__
    for name, value in vars(dist).items()
    if "object" in name and inspect.isfunction(value)
}


def _sends_objects() -> bool:
    """Return whether an object collective is on the call stack; two pickles of one object may
    differ, as those of sets do.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _OBJECT_COLLECTIVES:
        frame = frame.f_back
    return frame is not None


class _RunWatch:
    """The hooks of one run, which write its record."""

    def __init__(self, seen: Observation, n: int, program: Program) -> None:
        order = seen.order
        self._seen, self._fault, self._program = seen, order.fault, program
        self._watches, self._known = order.shows, set(sys.modules)
        self._hints: dict[str, None] = {}
        self._calls: list[Call] = []
        self._writes: dict[str, list[tuple[int, Counter[str], str]]] = defaultdict(list)
        """For each file: the ranks that opened it, the counts of their previous calls by group, and
        their lines.
        """
        self._parents = weakref.WeakKeyDictionary[torch.nn.Module, Any]()
        """The parent of each module, as a weak reference, and the module's name in it."""
        self.ranks = [_RankWatch(rank) for rank in range(n)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks for the duration of the context."""
        with Replacements(lambda: True) as hooks:
            hooks.callback(register_module_forward_pre_hook(self._before_forward).remove)
            hooks.callback(register_module_module_registration_hook(self._name).remove)
            hooks.enter_context(
                after_steps(lambda optimizer: self._here().before_step(optimizer), self._after_step)
            )
            for owner, name in ((builtins, "open"), (io, "open")):
                hooks.function(owner, name, self._open)
            hooks.function(torch, "save", self._save)
            hooks.function(distributed_c10d, "_warn_not_in_group", self._outside)
            if self._watches:
                replace_readers(hooks)
            if self._program.loads_in_process:
                hooks.function(DataLoader, "__iter__", self._load)
            if self._program.cpu:
                replace_cuda(hooks)
            yield

    def run(self, program: Program) -> str:
        """Run the program on the calling rank; return a digest of its result."""
        if self._fault is None:
            filled = FilledMemory() if self._seen.order.fills else nullcontext()
            with WatchedOperations() if self._watches else filled:
                result = program.run()
            self._seen.uses_hashes = self._uses_hashes()
            if self._watches and program.function is not None:
                self._seen.values[rank_world().identity.rank] = pickle.dumps(result)
            return _digest(result)
        rank, result = rank_world().identity.rank, None
        try:
            result = program.run()
        except (Exception, SystemExit) as error:
            # ends only this rank, as others go on with the fault
            self._seen.exceptions[rank] = _text(error)
        self._fault.leave(
            rank,
            {call.group for call in self._calls},
            self._seen.exceptions[rank] or f"rank {rank} ended",
        )
        return _digest(result)

    def _uses_hashes(self) -> bool:
        """Return whether the program uses sets or ``hash()``, or imports an installed package other
        than torch's that may do so.
        """
        own = rank_world().process_state.modules.keys()
        for name in own | sys.modules.keys() - self._known:
            file = getattr(sys.modules.get(name), "__file__", None) or ""
            package = name.partition(".")[0]
            if name in own and file.endswith(".py") and uses_hashes(file):
                return True
            if "-packages" in file and package not in ("torch", "numpy", "sympy", "bagua_ref"):
                return True
        return False

    def communicates(self, call: Call) -> None:
        """Record a communication of the calling rank before it takes place."""
        call.locate()
        # A library's own handles are its own affair; torch's Join gives one to C++.
        call.awaited = call.awaited or not is_called_directly(sys._getframe(1))
        world, here = rank_world(), self._here()
        rank = here.rank
        sends = [
            send
            for send in (call.send if isinstance(call.send, list) else [call.send])
            if isinstance(send, Tensor)
        ]
        source = _SOURCE.match(call.operation)
        if source and int(source[1]) != call.rank:  # where it receives, there may be anything
            sends = []
        call.module = self._module_of_fsdp()
        if any(s.is_floating_point() and s.isnan().any() for s in sends):
            self._hints.setdefault(f"NaN is sent in {_place(call)}")
        self._calls.append(call)
        self._seen.log[rank].append(call.facts())
        self._seen.sent[rank].append(
            _digest((call.operation, call.file, call.line, [] if _sends_objects() else sends))
        )
        elements = sum(send.numel() for send in sends)
        here.largest = max(here.largest, elements)
        if call.operation.startswith("all_reduce("):
            here.reductions.append((elements, tuple(call.group.ranks)))
        backward = current_backward()
        if backward is not None:
            here.backwards.setdefault(backward, (call.file, call.line))
        world.check_invariants()
        if self._fault is not None:
            self._fault.strike(
                call, rank, len(self._seen.log[rank]) - 1, {call.group for call in self._calls}
            )

    def hints(self) -> list[str]:
        """Return observations about the run that are odd, but not errors."""
        found = dict(self._hints)
        for group in {call.group: None for call in self._calls}:
            for what, messages in (
                ("nothing received", group.sends),
                ("nothing was sent for", group.recvs),
            ):
                found |= {
                    f"{what} {_place(call)}": None for calls in messages.values() for call in calls
                }
        found |= {
            f"nothing waited for {_place(call)}": None for call in self._calls if not call.awaited
        }
        for rank in self.ranks:
            fewest = min(map(len, rank.backwards_by_step), default=0)
            if len(rank.backwards_by_step) > 1 and fewest > 1:
                where = place(*next(iter(rank.backwards_by_step[0].values())))
                text = (
                    f"{fewest} backward passes before each optimizer step communicate at {where}:"
                    " if they accumulate gradients, "
                )
                found[f"{text}run all but the last of them in no_sync()"] = None
        return list(found)

    def _name(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if module is not None:
            self._parents[module] = weakref.ref(parent), name

    def _module_of_fsdp(self) -> str:
        """Return the path of the module whose parameters FSDP2 is gathering or reducing, if any."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
            frame = frame.f_back
        group = None if frame is None else frame.f_locals.get("self")
        module: Any = next(iter(getattr(group, "modules", ())), None)
        path: list[str] = []
        while module in self._parents:
            parent, name = self._parents[module]
            path.insert(0, name)
            module = parent()
        return ".".join(path)

    def _load(self, original: Callable[[Any], Any], loader: Any) -> Any:
        if loader.num_workers:
            self._hints[
                "a data loader runs without its worker processes, which may draw and share other"
                " random numbers"
            ] = None
        loader.num_workers = loader.timeout = 0
        return original(loader)

    def _here(self) -> _RankWatch:
        return self.ranks[rank_world().identity.rank]

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(file, str | bytes | os.PathLike) and set("wax+") & set(mode):
            self._write(file)
        return original(file, mode, *args, **options)

    def _outside(self, original: Any, operation: Any) -> None:
        name = operation if isinstance(operation, str) else operation.__name__
        rank, where = rank_world().identity.rank, place(*call_site(sys._getframe(1)))
        self._hints[
            f"rank {rank} calls {name} on a group that it is not in, which does nothing: {where}"
        ] = None
        original(operation)

    def _save(self, original: Any, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        if isinstance(f, str | os.PathLike):
            self._write(f)
        original(obj, f, *args, **options)

    def _write(self, path: Any) -> None:
        """Add a hint if two ranks write the same file without a collective in between."""
        path, rank = os.fsdecode(os.path.realpath(path)), rank_world().identity.rank
        if path.startswith(("/dev/", "/proc/")):
            return
        log, where = self._seen.log, place(*call_site(sys._getframe(1)))
        counts = Counter(call.group for call in log[rank])
        for other, before, line in self._writes[path]:
            if other != rank and counts == before:
                who = format_ranks(sorted((other, rank)))
                self._hints[
                    f"{who} write {os.path.relpath(path)!r} with no collective between:"
                    f" {line}, {where}"
                ] = None
        self._writes[path].append((rank, counts, where))

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # which would compile this, too
            self._here().before_forward(module)

    def _after_step(self, optimizer: Any) -> None:
        here = self._here()
        self._seen.steps[here.rank].append(here.after_step(optimizer))
        rank_world().check_invariants()


def _own_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and DDP."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


class _RankWatch:
    """State of one rank's modules and optimizers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reductions: list[tuple[int, tuple[int, ...]]] = []
        """The elements and ranks of each all-reduce since the last step."""
        self.backwards: dict[int, tuple[str, int]] = {}
        """The line of each backward pass since the last step that communicated."""
        self.largest = 0
        """The maximal number of elements in one communication since the last step."""
        self.backwards_by_step: list[dict[int, tuple[str, int]]] = []
        self._before: dict[str, str] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._synchronizes: dict[DistributedDataParallel, bool] = {}

    def before_forward(self, module: torch.nn.Module) -> None:
        """Register the parameter names of a module, and whether this pass of DDP synchronizes
        gradients.
        """
        inner = getattr(module, "_orig_mod", module)  # of one that is compiled
        if isinstance(inner, DistributedDataParallel) and torch.is_grad_enabled():
            self._synchronizes[inner] = inner.require_backward_grad_sync
        if not self._modules:  # what was communicated before belongs to no step
            self.largest = 0
        if id(module) not in self._modules:
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), (_own_name(name), parameter))
            self._modules.update({id(inner): inner for inner in module.modules()})

    def before_step(self, optimizer: Any) -> None:
        """Record digests of the initial parameters, before the first step."""
        if not self.backwards_by_step:
            self._before = {name: _digest(p) for name, p in self._named(optimizer).items()}

    def _named(self, optimizer: Any) -> dict[str, Tensor]:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named: dict[str, Tensor] = {}
        for number, p in enumerate(owned):
            name = self._names.get(id(p), (f"parameter {number}", None))[0]
            named[f"{name} of parameter {number}" if name in named else name] = p
        return named

    def after_step(self, optimizer: Any) -> Step:
        """Return the record of an optimizer step."""
        named = self._named(optimizer)
        trained = {name: p.grad for name, p in named.items() if p.grad is not None}
        replicas, reduced, joined = self._replicas()
        reduced = self._reduced([named[name].numel() for name in trained]) or reduced
        held = {
            name: _holders(p) if is_distributed(p) else replicas.get(id(p), ())
            for name, p in named.items()
        }
        step = Step(
            *call_site(sys._getframe(1)),
            {name: _digest(p) for name, p in named.items()},
            {name: _digest(grad) for name, grad in trained.items() if _local(grad).count_nonzero()},
            {name: ranks for name, ranks in held.items() if ranks},
            reduced,
            joined,
            all(bool(_local(p).isfinite().all()) for p in named.values()),
            self._before,
            {name: _local(p).numel() for name, p in named.items()},
            self.largest,
        )
        self.backwards_by_step.append(self.backwards)
        self.backwards, self.reductions, self._before, self.largest = {}, [], {}, 0
        return step

    def _replicas(self) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], bool]:
        """Return the ranks that hold each parameter of `DistributedDataParallel` modules, by the
        parameter's identity; the ranks of DDPs with a communication hook; and whether Join is in
        use.
        """
        replicas: dict[int, tuple[int, ...]] = {}
        reduced: tuple[int, ...] = ()
        joined = False
        for module, synchronizes in self._synchronizes.items():
            ranks = tuple(getattr(getattr(module.process_group, "group", None), "ranks", ()))
            joined = joined or bool(module._join_config.enable)
            if module._comm_hooks:  # such a hook may average parameters instead of gradients
                reduced = ranks if synchronizes else ()
            elif synchronizes:
                named = module.module.named_parameters()
                replicas |= {
                    id(p): ranks
                    for name, p in named
                    if name not in module.parameters_to_ignore and p.requires_grad
                }
        return replicas, reduced, joined

    def _reduced(self, sizes: list[int]) -> tuple[int, ...]:
        """Return the ranks that appear to have reduced gradients of these sizes, separately or as
        one tensor.
        """
        for ranks in {ranks for _, ranks in self.reductions}:
            elements = Counter(count for count, group in self.reductions if group == ranks)
            if sizes and (sum(sizes) in elements or not Counter(sizes) - elements):
                return ranks
        return ()


def _place(call: Call) -> str:
    return (
        f"{call.operation} of rank {call.group.ranks[call.rank]} at {place(call.file, call.line)}"
    )


def _text(error: BaseException) -> str:
    return (
        f"exit code {error.code}"
        if isinstance(error, SystemExit)
        else f"{type(error).__name__}: {error}"
    )


def _local(tensor: Any) -> Tensor:
    return (tensor.to_local() if is_distributed(tensor) else tensor).detach()  # type: ignore[no-any-return]


def _holders(parameter: Any) -> tuple[int, ...]:
    """Return the ranks that hold the same shard of a distributed parameter as the calling rank;
    empty if there are no others.
    """
    places = tuple(parameter.device_mesh.get_coordinate() or ())
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(parameter.placements, places, strict=False)
    )
    ranks = tuple(parameter.device_mesh.mesh[index].flatten().tolist())
    return ranks if len(ranks) > 1 else ()


def _digest(value: Any) -> str:
    """Return a digest of a rank's values; an object of unknown type is represented by its type."""
    digest = hashlib.blake2b(digest_size=12)
    _add(digest.update, value)
    return digest.hexdigest()


def _add(update: Callable[[Any], None], value: Any) -> None:
    update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        local = _local(value).cpu().contiguous()
        update(f"{local.dtype}{tuple(local.shape)}".encode())
        update(local.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        _add(update, [item for pair in value.items() for item in pair])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(update, item)
    elif isinstance(value, str | bytes | int | float | complex | None):
        update(repr(value).encode())
