"""Manual optimization calls ``loss.backward()``, not ``manual_backward``: DDP averages nothing, and the ranks part."""

from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, of_all_ranks, quiet_trainer

CHECK = "no_sync"
RANKS = 2
WRONG, RIGHT = 2, 1  # different weights on two ranks


class Run(Net):
    def __init__(self, plain):
        super().__init__()
        self.automatic_optimization = False
        self.plain = plain

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y, _ = batch
        loss = nn.functional.mse_loss(self(x), y)
        optimizer.zero_grad()
        if self.plain:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()


def build(plain):
    return quiet_trainer(strategy="ddp", devices=2), Run(plain), loader()


def make_run():
    return build(plain=True)


def make_twin():
    return build(plain=False)


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(set(of_all_ranks(model.head.bias.item())))
