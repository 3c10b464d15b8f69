"""What grows, and what only grows until it is full."""

from collections import deque

import pytest
import torch

from rehearse import rehearse
from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class KeepsTheLast(Net):
    """Keeps the last losses, more of them than a trial has steps."""

    def __init__(self, most):
        super().__init__()
        self.most, self.kept = most, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.keep(loss)
        return loss

    def keep(self, loss):
        self.kept.append(loss.detach() * torch.ones(100))
        if len(self.kept) > self.most:
            self.kept.pop(0)


class KeepsInADeque(KeepsTheLast):
    def keep(self, loss):
        self.kept = self.kept or deque(maxlen=self.most)
        self.kept.append(loss.detach() * torch.ones(100))


class KeepsASlice(KeepsTheLast):
    def keep(self, loss):
        self.kept.append(loss.detach() * torch.ones(100))
        del self.kept[: -self.most]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [KeepsTheLast, KeepsInADeque, KeepsASlice])
def test_a_list_with_an_end_does_not_grow(model):
    report = rehearse(quiet_trainer(), model(1_000), loader(), deep=True)
    assert report.ok and "growth" in report.passed, str(report)


@pytest.mark.thorough
def test_a_list_whose_end_is_out_of_reach_grows():
    report = rehearse(quiet_trainer(), KeepsTheLast(10**9), loader(), deep=True)
    assert [finding.check for finding in report.findings] == ["growth"] and "kept" in report.findings[0].says
