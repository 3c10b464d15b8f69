"""`make prices`: the runs that are missing, then `data/prices.csv`, the page and its picture.

make prices                                   # every job and fault, seeds 0 to 7, by two processes
make prices JOB=gpt FAULT=tail_leaked         # one of them
make prices JOB=cnn FAULT=tail_leaked SEEDS=8-15   # by other seeds: printed only
make prices PROCESSES=1
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from workbook.prices.faults import FAULTS
from workbook.prices.jobs import JOBS
from workbook.prices.runs import RIGHT, Record, Run, run
from workbook.prices.table import SEEDS, between, losses, print_rows, rows_of, write_csv, write_page

DATA = Path(__file__).parents[3] / "data"
LONG = ("batch_of_one",)
"""Faults whose runs take many times as long: they come last."""

Task = tuple[str, str, int]


def tasks_of(chosen_jobs: list[str], chosen_faults: list[str], seeds: list[int]) -> list[Task]:
    """All runs that the rows need, seed by seed: what is interrupted has as many pairs in each row."""
    tasks = []
    for seed in seeds:
        for name in chosen_jobs:
            applying = [fault for fault in chosen_faults if name in FAULTS[fault].jobs]
            tasks += [(name, fault, seed) for fault in [RIGHT, *applying]]
    return sorted(tasks, key=lambda task: task[1] in LONG)


def runs_of(tasks: list[Task], processes: int) -> Iterator[Run]:
    """The runs, each as soon as it has ended."""
    torch.set_num_threads(1)
    if processes == 1:
        for task in tasks:
            yield run(*task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(run, *task) for task in tasks]):
            yield done.result()


def seeds_of(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def chosen(kind: str, name: str, known: list[str]) -> list[str]:
    """One of the known names, or all of them for an empty one. Ends with the list where it is not there."""
    if name and name not in known:
        sys.exit(f"There is no {kind} {name!r}. There are: {', '.join(known)}.")
    return [name] if name else known


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make prices", description="Measure what the faults cost.")
    parser.add_argument("--job", default="", help="one of them")
    parser.add_argument("--fault", default="", help="one of them")
    parser.add_argument("--seeds", type=seeds_of, default=SEEDS, help="0-7, or 3")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of prices.csv and its record")
    options = parser.parse_args(arguments)
    chosen_jobs = chosen("job", options.job, list(JOBS))
    chosen_faults = chosen("fault", options.fault, list(FAULTS))
    record = Record(options.data / "prices_runs.jsonl")
    tasks = tasks_of(chosen_jobs, chosen_faults, options.seeds)
    missing = [task for task in tasks if task not in record.runs]
    started = time.monotonic()
    for number, done in enumerate(runs_of(missing, options.processes), start=1):
        record.add(done)
        minutes = (time.monotonic() - started) / number * (len(missing) - number) / 60
        ended = len(tasks) - len(missing) + number
        print(f"\r{ended} of {len(tasks)} runs, {minutes:.0f} minutes left  ", end="", file=sys.stderr, flush=True)
    if missing:
        print(file=sys.stderr)
    asked = rows_of(record, chosen_jobs, chosen_faults, options.seeds)
    print_rows(asked)
    if options.seeds != SEEDS:
        for row in losses(asked):
            low, high = between(record, row, options.seeds)
            print(f"{row.job} {row.fault}: less the price of seeds 0 to 7, {low:+.4f} to {high:+.4f}")
    else:
        rows = rows_of(record, list(JOBS), list(FAULTS), SEEDS)
        write_csv(rows, options.data / "prices.csv")
        if options.data == DATA:
            write_page(rows)


if __name__ == "__main__":
    main()
