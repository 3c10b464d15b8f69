"""A rehearsal's memory: the largest batch of an epoch against the memory that there is."""

import importlib

import pytest
import torch
from torch.utils.data import DataLoader

from course_lib.memory import measure_peak
from rehearse import rehearse, rehearse_loop
from tests.rehearse.fits.parts import loader, mean_squared_error, plain_net, quiet_trainer, script, scripts

BESIDE = ["workers", "window", "bad_step", "growth", "resume", "dealing", "order", "changes", "no_sync"]
longest = importlib.import_module("tests.rehearse.fits.faults.59_memory_longest_batch")


def run(frozen):
    model = longest.Run()
    if frozen:
        model.body.requires_grad_(False)
    data = DataLoader(longest.Sequences(1024), 8, collate_fn=longest.padded)
    return quiet_trainer(), model, data


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [False, True])
def test_the_bound_is_the_measured_peak(frozen):
    _, model, data = run(frozen)
    batch = list(data)[6]  # sample 50 is in it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step():
        model.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured = measure_peak(step).peak_bytes
    enough, too_little = int(measured / 0.9 * 1.02), int(measured / 0.9 * 0.98)
    assert rehearse(*run(frozen), skip=BESIDE, expect={"memory": enough}).ok
    [finding] = rehearse(*run(frozen), skip=BESIDE, expect={"memory": too_little}).findings
    assert finding.check == "memory" and "the largest of an epoch's 8 batches (8 × 1024 × 1)" in finding.says


@pytest.mark.thorough
def test_the_precision_of_the_run_is_the_predictions():
    def facts(precision):
        trainer = quiet_trainer(precision=precision)
        report = rehearse(trainer, *run(False)[1:], skip=BESIDE, expect={"memory": 2**40})
        return report.facts["predicted peak of the largest batch"]

    assert facts("bf16-mixed") != facts("32-true")


@pytest.mark.thorough
def test_of_a_plain_loop():
    def loop(memory):
        model = plain_net()
        optimizer = torch.optim.Adam(model.parameters())
        return rehearse_loop(model, loader(), mean_squared_error, optimizer, skip=BESIDE, expect={"memory": memory})

    assert loop(2**20).ok and [finding.check for finding in loop(100).findings] == ["memory"]


@pytest.mark.thorough
def test_without_a_size_it_is_the_machine_of_the_run():
    trainer, model, data = run(False)
    report = rehearse(trainer, model, data, deep=True, skip=BESIDE)
    assert "memory" in report.passed and "predicted peak of the largest batch" in report.facts
    assert "memory" in rehearse(trainer, model, data, skip=BESIDE).not_judged


@pytest.mark.thorough
def test_a_gpu_that_does_not_answer_leaves_memory_unjudged(monkeypatch):
    trainer, model, data = run(False)
    trainer.strategy._root_device = torch.device("cuda", 0)  # there is none on this machine
    report = rehearse(trainer, model, data, skip=BESIDE)
    assert report.ok is None and "could not be asked for its memory" in report.not_judged["memory"]


NOT_PREDICTED = {
    "04_boring_by_hand",
    "34_game_in_turns",
    "35_windows_across_epochs",
    "36_tail_by_hand",
    "37_sums_by_hand",
    "38_sharpness_aware",
    "05_demo_transformer",
    "08_two_networks",
    "15_exact_accumulation",
    "22_two_loaders",
}
"""By hand, by values of tensors, and from two loaders."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", scripts("right"))
def test_right_runs_fit(name):
    right = script("right", name)
    if getattr(right, "LOOP", False):
        return
    report = rehearse(*right.make_run(), deep=True, skip=BESIDE)
    assert report.ok, str(report)
    why = report.not_judged.get("memory", "")
    assert "Error" not in why, str(report)
    assert bool(why) == (name in NOT_PREDICTED)


@pytest.mark.parametrize("memory", [0, -1, "32 GB"])
def test_a_size_that_is_none(memory):
    with pytest.raises(ValueError, match="memory"):
        rehearse(*run(False), expect={"memory": memory})
