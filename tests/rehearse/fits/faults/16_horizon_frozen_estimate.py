"""``estimated_stepping_batches`` takes the first epoch's window for all: 24 for 12 updates; the rate ends at 50 %."""

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR

from course_lib.steps import plan_steps
from tests.rehearse.fits.parts import Scheduled, fitted, loader, quiet_trainer

CHECK = "horizon"
WRONG, RIGHT = 50, 0  # the rate at the end, in % of its peak
WINDOWS = {0: 1, 1: 4}


def build(horizon):
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, horizon(model.trainer)))
    return quiet_trainer(callbacks=[GradientAccumulationScheduler(dict(WINDOWS))]), model, loader()


def make_run():
    return build(lambda trainer: trainer.estimated_stepping_batches)


def make_twin():
    return build(lambda trainer: plan_steps(64, 8, accumulate_grad_batches=WINDOWS, max_epochs=3).total_steps)


def seen(*run):
    return fitted(*run).final_percent
