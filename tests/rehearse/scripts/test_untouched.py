"""A rehearsal leaves files, environment and processes as they were; and what goes wrong is told in a sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rehearse.__main__ import main
from rehearse.script import NotRehearsed, rehearse_script
from rehearse.scripts import player
from rehearse.scripts.journal import Journal
from rehearse.scripts.lapse import Lapse, is_librarys
from tests.rehearse.scripts.playing import play

SCRIPTS = Path(__file__).with_name("examples")
TRAIN = """
import sys
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 2)).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_folder_beside_the_scripts_whose_name_begins_alike_is_not_its_own():
    lapse = Lapse(Journal(), folder="/runs/train", limit=1.0, end=print)
    assert lapse.is_own("/runs/train/models/net.py") and not lapse.is_own("/runs/train_of_others/net.py")
    torchs = Path(torch.__file__).parent
    assert is_librarys(str(torchs / "nn" / "init.py")) and not is_librarys(f"{torchs}_of_others/net.py")


@pytest.mark.thorough
def test_files_are_read_where_they_are_and_written_elsewhere(tmp_path: Path):
    theirs = tmp_path / "theirs"
    (theirs / "kept").mkdir(parents=True)
    (theirs / "log.txt").write_text("there\n")
    (theirs / "old.txt").write_text("old\n")
    (theirs / "kept" / "a.txt").write_text("a\n")
    before, environment, folder = contents(theirs), dict(os.environ), os.getcwd()
    journal = play(SCRIPTS / "files.py", [str(theirs)])
    assert (journal.end, journal.says) == ("ended", "")
    assert "all is as it says" in journal.printed
    assert contents(theirs) == before
    assert (dict(os.environ), os.getcwd()) == (environment, folder)
    assert not (Path.home() / ".rehearse_test").exists()


@pytest.mark.thorough
def test_a_process_that_the_script_leaves_in_a_session_of_its_own_is_ended(tmp_path: Path):
    script = tmp_path / "train.py"
    starts = "import subprocess\nsubprocess.Popen(['sleep', '987.5'], start_new_session=True)\n"
    script.write_text(f"{starts}{TRAIN}\nimport time\nfor _ in range(20):\n    step()\n    time.sleep(0.1)\n")
    assert play(script).end == "ended"
    assert [process.pid for process in psutil.process_iter() if "987.5" in command_of(process)] == []


def a_play(processes: list[psutil.Process]) -> bool:
    # To import torch starts processes as well, where it is built for CUDA.
    return any("rehearse.scripts.stage" in command_of(process) for process in processes)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # ended since
        return []


def a_worker(processes: list[psutil.Process]) -> bool:
    return len(processes) > 2


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets of a fork server."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("begun", [a_play, a_worker])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_judge_and_all_that_it_has_started(
    number: signal.Signals, begun: Callable[[list[psutil.Process]], bool], temporary: Path
):
    command = [sys.executable, "-m", "rehearse", str(SCRIPTS / "stream_without_end.py")]
    judge = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    started: list[psutil.Process] = []
    while not begun(started):
        assert judge.poll() is None
        started = psutil.Process(judge.pid).children(recursive=True)
    judge.send_signal(number)
    _, said = judge.communicate()
    # It ends at once, and tells nothing of where it was.
    told = {signal.SIGINT: (130, b"Interrupted: nothing was judged.\n"), signal.SIGTERM: (143, b"")}
    assert (judge.returncode, said) == told.get(number, (-number, b""))
    while any(is_alive(process) for process in started):
        pass
    if number == signal.SIGKILL:  # which leaves empty folders, and what the script had printed
        # A process of the rehearsal that began behind the last look may be removing its links to what it reads.
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(temporary) for name in names]
        files = [path for path in paths if not os.path.islink(path) and os.path.isfile(path)]
        assert {os.path.basename(path) for path in files} <= {"output.txt"}
    else:
        assert list(temporary.iterdir()) == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("import torch\nraise ValueError('no such layer')\n", [], "line 2: raise ValueError('no such layer')"),
        ("import argparse\nargparse.ArgumentParser().parse_args()\n", ["--wrong"], "unrecognized arguments: --wrong"),
        ("print('nothing to do')\n", [], "without a backward pass and without an optimizer step"),
        ("name = input('Which run? ')\n", [], "asks for an input (Which run? )"),
        ("import torch\ntorch.nn.Linear(2, 2).to('cuda')\n", [], "It asks for a GPU, and there is none"),
        ("import os\nos.ttyname(1)\n", [], "(Nobody types at a rehearsal's terminal, and what it prints goes to a "),
        (TRAIN + "sys.exit('no data found')\n", [], "no data found"),
        ("import torch.distributed as d\nd.init_process_group('gloo')\n", [], "give the number of ranks, --ranks 2"),
    ],
)
def test_a_script_that_cannot_be_played_is_told_in_a_sentence(
    text: str, arguments: list[str], says: str, tmp_path: Path
):
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(NotRehearsed) as raised:
        rehearse_script(script, arguments)
    assert says in str(raised.value)


@pytest.mark.thorough
def test_a_play_has_a_terminal_with_a_size_and_no_input(tmp_path: Path):
    script = tmp_path / "train.py"
    asks = "rows, columns = os.popen('stty size').read().split()\n"
    asks += "assert (rows, columns) == ('24', '80') and os.get_terminal_size() == (80, 24)\n"
    asks += "assert list(sys.stdin) == [] and sys.stdin.readline() == ''\n"
    script.write_text(f"{TRAIN}import os\n{asks}step()\n")
    assert rehearse_script(script).facts["optimizer steps"] == 1


@pytest.mark.thorough
def test_a_play_that_is_ended_while_torch_is_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(player, "GRACE_SECONDS", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    (tmp_path / "slow_to_import.py").write_text("while True:\n    pass\n")
    [(given_back, why)] = player.stage_each([player.Play(tmp_path / "train.py", seconds=0.1, stage="slow_to_import")])
    assert given_back is None
    assert re.fullmatch(r"nothing was rehearsed yet after \d\.\d s of CPU time: give it more \(seconds=\)", why)


@pytest.mark.thorough
def test_a_play_that_is_told_to_end_while_it_writes_its_journal_writes_it(tmp_path: Path):
    # The rates beyond the run's end are asked for when all else is written down.
    rate = "def rate(number):\n    if number > 3:\n        os.kill(os.getpid(), signal.SIGTERM)\n    return 1.0\n"
    schedule = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n"
    steps = "for _ in range(3):\n    step()\n    schedule.step()\n"
    script = tmp_path / "train.py"
    script.write_text(f"{TRAIN}import os, signal\n{rate}{schedule}{steps}")
    assert rehearse_script(script).facts["optimizer steps"] == 3


@pytest.mark.thorough
def test_a_script_that_never_begins_is_ended(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("while True:\n    pass\n")
    with pytest.raises(NotRehearsed, match=r"train\.py has not begun to train after 1 s of CPU time"):
        rehearse_script(script, seconds=1)


@pytest.mark.thorough
def test_a_script_that_goes_by_a_loss_for_ever_is_judged_up_to_there_and_its_line_is_named(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "loss = 1.0\nwhile loss > -1e9:\n    loss = step()\n")
    report = rehearse_script(script, seconds=3)
    assert report.ok is None
    assert set(report.failed) == {"length", "horizon"}
    assert "it looks at a value in train.py:13" in report.not_judged["length"]
    assert "window" in report.passed


@pytest.mark.thorough
def test_a_loop_that_the_plays_end_cuts_was_not_left_by_the_script(tmp_path: Path):
    loader = "torch.utils.data.DataLoader(range(9))"
    loop = f"for epoch in range(4):\n    for number, _ in enumerate({loader}):\n        step()\n"
    script = tmp_path / "train.py"
    script.write_text(f"{TRAIN}{loop}        if (epoch, number) == (2, 5):\n            [0.5].index(step())\n")
    report = rehearse_script(script)
    assert report.facts["optimizer steps"] in (24, 25)
    assert not [note for note in report.notes if "is left after" in note]
    script.write_text(f"{TRAIN}{loop}        if (epoch, number) == (2, 5):\n            break\n")
    (told,) = (note for note in rehearse_script(script).notes if "is left after" in note)
    assert "6 of 9 batches" in told


@pytest.mark.thorough
@pytest.mark.parametrize("fails", ["[0.5].index(step())", "sys.exit('not trained')"])
def test_a_script_that_fails_for_want_of_training_is_judged_up_to_there(fails: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"{TRAIN}for number in range(30):\n    step()\n{fails}\n")
    report = rehearse_script(script)
    assert (report.ok, report.findings) == (None, ())
    assert set(report.failed) == {"length", "horizon"}
    assert "the script fails after 3" in report.not_judged["length"]
    assert "it asks for a value that a rehearsal does not have" in report.not_judged["length"]
    assert "window" in report.passed


@pytest.mark.thorough
def test_a_script_that_ends_its_process_by_itself_is_played_to_there(tmp_path: Path):
    script = tmp_path / "train.py"
    training = f"import os{TRAIN}for number in range(30):\n    step()\n"
    script.write_text(f"{training}os._exit(0)\n")
    report = rehearse_script(script)
    assert (report.ok, report.findings, report.facts["optimizer steps"]) == (True, (), 30)
    script.write_text(f"{training}os._exit(3)\n")
    report = rehearse_script(script)
    assert report.ok is None and report.not_judged["length"].endswith("exit code 3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asks",
    [
        "step() < -5",
        "100.0 * (torch.tensor(step()) < -5).sum().item() > 50",
        "2.0 + float(torch.tensor(step())) < -5",
        "math.exp(step()) < 1e-4",
        "math.isnan(step())",
        "-1e9 < step() < -5",
        "(loss := step()) < -5 or math.isnan(loss)",
        "(loss := step()) > -1e9 and loss < -5",
    ],
)
def test_a_line_that_decides_by_a_loss_is_played_with_the_other_answer(asks: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"import math{TRAIN}for number in range(40):\n    if {asks}:\n        break\n")
    report = rehearse_script(script)
    assert report.facts["optimizer steps"] == 40
    notes = [note for note in report.notes if "train.py:13" in note]
    assert len(notes) == 1 or (len(notes) == 2 and " or " in asks)  # either of two ends it
    assert all("answering False (39 times)" in note for note in notes)
    assert all("2 optimizer steps in place of 40" in note for note in notes)


@pytest.mark.thorough
def test_a_script_that_draws_how_much_it_trains_is_told_so(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "import os\nfor number in range(5 + os.getpid() % 500):\n    step()\n")
    report = rehearse_script(script)
    assert any("does something else each time that it is run" in note for note in report.notes)


@pytest.mark.thorough
def test_what_a_lapse_computes_takes_one_thread_and_none_that_waits_for_others(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        f"{TRAIN}\ntorch.set_num_threads(2)\nfor _ in range(5):\n    step()\n    print(torch.get_num_threads())"
    )
    journal = play(script)
    assert journal.printed.split() == ["2", "1", "1", "1", "1"]


@pytest.mark.thorough
def test_updates_by_hand_are_told_with_their_number(tmp_path: Path):
    script = tmp_path / "train.py"
    text = """
import torch
model = torch.nn.Linear(2, 1)
for number in range(30):
    model.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
"""
    script.write_text(text)
    report = rehearse_script(script)
    assert report.facts["parameters changed in place"] == 30
    assert report.facts["optimizer steps"] == 0


@pytest.mark.thorough
def test_a_script_that_forgets_to_step_is_a_finding(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("    optimizer.step()\n", "") + "for number in range(30):\n    step()\n")
    report = rehearse_script(script)
    assert [finding.check for finding in report.findings] == ["window"]
    assert "30 backward passes and no optimizer step" in report.findings[0].says


def shell(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rehearse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.thorough
def test_the_door_of_the_shell(tmp_path: Path):
    script = SCRIPTS / "classifier.py"
    picture, file = tmp_path / "night.png", tmp_path / "report.json"
    options = ["--json", str(file), "--plot", str(picture), "--skip", "order"]
    done = shell(*options, str(script), "--epochs", "2", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Ready: ")
    told = json.loads(file.read_text())
    assert (told["ok"], told["skipped"]) == (True, ["order"])
    facts = told["facts"]
    assert (facts["micro-batches"], facts["optimizer steps"], facts["scheduler steps"]) == (42, 12, 12)
    first, last = facts["rate of the first, the last step"]
    assert (first, round(last, 6)) == (0.01, 0.00017)
    assert picture.read_bytes().startswith(b"\x89PNG") and f"The picture of the night is {picture}" in " ".join(
        done.stdout.split()
    )


@pytest.mark.thorough
def test_files_of_the_folder_are_not_taken_for_parts_of_the_command(tmp_path: Path):
    for name in ("preflight", "rehearsal", "judge", "report", "script", "scripts", "checks", "runs", "fits"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('another project's')")
    (tmp_path / "train.py").write_text((SCRIPTS / "classifier.py").read_text())
    done = shell("train.py", "--epochs", "2", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Ready: ")


@pytest.mark.thorough
def test_the_verdict_stands_where_the_reader_of_the_report_has_gone(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rehearse", "--json", "report.json", str(SCRIPTS / "classifier.py")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "report.json").read_text())["ok"]


@pytest.mark.thorough
def test_what_the_shell_is_told_of_a_script_that_cannot_be_played(capsys: pytest.CaptureFixture[str]):
    assert main([str(SCRIPTS / "classifier.py"), "--epochs", "two"]) == 2
    assert "invalid int value: 'two'" in capsys.readouterr().err
    assert main(["nowhere.py", "--plot=night.png", "--lr", "3"]) == 2
    told = capsys.readouterr().err
    assert "there is no script 'nowhere.py'" in told
    assert "--plot=night.png stands behind nowhere.py, so the script gets it" in told


def test_its_help_has_the_options_of_a_script_as_well(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    of_a_script = ("--skip", "--allow-unjudged", "--json", "--seconds", "--ranks", "--plot")
    assert "--deep" in told and all(option in told for option in of_a_script)
