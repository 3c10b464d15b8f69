"""SkipBadSteps in real fits, held against fits that never had the bad batches."""

import math
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from course_lib.callbacks import ExactAccumulation, SkipBadSteps, StepAudit
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.skipping import TooManySkips, read_journal
from tests.test_skipping import state_of
from tests.trainer_oracle import quiet_trainer

NAN, INF = math.nan, math.inf


class Module(LightningModule):
    """A batch is two integers; where its first is one of ``faults``, that fault happens."""

    def __init__(self, faults=(), make_optimizer=torch.optim.Adam, callback=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.faults = dict(faults)
        self.make_optimizer = make_optimizer
        self.callback = [callback]  # in a list: no state of this module

    def forward(self, batch):
        x = torch.stack([batch, batch.sin() * 10, batch.cos() * 10], dim=1).float() / 10
        return self.net(x)

    def training_step(self, batch, batch_idx):
        fault = self.faults.get(int(batch[0]))
        if fault == "none":
            return None
        loss = (self(batch.double() * NAN if fault == "NaN input" else batch).float() - 1).square().mean()
        if fault == "reject":
            self.callback[0].reject("no label")
        return {"infinite loss": loss + INF, "spike": loss * 1e7}.get(fault, loss)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


FAULTS = {4: "NaN input", 10: "infinite loss", 12: "reject", 26: "spike", 38: "NaN input"}


def fit(faults, *callbacks, batches=range(40), guarded=True, make_optimizer=torch.optim.Adam, **flags):
    """Fit one epoch of batches of two; returns the module, the trainer, and what must be equal."""
    guard = next((callback for callback in callbacks if isinstance(callback, SkipBadSteps)), None)
    model = Module(faults, make_optimizer, guard)
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 1} | flags)
    trainer.fit(model, DataLoader(batches, 2))
    (config,) = trainer.lr_scheduler_configs
    return trainer, state_of(model, trainer.optimizers[0], config.scheduler)


def without(batches, faults, size):
    """The batches of whole windows of `size` samples that have no fault."""
    windows = [list(batches)[start : start + size] for start in range(0, len(batches), size)]
    return [sample for window in windows if not set(window) & set(faults) for sample in window]


def guard(**arguments):
    return SkipBadSteps(**{"spike_factor": 1000, "min_history": 1} | arguments)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_a_fit_ends_where_one_ends_that_never_had_the_bad_windows(k, flags):
    skip = guard()
    trainer, ours = fit(FAULTS, skip, accumulate_grad_batches=k, **flags)
    kept = without(range(40), FAULTS, 2 * k)
    expected, theirs = fit({}, batches=kept, accumulate_grad_batches=k, **flags)
    assert ours == theirs
    windows = math.ceil(20 / k)
    assert skip.attempts == windows and skip.updates == math.ceil(len(kept) / 2 / k)
    assert trainer.global_step == expected.global_step == skip.updates


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "fused"])
def test_other_optimizers(name):
    def make_optimizer(parameters, lr):
        if name == "fused":
            return torch.optim.AdamW(parameters, lr=lr, fused=True)
        return getattr(torch.optim, name)(parameters, lr=lr)

    _, ours = fit(FAULTS, guard(), make_optimizer=make_optimizer)
    _, theirs = fit({}, batches=without(range(40), FAULTS, 2), make_optimizer=make_optimizer)
    assert ours == theirs


def test_a_scaler_learns_nothing_from_a_bad_loss():
    def half():
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4))

    faults = {n: fault for n, fault in FAULTS.items() if fault != "spike"}  # which would overflow in half precision

    for fused in (False, True):

        def make_optimizer(parameters, lr, fused=fused):
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)

        arguments = {"make_optimizer": make_optimizer}
        trainer, ours = fit(faults, guard(), plugins=[half()], **arguments)
        expected, theirs = fit({}, batches=without(range(40), faults, 2), plugins=[half()], **arguments)
        scalers = [t.precision_plugin.scaler.state_dict() for t in (trainer, expected)]
        assert scalers[0] == scalers[1] and scalers[0]["scale"] == 8.0 * 2**4  # 16 updates
        assert ours == theirs


def test_an_overflow_is_the_scalers_business():
    class Overflow(Module):
        def backward(self, loss):
            factor = INF if self.trainer.global_step == 3 else 1.0
            handle = self.net[0].bias.register_hook(lambda g: g * factor)
            super().backward(loss)
            handle.remove()

    skip = SkipBadSteps(max_consecutive_skips=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    trainer = quiet_trainer(max_epochs=1, callbacks=[skip], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    with pytest.raises(TooManySkips, match="overflow in the scaled gradients"):
        trainer.fit(Overflow(), DataLoader(range(40), 2))
    assert (skip.updates, skip.skipped, scaler.get_scale()) == (3, 2, 2.0)


def test_averages_that_follow_global_step_stay_with_updates():
    def averages(faults, batches, *callbacks):
        average = WeightAveraging()
        fit(faults, average, *callbacks, batches=batches)
        return state_of(average._average_model)

    expected = averages({}, without(range(40), FAULTS, 2))
    assert averages(FAULTS, range(40), guard()) == expected


def test_max_steps_counts_updates():
    skip, audit = guard(spike_factor=None), StepAudit(strict=True)
    faults = {0: "NaN input", 6: "NaN input", 10: "infinite loss", 30: "NaN input"}
    trainer, _ = fit(faults, audit, skip, max_steps=9, max_epochs=-1)
    assert "SkipBadSteps skipped 3 of them" in audit.explain()
    assert trainer.global_step == 9
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 9
    assert (skip.attempts, skip.updates, skip.skipped) == (12, 9, 3)
    assert (audit.attempts, audit.updates, audit.skipped) == (12, 9, 3)


@pytest.mark.thorough
def test_every_second_batch_bad_for_200_steps(tmp_path):
    skip = SkipBadSteps(journal=tmp_path / "skipped.jsonl")
    trainer, _ = fit(dict.fromkeys(range(2, 400, 4), "NaN input"), skip, batches=range(400))
    assert (skip.attempts, skip.updates, trainer.global_step) == (200, 100, 100)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 / 101
    assert all(buffer.isfinite().all() for buffer in trainer.lightning_module.buffers())
    skips, _ = read_journal(tmp_path / "skipped.jsonl")
    assert [(s.epoch, s.batch_indices, s.sample_indices) for s in skips] == [
        (0, [n], [2 * n, 2 * n + 1]) for n in range(1, 200, 2)
    ]


def test_a_training_step_that_returns_none_is_a_skip_too():
    skip = SkipBadSteps()
    _, ours = fit({4: "none", 8: "none"}, skip)
    assert (skip.updates, skip.skipped) == (18, 2)
    assert ours == fit({}, batches=without(range(40), {4, 8}, 2))[1]


def test_too_many_skips_end_the_fit_with_all_in_place(tmp_path):
    skip = SkipBadSteps(max_consecutive_skips=3)
    model = Module(dict.fromkeys(range(10, 40), "NaN input"), callback=skip)
    trainer = quiet_trainer(max_epochs=1, callbacks=[skip])
    with pytest.raises(TooManySkips, match=r"attempt 8, epoch 0, batch 7, samples 14, 15 on rank 0"):
        trainer.fit(model, DataLoader(range(40), 2))
    assert (trainer.global_step, skip.updates, skip.skipped) == (5, 5, 3)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert "backward" not in vars(model) and "lr_scheduler_step" not in vars(model)


def test_it_composes_with_exact_accumulation():
    class Sums(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * len(batch), len(batch)

    def end(faults, batches, *callbacks):
        model = Sums(faults, callback=callbacks[-1])
        trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=list(callbacks))
        trainer.fit(model, DataLoader(batches, 2))
        return trainer.global_step, state_of(model, trainer.optimizers[0]), vars(model).keys() & {"training_step"}

    expected = end({}, without(range(40), FAULTS, 6), ExactAccumulation())
    assert end(FAULTS, range(40), ExactAccumulation(), guard()) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("k", [1, 2])
def test_two_ranks_skip_together_what_one_saw(k, tmp_path):
    def fit_ranks(rank, folder):
        class Loaded(Module):
            def train_dataloader(self):
                return DataLoader(self.samples, 2, sampler=DistributedSampler(self.samples, shuffle=False))

        def end(faults, samples, *callbacks):
            model = Loaded(faults, callback=callbacks[0] if callbacks else None)
            model.samples = samples
            trainer = quiet_trainer(
                max_epochs=1, devices=2, strategy="ddp", accumulate_grad_batches=k, callbacks=list(callbacks)
            )
            trainer.fit(model)
            (config,) = trainer.lr_scheduler_configs
            return trainer.global_step, state_of(model, trainer.optimizers[0], config.scheduler)

        # A rank's batch n holds 4n + rank and 4n + 2 + rank.
        faults = {8: "NaN input", 21: "reject", 44: "infinite loss", 57: "spike"}
        skip = guard(journal=f"{folder}/skipped.jsonl")
        ours = end(faults, range(64), skip)
        kept = without(range(64), faults, 4 * k)
        return ours == end({}, kept), (skip.attempts, skip.updates, ours[0]), ours[1]

    first, second = (result.value for result in run_ranks(fit_ranks, args=(tmp_path,)))
    assert first[0] and second[0]
    assert first[1] == second[1] == (16 // k, 16 // k - 4, 16 // k - 4)
    different = {key for key in first[2] if first[2][key] != second[2][key]}
    assert all("running" in key for key in different)  # a plain run's ranks differ there as well
    skips, _ = read_journal(tmp_path / "skipped.jsonl")
    causes = [(s.rank, s.reason, s.sample_indices) for s in skips if s.caused_here]
    samples = {n: [i for b in range(n // 4 // k * k, n // 4 // k * k + k) for i in (4 * b + n % 2, 4 * b + 2 + n % 2)]
               for n in (8, 21, 44)}  # fmt: skip
    assert causes == [
        (0, "non-finite loss", samples[8]), (1, "no label", samples[21]), (0, "non-finite loss", samples[44])
    ]  # fmt: skip
    assert [s.reason for s in skips][-2:] == ["gradient-norm spike"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [3, 7, 10])
def test_counts_and_samples_go_on_after_a_resume(stop, tmp_path):
    faults = dict.fromkeys((2, 3, 9, 11), "NaN input")

    def run(epochs, path=None, **flags):
        skip, audit = SkipBadSteps(journal=tmp_path / f"{stop}.jsonl"), StepAudit()
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename=f"{stop}-{{step}}")
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, callbacks=[skip, audit, checkpoint], max_epochs=epochs, **flags,
        )  # fmt: skip
        model = Module(faults)
        with warnings.catch_warnings(action="ignore"):  # the audit planned updates that were skipped
            trainer.fit(model, ResumableDataLoader(range(20), 2, shuffle=True), ckpt_path=path)
        return skip, audit, trainer, state_of(model, trainer.optimizers[0])

    whole = run(3)
    expected = [(s.epoch, s.attempt, s.sample_indices) for s in read_journal(tmp_path / f"{stop}.jsonl")[0]]
    assert expected and all(set(samples) & set(faults) for _, _, samples in expected)
    (tmp_path / f"{stop}.jsonl").unlink()
    run(3, max_steps=stop)
    resumed = run(3, tmp_path / f"{stop}-step={stop}.ckpt")
    assert resumed[3] == whole[3]
    for skip, audit, trainer, _ in (whole, resumed):
        assert (skip.attempts, audit.attempts, skip.updates, trainer.global_step) == (
            30, 30, audit.updates, audit.updates
        )  # fmt: skip
    told = [(s.epoch, s.attempt, s.sample_indices) for s in read_journal(tmp_path / f"{stop}.jsonl")[0]]
    assert sorted(set(map(str, told))) == sorted(map(str, expected))


def test_samples_stay_unknown_where_asking_would_change_the_order(tmp_path):
    def journal_of(**arguments):
        path = tmp_path / f"{len(arguments)}.jsonl"
        model = Module(dict.fromkeys(range(5), "NaN input"))
        trainer = quiet_trainer(max_epochs=1, callbacks=[SkipBadSteps(journal=path, **arguments)])
        trainer.fit(model, DataLoader(range(40), 2, shuffle=True))
        return read_journal(path)[0]

    assert {skip.sample_indices for skip in journal_of()} == {None}
    told = journal_of(sample_indices=lambda batch: batch.tolist())
    assert told and all(skip.sample_indices[0] < 5 for skip in told)


def test_a_second_fit_starts_from_zero():
    skip = guard()
    for _ in range(2):
        fit(FAULTS, skip)
        assert (skip.attempts, skip.skipped) == (20, 5)
        assert skip.state_dict()["attempts"] == 20


def test_an_epochs_schedule_goes_on_with_the_epochs():
    class ByEpoch(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer = quiet_trainer(max_epochs=2, callbacks=[SkipBadSteps()])
    trainer.fit(ByEpoch(dict.fromkeys(range(20), "NaN input")), DataLoader(range(20), 2))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2 and trainer.global_step == 0


def test_what_it_does_not_know_is_refused():
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="StepGuard"):
        quiet_trainer(callbacks=[SkipBadSteps()]).fit(Manual(), DataLoader(range(4), 2))
    with pytest.raises(ValueError, match="spike_factor"):
        SkipBadSteps(spike_factor=-1)
    with pytest.raises(ValueError, match="max_consecutive_skips must be"):
        SkipBadSteps(max_consecutive_skips=0)
    with pytest.raises(RuntimeError, match="no training runs now"):
        SkipBadSteps().reject("too early")


@pytest.mark.gpu
def test_half_precision_on_a_gpu():
    def end(faults, batches, *callbacks):
        model = Module(faults, callback=callbacks[0] if callbacks else None)
        # torch's own first scale, 65536, overflows in good windows of this model.
        half = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=8.0))
        trainer = Trainer(
            accelerator="gpu", devices=1, plugins=[half], max_epochs=1, callbacks=list(callbacks), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(batches, 2))
        return state_of(model.cpu(), trainer.optimizers[0]), trainer.precision_plugin.scaler.state_dict()

    faults = {n: fault for n, fault in FAULTS.items() if fault != "spike"}
    assert end(faults, range(40), guard()) == end({}, without(range(40), faults, 2))


@pytest.mark.parametrize("k", [1, 3])
def test_a_window_in_which_none_was_returned_is_skipped_whole(k):
    class PoisonedNone(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.isfinite() else None  # after a forward that has met a NaN

    faults = {12: "NaN input", 26: "NaN input"}
    skip = guard()
    model = PoisonedNone(faults)
    trainer = quiet_trainer(max_epochs=1, callbacks=[skip], accumulate_grad_batches=k)
    trainer.fit(model, DataLoader(range(40), 2))
    _, theirs = fit({}, batches=without(range(40), faults, 2 * k), accumulate_grad_batches=k)
    assert state_of(model, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler) == theirs
    assert skip.skipped == 2


def test_a_schedule_that_lightning_counts_in_batches_is_refused():
    class EverySecond(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    with pytest.raises(MisconfigurationException, match="which needs frequency=1"):
        quiet_trainer(max_epochs=1, callbacks=[guard()]).fit(EverySecond(), DataLoader(range(4), 2))


def test_what_does_not_go_together_is_refused():
    def refusal(callbacks, make_optimizer=torch.optim.Adam, **flags):
        with pytest.raises((MisconfigurationException, ValueError)) as caught:
            fit({}, *callbacks, make_optimizer=make_optimizer, **flags)
        return str(caught.value)

    assert "must step without a closure, got LBFGS" in refusal([SkipBadSteps()], torch.optim.LBFGS)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["all ignored", "empty mask"])
@pytest.mark.parametrize("k", [1, 2])
def test_two_ranks_skip_a_loss_that_is_not_finite_with_a_gradient_that_is(k, fault):
    def fit_ranks(rank):
        class Masked(Module):
            def training_step(self, batch, batch_idx):
                y = self(batch)
                if 21 not in batch:
                    return (y - 1).square().mean()
                if fault == "all ignored":
                    return nn.functional.cross_entropy(y, torch.full((len(y),), -100))
                return y[torch.zeros_like(y, dtype=torch.bool)].mean()

        def end(samples, *callbacks):
            model = Masked()
            trainer = quiet_trainer(
                max_epochs=1, devices=2, strategy="ddp", accumulate_grad_batches=k, callbacks=list(callbacks),
                use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(model, DataLoader(samples, 2, sampler=DistributedSampler(samples, shuffle=False)))
            return trainer.global_step, state_of(model, trainer.optimizers[0])

        skip = SkipBadSteps()
        return end(range(64), skip), skip.skipped, end(without(range(64), {21}, 4 * k))

    for result in run_ranks(fit_ranks):
        ours, skipped, theirs = result.value
        assert skipped == 1 and ours == theirs


@pytest.mark.thorough
@pytest.mark.parametrize("k", [1, 2])
def test_two_ranks_skip_a_window_without_a_label(k):
    class Labels(Module):
        def training_step(self, batch, batch_idx):
            y = self(batch)[[int(sample) not in range(16, 24) for sample in batch]]
            return (y - 1).square().sum(), len(y)

    def fit_ranks(rank):
        def end(samples, *callbacks):
            model = Labels()
            trainer = quiet_trainer(
                max_epochs=1, devices=2, strategy="ddp", accumulate_grad_batches=k, use_distributed_sampler=False,
                callbacks=[*callbacks, ExactAccumulation()],
            )  # fmt: skip
            trainer.fit(model, DataLoader(samples, 2, sampler=DistributedSampler(samples, shuffle=False)))
            return trainer.global_step, state_of(model, trainer.optimizers[0])

        skip = SkipBadSteps()
        return end(range(64), skip), skip.skipped, end(without(range(64), range(16, 24), 4 * k))

    for result in run_ranks(fit_ranks):
        ours, skipped, theirs = result.value
        assert skipped == 2 // k and ours == theirs
