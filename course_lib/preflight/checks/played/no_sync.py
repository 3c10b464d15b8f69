"""no_sync: in which micro-batches of a played script's windows the ranks average their gradients."""

from __future__ import annotations

from course_lib._words import counted
from course_lib.preflight.report import Judgement, not_applicable
from course_lib.timelapse.journal import Journal
from course_lib.timelapse.windows import windows_of


def judge_no_sync(journal: Journal) -> Judgement:
    if journal.world_size == 1:
        return not_applicable("no_sync", "the script runs on one rank")
    if "DistributedDataParallel" not in journal.modules:
        return not_applicable("no_sync", "no module is wrapped in DistributedDataParallel")
    windows = [window for of in windows_of(journal) for window in of.windows if window.passes]
    wrong = [window for window in windows if not window.passes[-1].averages]
    if wrong:
        first = wrong[0]
        averaged = sum(one.averages for one in first.passes)
        shown = f"a window of {counted(len(first.passes), 'micro-batch', 'micro-batches')}"
        return Judgement().find(
            "no_sync",
            f"In {shown}, gradients are averaged over the {journal.world_size} ranks in {averaged:,} and not in the "
            f"last (micro-batch {first.micro_batch:,}; {len(wrong):,} of {counted(len(windows), 'step')}).",
            "The ranks step with their own gradients: their weights part, and no error says so.",
            "Put all micro-batches but the last under no_sync, forward and backward.",
            at=first.micro_batch,
        )
    most = max((sum(one.averages for one in window.passes) for window in windows), default=0)
    if most > 1:
        note = (
            f"no_sync: a window averages its gradients over the ranks {most:,} times; once, in the last, gives the same"
        )
        return Judgement(notes=[note])
    return Judgement()
