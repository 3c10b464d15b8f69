"""Every exercise of every notebook, three ways: the stub fails, the solution passes, each wrong answer is named."""

import importlib
import itertools
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from workbook.exercises import Exercise, NotSolved

from tests import effort
from tests.workbook.mutants import CHAPTERS, cell_sources, exercises, run

EXERCISES = [pytest.param(s.exercise, s.sources, s.name, s.answer, id=s.cell) for s in exercises()]


@pytest.mark.parametrize(("exercise", "sources", "name", "answer"), EXERCISES)
def test_stub_fails_and_solution_passes(exercise, sources, name, answer, capsys):
    with pytest.raises(NotSolved):
        exercise.check(run(sources[f"stub-{name}"], answer))
    solution = re.search(r"```python\n(.*?)```", sources[f"solution-{name}"], re.DOTALL).group(1)
    exercise.check(run(solution, answer))
    assert "solved" in capsys.readouterr().out


@pytest.mark.timeout(1800)  # a rank of an exercise that hangs costs its check's whole limit
@pytest.mark.parametrize(("exercise", "sources", "name", "answer"), EXERCISES)
def test_each_catalogued_wrong_answer_gets_its_own_message(exercise, sources, name, answer):
    wrong_answers = exercise.wrong_answers()
    for message, wrong in [*wrong_answers.items()][: effort.cases(1, len(wrong_answers))]:
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


@pytest.mark.parametrize(
    "answer",
    [np.int64(12), np.array(12), np.array([12]), torch.tensor(12), torch.tensor([[12.0]]), Fraction(12), Decimal(12)],
    ids=repr,
)
def test_a_number_in_another_style_is_that_number(answer):
    Exercise("n", solution=12, misconceptions={}).check(answer)


@pytest.mark.parametrize(
    "answer", [np.int64(11), np.array([11]), torch.tensor(11), Fraction(25, 2), math.inf, math.nan]
)
def test_another_number_in_another_style_is_refused(answer):
    with pytest.raises(NotSolved, match="is not it"):
        Exercise("n", solution=12, misconceptions={}).check(answer)


halves = Exercise(
    "halves", solution=lambda n: [i / 3 for i in range(n)], cases=[dict(n=0), dict(n=3)], misconceptions={}
)


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: (i / 3 for i in range(n)),
        lambda n: map(Fraction, range(n), [3] * n),
        lambda n: tuple(np.float64(i) / 3 for i in range(n)),
        lambda n: [Fraction(i, 3) for i in range(n)],
        lambda n: [torch.tensor(i) / 3 for i in range(n)],
        lambda n: torch.arange(n) / 3,
        lambda n: np.arange(n, dtype=np.float32) / 3,
        lambda n: (torch.arange(n) / 3).tolist(),
    ],
)
def test_a_list_in_another_style_is_that_list(answer):
    halves.check(answer)


@pytest.mark.parametrize("off", [1e-6, 1e-7])
def test_a_list_that_no_rounding_explains_is_refused(off):
    with pytest.raises(NotSolved, match="should be"):
        halves.check(lambda n: [i / 3 + off for i in range(n)])


def test_a_list_without_end_is_refused():
    with pytest.raises(NotSolved, match=re.escape("halves(n=0) should be []")):
        halves.check(lambda n: itertools.count())


def test_infinity_is_no_other_number_and_nan_is_nan():
    infinite = Exercise("f", solution=lambda x: x, cases=[dict(x=math.inf), dict(x=math.nan)], misconceptions={})
    infinite.check(lambda x: x)
    with pytest.raises(NotSolved, match=re.escape("f(x=inf) should be inf, got 5.")):
        infinite.check(lambda x: 5)
    with pytest.raises(NotSolved, match=re.escape("f(x=nan) should be nan, got 0.")):
        infinite.check(lambda x: x if x > 0 else 0)


def test_arrays_are_wrong_answers():
    twelve = Exercise("n", solution=12, misconceptions={})
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
