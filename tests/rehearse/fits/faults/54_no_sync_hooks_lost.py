"""A layer is replaced when DDP has put its hooks on the old one: the new one's gradients stay on their rank."""

from torch import nn

from tests.rehearse.fits.parts import Net, fitted, loader, of_all_ranks, quiet_trainer

CHECK = "no_sync"
RANKS = 2
WRONG, RIGHT = 2, 1  # different weights on two ranks


class Early(Net):
    """Its head is replaced before DDP is there, and the optimizer holds the new one."""

    def replace_head(self):
        self.head = nn.utils.skip_init(nn.Linear, 8, 1)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)

    def setup(self, stage):
        self.replace_head()


class Late(Early):
    def setup(self, stage):
        pass

    def on_train_start(self):
        self.head.requires_grad_(False)
        self.replace_head()
        self.optimizers().param_groups[0]["params"] = list(self.parameters())


def build(model):
    return quiet_trainer(strategy="ddp_find_unused_parameters_true", devices=2), model, loader()


def make_run():
    return build(Late())


def make_twin():
    return build(Early())


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(set(of_all_ranks(model.head.bias.item())))
