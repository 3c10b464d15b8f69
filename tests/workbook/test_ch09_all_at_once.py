"""The training script of chapter 09, killed at random; and the numbers behind the chapter's figures and exercises."""

import inspect
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
from lightning.pytorch.callbacks import ModelSummary
from workbook import ch09_lives as lives
from workbook import ch09_training_script as script
from workbook.ch09_all_at_once import (
    blocks,
    faults,
    figure_of_lives,
    figure_of_reads,
    kill_explorer,
    lines_of_code,
    simulated,
    steps_after_resume,
    times_read,
    updates_made,
)
from workbook.ch09_lives import MicroBatch
from workbook.exercises import NotSolved

from course_lib.launch import RankError, run_ranks
from course_lib.steps import plan_steps
from tests import effort

MICRO_BATCHES = 35
"""Of the whole run, on each of two ranks."""


def life_of_rank(rank, folder, life, kill_after):
    return lives.end_of(script.train(folder, [lives.Kill(kill_after), lives.Diary(folder, life)]))


def live(folder, life, kill_after=None, ranks=2):
    """What each rank has come to; None where the life was killed."""
    try:
        return [r.value for r in run_ranks(life_of_rank, ranks, args=(folder, life, kill_after), timeout=120)]
    except RankError as error:
        if kill_after is None or "SIGKILL" not in str(error):
            raise
        return None


def missing_and_twice(folder):
    return lives.missing_and_twice(lives.applied(lives.read_diary(folder)), script.NUM_SAMPLES, script.EPOCHS)


NOTHING = [(0, 0)] * script.EPOCHS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ends = live(folder, 1)
    assert missing_and_twice(folder) == NOTHING
    return ends


@pytest.mark.thorough
def test_two_kills_at_random_moments_leave_no_bit_of_the_weights_different(whole, tmp_path):
    rng = random.Random("two kills")
    for case in range(effort.cases(1, 20)):
        folder = tmp_path / f"{case}"
        kills = (rng.randrange(MICRO_BATCHES), rng.randrange(12), None)
        for life, kill in enumerate(kills, start=1):
            ends = live(folder, life, kill)
        for end, expected in zip(ends, whole, strict=True):
            assert lives.differing_weights(end, expected) == 0, kills
            assert end[1:5] == expected[1:5], kills
        assert missing_and_twice(folder) == NOTHING, kills
        as_dealt = simulated(kills, [2, 2, 2])
        assert [m[:6] for m in lives.read_diary(folder)] == [m[:6] for m in as_dealt], kills


@pytest.mark.thorough
def test_on_other_ranks_every_sample_comes_once_and_steps_are_as_planned(tmp_path):
    rng = random.Random("other ranks")
    for case in range(effort.cases(1, 10)):
        folder = tmp_path / f"{case}"
        before, after, at_last = rng.choice([(2, 1, 1), (2, 3, 3), (2, 1, 2), (1, 2, 2), (3, 2, 2), (2, 3, 1)])
        kills = (rng.randint(6, 20), rng.randrange(12))
        live(folder, 1, kills[0], before)
        live(folder, 2, kills[1], after)
        end = live(folder, 3, None, at_last)[0]
        which = (before, after, at_last, kills)
        assert missing_and_twice(folder) == NOTHING, which
        came = 2 if after == at_last else 3
        planned = lives.planned_attempts(lives.read_diary(folder), end, script.BAD_SAMPLE, came)
        assert planned == end.attempts, which
        assert [m[:6] for m in lives.read_diary(folder)] == [
            m[:6] for m in simulated([*kills, None], [before, after, at_last])
        ], which


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rate_ends_where_the_share_of_samples_and_updates_says(ranks, tmp_path):
    live(tmp_path, 1, 18)
    end = live(tmp_path, 2, None, ranks)[0]
    by_hand = lives.rate_by_hand(lives.read_diary(tmp_path), end, script.NUM_SAMPLES * script.EPOCHS, script.BAD_SAMPLE)
    assert end.rate == pytest.approx(by_hand, rel=1e-9)


EPOCHS_TO_KILL = 8


def epochs_of_rank(rank, folder):
    trainer = script.train(folder, max_epochs=EPOCHS_TO_KILL)
    return script.hash_of(trainer.lightning_module.state_dict().values())


def torchrun(folder, node, port, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command += [f"--node-rank={node}", *options, script.__file__, str(folder), f"--epochs={EPOCHS_TO_KILL}"]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for_checkpoint(folder):
    deadline = time.monotonic() + 120
    while not (folder / "last.ckpt").exists():
        assert time.monotonic() < deadline, "no checkpoint within 120 s"
        time.sleep(0.01)


def weights_told(agents):
    told = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), told
    return re.findall(r"weights (\w{64})", "".join(told))


@pytest.fixture(scope="module")
def hash_without_a_kill(tmp_path_factory):
    return run_ranks(epochs_of_rank, args=(tmp_path_factory.mktemp("whole"),), timeout=240)[0].value


def two_nodes(folder):
    port = free_port()
    return [torchrun(folder, node, port, "--nnodes=2", "--nproc-per-node=1") for node in (0, 1)]


def killed_by_its_callback(folder):
    def life_of_rank(rank):
        script.train(folder, [lives.Kill(18)], max_epochs=EPOCHS_TO_KILL)

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(life_of_rank, 2, timeout=120)


def killed_on_two_nodes(folder):
    agents = two_nodes(folder)
    wait_for_checkpoint(folder)
    for agent in agents:
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            process.kill()
    assert "weights" not in "".join(agent.communicate()[0] for agent in agents)  # so it had not ended


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [killed_by_its_callback, killed_on_two_nodes][: effort.cases(1, 2)])
def test_two_nodes_of_torchrun_go_on_with_what_was_killed_and_end_with_the_same_weights(
    killed, hash_without_a_kill, tmp_path
):
    killed(tmp_path)
    assert weights_told(two_nodes(tmp_path)) == [hash_without_a_kill]


@pytest.mark.thorough
def test_the_batch_sizes_are_what_the_finder_finds():
    assert script.find_batch_sizes_within(script.BUDGET_BYTES) == script.BATCH_SIZES


def test_it_prints_no_table_of_the_model(tmp_path):
    # Lightning logs the table, which is silenced, unless rich is installed: then it is an output of its own.
    trainer = script.train(tmp_path, max_epochs=1)
    assert not [callback for callback in trainer.callbacks if isinstance(callback, ModelSummary)]


def test_the_training_code_has_at_most_25_lines():
    assert lines_of_code(script.train, script.Digits.configure_optimizers) <= 25
    assert lines_of_code(script.hash_of) == len(inspect.getsource(script.hash_of).splitlines()) - 1


def micro_batch(life, window, samples, rank=0, labelled=1):
    return MicroBatch(life, rank, 0, window, 8, samples, labelled)


DIARY = [
    micro_batch(1, 0, [0, 1]), micro_batch(1, 0, [2]), micro_batch(1, 1, [3]), micro_batch(1, 2, [4]),
    micro_batch(2, 1, [3]), micro_batch(2, 2, [4, 5]),
]  # fmt: skip


def test_a_kill_undoes_the_windows_from_the_checkpoint_on():
    assert lives.applied(DIARY) == [*DIARY[:2], *DIARY[4:]]
    assert lives.missing_and_twice(DIARY, 7, 1) == [(1, 2)]
    assert lives.missing_and_twice(lives.applied(DIARY), 6, 1) == [(0, 0)]
    assert lives.missing_and_twice(lives.applied([*DIARY, micro_batch(3, 0, [0])]), 6, 1) == [(5, 0)]


def test_a_block_says_what_became_of_its_micro_batch():
    found = blocks(DIARY, bad_sample=5, k=2)
    assert [(block.row, block.x, block.kind) for block in found] == [
        (0, 0, "applied"), (0, 0.5, "applied"), (0, 1, "undone"), (0, 2, "undone"),
        (1, 1, "applied"), (1, 2, "skipped"),
    ]  # fmt: skip
    axes = figure_of_lives(DIARY, "a title", bad_sample=5, k=2).axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_height() == 0.74] == [
        (block.x, 0.5) for block in found
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["life 1, rank 0", "life 2, rank 0"]
    (killed,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert killed.get_xydata().tolist() == [[2.62, 0]]


def test_the_reads_of_an_epoch_are_counted_by_micro_batch():
    whole = [micro_batch(1, 0, [0, 1]), micro_batch(1, 0, [2, 3]), micro_batch(1, 0, [4, 5])]
    again = [micro_batch(1, 0, [0, 1]), micro_batch(1, 1, [2, 3]), micro_batch(2, 1, [0, 1]), micro_batch(2, 1, [2])]
    shares = times_read(whole, again, epoch=0)
    assert shares == {1: [1, 0, 0], 2: [1, 0.5, 0]}
    axes = figure_of_reads({1: [1, 0, 0], 2: [1, 1, 0]}, "a title").axes[0]
    assert [text.get_text() for text in axes.texts] == ["2", "1", "0"]


def test_weights_are_those_of_the_mean_over_a_window():
    window = [micro_batch(1, 0, [0], labelled=1), micro_batch(1, 0, [1], labelled=3)]
    assert lives.weights_of_labels(window, k=2, ranks=1) == [pytest.approx(2 / 3), 2]
    assert lives.weights_of_labels(window[:1], k=4, ranks=1) == [0.25, 0.25]  # a short window


@pytest.mark.thorough
def test_the_widget_opens_on_the_notebooks_kills_and_follows():
    explorer = kill_explorer()
    assert "life 2: 2 ranks, 14 micro-batches each, windows 3 to 6" in explorer.text
    before = explorer._image.value
    told = explorer.set(ranks_later=3, first_kill=30)
    assert explorer._image.value != before
    assert "life 2: 3 ranks" in told
    for first, ranks_later in [*product((1, 12, 30), (1, 2, 3))][:: effort.cases(4, 1)]:
        told = explorer.set(first_kill=first, ranks_later=ranks_later)
        assert re.findall(r"missing (\d+), twice (\d+)", told) == [("0", "0")] * script.EPOCHS


@pytest.mark.parametrize("case", steps_after_resume.cases, ids=str)
def test_the_steps_after_a_resume_are_those_of_a_plan(case):
    n, k = case["num_samples"], case["k"]
    plan = plan_steps(
        n, case["batch_size"], accumulate_grad_batches=k, world_size=case["ranks"],
        max_epochs=1 + case["epochs_later"], steps_done=5, samples_done=n - case["samples_left"],
    )  # fmt: skip
    assert plan.total_steps - 5 == steps_after_resume.solution(**case)


@pytest.mark.parametrize(
    ("exercise", "answer", "told"),
    [
        (faults, {3, 6, 8, 9, 13, 14}, "it saves the run as it ended"),
        (faults, {6, 8, 9, 13}, "How many ranks share the samples"),
        (faults, [1, 3, 6, 8, 9, 13], "Shuffling is no fault"),
        (faults, {3, 6, 8, 9, 12, 13}, "a checkpoint after every 50 optimizer steps"),
        (faults, {2, 5, 7, 8, 12}, "The lines are counted from 1."),
        (faults, {1, 2, 6}, "faults: you name 1 of the 5 faulty lines, and 2 that are right."),
        (faults, "3", "faults: a set of line numbers is asked for, as {1, 2}, got '3'."),
        (steps_after_resume, lambda samples_left, epochs_later, **rest: samples_left * epochs_later, "should be 2"),
        (updates_made, 22, "takes every line of the journal"),
        (updates_made, 26, "counts attempt 9 twice"),
        (updates_made, 25, "leaves out attempts 8 and 9"),
    ],
)
def test_a_natural_wrong_answer_gets_its_own_message(exercise, answer, told):
    with pytest.raises(NotSolved, match=re.escape(told)):
        exercise.check(answer)


def test_a_list_of_lines_is_taken_for_a_set():
    faults.check([13, 9, 8, 6, 3])


@pytest.mark.thorough
def test_a_copy_of_the_script_alone_runs(tmp_path):
    copied = shutil.copy(script.__file__, tmp_path / "train.py")
    told = subprocess.run(
        [sys.executable, copied, str(tmp_path / "run"), "--epochs=1"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert re.search(r"^weights \w{64}$", told.stdout, re.MULTILINE)
