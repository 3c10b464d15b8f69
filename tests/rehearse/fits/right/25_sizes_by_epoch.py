"""The loader is asked for in each epoch and decides its batch size there; the cosine's horizon knows all sizes."""

from torch.optim.lr_scheduler import CosineAnnealingLR

from course_lib.steps import plan_steps
from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer

SIZES = {0: 16, 1: 8, 2: 4}


class Run(Scheduled):
    def train_dataloader(self):
        return loader(batch_size=SIZES[self.trainer.current_epoch])


def make_run():
    steps = plan_steps(64, SIZES, max_epochs=3).total_steps
    model = Run(lambda optimizer: CosineAnnealingLR(optimizer, steps))
    return quiet_trainer(reload_dataloaders_every_n_epochs=1), model, None
