"""A rehearsal's no_sync: which gradients the ranks average, and what a step is made with."""

from contextlib import contextmanager

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from course_lib.launch import run_ranks
from rehearse import rehearse
from tests.rehearse.fits.parts import Net, fitted, loader, of_all_ranks, quiet_trainer, script, scripts

BESIDE = ["workers", "window", "bad_step", "growth", "resume"]
RIGHT = [name for name in scripts("right") if not getattr(script("right", name), "LOOP", False)]


def on_two_ranks(**flags):
    return quiet_trainer(**{"devices": 2, "strategy": "ddp"} | flags)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_on_two_ranks(name, monkeypatch):
    right = script("right", name)
    monkeypatch.setattr(right, "quiet_trainer", on_two_ranks)
    report = rehearse(*right.make_run(), skip=BESIDE)
    assert not any(finding.check == "no_sync" for finding in report.findings), str(report)
    # DDP itself refuses a step in which a network takes no part, or what a callback swaps.
    refused = ("08_two_networks", "34_game_in_turns", "39_noise_in_the_forward", "40_target_network")
    assert "no_sync" in report.passed or name in refused, str(report)


class ByHand(Net):
    """Windows of four, by hand; the gradients are averaged in those micro-batches of each that are given."""

    def __init__(self, synced):
        super().__init__()
        self.automatic_optimization = False
        self.synced = synced

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y, _ = batch
        self.trainer.strategy.model.require_backward_grad_sync = batch_idx % 4 in self.synced
        self.manual_backward(nn.functional.mse_loss(self(x), y) / 4)
        if batch_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


WINDOWS = {
    (3,): "",
    (0, 1, 2, 3): "averages its gradients over the ranks 4 times",
    (1, 3): "averages its gradients over the ranks 2 times",
    (0,): "in micro-batch 1 and not in the last",
    (0, 2): "in micro-batch 1, 3 and not in the last",
    (): "no gradient is averaged over the 2 ranks",
}


@pytest.mark.thorough
@pytest.mark.parametrize("synced", WINDOWS)
def test_averages_are_counted_in_a_window(synced):
    report = rehearse(on_two_ranks(), ByHand(synced), loader(), skip=["setup", *BESIDE])
    said = [finding.says for finding in report.findings] + [note for note in report.notes if "no_sync" in note]
    assert len(said) == bool(WINDOWS[synced]) and WINDOWS[synced] in "".join(said), str(report)
    assert report.ok == (3 in synced)


def weights_part(rank):
    parted = []
    for synced in WINDOWS:
        model = ByHand(synced)
        fitted(on_two_ranks(max_epochs=1), model, loader())
        parted.append(len(set(of_all_ranks(model.head.bias.item()))) > 1)
    return parted


@pytest.mark.thorough
def test_the_weights_part_in_the_runs_that_are_found():
    assert [result.value for result in run_ranks(weights_part, 2)] == [[3 not in synced for synced in WINDOWS]] * 2


class BlocksTheLast(DDPStrategy):
    """A strategy of one's own, which is late by a micro-batch: nothing is averaged at a window's end."""

    @contextmanager
    def block_backward_sync(self):
        yield

    def pre_backward(self, closure_loss):
        self.model.require_backward_grad_sync = False
        super().pre_backward(closure_loss)


class NeverAverages(BlocksTheLast):
    def _setup_model(self, model):
        wrapped = super()._setup_model(model)
        wrapped.require_backward_grad_sync = False
        return wrapped


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "found"), [(BlocksTheLast, True), (NeverAverages, True), (DDPStrategy, False)])
def test_a_strategy_of_ones_own(strategy, found):
    report = rehearse(on_two_ranks(strategy=strategy(), accumulate_grad_batches=2), Net(), loader(), skip=BESIDE)
    assert [finding.check for finding in report.findings] == ["no_sync"] * found, str(report)


@pytest.mark.thorough
def test_one_rank_has_nobody_to_average_with():
    assert "no_sync" in rehearse(quiet_trainer(), Net(), loader(), skip=BESIDE).passed
