"""Observation of one run of a program: what each rank's optimizer steps computed, what it communicated, and how the run ended."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.call_sites import call_site
from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.communicators.simulated import Call, SimulatedGroup
from bagua_ref.errors import RankCall, SimulationError
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.simulation.faults import Fault
from bagua_ref.simulation.programs import Program, RankOutput
from bagua_ref.simulation.schedules import Schedule, SeededSchedule
from bagua_ref.simulation.torch_distributed.torch_hooks import current_backward
from bagua_ref.simulation.torch_distributed.work import promptly

__all__ = ["EVERY_LINE", "Observation", "Order", "Step", "always", "observe"]


@dataclass(frozen=True)
class Order:
    """A run to make.

    Args:
        schedule: of the run.
        prompt: the lines whose asynchronous operations act at once, see `promptly`.
        shows: whether to show the ranks' output.
        fault: a rank's; None: none.
    """

    schedule: Schedule = field(default_factory=Schedule)
    prompt: Container[tuple[str, int]] = ()
    shows: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Step:
    """A rank's parameters after an optimizer step, as digests.

    Attributes:
        optimizer: the class's name.
        file: of the user's code that called the step.
        line: in that file.
        parameters: the digest of each parameter, by name.
        gradients: the digest of each gradient, by the parameter's name; those that are zero are left out.
        replicas: by name, the ranks that must have equal parameters.
        reduced: by name, the ranks that must have equal parameters if their gradients are equal.
        has_nan: whether a parameter is not finite.
    """

    optimizer: str
    file: str
    line: int
    parameters: dict[str, str]
    gradients: dict[str, str]
    replicas: dict[str, tuple[int, ...]]
    reduced: dict[str, tuple[int, ...]]
    has_nan: bool


@dataclass
class Observation:
    """What was seen of one run.

    Attributes:
        schedule: the run's, with its choices.
        steps: of each rank.
        returned: the digest of each rank's return value.
        log: of each rank, a digest of each communication and what it sent.
        log_places: of each rank, operation, file and line of each communication.
        stdout: what each rank printed.
        started: the lines that started an asynchronous operation.
        hints: what is odd, but no error.
        kind: of the error that ended the run; empty: all ranks returned.
        message: of that error.
        calls: what the ranks concerned were doing.
        ended: with a fault, each rank's exception, or None.
        virtual_time: of the run, in seconds.
    """

    schedule: Schedule
    steps: list[list[Step]]
    returned: list[str]
    log: list[list[str]]
    log_places: list[list[RankCall]]
    stdout: list[str]
    started: list[tuple[str, int]]
    hints: list[str] = field(default_factory=list)
    kind: str = ""
    message: str = ""
    calls: tuple[RankCall, ...] = ()
    ended: list[str | None] = field(default_factory=list)
    virtual_time: float = 0.0


def observe(program: Program, nodes: Sequence[int], order: Order, shown: TextIO) -> Observation:
    """Run a program once on simulated ranks, and return what was seen."""
    watch = _Watch(sum(nodes), order.fault)
    schedule = order.schedule
    world = SimulatedWorld(sum(nodes), nodes, schedule=schedule, torch_distributed=True)
    world.observe = watch.communicates
    output = RankOutput(shown if order.shows else None, sum(nodes))
    errors = RankOutput(sys.stderr if order.shows else None, sum(nodes))

    def main() -> str:
        if order.fault is None:
            return _digest(program.run())
        return watch.survive(program.run)

    seen = Observation(schedule, watch.steps, [], watch.log, watch.log_places, [], [])
    try:
        with watch.installed(), promptly(order.prompt), redirect_stdout(output), redirect_stderr(errors):
            seen.returned = world.run(main)
    except SimulationError as error:
        seen.kind, seen.message, seen.calls = error.kind or "error", str(error), error.calls
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        seen.kind = "exit" if isinstance(error, SystemExit) else "exception"
        seen.message = "".join(traceback.format_exception_only(error)).strip()
        seen.calls = (world.failed_call,) if world.failed_call else ()
    finally:
        output.finish()
        errors.finish()
    seen.schedule = schedule.fixed() if isinstance(schedule, SeededSchedule) else schedule
    seen.stdout, seen.started, seen.ended, seen.virtual_time = output.written, list(watch.started), watch.ended, world.virtual_time
    seen.hints = watch.hints() if not seen.kind else []
    return seen


def always(function: Callable[[], Any]) -> None:
    """Check ``function()`` after every optimizer step and before every communication of the calling rank, from now on.

    If it returns False or raises an exception, ``bagua-ref sim`` reports that. It must not communicate. Elsewhere than in
    ``bagua-ref sim`` and the fixture ``sim_world`` this does nothing.

    >>> always(lambda: 1 + 1 == 2)
    """
    if _watch is not None:
        _watch.invariants[current_world().identity.rank].append(function)


_watch: _Watch | None = None

EVERY_LINE: Container[tuple[str, int]] = type("EveryLine", (), {"__contains__": lambda self, line: True})()


class _Watch:
    """The hooks of one run."""

    def __init__(self, n: int, fault: Fault | None) -> None:
        self.steps: list[list[Step]] = [[] for _ in range(n)]
        self.log: list[list[str]] = [[] for _ in range(n)]
        self.log_places: list[list[RankCall]] = [[] for _ in range(n)]
        self.invariants: list[list[Callable[[], Any]]] = [[] for _ in range(n)]
        self.started: dict[tuple[str, int], None] = {}
        self.ended: list[str | None] = [None] * n
        self._fault = fault
        self._calls: list[Call] = []
        self._names: list[dict[int, tuple[str, Tensor]]] = [{} for _ in range(n)]
        self._modules: list[dict[int, torch.nn.Module]] = [{} for _ in range(n)]
        self._wrapped: list[list[DistributedDataParallel]] = [[] for _ in range(n)]
        self._synchronizes: dict[int, bool] = {}
        self._stepping: list[list[Any]] = [[] for _ in range(n)]
        self._reductions: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(n)]
        self._backwards: list[dict[int, tuple[str, int]]] = [{} for _ in range(n)]
        self._backwards_per_step: list[list[dict[int, tuple[str, int]]]] = [[] for _ in range(n)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Set the hooks while the context lasts."""
        global _watch
        _watch = self
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            try:
                yield
            finally:
                _watch = None

    # Communication.

    def communicates(self, call: Call) -> None:
        """Note a communication of the calling rank, before it takes place."""
        rank = current_world().identity.rank
        sends = call.send if isinstance(call.send, list) else [call.send]
        self.log_places[rank].append(RankCall(rank, "", call.operation, call.group.name, call.file, call.line))
        self.log[rank].append(_digest((call.operation, call.file, call.line, sends)))
        self._calls.append(call)
        self.started[call.file, call.line] = None
        if call.operation.startswith("all_reduce"):
            elements = sum(tensor.numel() for tensor in sends if isinstance(tensor, Tensor))
            self._reductions[rank].append((elements, tuple(call.group.ranks)))
        backward = current_backward()
        if backward != -1:
            self._backwards[rank].setdefault(backward, (call.file, call.line))
        self._check_invariants(rank, call.group.scheduler)
        if self._fault is not None:
            self._fault.strike(call, rank, len(self.log[rank]) - 1)

    def survive(self, run: Callable[[], Any]) -> str:
        """Run a rank's program in a world with a fault: an exception ends this rank only, as if its process had ended."""
        rank = current_world().identity.rank
        try:
            return _digest(run())
        except Exception as error:
            self.ended[rank] = "".join(traceback.format_exception_only(error)).strip()
            assert self._fault is not None
            self._fault.leave(rank, {call.group for call in self._calls}, self.ended[rank] or "")
            return ""

    def _check_invariants(self, rank: int, scheduler: Scheduler) -> None:
        for function in self.invariants[rank]:
            try:
                holds, why = function(), ""
            except Exception as error:
                holds, why = False, f" raises {type(error).__name__}: {error}"
            if holds is False or why:
                (file, line), code = call_site(sys._getframe(1)), getattr(function, "__code__", None)
                where = f" (line {code.co_firstlineno} of {code.co_filename})" if code else ""
                text = f"the invariant {getattr(function, '__name__', function)!r}{where} {why or 'is False'} on rank {rank}"
                calls = (RankCall(rank, "", "sim.always", "", file, line),)
                scheduler.end(SimulationError(text, kind="invariant", calls=calls))

    # Steps.

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        rank = current_world().identity.rank
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            self._synchronizes[id(module)] = module.require_backward_grad_sync
        if id(module) in self._modules[rank]:
            return
        for name, parameter in module.named_parameters():
            self._names[rank].setdefault(id(parameter), (name.removeprefix("module."), parameter))
        for inner in module.modules():
            self._modules[rank].setdefault(id(inner), inner)
            if isinstance(inner, DistributedDataParallel):
                self._wrapped[rank].append(inner)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping[current_world().identity.rank].append(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        rank = current_world().identity.rank
        stack = self._stepping[rank]
        while stack and stack.pop() is not optimizer:
            pass
        if stack:
            return  # the step of a wrapped optimizer, whose wrapper goes on
        self.steps[rank].append(self._step(rank, optimizer))
        self._reductions[rank].clear()
        self._backwards_per_step[rank].append(dict(self._backwards[rank]))
        self._backwards[rank].clear()
        if self._calls:
            self._check_invariants(rank, self._calls[0].group.scheduler)

    def _step(self, rank: int, optimizer: Any) -> Step:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): f"parameter {i}" for i, parameter in enumerate(owned)}
        names |= {key: name for key, (name, _) in self._names[rank].items() if key in names}
        reduced = self._ranks_of_reduction(rank, [p.numel() for p in owned if p.grad is not None])
        wrapped = {}
        for module in self._wrapped[rank]:
            ranks = tuple(getattr(getattr(module.process_group, "group", None), "ranks", ()))
            left_out = {name for name in module.parameters_to_ignore}
            for name, parameter in module.module.named_parameters():
                if name not in left_out and self._synchronizes.get(id(module), False):
                    wrapped[id(parameter)] = ranks
            if module._comm_hooks:  # a hook may leave gradients, and so parameters, different
                reduced = reduced or ranks
                wrapped = {key: value for key, value in wrapped.items() if value != ranks}
        parameters, gradients, replicas, same = {}, {}, {}, {}
        finite = True
        for parameter in owned:
            name = names[id(parameter)]
            local = _local(parameter)
            finite = finite and bool(torch.isfinite(local).all())
            parameters[name] = _digest(local)
            if parameter.grad is not None and bool(_local(parameter.grad).count_nonzero()):
                gradients[name] = _digest(_local(parameter.grad))
            ranks = _replicas_of(parameter) if isinstance(parameter, DTensor) else wrapped.get(id(parameter), ())
            if ranks:
                replicas[name] = ranks
            elif reduced:
                same[name] = reduced
        return Step(
            type(optimizer).__name__, *call_site(sys._getframe(2)), parameters, gradients, replicas, same, not finite
        )

    def _ranks_of_reduction(self, rank: int, sizes: list[int]) -> tuple[int, ...]:
        """Return the ranks among which all gradients seem to have been reduced since the last step: one by one, or as one tensor."""
        for ranks in {ranks for _, ranks in self._reductions[rank]}:
            numbers = Counter(elements for elements, group in self._reductions[rank] if group == ranks)
            if sizes and (sum(sizes) in numbers or not Counter(sizes) - numbers):
                return ranks
        return ()

    # Hints.

    def hints(self) -> list[str]:
        """Return what is odd about the run, but no error."""
        found: dict[str, None] = {}
        for group in {call.group: None for call in self._calls}:
            for sender in (call for calls in group.sends.values() for call in calls):
                found[f"the message of {_place(sender)} was never received"] = None
            for receiver in (call for calls in group.recvs.values() for call in calls):
                found[f"the message for {_place(receiver)} was never sent"] = None
        for call in self._calls:
            if not call.awaited:
                found[f"nothing waits for {_place(call)}"] = None
        for rank, steps in enumerate(self._backwards_per_step):
            numbers = [len(step) for step in steps]
            if len(numbers) > 1 and min(numbers) > 1:
                file, line = next(iter(steps[0].values()))
                found[
                    f"{min(numbers)} backward passes of each optimizer step communicate on rank {rank} (line {line} of {file}): if they "
                    "accumulate gradients, run all but the last of them in no_sync()"
                ] = None
                break
        return list(found)


def _place(call: Call) -> str:
    return f"{call.operation} on rank {call.group.ranks[call.rank]} (line {call.line} of {call.file})"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def _replicas_of(parameter: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a distributed parameter as this one."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else place for placement, place in zip(parameter.placements, coordinate, strict=True)
    )
    ranks = tuple(mesh.mesh[index].flatten().tolist())
    return ranks if len(ranks) > 1 else ()


def _digest(value: Any) -> str:
    """Return a digest of a value that a rank computed; objects of unknown types count by their type."""
    digest = hashlib.blake2b(digest_size=12)

    def add(item: Any) -> None:
        digest.update(type(item).__name__.encode())
        if isinstance(item, Tensor):
            item = _local(item).detach().cpu().contiguous()
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(memoryview(item.reshape(-1).view(torch.uint8).numpy()))
        elif isinstance(item, dict):
            for key, inner in item.items():
                add(key)
                add(inner)
        elif isinstance(item, (list, tuple)):
            for inner in item:
                add(inner)
        elif isinstance(item, (str, bytes, int, float, complex, bool, type(None))):
            digest.update(repr(item).encode())

    add(value)
    return digest.hexdigest()
