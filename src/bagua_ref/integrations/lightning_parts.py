"""Parts shared by the strategies for Lightning and Fabric and for both packages that provide
these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.data_parallel.wrapping import Recipe, call_if_there, context_of
from bagua_ref.groups.communication import init_process_group, is_initialized
from bagua_ref.integrations.metrics_logger import prefixed

__all__ = ["FabricPart", "MonitorPart", "TrainerPart"]

Base: Any = object
_KEY = "bagua"
"""The entry of a checkpoint that holds the algorithm's state."""


class CalledModule(torch.nn.Module):
    """A wrapper for trainers to call: the user's module itself may be called several times in a
    step.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module."""
        return self.module(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        # Trainers switch the mode of the user's module only.
        if name == "training" and "module" in self._modules:
            return self.module.training
        return super().__getattribute__(name)


class _Part(Base):
    """Mixin for the DDPStrategy of either package: arguments, wrapping, and file names of
    checkpoints.
    """

    model: Any

    def __init__(
        self,
        algorithm: str = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        precision: Any = None,
        find_unused_parameters: bool = False,
        **bagua_kwargs: Any,
    ) -> None:
        self._recipe = Recipe(
            algorithm,
            bagua_kwargs,
            type(self).__name__,
            do_flatten=flatten,
            find_unused_parameters=find_unused_parameters,
        )
        # the Trainer's name for it, and Fabric's
        numbers = precision_plugin if precision is None else precision
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, numbers)
        self._wrapped: list[torch.nn.Module] = []
        self._backward_sync_control = self  # Fabric asks it for `no_backward_sync`

    def setup_environment(self) -> None:
        """Initialize the process groups, torch's first."""
        super().setup_environment()
        if not is_initialized():
            timeout = None if self._timeout is None else self._timeout.total_seconds()
            init_process_group(local_world_size=self.num_processes, timeout=timeout)

    def _own(self, path: Any) -> str:
        """Return the path of this rank's own file beside the checkpoint ``path``."""
        return f"{os.path.realpath(path)}.rank{self.global_rank}"

    def _readable(self, path: Any) -> Any:
        """Return the file from which to load the checkpoint ``path``: this rank's own, if it
        exists.
        """
        return self._own(path) if self.global_rank and os.path.exists(self._own(path)) else path


@contextmanager
def _suspended(contexts: Sequence[ModuleTraining]) -> Iterator[None]:
    """Suspend background communication, so that weights do not change meanwhile; collective."""
    resume = [context.bagua_algorithm.suspend() for context in contexts]
    try:
        yield
    finally:
        for function in resume:
            function()


def _has_own_state(context: ModuleTraining) -> bool:
    """Return whether weights or the algorithm's state differ between ranks."""
    return not context.bagua_algorithm.traits.same_replicas or bool(
        context.bagua_algorithm.rank_state
    )


def _state_of(context: ModuleTraining) -> dict[str, Any]:
    """Return the algorithm's entry of a checkpoint."""
    algorithm, ranks = context.bagua_algorithm, context.given_group.ranks
    saved = {"algorithm": type(algorithm).__name__, "state": algorithm.state_dict()}
    if _has_own_state(context):
        saved["of"] = f"rank {ranks.index(context.world.identity.rank)} of {len(ranks)}"
    return saved


def _restore(context: ModuleTraining, saved: Mapping[str, Any]) -> None:
    """Restore the result of `_state_of`, after the states of model and optimizers have been loaded;
    collective.

    Raises:
        ValueError: the state is of another algorithm, or of another rank; raised on every rank.
    """
    now, error = _state_of(context), ""
    if saved["algorithm"] != now["algorithm"]:
        error = (
            f"the checkpoint was saved with {saved['algorithm']}, but this training uses"
            f" {now['algorithm']}"
        )
    elif saved.get("of", "") != now.get("of", ""):
        error = (
            f"{now.get('of')} found the state of {saved.get('of')}. With {saved['algorithm']} each"
            " rank has a state of its own: resume with as many ranks as have saved, and with the"
            " files that end in .rank1, .rank2, ... beside the checkpoint"
        )
    comm = context.given_group.get_global_communicator()
    errors = (
        [comm.broadcast_object(error, rank) for rank in range(comm.nranks())]
        if comm.nranks() > 1
        else [error]
    )
    if any(errors):
        raise ValueError(next(filter(None, errors)))
    context.bagua_algorithm.load_state_dict(saved["state"])
    context.note_load()


class TrainerPart(_Part):
    """The methods of ``BaguaStrategy`` that differ from those of Lightning's DDPStrategy."""

    @property
    def _context(self) -> ModuleTraining | None:
        return None if self.model is None else context_of(self.model)

    def configure_ddp(self) -> None:
        """Do nothing: `setup` wraps the module, because wrapping needs the optimizers, which are
        created later.
        """

    def setup(self, trainer: Any) -> None:
        """Wrap the module, after Lightning's own setup."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self.model = CalledModule(self.model)
            self._recipe.wrap(self.model, self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with self.model.no_sync():
            yield

    def on_train_start(self) -> None:
        """Start asynchronous averaging, also when resuming from a checkpoint saved at the end of
        training.
        """
        super().on_train_start()
        call_if_there("resume", self.model)

    def on_train_end(self) -> None:
        """Stop asynchronous averaging."""
        call_if_there("abort", self.model)
        super().on_train_end()

    def teardown(self) -> None:
        """Remove the hooks and close their connections; the process groups stay initialized, as
        with DDPStrategy.
        """
        context = self._context
        if context is not None:
            context.close()
            self.model = self.model.module
        super().teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: wrapping broadcasts the first rank's state, so each rank's own state must be
        loaded later.
        """
        return True

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save also the algorithm's state, and a checkpoint per rank if ranks differ."""
        context = self._context if "optimizer_states" in checkpoint else None
        with _suspended([] if context is None else [context]):
            if context is not None:
                checkpoint[_KEY] = _state_of(context)
                if self.global_rank and _has_own_state(context):
                    self.checkpoint_io.save_checkpoint(
                        checkpoint, self._own(filepath), storage_options=storage_options
                    )
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove every rank's file of a checkpoint."""
        own = self._own(filepath)
        super().remove_checkpoint(filepath)
        if self.global_rank and os.path.exists(own):
            self.checkpoint_io.remove_checkpoint(own)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load this rank's own checkpoint to continue training, otherwise the first rank's."""
        path = checkpoint_path if self._context is None else self._readable(checkpoint_path)
        return super().load_checkpoint(path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load also the algorithm's state, if a BaguaStrategy has saved one; otherwise start from
        the loaded weights.
        """
        super().load_optimizer_state_dict(checkpoint)
        context = self._context
        if context is not None and _KEY in checkpoint:
            _restore(context, checkpoint[_KEY])
        elif context is not None:
            self._recipe.wrap(self.model, self.optimizers)


class MonitorPart(Base):
    """The methods of ``BaguaMonitor``."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise ValueError if the Trainer does not use a BaguaStrategy, which counts
        communication.
        """
        if stage == "fit" and not isinstance(trainer.strategy, TrainerPart):
            raise ValueError(
                "BaguaMonitor logs what a BaguaStrategy counts, but this Trainer's strategy is"
                f" {type(trainer.strategy).__name__}; call Trainer(strategy=BaguaStrategy(...)), or"
                " leave BaguaMonitor out"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log this rank's metrics, if the Trainer logs this step."""
        # as Lightning's own callbacks ask; each log() takes time
        if not trainer._logger_connector.should_update_logs:
            return
        metrics = prefixed(trainer.strategy.model.bagua_metrics())
        # Lightning rounds numbers to float32, which has too few digits for bytes; it keeps a
        # tensor's dtype.
        tensors = {
            name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()
        }
        # not used for a mean; without it, some modules cannot log
        pl_module.log_dict(tensors, batch_size=1)


class FabricPart(_Part):
    """The methods of ``FabricBaguaStrategy`` that differ from those of Fabric's DDPStrategy."""

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module without trainable parameters unchanged.

        Raises:
            ValueError: the module has trainable parameters.
        """
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                "a module is trained together with its optimizers: call fabric.setup(module,"
                " optimizer)"
            )
        return module

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: Any = None,
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Wrap the module; return the wrapper, which Fabric calls."""
        called = CalledModule(module)
        self._recipe.wrap(called, optimizers)
        self._wrapped.append(called)
        return called, optimizers, scheduler

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without communication."""
        context = context_of(module)
        return context.no_sync() if enabled and context is not None else nullcontext()

    def abort(self) -> None:
        """Stop asynchronous averaging, at the end of training; collective. Other algorithms do not
        need this.
        """
        for module in self._wrapped:
            call_if_there("abort", module)

    def resume(self) -> None:
        """Restart asynchronous averaging after `abort`."""
        for module in self._wrapped:
            call_if_there("resume", module)

    def get_module_state_dict(self, module: torch.nn.Module) -> Any:
        """Return the state of the user's module."""
        return super().get_module_state_dict(
            module.module if isinstance(module, CalledModule) else module
        )

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: Any, strict: bool = True
    ) -> None:
        """Load the state of the user's module."""
        inside = module.module if isinstance(module, CalledModule) else module
        super().load_module_state_dict(module=inside, state_dict=state_dict, strict=strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save also the algorithms' states, and a checkpoint per rank if ranks differ."""
        contexts = _contexts(state)
        with _suspended(list(contexts.values())):
            state = {
                **state,
                _KEY: {name: _state_of(context) for name, context in contexts.items()},
            }
            if self.global_rank and any(map(_has_own_state, contexts.values())):
                own = self._convert_stateful_objects_in_state(state, filter=filter or {})
                self.checkpoint_io.save_checkpoint(
                    checkpoint=own, path=self._own(path), storage_options=storage_options
                )
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Load this rank's own checkpoint, and the algorithms' states if a FabricBaguaStrategy has
        saved them.
        """
        contexts = _contexts(state) if isinstance(state, dict) else {}
        remainder: dict[str, Any] = super().load_checkpoint(
            self._readable(path) if contexts else path, state, strict, **kwargs
        )
        if not contexts:
            return remainder
        saved = remainder.pop(_KEY, {})
        for name, context in contexts.items():
            if name in saved:
                _restore(context, saved[name])
            else:  # begin with the weights that were loaded
                self._recipe.wrap(context.module, context.bagua_optimizers)
        return remainder

    def teardown(self) -> None:
        """Remove the hooks and close their connections."""
        for module in self._wrapped:
            context = context_of(module)
            if context is not None:
                context.close()
        self._wrapped.clear()
        super().teardown()


def _contexts(state: Mapping[str, Any]) -> dict[str, ModuleTraining]:
    """Return the training contexts of the wrapped modules in ``state``, by name."""
    found = {
        name: context_of(entry)
        for name, entry in state.items()
        if isinstance(entry, torch.nn.Module)
    }
    return {name: context for name, context in found.items() if context is not None}
