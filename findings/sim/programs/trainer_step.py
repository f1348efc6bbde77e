"""A step of transformers' Trainer, for ``bagua-ref same``; as a script, saves a batch for it."""

import torch
import transformers
from torch.utils.data import DataLoader


def step(parts):
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_layer=1,
        n_embd=16,
        n_head=2,
        n_positions=16,
        resid_pdrop=0,
        attn_pdrop=0,
        embd_pdrop=0,
    )
    n = len(parts[0]["labels"])
    rows = [{key: value[i] for key, value in part.items()} for part in parts for i in range(n)]

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(rows, batch_size=n)

    options = transformers.TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=n,
        gradient_accumulation_steps=len(parts),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(model=transformers.GPT2LMHeadModel(config), args=options)
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    ids = torch.arange(64).view(8, 8) * 7 % 32
    torch.save({"input_ids": ids, "labels": ids}, "batch.pt")
