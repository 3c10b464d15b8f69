"""The pieces of chapters 04 to 08 at once: BatchNorm, dropout, clipping, a cosine, a bad sample, skips, an audit."""

from torch.utils.data import DataLoader, TensorDataset

from course_lib.callbacks import ExactAccumulation, SkipBadSteps, StepAudit
from course_lib.resume import ResumableDataLoader
from tests.callbacks.whole_run import Everything, Samples
from tests.rehearse.fits.parts import quiet_trainer


class Run(Everything):
    """With a validation of its own, and without the list of what it has seen."""

    def __init__(self, steps, held_out):
        super().__init__(steps)
        self.held_out = held_out
        del self.samples

    def training_step(self, batch):
        x, y, _ = batch
        loss_sum = self.net(x).log_softmax(1).gather(1, y[:, None]).sum().neg()
        return loss_sum, len(y)

    def val_dataloader(self):
        return self.held_out


def make_run():
    samples = Samples(48)
    data = ResumableDataLoader(samples, batch_size=3, shuffle=True, seed=3)
    held_out = DataLoader(TensorDataset(samples.x[20:30], samples.y[20:30]), 4)
    trainer = quiet_trainer(
        accumulate_grad_batches=4,
        gradient_clip_val=0.7,
        callbacks=[ExactAccumulation(), SkipBadSteps(), StepAudit()],
    )
    return trainer, Run(12, held_out), data
