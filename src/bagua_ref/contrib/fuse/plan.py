"""Plan of a fused step: runs of adjacent parameters, each stepped as one flat parameter, and a
validity check (S6).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.memory import overlapping
from bagua_ref.base.utils import flatten, unflatten
from bagua_ref.buckets.storage import held_by_bucket

SMALL = {"cpu": 2**14, "cuda": 2**20}
"""Tensors up to this size are cheaper to copy into the flat buffer than to launch separately."""

LONGEST = {"cpu": 2**18, "cuda": 2**24}
"""Maximum number of elements of a run; longer runs exceed the cache, which makes Adam take 2.5
times as long.
"""

data_ptr, is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
get_grad = attrgetter("grad")

EXACT, SHORT = (torch.float32, torch.float64), (torch.float16, torch.bfloat16)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (int, float, bool, str, type(None))
"""Types of immutable values, which parameters can share."""


def are_same(found: Collection[Any], expected: Collection[Any]) -> bool:
    """Return whether two collections contain the same objects in the same order."""
    return len(found) == len(expected) and all(map(is_, found, expected))


def has_overlap(parameters: Iterable[Tensor]) -> bool:
    """Return whether plain parameters share memory, so that the order of updates matters."""
    return (
        overlapping([p for p in parameters if type(p) in PLAIN_TYPES and p.layout is torch.strided])
        is not None
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` consists of exactly its elements, in row-major
    order.
    """
    kind = (
        type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()
    )
    return kind and tensor.is_contiguous() and not tensor.is_neg()


def owns_memory(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether ``tensor``, a weight or gradient of ``parameter``, can be moved because
    nothing else uses its memory.
    """
    return (
        tensor.untyped_storage().nbytes() == tensor.nbytes
        and held_by_bucket(parameter) is not tensor
        and not (tensor.device.type == "cpu" and tensor.is_shared())
    )


def fusable(group: dict[str, Any], allow_inexact: bool) -> dict[str, tuple[torch.dtype, ...]]:
    """Return the parameter dtypes that can be fused in a group, by device type."""
    betas = group.get("betas")
    # Then a running average forgets its old value: lerp_ has weight 1, and on a CPU, the sign of a
    # resulting zero depends on the element's place in memory.
    forgets = (
        any(bool(beta == 0) for beta in betas)
        if isinstance(betas, (tuple, list))
        else group.get("centered") and group.get("alpha") == 0
    )
    # timm's optimizers with these two take means of whole parameters
    means = group.get("caution") or group.get("clipping_threshold") is not None
    if means or group.get("differentiable") or (group.get("fused") and not allow_inexact):
        return {}
    on_cpu = EXACT + SHORT if allow_inexact else () if forgets else EXACT
    return {"cpu": on_cpu, "cuda": EXACT + SHORT}


def kind_of(
    parameter: Tensor, group: dict[str, Any], allow_inexact: bool
) -> tuple[torch.dtype, torch.device] | None:
    """Return dtype and device, which are equal in a run; None if ``parameter`` must be stepped
    alone (S6).
    """
    dtype, device = parameter.dtype, parameter.device
    # Without dimensions, an operation with another number uses the wider dtype, one of a vector and
    # a number does not; and state does not show whether an entry is per element.
    may_join = (
        dtype in fusable(group, allow_inexact).get(device.type, ())
        and is_plain(parameter)
        and parameter.ndim
        and 0 < parameter.numel() <= SMALL[device.type]
    )
    return (dtype, device) if may_join else None


def flat_view(tensors: Sequence[Tensor], flats: Sequence[Tensor] = ()) -> Tensor | None:
    """Return a flat view of ``tensors`` (row-major, not empty) if they are adjacent in memory, else
    None.

    They must be in one storage or in one of ``flats``, since tensors that are adjacent by chance
    can be separated at any time.
    """
    start, item = tensors[0].data_ptr(), tensors[0].element_size()
    *places, end = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=start)
    for whole in (tensors[0], *flats) if list(map(data_ptr, tensors)) == places else ():
        storage = whole.untyped_storage()
        offset = start - storage.data_ptr()
        if 0 <= offset <= storage.nbytes() - (end - start) and whole.dtype is tensors[0].dtype:
            return whole.detach().as_strided(((end - start) // item,), (1,), offset // item)
    return None


ELEMENTS, ONE, NUMBER = "a number per element", "a tensor of one number", "a number"


def _kind(value: Any, parameter: Tensor) -> str | None:
    """Return the kind of an optimizer state value of ``parameter``; None if it cannot be split."""
    if not isinstance(value, Tensor):
        return NUMBER if type(value) in NUMBERS else None
    return ELEMENTS if value.shape == parameter.shape else ONE if value.numel() == 1 else None


def _is_state_held(parameter: Tensor) -> bool:
    """Return whether a live Bagua bucket holds an optimizer state of ``parameter``."""
    held = held_by_bucket(parameter)
    return not (held is None or held is parameter or held is parameter.grad)


def _values(states: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, states)))


def _state_signature(parameter: Tensor, state: Any) -> list[Any] | None:
    """Return the properties of ``state`` that must be equal within a run; None if it cannot be
    joined with others.
    """
    if _is_state_held(parameter) or not (state is None or type(state) is dict):
        return None
    entries: list[Any] = [state is None]
    for key, value in (state or {}).items():
        kind = _kind(value, parameter)
        if kind is None or (kind != NUMBER and not is_plain(value)):
            return None
        shared = (type(value), value) if kind == NUMBER else (value.dtype, value.device)
        entries.append((key, kind, *shared, *((value.shape, value.item()) if kind == ONE else ())))
    return entries


class Run:
    """A run of adjacent parameters, and the flat parameter on the same memory that is stepped in
    their place.

    ``states`` are the parameters' entries in the optimizer's state, if any; the tensors in them are
    made adjacent.
    """

    def __init__(
        self, parameters: list[Tensor], flats: Sequence[Tensor], store: Mapping[Any, Any]
    ) -> None:
        flat = flat_view(parameters, flats)
        assert flat is not None, "parameters are not adjacent"
        self.flat = torch.nn.Parameter(flat)
        self.parameters, self.states = parameters, [store[p] for p in parameters if p in store]
        self.state: dict[Any, Any] = {}  # that of the flat parameter
        # for tensors of one number, such as ``step``: those of all parameters
        self._vectors: dict[Any, Tensor] = {}
        for key, value in self.states[0].items() if self.states else ():
            kind, parts = _kind(value, parameters[0]), [state[key] for state in self.states]
            joined = flatten(parts) if kind == ELEMENTS else value.clone() if kind == ONE else value
            self._set_state(key, joined, parts)
        self._remember_states()
        # the addresses of gradients that lie as the weights do
        self._places = list(map(data_ptr, parameters))
        self._one_dimensional = all(p.ndim == 1 for p in parameters)
        self._first: Tensor = self.flat  # the first gradient of the last step; there was none yet

    def _set_state(self, key: Any, value: Any, known: Sequence[Any] = ()) -> None:
        """Set the flat parameter's state to ``value`` and the parameters' states to parts of it, in
        the tensors ``known``, if given.
        """
        kind = _kind(value, self.flat)
        parts: Sequence[Any] = [value] * len(self.parameters)
        self._vectors.pop(key, None)
        if kind == ONE:
            self._vectors[key] = torch.stack(list(parts))
            parts = self._vectors[key].unbind()
        elif kind == ELEMENTS:
            parts = unflatten(value, self.parameters)
        elif kind is None:
            raise RuntimeError(
                f"state {key!r} of {len(self.parameters)} parameters is a {type(value).__name__},"
                " which cannot be split: this optimizer cannot be fused"
            )
        if kind != NUMBER and known:
            for tensor, part in zip(known, parts, strict=True):
                tensor.data = part
            parts = known
        self.state[key] = value
        for state, part in zip(self.states, parts, strict=True):
            state[key] = part

    def _remember_states(self) -> None:
        self._entries = _values(self.states)
        self._tensors = [value for value in self._entries if isinstance(value, Tensor)]
        self._addresses = list(map(data_ptr, self._tensors))

    def take_state(self) -> bool:
        """Read the numeric state; return False if any other state has changed since the last
        step.
        """
        return (
            not _is_state_held(self.parameters[0])
            and are_same(_values(self.states), self._entries)
            and list(map(data_ptr, self._tensors)) == self._addresses
            and all(
                torch.equal(all_, self.state[key].copy_(all_[0]).expand_as(all_))
                for key, all_ in self._vectors.items()
            )
        )

    def give_state_back(self, store: MutableMapping[Any, Any]) -> None:
        """Move the flat parameter's state, after a step, from ``store`` to the parameters'
        entries.
        """
        if self.flat not in store and not self.states:
            return
        found = store.pop(self.flat, {})
        if not self.states:
            self.states = [store.setdefault(parameter, {}) for parameter in self.parameters]
        for key, all_ in self._vectors.items():
            all_.copy_(self.state[key])
        if not are_same(found.values(), self.state.values()):
            if self.state.keys() - found.keys():
                for kept in (self.state, self._vectors, *self.states):
                    kept.clear()
            for key, value in found.items():
                if key not in self.state or value is not self.state[key]:
                    self._set_state(key, value)
            self._remember_states()

    def take_gradient(self, keep: bool) -> bool:
        """Set the flat gradient for one step: a view if the gradients are adjacent like the
        weights, else a copy.

        With ``keep``, gradients are replaced by views of the copy if they are the same tensors as
        in the last step and nothing else uses their memory. After ``zero_grad()``, which sets them
        to None, moving new ones would cost time in each step.

        Returns:
            False, with nothing changed, if a gradient is not row-major.

        Raises:
            TypeError, RuntimeError: a gradient is None, or not dense.
        """
        grads = list(map(get_grad, self.parameters))
        if not all(map(is_contiguous, grads)):
            return False
        is_kept, self._first = self._first is grads[0], grads[0]
        moved = grads[0].data_ptr() - self._places[0]
        # the last one alone ends most comparisons of new gradients
        if grads[-1].data_ptr() - self._places[-1] == moved:
            if moved:
                self._places = [place + moved for place in self._places]
            # if neighbours by chance, the first one's storage ends before the second
            with contextlib.suppress(RuntimeError):
                if list(map(data_ptr, grads)) == self._places:
                    self.flat.grad = grads[0].detach().as_strided(self.flat.shape, (1,))
                    return True
        with torch.no_grad():
            # cat is twice as fast
            self.flat.grad = torch.cat(grads) if self._one_dimensional else flatten(grads)
        if keep and is_kept and all(map(owns_memory, grads, self.parameters)):
            for grad, part in zip(grads, unflatten(self.flat.grad, grads), strict=True):
                grad.data = part
        return True


def _has_plain_gradient(p: Tensor) -> bool:
    grad = p.grad
    return grad is not None and is_plain(grad) and (grad.dtype, grad.shape) == (p.dtype, p.shape)


class FusionPlan:
    """Runs of small parameters, and a cheap check of their validity.

    The check looks at identities, addresses and lengths, not at versions, which torch's fused steps
    do not increase. It does not loop in Python over single parameters, as that would take longer
    than the step.

    ``flats`` are flat tensors of weights; unless ``do_flatten``, gradients do not move.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flats: Sequence[Tensor],
        do_flatten: bool,
        allow_inexact: bool,
    ) -> None:
        self.parameters: list[list[Tensor]] = [
            list(group["params"]) for group in optimizer.param_groups
        ]
        self.runs: list[Run] = []
        # for each group, the parameters that are stepped in place of its own
        self.stepped: list[list[Tensor]] = []
        self.num_fused_groups = 0
        self._allow_inexact = allow_inexact
        self._keeps_gradients = do_flatten
        # Parameters that are stepped as they are: if one gets a gradient, it may join a run.
        self._idle: list[Tensor] = []
        overlap = has_overlap(itertools.chain.from_iterable(self.parameters))
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            kinds = {
                p: kind
                for p in parameters
                if not overlap
                and _has_plain_gradient(p)
                and (kind := kind_of(p, group, allow_inexact)) is not None
            }
            runs = _find_runs(kinds, optimizer.state, flats)
            joined = {p for run in runs for p in run.parameters}
            alone = [p for p in parameters if p not in joined]
            self.num_fused_groups += bool(runs)
            self.stepped.append([*(run.flat for run in runs), *alone])
            self.runs += runs
            self._idle += [p for p in alone if p.grad is None]
        self._members = [p for run in self.runs for p in run.parameters]
        self._states = list(optimizer.state.values())  # after the last step
        self._expected = self._describe(optimizer)
        current = self.is_current(optimizer)
        assert current, "a new plan is out of date"

    def _describe(self, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
        return [
            [fusable(group, self._allow_inexact) for group in optimizer.param_groups],
            list(map(data_ptr, self._members)),
            list(map(Tensor.numel, self._members)),
        ]

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Load gradients and state of each run; return False, with the optimizer unchanged, if the
        plan is out of date.
        """
        groups = optimizer.param_groups
        try:
            return (
                are_same(optimizer.state.values(), self._states)
                and self._describe(optimizer) == self._expected
                and all(map(is_contiguous, self._members))
                and all(
                    are_same(group["params"], known)
                    for group, known in zip(groups, self.parameters, strict=True)
                )
                and all(p.grad is None for p in self._idle)
                and all(
                    run.take_state() and run.take_gradient(self._keeps_gradients)
                    for run in self.runs
                )
            )
        except (KeyError, TypeError, RuntimeError):
            # a value is missing, is not a dense tensor, or has no truth value, as tensors
            return False

    def give_back(self, store: MutableMapping[Any, Any]) -> None:
        """Restore gradients and state of the runs' parameters after a step; the state is in
        ``store``.
        """
        for run in self.runs:
            run.flat.grad = None
            run.give_state_back(store)
        # Autograd must know of changes, as a graph may have saved weights.
        torch.autograd.graph.increment_version(self._members)
        self._states = list(store.values())


def _find_runs(
    kinds: Mapping[Tensor, Any], store: Mapping[Any, Any], flats: Sequence[Tensor]
) -> list[Run]:
    """Return the runs among the parameters of one group; all have gradients, and may have state in
    ``store``.
    """
    runs: list[list[Tensor]] = []
    total, before = 0, None
    for p in sorted(kinds, key=data_ptr):
        if (signature := _state_signature(p, store.get(p))) is None:
            continue
        total += p.numel()
        alike = signature, kinds[p], total // LONGEST[p.device.type]
        if alike != before or flat_view((runs[-1][-1], p), flats) is None:
            runs.append([])
        runs[-1].append(p)
        before = alike
    return [Run(run, flats, store) for run in runs if len(run) > 1]
