"""``ExactAccumulation`` asks for a sum and gets a mean, divided by hand: each update is 8 times too small."""

import torch
from torch import nn

from course_lib.callbacks import ExactAccumulation
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "window"
WRONG, RIGHT = 0.125, 1.0  # an update, as a multiple of the big batch's; every gradient is 1


class Run(Net):
    """One weight, whose gradient is 1 for each sample."""

    def __init__(self, divide):
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(1, 1, bias=False)
        self.divide = divide

    def training_step(self, batch, batch_idx):
        outputs = self.head(torch.ones(len(batch[0]), 1))
        scale = 1 / len(outputs) if self.divide else 1.0
        return (outputs.sum() * scale).clone(), len(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def build(divide):
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=8, callbacks=[ExactAccumulation()])
    return trainer, Run(divide), loader()


def make_run():
    return build(divide=True)


def make_twin():
    return build(divide=False)


def seen(trainer, model, data):
    before = model.head.weight.item()
    fitted(trainer, model, data)
    return round(before - model.head.weight.item(), 4)
