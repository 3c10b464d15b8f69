"""Scripts that start their ranks themselves, epochs of a few samples, schedules that end where they are meant to."""

import re
from pathlib import Path

import pytest

from rehearse.report import RehearsalReport
from rehearse.script import NotRehearsed, rehearse_script

RANKS = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(rank, ranks):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29571", rank=rank, world_size=ranks)
    data = TensorDataset(torch.randn(SAMPLES, 2), torch.randn(SAMPLES, 1))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
"""
WAITS = "    context = mp.spawn(main, args=(2,), nprocs=2, join=False)\n    while not context.join():\n        pass\n"
BY_PROCESS = """
    mp.set_start_method("fork")
    ranks = [mp.Process(target=print, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
"""
SCHEDULED = """
import argparse
import functools
import math
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--total_steps", type=int, default=24)
args = parser.parse_args()
TOTAL = 24
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def part_of_a_cosine(step, total):
    return max(0.0, math.cos(math.pi * 7 / 16 * step / total))


def made(total):
    return lambda step: part_of_a_cosine(step, total)


FACTOR
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        assert loss > 0, "a loss of 0 is a fault of the data"
        loss.backward()
        optimizer.step()
        schedule.step()
"""


def report_of(folder: Path, text: str, **options: int) -> RehearsalReport:
    script = folder / "train.py"
    script.write_text(text)
    return rehearse_script(script, **options)


@pytest.mark.thorough
def test_a_spawn_that_is_waited_for_is_played(tmp_path: Path):
    report = report_of(tmp_path, RANKS.replace("SAMPLES", "32") + WAITS, ranks=2)
    assert (report.ok, report.findings) == (True, ())
    assert report.facts["optimizer steps"] == 24


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("start", "says"),
    [
        (
            "    mp.spawn(main, args=(0,), nprocs=0)\n",
            "it starts 0 processes by spawn, maybe as many as there are GPUs",
        ),
        (BY_PROCESS, "it starts 2 processes by multiprocessing.Process, and a rehearsal sees its own alone"),
    ],
)
def test_what_trains_in_no_process_that_is_played_is_told_so(start: str, says: str, tmp_path: Path):
    with pytest.raises(NotRehearsed, match=re.escape(says)):
        report_of(tmp_path, RANKS.replace("SAMPLES", "32") + start)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("samples", "set_epoch", "found"), [(10, True, []), (10, False, ["order"]), (32, True, []), (32, False, ["order"])]
)
def test_a_sampler_that_is_not_told_its_epoch_is_seen_by_few_samples_as_well(
    samples: int, set_epoch: bool, found: list[str], tmp_path: Path
):
    text = RANKS.replace("SAMPLES", str(samples)) + "    mp.spawn(main, args=(2,), nprocs=2)\n"
    report = report_of(tmp_path, text if set_epoch else text.replace("loader.sampler.set_epoch(epoch)", "pass"))
    assert [finding.check for finding in report.findings] == found
    if samples == 10 and set_epoch:
        assert report.not_judged["order"] == "two epochs of fewer than 8 samples may be alike by chance"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "factor",
    [
        "factor = made(24)",
        "factor = functools.partial(part_of_a_cosine, total=24)",
        "factor = lambda step: part_of_a_cosine(step, TOTAL)",
        "factor = lambda step: part_of_a_cosine(step, args.total_steps)",
    ],
)
def test_a_schedule_that_is_to_end_above_zero_is_right_by_its_own_number(factor: str, tmp_path: Path):
    report = report_of(tmp_path, SCHEDULED.replace("FACTOR", factor))
    assert report.findings == ()
    assert any("its function goes by 24, so it seems to be meant to end there" in note for note in report.notes)
    wrong = report_of(tmp_path, SCHEDULED.replace("FACTOR", factor).replace("24", "96"))
    assert [finding.check for finding in wrong.findings] == ["horizon"]


@pytest.mark.thorough
def test_a_horizon_of_the_batches_of_one_epoch_is_called_so(tmp_path: Path):
    cosine = "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))"
    text = SCHEDULED.replace("FACTOR\n", "").replace(
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)", cosine
    )
    text = text.replace("        schedule.step()", "    schedule.step()").replace("range(3)", "range(5)")
    [finding] = report_of(tmp_path, text).findings
    assert "(8 is the number of batches of one epoch)" in finding.says


@pytest.mark.thorough
def test_an_assertion_about_a_loss_is_no_fork_in_the_run(tmp_path: Path):
    report = report_of(tmp_path, SCHEDULED.replace("FACTOR", "factor = made(24)"))
    assert not any("answering" in note for note in report.notes)


@pytest.mark.thorough
def test_a_horizon_of_epochs_times_batches_that_is_stepped_by_epoch_is_found(tmp_path: Path):
    # The number of calls, that of the epochs, stands in its function as well.
    text = SCHEDULED.replace("FACTOR", "factor = lambda step: 1 - step / (EPOCHS * len(loader))")
    text = text.replace("        schedule.step()", "    schedule.step()").replace("range(3)", "range(EPOCHS)")
    [finding] = report_of(tmp_path, "EPOCHS = 5\n" + text).findings
    assert "(40 is the number of optimizer steps of the run)" in finding.says


@pytest.mark.thorough
def test_a_warm_up_that_is_longer_than_the_run_is_found_by_a_function_that_knows_the_run(tmp_path: Path):
    factor = "factor = lambda step: step / 100 if step < 100 else (24 - step) / (24 - 100)"
    [finding] = report_of(tmp_path, SCHEDULED.replace("FACTOR", factor)).findings
    assert "The warm-up is longer than the run" in finding.says


@pytest.mark.thorough
def test_a_script_that_does_not_compile_fails_by_itself(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = (\n")
    with pytest.raises(NotRehearsed, match=r"train\.py fails by itself:\n(.*\n)*SyntaxError"):
        rehearse_script(script)
