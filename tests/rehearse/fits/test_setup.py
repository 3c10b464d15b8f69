"""A rehearsal's setup: what a fit refuses is said before it."""

import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset

from course_lib.callbacks import ExactAccumulation
from rehearse import CHECKS, NotReady, Rehearsal, rehearse
from rehearse.__main__ import judged
from tests import effort
from tests.callbacks import test_together as together
from tests.rehearse.fits.parts import Net, loader, quiet_trainer

PAIRS = [*together.REFUSED, *together.PAIRS[:: effort.cases(quick=24, thorough=1)]]
ONLY_SETUP = [name for name in CHECKS if name != "setup"]


@pytest.mark.thorough
def test_a_loss_that_a_callback_refuses():
    report = rehearse(quiet_trainer(callbacks=[ExactAccumulation()]), Net(), loader())
    [finding] = report.findings
    assert finding.check == "setup" and "training_step must return (loss_sum, count)" in finding.says
    assert set(report.not_judged) == set(ONLY_SETUP) and not report.passed


@pytest.mark.thorough
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_an_unused_layer_is_a_fault_only_where_ddp_waits_for_it(strategy, held):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.auxiliary = nn.Linear(8, 3)

        def configure_optimizers(self):
            parameters = self.named_parameters()
            return SGD([p for name, p in parameters if held or "auxiliary" not in name], lr=0.1)

    report = rehearse(quiet_trainer(strategy=strategy, devices=2), Unused(), loader(), skip=ONLY_SETUP)
    told = [f.says for f in report.findings] if strategy == "ddp" else report.notes
    says = "not used by the forward" if held and strategy != "ddp" else "o gradient reaches"
    assert any("auxiliary.weight, auxiliary.bias" in one and says in one for one in told), str(report)
    assert report.ok == (strategy != "ddp")


@pytest.mark.thorough
def test_an_error_of_the_models_own_is_no_finding():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("no such column")

    report = rehearse(quiet_trainer(), Fails(), loader())
    assert report.ok is None and report.not_judged["setup"].startswith("ValueError: no such column (test_setup.py")


class Given(Exception):
    """What a fit was given."""


def given_to_fit(one, other, monkeypatch):
    """The run of two pieces that go together or do not."""

    def fit(trainer, module, datamodule=None):
        raise Given(trainer, module, datamodule)

    callbacks = [name for name in (one, other) if name in together.CALLBACKS]
    data = next((name for name in (one, other) if name in together.DATA), "ResumableDataLoader")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", fit)
        with pytest.raises(Given) as given:
            together.run(callbacks, data, other if other in together.FLAGS else "no flag")
    return given.value.args


@pytest.mark.thorough
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_is_refused_is_said_before_the_fit(one, other, monkeypatch):
    # The runs end where they end, average the means of short windows as a Trainer does, and validate what they train.
    beside = ["horizon", "length", "dealing", "window", "growth", "resume"]
    report = rehearse(*given_to_fit(one, other, monkeypatch), skip=beside)
    if (one, other) in together.REFUSED:
        [finding] = report.findings
        assert finding.check == "setup" and together.REFUSED[one, other] in finding.says
    else:
        assert report.ok and not any("Error" in why for why in report.not_judged.values()), str(report)


class Validates(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


@pytest.mark.thorough
def test_what_a_validation_logs_whose_data_is_given_to_the_fit_is_not_known():
    checkpoint = ModelCheckpoint(monitor="val_loss")
    report = rehearse(quiet_trainer(enable_checkpointing=True, callbacks=[checkpoint]), Validates(), loader())
    assert report.ok and any("whether 'val_loss' is logged was not tried" in note for note in report.notes)


def validating(monitor, **flags):
    return quiet_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(monitor=monitor)], **flags)


@pytest.mark.thorough
def test_what_a_validation_logs_whose_loader_is_given_as_to_the_fit():
    report = rehearse(validating("val_loss"), Validates(), loader(), loader(16, shuffle=False))
    assert report.ok and not any("not tried" in note for note in report.notes), str(report)
    [finding] = rehearse(validating("valloss"), Validates(), loader(), loader(16, shuffle=False)).findings
    assert finding.check == "setup" and "'valloss'" in finding.says


@pytest.mark.thorough
def test_a_validation_that_is_given_and_holds_what_is_trained():
    whole = loader().dataset
    training, held = (DataLoader(Subset(whole, part), 8) for part in (range(48), range(40, 64)))
    [finding] = rehearse(validating("val_loss"), Validates(), training, held, skip={"order"}).findings
    assert finding.check == "dealing" and finding.says.startswith("8 of the 24 samples of the validation are trained")


@pytest.mark.thorough
def test_the_callback_tries_the_validation_that_the_fit_is_given(tmp_path):
    def fit(monitor):
        trainer = validating(monitor, default_root_dir=tmp_path)
        trainer.callbacks.append(Rehearsal(skip=[*ONLY_SETUP]))
        trainer.fit(Validates(), loader(), loader(16, shuffle=False))
        return trainer

    assert fit("val_loss").global_step == 3 * 8
    with pytest.raises(NotReady, match="valloss"):
        fit("valloss")


def test_a_data_module_has_its_own_validation():
    with pytest.raises(ValueError, match="val_dataloaders are given beside LightningDataModule, which has its own"):
        rehearse(quiet_trainer(), Validates(), LightningDataModule(), loader())


@pytest.mark.parametrize(("run", "got"), [((1, 2, 3, 4, 5), "5 values"), (quiet_trainer(max_epochs=1), "Trainer")])
def test_what_a_make_run_returns_that_is_no_run(run, got):
    with pytest.raises(ValueError, match=rf"make_run must return \(trainer, model\), .* it returned {got}"):
        judged(run, {})
