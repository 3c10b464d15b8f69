"""SizeScheduleDataModule in real fits: planned is counted, and every way of changing the size gives one run."""

import random

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from course_lib.accumulation import accumulate
from course_lib.callbacks import (
    ExactAccumulation,
    ExactResume,
    SizeScheduleDataModule,
    SkipBadSteps,
    StepAudit,
    StepCountError,
)
from course_lib.launch import RankError, run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.schedules import ScheduledBatchSampler, SizedDataset, SizeSchedule
from tests import effort
from tests.trainer_oracle import CountingModule, quiet_trainer

STEPWISE = SizeSchedule({0: (16, 16), 16: (32, 8), 32: (64, 4)}, unit="samples")
EPOCHWISE = SizeSchedule({0: (16, 16), 1: (32, 8), 2: (64, 4)})


def pair(sample, size):
    return torch.tensor([sample, size])


class KeepingModule(CountingModule):
    """Keeps (epoch, [(sample, size), …]) of every batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch):
        self.seen.append((self.trainer.current_epoch, [tuple(each) for each in batch.tolist()]))
        return super().training_step(batch[:, 0])

    def on_save_checkpoint(self, checkpoint):
        # A checkpoint within a window goes back to the window's start.
        micro_batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        checkpoint["seen"] = self.seen[:micro_batches]

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


class SavesAlways(Checkpoint):
    """Saves after every batch, under its number in the run, and after every epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{len(pl_module.seen)}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{len(pl_module.seen)}-end.ckpt")


def fit(schedule, n=48, *, model=None, ckpt_path=None, callbacks=(), **flags):
    model = model or KeepingModule()
    data = SizeScheduleDataModule(range(n), schedule, pair)
    trainer = quiet_trainer(callbacks=[*callbacks, ExactResume()], **flags)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model, data


def random_run(rng):
    unit, n = rng.choice(["epochs", "epochs", "samples", "optimizer_steps"]), rng.randint(24, 60)
    latest = {"epochs": 4, "samples": 3 * n, "optimizer_steps": 30}[unit]
    starts = [0, *sorted(rng.sample(range(1, latest), rng.randint(0, 2)))]
    effective = rng.choice([None, 12]) if unit == "epochs" else None
    schedule = SizeSchedule(
        [(start, 2**i, rng.choice([1, 2, 3, 4, 6, 12])) for i, start in enumerate(starts)],
        unit=unit,
        effective_batch_size=effective,
        accumulate_grad_batches=1 if effective else rng.choice([1, 1, 2, 3]),
    )
    flags = dict(
        n=n,
        max_epochs=rng.choice([1, 2, 3, 4, None]),
        max_steps=rng.choice([-1, 3, 17]),
        limit_train_batches=rng.choice([1.0, 1.0, 2, 0.5]),
    )
    if flags["max_epochs"] is None and flags["max_steps"] == -1:
        flags["max_epochs"] = 3
    return schedule, flags


@pytest.mark.thorough
def test_planned_updates_are_those_counted_in_real_fits():
    rng = random.Random("size schedules")
    units = set()
    for _ in range(effort.cases(12, 110)):
        schedule, flags = random_run(rng)
        units.add(schedule.unit)
        audit = StepAudit(strict=True)
        model, _ = fit(schedule, callbacks=[audit], **flags)
        assert audit.plan.total_steps == audit.updates == audit.attempts == len(model.samples_per_step)
        assert sum(audit.batches_per_epoch.values()) == audit.plan.micro_batches == len(model.seen)
        assert [window.per_rank_samples for window in audit.plan.windows] == model.samples_per_step
    assert len(units) == 3


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("schedule", [STEPWISE, EPOCHWISE])
def test_a_run_that_is_stopped_anywhere_goes_on_with_the_next_batch(schedule, tmp_path):
    whole, _ = fit(schedule, max_epochs=3, callbacks=[StepAudit(strict=True), SavesAlways(tmp_path)])
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == len(whole.seen) + 3
    for path in paths:
        resumed, _ = fit(schedule, max_epochs=3, ckpt_path=path, callbacks=[StepAudit(strict=True)])
        assert resumed.seen == whole.seen, path.name
        assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:training had moved waiting:UserWarning")  # what CountingModule counts with
def test_random_runs_go_on_with_the_next_batch(tmp_path):
    rng = random.Random("resumed schedules")
    for case in range(12):
        schedule, flags = random_run(rng)
        folder = tmp_path / f"{case}"
        whole, _ = fit(schedule, callbacks=[SavesAlways(folder)], **flags)
        # Ahead of its first window's end, of 12 batches at most, a run has no point to go on from.
        paths = [path for path in sorted(folder.glob("*.ckpt")) if "-end" in path.stem or int(path.stem) >= 12]
        for path in rng.sample(paths, min(2, len(paths))):
            resumed, _ = fit(schedule, ckpt_path=path, **flags)
            assert resumed.seen == whole.seen, (schedule, flags, path.name)


def test_windows_by_epoch_hold_the_effective_batch_also_after_a_resume_within_an_epoch(tmp_path):
    schedule = SizeSchedule({0: (16, 16), 1: (32, 8), 2: (64, 4)}, effective_batch_size=16)
    whole, _ = fit(schedule, max_epochs=3, callbacks=[StepAudit(strict=True), SavesAlways(tmp_path)])
    assert whole.samples_per_step == [16] * 9
    resumed, _ = fit(schedule, max_epochs=3, ckpt_path=tmp_path / "7.ckpt")  # 3 windows of 1, then 2 of 2
    assert resumed.samples_per_step == [16] * 4  # a Trainer's own callback would go on with windows of 1
    assert resumed.seen == whole.seen and torch.equal(resumed.weight, whole.weight)


def test_the_trainer_gets_its_flags_back():
    trainer = quiet_trainer(max_epochs=3)
    data = SizeScheduleDataModule(range(48), EPOCHWISE, pair)
    trainer.fit(KeepingModule(), datamodule=data)
    assert (trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches) == (0, 1)

    class Fails(KeepingModule):
        def training_step(self, batch):
            raise RuntimeError("out of luck")

    trainer = quiet_trainer(max_epochs=3)
    held = SizeSchedule({0: (16, 8), 1: (32, 4)}, effective_batch_size=16)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(Fails(), datamodule=SizeScheduleDataModule(range(48), held, pair))
    assert (trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches) == (0, 1)


def pair_and_worker(sample, size):
    return torch.tensor([sample, size, torch.utils.data.get_worker_info().seed])


def test_workers_that_persist_get_every_size():
    class Where(KeepingModule):
        def training_step(self, batch):
            self.workers = getattr(self, "workers", set()) | set(batch[:, 2].tolist())
            return super().training_step(batch[:, :2])

    model = Where()
    data = SizeScheduleDataModule(range(48), STEPWISE, pair_and_worker, num_workers=1, persistent_workers=True)
    quiet_trainer(max_epochs=2, callbacks=[StepAudit(strict=True)]).fit(model, datamodule=data)
    sizes = [[{size for _, size in batch} for e, batch in model.seen if e == epoch] for epoch in range(2)]
    assert sizes == [[{16}] + [{32}] * 2 + [{64}] * 4, [{64}] * 12]
    assert len(model.workers) == 1  # the seed of one worker, drawn once


def test_validation_and_the_length_of_each_epoch_follow():
    class Validated(KeepingModule):
        validated_after = ()

        def on_validation_start(self):
            self.validated_after += (len(self.seen),)

        def validation_step(self, batch):
            pass

        def on_train_epoch_start(self):
            self.lengths = [*getattr(self, "lengths", []), self.trainer.num_training_batches]

    class WithValidation(SizeScheduleDataModule):
        def val_dataloader(self):
            return DataLoader(range(4))

    model = Validated()
    trainer = quiet_trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=[StepAudit(strict=True)])
    trainer.fit(model, datamodule=WithValidation(range(48), EPOCHWISE, pair))
    assert model.lengths == [3, 6, 12] and model.validated_after == (3, 9, 21)


def test_the_audit_finds_a_trainer_that_counts_the_first_epoch_alone():
    dataset = SizedDataset(range(48), pair)
    loader = ResumableDataLoader(dataset, batch_sampler=ScheduledBatchSampler(48, EPOCHWISE))
    with pytest.raises(StepCountError, match="Epoch 1 is the first to differ: 6 batches planned, 3 run"):
        quiet_trainer(max_epochs=3, callbacks=[StepAudit(strict=True)]).fit(KeepingModule(), loader)


def test_the_learning_rate_follows_the_plan_of_the_whole_run():
    class Follows(KeepingModule):
        def configure_optimizers(self):
            plan = self.trainer.datamodule.plan()
            self.total_steps, self.estimated = plan.total_steps, self.trainer.estimated_stepping_batches
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.lr_factor("linear"))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch):
            self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]
            return super().training_step(batch)

    model, _ = fit(EPOCHWISE, max_epochs=3, model=Follows())
    assert (model.total_steps, model.estimated) == (21, 9)
    assert model.rates == [0.4] * 3 + [0.2] * 6 + [0.1] * 12


# ------------------------------------------------------------------------------------------------- four ways, one run


class Images(nn.Module):
    """Any side: two convolutions and a mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )
        self.seen = []

    def loss(self, batch):
        images, labels = batch
        self.seen.append((labels.tolist(), tuple(images.shape)))
        return nn.functional.cross_entropy(self.layers(images), labels % 2)


class OfImages(KeepingModule):
    def __init__(self):
        super().__init__()
        del self.weight
        self.images = Images()

    def training_step(self, batch):
        return self.images.loss(batch)

    def configure_optimizers(self):
        return sgd(self.images)


def sgd(images):
    return torch.optim.SGD(images.parameters(), lr=0.1, momentum=0.9)


def draw(sample, size):
    generator = torch.Generator().manual_seed(sample)
    image = torch.rand(1, 1, 8, 8, generator=generator)
    return nn.functional.interpolate(image, size=(size, size))[0], sample


@pytest.mark.thorough
def test_four_ways_give_one_run():
    n, epochs = 50, 4
    stages = {0: (8, 16), 1: (12, 7), 3: (16, 4)}
    schedule = SizeSchedule(stages)

    reloaded, stepwise, staged = OfImages(), OfImages(), OfImages()

    def new_loader():
        sampler = ScheduledBatchSampler(n, schedule, seed=5)
        sampler.set_epoch(reloaded.current_epoch)
        return DataLoader(SizedDataset(range(n), draw), batch_sampler=sampler)

    reloaded.train_dataloader = new_loader
    quiet_trainer(max_epochs=epochs, reload_dataloaders_every_n_epochs=1).fit(reloaded)

    by_samples = SizeSchedule({start * n: of_start for start, of_start in stages.items()}, unit="samples")
    data = SizeScheduleDataModule(range(n), by_samples, draw, seed=5)
    quiet_trainer(max_epochs=epochs).fit(stepwise, datamodule=data)

    momentum = None
    trainer = quiet_trainer(max_epochs=0)
    for end, (size, batch_size) in zip([1, 3, 4], stages.values(), strict=True):
        sampler = ScheduledBatchSampler(n, SizeSchedule({0: (size, batch_size)}), seed=5)
        staged.configure_optimizers = lambda state=momentum: optimizer_with(staged.images, state)
        trainer.fit_loop.max_epochs = end
        trainer.fit(staged, DataLoader(SizedDataset(range(n), draw), batch_sampler=sampler))
        momentum = trainer.optimizers[0].state_dict()

    fabric = Fabric(accelerator="cpu", devices=1)
    images = Images()
    model, optimizer = fabric.setup(images, sgd(images))
    model.mark_forward_method("loss")
    sampler = ScheduledBatchSampler(n, schedule, seed=5)
    loader = fabric.setup_dataloaders(ResumableDataLoader(SizedDataset(range(n), draw), batch_sampler=sampler))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model.loss(batch))
            optimizer.step()

    assert [shape[:1] + shape[2:3] for _, shape in images.seen[:4]] == [(16, 8)] * 3 + [(2, 8)]
    for other in (reloaded, stepwise, staged):
        assert other.images.seen == images.seen
        for ours, theirs in zip(other.images.parameters(), images.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def optimizer_with(images, state):
    optimizer = sgd(images)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def test_an_own_loop_accumulates_where_windows_change_within_an_epoch():
    schedule = SizeSchedule({0: (8, 8), 20: (12, 4)}, unit="samples", effective_batch_size=8)
    with pytest.raises(ValueError, match=r"changes within an epoch.*window_sizes\(\)"):
        fit(schedule, max_epochs=1)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    sampler = ScheduledBatchSampler(40, schedule)
    batches = iter(DataLoader(SizedDataset(range(40), pair), batch_sampler=sampler))
    held = [
        accumulate(
            model,
            [next(batches) for _ in range(k)],
            loss_sum_fn=lambda model, batch: model(batch[:, :1].float()).sum(),
            count_fn=len,
        ).count
        for k in sampler.window_sizes()
    ]
    assert sampler.window_sizes() == [1, 1, 1, 2, 2] and held == [8] * 5


# ------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("unit", ["samples", "epochs"])
def test_two_ranks_have_one_size_a_step_and_the_updates_that_were_planned(unit):
    # 50 samples: the ranks' batches differ by one in some step, which ExactAccumulation weighs.
    if unit == "samples":
        schedule = SizeSchedule({0: (16, 8), 70: (32, 3)}, unit="samples", accumulate_grad_batches=2)
    else:
        schedule = SizeSchedule({0: (16, 8), 1: (32, 4)}, effective_batch_size=16)

    class SumsUp(KeepingModule):
        def training_step(self, batch):
            super().training_step(batch)
            return (self.weight * batch[:, 0].float()).sum(), len(batch)

    def train(rank):
        audit = StepAudit(strict=True)
        model, _ = fit(
            schedule, 50, model=SumsUp(), callbacks=[ExactAccumulation(), audit], max_epochs=2, devices=2,
            strategy="ddp",
        )  # fmt: skip
        return model.seen, audit.updates, audit.plan.total_steps, model.weight.item()

    (seen, updates, planned, weight), other = (result.value for result in run_ranks(train, timeout=120))
    assert updates == planned == other[1] and weight == other[3]
    for (epoch, batch), (other_epoch, of_other) in zip(seen, other[0], strict=True):
        assert epoch == other_epoch and len({size for _, size in batch + of_other}) == 1
    for epoch in range(2):
        samples = [sample for e, batch in seen + other[0] if e == epoch for sample, _ in batch]
        assert sorted(samples) == list(range(50))


@pytest.mark.thorough
def test_a_run_goes_on_with_other_ranks_within_an_epoch(tmp_path):
    schedule = SizeSchedule({0: (16, 4), 15: (32, 2)}, unit="optimizer_steps")

    def train(rank):
        model, _ = fit(schedule, max_epochs=1, callbacks=[SavesAlways(tmp_path)], devices=2, strategy="ddp")
        return model.seen

    before = [result.value[:4] for result in run_ranks(train, timeout=120)]
    alone, _ = fit(schedule, max_epochs=2, ckpt_path=tmp_path / "4.ckpt")
    first = [sample for epoch, batch in [*before[0], *before[1], *alone.seen[4:]] if epoch == 0 for sample, _ in batch]
    assert sorted(first) == list(range(48))
    assert [batch[0][1] for epoch, batch in alone.seen if epoch == 1] == [16] * 7 + [32] * 10


@pytest.mark.thorough
def test_what_was_counted_goes_on_from_an_epochs_end_on_other_ranks(tmp_path):
    # 18 updates in 3 epochs on one rank, so the size is 16; two ranks alone would have counted fewer.
    schedule = SizeSchedule({0: (8, 8), 10: (16, 2)}, unit="optimizer_steps")
    alone, _ = fit(schedule, 32, max_epochs=3, callbacks=[SavesAlways(tmp_path)])
    (end,) = tmp_path.glob(f"{len(alone.seen)}-end.ckpt")

    def train(rank):
        model, _ = fit(schedule, 32, max_epochs=4, ckpt_path=end, devices=2, strategy="ddp")
        return [batch[0][1] for epoch, batch in model.seen if epoch == 3]

    for result in run_ranks(train, timeout=120):
        assert result.value == [16] * 8


@pytest.mark.thorough
def test_a_run_goes_on_within_an_epoch_on_more_ranks(tmp_path):
    schedule = SizeSchedule({0: (16, 2)}, accumulate_grad_batches=4)
    fit(schedule, 32, max_epochs=1, callbacks=[SavesAlways(tmp_path)])

    def train(rank):
        model, _ = fit(schedule, 32, max_epochs=1, ckpt_path=tmp_path / "4.ckpt", devices=2, strategy="ddp")
        return [sample for _, batch in model.seen[4:] for sample, _ in batch]

    first, second = (result.value for result in run_ranks(train, timeout=120))
    before, _ = fit(schedule, 32, max_epochs=1)
    begun = [sample for _, batch in before.seen[:4] for sample, _ in batch]
    assert sorted(begun + first + second) == list(range(32))


# ------------------------------------------------------------------------------------------------- refusals


def test_flags_that_do_not_go_together_are_refused():
    with pytest.raises(MisconfigurationException, match=r"an update takes: 1. Leave accumulate_grad_batches \(got 4\)"):
        fit(EPOCHWISE, max_epochs=1, accumulate_grad_batches=4)
    with pytest.raises(MisconfigurationException, match="GradientAccumulationScheduler out of"):
        fit(EPOCHWISE, max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(ValueError, match="render says how a sample comes at a size"):
        SizeScheduleDataModule(range(48), STEPWISE)
    with pytest.raises(RuntimeError, match="plan\\(\\) asks a Trainer"):
        SizeScheduleDataModule(SizedDataset(range(48), pair), STEPWISE).plan()
    with pytest.raises(ValueError, match="effective_batch_size=24 is no multiple of the 16"):
        SizeSchedule({0: (8, 16)}, effective_batch_size=24)


def test_a_resume_with_another_schedule_is_refused(tmp_path):
    fit(STEPWISE, max_epochs=1, callbacks=[SavesAlways(tmp_path)])
    other = SizeSchedule({0: (16, 16), 16: (32, 4)}, unit="samples")
    with pytest.raises(ValueError, match="the state was taken with schedule="):
        fit(other, max_epochs=1, ckpt_path=tmp_path / "4.ckpt")


@pytest.mark.parametrize(("loaders", "batches"), [(None, 0), (DataLoader(range(6), 2), 9)])
def test_validation_data_go_beside_the_schedule(loaders, batches):
    class Validates(KeepingModule):
        validated = 0

        def validation_step(self, batch):
            self.validated += 1

    model = Validates()
    data = SizeScheduleDataModule(range(48), EPOCHWISE, pair, val_dataloaders=loaders)
    quiet_trainer(max_epochs=3, num_sanity_val_steps=0).fit(model, datamodule=data)
    assert model.validated == batches


def test_a_setup_without_super_is_refused():
    class Forgets(SizeScheduleDataModule):
        def setup(self, stage):
            pass

    def train(rank):
        quiet_trainer(max_epochs=3).fit(KeepingModule(), datamodule=Forgets(range(100), EPOCHWISE, pair))

    # In a process of its own: where train_dataloader() raises, Lightning leaves torch's DataLoader patched.
    with pytest.raises(RankError, match=r"setup\(\) of Forgets does not call super"):
        run_ranks(train, 1)


class Faulty(KeepingModule):
    """The gradient of the batches of the run that are listed is NaN; keeps (batch size, learning rate)."""

    def __init__(self, bad, factor):
        super().__init__()
        self.bad, self.factor, self.pairs = bad, factor, []

    def training_step(self, batch):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.pairs.append((len(batch), rate))
        loss = super().training_step(batch)
        return loss * float("nan") if len(self.pairs) - 1 in self.bad else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=16.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor(self.trainer.datamodule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_the_rate_follows_the_batch_also_after_skips():
    # Batches of 16, 8 and 4; the last batch before each change is bad, so that the schedule is not stepped there.
    def fit_faulty(bad, factor):
        model = Faulty(bad, factor)
        data = SizeScheduleDataModule(range(48), EPOCHWISE, pair)
        quiet_trainer(max_epochs=3, callbacks=[SkipBadSteps()]).fit(model, datamodule=data)
        return model.pairs

    pairs = fit_faulty({1, 2, 8}, lambda data: data.lr_factor("linear"))
    assert [size for size, _ in pairs] == [16] * 3 + [8] * 6 + [4] * 12
    assert all(size == rate for size, rate in pairs)
    with pytest.raises(MisconfigurationException, match="goes by updates, and sizes and batches go by attempts"):
        fit_faulty(set(), lambda data: data.plan().lr_factor("linear"))


def test_a_new_trainer_for_each_stage_that_takes_the_last_ones_checkpoint_goes_on_with_one_run(tmp_path):
    whole, _ = fit(EPOCHWISE, max_epochs=3)
    model, checkpoint = KeepingModule(), None
    for epoch, stage in enumerate([(16, 16), (32, 8), (64, 4)]):
        trainer = quiet_trainer(callbacks=[ExactResume()], max_epochs=epoch + 1)
        sampler = ScheduledBatchSampler(48, SizeSchedule({0: stage}))
        loader = DataLoader(SizedDataset(range(48), pair), batch_sampler=sampler)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        checkpoint = tmp_path / f"{epoch}.ckpt"
        trainer.save_checkpoint(checkpoint)
    assert model.seen == whole.seen
    assert (trainer.current_epoch, trainer.global_step) == (3, 21)
