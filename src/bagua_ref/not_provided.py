"""Parts of the original that bagua_ref leaves out, and what to use instead; importing one of them says so."""

from __future__ import annotations

from bagua_ref.errors import NotProvidedError

__all__ = ["REPLACEMENTS", "not_provided"]

_EXPERTS = (
    "use a library of expert layers, such as DeepSpeed's deepspeed.moe or Tutel, and list the experts' parameters in "
    "module._bagua_params_and_buffers_to_ignore before wrapping"
)
_LAUNCHER = "start workers with torchrun, e.g. torchrun --nproc_per_node=4 train.py"

REPLACEMENTS = {
    "checkpoint": (
        "save model.state_dict(), optimizer.state_dict() and model.bagua_algorithm.state_dict() with torch.save, or with "
        "torch.distributed.checkpoint"
    ),
    "contrib.sync_batchnorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping",
    "distributed.launch": _LAUNCHER,
    "distributed.run": _LAUNCHER,
    "model_parallel": _EXPERTS,
    "moe": _EXPERTS,
    "service": (
        "there is no autotune service: choose the bucket size by BAGUA_DEFAULT_BUCKET_SIZE, or bucket_cap_mb= of "
        "DistributedDataParallel"
    ),
}
"""By the name of the module within the package."""


def not_provided(name: str) -> NotProvidedError:
    """Return the error that importing the module ``name`` raises.

    >>> not_provided("distributed.run")
    NotProvidedError('bagua_ref.distributed.run is not provided; start workers with torchrun, e.g. ...')
    """
    return NotProvidedError(f"bagua_ref.{name} is not provided; {REPLACEMENTS[name]}")
