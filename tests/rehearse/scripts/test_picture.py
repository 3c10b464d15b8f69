"""The numbers behind the picture of a night."""

import sys
from pathlib import Path

import pytest

from rehearse.script import Others, judged
from rehearse.scripts.picture import draw_night, marks_of
from tests.rehearse.scripts.playing import play
from tests.rehearse.scripts.test_faults import planted

SCRIPTS = Path(__file__).with_name("examples")


@pytest.mark.thorough
def test_the_marks_are_where_things_happen(tmp_path: Path):
    journal = play(SCRIPTS / "classifier.py", ["--epochs", "2"])
    marks = marks_of(journal)
    steps = [4, 8, 12, 16, 20, 21, 25, 29, 33, 37, 41, 42]
    assert marks.windows == (steps, [4, 4, 4, 4, 4, 1] * 2)
    at, rates = marks.rates[0]
    assert (at, rates[0]) == (steps, 0.01)
    assert (marks.epochs, marks.validations, marks.saves, marks.wrong) == ([0, 21], [21, 42], [21, 42], [])


@pytest.mark.thorough
def test_what_no_step_used_is_marked(tmp_path: Path):
    journal = play(planted("classifier", tmp_path, (" or number == len(loader)", "")))
    assert marks_of(journal).wrong == [63]
    places = {finding.check: finding.micro_batch for finding in judged(journal, Others()).findings}
    assert places == {"window": 25, "horizon": 62}
    draw_night(journal, tmp_path / "night.png", [("window: something", 63), ("setup: of the whole", None)])
    assert (tmp_path / "night.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = play(SCRIPTS / "closure.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib: pip install matplotlib, or leave the picture out"):
        draw_night(journal, tmp_path / "night.png")
