"""Each planted fault happens in a real run, and its right twin does not have it. Nothing here needs a rehearsal."""

import ast
import inspect
from typing import Any

import pytest

from course_lib.launch import run_ranks
from tests.rehearse.fits.parts import script, scripts

NAMES = scripts("faults")
CHECKS = "length horizon dealing order resume workers window no_sync bad_step growth changes setup".split()


def both(name: str) -> tuple[Any, Any]:
    """What is seen of the faulty run, and of its twin."""
    fault = script("faults", name)
    if getattr(fault, "LOOP", False):
        return fault.seen(**fault.make_run()), fault.seen(**fault.make_twin())
    return fault.seen(*fault.make_run()), fault.seen(*fault.make_twin())


def of_ranks(name: str) -> bool:
    return hasattr(script("faults", name), "RANKS")


def all_on_this_rank(rank: int, names: list[str]) -> dict[str, tuple[Any, Any]]:
    return {name: both(name) for name in names}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, tuple[Any, Any]]]:
    names = [name for name in NAMES if of_ranks(name)]
    return [result.value for result in run_ranks(all_on_this_rank, 2, args=(names,), timeout=300)]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", [name for name in NAMES if not of_ranks(name)])
def test_a_fault_and_its_twin(name):
    fault = script("faults", name)
    assert both(name) == (fault.WRONG, fault.RIGHT)
    assert fault.WRONG != fault.RIGHT


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in NAMES if of_ranks(name)])
def test_a_fault_of_two_ranks_and_its_twin(name, on_two_ranks):
    fault = script("faults", name)
    assert [seen[name] for seen in on_two_ranks] == [(fault.WRONG, fault.RIGHT)] * 2
    assert fault.WRONG != fault.RIGHT


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_in_one_sentence_what_goes_wrong(name):
    fault = script("faults", name)
    assert fault.CHECK in CHECKS and name.split("_", 1)[1].startswith(fault.CHECK)
    assert len(ast.parse(inspect.getsource(fault)).body) >= 5 and fault.__doc__.splitlines()[0].endswith(".")


def test_every_check_has_a_fault():
    assert len(NAMES) >= 40 and {script("faults", name).CHECK for name in NAMES} == set(CHECKS)
