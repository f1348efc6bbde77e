"""Counts of a training on this rank, as one flat dictionary."""

from __future__ import annotations

from bagua_ref.data_parallel.wrapped_module import WrappedModule

__all__ = ["PER_STEP", "count_from_now", "metrics_of"]

PER_STEP = ("bytes_sent", "exposed_wait_seconds", "codec_seconds")
"""The totals of which there is a mean over steps, too, with ``_per_step`` after the name."""


def metrics_of(context: WrappedModule) -> dict[str, float | int]:
    """Return the metrics of `bagua_ref.distributed.BaguaModule.bagua_metrics`."""
    meter = context._bagua_backend.meter
    found: dict[str, float | int] = {"steps": meter.steps, "rounds": meter.rounds}
    alone = context.process_group.get_global_communicator().nranks() == 1
    found["steps_in_agreement"] = meter.steps if alone else meter.steps_in_agreement
    found["bytes_sent"] = _bytes_sent(context) - meter.bytes_before
    if all(parameter.device.type == "cpu" for _, parameter in context.bagua_build_params()):
        found["exposed_wait_seconds"], found["codec_seconds"] = meter.wait_seconds, meter.codec_seconds
    for name in PER_STEP:
        if name in found:
            found[f"{name}_per_step"] = found[name] / max(meter.steps, 1)
    if meter.last_exchange is not None:
        found["seconds_since_last_exchange"] = meter.world.clock() - meter.last_exchange
    return found | context.bagua_algorithm.metrics()


def count_from_now(context: WrappedModule) -> None:
    """Leave out what was sent when wrapping, which is no traffic of training."""
    context._bagua_backend.meter.bytes_before = _bytes_sent(context)


def _bytes_sent(context: WrappedModule) -> int:
    groups = [context.process_group, *([] if context.buffers.group is None else [context.buffers.group])]
    return sum(group.bytes_sent for group in groups)
