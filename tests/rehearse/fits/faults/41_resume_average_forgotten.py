"""A callback averages the weights and has no ``state_dict``: after a resume the average starts again from nothing."""

import copy

import torch
from lightning.pytorch import Callback

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer
from tests.rehearse.fits.resuming import killed_and_resumed, saves

CHECK = "resume"
WRONG, RIGHT = False, True  # whether the resumed run has the average of the one that was not stopped


class Average(Callback):
    """The mean of the head's bias over all updates."""

    def __init__(self):
        self.mean, self.updates = torch.zeros(1), 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.updates += 1
        self.mean = self.mean + (pl_module.head.bias.detach() - self.mean) / self.updates


class Saved(Average):
    def state_dict(self):
        return {"mean": self.mean, "updates": self.updates}

    def load_state_dict(self, state):
        self.mean, self.updates = state["mean"], state["updates"]


def build(average):
    trainer = quiet_trainer(callbacks=[average, saves()], enable_checkpointing=True)
    return trainer, Net(), loader(shuffle=False)


def make_run():
    return build(Average())


def make_twin():
    return build(Saved())


def seen(trainer, model, data):
    _, resumed, _ = killed_and_resumed(trainer, model, data, at=12)
    trainer.checkpoint_callback.dirpath = resumed.checkpoint_callback.dirpath
    trainer = copy.copy(trainer)
    trainer.callbacks = [trainer.callbacks[0]]
    fitted(trainer, model, data)
    return torch.allclose(resumed.callbacks[0].mean, trainer.callbacks[0].mean)
