"""What a lapse counts against what the same script does when it is really run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearse.scripts.journal import Journal
from tests import effort
from tests.rehearse.scripts.playing import play

SCRIPTS = Path(__file__).with_name("examples")
COUNTER = Path(__file__).with_name("counter.py")


def really_run(script: Path, arguments: list[str], folder: Path, ranks: int = 1) -> dict:
    """The counts and the rates of rank 0."""
    running = []
    for rank in range(ranks):
        place = folder / f"rank{rank}"
        place.mkdir(parents=True)
        environment = dict(os.environ)
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
        command = [sys.executable, str(COUNTER), str(place / "counted.json"), str(script), *arguments]
        running.append(subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL))
    assert [process.wait() for process in running] == [0] * ranks
    return json.loads((folder / "rank0" / "counted.json").read_text())


def assert_equal(journal: Journal, real: dict) -> None:
    assert (journal.end, journal.says) == ("ended", "")
    counts = {name: count for name, count in journal.counts().items() if not name.startswith("steps of")}
    assert counts == {name: real["counts"].get(name, 0) for name in counts}
    assert [list(rates) for rates in journal.rates()] == real["rates"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("classifier", ["--epochs", "3"]),
        ("classifier", ["--epochs", "2", "--accumulate", "1"]),
        ("gan", []),
        ("closure", []),
        ("scaler", []),
        ("checkpointing", []),
        ("stream", []),
        ("compiled", []),
        ("schedules", []),
        ("penalty", ["alone"]),
        ("two_steps", ["step"]),
        ("two_steps", ["first_step"]),
    ][:: effort.cases(3, 1)],
)
def test_counts_equal_those_of_the_real_run(name: str, arguments: list[str], tmp_path: Path):
    script = SCRIPTS / f"{name}.py"
    journal = play(script, arguments)
    assert_equal(journal, really_run(script, arguments, tmp_path / "real"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["critic_first", "trains_in_forward"])
def test_counts_equal_where_something_begins_behind_the_real_micro_batches(name: str, tmp_path: Path):
    script = SCRIPTS / f"{name}.py"
    journal = play(script)
    real = really_run(script, [], tmp_path / "real")
    kinds = ("optimizer steps", "backward passes")
    assert [journal.counts()[kind] for kind in kinds] == [real["counts"][kind] for kind in kinds]


@pytest.mark.thorough
def test_counts_of_one_rank_equal_those_of_the_real_run(tmp_path: Path):
    script = SCRIPTS / "ranks.py"
    journal = play(script, ranks=2)
    assert_equal(journal, really_run(script, [], tmp_path / "real", ranks=2))
