"""Two steps of Lightning's Trainer with DDP."""

import lightning
import torch


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


lightning.seed_everything(0)
loader = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=2)
lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Module(), loader)
