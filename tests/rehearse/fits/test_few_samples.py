"""A few samples of each batch may only acquit: what they show is tried again with whole batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from rehearse import rehearse
from rehearse.report import Judgement
from rehearse.runs.few_samples import Trial, judged_by
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.loaders import cut_batches
from tests.rehearse.fits.parts import Net, Points, loader, quiet_trainer


class ForManySamples(Net):
    """Its second expert is asked from the third sample of a batch on."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return torch.cat([super().forward(x[:2]), self.second(x[2:])])


class ForEightSamples(Net):
    """It knows how many samples come."""

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return nn.functional.mse_loss(self(x).view(8, 1), y.view(8, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("model", [ForManySamples, ForEightSamples])
def test_a_model_that_needs_whole_batches_is_judged_by_them(model):
    report = rehearse(quiet_trainer(), model(), loader())
    assert report.ok and {"setup", "bad_step"} <= set(report.passed), str(report)


def test_a_batch_that_is_smaller_than_others_stays_so():
    cut = DataLoader(Points(19), 8)
    cut_batches(cut, 2)
    assert [len(batch[0]) for batch in cut] == [2, 2, 1] and len(cut) == 3
    assert isinstance(cut.batch_sampler, BatchSampler) and cut.batch_sampler.batch_size == 8
    listed = DataLoader(Points(), batch_sampler=[[1, 2, 3, 4], [5, 6, 7]])
    cut_batches(listed, 3)
    assert [batch[2].tolist() for batch in listed] == [[1, 2, 3], [5, 6]]


def test_batches_that_are_small_are_left_alone():
    cut = DataLoader(Points(5), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, False))
    cut_batches(cut, 2)
    assert [batch[2].tolist() for batch in cut] == [[0, 1], [2, 3], [4]]


def finds_by_size(run):
    """A trial that tells how many samples its first batch has, as a finding, or acquits whole batches."""

    def trial(folder):
        sizes = []
        run.start(folder, on_train_batch_start=lambda _, __, batch, ___: sizes.append(len(batch[0])))
        found = Judgement()
        return found.find("window", f"{sizes[0]} samples", "", "") if sizes[0] < 8 else found

    return trial


@pytest.mark.parametrize(("seconds_a_sample", "found"), [(0.0, []), (1.0, ["2 samples"])])
def test_whole_batches_decide_unless_they_would_take_too_long(seconds_a_sample, found):
    run = LightningRun(quiet_trainer(), Net(), loader())
    [answer] = judged_by(run, [Trial("window", finds_by_size(run), 4)], seconds_a_sample, 8, seconds=20)
    assert [finding.says for finding in answer.value.findings] == found
    assert bool(answer.value.notes) == bool(found)


@pytest.mark.thorough
def test_a_short_last_batch_of_a_window_is_found_though_batches_are_cut():
    """Found with few samples or with all, its numbers are those of whole batches."""
    [finding] = rehearse(quiet_trainer(accumulate_grad_batches=2), Net(), loader(60)).findings
    assert finding.check == "window" and "micro-batches of 8, 4 samples" in finding.says
