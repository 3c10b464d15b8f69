"""The running total of the losses is added up with its graph, so it holds that of every step so far."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "growth"
WRONG, RIGHT = 24, 0  # additions that the total's graph goes back


class Run(Net):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.total = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total = self.total + self.keep(loss)
        return loss


def make_run():
    return quiet_trainer(), Run(lambda loss: loss), loader()


def make_twin():
    return quiet_trainer(), Run(lambda loss: loss.item()), loader()


def seen(trainer, model, data):
    fitted(trainer, model, data)
    node, additions = getattr(model.total, "grad_fn", None), 0
    while node is not None and node.name() == "AddBackward0":
        node, additions = node.next_functions[0][0], additions + 1
    return additions
