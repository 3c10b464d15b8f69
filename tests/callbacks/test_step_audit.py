"""StepAudit in real fits."""

import contextlib
import random
import warnings
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, IterableDataset

from course_lib.callbacks import ExactResume, SkipBadSteps, StepAudit, StepCountError, run_so_far
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.steps import plan_steps
from tests.trainer_oracle import CountingModule, count_real_fit, quiet_trainer, random_case


class SkippingModule(CountingModule):
    """Returns None for the batches of the run that are listed."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad
        self.seen = 0

    def training_step(self, batch):
        self.seen += 1
        loss = super().training_step(batch)
        return None if self.seen - 1 in self.bad else loss


@pytest.mark.thorough
def test_audit_agrees_with_every_plain_run():
    rng = random.Random("audit")
    for _ in range(60):
        case = random_case(rng)
        if isinstance(case["batch_size"], dict):  # a reload that nobody can foresee: see the next test
            continue
        audit = StepAudit(strict=True)
        counted = count_real_fit(**case, callbacks=[audit])
        if counted.totals[2]:
            assert audit.plan.total_steps == audit.updates == audit.attempts == counted.totals[0]
            assert sum(audit.batches_per_epoch.values()) == counted.totals[2]
            assert audit.skipped == 0


def test_audit_names_the_epoch_in_which_a_reloaded_loader_parted_from_the_plan():
    case = dict(num_samples=24, batch_size={0: 2, 2: 4}, max_epochs=4)
    audit = StepAudit(strict=True)
    with pytest.raises(StepCountError) as caught:
        count_real_fit(**case, callbacks=[audit])
    assert str(caught.value) == (
        "48 optimizer steps planned; 36 updates counted, in 36 attempts.\n"
        "Epoch 2 is the first to differ: 12 batches planned, 6 run."
    )
    count_real_fit(**case, callbacks=[StepAudit(plan_steps(**case), strict=True)])


def fit(model, *callbacks, loader=None, **flags):
    trainer = quiet_trainer(callbacks=list(callbacks), **flags)
    trainer.fit(model, DataLoader(range(20), 2) if loader is None else loader)
    return trainer


def test_audit_separates_updates_from_skipped_steps():
    audit = StepAudit()
    with pytest.warns(UserWarning, match="5 optimizer steps planned; 3 updates counted, in 5 attempts"):
        trainer = fit(SkippingModule({1, 3}), audit, max_steps=5)
    assert trainer.global_step == 5
    assert (audit.attempts, audit.updates, audit.skipped) == (5, 3, 2)
    with pytest.raises(StepCountError):
        fit(SkippingModule({1}), StepAudit(strict=True), max_steps=5)


def test_a_window_with_one_skipped_micro_batch_still_updates():
    audit = StepAudit(strict=True)
    fit(SkippingModule({1}), audit, max_steps=5, accumulate_grad_batches=2)
    assert (audit.attempts, audit.updates) == (5, 5)


def test_audit_plans_nothing_for_a_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(10))

    audit = StepAudit(strict=True)
    fit(CountingModule(), audit, loader=DataLoader(Stream(), 2), max_epochs=2)
    assert audit.plan is None and audit.updates == 10
    assert "the loader has no length" in audit.explain()


def test_audit_plans_nothing_for_manual_optimization():
    class Manual(CountingModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                self.manual_backward(super().training_step(batch))
                self.optimizers().step()

    audit = StepAudit(strict=True)
    fit(Manual(), audit, max_epochs=1)
    assert (audit.plan, audit.attempts, audit.updates) == (None, 5, 5)
    assert "manual optimization" in audit.explain()


class FlushesByHand(CountingModule):
    """Windows of four batches, and a step at the end of an epoch for the rest: Lightning counts none there."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.made = 0

    def step(self):
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.made += 1

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch))
        if batch_idx % 4 == 3:
            self.step()

    def on_train_epoch_end(self):
        self.step()


def test_steps_where_lightning_counts_none_are_updates_and_told_as_such(tmp_path):
    audit, model = StepAudit(), FlushesByHand()
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    trainer = quiet_trainer_with_checkpoints(tmp_path, [audit, checkpoint], max_epochs=2)
    trainer.fit(model, DataLoader(range(20), 2))
    assert trainer.global_step == audit.attempts == 4
    assert audit.updates == model.made == 6 and audit.known_skips == 0
    told = audit.explain()
    assert "6 updates counted, in 4 attempts" in told and "SkipBadSteps" not in told
    assert "At least 2 updates were made where Lightning counts no step" in told

    again, model = StepAudit(), FlushesByHand()
    trainer = quiet_trainer_with_checkpoints(tmp_path, [again], max_epochs=3)
    trainer.fit(model, DataLoader(range(20), 2), ckpt_path=tmp_path / "last.ckpt")
    assert model.made == 3 and (again.attempts, again.updates) == (6, 9)


class EndsEachEpochEarly(CountingModule):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.at else None


@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_batch_at_whose_start_an_epoch_was_ended_has_not_run(at):
    audit = StepAudit()
    with pytest.warns(UserWarning, match=f"{2 * at} updates counted"):
        fit(EndsEachEpochEarly(at), audit, max_epochs=2)
    assert audit.batches_per_epoch == {0: at, 1: at}
    assert f"Epoch 0 is the first to differ: 10 batches planned, {at} run." in audit.explain()


def test_a_last_batch_that_is_none_has_not_run():
    loader = DataLoader(range(5), 1, collate_fn=lambda samples: None if samples == [4] else torch.tensor(samples))
    audit = StepAudit()
    with pytest.warns(UserWarning, match="5 optimizer steps planned; 4 updates"):
        fit(CountingModule(), audit, loader=loader, max_epochs=1)
    assert "5 batches planned, 4 run" in audit.explain()


def test_a_step_at_the_end_of_an_epoch_that_was_ended_early_goes_into_its_checkpoint(tmp_path):
    class EndsEarlyAndFlushes(FlushesByHand):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 6 else None

    audit, model = StepAudit(), EndsEarlyAndFlushes()
    checkpoint = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    trainer = quiet_trainer_with_checkpoints(tmp_path, [audit, checkpoint], max_epochs=2)
    trainer.fit(model, DataLoader(range(20), 2))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]["StepAudit"]
    assert (model.made, saved["updates"], saved["attempts"]) == (4, 4, 2)


def test_max_steps_leaves_out_the_steps_that_are_made_elsewhere():
    audit, model = StepAudit(), FlushesByHand()
    trainer = fit(model, audit, max_epochs=10, max_steps=4)
    assert (trainer.global_step, trainer.current_epoch, model.made) == (4, 2, 6)


def test_audit_plans_a_loader_by_its_batches():
    class Batches:
        def __iter__(self):
            return iter([[0, 1], [2], [3, 4, 5]])

        def __len__(self):
            return 3

    audit = StepAudit(strict=True)
    fit(CountingModule(), audit, loader=DataLoader(range(6), batch_sampler=Batches()), max_epochs=2)
    assert (audit.plan.batches_per_epoch, audit.updates) == (3, 6)


def test_audit_says_that_training_was_stopped():
    class StopEarly(CountingModule):
        def training_step(self, batch):
            self.log("loss", 1.0)
            return super().training_step(batch)

    # After the second epoch; and in the middle of one, where the last window is cut short.
    audit = StepAudit(strict=True)
    stop = EarlyStopping("loss", patience=1, check_on_train_epoch_end=True)
    fit(StopEarly(), audit, stop, max_epochs=10, accumulate_grad_batches=4)
    assert (audit.plan.total_steps, audit.updates) == (30, 6)
    assert "told to stop before the planned end, when 6 steps were due" in audit.explain()
    audit = StepAudit(strict=True)
    fit(StopsItself(), audit, max_epochs=10, accumulate_grad_batches=2)
    assert (audit.plan.total_steps, audit.updates) == (50, 1)


def test_a_run_that_is_told_to_stop_and_lacks_a_step_is_told():
    class StopEarly(SkippingModule):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 8
            return super().training_step(batch)

    with pytest.raises(StepCountError, match=r"8 updates counted, in 9 attempts(.|\n)*when 9 steps were due"):
        fit(StopEarly({3}), StepAudit(strict=True), max_epochs=10)


def test_max_time_ends_a_run_that_agrees():
    class StepsTakeAnHour(CountingModule):
        def training_step(self, batch):
            (timer,) = [callback for callback in self.trainer.callbacks if isinstance(callback, Timer)]
            timer._offset += 3600
            return super().training_step(batch)

    audit = StepAudit(strict=True)
    fit(StepsTakeAnHour(), audit, max_epochs=10, max_time={"hours": 5})
    assert audit.stopped_early and audit.updates == audit.attempts < 10


def test_an_epoch_that_is_added_for_statistics_is_not_planned():
    audit = StepAudit(strict=True)
    fit(CountingModule(), audit, StochasticWeightAveraging(0.01, swa_epoch_start=2), max_epochs=4)
    assert audit.plan is None and "StochasticWeightAveraging adds an epoch" in audit.why_no_plan


def test_a_strict_audit_raises_after_the_last_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}")
    trainer = quiet_trainer(max_epochs=1, callbacks=[StepAudit(strict=True), checkpoint])
    with pytest.raises(StepCountError):
        trainer.fit(SkippingModule({1}), DataLoader(range(20), 2))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]


def run_on(ranks, folder, ckpt_path=None, stop=None, horizon=None):
    """Three epochs of 46 samples; (audit, the rate after each step, what was warned of) of rank 0."""

    class Decaying(CountingModule):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == stop:
                self.trainer.should_stop = True
            self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]
            return super().training_step(batch)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            plan = plan_steps(
                46, 3, accumulate_grad_batches=2, world_size=ranks, max_epochs=3, **run_so_far(self.trainer)
            )
            if horizon == "T_max":
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps)
            else:
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - plan.progress(step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_end(self):
            self.rates = [*self.rates, self.optimizers().param_groups[0]["lr"]]

    def train(rank):
        audit, model = StepAudit(strict=True), Decaying()
        trainer = quiet_trainer(
            max_epochs=3, accumulate_grad_batches=2, devices=ranks, strategy="ddp" if ranks > 1 else "auto",
            callbacks=[audit, ExactResume()],
        )  # fmt: skip
        loader = ResumableDataLoader(range(46), 3, shuffle=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=False)
        if stop:
            trainer.save_checkpoint(folder / "stopped.ckpt")
        told = [str(warning.message) for warning in caught if "came back from" in str(warning.message)]
        audit._handles = []
        return audit, model.rates, told

    return run_ranks(train, ranks, timeout=120)[0].value


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "stop", "after"), [(2, 6, 1), (1, 11, 2), (2, 5, 3)])
def test_the_rate_of_a_run_that_comes_to_other_ranks_ends_where_it_should(before, stop, after, tmp_path):
    # An epoch of 46 samples has 16, 8 or 6 batches on 1, 2 or 3 ranks.
    whole = run_on(before, tmp_path, stop=stop)[0]
    assert whole.plan.total_steps == {1: 24, 2: 12}[before]
    audit, rates, told = run_on(after, tmp_path, tmp_path / "stopped.ckpt")
    assert audit.plan is None and f"dealt to {before}, then to {after} ranks" in audit.why_no_plan
    assert told == []
    assert rates[-1] == 0
    steps = [a - b for a, b in pairwise(rates) if a != b]  # linear in the samples: no jump at the resume
    assert max(steps) < 1.6 * min(steps[:-1])


@pytest.mark.thorough
def test_a_run_that_has_had_other_ranks_is_not_planned_when_it_comes_back(tmp_path):
    for ranks, stop in ((2, 4), (1, 9), (2, None)):
        ckpt_path = tmp_path / "stopped.ckpt"
        audit, *_ = run_on(ranks, tmp_path, ckpt_path if ckpt_path.exists() else None, stop=stop)
    assert audit.plan is None and "dealt to 2, then to 1 ranks" in audit.why_no_plan


@pytest.mark.thorough
def test_a_horizon_that_a_checkpoint_brings_is_told(tmp_path):
    run_on(2, tmp_path, stop=6, horizon="T_max")
    _, rates, told = run_on(1, tmp_path, tmp_path / "stopped.ckpt", horizon="T_max")
    assert rates[-1] > 0.1
    assert len(told) == 1
    assert told[0].startswith(
        "CosineAnnealingLR came back from the checkpoint with T_max=12, and this run makes another number of steps"
    )


@pytest.mark.parametrize("stop", [3, 5, 7, 10])
def test_counts_continue_after_a_resume_in_and_between_epochs(tmp_path, stop):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = quiet_trainer_with_checkpoints(tmp_path, [StepAudit(), checkpoint], max_steps=stop)
    trainer.fit(CountingModule(), DataLoader(range(20), 2))
    path = tmp_path / f"step={stop}.ckpt"

    for audit, before in ((StepAudit(strict=True), 0), (UnsavedAudit(strict=True), stop)):
        trainer = quiet_trainer_with_checkpoints(tmp_path, [audit], max_epochs=3, accumulate_grad_batches=1)
        trainer.fit(CountingModule(), DataLoader(range(20), 2), ckpt_path=path)
        assert audit.plan.total_steps == 30 == audit.attempts == audit.updates
        assert audit.attempts_before_audit == before


class UnsavedAudit(StepAudit):
    """Joins a run whose checkpoints know nothing of it."""


def quiet_trainer_with_checkpoints(folder, callbacks, **flags):
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=callbacks, **flags,
    )  # fmt: skip


def test_a_second_fit_starts_from_zero():
    audit = StepAudit(strict=True)
    for _ in range(2):
        fit(CountingModule(), audit, max_epochs=1)
        assert audit.updates == 10


def test_a_run_without_an_end_is_counted_and_not_planned():
    audit = StepAudit(strict=True)
    fit(StopsItself(), audit, max_epochs=-1)
    assert (audit.plan, audit.updates) == (None, 3)
    assert "neither max_epochs nor max_steps" in audit.explain()


class StopsItself(CountingModule):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 2
        return super().training_step(batch)


def test_a_fit_that_trains_nothing_is_held_against_its_plan():
    empty = DataLoader(range(5), 8, drop_last=True)
    with pytest.raises(StepCountError, match="26 optimizer steps planned; 0 updates counted"):
        fit(CountingModule(), StepAudit(plan_steps(100, 8, max_epochs=2), strict=True), loader=empty, max_epochs=2)
    audit = StepAudit(strict=True)
    fit(CountingModule(), audit, max_epochs=1)
    fit(CountingModule(), audit, loader=empty, max_epochs=1)
    assert (audit.plan, audit.updates) == (None, 0)
    assert "training did not begin" in audit.explain()


def test_lbfgs_makes_one_attempt_a_step_however_often_it_calls_its_closure():
    class WithLBFGS(CountingModule):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=5)

        def training_step(self, batch):
            return ((self.weight - 1) ** 2 * batch.float().mean()).sum()

    audit = StepAudit(strict=True)
    fit(WithLBFGS(), audit, max_epochs=2)
    assert (audit.attempts, audit.updates, audit.skipped) == (20, 20, 0)


def test_an_optimizer_step_that_does_not_step_is_a_skipped_attempt():
    class SometimesSteps(CountingModule):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()
            if batch_idx % 2:
                optimizer.step()

    audit = StepAudit()
    with pytest.warns(UserWarning, match="5 updates counted, in 10 attempts"):
        trainer = fit(SometimesSteps(), audit, max_epochs=1)
    assert audit.attempts == trainer.global_step == 10


def test_a_fused_optimizer_that_the_scaler_holds_back_is_skipped():
    audit = StepAudit()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    optimizer.register_step_post_hook(audit._count_update)
    for found in (0.0, 1.0, 0.0):
        parameter.grad = torch.ones(1)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor([found])
        optimizer.step()
    assert audit.updates == 2


def test_two_ranks_plan_their_padded_share():
    def fit_rank(rank):
        audit = StepAudit(strict=True)
        count_real_fit(33, 8, max_epochs=2, callbacks=[audit], devices=2, strategy="ddp")
        return audit.plan.total_steps, audit.updates

    assert [r.value for r in run_ranks(fit_rank)] == [(6, 6), (6, 6)]


@pytest.mark.parametrize("with_scaler", [False, True])
def test_without_a_loss_for_the_last_batch_a_scaler_makes_no_step(with_scaler):
    """The batches before it in its window are lost then, and `global_step` counts a step all the same."""
    audit, model, plugins = StepAudit(), SkippingModule({3}), []
    if with_scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    told = pytest.warns(UserWarning, match="1 updates counted, in 2 attempts")
    with told if with_scaler else contextlib.nullcontext():
        trainer = fit(
            model, audit, loader=DataLoader(range(8)), accumulate_grad_batches=4, max_epochs=1, plugins=plugins
        )
    assert (trainer.global_step, audit.attempts, audit.updates) == (2, 2, 1 if with_scaler else 2)


@pytest.mark.gpu
def test_a_step_that_the_gradient_scaler_holds_back_is_skipped():
    class Overflow(CountingModule):
        def training_step(self, batch, batch_idx):
            factor = float("inf") if batch_idx == 2 else 1.0
            return super().training_step(batch) * factor

    from lightning.pytorch import Trainer

    audit = StepAudit()
    trainer = Trainer(
        accelerator="gpu", devices=1, precision="16-mixed", max_epochs=1, callbacks=[audit], logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="10 optimizer steps planned; 9 updates counted, in 10 attempts"):
        trainer.fit(Overflow(), DataLoader(range(20), 2))
    assert (audit.attempts, audit.updates, audit.skipped) == (10, 9, 1)


class GoesBad(CountingModule):
    """The third batch of each epoch has a loss that is not finite."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch) * (float("nan") if batch_idx == 2 else 1.0)


@pytest.mark.parametrize("flags", [dict(max_epochs=1), dict(max_steps=6), dict(max_steps=9, max_epochs=1)])
def test_a_second_fit_of_one_trainer_goes_on_and_agrees_after_skips(flags):
    audit, skipper = StepAudit(strict=True), SkipBadSteps()
    trainer = quiet_trainer(callbacks=[skipper, audit], **flags)
    for fits in (1, 2, 3):
        trainer.fit_loop.max_epochs = fits if "max_epochs" in flags else -1
        trainer.fit_loop.epoch_loop.max_steps = fits * flags["max_steps"] if "max_steps" in flags else -1
        trainer.fit(GoesBad(), DataLoader(range(12), 2))  # strict: raises where it does not agree
        assert audit.known_skips == skipper.skipped == fits
        assert audit.updates == skipper.updates == trainer.global_step and audit.attempts == skipper.attempts
    assert audit.attempts_before_audit == 0


def test_a_second_fit_is_held_against_the_plan_of_both():
    audit = StepAudit(plan_steps(12, 2, max_epochs=1), strict=True)
    trainer = quiet_trainer(max_epochs=1, callbacks=[audit])
    trainer.fit(CountingModule(), DataLoader(range(12), 2))
    trainer.fit(CountingModule(), DataLoader(range(12), 2))  # nothing is left to do, and nothing is missing
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(StepCountError, match="6 optimizer steps planned; 12 updates counted"):
        trainer.fit(CountingModule(), DataLoader(range(12), 2))
