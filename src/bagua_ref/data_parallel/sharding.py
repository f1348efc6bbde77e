"""Training of modules sharded inside a node by fully_shard (FSDP2): this rank's shards replace the
parameters.

FSDP2 keeps each parameter as a DTensor, and calls its post-accumulate-grad hooks when the gradient
has been reduce-scattered. Messages of this package go between ranks that hold the same shards, so
the mesh of the shards and the group share only one rank: this one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm
from bagua_ref.algorithms.registry import GlobalAlgorithmRegistry
from bagua_ref.types import Group


class LocalShard(torch.nn.Parameter):
    """This rank's shard of a parameter, as a plain tensor in the same memory; its gradient is the
    parameter's.

    Attributes:
        sharded: the parameter, a DTensor.
    """

    sharded: Any

    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the gradient."""
        return None if self.sharded.grad is None else local(self.sharded.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.sharded.grad = None if value is None else _like(self.sharded, value)


def stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the `LocalShard` of a sharded parameter; return other parameters unchanged."""
    if not _is_dtensor(parameter):
        return parameter
    shard = LocalShard(local(parameter))
    shard.sharded = parameter
    return shard


def whole(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the sharded parameter of a `LocalShard`; return other parameters unchanged."""
    found: torch.nn.Parameter = (
        parameter.sharded if isinstance(parameter, LocalShard) else parameter
    )
    return found


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, in the same memory; return other tensors unchanged."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # else it is another view each time, which cannot be moved
        return tensor.to_local().detach() if tensor.requires_grad else tensor.to_local()


def group_of(process_group: Any) -> Any:
    """Convert a one-dimensional DeviceMesh or a torch ProcessGroup to a Bagua group; return Bagua's
    groups unchanged.

    Raises:
        ValueError: the DeviceMesh has more than one dimension.
        TypeError: ``process_group`` has another type.
    """
    if type(process_group).__name__ == "DeviceMesh":
        if process_group.ndim != 1:
            names = process_group.mesh_dim_names or ()
            example = f"mesh[{names[0]!r}]" if names else "mesh['replicate']"
            raise ValueError(
                f"process_group={process_group!r} has {process_group.ndim} dimensions; pass the one"
                f" along which ranks hold the same weights, as in {example}"
            )
        process_group = process_group.get_group()
    if isinstance(process_group, dist.ProcessGroup):
        process_group = process_group.bagua_patch().bagua_pg  # type: ignore[attr-defined]
    if not hasattr(process_group, "for_background"):
        raise TypeError(
            f"process_group={process_group!r} must be a BaguaProcessGroup, a torch ProcessGroup"
            " that this rank is in, a DeviceMesh of one dimension, or None"
        )
    return process_group


def ignored_names(module: torch.nn.Module, ignored: Collection[str | Tensor] = ()) -> set[str]:
    """Return the names of parameters and buffers that are not communicated: those in ``ignored``,
    and those listed in attributes of the module.

    Raises:
        TypeError: an entry of ``ignored`` is neither a name nor a tensor.
        ValueError: the module has no parameter or buffer of this name.
    """
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for item in ignored:
        if not isinstance(item, (str, Tensor)):
            raise TypeError(f"ignored={ignored!r} must be a list of names and of parameters")
        if isinstance(item, str) and item not in tensors:
            raise ValueError(
                f"ignored={item!r} is no parameter or buffer of this {type(module).__name__}; those"
                " of other modules are passed themselves, not their names"
            )
    local = {id(tensors[item] if isinstance(item, str) else item) for item in ignored}
    names = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")
    listed = {name for attribute in names for name in getattr(module, attribute, ())}
    return listed | {name for name, tensor in tensors.items() if id(tensor) in local}


def reshard(module: torch.nn.Module) -> None:
    """Make FSDP2 free the unsharded parameters that it may still hold after a forward pass, so that
    it gathers the shards again.
    """
    for inside in module.modules():
        if _is_fsdp2(inside):
            inside.reshard()  # type: ignore[operator]


def check_sharded(
    module: torch.nn.Module,
    algorithm: Algorithm,
    group: Group,
    ignored: Collection[str | Tensor] = (),
) -> None:
    """Raise an error for sharded parameters that ``algorithm`` cannot train in ``group``, and for
    invalid ``ignored`` names.

    Raises:
        NotImplementedError: a parameter is not supported; the message names it, and says what to
            do.
    """
    names = ignored_names(module, ignored)
    reshard(module)
    trained = dict(module.named_parameters())
    sharded = {name: parameter for name, parameter in trained.items() if _is_dtensor(parameter)}
    for name, parameter in sharded.items():
        what = f"parameter {name!r} is a DTensor"
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if not any(map(_is_fsdp2, module.modules())):
            raise NotImplementedError(
                f"{what} that fully_shard (FSDP2) has not made, and cannot be put into a bucket;"
                " leave its communication to torch"
            )
        if mesh.ndim != 1 or not placements[0].is_shard():
            raise NotImplementedError(
                f"{what} with placements {placements} on a mesh of shape {tuple(mesh.shape)}; only"
                " parameters sharded along one dimension can be put into buckets, as by"
                " fully_shard(model, mesh=mesh['shard'])"
            )
        ranks = mesh.mesh.flatten().tolist()
        shared = sorted({*ranks} & {*group.ranks})
        if len(shared) > 1:
            raise NotImplementedError(
                f"{what} sharded over ranks {ranks}, of which process_group holds {shared}, too,"
                " though their shards differ. Pass the dimension along which ranks hold the same"
                " shards: process_group=mesh['replicate']"
            )
    if not sharded:
        return
    first = next(iter(sharded))
    for name, parameter in trained.items():
        if name not in sharded and name not in names and parameter.requires_grad:
            raise NotImplementedError(
                f"parameter {name!r} is not sharded while {first!r} is, and would not be averaged"
                " inside the node; shard it, too, or pass its name"
                " in ignored=[...]"
            )
    if not algorithm.takes_shards:
        known = GlobalAlgorithmRegistry.items()
        takers = [name for name, (made, _) in sorted(known) if getattr(made, "takes_shards", False)]
        raise NotImplementedError(
            f"{type(algorithm).__name__} cannot train {first!r}, which fully_shard (FSDP2) has"
            " sharded: it moves weights or changes the optimizer's state. Use one of"
            f" {', '.join(takers)}"
        )


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Convert optimizer state received from a rank with the same shards to DTensors."""
    for parameter, state in optimizer.state.items():
        if _is_dtensor(parameter):
            shape = local(parameter).shape
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and not _is_dtensor(value)
                    and value.dim()
                    and value.shape == shape
                ):
                    state[name] = _like(parameter, value)


def _like(sharded: Any, shard: Tensor) -> Any:
    """Return a DTensor with the layout of ``sharded``, in the memory of ``shard``."""
    kind = type(sharded.data)
    with torch.no_grad():
        return kind.from_local(
            shard,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )


def _is_dtensor(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) is not torch.Tensor
        and hasattr(tensor, "device_mesh")
    )


def _is_fsdp2(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
