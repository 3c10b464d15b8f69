"""What ExactResume refuses, each by one sentence and before a batch is trained; and what it leaves alone."""

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from course_lib.callbacks import CheckpointError, ExactAccumulation, ExactResume, SkipBadSteps, StepAudit
from course_lib.resume import ResumableDataLoader
from rehearse import Rehearsal
from tests.callbacks.whole_run import Killed, same, state_of
from tests.trainer_oracle import quiet_trainer

SAMPLES = torch.arange(36.0).view(12, 3) / 36


class Small(LightningModule):
    def __init__(self, plateau=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.plateau, self.batches = torch.nn.Linear(3, 1), plateau, 0

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch):
        self.log("val", self.net(batch).square().mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches += 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.plateau is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val", **self.plateau}}


class Saves(Checkpoint):
    """Behind each batch, under its number."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{batch_idx}.ckpt")


def loader(**arguments):
    return ResumableDataLoader(SAMPLES, 2, shuffle=True, seed=1, **arguments)


def fit(*callbacks, module=None, data=None, ckpt_path=None, trainer=None, **flags):
    module = module or Small()
    trainer = trainer or quiet_trainer(max_epochs=2, callbacks=[*callbacks], **flags)
    trainer.fit(module, data or loader(), DataLoader(SAMPLES, 4), ckpt_path=ckpt_path, weights_only=False)
    return trainer


TOLD = pytest.mark.filterwarnings("ignore:training had moved batches")


@pytest.mark.parametrize(
    ("callbacks", "plateau", "sentence"),
    [
        ([WeightAveraging(), EMAWeightAveraging()], None, "WeightAveraging and EMAWeightAveraging in one run"),
        ([], {"interval": "step"}, 'a ReduceLROnPlateau with interval="step"'),
    ],
)
def test_a_run_whose_checkpoints_would_not_hold_it_is_refused(callbacks, plateau, sentence):
    module = Small(plateau)
    with pytest.raises(MisconfigurationException, match=sentence):
        fit(*callbacks, ExactResume(), module=module)
    assert module.batches == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    fit(ExactResume(), Saves(folder))
    return folder


@TOLD
@pytest.mark.parametrize(
    ("place", "arguments", "sentence"),
    [
        ("0-2", dict(callbacks=[EarlyStopping("loss")]), "goes by loss, a mean over all of the epoch's batches"),
        ("0-2", dict(accumulate_grad_batches=2), "after 3 batches, in windows of 1: with accumulate_grad_batches=2"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused_or_warned_of(place, arguments, sentence, saved):
    arguments = dict(arguments)
    callbacks, module = arguments.pop("callbacks", []), Small()
    with pytest.raises(CheckpointError, match=sentence):
        fit(ExactResume(), *callbacks, module=module, ckpt_path=saved / f"{place}.ckpt", **arguments)
    assert module.batches == 0
    with pytest.warns(UserWarning, match=sentence):
        fit(ExactResume(strict=False), *callbacks, ckpt_path=saved / f"{place}.ckpt", **arguments)


@TOLD
def test_an_order_by_a_generator_of_its_own_is_refused_at_an_epochs_end_as_well(tmp_path):
    def of_its_own():
        return DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(1)))

    fit(ExactResume(), Saves(tmp_path), data=of_its_own())
    with pytest.raises(CheckpointError, match="from a generator of its own, or from a sampler without a state"):
        fit(ExactResume(), data=of_its_own(), ckpt_path=tmp_path / "0-5.ckpt")


class CountsItsBatches(DataLoader):
    """Has a state as torchdata's: how many batches it gave, and of a sampler of torch's no more."""

    def state_dict(self):
        return {"given": 1}

    def load_state_dict(self, state):
        pass


@TOLD
def test_an_order_that_a_sampler_drew_is_refused_within_an_epoch(saved, tmp_path):
    drawn = CountsItsBatches(SAMPLES, 2, sampler=WeightedRandomSampler([1.0] * 12, 12))
    with pytest.raises(CheckpointError, match="knows how many batches it gave, and not the order that its sampler"):
        fit(ExactResume(), data=drawn, ckpt_path=saved / "1-1.ckpt")
    fit(ExactResume(), Saves(tmp_path), data=CountsItsBatches(SAMPLES, 2), ckpt_path=saved / "1-1.ckpt")


@TOLD
def test_an_epochs_mean_may_decide_where_a_run_goes_on_at_an_epochs_end(saved, tmp_path):
    whole = fit(ExactResume(), ModelCheckpoint(tmp_path, monitor="loss", save_top_k=-1, filename="{epoch}"))
    again = fit(ExactResume(), EarlyStopping("loss"), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(state_of(whole.lightning_module), state_of(again.lightning_module))


def test_a_checkpoint_of_another_version_is_refused_with_it(saved, tmp_path):
    checkpoint = torch.load(saved / "0-2.ckpt", weights_only=False)
    checkpoint["callbacks"]["ExactResume"] = {"seed": 0, "within_update": False}
    torch.save(checkpoint, tmp_path / "on_exception.ckpt")
    before = (tmp_path / "on_exception.ckpt").read_bytes()
    with pytest.raises(CheckpointError, match="of version 1 of ExactResume, and this is version 3"):
        fit(ExactResume(), OnExceptionCheckpoint(tmp_path), ckpt_path=tmp_path / "on_exception.ckpt")
    assert (tmp_path / "on_exception.ckpt").read_bytes() == before
    with pytest.warns(UserWarning, match="of version 1 of ExactResume, and this is version 3"):
        fit(ExactResume(strict=False), ckpt_path=tmp_path / "on_exception.ckpt")


@TOLD
def test_a_trainer_that_has_trained_before_is_refused(saved):
    trainer = fit(ExactResume())
    with pytest.raises(CheckpointError, match="this Trainer has trained before"):
        fit(trainer=trainer, ckpt_path=saved / "0-2.ckpt")


def test_attributes_that_training_moves_are_named_at_a_resume(saved):
    with pytest.warns(UserWarning, match="training had moved batches, which no checkpoint holds"):
        fit(ExactResume(), ckpt_path=saved / "0-2.ckpt")


@TOLD
def test_an_exception_in_a_validation_saves_the_trained_weights_and_not_the_average(tmp_path):
    class Raises(Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch and not trainer.sanity_checking:
                raise Killed

    whole = fit(ExactResume(), EMAWeightAveraging(decay=0.9))
    with pytest.raises(Killed):
        fit(EMAWeightAveraging(decay=0.9), ExactResume(), Raises(), OnExceptionCheckpoint(tmp_path))
    again = fit(ExactResume(), EMAWeightAveraging(decay=0.9), ckpt_path=tmp_path / "on_exception.ckpt")
    assert same(state_of(whole.lightning_module), state_of(again.lightning_module))


HOOKS = [name for name in dir(Callback) if name.startswith("on_")]


def test_none_of_a_readers_hooks_is_called_beyond_what_lightning_calls(tmp_path):
    def called(*callbacks):
        seen = []
        kind = type("Reader", (Callback,), {name: lambda self, *_, name=name: seen.append(name) for name in HOOKS})
        hooks = {"on_save_checkpoint": lambda self, checkpoint: seen.append("the module's")}
        module = type("Module", (Small,), hooks)()
        fit(kind(), *callbacks, ModelCheckpoint(tmp_path), module=module, val_check_interval=3)
        return seen

    assert called(ExactResume()) == called()


def test_the_hooks_are_the_callbacks_own_again_behind_a_fit(tmp_path):
    saver, averaging = ModelCheckpoint(tmp_path), WeightAveraging()
    before = [set(vars(one)) for one in (saver, averaging)]
    trainer = fit(ExactResume(), saver, averaging)
    own = {"on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_validation_epoch_start"}
    assert all(
        set(vars(one)) - them <= set(vars(one)) - own for one, them in zip((saver, averaging), before, strict=True)
    )
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)
    assert "on_train_batch_end" not in vars(trainer.lightning_module)


class OfTheOther(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("callback", [ExactResume, ExactAccumulation, SkipBadSteps, StepAudit, Rehearsal])
def test_the_trainer_of_the_other_package_is_refused(callback):
    assert not issubclass(pytorch_lightning.Trainer, Trainer)
    flags = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = pytorch_lightning.Trainer(callbacks=[callback()], accelerator="cpu", max_epochs=1, **flags)
    with pytest.raises(MisconfigurationException, match=r"import lightning\.pytorch as pl in place of"):
        trainer.fit(OfTheOther(), loader())
