"""Against an ordinary process: what a play that is a fork of the loaded server sees, how it ends, and when."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from course_lib.timelapse import play, player
from tests.loaded_plays import LoadedPlays

SEEN = """
import os, random, signal, sys, tempfile
import numpy, torch
for fact in {
    "folder": os.getcwd().startswith(tempfile.gettempdir()), "path": sys.path, "arguments": sys.argv,
    "environment": sorted(item for item in os.environ.items() if item[0] not in ("TMPDIR", "LC_CTYPE")),
    "sigint": signal.getsignal(signal.SIGINT), "sigchld": signal.getsignal(signal.SIGCHLD),
    "sigpipe": signal.getsignal(signal.SIGPIPE), "byte code": sys.dont_write_bytecode,
    "group": os.getpid() == os.getpgid(0) == os.getsid(0), "terminal": os.get_terminal_size(),
    "output": (os.readlink("/proc/self/fd/1")[-10:], os.readlink("/proc/self/fd/2")[-10:], sys.stdout.encoding),
    "at once": sys.stdout.write_through, "input": sys.stdin.readline(), "threads": torch.get_num_threads(),
    "tests": {"pytest", "conftest", "lightning"} & set(sys.modules),
    "main": sys.modules["__main__"].__dict__ is globals(), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
}.items():
    print(*fact)
"""
DRAWN = "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(()).item())"
OWNER = """
import sys
from course_lib.timelapse import play, player
from tests.loaded_plays import LoadedPlays
plays = LoadedPlays()
player.Popen = plays.start
print(plays.process.pid, flush=True)
play(sys.argv[1])
"""


@pytest.fixture(scope="module")
def plays():
    server = LoadedPlays()
    yield server
    server.stop()


@pytest.fixture
def played(plays, monkeypatch, tmp_path):
    """Play a text as a script, by an ordinary process or a loaded one; what it printed, and its journal."""

    def play_it(text, loaded, arguments=()):
        monkeypatch.setattr(player, "Popen", plays.start if loaded else subprocess.Popen)
        script = tmp_path / "train.py"
        script.write_text(text)
        journal = play(script, arguments, folder=tmp_path / "kept")
        return Path(journal.output).read_text(), journal

    return play_it


def test_it_sees_what_an_ordinary_one_sees(played):
    ordinary, loaded = (played(SEEN, loaded, ["--epochs", "3"])[0].splitlines() for loaded in (False, True))
    assert loaded == ordinary and len(ordinary) > 15


@pytest.mark.parametrize(
    "end",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os; os._exit(3)",
        "raise SystemExit(4)",
        "raise ValueError('no such data')",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_it_ends_as_an_ordinary_one_ends(end, played):
    ordinary, loaded = (played(end, loaded)[1] for loaded in (False, True))
    assert (loaded.end, loaded.says) == (ordinary.end, ordinary.says)
    assert ordinary.end != "ended"


def test_each_draws_its_own_numbers(played):
    drawn = [played(DRAWN, loaded=True)[0].split() for _ in range(3)]
    assert [len(set(by_one_generator)) for by_one_generator in zip(*drawn, strict=True)] == [3, 3, 3]


def test_it_and_its_server_end_with_the_process_that_asked(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    command = [sys.executable, "-c", OWNER, os.fspath(script)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        server = psutil.Process(int(owner.stdout.readline()))
        asked = psutil.Process(owner.pid)
        while len(started := asked.children()) < 2:  # the server and the play
            time.sleep(0.05)
        owner.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs([server, *started], timeout=60)
    assert len(gone) == 2 and not alive
