"""The head is replaced after the optimizer was made, which holds the old one, so the new one never trains."""

from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = True, False  # whether the head is as it was made


class Early(Net):
    """Replaces its head before ``configure_optimizers``."""

    def replace_head(self):
        self.head = nn.Linear(8, 1)
        self.made = self.head.weight.detach().clone()

    def setup(self, stage):
        self.replace_head()


class Late(Early):
    """Replaces its head after ``configure_optimizers``."""

    def setup(self, stage):
        pass

    def on_train_start(self):
        self.replace_head()


def make_run():
    return quiet_trainer(), Late(), loader()


def make_twin():
    return quiet_trainer(), Early(), loader()


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return model.head.weight.equal(model.made)
