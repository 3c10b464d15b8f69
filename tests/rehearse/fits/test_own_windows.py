"""A rehearsal's window where a module's own code steps: passes followed into steps, factors read, and what is said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from rehearse import rehearse
from rehearse.checks.applied import Applied, factors_of
from rehearse.judge import CHECKS
from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer
from tests.rehearse.fits.windows import ByHand, updates

# ------------------------------------------------------------------------ oracle: a number of its own for each pass

MOST = 12
ACTIONS = st.sampled_from(
    ["backward", "backward", "backward of one", "asked", "none", "zeros", "halve", "step", "step"]
)


class Slots:
    """Two parameters with a slot for each pass, which adds 1 to it: ``.grad`` shows which passes it holds."""

    def __init__(self):
        self.parameters = [nn.Parameter(torch.zeros(MOST)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(self.parameters, lr=0.1), torch.optim.Adam(self.parameters[1:])]
        self.passes = 0
        self.applied = [set(), set()]
        self.expected = []

    def loss(self, parameters):
        return sum(parameter[self.passes] for parameter in parameters)

    def step(self, number):
        """Expect what the slots show."""
        held = [p.grad for group in self.optimizers[number].param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([*held, torch.zeros(MOST)]).sum(0)
        passes = set(total.nonzero().flatten().tolist())
        if passes:
            new = passes - self.applied[number]
            self.expected.append((number, passes, passes - new if new else set()))
            self.applied[number] |= passes
        self.optimizers[number].step()


@pytest.mark.thorough
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1)), max_size=20))
def test_a_step_is_made_with_the_passes_that_its_gradients_show(actions):
    slots, applied = Slots(), Applied()
    applied.watch(slots.optimizers)
    with applied.watching():
        for action, which in actions:
            parameters = slots.parameters[which:] if action == "backward of one" else slots.parameters
            if action.startswith("backward") and slots.passes < MOST:
                slots.loss(parameters).backward()
                slots.passes += 1
            elif action == "asked" and slots.passes < MOST:
                torch.autograd.grad(slots.loss(parameters), parameters)
            elif action in ("none", "zeros"):
                slots.optimizers[which].zero_grad(set_to_none=action == "none")
            elif action == "step":
                slots.step(which)
    seen = [(s.optimizer, {p.number for p in s.passes}, {p.number for p in s.again}) for s in applied.steps]
    assert seen == slots.expected
    assert all(step.factor == pytest.approx(1) for step in applied.steps)


def stepped(*, between=None, optimizer=torch.optim.SGD, loss=None):
    """The steps of three windows of two passes, the gradients of which are zeroed."""
    weight = nn.Parameter(torch.ones(3))
    own, applied = optimizer([weight], lr=0.1), Applied()
    applied.watch([own])
    with applied.watching():
        for applied.batch in range(6):
            (weight.square().sum() if loss is None else loss(weight)).backward()
            if applied.batch % 2:
                if between is not None:
                    between(weight)
                own.step()
                own.zero_grad()
    return applied.steps


class Calls(torch.optim.Adam):
    """Its step calls that of the class above it, so that torch's hooks are called for both."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_counts_once_and_a_pass_within_a_pass_is_a_part_of_it():
    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # whose step has the hooks from here on
    for steps in (
        stepped(optimizer=Calls),
        stepped(loss=lambda w: checkpoint(torch.square, w.clone(), use_reentrant=True).sum() + w.sum()),
    ):
        assert [[one.batch for one in step.passes] for step in steps] == [[0, 1], [2, 3], [4, 5]]
        assert not any(step.again for step in steps)


@pytest.mark.parametrize(
    ("between", "factor"),
    [
        (None, 1),
        (lambda weight: weight.grad.div_(2), 0.5),
        (lambda weight: setattr(weight, "grad", weight.grad / 4), 0.25),
        (lambda weight: weight.grad[0].zero_(), None),
        (lambda weight: setattr(weight, "grad", torch.tensor([1.0, 2.0, 3.0])), None),
    ],
)
def test_what_is_done_to_the_gradients_before_a_step_is_seen(between, factor):
    assert [step.factor for step in stepped(between=between)] == [pytest.approx(factor)] * 3


def test_outside_of_it_autograd_and_the_optimizers_are_as_before():
    before = torch.autograd.backward
    stepped()
    assert torch.autograd.backward is before
    weight = nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight]).step()


# --------------------------------------------------------------------------------------------------------- factors

SCORES = nn.Linear(3, 3)


def mean():
    return cross_entropy(SCORES(torch.ones(2, 3)), torch.tensor([0, 1]))


class Quarter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 4


FACTORS = {
    "a mean": (mean, ((),)),
    "divided": (lambda: mean() / 4, ((0.25,),)),
    "by a tensor": (lambda: torch.tensor(0.5) * mean() / torch.tensor(4.0), ((0.25, 0.5),)),
    "in place": (lambda: (-mean()).div_(4), ((0.25,),)),
    "of two terms": (lambda: (mean() + 0.1 * mean()) / 2, ((0.5,), (0.5, 0.1))),
    "by alpha": (lambda: torch.sub(mean(), mean(), alpha=0.1), ((), (0.1,))),
    "of a stack": (lambda: torch.stack([mean(), mean() / 2]).mean(), ((), (0.5,))),
    "below the mean": (lambda: (SCORES(torch.ones(2, 3)).exp() / 4).mean(), ((0.25,),)),
    "in double precision": (lambda: (mean() / 4).double(), ((0.25,),)),
    "with a term of no gradient": (lambda: mean() + 0 * mean() + torch.ones(()), ((),)),
    "in a product": (lambda: SCORES.bias.sum().exp() * (mean() / 4), ((), (0.25,))),
    "a parameter": (lambda: SCORES.bias, ((),)),
    "of many numbers": (lambda: (SCORES(torch.ones(2, 3)).exp() * torch.ones(3)).mean(), None),
    "of a function": (lambda: Quarter.apply(mean()), None),
}


@pytest.mark.parametrize("name", FACTORS)
def test_the_factors_of_a_loss(name):
    loss, factors = FACTORS[name]
    assert factors_of(loss()) == (None if factors is None else tuple(map(pytest.approx, factors)))


# ---------------------------------------------------------------------------------------------------- whole runs


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
    "an end that is zeroed": (lambda: (ZeroesFirst(), 5), "The last micro-batch of an epoch makes no step, and"),
    "an end of a long epoch": (lambda: (ZeroesFirst(), 103), "The last 3 micro-batches of an epoch make no step"),
    "undivided": (lambda: (Undivided(3), 24), "adds up 3 mean losses and divides by none"),
    "undivided, by loss.backward()": (lambda: (PlainBackward(), 8), "adds up 4 mean losses and divides by none"),
    "a short window": (lambda: (Windows(last=True), 6), "0.5 times the gradient of one big batch: it holds 2"),
    "after a long epoch": (lambda: (Windows(last=True), 102), "0.5 times the gradient of one big batch: it holds 2"),
    "a leak": (lambda: (Windows(), 6), "epoch 1 is made with 6 micro-batches, 2 of them left over"),
    "a leak of sums": (lambda: (Summed(), 7), "epoch 1 is made with 7 micro-batches, 3 of them left over"),
    "a leak after a long epoch": (lambda: (Windows(), 102), "epoch 1 is made with 6 micro-batches, 2 of them left"),
    "a leak of a loss that is drawn": (lambda: (Noisy(), 6), "epoch 1 is made with 6 micro-batches, 2 of them left"),
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
    assert says == [f"The last {left} micro-batches of an epoch make no step, and the run ends."] * (left > 0)


RIGHT = {
    "zeroes first": (lambda: (ZeroesFirst(), 8), "", ""),
    "a window": (lambda: (Windows(), 8), "", ""),
    "a mean by hand": (lambda: (MeanByHand(), 8), "", ""),
    "sums and a short window": (lambda: (Summed(last=True), 6), "", ""),
    "clipped": (lambda: (Clipped(), 8), "", ""),
    "gradients divided": (lambda: (DividesGradients(), 8), "", ""),
    "a loss of half the weight": (lambda: (Halved(every=1), 8), "", ""),
    "windows of 5": (lambda: (Windows(5), 100), "", "with windows of 5 micro-batches, the end of an epoch was not"),
    "half the weight in a window": (lambda: (Halved(), 8), "counts 0.5 times a mean loss, which may be its weight", ""),
    "one divisor for all": (lambda: (DividesByAll(), 8), "divided by a number that depends on the batch", ""),
    "a loss that is drawn": (lambda: (Noisy(), 8), "whether the loss is a mean over the samples could not be seen", ""),
    "gradients that are set": (lambda: (SetsGradients(), 8), "the module's own code sets the gradients", ""),
    "long windows": (
        lambda: (Windows(48, last=True), 102),
        "a window holds more micro-batches than are tried (32)",
        "",
    ),
    "no step": (lambda: (NeverSteps(), 8), "no optimizer stepped in 16 micro-batches", ""),
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
def test_what_losses_weigh_that_are_added_up_for_one_backward_pass_is_not_judged():
    report = rehearse(quiet_trainer(), AddsLosses(4), loader(64), skip=OTHER)
    assert not report.findings and "window" not in report.passed
    assert "12 micro-batches of 16 made no backward pass" in report.not_judged["window"]


@pytest.mark.thorough
def test_batches_of_several_sizes_in_a_window_are_a_note():
    report = rehearse(quiet_trainer(), Windows(3), loader(20), skip=OTHER)
    assert report.ok and "window: micro-batches of 8, 8, 4 samples count the same" in report.notes[0]
    assert rehearse(quiet_trainer(), Weighed(3), loader(20), skip=OTHER).notes == ()


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
