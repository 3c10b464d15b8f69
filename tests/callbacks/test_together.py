"""Every piece beside every other, and beside a Trainer's flags: right, by hand in plain torch, or refused."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from course_lib.callbacks import ExactAccumulation, ExactResume, SizeScheduleDataModule, SkipBadSteps, StepAudit
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader
from course_lib.schedules import SizeSchedule
from tests.callbacks.whole_run import cut
from tests.trainer_oracle import quiet_trainer

N, BATCH, K, EPOCHS, BAD = 47, 4, 3, 3, 11

CALLBACKS = {
    "ExactAccumulation": ExactAccumulation,
    "SkipBadSteps": SkipBadSteps,
    "StepAudit": lambda: StepAudit(strict=True),
    "ExactResume": ExactResume,
}
DATA = ("DataLoader", "MiniDataLoader", "ResumableDataLoader", "SizeScheduleDataModule")
FLAGS = {
    "no flag": {},
    "clipping by norm": dict(gradient_clip_val=0.1),
    "clipping by value": dict(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "bf16-mixed": dict(precision="bf16-mixed"),
    "limit_train_batches": dict(limit_train_batches=7),
    "overfit_batches": dict(overfit_batches=5),
    "val_check_interval": dict(val_check_interval=2),
    "WeightAveraging": {},
    "EarlyStopping": {},
    "manual optimization": {},
}


STEPS = EPOCHS * math.ceil(math.ceil(N / BATCH) / K)


class Samples(Dataset):
    def __init__(self, bad):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(N, 6, generator=generator)
        self.y = torch.randint(3, (N,), generator=generator)
        if bad:
            self.x[BAD] = float("nan")

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def make_net():
    torch.manual_seed(0)
    # No bias ahead of BatchNorm: its gradient is rounding noise, which AdamW would blow up.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_optimizer(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


class Module(LightningModule):
    """Keeps every batch that it trains: (epoch, (x, y, indices))."""

    batch_size = BATCH

    def __init__(self, sums, loader, manual):
        super().__init__()
        self.net, self.sums = make_net(), sums
        self.automatic_optimization = not manual
        self.kept = []
        if loader is not None:
            self.train_dataloader = loader
            self.val_dataloader = lambda: DataLoader(Samples(bad=False), 16)

    def training_step(self, batch):
        x, y, _ = batch
        loss = nn.functional.cross_entropy(self.net(x), y, reduction="sum" if self.sums else "mean")
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return (loss, len(y)) if self.sums else loss

    def on_train_batch_start(self, batch, batch_idx):
        self.kept.append((self.current_epoch, batch))

    def on_train_epoch_end(self):
        self.log("constant", 1.0)

    def validation_step(self, batch):
        self.net(batch[0])

    def configure_optimizers(self):
        optimizer, schedule = make_optimizer(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_hand(kept, *, exact, skips, flag, k):
    """The same batches in plain torch: windows of k, each an update unless it holds the bad sample."""
    net = make_net()
    optimizer, schedule = make_optimizer(net)
    averages = AveragedModel(net)
    for _, group in itertools.groupby(kept, key=lambda pair: pair[0]):
        epoch = [batch for _, batch in group]
        for start in range(0, len(epoch), k):
            window = epoch[start : start + k]
            if skips and any(BAD in indices for _, _, indices in window):
                continue
            total = sum(len(y) for _, y, _ in window)
            optimizer.zero_grad()
            for x, y, _ in window:
                with torch.autocast("cpu", torch.bfloat16, enabled=flag == "bf16-mixed"):
                    loss = nn.functional.cross_entropy(net(x), y, reduction="sum" if exact else "mean")
                (loss / k).backward()
            if exact:  # after the backward, as bfloat16 rounds what goes through it
                for parameter in net.parameters():
                    parameter.grad *= k / total
            if flag == "clipping by norm":
                nn.utils.clip_grad_norm_(net.parameters(), FLAGS[flag]["gradient_clip_val"])
            if flag == "clipping by value":
                nn.utils.clip_grad_value_(net.parameters(), FLAGS[flag]["gradient_clip_val"])
            optimizer.step()
            if flag != "manual optimization":  # there it is the module's own code that would step it
                schedule.step()
            averages.update_parameters(net)
    return averages.module if flag == "WeightAveraging" else net


def run(callbacks, data, flag):
    """A fit; the module, the audit, and the weights that count."""
    manual, skips = flag == "manual optimization", "SkipBadSteps" in callbacks
    samples = Samples(bad=skips)
    loaders = {
        "DataLoader": lambda: DataLoader(samples, BATCH),
        "MiniDataLoader": lambda: MiniDataLoader(samples, BATCH),
        "ResumableDataLoader": lambda: ResumableDataLoader(samples, BATCH, shuffle=True),
    }
    module = Module("ExactAccumulation" in callbacks, loaders.get(data), manual)
    average = WeightAveraging()
    beside = {
        "WeightAveraging": [average],
        "EarlyStopping": [EarlyStopping("constant", patience=1, check_on_train_epoch_end=True)],
    }
    audit = StepAudit(strict=True)
    chosen = [audit if name == "StepAudit" else CALLBACKS[name]() for name in callbacks]
    if "StepAudit" not in callbacks:
        chosen.append(audit)
    given = {}
    k = 1 if manual else K
    if data == "SizeScheduleDataModule":
        schedule = SizeSchedule({0: (3, BATCH), 1: (6, 3)}, accumulate_grad_batches=K)
        held_out = DataLoader(Samples(bad=False), 16)
        given = dict(datamodule=SizeScheduleDataModule(samples, schedule, cut, val_dataloaders=held_out))
        k = 1
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=k,
        callbacks=[*chosen, *beside.get(flag, [])],
        **dict(limit_val_batches=0) | FLAGS[flag] | (dict(limit_val_batches=1) if "val" in flag else {}),
    )
    trainer.fit(module, **given)
    weights = average._average_model.module.net if flag == "WeightAveraging" else module.net
    return module, audit, weights


REFUSED = {
    ("ExactAccumulation", "manual optimization"): "needs automatic optimization",
    ("SkipBadSteps", "manual optimization"): "needs automatic optimization",
    ("ExactResume", "manual optimization"): "needs a Trainer that decides when to step",
    ("SizeScheduleDataModule", "manual optimization"): "with manual optimization nobody accumulates",
    ("SizeScheduleDataModule", "overfit_batches"): "overfit_batches would make the loader again",
}
PAIRS = [
    *itertools.combinations(CALLBACKS, 2),
    *itertools.product(CALLBACKS, DATA),
    *itertools.product([*CALLBACKS, *DATA], FLAGS),
]


@pytest.mark.thorough(but=16)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_together_are_right_or_refused(one, other):
    callbacks = [name for name in (one, other) if name in CALLBACKS]
    data = next((name for name in (one, other) if name in DATA), "ResumableDataLoader")
    flag = other if other in FLAGS else "no flag"
    if (one, other) in REFUSED:
        with pytest.raises((MisconfigurationException, ValueError), match=REFUSED[one, other]):
            run(callbacks, data, flag)
        return
    module, audit, weights = run(callbacks, data, flag)

    # Planned is counted, and every sample is trained once in each epoch that is whole.
    assert audit.agrees, audit.explain()
    epochs = [[i for e, (_, _, batch) in module.kept if e == epoch for i in batch.tolist()] for epoch in range(EPOCHS)]
    whole = flag not in ("limit_train_batches", "overfit_batches")
    for epoch in epochs[: 2 if flag == "EarlyStopping" else EPOCHS]:
        assert len(set(epoch)) == len(epoch)
        assert not whole or len(epoch) == N
    if flag == "overfit_batches":
        assert epochs[0] == epochs[1] == epochs[2]
    if flag == "EarlyStopping":
        assert epochs[2] == [] and audit.stopped_early

    # The weights are those of plain torch.
    hand = by_hand(
        module.kept,
        exact="ExactAccumulation" in callbacks,
        skips="SkipBadSteps" in callbacks,
        flag=flag,
        k=1 if flag == "manual optimization" else K,
    )
    for parameter, wanted in zip(weights.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), wanted.detach(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("callback", ["ExactAccumulation", "SkipBadSteps", "ExactResume"])
def test_an_epoch_without_gradients_is_refused(callback):
    averaging = StochasticWeightAveraging(0.02, swa_epoch_start=2)
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=[CALLBACKS[callback](), averaging])
    with pytest.raises(MisconfigurationException, match="Take WeightAveraging or EMAWeightAveraging"):
        trainer.fit(Module(False, lambda: DataLoader(Samples(False), BATCH), False))
    assert trainer.global_step == 0


def what_goes_with_what() -> str:
    """What the cases above say, for readers: the flags that go with the same pieces in one row."""
    pieces = [*CALLBACKS, "SizeScheduleDataModule"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for flag in FLAGS:
        outcomes = tuple("refused" if (piece, flag) in REFUSED else "right" for piece in pieces)
        rows.setdefault(outcomes, []).append(f"`{flag}`" if flag.isidentifier() else flag)
    lines = ["| | " + " | ".join(f"`{piece}`" for piece in pieces) + " |", "|---|" + "---|" * len(pieces)]
    lines += [f"| {', '.join(flags)} | {' | '.join(outcomes)} |" for outcomes, flags in rows.items()]
    return "\n".join(lines)


def test_its_page_says_what_goes_with_what():
    page = Path(__file__).parents[2] / "docs" / "pages" / "together.md"
    assert what_goes_with_what() in page.read_text(encoding="utf-8")
