"""The registry of algorithms by name (S5.7), and checks of their options."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bagua_ref.backends.chunks import MAX_CHUNK
from bagua_ref.buckets.bucket import check_compression
from bagua_ref.comm_ops.chunked_sparse import MEANS

AnyImpl = TypeVar("AnyImpl")


class _AlgorithmRegistry(dict):  # type: ignore[type-arg]
    """Registry of algorithms by name."""

    def register(
        self, name: str, algorithm: Callable[..., Any], description: str | None = None
    ) -> None:
        """Register ``algorithm`` as ``name``: ``Algorithm.init(name, **kwargs)`` calls
        ``algorithm(**kwargs)``.

        Raises:
            ValueError: the name is taken by another algorithm.
            TypeError: ``name`` is not a string, or ``algorithm`` is not callable.
        """
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a string")
        if not callable(algorithm):
            raise TypeError(
                f"algorithm={algorithm!r} must be an Algorithm class, or a function that returns an"
                " Algorithm"
            )
        if name in self and self[name][0] is not algorithm:
            raise ValueError(
                f"name={name!r} is already registered for {self[name][0]!r}; choose another"
            )
        self[name] = (
            algorithm,
            description or " ".join((algorithm.__doc__ or "").partition("\n\n")[0].split()),
        )

    def get(self, name: str) -> Callable[..., Any]:  # type: ignore[override]
        """Return the algorithm registered as ``name``.

        Raises:
            ValueError: no algorithm has this name.
        """
        if name not in self:
            raise ValueError(
                f"name={name!r} is not a registered algorithm{_close_to(name, sorted(self))}"
            )
        found: Callable[..., Any] = self[name][0]
        return found

    def name_of(self, algorithm: Any) -> str:
        """Return the name under which the algorithm's class is registered, else the name of the
        class.
        """
        return next(
            (name for name, (known, _) in self.items() if known is type(algorithm)),
            type(algorithm).__name__,
        )

    def available_algorithms(self) -> list[str]:
        """Return the registered names."""
        return list(self)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {description}" for name, (_, description) in self.items())


GlobalAlgorithmRegistry = _AlgorithmRegistry()


def check_options(name: str, make: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raise TypeError for an option that the algorithm does not have.

    Args:
        name: name of the algorithm.
        make: class or factory of the algorithm.
        given: options by name.
    """
    options = inspect.signature(make).parameters
    if any(option.kind is option.VAR_KEYWORD for option in options.values()):
        return
    for option, value in given.items():
        if option not in options:
            raise TypeError(
                f"{option}={value!r} is no option of {name}{_close_to(option, options)}"
            )


def _close_to(given: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: similar names, then all allowed
    ones.
    """
    names = list(allowed)
    meant = " or ".join(map(repr, difflib.get_close_matches(given, names)))
    return (
        f"{f' (did you mean {meant}?)' if meant else ''}; there are"
        f" {', '.join(map(repr, names)) or 'none'}"
    )


def implements(algorithm: type[Any]) -> Callable[[type[AnyImpl]], type[AnyImpl]]:
    """Class decorator of an implementation: link it with ``algorithm``, the class of its options,
    and register that under the implementation's name.
    """

    def decorate(implementation: type[Any]) -> type[Any]:
        algorithm.implementation, implementation.algorithm = implementation, algorithm
        GlobalAlgorithmRegistry.register(implementation.name, algorithm)
        return implementation

    return decorate


def check_whole(name: str, value: int, least: int) -> None:
    """Raise unless the argument ``name`` is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int, {least} or more")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")


def check_number(
    name: str, value: float, least: float, most: float, excluded: bool = False
) -> None:
    """Raise unless an argument is a finite number between two bounds.

    Args:
        name: name of the argument.
        value: value of the argument.
        least: the lower bound.
        most: the upper bound, inclusive.
        excluded: whether the lower bound is exclusive.
    """
    words = f"above {least:g}" if excluded else f"at least {least:g}"
    words += " and finite" if most == math.inf else f" and at most {most:g}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number {words}")
    if not least <= value <= most or abs(value) == math.inf or (excluded and value == least):
        raise ValueError(f"{name}={value!r} must be {words}")


def check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless the argument ``name`` is one of ``allowed``."""
    if not any(value is each or value == each for each in allowed):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_sparse_options(top_k: int | None, chunk: int, mean: str, compression: str | None) -> None:
    """Raise unless the options of a chunked sparse exchange are compatible (S15).

    Args:
        top_k: number of elements to send of each chunk; None: there is no such exchange, and
            options that need it are errors.
        chunk: maximum side of a chunk.
        mean: the divisor.
        compression: the codec of the values; None: values are not compressed.
    """
    if top_k is not None:
        check_whole("top_k", top_k, 1)
    check_whole("chunk", chunk, 1)
    if chunk > MAX_CHUNK:
        raise ValueError(f"chunk={chunk} must be at most {MAX_CHUNK}")
    check_one_of("mean", mean, MEANS)
    for name, value, needs in (("compression", compression, "Stat2"), ("mean", mean, MEANS[1])):
        if top_k is None and value == needs:
            raise ValueError(f"{name}={value!r} needs top_k, which is None")
    check_compression(compression, optional=True, also=() if top_k is None else ("Stat2",))


def check_bool(name: str, value: bool) -> None:
    """Raise TypeError unless the argument ``name`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
