"""The numbers behind chapter 00's figure and widget, what its exercise tells, and its table of the chapters."""

import json
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from workbook.ch00_start_here import count_units, figure_of_units, first_answer, named, units_explorer
from workbook.exercises import NotSolved
from workbook.trainers import quiet_trainer

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


class Counting(LightningModule):
    """Counts what a real Trainer does with its samples."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.samples = self.micro_batches = 0

    def training_step(self, batch, batch_idx):
        self.samples += len(batch)
        self.micro_batches += 1
        return self.net(batch[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("batch_size", "k", "windows"), [(1, 1, 1), (2, 3, 4), (4, 2, 5), (3, 4, 1)])
def test_the_units_are_those_of_a_real_trainer(batch_size, k, windows):
    counts = count_units(batch_size, k, windows)
    model = Counting()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=k, accelerator="cpu")
    trainer.fit(model, DataLoader(range(counts["sample"]), batch_size=batch_size))
    assert (model.samples, model.micro_batches) == (counts["sample"], counts["micro-batch"])
    assert trainer.global_step == counts["update"] == windows


def test_the_figure_has_a_box_for_each_and_a_triangle_for_each_update():
    (axes,) = figure_of_units(batch_size=2, k=3, windows=4).axes
    assert [sum(box.get_y() + box.get_height() / 2 == row for box in axes.patches) for row in range(3)] == [24, 12, 4]
    assert [line.get_xdata()[0] for line in axes.lines] == [6, 12, 18, 24]
    assert axes.get_title() == "24 samples: 12 micro-batches and 4 updates"
    assert axes.get_xlim() == (0, 24)


def test_one_of_a_unit_has_no_plural():
    assert [named(1, "window"), named(2, "window"), named(2, "micro-batch")] == [
        "1 window",
        "2 windows",
        "2 micro-batches",
    ]


@pytest.mark.thorough
def test_the_widget_opens_on_the_figure_and_has_an_answer_to_its_question():
    explorer = units_explorer()
    assert [control.value for control in explorer.controls.values()] == [2, 3, 4]
    assert explorer.text.endswith("one update at the end of each window: 4 updates")
    assert "6 micro-batches of 4 samples: 24 samples" in explorer.set(batch_size=4, k=3, windows=2)


def test_no_setting_of_the_widget_shows_the_answer_of_the_exercise():
    explorer = units_explorer()
    most = {name: control.max for name, control in explorer.controls.items()}
    assert count_units(**most)["micro-batch"] < first_answer.solution


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (10, "10 is the number of optimizer steps, and so of windows"),
        (2.5, "2.5 divides by the size of a window"),
        (2, "2 is 10 / 4 rounded down"),
        (3, "3 is 10 / 4 rounded up"),
        (14, "14 is the sum of steps and window size"),
        (36, "36 leaves out one window"),
        (44, "44 has one window too many"),
        (41, "the first answer: 41 is not it."),
        ("40", "a number is asked for, got '40'"),
        (..., "no answer yet"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(answer, told):
    with pytest.raises(NotSolved, match=re.escape(told)):
        first_answer.check(answer)


def test_the_table_has_every_chapter_under_its_own_question():
    cells = json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text(encoding="utf-8"))["cells"]
    (table,) = ("".join(cell["source"]) for cell in cells if cell["id"] == "chapters")
    rows = dict(re.findall(r"\]\((\w+)\.ipynb\) \| (.+?) \|", table))
    others = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.stem != "00_start_here"]
    assert list(rows) == [path.stem for path in others]
    for path in others:
        first_cell = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        assert first_cell.partition("\n")[0].partition(" · ")[2] == rows[path.stem]


def test_the_readme_the_table_and_each_chapter_state_the_same_minutes():
    cells = json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text(encoding="utf-8"))["cells"]
    (table,) = ("".join(cell["source"]) for cell in cells if cell["id"] == "chapters")
    stated = {stem: minutes.split(" + ") for stem, minutes in re.findall(r"\]\((\w+)\.ipynb\) .*\| (.+?) \|\n?", table)}
    readme = (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")
    for stem, minutes in stated.items():
        assert f"(notebooks/{stem}.ipynb) |" in readme
        row = next(line for line in readme.splitlines() if f"(notebooks/{stem}.ipynb) |" in line)
        assert f"| {' + '.join(minutes)} |" in row
        opening = json.loads((NOTEBOOKS / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"][0]["source"]
        said = re.findall(r"\d+", opening[-1])
        if "two sittings" in opening[-1]:
            said = [str(int(said[0]) + int(said[1])), *said[2:]]
        assert said[: len(minutes)] == minutes, stem
