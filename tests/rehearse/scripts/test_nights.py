"""Scripts drawn at random, each really run and rehearsed: what is counted is equal, what is found is what is wrong."""

import subprocess
import sys

import pytest

from tests.effort import cases


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="a fork of a process that has loaded torch is for Linux")
def test_a_drawn_script_is_played_as_it_runs():
    command = [sys.executable, "-m", "tests.rehearse.scripts.night_search", str(cases(quick=6, thorough=30)), "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and run.stdout.endswith("scripts, 0 wrong\n"), run.stdout + run.stderr
