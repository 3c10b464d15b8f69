"""A Lightning script: a plan of four windows an epoch, a validation, and a test at its end."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

EPOCHS, WINDOW = 3, 2


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("held_out", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    train = DataLoader(Subset(data, range(64)), batch_size=8, shuffle=True)
    held_out = DataLoader(Subset(data, range(64, 96)), batch_size=8)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=EPOCHS, accumulate_grad_batches=WINDOW, **options)
    trainer.fit(Net(), train, held_out)
