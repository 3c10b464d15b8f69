"""window, between the backward passes and the step: where gradients are clipped, and how often an average is moved."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.report import Judgement
from rehearse.scripts.events import Backward, Clipped, Step, Unscaled
from rehearse.scripts.journal import Journal


def clipped(judgement: Judgement, journal: Journal, optimizer: int) -> bool:
    """Gradients that are clipped before their window has all of them, or while they are multiplied by a scale."""
    steps = within = scaled = micro_batch = 0
    clipped = clipped_within = unscaled = False
    first: dict[str, int] = {}
    for event in journal.events:
        if isinstance(event, Backward) and optimizer in event.reached:
            micro_batch += 1
            clipped_within |= clipped
        elif isinstance(event, Clipped) and optimizer in event.optimizers:
            clipped = True
        elif isinstance(event, Unscaled) and event.optimizer == optimizer:
            if clipped and not unscaled:
                scaled += 1
                first.setdefault("scaled", micro_batch)
            unscaled = True
        elif isinstance(event, Step) and event.optimizer == optimizer:
            steps += 1
            if clipped_within:
                within += 1
                first.setdefault("within", micro_batch)
            clipped = clipped_within = unscaled = False
    name = journal.optimizer_name(optimizer)
    if 2 * scaled > steps:
        judgement.find(
            "window",
            f"The gradients of {name} are clipped while a GradScaler has them multiplied, ahead of unscale_: in "
            f"{scaled:,} of {counted(steps, 'step')} (backward pass {first['scaled']:,} is the first).",
            "The norm is that of the scaled gradients, so that nearly all of each is cut off: the steps are tiny.",
            f"Is there a scaler.unscale_(optimizer) ahead of the clipping? {name} needs one in each step.",
            at=first["scaled"],
        )
    elif 2 * within > steps:
        judgement.find(
            "window",
            f"The gradients of {name} are clipped in each micro-batch of a window, and not once ahead of its step: in "
            f"{within:,} of {counted(steps, 'step')} (backward pass {first['within']:,} is the first).",
            "What the first micro-batches gave is clipped again and again, and counts less than what the last gave.",
            "Is one clipping meant for each step? Then call it where the step is made, behind the last backward pass.",
            at=first["within"],
        )
    return 2 * max(scaled, within) > steps > 0


def averaged_too_often(judgement: Judgement, journal: Journal) -> None:
    """An average of weights that is moved more often than the weights are."""
    counts = journal.counts()
    updates, steps = counts["updates of averages"], counts["optimizer steps"]
    if steps > 1 and updates > 1.5 * steps:
        judgement.find(
            "window",
            f"An average of the weights is moved {updates:,} times, in {counted(steps, 'optimizer step')}.",
            "It takes up the same weights several times: it forgets faster than its decay says.",
            "Is one update meant for each optimizer step? Then call update_parameters where the step is made.",
        )
