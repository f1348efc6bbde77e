"""Broadcast of the first rank's parameters, buffers and optimizer state at the start of training
(S5).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bagua_ref.base.memory import effective_strides
from bagua_ref.buckets.optimizer_state import take_over
from bagua_ref.communicators.base import Communicator
from bagua_ref.data_parallel.rounds import describe_texts
from bagua_ref.data_parallel.sharding import local, place_state
from bagua_ref.groups.communication import broadcast_coalesced

_SUMMING = {"Adafactor", "LBFGS"}
"""Optimizers of torch whose results depend on the number of threads, because they sum over a
parameter's elements.
"""


@contextmanager
def refusing_together(comm: Communicator, ranks: Sequence[int]) -> Iterator[None]:
    """Context that raises an exception on all ranks if it is raised on one; ranks must not wait for
    each other inside.

    Collective, so that other ranks do not wait for a rank that rejects its module.

    Args:
        comm: the ranks that train together.
        ranks: the global ranks of ``comm``, for messages.

    Raises:
        ValueError: another rank has raised an exception; quotes the message of the first such rank.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
    if comm.nranks() > 1:
        refused = [flag for (flag,) in comm.exchange_ints([int(refusal is not None)])()]
        if any(refused):
            first = refused.index(1)
            text = comm.broadcast_object(str(refusal), first)
            refusal = refusal or ValueError(f"rank {ranks[first]} cannot train its module: {text}")
    if refusal is not None:
        raise refusal


def broadcast_state(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    ignored: Collection[str],
    settings: Mapping[str, str],
    ranks: Sequence[int],
) -> None:
    """Broadcast the first rank's parameters, buffers, optimizer state and options (S5).

    Args:
        module: the module, with the same names, shapes and dtypes on all ranks.
        optimizers: the optimizers, with the same groups on all ranks.
        comm: the ranks that train together.
        ignored: names of parameters and buffers that are not broadcast.
        settings: further settings that must be equal on all ranks, by name.
        ranks: the global ranks of ``comm``, for messages.

    Raises:
        ValueError: module, optimizers or settings differ between ranks; raised on every rank, with
            the differences.
    """
    if comm.nranks() == 1:
        return
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {name: tensor for name, tensor in named.items() if name not in ignored}
    if differences := _differences_between(
        {**_described(tensors, optimizers), **settings}, comm, ranks
    ):
        raise ValueError(
            "module, optimizers or settings differ between ranks, so they cannot train together."
            f" {differences}"
        )
    share_state(tensors.values(), optimizers, comm, 0)


def warn_of_drift(
    parameters: Iterable[Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    comm: Communicator,
    ranks: Sequence[int],
) -> None:
    """Warn on every rank if optimizer steps with equal gradients can differ in bits, because ranks
    have different versions of torch or kernels.

    Args:
        parameters: the parameters that are equal on all ranks.
        optimizers: the optimizers of the parameters.
        comm: the ranks that train together.
        ranks: the global ranks of ``comm``.
    """
    kernels = {"torch": str(torch.__version__)}
    if any(parameter.device.type == "cpu" for parameter in parameters):
        kernels["CPU kernels"] = torch.backends.cpu.get_cpu_capability()
        if any(
            kind.__name__ in _SUMMING
            for optimizer in optimizers
            for kind in type(optimizer).__mro__
        ):
            kernels["threads"] = str(torch.get_num_threads())
    if comm.nranks() > 1 and (differences := _differences_between(kernels, comm, ranks)):
        warnings.warn(
            "ranks can round differently, so that weights drift apart in optimizer steps though"
            f" gradients are equal: {differences}. Use one torch on all ranks, and set"
            " ATEN_CPU_CAPABILITY and OMP_NUM_THREADS to what all have; or call"
            " model.bagua_resynchronize() on every rank from time to time",
            stacklevel=2,
        )


def share_state(
    tensors: Iterable[Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    comm: Communicator,
    source: int,
) -> None:
    """Broadcast the ``tensors`` of rank ``source``, and the state and options of its optimizers."""
    broadcast_coalesced([local(tensor).detach() for tensor in tensors], source, comm)
    for optimizer in optimizers:
        found = share_object((optimizer.state_dict(), optimizer.defaults), comm, source)
        if comm.rank() != source:
            take_over(optimizer, *found)
            place_state(optimizer)


def share_object(mine: Any, comm: Communicator, source: int) -> Any:
    """Broadcast ``mine`` of rank ``source``, with tensors on the CPU, since receivers may not have
    the sender's devices.
    """
    on_cpu = (
        tree_map_only(torch.Tensor, lambda tensor: local(tensor).detach().cpu(), mine)
        if comm.rank() == source
        else None
    )
    return comm.broadcast_object(on_cpu, source)


def _described(
    tensors: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, str]:
    """Describe everything that must be equal on all ranks, by name."""
    texts = {}
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        frozen = ", frozen" if is_parameter and not tensor.requires_grad else ""
        mine = local(tensor)
        expanded = any(
            size > 1 and not stride for size, stride in zip(mine.shape, mine.stride(), strict=True)
        )
        text = f"{tuple(mine.shape)} {tensor.dtype}{frozen}{', expanded' if expanded else ''}"
        # buckets hold elements in the order of memory (S2.3)
        if tensor.requires_grad and not mine.is_contiguous():
            text += f", strides {effective_strides(mine.shape, mine.stride())}"
        texts[f"{'parameter' if is_parameter else 'buffer'} {name!r}"] = text
    for place, optimizer in enumerate(optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        texts[f"optimizer {place}"] = f"{type(optimizer).__name__} of {sizes} parameters"
    return texts


def _differences_between(mine: dict[str, str], comm: Communicator, ranks: Sequence[int]) -> str:
    """Return the differences between the ranks' texts, on every rank; "" if names, texts and order
    are equal. Collective.
    """
    digest = hashlib.sha256(repr(list(mine.items())).encode()).digest()[:8]
    digests = comm.exchange_ints([int.from_bytes(digest, "big", signed=True)])()
    if all(theirs == digests[0] for theirs in digests):
        return ""
    places = {(f"{{has}} {{value}} at place {place}", ""): name for place, name in enumerate(mine)}
    named = {
        (f"{{has}} {name.replace('{', '{{').replace('}', '}}')}: {{value}}", ""): text
        for name, text in mine.items()
    }
    return describe_texts(named, comm, ranks, "none") or describe_texts(places, comm, ranks)
