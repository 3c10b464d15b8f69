"""no_sync: in which micro-batches of a rehearsed script's windows the ranks average their gradients."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.checks.scripts.setup import named
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.journal import Journal
from rehearse.scripts.windows import windows_of


def judge_no_sync(journal: Journal) -> Judgement:
    if journal.world_size == 1:
        return not_applicable("no_sync", "the script runs on one rank")
    if journal.averaged_by_none and journal.exchanged < journal.unaveraged:
        return _apart(journal)
    if not journal.is_wrapped:
        return not_applicable("no_sync", "no module is wrapped in DistributedDataParallel")
    windows = [window for of in windows_of(journal) for window in of.windows if window.passes]
    wrong = [window for window in windows if not window.passes[-1].averages]
    if wrong and journal.bypassed and not any(one.averages for one in wrong[0].passes):
        return _bypassed(journal, len(wrong), len(windows), wrong[0].micro_batch)
    if wrong:
        first = wrong[0]
        averaged = sum(one.averages for one in first.passes)
        shown = f"a window of {counted(len(first.passes), 'micro-batch', 'micro-batches')}"
        return Judgement().find(
            "no_sync",
            f"In {shown}, gradients are averaged over the {journal.world_size} ranks in {averaged:,} and not in the "
            f"last (micro-batch {first.micro_batch:,}; {len(wrong):,} of {counted(len(windows), 'step')}).",
            "The ranks step with their own gradients: their weights part, and no error says so.",
            "Put all micro-batches but the last under no_sync, forward and backward. Where several losses "
            "have one forward, take one backward pass of their sum: a second pass averages nothing.",
            at=first.micro_batch,
        )
    most = max((sum(one.averages for one in window.passes) for window in windows), default=0)
    if most > 1:
        note = (
            f"no_sync: a window averages its gradients over the ranks {most:,} times; once, in the last, gives the same"
        )
        return Judgement(notes=[note])
    return Judgement()


def _apart(journal: Journal) -> Judgement:
    """Parameters in no wrapper, of which fewer numbers were exchanged than they hold: not once can all have been."""
    names = journal.averaged_by_none
    return Judgement().find(
        "no_sync",
        f"The {journal.world_size} ranks do not average the gradients of {counted(len(names), 'parameter')} "
        f"({named(names)}): no DistributedDataParallel has them, and of their {journal.unaveraged:,} numbers the "
        f"script itself exchanges {journal.exchanged:,} in the whole run.",
        "Each rank trains these by its own samples alone: their weights part, and no error says so.",
        "Wrap the model in DistributedDataParallel where its parameters are complete, and ahead of the first step.",
    )


def _bypassed(journal: Journal, wrong: int, steps: int, micro_batch: int) -> Judgement:
    return Judgement().find(
        "no_sync",
        f"The forward calls the module that DistributedDataParallel wraps, and not the wrapper ({journal.bypassed}): "
        f"no gradient is averaged over the {journal.world_size} ranks in {wrong:,} of {counted(steps, 'step')} "
        f"(micro-batch {micro_batch:,} is the first).",
        "The ranks step with their own gradients: their weights part, and no error says so.",
        "Call the wrapper in training, model(x) and not model.module(x).",
        at=micro_batch,
    )
