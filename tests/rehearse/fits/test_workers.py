"""A rehearsal's workers: what they draw, where it is little."""

import multiprocessing
import os

import pytest
import torch

from rehearse.checks.workers import judge_workers
from rehearse.runs.copies import try_on_copies
from rehearse.runs.lightning_run import LightningRun
from tests.rehearse.fits.parts import Net, Points, quiet_trainer


class Flipped(Points):
    """Flips a sample in every other fetch, or more seldom."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return (x.flip(0) if torch.rand(()) < self.share else x), y, index


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_coins_that_fall_alike_in_two_workers_are_no_finding(share):
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        flipping = torch.utils.data.DataLoader(Flipped(share), 8, shuffle=True, num_workers=2)
        [answer] = try_on_copies([judge_workers(LightningRun(quiet_trainer(), Net(), flipping))], seconds=20)
        assert not answer.error
        found += [finding.says for finding in answer.value.findings]
    assert found == []


@pytest.fixture
def fork_server():
    """Where workers come from since Python 3.14."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork server")
def test_workers_come_from_a_fork_server_where_the_caller_has_one_too(fork_server):
    loader = torch.utils.data.DataLoader(Points(16), 8, num_workers=1)
    assert len(list(loader)) == 2  # the caller's server runs, which is no child of a copy
    [answer] = try_on_copies([lambda _: len(list(loader))], seconds=60)
    assert (answer.error, answer.value) == ("", 2)
    assert len(list(loader)) == 2
