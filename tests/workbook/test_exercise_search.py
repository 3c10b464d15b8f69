"""What a check does beside its cases: it searches, it ends what hangs, and tells of what an answer changes."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from workbook.calls import Allowed, OutOfTime, ended_after
from workbook.exercises import Exercise, NotSolved, PropertyExercise

from course_lib.launch import run_ranks


def drawn(generator):
    return {"n": generator.choice([0, 1, generator.randrange(1000)]), "k": generator.randint(1, 5)}


windows = Exercise(
    "windows",
    solution=lambda n, k: -(-n // k),
    cases=[dict(n=8, k=4), dict(n=9, k=4)],
    misconceptions=lambda n, k: {
        "{got} is the floor.": n // k,
        "{got} is one window too many where k divides n.": n // k + 1,
        "{got} leaves out a single micro-batch.": 0 if n == 1 else -(-n // k),
    },
    search=drawn,
)


def fails(exercise, answer):
    with pytest.raises(NotSolved) as caught:
        exercise.check(answer)
    return str(caught.value)


def test_a_right_answer_is_compared_in_two_hundred_drawn_cases(capsys):
    windows.check(lambda n, k: (n + k - 1) // k)
    assert capsys.readouterr().out == "windows: solved, 2 cases and 200 drawn at random.\n"


def test_what_the_cases_let_through_the_search_finds_and_the_shortest_case_is_told():
    told = fails(windows, lambda n, k: -(-n // k) if n < 900 else 0)
    n, k, expected = map(int, re.fullmatch(r"windows\(n=(\d+), k=(\d+)\) should be (\d+), got 0\.", told).groups())
    assert 900 <= n < 1000 and expected == -(-n // k)


def test_an_error_in_a_drawn_case_is_told_as_in_the_others():
    told = fails(windows, lambda n, k: -(-n // k) * n // n)
    assert re.fullmatch(r"windows\(n=0, k=\d\) raised ZeroDivisionError: integer division or modulo by zero", told)


def test_a_misconception_that_only_drawn_cases_show_has_its_name():
    told = fails(windows, lambda n, k: 0 if n == 1 else -(-n // k))
    assert re.fullmatch(r"windows\(n=1, k=\d\) should be 1, got 0\.\n0 leaves out a single micro-batch\.", told)


def test_the_search_draws_the_same_in_every_run():
    seen = []
    for _ in range(2):
        calls = []
        windows.check(lambda n, k, calls=calls: calls.append((n, k)) or -(-n // k))
        seen.append(calls)
    assert seen[0] == seen[1] and len(set(seen[0])) > 50


@pytest.mark.parametrize("seed", ["random", "numpy", "torch"])
def test_a_search_and_an_answer_leave_the_generators_as_they_were(seed):
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    seed_it = {"random": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}[seed]
    told = fails(windows, lambda n, k: (seed_it(3), -(-n // k))[1])
    whose = {"random": "Python's", "numpy": "NumPy's", "torch": "torch's"}[seed]
    assert f"windows(n=8, k=4) returns what it should. Afterwards {whose} global generator is not as it was" in told
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002


def test_where_drawing_is_asked_for_it_is_allowed():
    dice = Exercise("dice", lambda: 0, {}, judge=lambda roll: lambda: roll() // 7, allowed=Allowed(draw=True))
    dice.check(lambda: random.randint(1, 6))


largest = Exercise(
    "largest",
    solution=lambda values, keep: max(values),
    cases=[dict(values=[1, 2], keep={"a": [1]}), dict(values=[3, 1], keep={"a": [1]})],
    misconceptions={},
)


def test_an_answer_that_changes_its_arguments_is_told_so():
    assert fails(largest, lambda values, keep: values.sort() or values[-1]) == (
        "largest(values=[3, 1], keep={'a': [1]}) returns what it should. The call changes `values`, which is its "
        "caller's: it was [3, 1] and is [1, 3]. Work on a copy."
    )
    assert "changes `keep`" in fails(largest, lambda values, keep: keep["a"].append(1) or max(values))
    Exercise("", largest.solution, {}, largest.cases, allowed=Allowed(change_arguments=True)).check(
        lambda values, keep: values.sort() or values[-1]
    )


def test_nan_that_stays_nan_is_no_change():
    cases = [dict(values=[2.0, float("nan")], tensor=torch.tensor([float("nan"), -0.0]), array=np.array([np.nan]))]
    first = Exercise("first", lambda values, tensor, array: values[0], {}, cases)
    first.check(lambda values, tensor, array: values[0])
    assert "changes `tensor`" in fails(first, lambda values, tensor, array: tensor.zero_() is None or values[0])
    assert "changes `array`" in fails(first, lambda values, tensor, array: array.fill(0) or values[0])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda model: torch.set_grad_enabled(False), "Gradients are switched off afterwards"),
        (lambda model: model.eval(), "`model` is not as it was: its layers are in evaluation mode"),
        (lambda model: model.requires_grad_(False), "other parameters require a gradient"),
        (lambda model: model(torch.ones(1, 2)).sum().backward(), "its parameters have other gradients"),
        (lambda model: model[0].bias.data.add_(1), "its parameters or buffers have other values"),
    ],
)
@pytest.mark.parametrize("kind", ["cases", "properties"])
def test_what_an_answer_does_to_a_model_is_told(harm, told, kind):
    def count(model):
        with torch.random.fork_rng():
            harm(model)
        return sum(p.numel() for p in model.parameters())

    def right(model):
        return sum(p.numel() for p in model.parameters())

    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    if kind == "cases":
        exercise = Exercise("count", right, {}, [dict(model=model)])
    else:
        exercise = PropertyExercise("count", lambda answer: None if answer(model) == 3 else "it is 3", {})
    exercise.check(right)
    assert told in fails(exercise, count)
    assert torch.is_grad_enabled()


def test_an_answer_that_prints_is_told_so(capsys):
    windows.check(lambda n, k: print(n) or -(-n // k))
    assert capsys.readouterr().out == (
        "windows: solved, 2 cases and 200 drawn at random. It prints as well, in 202 calls, which is not asked for: "
        "first '8'.\n"
    )
    assert fails(windows, lambda n, k: print(-(-n // k))) == (
        "windows(n=8, k=4) returned nothing. Does it end with `return`? It prints '2': `return` that instead."
    )
    doubled = PropertyExercise("doubled", lambda f: None if f(1) == 2 else "not doubled", {})
    doubled.check(lambda x: print("x", x) or 2 * x)
    assert capsys.readouterr().out == (
        "doubled: solved. It prints as well, in 1 calls, which is not asked for: first 'x 1'.\n"
    )


def test_an_answer_that_leaves_is_told_so():
    assert "windows(n=8, k=4) raised SystemExit: 3" in fails(windows, lambda n, k: exit(3))
    assert "f raised SystemExit: 3" in fails(PropertyExercise("f", lambda f: f(), {}), lambda: exit(3))


def spins(**case):
    while True:
        pass


def spins_and_catches(**case):
    while True:
        try:  # noqa: SIM105  as readers write it
            time.sleep(0)
        except BaseException:
            pass


def sleeps(**case):
    time.sleep(1000)


def waits_for_a_lock(**case):
    threading.Event().wait()


def waits_for_a_thread(**case):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


HANGS = [spins, spins_and_catches, sleeps, waits_for_a_lock, waits_for_a_thread]


@pytest.mark.thorough
@pytest.mark.parametrize("hangs", HANGS)
def test_an_answer_that_hangs_is_ended(hangs):
    told = "has not come to an end after 0.2 s, and was ended. Does a loop, or a wait, go on without end?"
    one = Exercise("one", lambda n: 1, {}, cases=[dict(n=1)], seconds=0.2)
    assert fails(one, hangs) == f"one(n=1) {told}"
    assert fails(PropertyExercise("one", lambda f: f(n=1), {}, seconds=0.2), hangs) == f"one {told}"


@pytest.mark.thorough
def test_an_answer_that_hangs_in_a_drawn_case_is_ended():
    def waits(n, k):
        while n == 1:
            pass
        return -(-n // k)

    hanging = Exercise("windows", windows.solution, {}, windows.cases, search=drawn, seconds=0.5)
    assert re.match(r"windows\(n=1, k=\d\) has not come to an end", fails(hanging, waits))


@pytest.mark.thorough
def test_ranks_that_hang_are_ended():
    exercise = PropertyExercise("ranks", lambda f: str(run_ranks(f)), {}, seconds=3)
    assert "ranks has not come to an end after 3 s" in fails(exercise, sleeps_on_a_rank)


def sleeps_on_a_rank(rank):
    time.sleep(1000)


def test_an_interrupt_of_the_readers_stays_one():
    with pytest.raises(KeyboardInterrupt), ended_after(60):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no kernel tells how long a thread had no core")
def test_what_other_work_takes_of_the_machine_does_not_count():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * os.cpu_count())]
    try:
        begun = time.process_time()
        with pytest.raises(OutOfTime), ended_after(0.2):
            spins()
        assert time.process_time() - begun > 0.08  # by the clock on the wall, with four for each core, it is 0.04
    finally:
        for one in busy:
            one.kill()
            one.wait()


def test_nothing_is_interrupted_when_the_time_has_not_run_out():
    with ended_after(0.05):
        pass
    time.sleep(0.1)


def test_outside_of_the_main_thread_there_is_no_bound():
    seen = []

    def run():
        with ended_after(0.01):
            time.sleep(0.05)
            seen.append("ran")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == ["ran"]


def test_code_whose_time_is_up_does_not_take_it_for_an_error():
    def caught():
        try:
            time.sleep(1000)
        except Exception:
            return "caught"

    with pytest.raises(OutOfTime), ended_after(0.05):
        caught()
