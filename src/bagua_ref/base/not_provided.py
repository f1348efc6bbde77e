"""Missing parts: names of the original that bagua_ref does not have, and commands that install
optional dependencies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bagua_ref.errors import NotProvidedError

__all__ = [
    "MISSING",
    "REPLACEMENTS",
    "explain_missing",
    "install_command",
    "not_provided",
    "require",
]

_EXPERTS = (
    "use a library of expert layers, such as DeepSpeed's deepspeed.moe or Tutel, and list the"
    " experts' parameters in module._bagua_params_and_buffers_to_ignore before wrapping"
)
_LAUNCHER = "start workers with torchrun, e.g. torchrun --nproc_per_node=4 train.py"
_NO_SERVICE = (
    "there is no autotune service: choose the bucket size by BAGUA_DEFAULT_BUCKET_SIZE, or by"
    " bucket_cap_mb= of DistributedDataParallel"
)

REPLACEMENTS = {
    "contrib.sync_batchnorm": (
        "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping"
    ),
    "data_parallel.bagua_distributed": (
        "use model.with_bagua(...) or bagua_ref.data_parallel.DistributedDataParallel; what"
        " algorithms are given is bagua_ref.algorithms.base.TrainingContext"
    ),
    "distributed.launch": _LAUNCHER,
    "distributed.run": _LAUNCHER,
    "model_parallel": _EXPERTS,
    "moe": _EXPERTS,
    "service": _NO_SERVICE,
}
"""The replacement for each module, by its name within the package."""

MISSING = {
    "checkpoint": {
        "load_checkpoint": "use bagua_ref.checkpoint.load",
        "save_checkpoint": "use bagua_ref.checkpoint.save",
    },
    "env": dict.fromkeys(
        (
            "get_autotune_level",
            "get_autotune_max_samples",
            "get_autotune_sampling_confidence_time_s",
            "get_autotune_server_wait_time",
            "get_autotune_warmup_time_s",
            "get_bagua_service_port",
            "get_is_output_autotune_log",
            "is_report_metrics_switch_on",
        ),
        _NO_SERVICE,
    ),
    "communication": {
        **dict.fromkeys(
            ("get_hyperparameters_service_client", "run_flask_app", "start_autotune_server"),
            _NO_SERVICE,
        ),
        "CommMember": "ask isinstance(comm, bagua_ref.communication.NonMember)",
        "broadcast_nccl_unique_id": "use broadcast_object; communicators connect by themselves",
        "comm": "pass comm=None for the default group's global communicator",
    },
    "utils": {
        **dict.fromkeys(
            ("StatisticalAverage", "average_by_removing_extreme_values"),
            "use the standard library's statistics",
        ),
        "LOGGER": 'use logging.getLogger("bagua_ref")',
        "to_bagua_datatype": "use the tensor's dtype as it is",
    },
    "contrib.cache_loader": {
        "BatchFetcher": "use CacheLoader.get_many, and writer_buffer_size= of CacheLoader",
        "deserialize": "use bagua_ref.contrib.cache.codec.decode",
        "serialize": "use bagua_ref.contrib.cache.codec.encode",
    },
    "contrib.fuse.optimizer": dict.fromkeys(
        (
            "calculate_mutual_groups",
            "check_optimizer",
            "do_fuse",
            "flatten_params_and_states",
            "flatten_tensors_with_closure",
            "get_optimizer_param_states",
            "get_tensor_state",
            "group_tensors",
            "infer_state_tensors",
            "make_optimizer_instance",
            "sync_optimizer_state",
            "sync_param_group_scalars",
        ),
        "use fuse_optimizer and fuse_step; how they work inside is not part of the interface",
    ),
    "contrib.utils.redis_store": {
        "create_redis_client": "use redis.Redis(host=host, port=port) of the package redis"
    },
}
"""The replacement for single names, by module."""


def not_provided(name: str) -> NotProvidedError:
    """Return the error that importing the module ``name`` raises.

    >>> not_provided("distributed.run")
    NotProvidedError('bagua_ref.distributed.run is not provided; start workers with torchrun, e.g.
    ...')
    """
    return NotProvidedError(f"bagua_ref.{name} is not provided; {REPLACEMENTS[name]}")


def explain_missing(module: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``module``, which names the replacement when one of its
    `MISSING` names is imported.
    """

    def __getattr__(name: str) -> object:  # noqa: N807
        if name in MISSING[module]:
            # In ``from module import name``, Python would replace an AttributeError by one without
            # an explanation.
            raise NotProvidedError(
                f"bagua_ref.{module}.{name} is not provided; {MISSING[module][name]}"
            )
        raise AttributeError(f"module 'bagua_ref.{module}' has no attribute {name!r}")

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
    """Return the packages of an extra with the versions that it asks for; none if bagua_ref is not
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
    """Raise ImportError, with the command that installs it, if ``package`` is not installed.

    Args:
        package: a top-level package.
        user: the module that needs it.
        extra: an extra of bagua_ref that has it.
    """
    if find_spec(package) is None:
        raise ImportError(f"{user} needs {package}; install with: {install_command(extra)}")
