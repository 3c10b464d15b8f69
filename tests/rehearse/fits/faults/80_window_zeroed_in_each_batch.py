"""Four micro-batches are meant to make an update, and each begins with zero_grad: the update is that of the last."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "window"
WRONG, RIGHT = 6, 24  # micro-batches whose gradients reach a step


class Run(Net):
    def __init__(self, each):
        super().__init__()
        self.automatic_optimization = False
        self.each, self.waiting, self.reached = each, 0, 0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if self.each or batch_idx % 4 == 0:
            optimizer.zero_grad()
            self.waiting = 0
        self.manual_backward(super().training_step(batch, batch_idx) / 4)
        self.waiting += 1
        if batch_idx % 4 == 3:
            optimizer.step()
            self.reached += self.waiting


def make_run():
    return quiet_trainer(), Run(each=True), loader()


def make_twin():
    return quiet_trainer(), Run(each=False), loader()


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return model.reached
