"""A plan is a closed form: its cost does not grow with the run."""

import statistics
import time

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
