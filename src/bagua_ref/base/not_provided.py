"""Names of the original that bagua_ref does not provide, and commands that install optional
dependencies.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from bagua_ref.errors import NotProvidedError

_EXPERTS = (
    "use a library of expert layers, such as DeepSpeed's deepspeed.moe or Tutel, and list the"
    " experts' parameters in module._bagua_params_and_buffers_to_ignore before wrapping"
)
_LAUNCHER = "start workers with torchrun, e.g. torchrun --nproc_per_node=4 train.py"
_NO_SERVICE = (
    "there is no autotune service: choose the bucket size by BAGUA_DEFAULT_BUCKET_SIZE, or by"
    " bucket_cap_mb= of DistributedDataParallel"
)

_OWN_PIECES = "use fuse_optimizer and fuse_step; how they work inside is not part of the interface"
_STATISTICS = "use the standard library's statistics"
_SYNC_BATCH_NORM = (
    "on CUDA, use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping; on CPUs,"
    " torch has none either: use GroupNorm or LayerNorm, whose statistics are those of one sample"
)
_TRAINING = (
    "use model.with_bagua(...) or bagua_ref.data_parallel.DistributedDataParallel; what algorithms"
    " are given is bagua_ref.algorithms.base.TrainingContext"
)

NOT_PROVIDED = {
    "checkpoint.load_checkpoint": "use bagua_ref.checkpoint.load",
    "checkpoint.save_checkpoint": "use bagua_ref.checkpoint.save",
    "communication.CommMember": "ask isinstance(comm, bagua_ref.communication.NonMember)",
    "communication.broadcast_nccl_unique_id": (
        "use broadcast_object; communicators connect by themselves"
    ),
    "communication.comm": "pass comm=None for the default group's global communicator",
    "communication.get_hyperparameters_service_client": _NO_SERVICE,
    "communication.run_flask_app": _NO_SERVICE,
    "communication.start_autotune_server": _NO_SERVICE,
    "contrib.SyncBatchNorm": _SYNC_BATCH_NORM,
    "contrib.cache_loader.BatchFetcher": (
        "use CacheLoader.get_many, and writer_buffer_size= of CacheLoader"
    ),
    "contrib.cache_loader.deserialize": "use bagua_ref.contrib.cache.codec.decode",
    "contrib.cache_loader.serialize": "use bagua_ref.contrib.cache.codec.encode",
    "contrib.fuse.optimizer.calculate_mutual_groups": _OWN_PIECES,
    "contrib.fuse.optimizer.check_optimizer": _OWN_PIECES,
    "contrib.fuse.optimizer.do_fuse": _OWN_PIECES,
    "contrib.fuse.optimizer.flatten_params_and_states": _OWN_PIECES,
    "contrib.fuse.optimizer.flatten_tensors_with_closure": _OWN_PIECES,
    "contrib.fuse.optimizer.get_optimizer_param_states": _OWN_PIECES,
    "contrib.fuse.optimizer.get_tensor_state": _OWN_PIECES,
    "contrib.fuse.optimizer.group_tensors": _OWN_PIECES,
    "contrib.fuse.optimizer.infer_state_tensors": _OWN_PIECES,
    "contrib.fuse.optimizer.make_optimizer_instance": _OWN_PIECES,
    "contrib.fuse.optimizer.sync_optimizer_state": _OWN_PIECES,
    "contrib.fuse.optimizer.sync_param_group_scalars": _OWN_PIECES,
    "contrib.sync_batchnorm": _SYNC_BATCH_NORM,
    "contrib.utils.redis_store.create_redis_client": (
        "use redis.Redis(host=host, port=port) of the package redis"
    ),
    "data_parallel.bagua_distributed": _TRAINING,
    "distributed.launch": _LAUNCHER,
    "distributed.run": _LAUNCHER,
    "env.get_autotune_level": _NO_SERVICE,
    "env.get_autotune_max_samples": _NO_SERVICE,
    "env.get_autotune_sampling_confidence_time_s": _NO_SERVICE,
    "env.get_autotune_server_wait_time": _NO_SERVICE,
    "env.get_autotune_warmup_time_s": _NO_SERVICE,
    "env.get_bagua_service_port": _NO_SERVICE,
    "env.get_is_output_autotune_log": _NO_SERVICE,
    "env.is_report_metrics_switch_on": _NO_SERVICE,
    "model_parallel": _EXPERTS,
    "moe": _EXPERTS,
    "service": _NO_SERVICE,
    "utils.LOGGER": 'use logging.getLogger("bagua_ref")',
    "utils.StatisticalAverage": _STATISTICS,
    "utils.average_by_removing_extreme_values": _STATISTICS,
    "utils.to_bagua_datatype": "use the tensor's dtype as it is",
}
"""The replacement for each module and name of the original, by its name within the package."""


def explain_missing(module: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``module`` ("" for the package itself); its error names the
    replacement of a missing name.

    >>> explain_missing("distributed")("run")
    Traceback (most recent call last):
    bagua_ref.errors.NotProvidedError: bagua_ref.distributed.run is not provided; start workers ...
    """
    prefix = f"{module}." if module else ""

    def __getattr__(name: str) -> object:  # noqa: N807
        if (replacement := NOT_PROVIDED.get(prefix + name)) is not None:
            # In ``from module import name``, Python would replace an AttributeError by one without
            # an explanation.
            raise NotProvidedError(f"bagua_ref.{prefix}{name} is not provided; {replacement}")
        where = f"bagua_ref.{module}" if module else "bagua_ref"
        raise AttributeError(f"module {where!r} has no attribute {name!r}")

    return __getattr__


_FOLDER = Path(__file__).parents[3]
"""The root of the checkout, if this file is in one."""


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra of bagua_ref, depending on how bagua_ref is
    installed.

    For a checkout, it installs the checkout again, in place. Otherwise, it names the packages, as
    bagua_ref may have been installed from a file that is gone, and may not be on any package index.

    Args:
        extra: a name under ``project.optional-dependencies`` in pyproject.toml.
    """
    if (_FOLDER / "pyproject.toml").is_file() and (_FOLDER / "src" / "bagua_ref").is_dir():
        return f"pip install -e {shlex.quote(f'{_FOLDER}[{extra}]')}"
    return f"pip install {shlex.join(requirements_of(extra))}"


def requirements_of(extra: str) -> list[str]:
    """Return the packages of an extra with their version specifiers; none if bagua_ref is not
    installed.

    Args:
        extra: a name under ``project.optional-dependencies`` in pyproject.toml.
    """
    from importlib.metadata import PackageNotFoundError, requires  # not needed to import bagua_ref

    try:
        lines = requires("bagua_ref") or ()
    except PackageNotFoundError:  # its sources are on the path
        return []
    found = []
    for line in lines:
        name, _, marker = line.partition(";")
        if f"extra == '{extra}'" in marker.replace('"', "'"):
            own = re.fullmatch(r"bagua[_-]ref\[(.+)\]", name.strip())
            for other in own[1].split(",") if own else ():
                found += requirements_of(other)
            found += [] if own else [name.strip()]
    return found


def require(package: str, user: str, extra: str) -> None:
    """Raise ImportError, with an install command, if ``package`` is not installed.

    Args:
        package: a top-level package.
        user: the module that needs it.
        extra: the extra of bagua_ref that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{user} needs {package}; install with: {install_command(extra)}")
