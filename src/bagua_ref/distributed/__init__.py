"""``with_bagua`` and related methods that bagua_ref adds to ``torch.nn.Module``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.not_provided import explain_missing
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import context_of, resynchronize, wrap
from bagua_ref.types import Group

__all__ = ["BaguaModule"]


class BaguaModule:
    """The methods that bagua_ref adds to ``torch.nn.Module``, and the attributes of a wrapped
    module.

    Unwrapped modules have none of these attributes, so that tools that inspect modules, such as
    torch.compile and torch.jit, see nothing unusual.

    Attributes:
        bagua_module_name: the name of this module in messages, unique in the process: by default
            its class, numbered from the second one on; may be set before wrapping.
        bagua_algorithm: the implementation of the algorithm in use.
        bagua_optimizers: the optimizers passed when wrapping.
        bagua_buckets: the buckets in the order in which they are scheduled.
        bagua_train_step_counter: training forward passes begun since wrapping.

    Source: ``bagua/torch_api/distributed.py`` of Bagua 0.9.
    """

    bagua_module_name: str
    bagua_algorithm: AlgorithmImpl
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_buckets: list[BaguaBucket]
    bagua_train_step_counter: int

    def with_bagua(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: Algorithm | str,
        process_group: Group | DeviceMesh | ProcessGroup | None = None,
        do_flatten: bool = True,
        *,
        backend: str | KernelBackend | None = None,
        find_unused_parameters: bool = False,
        timeout: float | None = None,
        ignored: Iterable[str | torch.Tensor] = (),
    ) -> Any:
        """Wrap this module for training together with the other ranks; return it (S5).

        Collective: every rank of the group wraps its copy. The first rank's parameters, buffers and
        optimizer state are broadcast. From then on every training step runs the algorithm. Wrapping
        again replaces the algorithm.

        Args:
            optimizers: the optimizers of this module's parameters, or the only one.
            algorithm: e.g. ``GradientAllReduceAlgorithm()``, or a registered name, such as
                "bytegrad", with its defaults.
            process_group: the ranks that train together, Bagua's group or torch's; None is the
                default group. For a model sharded by ``fully_shard``, the dimension of the
                DeviceMesh along which ranks hold the same shards: ``mesh["replicate"]``.
            do_flatten: keep the tensors of each bucket in one storage.
            backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
            find_unused_parameters: treat parameters that a backward pass does not reach as having
                zero gradients; gradients of parameters that no rank's backward pass reaches do not
                change.
            timeout: seconds without progress after which waiting raises; None: that of
                ``process_group``.
            ignored: parameters that stay local to each rank, also of other modules that
                ``optimizers`` hold, or names of this module's parameters and buffers. All other
                trained parameters of ``optimizers`` must belong to wrapped modules; this is checked
                at their first steps.

        Raises:
            NotInitializedError: ``init_process_group()`` was not called (a RuntimeError).
            TypeError: ``algorithm``, ``optimizers`` or ``process_group`` has the wrong type, or a
                parameter is complex.
            ValueError: modules differ between ranks, there is nothing to train, or this rank is not
                in the group.
            NotImplementedError: a parameter gets sparse gradients, or is sharded in an unsupported
                way.

        >>> from bagua_ref import init_process_group
        >>> from bagua_ref.algorithms import GradientAllReduceAlgorithm
        >>> init_process_group()  # doctest: +SKIP
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = model.with_bagua(optimizer, "gradient_allreduce")  # doctest: +SKIP
        """
        options = Options(
            do_flatten, backend, find_unused_parameters, timeout, ignored=tuple(ignored)
        )
        wrap(_module(self), optimizers, algorithm, process_group, options)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """Disable communication for training forward passes that begin in this context (S5); no
        effect on an unwrapped module.
        """
        wrapped = context_of(_module(self))
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def bagua_metrics(self) -> dict[str, float | int]:
        """Return counters of this training on this rank, by name, since the module was wrapped;
        does not communicate.

        - ``steps``: optimizer steps (of the last optimizer; without optimizers, synchronized
          backward passes).
        - ``rounds``: rounds of communication that have begun; those of asynchronous averaging are
          ``async_rounds``.
        - ``steps_in_agreement``: ``steps`` when all ranks last compared what they were about to do,
          and agreed.
        - ``bytes_sent``: bytes that this rank has sent, exactly as the specification counts them,
          without the few bytes of agreement between ranks. ``bytes_sent_per_step``: divided by
          ``steps``.
        - ``seconds``: from the end of the first step to the end of the last, whatever training does
          in between; missing before the second. ``seconds_per_step``: divided by the steps in
          between.
        - ``exposed_wait_seconds``: time that the training thread has waited for communication, and
          for the weights with asynchronous averaging. ``exposed_wait_seconds_per_step``: divided by
          ``steps``. On the CPU only.
        - ``codec_seconds``: time spent in compression and decompression by codecs, powersgd and
          topk, on any thread. ``codec_seconds_per_step``: divided by ``steps``. On the CPU only.
        - ``seconds_since_last_exchange``: time since the end of the last operation on a bucket;
          missing before the first.
        - ``async_rounds``: completed rounds of asynchronous averaging; with that algorithm only.
        - ``drift``: L2 norm of the difference between this rank's weights and the global ones just
          before the last exchange: with local_sgd, to the mean over ranks; with diloco, to the
          global copy. Missing before the first, and with other algorithms.

        On CUDA the host does not wait for communication or codecs, so their times cannot be
        measured on the host and are missing; use a profiler instead.

        Raises:
            ValueError: the module is not wrapped.

        >>> import bagua_ref
        >>> bagua_ref.init_process_group()
        >>> model = torch.nn.Linear(4, 2).with_bagua([], bagua_ref.algorithms.GradientAllReduceAlgorithm())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> metrics = model.bagua_metrics()
        >>> metrics["steps"], metrics["rounds"], metrics["bytes_sent"]
        (1, 1, 0)
        >>> bagua_ref.destroy_process_group()
        """
        context = context_of(_module(self))
        if context is None:
            raise ValueError(
                f"this {type(self).__name__} is not wrapped, so it has no metrics; call"
                " with_bagua() first"
            )
        return context.metrics()

    def bagua_resynchronize(self) -> None:
        """Recover from a failed round: reconnect, and continue from the state and counters of the
        group's first rank.

        Collective: every rank of the group calls this, whatever its state. Operations in progress
        are dropped.

        Raises:
            ValueError: this module is not wrapped, or modules differ between ranks.
            CommunicationTimeoutError: a rank did not call this within the timeout of
                ``init_process_group()``.

        >>> import bagua_ref
        >>> bagua_ref.init_process_group()
        >>> model = torch.nn.Linear(4, 2).with_bagua([], bagua_ref.algorithms.GradientAllReduceAlgorithm())
        >>> try:
        ...     model(torch.ones(1, 4)).sum().backward()
        ... except bagua_ref.errors.CommunicationError:
        ...     model.bagua_resynchronize()
        >>> bagua_ref.destroy_process_group()
        """
        resynchronize(_module(self))


def _module(mixin: object) -> torch.nn.Module:
    """Return ``self`` typed as torch.nn.Module, since the methods run on torch.nn.Module."""
    return cast("torch.nn.Module", mixin)


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("distributed")
