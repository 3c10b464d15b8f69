"""Count the optimizer steps of a run before it starts.

Most wrong step counts come from a unit that nobody named: samples, batches and optimizer steps are three
clocks, and gradient accumulation, ranks and the short end of an epoch set them apart. The rule of a Trainer:
*an epoch steps once for every full window of micro-batches, and once more for the short one.*

    >>> plan = plan_steps(2500, 64, accumulate_grad_batches=8, max_epochs=10)
    >>> plan.batches_per_epoch, plan.steps_per_epoch, plan.total_steps
    (40, 5, 50)
    >>> plan.windows[-1]
    Window(optimizer_step=49, epoch=9, start=32, stop=40, carried=0, per_rank_samples=452)

Everything is a closed form: a plan for 10**12 samples is as quick as one for ten.
`planning` turns arguments and samplers into a plan, `counting` counts batches, windows and steps, `plan` says them.
"""

from course_lib.steps.plan import StepPlan
from course_lib.steps.planning import max_steps_for, plan_steps

__all__ = ["StepPlan", "max_steps_for", "plan_steps"]
