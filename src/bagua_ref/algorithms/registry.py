"""The registry of algorithms by name (S5.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["GlobalAlgorithmRegistry"]


class _AlgorithmRegistry(dict):  # type: ignore[type-arg]
    """Algorithms by name."""

    def register(self, name: str, algorithm: Callable[..., Any], description: str | None = None) -> None:
        """Let ``Algorithm.init(name, **kwargs)`` call ``algorithm(**kwargs)``.

        Raises:
            ValueError: the name is taken by another algorithm.
            TypeError: ``name`` is no string, or ``algorithm`` cannot be called.
        """
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a string")
        if not callable(algorithm):
            raise TypeError(f"algorithm={algorithm!r} must be an Algorithm class, or a function that returns an Algorithm")
        if name in self and self[name][0] is not algorithm:
            raise ValueError(f"name={name!r} is already registered for {self[name][0]!r}; choose another")
        self[name] = (algorithm, description or (algorithm.__doc__ or "").partition("\n")[0])

    def get(self, name: str) -> Callable[..., Any]:  # type: ignore[override]
        """Return the algorithm that is registered as ``name``.

        Raises:
            ValueError: there is none.
        """
        if name not in self:
            raise ValueError(f"name={name!r} is not a registered algorithm; there are {', '.join(map(repr, sorted(self)))}")
        found: Callable[..., Any] = self[name][0]
        return found

    def name_of(self, algorithm: Any) -> str:
        """Return the name of the algorithm's class, or the class's own if it is not registered."""
        return next((name for name, (known, _) in self.items() if known is type(algorithm)), type(algorithm).__name__)

    def available_algorithms(self) -> list[str]:
        """Return the registered names."""
        return list(self)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {description}" for name, (_, description) in self.items())


GlobalAlgorithmRegistry = _AlgorithmRegistry()
