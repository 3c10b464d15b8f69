"""A ``detach`` that was left in keeps the gradient from the body, so only the head trains."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
WRONG, RIGHT = True, False  # whether the body is as it was


class Run(Net):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        return self.head(self.keep(self.body(x)))


def make_run():
    return quiet_trainer(), Run(lambda features: features.detach()), loader()


def make_twin():
    return quiet_trainer(), Run(lambda features: features), loader()


def seen(trainer, model, data):
    before = model.body[0].weight.clone()
    fitted(trainer, model, data)
    return model.body[0].weight.equal(before)
