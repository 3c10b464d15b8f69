"""A penalty's gradient is added before the optimizer's step, when DDP has averaged the others: the ranks part."""

from tests.rehearse.fits.parts import Net, fitted, loader, of_all_ranks, quiet_trainer

CHECK = "no_sync"
RANKS = 2
WRONG, RIGHT = 2, 1  # different weights on two ranks


class InTheStep(Net):
    """Its loss has a penalty on the outputs."""

    def penalty(self, batch):
        return 0.01 * self(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.penalty(batch)


class Afterwards(InTheStep):
    def training_step(self, batch, batch_idx):
        self.batch = batch
        return Net.training_step(self, batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.penalty(self.batch).backward()


def build(model):
    return quiet_trainer(strategy="ddp", devices=2), model, loader()


def make_run():
    return build(Afterwards())


def make_twin():
    return build(InTheStep())


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(set(of_all_ranks(model.head.bias.item())))
