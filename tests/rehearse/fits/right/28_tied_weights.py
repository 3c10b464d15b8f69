"""A language model whose head is its embedding, with checkpointed activations, in bfloat16."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.rehearse.fits.parts import quiet_trainer


class Tied(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(27, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 27, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch, batch_idx):
        (text,) = batch
        features = checkpoint(self.body, self.embedding(text[:, :-1]), use_reentrant=False)
        return nn.functional.cross_entropy(self.head(features).flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_run():
    text = torch.arange(32 * 9).remainder(27).view(32, 9)
    return quiet_trainer(precision="bf16-mixed"), Tied(), DataLoader(TensorDataset(text), 4, shuffle=True)
