"""Tensors that an algorithm keeps from round to round, by name, and their way into checkpoints and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bagua_ref.base.memory import Layout

__all__ = ["NamedTensors"]


class NamedTensors(Mapping[str, Tensor]):
    """Tensors of known shapes, which are zero until something is written to them.

    Args:
        what: they are, for messages.

    >>> memories = NamedTensors("memories")
    >>> memories.expect("weight", torch.zeros(2))
    >>> _ = memories["weight"].add_(1)
    >>> memories.state()
    {'weight': tensor([1., 1.])}
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._like: dict[str, Tensor] = {}
        """A tensor without memory of each one's shape, dtype and device."""
        self._layouts: dict[str, Layout] = {}
        self._values: dict[str, Tensor] = {}
        self._flats: dict[tuple[str, ...], Tensor] = {}
        """By the names of the tensors that lie in them."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            self._values[name] = self._zeros(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)

    def expect(self, name: str, like: Tensor, layout: Layout | None = None) -> None:
        """Expect a tensor of the shape, dtype and device of ``like``; one that has been there stays.

        Args:
            name: of the tensor.
            like: whatever its values and strides are.
            layout: the strides; None: row-major ones. If others were expected before, the values move to these.

        Raises:
            ValueError: one of another shape, of other strides or another dtype was loaded.
        """
        layout, like = layout or Layout(like.shape), like.new_empty(()).expand(like.shape)
        if name in self._values:
            if name in self._like and self._values[name].shape == layout.shape and not layout.describes(self._values[name]):
                self._values[name], self._flats = layout.copy_of(self._values[name]), {}
            self._check(name, self._values[name], like, layout)
            self._values[name] = self._values[name].to(like.device)
        self._like[name], self._layouts[name] = like, layout

    def flat(self, names: Sequence[str]) -> Tensor:
        """Return one flat tensor in which these tensors lie, each in the order of its strides, until others are loaded."""
        key = tuple(names)
        if key not in self._flats:
            self._flats = {others: flat for others, flat in self._flats.items() if not set(others) & set(key)}
            flat = self._flats[key] = torch.cat([self._layouts[name].flat(self[name]) for name in names])
            parts = flat.split([self[name].numel() for name in names])
            self._values.update({name: self._layouts[name].view(part) for name, part in zip(names, parts, strict=True)})
        return self._flats[key]

    def written(self) -> list[Tensor]:
        """Return those that something was written to, in the order of their names."""
        return [self._values[name] for name in sorted(self._values)]

    def state(self) -> dict[str, Tensor]:
        """Return copies of all of them."""
        return {name: self._values[name].clone() if name in self._values else self._zeros(name) for name in self._like}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `load` can load ``saved``; where nothing is expected yet, `expect` checks it later."""
        if not isinstance(saved, Mapping) or not all(isinstance(tensor, Tensor) for tensor in saved.values()):
            raise ValueError(f"state holds {self._what} that are no tensors")
        if not self._like:
            return
        if saved.keys() != self._like.keys():
            here, there = sorted(self._like.keys() - saved.keys()), sorted(saved.keys() - self._like.keys())
            raise ValueError(f"state holds {self._what} of another model: it lacks {here or 'none'}, and {there or 'none'} are new")
        for name, tensor in saved.items():
            self._check(name, tensor, self._like[name], self._layouts[name])

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over copies of ``saved``; all others become zero."""
        self._flats = {}
        self._values = {
            name: tensor.to(self._like[name].device if name in self._like else tensor.device, copy=True)
            for name, tensor in saved.items()
        }

    def _check(self, name: str, found: Tensor, wanted: Tensor, layout: Layout) -> None:
        there, here = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (found, wanted))
        if there == here and not layout.describes(found):
            there, here = f"{there} with strides {found.stride()}", f"{here} with strides {layout.strides}"
        if there != here:
            raise ValueError(f"state holds {self._what} that are not this model's: {name!r} is {there} there and {here} here")

    def _zeros(self, name: str) -> Tensor:
        return self._layouts[name].zeros(self._like[name].dtype, self._like[name].device)
