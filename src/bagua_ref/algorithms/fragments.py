"""Fragments of a model, each with its global copy and outer optimizer; one of them in flight (S9.3
to S9.5).
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from bagua_ref.algorithms.registry import check_whole
from bagua_ref.base.memory import Layout, by_dtype_and_device
from bagua_ref.buckets.optimizer_state import align_state, take_over
from bagua_ref.errors import CommunicationError
from bagua_ref.scheduling.engine import Engine

_SAMPLED = 8
"""Number of sampled elements of the weights: it is unlikely that clipping has moved eight elements
to its bounds.
"""
_REMEMBERED = 10**5
"""Maximum number of samples of earlier weights, about 10 MB."""


def checked_fragments(fragments: int | Sequence[Sequence[str]]) -> int | list[list[str]]:
    """Return the validated argument ``fragments``, a number or lists of names; names are not yet
    compared with a module's.
    """
    if isinstance(fragments, int):
        check_whole("fragments", fragments, 1)
        return fragments
    if not isinstance(fragments, (list, tuple)) or not all(
        isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        for names in fragments
    ):
        raise TypeError(
            f"fragments={fragments!r} must be an int, or a list of lists of parameter names"
        )
    if not fragments or not all(fragments):
        raise ValueError(
            f"fragments={fragments!r} must hold at least one list, and each list at least one"
            " parameter name"
        )
    return [list(names) for names in fragments]


def split_into_fragments(sizes: Sequence[int], count: int) -> list[int]:
    """Return the fragment index of each parameter: contiguous, non-empty fragments of about equal
    size, in order (S9.3).

    With N parameters, i from 0, of s bytes after b bytes of others, ``f_i = max(min(floor(P * (b +
    s/2) / total), f_(i-1) + 1, P - 1), P - N + i)`` and ``f_(-1) = -1``.

    Args:
        sizes: sizes of the N parameters in bytes, in the order of ``named_parameters()``.
        count: P, from 1 to N.

    >>> split_into_fragments([400, 4, 400, 4, 400, 4], 3)
    [0, 0, 1, 1, 2, 2]
    """
    total, before, last, found = sum(sizes), 0, -1, []
    for place, size in enumerate(sizes):
        share = count * (2 * before + size) // (2 * total) if total else 0
        last = max(min(share, last + 1, count - 1), count - len(sizes) + place)
        found.append(last)
        before += size
    return found


def named_fragments(
    fragments: int | Sequence[Sequence[str]], parameters: Sequence[tuple[str, Parameter]]
) -> list[list[str]]:
    """Return the parameter names of each fragment.

    Args:
        fragments: the number of fragments, or the names in each.
        parameters: the trained parameters with names, in the order of ``named_parameters()``.

    Raises:
        ValueError: there are more fragments than parameters; or a trained parameter is missing from
            the lists or occurs twice, or a name is not that of a trained parameter.
    """
    names = [name for name, _ in parameters]
    if isinstance(fragments, int):
        if fragments > len(names):
            raise ValueError(
                f"fragments={fragments} must be at most {len(names)}, the number of trained"
                " parameters"
            )
        found = split_into_fragments(
            [p.numel() * p.element_size() for _, p in parameters], fragments
        )
        return [
            [name for name, place in zip(names, found, strict=True) if place == fragment]
            for fragment in range(fragments)
        ]
    listed = Counter(name for fragment in fragments for name in fragment)
    wrong = {
        "not at all": Counter(names) - listed,
        "more than once, or though the module trains no such parameter": listed - Counter(names),
    }
    for how, which in wrong.items():
        if which:
            raise ValueError(
                f"fragments name {', '.join(map(repr, which))} {how}; each trained parameter must"
                " stand in exactly one of the lists"
            )
    return [list(names) for names in fragments]


class Fragment:
    """A part of the parameters, its global copy g, and the outer optimizer that updates g.

    Args:
        names: names of the parameters.
        parameters: the parameters, whose values are x.
        outer_optimizer: factory of the optimizer, called with g.

    Attributes:
        copies: g: for each parameter a copy in float32 (float64 for float64), with its shape, and
            its strides if it is dense.
        parts: g by name, one dict for each dtype and device.
        optimizer: the outer optimizer.

    Raises:
        TypeError: ``outer_optimizer`` does not return an optimizer.
        ValueError: it does not hold exactly the tensors that it was given.
    """

    def __init__(
        self,
        names: list[str],
        parameters: list[Parameter],
        outer_optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        self.names, self._parameters = names, parameters
        self.copies = [torch.nn.Parameter(_copy(p)) for p in parameters]
        name_of = {id(g): name for name, g in self.named.items()}
        self.parts = [
            {name_of[id(g)]: g for g in part} for part in by_dtype_and_device(self.copies)
        ]
        self.optimizer = outer_optimizer(list(self.copies))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"outer_optimizer returned a {type(self.optimizer).__name__}; it must return a"
                " torch.optim.Optimizer of the tensors that it is given"
            )
        held = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(map(id, self.copies)):
            raise ValueError(
                f"outer_optimizer returned a {type(self.optimizer).__name__} of {len(held)} tensors"
                f" that are not exactly the {len(self.copies)} that it was given for"
                f" {', '.join(map(repr, names))}; it must make a new optimizer of those"
            )

    @property
    def named(self) -> dict[str, Parameter]:
        """Map parameter names to tensors of g."""
        return dict(zip(self.names, self.copies, strict=True))

    @torch.no_grad()
    def take(self) -> None:
        """Set the global copy to the weights: g <- x."""
        torch._foreach_copy_(list[torch.Tensor](self.copies), list[torch.Tensor](self._parameters))

    @torch.no_grad()
    def differences(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``g - x`` for one part of the fragment, in the strides of g."""
        weights = dict(zip(self.names, self._parameters, strict=True))
        return {
            name: torch.sub(g, weights[name], out=torch.empty_like(g)) for name, g in part.items()
        }

    def update(self, mean: Mapping[str, Tensor]) -> None:
        """Step the outer optimizer with ``mean``, by name, as the gradient of g."""
        for name, g in self.named.items():
            g.grad = mean[name]
        self.optimizer.step()
        for g in self.copies:
            g.grad = None

    def settings(self, checksum: int) -> int:
        """Return ``checksum`` updated with the outer optimizer's class and options."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        numbers = tree_map_only(torch.Tensor, torch.Tensor.tolist, groups)
        return zlib.crc32(f"{type(self.optimizer).__name__} {numbers}".encode(), checksum)

    @torch.no_grad()
    def mix(self, mix: float) -> None:
        """``x <- g + mix*(x - g)`` for mix < 0.5, else ``x <- x - (x - g)*(1 - mix)``, rounded once
        into the weights' dtype.

        The factor is rounded to g's dtype; so is each result. Unlike ``lerp_``, nothing is fused
        (S1).
        """
        for g, x in zip(self.copies, self._parameters, strict=True):
            if mix == 0:
                x.copy_(g)
            elif mix < 0.5:
                x.copy_(g + (x - g).mul_(mix))
            else:
                x.copy_(x - (x - g).mul_(1 - mix))

    def load(self, weights: Mapping[str, Tensor] | None, optimizer: dict[str, Any]) -> None:
        """Load g by name, unless it is None, and the state of the outer optimizer."""
        take_over(self.optimizer, copy.deepcopy(optimizer), {})
        align_state(self.optimizer)
        if weights is not None:
            with torch.no_grad():
                for name, g in self.named.items():
                    g.copy_(weights[name])


class Trail:
    """History of sampled weights, which detects that weights were set back to those of an earlier
    step.

    g - x is progress only if x came from g by local steps. It is not if x was set back to weights
    from before g last changed. Weights that were clipped, or swapped and swapped back, do not count
    as set back.

    Args:
        weights: the weights, of which eight elements are sampled.

    Attributes:
        went_back: whether a step began with weights from before g last changed.
        is_new: whether the last step began with weights that no step since g last changed had
            produced.
    """

    def __init__(self, weights: Sequence[Parameter]) -> None:
        filled = [w for w in weights if w.numel()]
        filled = [w for w in filled if w.device == filled[0].device]
        samples = _SAMPLED if filled else 0  # weights without elements go nowhere
        self._sampled = [filled[number * len(filled) // _SAMPLED] for number in range(samples)]
        self._places = [
            tuple(size * number // _SAMPLED for size in w.shape)
            for number, w in enumerate(self._sampled)
        ]
        self.clear()

    def clear(self) -> None:
        """Discard all samples."""
        self._unread: list[tuple[bool, Tensor]] = []
        self._earlier: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._since_exchange: set[bytes] = set()
        self.went_back = self.is_new = self._is_earlier = False

    @torch.no_grad()
    def note(self, stepped: bool) -> None:
        """Sample the weights after a local step or before a forward pass, without waiting for
        CUDA.
        """
        if self._sampled:
            found = [w[place] for w, place in zip(self._sampled, self._places, strict=True)]
            self._unread.append((stepped, torch.stack(found).float()))

    def read(self) -> None:
        """Evaluate the new samples."""
        for stepped, sample in self._unread:
            found = sample.cpu().numpy().tobytes()
            if stepped:
                self.went_back |= self._is_earlier
                self._since_exchange.add(found)
            else:  # if another one comes before the step, weights may have been swapped for this
                self.is_new = found not in self._since_exchange
                self._is_earlier = self.is_new and found in self._earlier
        self._unread.clear()

    def exchanged(self) -> None:
        """Mark all samples so far as earlier weights, because g has changed."""
        self.read()
        self._earlier.extend(self._since_exchange)
        self._since_exchange.clear()


@dataclass
class InFlight:
    """A fragment in flight: differences that were sent but not yet applied, replaced by their mean
    over ranks on arrival.

    Attributes:
        fragment: index of the fragment.
        due: t of the step after which it is applied.
        mean: the sent differences, then their mean, by name.
        missing: number of buckets whose mean has not arrived.
        undo: functions that restore the error memories to their state before sending.
    """

    fragment: int
    due: int
    mean: dict[str, Tensor]
    missing: int = 0
    undo: list[Callable[[], object]] = field(default_factory=list)

    def note_arrival(self, bucket_name: str) -> None:
        """Count the arrival of a bucket's mean; appended as the last operation of each bucket."""
        self.missing -= 1

    def state(self) -> dict[str, Any]:
        """Return the checkpoint entry of this fragment; call it after the mean has arrived."""
        mean = {name: mean.clone() for name, mean in self.mean.items()}
        return {"fragment": self.fragment, "due": self.due, "mean": mean}

    def wait(self, engine: Engine) -> None:
        """Wait until the mean has arrived.

        Raises:
            CommunicationError: the mean will not arrive, even if an earlier wait has already raised
                this.
        """
        engine.wait_pending_comm_ops()
        if self.missing:
            raise CommunicationError(
                f"the mean of fragment {self.fragment} has not arrived because an earlier operation"
                " failed"
            )


def _copy(parameter: Tensor) -> Tensor:
    """Return a copy in the dtype of g, in the strides of flat storage (S2.3)."""
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    return Layout.of(parameter).copy_of(parameter, dtype)
