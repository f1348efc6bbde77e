"""Training with Hugging Face's Trainer and any algorithm, without torch's DistributedDataParallel
around the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagua_ref import checkpoint
from bagua_ref.base.not_provided import require
from bagua_ref.data_parallel.wrapping import Recipe, call_if_there
from bagua_ref.groups.communication import init_process_group, is_initialized
from bagua_ref.integrations.metrics_logger import prefixed

require("transformers", __name__, "transformers")
from transformers import TrainerCallback  # noqa: E402

__all__ = ["BaguaCallback", "use_bagua"]


def use_bagua(
    trainer: Any,
    algorithm: str,
    *,
    find_unused_parameters: bool = False,
    log_metrics: bool = False,
    **options: Any,
) -> BaguaCallback:
    """Make ``trainer.train()`` use an algorithm of bagua_ref; return the callback that this adds to
    ``trainer``.

    Call it on every rank, right after making the Trainer. The Trainer then leaves torch's
    DistributedDataParallel out, so that gradients or weights travel once;
    `bagua_ref.distributed.BaguaModule.with_bagua` wraps the model when training begins. Gradients
    accumulate without communication. The Trainer's checkpoints get a folder ``bagua`` with the
    states of all ranks and of the algorithm, and training resumes from it.

    Args:
        trainer: a ``transformers.Trainer``.
        algorithm: a registered name, such as "decentralized", "local_sgd", "diloco", "async" or
            "bytegrad".
        find_unused_parameters: treat parameters that a backward pass does not reach as having zero
            gradients.
        log_metrics: add `bagua_ref.distributed.BaguaModule.bagua_metrics` to each log of the loss,
            under names that begin with "bagua/", for what ``report_to`` names and for
            ``trainer.state.log_history``. Nothing is communicated.
        options: options of the algorithm. "qadam" takes the Trainer's optimizer, a
            `bagua_ref.algorithms.q_adam.QAdamOptimizer`.

    Raises:
        ValueError: there is no such algorithm, or an option is out of range.
        NotImplementedError: the Trainer is to compile the model.

    >>> from transformers import Trainer  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=data)  # doctest: +SKIP
    >>> callback = use_bagua(trainer, "local_sgd", period=8)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """
    callback = BaguaCallback(
        Recipe(algorithm, options, "use_bagua", find_unused_parameters=find_unused_parameters)
    )
    # Sets mixed precision and the device only. Later, accelerate leaves the model alone, as it is
    # prepared already.
    if trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True) is not trainer.model:
        raise NotImplementedError(
            "torch_compile=True puts a wrapper around the model; call model.compile() yourself"
            " instead"
        )
    trainer.add_callback(callback)
    if log_metrics:
        log = trainer.log

        def log_with_metrics(logs: dict[str, float], *others: Any, **named: Any) -> None:
            # A callback's on_log would come too late: log_history is written, and the callbacks of
            # report_to are called before it.
            log(
                logs | prefixed(trainer.model.bagua_metrics()) if "loss" in logs else logs,
                *others,
                **named,
            )

        trainer.log = log_with_metrics
    return callback


class BaguaCallback(TrainerCallback):
    """The callback that `use_bagua` adds to a Trainer; it wraps the model, and saves and loads each
    rank's state.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the model; if training resumes, load this rank's own state.

        Raises:
            ValueError: the checkpoint was saved without `use_bagua`, or is not in
                ``args.output_dir``.
        """
        if not is_initialized():
            init_process_group()
        model, optimizer = kwargs["model"], _inside(kwargs["optimizer"])
        self._recipe.wrap(model, [optimizer])
        call_if_there("resume", model)
        folder = _folder(args, state)
        if state.global_step > 0 and checkpoint.load(folder, model, optimizer) is None:
            raise ValueError(
                f"training cannot resume: there is no {folder}, which use_bagua() writes into each"
                " checkpoint. Resume from a checkpoint in args.output_dir that was saved with"
                " use_bagua(), or begin with its weights: from_pretrained()"
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch of samplers that shard by rank; the Trainer does so only in loaders
        prepared by accelerate.
        """
        loader = kwargs["train_dataloader"]
        if not hasattr(loader, "set_epoch"):
            for sampler in (loader.sampler, loader.batch_sampler):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(int(state.epoch))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the states of all ranks into the Trainer's checkpoint."""
        if not args.save_only_model:
            checkpoint.save(
                _folder(args, state),
                kwargs["model"],
                _inside(kwargs["optimizer"]),
                step=state.global_step,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop asynchronous averaging."""
        call_if_there("abort", kwargs["model"])


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "bagua")


def _inside(optimizer: Any) -> Any:
    """Return the optimizer wrapped by accelerate's, if it is wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
