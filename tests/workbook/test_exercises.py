"""Every exercise of every notebook, three ways: the stub fails, the solution passes, each wrong answer is named."""

import importlib
import json
import math
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from workbook.exercises import Exercise, NotSolved

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def cell_sources(notebook):
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def exercises():
    for notebook in CHAPTERS:
        sources = cell_sources(notebook)
        catalogue = importlib.import_module(f"workbook.ch{notebook}")
        for cell, source in sources.items():
            if cell.startswith("check-"):
                name, answer = re.search(r"\w+\.(\w+)\.check\((\w+)\)", source).groups()
                yield pytest.param(getattr(catalogue, name), sources, cell.removeprefix("check-"), answer, id=cell)


EXERCISES = list(exercises())


def run(code, answer):
    reader = types.ModuleType("reader")  # a module of its own, so that the classes in it can be pickled
    sys.modules["reader"] = reader
    vars(reader).update(math=math, np=np, torch=torch)
    exec(code, vars(reader))
    return getattr(reader, answer)


@pytest.mark.parametrize(("exercise", "sources", "name", "answer"), EXERCISES)
def test_stub_fails_and_solution_passes(exercise, sources, name, answer, capsys):
    with pytest.raises(NotSolved):
        exercise.check(run(sources[f"stub-{name}"], answer))
    solution = re.search(r"```python\n(.*?)```", sources[f"solution-{name}"], re.DOTALL).group(1)
    exercise.check(run(solution, answer))
    assert "solved" in capsys.readouterr().out


@pytest.mark.parametrize(("exercise", "sources", "name", "answer"), EXERCISES)
def test_each_catalogued_wrong_answer_gets_its_own_message(exercise, sources, name, answer):
    wrong_answers = exercise.wrong_answers()
    for message, wrong in wrong_answers.items():
        with pytest.raises(NotSolved) as caught:
            exercise.check(wrong)
        before, _, after = message.partition("{got}")
        assert str(caught.value).endswith(after) and before in str(caught.value)
    assert len(wrong_answers) >= 2


@pytest.mark.parametrize(("exercise", "sources", "name", "answer"), EXERCISES)
def test_each_exercise_has_two_hints_and_a_card(exercise, sources, name, answer):
    card = next(
        s for c, s in sources.items() if c.startswith("exercise-") and sources_follow(sources, c, f"stub-{name}")
    )
    assert card.count("<details><summary>Hint") == 2
    assert "Solution</summary>" in sources[f"solution-{name}"]


def sources_follow(sources, first, second):
    cells = list(sources)
    return cells.index(second) == cells.index(first) + 1


def test_every_catalogued_exercise_is_in_its_notebook():
    for notebook in CHAPTERS:
        checked = {id(p.values[0]) for p in EXERCISES if p.values[1] == cell_sources(notebook)}
        catalogued = {id(e) for e in importlib.import_module(f"workbook.ch{notebook}").EXERCISES}
        assert checked == catalogued


double = Exercise(
    "double",
    solution=lambda x: 2 * x,
    cases=[dict(x=0), dict(x=2), dict(x=3)],
    misconceptions=lambda x: {"{got} is the square.": x * x},
)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "double: no answer yet"),
        (6, "double: a function is asked for, got 6"),
        (lambda x: None, "double(x=0) returned nothing"),
        (lambda x: 1 / x, "double(x=0) raised ZeroDivisionError"),
        (lambda x: len(x), "double(x=0) raised TypeError: object of type 'int' has no len()"),
        (lambda x: 3 * x, "double(x=2) should be 4, got 6."),
        (lambda x: x**2, "double(x=3) should be 6, got 9.\n9 is the square."),
        (lambda y: y, "double(x=0) raised TypeError"),
        (lambda x: "six", "double(x=0) should be 0, got 'six'."),
    ],
)
def test_the_first_failing_case_is_the_diagnosis(answer, message):
    with pytest.raises(NotSolved, match="^" + re.escape(message)):
        double.check(answer)


def test_a_judge_says_what_is_compared():
    twice = Exercise(
        "twice", solution=lambda: 2, judge=lambda fn: lambda n: [fn()] * n, cases=[{"n": 2}], misconceptions={}
    )
    twice.check(lambda: 2)
    with pytest.raises(NotSolved, match=re.escape("twice(n=2) should be [2, 2], got [3, 3].")):
        twice.check(lambda: 3)


def test_numpys_numbers_are_numbers_and_arrays_are_wrong_answers():
    twelve = Exercise("n", solution=12, misconceptions={})
    twelve.check(np.int64(12))
    with pytest.raises(NotSolved, match="a number is asked for, got '12'"):
        twelve.check("12")
    with pytest.raises(NotSolved, match="got array"):
        double.check(lambda x: np.array([1, 2]))


def test_a_wrong_number_does_not_give_the_answer_away():
    with pytest.raises(NotSolved) as caught:
        Exercise("n", solution=12, misconceptions={}).check(11)
    assert "12" not in str(caught.value)


def test_in_a_notebook_the_message_stands_alone():
    assert NotSolved("told\nwhy")._render_traceback_() == ["NotSolved: told", "why"]
