"""Targets for tests of the conformance checks: parts whose methods are made by name, and the
package's own with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bagua_ref import contrib
from bagua_ref.backends.codec import Codec
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance.cases.collective_cases import METHODS
from bagua_ref.conformance.lab.lab import KERNELS
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps

CODECS = tuple(ReferenceBackend.codecs)
COMM_OPS = ("centralized", "decentralized", "decentralized_on_graph", "low_precision_decentralized")
ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "decentralized_on_graph",
    "low_precision_decentralized",
    "qadam",
    "async_model_average",
    "local_sgd",
    "diloco",
    "powersgd",
    "topk",
)
COLLECTIVES = (
    *METHODS,
    *(f"{name}_inplace" for name in METHODS if name != "broadcast"),
    "alltoall_v",
    "alltoall_v_inplace",
    "exchange",
    "send",
    "recv",
    "broadcast_object",
    "barrier",
)
METHODS_OF = {
    "kernels": tuple(KERNELS),
    "codec": CODECS,
    "collectives": COLLECTIVES,
    "comm_ops": COMM_OPS,
    "algorithms": ALGORITHMS,
    "samplers": (
        "LoadBalancingDistributedSampler",
        "LoadBalancingDistributedBatchSampler",
        "BudgetBatchSampler",
    ),
}
Method = Callable[..., Any]


class Target:
    """Parts whose methods are made by name, and the names of those that were called.

    Args:
        suite: the suite whose part it has.
        make: returns the method of a name; None: the part lacks it.
        capabilities: what it says that it can.
    """

    def __init__(
        self, suite: str, make: Callable[[str], Method | None], **capabilities: Any
    ) -> None:
        self.calls: list[str] = []
        self.capabilities = capabilities
        made = {
            name: self._counted(name, method)
            for name in METHODS_OF[suite]
            if (method := make(name)) is not None
        }
        if suite == "codec":
            verbs = {
                name: dict.fromkeys(("compress", "decompress"), method)
                for name, method in made.items()
            }
            codecs = {
                name: type(name, (), {**verbs[name], "__init__": lambda codec, kernels: None})
                for name in made
            }
            self.kernels: Any = SimpleNamespace(codecs=codecs)
        elif suite == "kernels":
            self.kernels = part_of(made)
        elif suite == "collectives":
            self.communicator = lambda world: part_of(made, transport=world.transport)
        else:
            setattr(self, suite, part_of(made))

    def _counted(self, name: str, method: Method) -> Method:
        def counted(part: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return method(part, *arguments, **options)

        return counted


def part_of(methods: dict[str, Method], **attributes: Any) -> Any:
    made = {
        **methods,
        "rank": lambda part: part.transport.rank(),
        "nranks": lambda part: part.transport.nranks(),
    }
    part = type("Part", (), made)()
    vars(part).update(attributes)
    return part


def own_part(suite: str) -> Any:
    made = {
        "kernels": ReferenceBackend(),
        "comm_ops": ReferenceCommOps("reference"),
        "algorithms": ReferenceAlgorithms("reference"),
    }
    return made.get(suite, contrib)


def real(
    suite: str, guard: Callable[[Any], None] = lambda arguments: None
) -> Callable[[str], Method]:
    """Return what makes a method of the package's own, whose arguments are guarded."""

    def make(name: str) -> Method:
        def method(part: Any, *arguments: Any, **options: Any) -> Any:
            guard([arguments, options])
            owner = part.transport if suite == "collectives" else own_part(suite)
            return getattr(owner, name)(*arguments, **options)

        return method

    return make


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in arguments, and those of optimizers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, torch.optim.Optimizer):
        return [p for group in value.param_groups for p in group["params"]]
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [x for item in inner for x in tensors(item)]


def only(dtype: str) -> Callable[[Any], None]:
    def guard(arguments: Any) -> None:
        for x in tensors(arguments):
            if x.dtype is not getattr(torch, dtype):
                raise RuntimeError(f"{x.dtype} is not claimed")

    return guard


class Narrow(ReferenceBackend):
    """The reference's kernels and some of its codecs; it raises RuntimeError for all dtypes but
    one, if that is given.
    """

    def __init__(self, dtype: str | None = None, codecs: Iterable[str] = CODECS) -> None:
        self._guard = (lambda arguments: None) if dtype is None else only(dtype)
        self.calls, self.capabilities = list[str](), {} if dtype is None else {"dtypes": [dtype]}
        self.codecs = {name: self._narrow(ReferenceBackend.codecs[name]) for name in codecs}  # type: ignore[misc]
        for name in KERNELS:
            vars(self)[name] = partial(self._kernel, name)

    def _kernel(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append(name)
        # what it writes or reads first; others may have a dtype of their own
        self._guard(tensors([arguments, options])[:1])
        return getattr(ReferenceBackend, name)(self, *arguments, **options)

    def _narrow(self, codec: type[Codec]) -> type[Codec]:
        def compress(made: Codec, x: Tensor, *arguments: Any, **options: Any) -> Any:
            self.calls.append(codec.__name__)
            self._guard(x)
            return codec.compress(made, x, *arguments, **options)

        def decompress(made: Codec, payload: Tensor, num_chunks: int, out: Tensor) -> Any:
            self.calls.append(codec.__name__)
            self._guard(out)
            return codec.decompress(made, payload, num_chunks, out)

        return type(codec.__name__, (codec,), {"compress": compress, "decompress": decompress})
