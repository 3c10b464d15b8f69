"""Each mutant of each solution is refused by its check, or listed as equivalent with its reason.

By default a fixed sample of them is tried, with `pytest --thorough` every one.
"""

import random

import pytest
from workbook.exercises import Exercise

from tests.effort import cases
from tests.workbook.equivalent_mutants import EQUIVALENT
from tests.workbook.mutants import Mutant, Solved, cell_sources, exercises, is_accepted, mutants

SOLVED = [pytest.param(solved, id=f"{solved.chapter}-{solved.name}") for solved in exercises()]
SAMPLE = 4
"""Of the mutants of an exercise; of one that trains or starts ranks, one."""


def tried(solved: Solved) -> list[Mutant]:
    every = mutants(solved.solution)
    sample = 1 if solved.exercise.seconds > 30 else SAMPLE
    return random.Random(solved.name).sample(every, min(len(every), cases(sample, len(every))))


@pytest.mark.timeout(1800)  # a rank of an exercise that hangs costs its check's whole limit
@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("solved", SOLVED)
def test_mutants_are_refused(solved):
    known = {change for name, change in EQUIVALENT[solved.chapter] if name == solved.name}
    unlisted = [m.change for m in tried(solved) if m.change not in known and is_accepted(solved, m)]
    assert unlisted == [], f"see `python -m tests.workbook.mutants {solved.chapter}`"


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("solved", SOLVED)
def test_what_is_listed_as_equivalent_is_a_mutant_that_is_accepted(solved):
    made = {mutant.change: mutant for mutant in mutants(solved.solution)}
    listed = [change for name, change in EQUIVALENT[solved.chapter] if name == solved.name]
    assert [change for change in listed if change not in made] == []
    looked_at = random.Random(solved.name).sample(listed, min(len(listed), cases(1, len(listed))))
    assert [change for change in looked_at if not is_accepted(solved, made[change])] == []


def test_what_is_listed_belongs_to_an_exercise_and_has_a_reason():
    names = {(solved.chapter, solved.name) for solved in exercises()}
    for chapter, listed in EQUIVALENT.items():
        for (name, change), reason in listed.items():
            assert (chapter, name) in names, change
            assert len(reason.split()) >= 5, change


def changes(code):
    return {mutant.change for mutant in mutants(code)}


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("x = a + b", "x = a + b  ->  x = a - b"),
        ("x = a // b", "x = a // b  ->  x = -(-a // b)"),
        ("x = a // b", "x = a // b  ->  x = a / b"),
        ("x = -(-a // b)", "x = -(-a // b)  ->  x = a // b"),
        ("x += 2", "x += 2  ->  x -= 2"),
        ("x = math.ceil(a)", "x = math.ceil(a)  ->  x = math.floor(a)"),
        ("x = a < b", "x = a < b  ->  x = a <= b"),
        ("x = a == b", "x = a == b  ->  x = a != b"),
        ("x = 3", "x = 3  ->  x = 4"),
        ("x = 3", "x = 3  ->  x = 2"),
        ("x = True", "x = True  ->  x = False"),
        ("x = a and b", "x = a and b  ->  x = a or b"),
        ("x = a and b", "x = a and b  ->  x = b"),
        ("x = not a", "x = not a  ->  x = a"),
        ("x = [a, b]", "x = [a, b]  ->  x = [b]"),
        ("x = {a: 1, b: 2}", "x = {a: 1, b: 2}  ->  x = {b: 2}"),
        ("x = f(a, b)", "x = f(a, b)  ->  x = f(a)"),
        ("x = f(a, key=b)", "x = f(a, key=b)  ->  x = f(a)"),
        ("x = [a for a in b if a]", "x = [a for a in b if a]  ->  x = [a for a in b]"),
        ("x = a if b else c", "x = a if b else c  ->  x = c"),
        ("a()\nb()", "b()  ->  pass"),
        ("if a:\n    b()", "if a: / b()  ->  b()"),
        ("with a:\n    b()\n    c()", "with a: / b() / c()  ->  b() / c()"),
        ("def f(a):\n    return a", "return a  ->  pass"),
        ("for a in b:\n    if c:\n        break", "break  ->  pass"),
    ],
)
def test_a_slip_of_each_kind_is_made(code, change):
    assert change in changes(code)


@pytest.mark.thorough
def test_no_mutant_is_the_code_itself_or_comes_twice():
    for parameter in SOLVED:
        solution = parameter.values[0].solution
        codes = [mutant.code for mutant in mutants(solution)]
        assert len(codes) == len(set(codes)) > 2 and solution not in codes


def solved(check):
    sources = {"solution-double": "```python\ndef double(x):\n    return x + x\n```"}
    return Solved("05", "check-double", Exercise("double", lambda x: 2 * x, {}, check), sources, "double")


def test_a_weak_check_accepts_a_mutant_and_a_good_one_refuses_it():
    weak, good = solved([dict(x=0)]), solved([dict(x=0), dict(x=3)])
    assert [m.change for m in mutants(weak.solution) if is_accepted(weak, m)] == ["return x + x  ->  return x - x"]
    assert [m.change for m in mutants(good.solution) if is_accepted(good, m)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("code", ["while True: pass", "double = 1 / 0", "other = 3", "def double(x):\n while 1: pass"])
def test_a_mutant_that_never_ends_or_raises_is_refused(code, monkeypatch):
    monkeypatch.setattr("tests.workbook.mutants.SECONDS", 0.3)
    assert not is_accepted(solved([dict(x=3)]), Mutant("", code))


def test_the_sources_of_a_notebook_are_by_the_ids_of_its_cells():
    assert any(cell.startswith("solution-") for cell in cell_sources("05_counting_steps"))
