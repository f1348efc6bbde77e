"""The plan of a fused step: runs of adjacent parameters, each stepped as one flat parameter, and a
check of the plan (S6).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.memory import overlapping
from bagua_ref.base.utils import flatten, unflatten
from bagua_ref.buckets.storage import held_by_bucket

__all__ = [
    "NUMBERS",
    "FusionPlan",
    "attributes",
    "has_overlap",
    "is_small",
    "kind_of",
    "neighbours",
    "options",
]

SMALL_ON_CPU, SMALL = 2**14, 2**20
"""Up to so many elements, an operation's launch costs more than copying a new gradient beside
others, measured with SGD.
"""

LONGEST_ON_CPU, LONGEST = 2**19, 2**24
"""About so many elements are stepped at once, as more of them fit no cache: without it, Adam takes
2.5 times as long.
"""

data_ptr, is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
get_grad, get_dtype = attrgetter("grad"), attrgetter("dtype")

EXACT, SHORT = (torch.float32, torch.float64), (torch.float16, torch.bfloat16)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (int, float, bool, str, type(None))
"""Types of immutable values, which parameters can share."""


def are_same(found: Collection[Any], expected: Collection[Any]) -> bool:
    """Return whether two collections have the same objects in the same order."""
    return len(found) == len(expected) and all(map(is_, found, expected))


def is_small(parameter: Tensor) -> bool:
    """Return whether fusing ``parameter`` pays on its device."""
    return parameter.numel() <= (SMALL_ON_CPU if parameter.device.type == "cpu" else SMALL)


def has_overlap(parameters: Iterable[Tensor]) -> bool:
    """Return whether plain parameters share memory: then the order of updates matters."""
    return (
        overlapping([p for p in parameters if type(p) in PLAIN_TYPES and p.layout is torch.strided])
        is not None
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` contains exactly its elements, in row-major order."""
    kind = (
        type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_complex()
    )
    return kind and tensor.is_contiguous() and not tensor.is_neg()


def is_expanded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has elements in one place; then torch's sums have other last bits
    than with a copy of it.
    """
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def attributes(parameter: Tensor) -> tuple[Any, ...] | None:
    """Return the attributes that users have given to ``parameter``, which its optimizer may read;
    None if some are mutable.
    """
    own = [
        (name, type(value), value)
        for name, value in vars(parameter).items()
        if not name.startswith("_bagua")
    ]
    return tuple(own) if all(kind in NUMBERS for _, kind, _ in own) else None


def options(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options that may decide how a group is stepped: flags, zeros among the numbers,
    `_replaces_average`.
    """
    values = [
        value == 0 if type(value) in (int, float) else value
        for value in group.values()
        if type(value) in NUMBERS
    ]
    return *values, _replaces_average(group)


def _replaces_average(group: dict[str, Any]) -> bool:
    """Return whether a running average forgets its old value.

    Then ``lerp_`` has weight 1, and on a CPU, the sign of a resulting zero depends on the element's
    place in memory.
    """
    betas = group.get("betas")
    zero = isinstance(betas, (tuple, list)) and bool(betas) and bool(betas[0] == 0)
    return zero or (bool(group.get("centered")) and group.get("alpha") == 0)


def kind_of(
    parameter: Tensor, group: dict[str, Any], allow_inexact: bool
) -> tuple[Any, ...] | None:
    """Return the properties that a run's parameters have in common, None if ``parameter`` must be
    stepped by itself (S6).
    """
    # An operation of two numbers uses the wider dtype, one of a vector and a number does not. And
    # for a single element, state does not show whether an entry is per element.
    own, dtype, device = attributes(parameter), parameter.dtype, parameter.device
    if (
        own is None
        or not is_plain(parameter)
        or parameter.numel() < 2
        or dtype not in EXACT + SHORT
    ):
        return None
    # not all others have Tensor.is_set_to
    if group.get("differentiable") or device.type not in ("cpu", "cuda"):
        return None
    if not allow_inexact and (
        group.get("fused")
        or (device.type == "cpu" and (dtype in SHORT or _replaces_average(group)))
    ):
        return None
    return dtype, device, parameter.requires_grad, own


def flat_view(tensors: Sequence[Tensor], flats: Sequence[Tensor] = ()) -> Tensor | None:
    """Return the flat tensor of which row-major, non-empty ``tensors`` are the consecutive parts,
    None if there is none.

    They must lie in one storage or in one of ``flats``: neighbours by chance may be separated at
    any time.
    """
    sizes = [tensor.nbytes for tensor in tensors]
    start, item = tensors[0].data_ptr(), tensors[0].element_size()
    if [tensor.data_ptr() for tensor in tensors] == list(
        itertools.accumulate(sizes[:-1], initial=start)
    ):
        for whole in (tensors[0], *flats):
            storage = whole.untyped_storage()
            offset = start - storage.data_ptr()
            if (
                offset >= 0
                and offset + sum(sizes) <= storage.nbytes()
                and whole.dtype is tensors[0].dtype
            ):
                return whole.detach().as_strided((sum(sizes) // item,), (1,), offset // item)
    return None


def neighbours(tensors: Iterable[Tensor], flats: Sequence[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Yield, by address, the longest lists of tensors that have a `flat_view`; a tensor without
    neighbours is its own list.
    """
    chain: list[Tensor] = []
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        if chain and flat_view((chain[-1], tensor), flats) is None:
            yield chain
            chain = []
        chain.append(tensor)
    if chain:
        yield chain


ELEMENTS, ONE, NUMBER = "a number per element", "a tensor of one number", "a number"


def _kind(value: Any, parameter: Tensor) -> str | None:
    """Return the kind of a state of ``parameter``, None if it cannot be split."""
    if not isinstance(value, Tensor):
        return NUMBER if type(value) in NUMBERS else None
    return ELEMENTS if value.shape == parameter.shape else ONE if value.numel() == 1 else None


def _is_state_held(parameter: Tensor) -> bool:
    """Return whether a live Bagua bucket holds a state of ``parameter``."""
    held = held_by_bucket(parameter)
    return not (held is None or held is parameter or held is parameter.grad)


def _state_signature(parameter: Tensor, state: Any) -> list[Any] | None:
    """Return the properties that states of a run's parameters have in common, None if ``state``
    cannot be joined with others.
    """
    if _is_state_held(parameter) or not (state is None or type(state) is dict):
        return None
    entries: list[Any] = [state is None]
    for key, value in (state or {}).items():
        kind = _kind(value, parameter)
        if kind is None or (kind != NUMBER and (value.requires_grad or not is_plain(value))):
            return None
        shared = (type(value), value) if kind == NUMBER else (value.dtype, value.device)
        entries.append((key, kind, *shared, *((value.shape, value.item()) if kind == ONE else ())))
    return entries


class Run:
    """Adjacent parameters and the flat one, whose parts they are, that is stepped in their place.

    ``states`` are their entries of the optimizer's state, if there are any; the tensors in them are
    put beside each other.
    """

    def __init__(
        self, parameters: list[Tensor], flats: Sequence[Tensor], store: Mapping[Any, Any]
    ) -> None:
        flat = flat_view(parameters, flats)
        assert flat is not None, "parameters are not adjacent"
        self.flat = torch.nn.Parameter(flat, requires_grad=parameters[0].requires_grad)
        for name, _, value in attributes(parameters[0]) or ():
            setattr(self.flat, name, value)
        self.parameters, self.states = parameters, [store[p] for p in parameters if p in store]
        self.state: dict[Any, Any] = {}  # that of the flat parameter
        self._parts: dict[Any, Sequence[Any]] = {}  # for each key, the parameters' entries
        self._addresses: dict[Any, list[int]] = {}  # of those that are tensors
        # for tensors of one number, such as ``step``: those of all parameters
        self._vectors: dict[Any, Tensor] = {}
        for key, value in self.states[0].items() if self.states else ():
            kind, parts = _kind(value, parameters[0]), [state[key] for state in self.states]
            self._set_state(
                key,
                flatten(parts) if kind == ELEMENTS else value.clone() if kind == ONE else value,
                parts,
            )
        # the addresses of gradients that lie as the weights do
        self._places = list(map(data_ptr, parameters))
        self._one_dimensional = all(p.ndim == 1 for p in parameters)
        self._first: Tensor = self.flat  # the first gradient of the last step; there was none yet

    def _set_state(self, key: Any, value: Any, known: Sequence[Any] = ()) -> None:
        """Make ``value`` the flat parameter's state, and its parts those of the parameters: of the
        tensors ``known``, if any.
        """
        kind = _kind(value, self.flat)
        if kind is None:
            what = (
                f"tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            count = f"{self.flat.numel()} elements in {len(self.parameters)} parameters"
            raise RuntimeError(
                f"state {key!r} of {count} is a {what}, which cannot be split: this optimizer"
                " cannot be fused"
            )
        self._addresses.pop(key, None)
        self._vectors.pop(key, None)
        parts: Sequence[Any] = [value] * len(self.parameters)
        if kind == ONE:
            self._vectors[key] = torch.stack(list(parts))
            parts = self._vectors[key].unbind()
        elif kind == ELEMENTS:
            parts = unflatten(value, self.parameters)
        if kind != NUMBER:
            for tensor, part in zip(known, parts, strict=False):
                tensor.data = part
            self._addresses[key] = list(map(data_ptr, parts))
            parts = known or parts
        for state, part in zip(self.states, parts, strict=True):
            state[key] = part
        self.state[key], self._parts[key] = value, parts

    def take_state(self) -> bool:
        """Read the numbers of the state; return False if anything else in it has changed since the
        last step.
        """
        if _is_state_held(self.parameters[0]) or sum(map(len, self.states)) != len(
            self.states
        ) * len(self.state):
            return False
        return (
            all(
                all(map(is_, map(itemgetter(key), self.states), parts))
                for key, parts in self._parts.items()
            )
            and all(
                list(map(data_ptr, self._parts[key])) == addresses
                for key, addresses in self._addresses.items()
            )
            and all(
                torch.equal(all_, self.state[key].copy_(all_[0]).expand_as(all_))
                for key, all_ in self._vectors.items()
            )
        )

    def give_state_back(self, store: MutableMapping[Any, Any]) -> None:
        """Move the flat parameter's state after a step out of ``store``, to the entries of the
        parameters.
        """
        found = store.pop(self.flat, None)
        if found is None:
            for parameter in self.parameters if self.states else ():
                store.pop(parameter, None)
            self.states, found = [], {}
        elif not self.states:
            self.states = [store.setdefault(parameter, {}) for parameter in self.parameters]
        if self.state.keys() - found.keys():
            for kept in (self.state, self._parts, self._addresses, self._vectors, *self.states):
                kept.clear()
        for key, value in found.items():
            if key not in self.state or value is not self.state[key]:
                self._set_state(key, value)
            elif key in self._vectors:
                self._vectors[key].copy_(value)

    def take_gradient(self, keep: bool) -> bool:
        """Set the flat gradient for one step: a view of the gradients if they lie as the weights
        do, else a copy of them.

        If ``keep``, gradients become parts of the copy if they are still those of the last step and
        only these parameters use them. After ``zero_grad()``, which sets them to None, moving new
        ones would cost time in each step.

        Returns:
            False, with nothing changed, if a gradient has elements in one place.

        Raises:
            TypeError, RuntimeError: a gradient is None, or not dense.
        """
        grads = list(map(get_grad, self.parameters))
        row_major = all(map(is_contiguous, grads))
        if not row_major and any(map(is_expanded, grads)):
            return False
        is_kept, self._first = self._first is grads[0], grads[0]
        if row_major and self._lie_as_weights(grads):
            # neighbours by chance: the first one's storage ends before the second
            with contextlib.suppress(RuntimeError):
                self.flat.grad = grads[0].detach().as_strided(self.flat.shape, (1,))
                return True
        with torch.no_grad():
            # cat is twice as fast
            self.flat.grad = torch.cat(grads) if self._one_dimensional else flatten(grads)
        if keep and is_kept and all(map(_is_movable, self.parameters, grads)):
            for grad, part in zip(grads, unflatten(self.flat.grad, grads), strict=True):
                grad.data = part
        return True

    def _lie_as_weights(self, grads: list[Tensor]) -> bool:
        moved = grads[0].data_ptr() - self._places[0]
        # so end most comparisons of new gradients
        if grads[-1].data_ptr() - self._places[-1] != moved:
            return False
        if moved:
            self._places = [place + moved for place in self._places]
        return list(map(data_ptr, grads)) == self._places

    def give_gradient_back(self) -> None:
        """Drop the flat gradient, after copying changes that the step made in a copy to the
        parameters' gradients.
        """
        flat, self.flat.grad = self.flat.grad, None
        # foreach=True with nesterov=True
        if flat is not None and flat._version and flat.data_ptr() != self._first.data_ptr():
            with torch.no_grad():
                torch._foreach_copy_(
                    list(map(get_grad, self.parameters)), unflatten(flat, self.parameters)
                )


def _is_movable(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether only the parameter uses the memory of its gradient."""
    owned = is_plain(grad) and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return (
        owned
        and held_by_bucket(parameter) is not grad
        and not (grad.device.type == "cpu" and grad.is_shared())
    )


def _may_join(p: Tensor) -> bool:
    """Return whether ``p`` has a gradient that can be a part of a flat one."""
    grad = p.grad
    if grad is None or type(grad) not in PLAIN_TYPES or grad.layout is not torch.strided:
        return False
    return (
        (grad.dtype, grad.shape) == (p.dtype, p.shape)
        and not grad.is_neg()
        and not is_expanded(grad)
    )


class FusionPlan:
    """Runs of small parameters, and a cheap check whether they are still valid.

    The check looks at identities, addresses and lengths, not at versions, which torch's fused steps
    do not increase. It does not loop in Python over single parameters, as that would take longer
    than the step.

    ``flats`` are flat tensors of weights, None if none move; then gradients do not move, either.
    """

    @torch.no_grad()
    def __init__(
        self, optimizer: torch.optim.Optimizer, allow_inexact: bool, flats: Sequence[Tensor] | None
    ) -> None:
        self.parameters: list[list[Tensor]] = [
            list(group["params"]) for group in optimizer.param_groups
        ]
        self.runs: list[Run] = []
        # for each group, the parameters that are stepped in place of its own
        self.stepped: list[list[Tensor]] = []
        self.num_fused_groups = 0
        self._keeps_gradients = flats is not None
        single: list[Tensor] = []
        overlap = has_overlap(itertools.chain.from_iterable(self.parameters))
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            kinds = {
                p: kind_of(p, group, allow_inexact)
                for p in parameters
                if not overlap and _may_join(p)
            }
            joinable = [p for p, kind in kinds.items() if kind is not None]
            small = list(filter(is_small, joinable))
            runs = list(_find_runs(small, kinds, optimizer.state, flats or ()))
            joined = {p for run in runs for p in run.parameters}
            alone = [p for p in parameters if p not in joined]
            # Large parameters count as members of a run, though nothing is gained by moving them
            # together.
            self.num_fused_groups += bool(runs) or (
                flats is not None and len(joinable) > max(1, len(small))
            )
            self.stepped.append([*(run.flat for run in runs), *alone])
            self.runs += runs
            single += alone
        self._members = [p for run in self.runs for p in run.parameters]
        # if one moves, it may overlap a run
        self._single = [p for p in single if p.grad is not None and type(p) in PLAIN_TYPES]
        # if one gets a gradient, it may join a run
        self._idle = [p for p in single if p.grad is None]
        self._views = [p.detach() for p in self._members]  # of the memory in which they are stepped
        self._attributes = list(map(vars, self._members))
        # Only these can change their dtype in place without changing their size: the others are
        # floats that need gradients.
        self._convertible = [p for p in self._members if p.dtype in SHORT or not p.requires_grad]
        self._states = list(optimizer.state.values())  # after the last step
        self._expected = self._describe(optimizer), list(map(dict, self._attributes))
        current = self.is_current(optimizer)
        assert current, "a new plan is out of date"

    def _describe(self, optimizer: torch.optim.Optimizer) -> tuple[list[Any], ...]:
        dtypes, addresses = (
            list(map(get_dtype, self._convertible)),
            list(map(data_ptr, self._single)),
        )
        return list(map(options, optimizer.param_groups)), dtypes, addresses

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take gradients and state of each run; return False, with the optimizer unchanged, if the
        plan is out of date.
        """
        groups = optimizer.param_groups
        try:
            return (
                are_same(optimizer.state.values(), self._states)
                and (self._describe(optimizer), self._attributes) == self._expected
                and all(
                    are_same(group["params"], known)
                    for group, known in zip(groups, self.parameters, strict=True)
                )
                and all(p.grad is None for p in self._idle)
                and all(map(Tensor.is_set_to, self._members, self._views))
                and all(
                    run.take_state() and run.take_gradient(self._keeps_gradients)
                    for run in self.runs
                )
            )
        except (KeyError, TypeError, RuntimeError):
            # a value is missing, is not a dense tensor, or has no truth value, as tensors
            return False

    def give_back(self, store: MutableMapping[Any, Any]) -> None:
        """Move gradients and state of runs back to their parameters after a step, whose state is in
        ``store``.

        New entries get the order of ``step()``, that of parameters in groups, as ``state_dict()``
        keeps it.
        """
        stepped = list(itertools.islice(store, len(self._states), None))
        for run in self.runs:
            run.give_gradient_back()
            run.give_state_back(store)
        # Autograd must know of changes, as a graph may have saved weights: fused=True does not
        # tell.
        if changed := [*self._members, *(p for p in self._single if p.grad is not None)]:
            torch.autograd.graph.increment_version(changed)
        if new := set(itertools.islice(store, len(self._states), None)):
            members = {run.flat: run.parameters for run in self.runs}
            keys = [key for one in stepped for key in members.get(one, [one]) if key in new]
            places = dict.fromkeys(
                p for p in itertools.chain.from_iterable(self.parameters) if p in new
            )
            in_order = iter(places)
            # others, as strings, keep their places
            for key in [next(in_order) if key in places else key for key in keys]:
                store[key] = store.pop(key)
        self._states = list(store.values())


def _find_runs(
    parameters: Sequence[Tensor],
    kinds: Mapping[Tensor, Any],
    store: Mapping[Any, Any],
    flats: Sequence[Tensor],
) -> Iterator[Run]:
    """Yield the runs among ``parameters`` of one group, which have gradients, and maybe state in
    ``store``.
    """
    for chain in neighbours(parameters, flats):
        longest = LONGEST_ON_CPU if chain[0].device.type == "cpu" else LONGEST
        blocks = [total // longest for total in itertools.accumulate(p.numel() for p in chain)]
        alike = {
            p: (_state_signature(p, store.get(p)), kinds[p], block)
            for p, block in zip(chain, blocks, strict=True)
        }
        for (signature, *_), members in itertools.groupby(chain, key=alike.__getitem__):
            if len(part := list(members)) > 1 and signature is not None:
                yield Run(part, flats, store)
