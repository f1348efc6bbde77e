"""Bagua reborn: PyTorch training with relaxed communication, and the reference that other
implementations test against.

Importing the package adds the methods of `BaguaTensor` to ``torch.Tensor``, those of `BaguaModule`
to ``torch.nn.Module``, and ``bagua_patch`` and its companions to torch's ``ProcessGroup``; there
are no other side effects.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch

from bagua_ref import (
    algorithms,
    bucket,  # noqa: F401
    communication,
    data_parallel,
    runtime,  # noqa: F401
    tensor,  # noqa: F401
    utils,  # noqa: F401
)
from bagua_ref.backends import (
    available_backends,
    get_backend,
    get_codec,
    list_codecs,
    register_backend,
    use_backend,
)
from bagua_ref.base.not_provided import explain_missing as _explain_missing
from bagua_ref.buckets.tensor import BaguaTensor
from bagua_ref.data_parallel import GradScaler, join, train
from bagua_ref.distributed import BaguaModule
from bagua_ref.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua_ref.groups.communication import (
    BaguaProcessGroupPatch,
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    destroy_process_group,
    gather,
    gather_inplace,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "GradScaler",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "available_backends",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "ddp_comm_hook",
    "destroy_process_group",
    "explain_hangs",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_codec",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "install",
    "is_initialized",
    "join",
    "list_codecs",
    "new_group",
    "record",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "register_backend",
    "scatter",
    "scatter_inplace",
    "send",
    "train",
    "use_backend",
]

__version__ = "0.2.0"

if _TYPE_CHECKING:
    from bagua_ref import checkpoint
    from bagua_ref.explain import explain_hangs
    from bagua_ref.integrations import ddp_comm_hook
    from bagua_ref.integrations.installing import install
    from bagua_ref.record import record
else:  # so that type checkers still find misspelt names

    def __getattr__(name: str) -> object:
        # not everybody's: imported when asked for
        names = (
            "checkpoint",
            "contrib",
            "explain",
            "flight_recorder",
            "graphs",
            "low_rank",
            "mixing",
            "record",
        )
        if name in names:
            from importlib import import_module

            return import_module(f"bagua_ref.{name}")
        if name == "explain_hangs":
            from bagua_ref.explain import explain_hangs

            return explain_hangs
        if name == "ddp_comm_hook":
            from bagua_ref.integrations import ddp_comm_hook

            return ddp_comm_hook
        if name == "install":
            from bagua_ref.integrations.installing import install

            return install
        return _explain_missing("")(name)


def _install(mixin: type, target: type) -> None:
    """Add the methods and properties of ``mixin`` to ``target``; existing ones are not replaced."""
    for name, member in vars(mixin).items():
        if not name.startswith("__") and not hasattr(target, name):
            setattr(target, name, member)


_install(BaguaTensor, _torch.Tensor)
_install(BaguaModule, _torch.nn.Module)
if _torch.distributed.is_available():
    _install(BaguaProcessGroupPatch, _torch.distributed.ProcessGroup)
