"""A layer is never used in the forward, and DDP waits for its gradient: the second batch raises."""

from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "setup"
RANKS = 2
WRONG, RIGHT = "raises", 12  # updates


class Run(Net):
    def __init__(self, auxiliary):
        super().__init__()
        self.auxiliary = auxiliary


def build(auxiliary):
    return quiet_trainer(strategy="ddp", devices=2), Run(auxiliary), loader()


def make_run():
    return build(nn.Linear(8, 3))


def make_twin():
    return build(None)


def seen(*run):
    try:
        return fitted(*run).updates
    except RuntimeError as error:
        return "raises" if "not used in producing the loss" in str(error) else str(error)
