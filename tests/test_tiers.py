"""The two tiers of the tests, and that a run leaves nothing in the tree: held against runs of pytest on small files."""

import shutil
import subprocess
import sys

import pytest

from tests import left_behind
from tests.notebook_rules import ROOT

TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.thorough
def test_search(): pass

@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("n", range(5))
def test_rows(n): pass

def test_that_writes():
    open("left.ckpt", "w").close()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run pytest with arguments in a small project that has the settings of this one; its exit code and its output."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("__init__", "left_behind", "loaded_kernels", "plain_addresses"):
        shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests")
    (folder / "tests" / "test_small.py").write_text(TESTS)

    def run_pytest(*arguments):
        options = ["-v", "-p", "no:cacheprovider", "-p", "tests.plain_addresses"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run_pytest


@pytest.mark.thorough
def test_without_an_option_what_is_marked_is_left_out_and_a_run_that_leaves_a_file_fails(run):
    code, printed = run("tests")
    assert "test_quick PASSED" in printed and "test_search" not in printed
    assert [n for n in range(5) if f"test_rows[{n}] PASSED" in printed] == [0, 4]
    assert code == 1 and "4 passed" in printed and "left.ckpt" in printed


@pytest.mark.thorough
def test_with_the_option_or_by_its_name_it_runs(run):
    assert "test_search PASSED" in run("tests", "-k", "not writes", "--thorough")[1]
    assert "test_search PASSED" in run("tests/test_small.py::test_search")[1]


def test_caches_and_the_environment_are_no_leftovers(tmp_path):
    for name in (".venv/lib.py", "tests/__pycache__/a.pyc", "notebooks/checkpoints/a.ckpt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert left_behind.files(tmp_path) == {"notebooks/checkpoints/a.ckpt"}
