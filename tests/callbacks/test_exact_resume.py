"""A run that is stopped anywhere and resumed, again and again, ends as the one that was never stopped."""

import random

import pytest

from course_lib.callbacks.exact_resume import CheckpointError
from tests import effort
from tests.callbacks.whole_run import SAVES, Dies, Killed, newest, same, state_of, train


def killed_twice(rng, folder, **arguments):
    """Train with two kills, and what remains to the end. What `train` returns, and where the kills were."""
    saves = rng.choice(list(SAVES))
    kills = [(rng.randrange(1, 46), rng.choice(Dies.PLACES)), (rng.randint(1, 3), rng.choice(Dies.PLACES)), None]
    for seed, kill in enumerate(kills):
        try:
            return resume(folder, saves=saves, dies=kill and Dies(*kill), seed=seed, **arguments), saves, kills
        except Killed:
            continue
    raise AssertionError("nobody kills the last one")


def resume(folder, **arguments):
    """Go on from the newest checkpoint that is not refused."""
    while path := newest(folder):
        try:
            return train(folder, ckpt_path=path, **arguments)
        except CheckpointError as error:
            REFUSED.append(str(error))
            path.unlink()
    return train(folder, **arguments)


REFUSED = []


@pytest.mark.parametrize("k", [1, 4])
def test_a_run_that_is_killed_twice_anywhere_ends_as_if_it_had_not_been(k, tmp_path):
    rng = random.Random(f"killed twice {k}")
    whole = state_of(train(tmp_path / "whole", k=k, steps=48 // k)[0])
    for case in range(effort.cases(12, 60)):
        (module, _, audit), *where = killed_twice(rng, tmp_path / f"{case}", k=k, steps=48 // k)
        assert same(state_of(module), whole), where
        assert audit.agrees and audit.attempts + audit.attempts_before_audit == 48 // k, where
    assert all("in the middle of an update" in message for message in REFUSED)


def test_so_does_one_whose_sizes_follow_a_schedule(tmp_path):
    rng = random.Random("sizes, killed twice")
    whole = state_of(train(tmp_path / "whole", n=48, sized=True, k=2, steps=22)[0])
    for case in range(effort.cases(6, 30)):
        (module, *_), *where = killed_twice(rng, tmp_path / f"{case}", n=48, sized=True, k=2, steps=22)
        assert same(state_of(module), whole), where
