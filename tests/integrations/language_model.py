"""A tiny randomly initialized GPT-2, token sequences, and a training by hand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from tests.integrations.trainings import ALGORITHMS, STEPS, optimizer_of, weights_of
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import bagua_ref
from bagua_ref.algorithms import Algorithm

BATCH, TOKENS, LENGTH = 2, 32, 8


def language_model(rank: int) -> GPT2LMHeadModel:
    """Return a model of a few thousand parameters that begins differently on every rank."""
    torch.manual_seed(rank)
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(
            **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
        )
    )


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return samples; with batches of `BATCH`, two ranks take every second batch."""
    ids = torch.randint(0, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def batches(rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return the first ``count`` batches of a rank of two."""
    samples = sequences(2 * BATCH * count)
    starts = [BATCH * (2 * number + rank) for number in range(count)]
    return [torch.utils.data.default_collate(samples[start : start + BATCH]) for start in starts]


def by_hand(rank: int, name: str, accumulate: int = 1, *, hook: bool = False) -> torch.Tensor:
    """Return the weights after a training without a trainer: with the algorithm, or in torch's DDP
    with its hook.
    """
    module = model = language_model(rank)
    optimizer = optimizer_of(name, model)
    if hook:
        module = DistributedDataParallel(model)
        module.register_comm_hook(*bagua_ref.ddp_comm_hook(name, **ALGORITHMS[name]))
    else:
        options = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
        model.with_bagua([optimizer], Algorithm.init(name, **ALGORITHMS[name], **options))
    for number, batch in enumerate(batches(rank, STEPS * accumulate)):
        last = number % accumulate == accumulate - 1
        with nullcontext() if last else module.no_sync():
            (module(**batch).loss / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)
