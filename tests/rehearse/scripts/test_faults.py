"""A fault planted in a script that was right is found, alone; the script without it is silent."""

import math
from pathlib import Path

import pytest

from rehearse import script as of_scripts
from rehearse.checks.scripts.horizon import judge_horizon
from rehearse.checks.scripts.validation import judge_validation
from rehearse.checks.scripts.window import judge_windows
from rehearse.report import Judgement
from rehearse.script import Others, judged
from rehearse.scripts.events import Backward, Delivered, Event, PassBegun, ScheduleStep, Step
from rehearse.scripts.journal import CUT, ENDED, Journal, LoaderPlayed, OptimizerPlayed, SchedulePlayed
from rehearse.scripts.player import Play, play_each

SCRIPTS = Path(__file__).with_name("examples")


def judgement_of(script: Path, folder: Path, *, ranks: int = 1) -> Judgement:
    plays = [Play(script, ranks=ranks, rank=rank) for rank in range(min(2, ranks))]
    journal, *others = play_each(plays)
    assert (journal.end, journal.says) == ("ended", "")
    return judged(journal, Others(other_rank=others[0] if others else None))


def planted(name: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of a script with some of its text replaced."""
    text = (SCRIPTS / f"{name}.py").read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = folder / f"{name}.py"
    script.write_text(text)
    return script


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["step", "first_step"])
def test_a_step_of_two_passes_is_silent(how: str, tmp_path: Path):
    [journal] = play_each([Play(SCRIPTS / "two_steps.py", (how,))])
    assert [str(finding) for finding in judged(journal, Others()).findings] == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["alone", "beside"])
def test_a_gradient_that_is_asked_for_is_none_that_a_step_uses(how: str, tmp_path: Path):
    [journal] = play_each([Play(SCRIPTS / "penalty.py", (how,))])
    assert [str(finding) for finding in judged(journal, Others()).findings] == []


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "found"), [("optimizer", []), ("optimizers[0]", ["window"])])
def test_gradients_that_no_replayed_module_gives_are_those_of_their_own_pass(optimizer, found, tmp_path: Path):
    script = planted("layers", tmp_path, ("        optimizer.zero_grad()", f"        {optimizer}.zero_grad()"))
    judgement = judgement_of(script, tmp_path)
    assert [finding.check for finding in judgement.findings] == found
    assert all("10 of 10 steps" in finding.says or "9 of 10 steps" in finding.says for finding in judgement.findings)


@pytest.mark.parametrize(("end", "found"), [(ENDED, ["window"]), (CUT, [])])
def test_a_pass_without_a_step_is_lost_at_the_end_of_the_run_and_not_where_the_play_was_cut(end, found):
    made = Backward("train.py:9", (0,), (True,), True, False)
    steps = [made, Step(0, (0.1,), False, 1.0, False)] * 3
    journal = Journal([*steps, made], optimizers=[OptimizerPlayed("SGD")], end=end)
    assert [finding.check for finding in judge_windows(journal).findings] == found


@pytest.mark.parametrize(("scored", "found"), [(None, []), (range(10, 50), []), (range(80, 120), ["validation"])])
def test_a_score_of_some_training_samples_is_no_leak(scored, found):
    """Trained so far on some of the first hundred samples, drawn with replacement."""
    training = LoaderPlayed(0, 100, tuple(range(100)), replacement=True)
    score = LoaderPlayed(0, 100 if scored is None else len(scored), tuple(scored or range(100)))
    batches = [PassBegun(0, 1), Delivered(0, (1, 2, 3), 3), Backward("train.py:9", (), (), True, False)]
    batches += [PassBegun(1, 1), Delivered(1, (3, 7, 9), 3)]
    journal = Journal(batches, [training, score], end=ENDED)
    assert [finding.check for finding in judge_validation(journal).findings] == found


def cosine_run(epochs: int) -> Journal:
    """As many epochs of ten steps, under a cosine over twenty."""
    rates = [(0.05 * (1 + math.cos(math.pi * epoch / 20)),) for epoch in range(41)]
    events: list[Event] = []
    for epoch in range(epochs):
        events += [Backward("train.py:9", (0,), (True,), True, False), Step(0, rates[epoch], False, 1.0, False)] * 10
        events.append(ScheduleStep(0))
    schedule = SchedulePlayed("CosineAnnealingLR", 0, rates=rates)
    return Journal(events, optimizers=[OptimizerPlayed("SGD")], schedules=[schedule], end=ENDED)


@pytest.mark.parametrize(("epochs_with_other_losses", "found"), [(20, []), (4, ["horizon"])])
def test_the_horizon_of_a_run_that_a_value_ends_is_left_open(epochs_with_other_losses, found):
    judgement = judged(cosine_run(4), Others(moved=(cosine_run(epochs_with_other_losses),)))
    assert [finding.check for finding in judgement.findings] == found
    assert ("horizon" in judgement.not_judged) == (not found)


def by_hand(rates: list[float]) -> Journal:
    journal = cosine_run(0)
    journal.schedules.clear()
    journal.events += [Step(0, (rate,), False, 1.0, False) for rate in rates]
    return journal


STEPS = 200
SHAPES = {
    "a cosine to 0": [0.1 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)],
    "a cosine to a tenth": [0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)],
    "a line to a tenth": [1 - 0.9 * step / STEPS for step in range(STEPS)],
    "Noam's": [min((step + 1) ** -0.5, (step + 1) * 20**-1.5) for step in range(STEPS)],
    "by a factor": [0.99**step for step in range(STEPS)],
    "a warm-up, then one rate": [min(1.0, (step + 1) / 20) for step in range(STEPS)],
}
CUT_SHORT = {
    "a quarter of a cosine": [0.1 * (1 + math.cos(math.pi * step / (4 * STEPS))) for step in range(STEPS)],
    "half a cosine": [0.1 * (1 + math.cos(math.pi * step / (2 * STEPS))) for step in range(STEPS)],
    "half a line": [1 - step / (2 * STEPS) for step in range(STEPS)],
    "a warm-up alone": [(step + 1) / (2 * STEPS) for step in range(STEPS)],
}


@pytest.mark.parametrize("shape", [*SHAPES, *CUT_SHORT])
def test_rates_that_the_script_sets_are_judged_by_their_end(shape):
    rates = SHAPES.get(shape) or CUT_SHORT[shape]
    judgement = judge_horizon(by_hand(rates))
    assert [finding.check for finding in judgement.findings] == ["horizon"] * (shape in CUT_SHORT), str(judgement)
    assert not judge_horizon(by_hand(rates), final_lr=rates[-1]).findings
    assert [one.check for one in judge_horizon(by_hand(rates), final_lr=3 * max(rates)).findings] == ["horizon"]


def test_a_check_that_fails_by_itself_leaves_what_the_others_say(monkeypatch):
    journal = cosine_run(3)
    right = judged(journal, Others())

    def failing(_):
        raise KeyError("epoch")

    monkeypatch.setattr(of_scripts, "judge_order", failing)
    judgement = judged(journal, Others())
    assert judgement.not_judged["order"].why.startswith("the check itself failed: KeyError: 'epoch' (test_faults.py")
    assert (judgement.findings, judgement.facts) == (right.findings, right.facts)


@pytest.mark.parametrize(("calls", "found"), [(3, []), (30, ["horizon"])])
def test_a_schedule_that_another_one_follows_is_judged_where_it_goes_on_to_the_end_alone(calls: int, found: list[str]):
    """A warm-up that rises without end, in each of the first steps, and a schedule that is stepped once an epoch."""
    warm_up = SchedulePlayed("WarmUp", 0, rates=[(0.01 * number,) for number in range(2_000)])
    after_it = SchedulePlayed("MultiStepLR", 0, rates=[(0.1,)] * 2 + [(0.01,)] * 100)
    journal = cosine_run(3)
    journal.schedules[:] = [after_it, warm_up]
    steps = [number for number, event in enumerate(journal.events) if isinstance(event, Step)]
    for number in reversed(steps[:calls]):
        journal.events.insert(number + 1, ScheduleStep(1))
    judgement = judged(journal, Others())
    assert [finding.check for finding in judgement.findings] == found
    assert ("horizon: WarmUp ends after 3 calls, and MultiStepLR goes on behind it" in judgement.notes) == (calls == 3)


@pytest.mark.thorough
@pytest.mark.parametrize(("dropout", "mode", "told"), [(0.5, "eval", True), (0.5, "train", False), (0, "eval", False)])
def test_a_model_that_is_trained_in_evaluation_mode_alone_is_noted(dropout: float, mode: str, told: bool, tmp_path):
    lines = [
        "import torch",
        f"parts = torch.nn.Linear(2, 2), torch.nn.Dropout({dropout}) if {dropout} else torch.nn.ReLU()",
        "model = torch.nn.Sequential(*parts)",
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        "model.eval()",
        "with torch.no_grad(): model(torch.ones(4, 2))",
        f"model.{mode}()",
        "for _ in range(9):",
        "    optimizer.zero_grad()",
        "    model(torch.ones(4, 2)).square().mean().backward()",
        "    optimizer.step()",
    ]
    (tmp_path / "train.py").write_text("\n".join(lines))
    notes = judgement_of(tmp_path / "train.py", tmp_path).notes
    assert any("each backward pass is behind a forward in evaluation mode" in note for note in notes) == told


RIGHT = [("ranks", 2), ("classifier", 1), ("gan", 1), ("scaler", 1), ("stream", 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), RIGHT)
def test_a_right_script_is_silent(name: str, ranks: int, tmp_path: Path):
    judgement = judgement_of(SCRIPTS / f"{name}.py", tmp_path, ranks=ranks)
    assert [str(finding) for finding in judgement.findings] == []
    assert not [name for name, unjudged in judgement.not_judged.items() if unjudged.kind.name == "FAILED"]


@pytest.mark.thorough
def test_a_short_window_that_is_divided_as_a_whole_one_is_noted(tmp_path: Path):
    notes = judgement_of(SCRIPTS / "classifier.py", tmp_path).notes
    [note] = [note for note in notes if note.startswith("window:")]
    assert "): divided by 4 as the others are" in note
    assert "its samples count 0.25 times as much" in note


STEP = """                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
"""
FAULTS = {
    "no zero_grad": (
        "window",
        "are not cleared: 17 of 18 steps",
        [(STEP, STEP.replace("optimizer.zero_grad()", "pass"))],
    ),
    "horizon in micro-batches": (
        "horizon",
        "needs 63 calls, and the run makes 18 (63 is the number of micro-batches of the run)",
        [("T_max=windows * arguments.epochs", "T_max=len(loader) * arguments.epochs")],
    ),
    "a schedule of steps, stepped by epoch": (
        "horizon",
        "needs 18 calls, and the run makes 3 (18 is the number of optimizer steps of the run)",
        [
            (STEP, STEP.replace("schedule.step()", "pass")),
            ("        best = max", "        schedule.step()\n        best = max"),
        ],
    ),
    "a schedule of epochs, stepped by step": (
        "horizon",
        "is stepped 18 times (3 is the number of epochs of the run)",
        [("T_max=windows * arguments.epochs", "T_max=arguments.epochs")],
    ),
    "a StepLR of epochs, stepped by micro-batch": (
        "horizon",
        "is below 1e-08 of its peak from call 9 of 63 on",
        [
            ("CosineAnnealingLR(optimizer, T_max=windows * arguments.epochs)", "StepLR(optimizer, 1, gamma=0.1)"),
            (STEP, STEP.replace("schedule.step()", "pass")),
            ("            loss.backward()\n", "            loss.backward()\n            schedule.step()\n"),
        ],
    ),
    "stepped twice": (
        "horizon",
        "is stepped 36 times, 18 of them directly behind another call, in 18 optimizer steps",
        [(STEP, STEP.replace("schedule.step()", "schedule.step()\n                schedule.step()"))],
    ),
    "eval left on": (
        "setup",
        "left in evaluation mode after an evaluation: from backward pass 22 on, 42 passes of 63",
        [("        model.train()\n", "")],
    ),
    "cleared in each micro-batch": (
        "window",
        "Of 63 backward passes, 45 are cleared before any step uses them",
        [("            loss.backward()\n", "            optimizer.zero_grad()\n            loss.backward()\n")],
    ),
    "cleared between backward and step": (
        "window",
        "18 of 18 steps are made without any",
        [(STEP, STEP.replace("optimizer.step()", "optimizer.zero_grad()\n                optimizer.step()"))],
    ),
    "loss not divided": (
        "window",
        "with 4 micro-batches, and the loss of each, a mean, is not divided (classifier.py:45)",
        [(" / arguments.accumulate\n            loss", "\n            loss")],
    ),
    "the tail waits": (
        "window",
        "The gradients of an epoch's last 1 micro-batch wait",
        [(" or number == len(loader)", ""), ("windows = -(-len(loader) // arguments.accumulate)", "windows = 5")],
    ),
    "the tail is cleared": (
        "window",
        "The last 1 micro-batch of an epoch is lost: cleared before a step",
        [
            (" or number == len(loader)", ""),
            ("windows = -(-len(loader) // arguments.accumulate)", "windows = 5"),
            ("        model.train()\n", "        model.train()\n        optimizer.zero_grad()\n"),
        ],
    ),
    "a head replaced after the optimizer was made": (
        "setup",
        "No optimizer holds 4.weight, 4.bias",
        [
            ("    model[-1] = nn.Linear(16, 3)\n", ""),
            ("    start, best = 0, 0.0\n", "    start, best = 0, 0.0\n    model[-1] = nn.Linear(16, 3)\n"),
        ],
    ),
    "validation samples in the training": (
        "validation",
        "30 samples of 50 that are evaluated are trained on as well: 330, 331, 332, 333, …",
        [("Subset(data, range(330))", "Subset(data, range(360))")],
    ),
    "one order in every epoch": (
        "order",
        "its generator starts at the same seed in each of them",
        [("        model.train()\n", "        model.train()\n        torch.manual_seed(0)\n")],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_fault_of_one_process_is_found_alone(fault: str, tmp_path: Path):
    check, says, changes = FAULTS[fault]
    judgement = judgement_of(planted("classifier", tmp_path, *changes), tmp_path)
    assert [finding.check for finding in judgement.findings] == [check], [str(one) for one in judgement.findings]
    assert says in judgement.findings[0].says


FAULTS_OF_RANKS = {
    "set_epoch never called": ("order", "and nothing calls it", [("    sampler.set_epoch(epoch)\n", "")]),
    "averaged in all but the last": (
        "no_sync",
        "averaged over the 2 ranks in 1 and not in the last",
        [("nullcontext() if steps else", "nullcontext() if not steps else")],
    ),
    "no sampler for the ranks": (
        "dealing",
        "Ranks 0 and 1 are both given 90 samples of 90 in one epoch",
        [("batch_size=6, sampler=sampler", "batch_size=6, shuffle=True")],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [*FAULTS_OF_RANKS])
def test_a_fault_of_several_ranks_is_found_alone(fault: str, tmp_path: Path):
    check, says, changes = FAULTS_OF_RANKS[fault]
    judgement = judgement_of(planted("ranks", tmp_path, *changes), tmp_path, ranks=2)
    assert [finding.check for finding in judgement.findings] == [check], [str(one) for one in judgement.findings]
    assert says in judgement.findings[0].says
