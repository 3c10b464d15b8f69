"""Lightning's language model, on words of this book, with dropout and clipping."""

import torch
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch.utils.data import DataLoader, TensorDataset

from tests.rehearse.fits.parts import quiet_trainer


class Small(LightningTransformer):
    def __init__(self):
        super().__init__(vocab_size=27)
        self.model = Transformer(vocab_size=27, ninp=16, nhead=2, nhid=16)

    def prepare_data(self):
        """Nothing is downloaded."""


def make_run():
    text = torch.arange(32 * 9).remainder(27).view(32, 9)
    data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), 4, shuffle=True)
    return quiet_trainer(gradient_clip_val=0.25), Small(), data
