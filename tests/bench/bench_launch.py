"""run_ranks against torchrun on the same function, and how soon a bad end is reported."""

import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankError, RankTimeout, run_ranks

TORCHRUN_SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank())])
dist.all_reduce(x)
assert x.item() == 1.0
dist.destroy_process_group()
"""


def all_reduce(rank):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_a_warm_call_takes_under_half_a_second_and_a_tenth_of_torchrun(tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(TORCHRUN_SCRIPT)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    first = seconds_of(lambda: run_ranks(all_reduce))
    ours, theirs = [], []
    for _ in range(5):
        ours += [seconds_of(lambda: run_ranks(all_reduce)) for _ in range(4)]
        theirs.append(seconds_of(lambda: subprocess.run(torchrun, check=True, capture_output=True)))
    ours_median, theirs_median = statistics.median(ours), statistics.median(theirs)
    print(
        f"\ntwo-rank all-reduce, medians: run_ranks {ours_median:.3f} s (first call {first:.1f} s), "
        f"torchrun {theirs_median:.2f} s, ratio {theirs_median / ours_median:.0f}"
    )
    assert ours_median < 0.5
    assert theirs_median > 10 * ours_median


def test_a_deadlock_is_reported_within_the_timeout_and_two_seconds():
    def deadlock(rank):
        dist.barrier() if rank == 0 else time.sleep(600)

    run_ranks(all_reduce)
    begin = time.perf_counter()
    with pytest.raises(RankTimeout) as caught:
        run_ranks(deadlock, timeout=2)
    took = time.perf_counter() - begin
    print(f"\ndeadlock with timeout=2 reported after {took:.2f} s")
    assert took < 4
    assert all(report.functions[0] == "deadlock" for report in caught.value.reports)


def test_a_killed_rank_is_reported_within_two_seconds():
    def die(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    run_ranks(all_reduce)
    begin = time.perf_counter()
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(die)
    took = time.perf_counter() - begin
    print(f"\nkilled rank reported after {took:.2f} s")
    assert took < 2
