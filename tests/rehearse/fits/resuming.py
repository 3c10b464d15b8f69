"""A run that is killed and resumed, held against the same run that was not."""

import copy
import tempfile

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.rehearse.fits.parts import Net, Record, fitted


class Validated(Net):
    """A Net with a validation."""

    def __init__(self, validation):
        super().__init__()
        self.validation = validation

    def val_dataloader(self):
        return self.validation

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val", torch.nn.functional.mse_loss(self(x), y))


class Killed(BaseException):
    """Nothing of the run comes after it."""


class Dies(Callback):
    """Kills the run at the start of its n-th batch."""

    def __init__(self, batches):
        self.left = batches

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.left -= 1
        if self.left == 0:
            raise Killed


def killed_and_resumed(trainer, model, data, *, at: int):
    """A copy of the run, killed in its ``at``-th batch and resumed from its last checkpoint.

    Returns both halves' samples of the epoch in which it was killed that reached the resumed weights, and the resumed
    ``(trainer, model)``.
    """
    first, second = copy.deepcopy((trainer, model, data)), copy.deepcopy((trainer, model, data))
    with tempfile.TemporaryDirectory() as folder:
        for one in (first, second):
            one[0].checkpoint_callback.dirpath = folder
        record = Record()
        first[0].callbacks += [Dies(at), record]
        try:
            first[0].fit(*first[1:])
        except Killed:
            last = first[0].checkpoint_callback.best_model_path or first[0].checkpoint_callback.last_model_path
            batches = torch.load(last, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            trained = record.samples[-1][: 8 * batches["current"]["processed"]]
        resumed = Record()
        second[0].callbacks.append(resumed)
        second[0].fit(second[1], second[2], ckpt_path=last)
    return trained + resumed.samples[0], second[0], second[1]


def resumes_exactly(trainer, model, data, *, at: int) -> bool:
    """Whether the run that was killed ends with the weights of the run that was not."""
    _, _, resumed = killed_and_resumed(trainer, model, data, at=at)
    with tempfile.TemporaryDirectory() as folder:
        trainer.checkpoint_callback.dirpath = folder
        fitted(trainer, model, data)
    weights = zip(model.parameters(), resumed.parameters(), strict=True)
    return all(torch.allclose(one, other, rtol=0, atol=1e-7) for one, other in weights)


def saves(**options) -> ModelCheckpoint:
    """A checkpoint callback that writes into a folder of the temporary ones."""
    return ModelCheckpoint(dirpath=f"{tempfile.gettempdir()}/checkpoints-of-a-planted-fault", **options)
