"""Two steps of transformers' Trainer."""

import torch
import transformers
from torch.utils.data import Dataset


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(8) * (index + 1)) % 32
        return {"input_ids": ids, "labels": ids}


transformers.set_seed(0)
config = transformers.GPT2Config(vocab_size=32, n_layer=1, n_embd=16, n_head=2, n_positions=16)
options = transformers.TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, max_steps=2, report_to=[], save_strategy="no"
)
model = transformers.GPT2LMHeadModel(config)
transformers.Trainer(model=model, args=options, train_dataset=Rows()).train()
