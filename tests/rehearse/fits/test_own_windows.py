"""A rehearsal's window where a module's own code steps: what is found, what may be right, and what the fit does."""

import pytest
import torch
from torch.nn.functional import mse_loss

from rehearse import rehearse
from rehearse.judge import CHECKS
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer
from tests.rehearse.fits.windows import ByHand, updates


class Windows(ByHand):
    """Windows of ``every`` batches, made of ``loss(run, batch)``; ``last`` says whether an epoch's last batch steps."""

    def __init__(self, every=4, last=False):
        super().__init__()
        self.every, self.last = every, last

    def loss(self, batch):
        return self.mean_loss(batch) / self.every

    def before_step(self):
        """Of the gradients."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % self.every == 0 or (self.last and self.trainer.is_last_batch):
            self.before_step()
            optimizer.step()
            optimizer.zero_grad()


class Undivided(Windows):
    def loss(self, batch):
        return self.mean_loss(batch)


class PlainBackward(Undivided):
    def manual_backward(self, loss):
        loss.backward()


class MeanByHand(Windows):
    def loss(self, batch):
        return self.head(torch.ones(len(batch[0]), 1)).sum() / len(batch[0]) / self.every


class Summed(Windows):
    def loss(self, batch):
        return self.head(torch.ones(len(batch[0]), 1)).sum()


class Weighed(Windows):
    """In windows of 8, 8 and 4 samples, each sample counts the same."""

    def loss(self, batch):
        return self.mean_loss(batch) * (0.2 if len(batch[0]) == 4 else 0.4)


class Clipped(Windows):
    def before_step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class DividesGradients(Undivided):
    def before_step(self):
        for weight in self.parameters():
            weight.grad /= self.every


class Halved(Windows):
    def loss(self, batch):
        return super().loss(batch) / 2


class DividesByAll(Windows):
    def loss(self, batch):
        return self.head(torch.ones(len(batch[0]), 1)).sum() / (len(batch[0]) * self.every)


class DividedByItsOwn(Windows):
    def __init__(self):
        super().__init__(last=True)

    def training_step(self, batch, batch_idx):
        self.every = 2 if batch_idx >= 4 else 4
        return super().training_step(batch, batch_idx)


class Noisy(Windows):
    def loss(self, batch):
        x, y, _ = batch
        return mse_loss(self.head(x.mean(1, keepdim=True) + torch.randn(len(x), 1)), y) / self.every


class SetsGradients(Windows):
    def training_step(self, batch, batch_idx):
        [self.head.weight.grad] = torch.autograd.grad(self.mean_loss(batch), [self.head.weight])
        self.optimizers().step()


class NeverSteps(Windows):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))


class ZeroesFirst(Windows):
    """Calls zero_grad as a window begins: what an epoch's end leaves over is zeroed as the next epoch begins."""

    def training_step(self, batch, batch_idx):
        if batch_idx % self.every == 0:
            self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()


class AddsLosses(Windows):
    """One backward pass a window, of the sum of its losses."""

    total = 0.0

    def training_step(self, batch, batch_idx):
        self.total = self.total + self.loss(batch)
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().zero_grad()
            self.manual_backward(self.total)
            self.optimizers().step()
            self.total = 0.0


FINDINGS = {
    "an end that is zeroed": (lambda: (ZeroesFirst(), 5), "The last 1 micro-batch of an epoch is lost: cleared before"),
    "an end of a long epoch": (lambda: (ZeroesFirst(), 103), "The last 3 micro-batches of an epoch are lost"),
    "undivided": (lambda: (Undivided(3), 24), "3 micro-batches, and the loss of each, a mean, is not divided"),
    "undivided, by loss.backward()": (
        lambda: (PlainBackward(), 8),
        "4 micro-batches, and the loss of each, a mean",
    ),
    "a short window": (lambda: (Windows(last=True), 6), "2 micro-batches (micro-batch 6): divided by 4 as the others"),
    "after a long epoch": (lambda: (Windows(last=True), 102), "2 micro-batches (micro-batch 102): divided by 4 as"),
    "a leak": (lambda: (Windows(), 6), "an epoch's last 2 micro-batches wait for a step of the next epoch"),
    "a leak of sums": (lambda: (Summed(), 7), "an epoch's last 3 micro-batches wait for a step of the next epoch"),
    "a leak after a long epoch": (lambda: (Windows(), 102), "whose first window holds 6 in place of 4"),
    "a leak of a loss that is drawn": (lambda: (Noisy(), 6), "an epoch's last 2 micro-batches wait for a step"),
    "no step": (lambda: (NeverSteps(), 8), "24 backward passes and no optimizer step"),
}
OTHER = [name for name in CHECKS if name != "window"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", FINDINGS)
def test_a_window_that_is_wrong_is_found(name):
    make, says = FINDINGS[name]
    model, batches = make()
    report = rehearse(quiet_trainer(), model, loader(8 * batches), skip=OTHER)
    assert len(report.findings) == 1 and says in report.findings[0].says, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize(("last", "batches"), [(False, 6), (True, 6), (False, 8), (False, 102)])
def test_the_end_of_a_run_of_one_epoch_makes_a_step(last: bool, batches: int):
    run = quiet_trainer(max_epochs=1), (Summed(last=last)), loader(8 * batches)
    says = [finding.says for finding in rehearse(*run, skip=OTHER).findings]
    left = 0 if last else batches % 4
    assert says == [f"{left} micro-batches at the end of the run are used by no step."] * (left > 0)


RIGHT = {
    "zeroes first": (lambda: (ZeroesFirst(), 8), "", ""),
    "a window": (lambda: (Windows(), 8), "", ""),
    "a mean by hand": (lambda: (MeanByHand(), 8), "", ""),
    "sums and a short window": (lambda: (Summed(last=True), 6), "", ""),
    "a short window, divided by what it holds": (lambda: (DividedByItsOwn(), 6), "", ""),
    "clipped": (lambda: (Clipped(), 8), "", ""),
    "gradients divided": (lambda: (DividesGradients(), 8), "", ""),
    "a loss of half the weight": (lambda: (Halved(every=1), 8), "", ""),
    "windows of 5": (lambda: (Windows(5), 100), "", ""),
    "half the weight in a window": (lambda: (Halved(), 8), "", "0.5 times that of one big batch, if that is not the"),
    "one divisor for all": (lambda: (DividesByAll(), 8), "", ""),
    "a loss that is drawn": (lambda: (Noisy(), 8), "", ""),
    "gradients that are set": (lambda: (SetsGradients(), 8), "the module's own code sets the gradients", ""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*RIGHT])
def test_a_window_that_may_be_right_is_no_finding(name):
    make, why, note = RIGHT[name]
    model, batches = make()
    report = rehearse(quiet_trainer(), model, loader(8 * batches), skip=OTHER)
    assert not report.findings, str(report)
    assert why in report.not_judged.get("window", "") and bool(why) == ("window" in report.not_judged), str(report)
    assert note in " ".join(report.notes) and bool(note) == bool(report.notes), str(report)


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "why"), [(3, ""), (8, ""), (20, "no backward pass and no step in its first 16")])
def test_losses_that_are_added_up_for_one_backward_pass_reach_all_parameters(every, why):
    report = rehearse(quiet_trainer(), AddsLosses(every), loader(8 * 2 * every), skip=set(CHECKS) - {"setup"})
    assert not report.findings and why in report.not_judged.get("setup", ""), str(report)
    assert ("setup" in report.passed) == (not why)


@pytest.mark.thorough
def test_losses_that_are_added_up_for_one_backward_pass_are_a_window():
    assert rehearse(quiet_trainer(), AddsLosses(4), loader(64), skip=OTHER).ok


@pytest.mark.thorough
def test_batches_of_several_sizes_in_a_window_are_a_note():
    report = rehearse(quiet_trainer(), Windows(3), loader(20), skip=OTHER)
    assert report.ok and "micro-batches of 8, 8, 4 samples count alike in one step" in report.notes[0]
    assert rehearse(quiet_trainer(), Weighed(3), loader(20), skip=OTHER).ok


@pytest.mark.parametrize(("model", "sizes"), [(Windows(), [1, 1.5, 1.5]), (Windows(last=True), [1, 0.5] * 3)])
def test_the_updates_of_a_fit_are_as_large_as_is_said(model, sizes):
    assert updates(quiet_trainer(), model, loader(48)) == sizes


class Draws(Net):
    """Steps by hand, and draws on the global generator."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(mse_loss(self(x + torch.randn_like(x)), y))
        optimizer.step()


@pytest.mark.thorough
def test_a_run_by_hand_is_the_same_after_it():
    weights = []
    for judges in (True, False):
        torch.manual_seed(3)
        trainer, model, data = quiet_trainer(max_epochs=1), Draws(), loader()
        backward = torch.autograd.backward
        if judges:
            assert rehearse(trainer, model, data).ok
        assert torch.autograd.backward is backward
        fitted(trainer, model, data)
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist())
    assert weights[0] == weights[1]


class StepsForTheTail(ByHand):
    """14 micro-batches of an epoch in windows of 4, 4, 4 and 2, and a schedule that is stepped with each."""

    def __init__(self, horizon):
        super().__init__()
        self.horizon = horizon

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.mean_loss(batch) / (4 if batch_idx < 12 else 2))
        if batch_idx % 4 == 3 or batch_idx == 13:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.horizon)]


@pytest.mark.thorough
@pytest.mark.parametrize(("horizon", "found"), [(12, []), (42, ["horizon"]), (10, [])])
def test_steps_for_a_short_window_may_be_made_behind_what_is_tried(horizon, found):
    """Of 12 steps, 10 follow from the first micro-batches: a horizon of either number is no finding."""
    report = rehearse(quiet_trainer(), StepsForTheTail(horizon), loader(14 * 8))
    assert [finding.check for finding in report.findings] == found
