"""preflight's workers: what they draw, where it is little."""

import pytest
import torch

from course_lib.preflight.checks.workers import judge_workers
from course_lib.preflight.runs.copies import try_on_copies
from course_lib.preflight.runs.lightning_run import LightningRun
from tests.preflight.parts import Net, Points, quiet_trainer


class Flipped(Points):
    """Flips a sample in every other fetch, or more seldom."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return (x.flip(0) if torch.rand(()) < self.share else x), y, index


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
