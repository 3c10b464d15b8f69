"""The price list: patches of one place, runs that are counted, a record that goes on, prices that follow from it."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from workbook.prices import __main__ as command
from workbook.prices.faults import FAULTS, Fault
from workbook.prices.jobs import JOBS, Job, prose_job, split
from workbook.prices.runs import RIGHT, Record, Run, code_of, diverged, run
from workbook.prices.table import BEGIN, END, PAGES, SEEDS, Row, interval, rows_of, table_of, verdict, write_csv

from tests.notebook_rules import ROOT

RECORD = ROOT / "data" / "prices_runs.jsonl"
PRICES = ROOT / "data" / "prices.csv"


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """50 training samples: 13 micro-batches, the last of 2 samples, in 5 windows, the last of one micro-batch."""
    samples = Subset(prose_job().samples, range(60))
    assert len(split(replace(prose_job(), samples=samples), seed=0)[0]) == 50
    return {"samples": samples, "epochs": 2}


@pytest.fixture(scope="module")
def right(small: dict[str, Any]) -> Run:
    return run("gpt", RIGHT, 0, **small)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_patch_of_one_place(name: str):
    fault = FAULTS[name]
    hunks = [line for line in fault.diff().splitlines() if line.startswith("@@")]
    assert len(hunks) == 1 and callable(fault.patched())


@pytest.mark.parametrize("old", ["optimizer.jump()", "optimizer.step()\nschedule.step()"])
def test_a_patch_whose_lines_are_not_there_is_refused(old: str):
    with pytest.raises(ValueError, match="in 0 places of the loop, expected 1"):
        Fault("a test", "", old, "pass").source()


def test_the_right_loop_loses_nothing_and_repeats_nothing(right: Run):
    assert (right.samples_lost, right.samples_twice, right.steps) == (0, 0, 2 * 5)
    assert math.isfinite(right.loss) and not diverged(right)


# Of 100 samples of two epochs, and 10 steps. A tail has 2 samples; three other windows of four have 12, one too.
COUNTED = {
    "tail_dropped": (2 * 2, 0, 2),
    "tail_leaked": (2, 0, 2),
    "horizon_floor": (None, 0, 2),
    "zero_grad_in_micro_batches": (2 * (50 - 4 * 4 - 2), 0, 0),
    "resume_begins_epoch": (24, 24, 0),
    "batch_times_4": (0, 0, 10 - 2 * 2),
    "bad_sample_skipped": (None, 0, 2),
    "loss_over_k": (0, 0, 0),
    "set_epoch_forgotten": (0, 0, 0),
    "eval_left_on": (0, 0, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_a_fault_loses_is_counted(name: str, small: dict[str, Any], right: Run):
    faulty = run("gpt", name, 0, **small)
    lost, twice, steps = COUNTED[name]
    assert lost is None or faulty.samples_lost == lost
    assert (faulty.samples_twice, right.steps - faulty.steps) == (twice, steps)
    assert faulty.loss != right.loss


def test_ranks_with_orders_of_their_own_lose_as_many_as_they_repeat(small: dict[str, Any]):
    faulty = run("gpt", "seed_plus_rank_order", 0, **small)
    assert faulty.samples_lost == faulty.samples_twice > 0


@pytest.mark.parametrize("name", ["bad_sample_stepped", "bad_sample_skipped_on_one_rank"])
def test_a_nan_that_is_stepped_on_ends_the_run(name: str, small: dict[str, Any]):
    faulty = run("gpt", name, 0, **small)
    assert math.isnan(faulty.loss) and diverged(faulty) and faulty.samples_lost > 50


def test_pictures_are_decoded_mirrored_and_moved():
    job: Job = JOBS["cnn"]()
    samples = [job.samples[index] for index in (0, 1000, 2526)]
    still = job.collate(samples, None)
    moved = job.collate(samples, np.random.default_rng(0))
    assert still.inputs.shape == moved.inputs.shape == (3, 3, 64, 48) and still.targets.tolist() == [0, 2, 5]
    assert still.inputs.abs().max() <= 1 and not torch.equal(still.inputs, moved.inputs)


def line(job: str = "gpt", fault: str = RIGHT, seed: int = 0, **fields: Any) -> Run:
    """A run that has not been made."""
    values = dict(loss=2.0, accuracy=0.4, samples_lost=0, samples_twice=0, steps=9, seconds=1.0, machine="a test")
    return Run(job, fault, seed, **{**values, "code": code_of(fault), **fields})


def test_an_interrupted_record_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(command, "run", lambda *task: made.append(task) or line(*task))
    arguments = [
        "--job",
        "gpt",
        "--fault",
        "tail_leaked",
        "--seeds",
        "0-1",
        "--processes",
        "1",
        "--data",
        str(tmp_path),
    ]
    command.main(arguments)
    assert made == [("gpt", fault, seed) for seed in (0, 1) for fault in (RIGHT, "tail_leaked")]
    record = tmp_path / "prices_runs.jsonl"
    record.write_text(record.read_text()[:-20])  # interrupted while it wrote
    made.clear()
    command.main(arguments)
    assert made == [("gpt", "tail_leaked", 1)]
    made.clear()
    command.main(arguments)
    assert made == []


def test_runs_of_another_loop_do_not_count(tmp_path: Path):
    record = Record(tmp_path / "runs.jsonl")
    record.add(line(code="of an older loop"))
    record.add(line(seed=1))
    assert list(Record(record.path).runs) == [("gpt", RIGHT, 1)]


@pytest.mark.parametrize(("kind", "known"), [("job", list(JOBS)), ("fault", list(FAULTS))])
def test_an_unknown_name_lists_those_that_are(kind: str, known: list[str], tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        command.main([f"--{kind}", "tail_lost", "--data", str(tmp_path)])
    assert str(ended.value) == f"There is no {kind} 'tail_lost'. There are: {', '.join(known)}."


def test_an_interval_holds_the_mean_and_narrows_with_the_spread():
    assert interval([0.5] * 8) == (0.5, 0.5)
    low, high = interval([0.0, 1.0] * 4)
    assert low < 0.5 < high and high - low < 1
    assert all(math.isnan(bound) for bound in interval([]))


@pytest.mark.parametrize(
    ("low", "high", "diverged", "expected"),
    [
        (0.03, 0.05, 0, "costs"),
        (0.015, 0.05, 0, "costs"),
        (0.001, 0.019, 0, "costs nothing here"),
        (-0.01, 0.03, 0, "not resolved"),
        (-0.05, -0.03, 0, "lower loss"),
        (float("nan"), float("nan"), 8, "diverged 8 of 8"),
    ],
)
def test_the_verdict_follows_from_the_interval(low: float, high: float, diverged: int, expected: str):
    measure = "validation loss (right: 2.0000)"
    assert verdict(Row("gpt", "x", "", 8, measure, (low + high) / 2, low, high, diverged, 0, 0, 0, "")) == expected


def test_the_prices_and_the_page_follow_from_the_record(tmp_path: Path):
    rows = rows_of(Record(RECORD), list(JOBS), list(FAULTS), SEEDS)
    write_csv(rows, tmp_path / "prices.csv")
    assert (tmp_path / "prices.csv").read_text() == PRICES.read_text(), "run `make prices`"
    page = (PAGES / "prices.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == f"\n{table_of(rows)}\n"


def test_eighteen_faults_have_eight_pairs():
    with PRICES.open(encoding="utf-8", newline="") as file:
        pairs = {(row["job"], row["fault"]): int(row["pairs"]) for row in csv.DictReader(file)}
    assert len({fault for (_, fault), n in pairs.items() if n == 8}) >= 18


@pytest.mark.thorough
@pytest.mark.parametrize("task", [("gpt", "tail_leaked", 3), ("cnn", "loss_over_k", 5)], ids=["gpt", "cnn"])
def test_a_pair_is_bit_for_bit_what_the_record_says(task: tuple[str, str, int]):
    job, fault, seed = task
    ((right, faulty),) = Record(RECORD).pairs(job, fault, [seed])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = [run(job, name, seed) for name in (RIGHT, fault)]
    finally:
        torch.set_num_threads(threads)
    if again[0].machine != right.machine:
        pytest.skip(f"the record was made on another machine: {right.machine}")
    assert [done._replace(seconds=0) for done in again] == [done._replace(seconds=0) for done in (right, faulty)]
