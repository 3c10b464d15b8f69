"""A plan is a closed form: its cost does not grow with the run, nor that of a window with the stages of a schedule."""

import statistics
import time

from course_lib.schedules import SizeSchedule
from course_lib.steps import plan_steps


def seconds_for(num_samples: int) -> float:
    begin = time.perf_counter()
    plan = plan_steps(num_samples, 7, accumulate_grad_batches={0: 3, 5: 2}, world_size=8, max_epochs=100)
    plan.windows[len(plan.windows) // 2]
    plan.explain()
    return time.perf_counter() - begin


def test_a_plan_for_a_trillion_samples_costs_what_one_for_a_thousand_does():
    small, large = (statistics.median(seconds_for(n) for _ in range(500)) for n in (10**3, 10**12))
    print(f"\nplan, a window and its words: 10**3 samples {small * 1e6:.0f} µs, 10**12 samples {large * 1e6:.0f} µs")
    assert large < 3 * small


def seconds_for_windows(batch_sizes) -> float:
    plan = plan_steps(10_000, batch_sizes, max_epochs=1)
    begin = time.perf_counter()
    assert sum(window.per_rank_samples for window in plan.windows) == 10_000
    return time.perf_counter() - begin


def test_the_windows_of_800_stages_cost_what_those_of_one_do():
    stages = [(step, 1 + step % 7, 1 + step % 3) for step in range(800)]
    many, one = SizeSchedule(stages, unit="optimizer_steps"), SizeSchedule({0: (8, 2)})
    of_many, of_one = (statistics.median(seconds_for_windows(each) for _ in range(15)) for each in (many, one))
    print(f"\n5,000 windows: of 800 stages {of_many * 1e3:.0f} ms, of one {of_one * 1e3:.0f} ms")
    assert of_many < 3 * of_one
