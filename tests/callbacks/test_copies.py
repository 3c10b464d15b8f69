"""A module that is copied or pickled in the middle of a fit is an ordinary module, without what a callback replaced."""

import copy
import io
import pickle

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from course_lib.callbacks import ExactAccumulation, SkipBadSteps
from course_lib.callbacks._replaced_methods import replace_methods
from tests.trainer_oracle import quiet_trainer

CALLBACKS = {
    "ExactAccumulation": [ExactAccumulation],
    "SkipBadSteps": [SkipBadSteps],
    "both": [ExactAccumulation, SkipBadSteps],
}


class Module(LightningModule):
    def __init__(self, sums):
        super().__init__()
        self.layer, self.sums = nn.Linear(1, 1), sums

    def training_step(self, batch):
        loss = self.layer(batch.float()[:, None]).sum()
        return (loss, len(batch)) if self.sums else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module, callbacks):
    quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks).fit(module, DataLoader(range(8), 2))


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


class KeepsACopy(Callback):
    """Made by the second micro-batch."""

    def __init__(self, make):
        self.make, self.copy = make, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.copy = self.make(pl_module)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kinds", CALLBACKS.values(), ids=CALLBACKS)
def test_a_copy_that_is_made_within_a_fit_trains_without_its_callbacks(kinds, way):
    callbacks, keeps = [kind() for kind in kinds], KeepsACopy(COPIES[way])
    module, plain = Module(sums=ExactAccumulation in kinds), Module(sums=False)
    fit(module, [*callbacks, keeps])
    made = keeps.copy
    assert vars(made).keys() == vars(module).keys()  # the fit is over: nothing is replaced in the module any more
    assert not {"training_step", "backward", "__reduce_ex__"} & vars(module).keys()
    made.sums = False  # which ExactAccumulation would refuse
    plain.load_state_dict(made.state_dict())
    for one in (made, plain):
        fit(one, [])
    assert all(map(torch.equal, made.parameters(), plain.parameters()))
    assert not any(map(torch.equal, made.parameters(), module.parameters()))
    assert [callback.attempts for callback in callbacks if isinstance(callback, SkipBadSteps)] in ([], [2])


def own_step(batch):
    raise AssertionError("it is only copied")


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_copy_keeps_what_the_module_itself_has(way, order):
    module = Module(sums=True)
    module.training_step = own_step
    put_back = [replace_methods(module, training_step=lambda batch: None), replace_methods(module, log=lambda: None)]
    for number in order:
        made = COPIES[way](module)
        assert vars(made)["training_step"] is own_step and not {"log", "__reduce_ex__"} & vars(made).keys()
        put_back[number]()
    assert vars(module)["training_step"] is own_step and not {"log", "__reduce_ex__"} & vars(module).keys()
