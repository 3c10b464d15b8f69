"""Two ranks, the Trainer's own sampler, and a one-cycle rate whose horizon is planned for two."""

from torch.optim.lr_scheduler import OneCycleLR

from course_lib.steps import plan_steps
from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer


def make_run():
    steps = plan_steps(64, 8, world_size=2, max_epochs=3).total_steps
    # torch counts the state before the first update as a step
    model = Scheduled(lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=steps + 1))
    return quiet_trainer(strategy="ddp", devices=2), model, loader()
