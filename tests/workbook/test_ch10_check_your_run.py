"""The runs of chapter 10, what trials of them see, and what the chapter says of other tools and of CI."""

import json
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
import yaml
from workbook import ch10_check_your_run as chapter
from workbook.ch10_exercises import masked_labels, stops_early, two_ranks
from workbook.ch10_runs import awkward, mended, night, uneven
from workbook.ch10_runs.parts import Line, Neighbours, Points, Tagger, Tags
from workbook.exercises import NotSolved
from workbook.trainers import quiet_trainer

from course_lib.callbacks import ExactAccumulation
from rehearse import CHECKS, rehearse
from tests.notebook_rules import ROOT, source
from tests.rehearse.fits.peers.as_csv import TARGET, as_csv

CELLS = json.loads((ROOT / "notebooks" / "10_check_your_run.ipynb").read_text(encoding="utf-8"))["cells"]
PROSE = "\n".join(source(cell) for cell in CELLS if cell["cell_type"] == "markdown")


# -------------------------------------------------------------------------------------------------- the chapter's run


@pytest.mark.thorough
def test_the_run_has_three_faults_and_the_mended_one_none():
    assert [finding.check for finding in rehearse(*night.make_run()).findings] == ["horizon", "setup", "order"]
    assert rehearse(*mended.make_run()).ok


class MendedHorizon(mended.Digits):
    """``trainer.estimated_stepping_batches`` wants a Trainer, which the trials by hand do not have."""

    def horizon(self):
        return 48


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "sampler", "orders", "still"),
    [(night.Digits, night.Shuffled, 1, {"net.0.weight"}), (MendedHorizon, mended.ShuffledByEpoch, 6, set())],
)
def test_the_trials_by_hand_foretell_what_a_fit_does(module, sampler, orders, still):
    tried = chapter.try_by_hand(module(), sampler(), steps=48, epochs=6)
    torch.manual_seed(0)
    seen = chapter.train(*night.make_run(module, sampler))
    assert seen.rates == pytest.approx(tried.rates) and len(seen.rates) == 48
    assert len(set(seen.orders)) == len(set(map(tuple, tried.orders))) == orders
    labels = night.load_digits()[1]
    assert seen.orders == [tuple(labels[order].tolist()) for order in tried.orders]
    assert {name for name, count in seen.moved.items() if count == 0} == still
    assert {name for name, (_, is_held) in tried.held.items() if not is_held} == still


class Warns(Line):
    def on_train_start(self):
        warnings.warn("The 'train_dataloader' does not have many workers", UserWarning, stacklevel=2)
        warnings.warn("is deprecated", FutureWarning, stacklevel=2)
        warnings.warn("something is off", UserWarning, stacklevel=2)


def test_what_is_heard_are_warnings_and_no_hints_on_speed_or_versions():
    data = torch.utils.data.DataLoader(Points(8), 4)
    assert chapter.train(quiet_trainer(max_epochs=1, accelerator="cpu"), Warns(), data).warnings == ["something is off"]
    empty = torch.utils.data.DataLoader([], 4)
    heard = chapter.train(quiet_trainer(max_epochs=1, accelerator="cpu"), Line(), empty).warnings
    assert heard and all("is zero" in warning for warning in heard)


@pytest.mark.thorough
def test_a_report_is_printed_without_its_seconds(capsys):
    report = rehearse(*mended.make_run())
    chapter.print_report(report)
    told = capsys.readouterr().out
    assert told.startswith("Ready.\n") and f"{report.seconds:.1f} s" not in told
    assert told.rstrip("\n").splitlines()[1:] == str(report).splitlines()[1:]


# --------------------------------------------------------------------------------------------- figures and the widget


def test_the_figure_of_trials_shows_their_numbers():
    tried = chapter.try_by_hand(night.Digits(), night.Shuffled(), steps=48, epochs=6)
    rate, order, parameters = chapter.figure_of_trials(tried, "a title").axes
    assert rate.lines[0].get_ydata() == pytest.approx([100 * rate / 0.01 for rate in tried.rates])
    assert [text.get_text() for text in rate.texts] == ["86 %"]
    assert order.images[0].get_array().tolist() == [epoch[:16] for epoch in tried.orders]
    assert [bar.get_width() for bar in parameters.patches] == [0, 100, 100, 100]
    assert [text.get_text() for text in parameters.texts] == ["no optimizer holds it"]


@pytest.mark.thorough
def test_one_setting_of_the_widget_has_nothing_wrong_and_it_opens_on_the_run():
    explorer = chapter.trial_explorer()
    assert "85.9 %" in explorer.text and "epochs: 1" in explorer.text and "net.0.weight" in explorer.text
    right = []
    for horizon in chapter.HORIZONS:
        for weights in chapter.GROUPS:
            for order in chapter.SAMPLERS:
                told = explorer.set(horizon=horizon, weights=weights, order=order)
                if "has 0.1 %" in told and "epochs: 6" in told and told.endswith("holds: none"):
                    right.append((horizon, weights, order))
    assert right == [("48 (optimizer steps)", "ndim > 1", "(seed, epoch)")]


def test_the_recorded_answers_are_those_of_the_results():
    assert TARGET.read_text(encoding="utf-8") == as_csv(), "run: python -m tests.rehearse.fits.peers.as_csv"


def test_the_table_and_the_figure_of_planted_faults_count_alike():
    about, planted = chapter.read_planted()
    assert set(about) == {"recorded", "versions", "right twins complained of"}
    rows = chapter.by_check(planted)
    assert rows[-1][:2] == ["all", len(planted)] and len({fault.fault for fault in planted}) == len(planted)
    bars = chapter.figure_of_planted(planted, "a title").axes[0].patches
    blue = [bar for bar in bars if bar.get_facecolor()[:3] == pytest.approx((0, 0x72 / 255, 0xB2 / 255))]
    for row, total in enumerate(rows[-1][2:]):
        assert sum(bar.get_y() < row < bar.get_y() + bar.get_height() for bar in blue) == total
    assert len(bars) == len(planted) * len(chapter.TOOLS)
    summary = (ROOT / "tests" / "rehearse" / "fits" / "peers" / "RESULTS.md").read_text(encoding="utf-8")
    for tool, total in zip(chapter.TOOLS[:-1], rows[-1][2:-1], strict=True):
        assert re.search(rf"^\| {tool} \| \d+ \| {total} \|", summary, re.MULTILINE), tool


def test_the_chapter_says_of_every_check_how_it_tries():
    table = PROSE.partition("### How does each check try?")[2].partition("\n### ")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"check"} == set(CHECKS)


# ----------------------------------------------------------------------------------------------------- the limits


def test_a_fault_that_rehearse_cannot_find_is_one():
    trainer, model, data = uneven.make_run()
    report = rehearse(trainer, model, data)
    assert report.ok and "window" in report.passed and {"length", "horizon"} <= set(report.not_judged)
    trainer.fit(model, data)
    counts = -model.weights.detach()
    assert counts[0] == 4 * counts[15] == 0.25 and counts.count_nonzero() == 10


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "judged", "found"),
    [
        ("a billion samples", "dealing", []),
        ("a step that hangs", "setup", []),
        ("a stream without an end", "", ["length"]),
    ],
)
def test_what_cannot_be_tried_is_named_and_the_rest_is_judged(name, judged, found):
    report = rehearse(*awkward.make_run(name), seconds=5, skip=["bad_step"])
    assert [finding.check for finding in report.findings] == found
    assert not judged or judged in report.not_judged
    assert len(report.passed) >= 4


# ---------------------------------------------------------------------------------------------- in a reader's project


def block(language, start):
    """The code block of the chapter that begins so."""
    return next(b for b in re.findall(rf"```{language}\n(.*?)```", PROSE, re.DOTALL) if b.startswith(start))


@pytest.mark.thorough
def test_the_test_to_copy_passes_for_a_run_that_is_ready_and_fails_with_the_report_for_another(tmp_path):
    test = block("python", "from rehearse import assert_ready")
    for name in ("night", "mended"):
        (tmp_path / name / "my_project").mkdir(parents=True)
        train = tmp_path / name / "my_project" / "train.py"
        train.write_text(f"from workbook.ch10_runs.{name} import make_run as make_run\n")
        changed = test.replace("my_project.train", f"{name}.my_project.train")
        (tmp_path / f"test_{name}.py").write_text(changed)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "notebooks"))),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "test_night.py" in done.stdout and "Not ready: 3 findings, " in done.stdout


def test_the_job_to_copy_is_a_workflow_that_runs_the_command():
    job = yaml.safe_load(block("yaml", "name: rehearse"))
    steps = job["jobs"]["rehearse"]["steps"]
    assert "python -m rehearse my_project.train:make_run" in [step.get("run") for step in steps]
    assert set(job["jobs"]["rehearse"]) >= {"runs-on", "steps"}


# -------------------------------------------------------------------------------------------------------- exercises


def run_of_one_rank():
    trainer = quiet_trainer(max_epochs=10, accelerator="cpu", devices=1)
    return trainer, Line(), torch.utils.data.DataLoader(Points(36), batch_sampler=Neighbours(36))


class SumAndCount(Tagger):
    def training_step(self, batch, batch_idx):
        loss_sum = torch.nn.functional.cross_entropy(self.scores(batch[0]), batch[1], reduction="sum")
        return {"loss": loss_sum, "count": (batch[1] != -100).sum()}


def with_a_dict():
    flags = {"accumulate_grad_batches": 4, "callbacks": [ExactAccumulation()]}
    trainer = quiet_trainer(max_epochs=1, accelerator="cpu", **flags)
    return [trainer, SumAndCount(), torch.utils.data.DataLoader(Tags(), 8)]


@pytest.mark.thorough
def test_a_right_answer_in_another_style_passes():
    masked_labels.check(with_a_dict)


def with_another_name():
    return {"trainer": None}


@pytest.mark.parametrize(
    ("exercise", "answer", "told"),
    [
        (stops_early, run_of_one_rank, "the batches stay as they were"),
        (stops_early, with_another_name, "should return (trainer, model, data), got dict"),
        (stops_early, lambda: 1 / 0, "ZeroDivisionError"),
        (stops_early, 50, "a function is asked for, got 50"),
        (two_ranks, run_of_one_rank, "the run has one rank"),
        (two_ranks, with_another_name, "should return (trainer, model, data), got dict"),
    ],
)
def test_a_natural_wrong_answer_gets_its_own_message(exercise, answer, told):
    with pytest.raises(NotSolved, match=re.escape(told)):
        exercise.check(answer)


def with_a_loose_layer():
    """Has the counts of the right run, and a layer that no optimizer holds."""

    class Loose(Line):
        def __init__(self):
            super().__init__(horizon=50)
            self.more = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.loss(batch) + self.more(batch[1].float().unsqueeze(1)).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.horizon)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    trainer = quiet_trainer(max_epochs=10, accelerator="cpu")
    return trainer, Loose(), torch.utils.data.DataLoader(Points(36), 8, shuffle=True)


@pytest.mark.thorough
def test_a_run_whose_counts_are_right_is_judged_by_rehearse_too():
    with pytest.raises(NotSolved, match="what was counted is right, and a rehearsal still finds this: No optimizer"):
        stops_early.check(with_a_loose_layer)


@pytest.mark.thorough
def test_the_gradient_is_checked_though_rehearse_is_content():
    [wrong] = [answer for told, answer in masked_labels.misconceptions.items() if "0.44 times" in told]
    assert rehearse(*wrong()).ok
    with pytest.raises(NotSolved, match=re.escape("0.44 times that of one big batch")):
        masked_labels.check(wrong)
