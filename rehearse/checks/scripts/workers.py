"""workers: whether the workers of a rehearsed script's streams share them."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.journal import Journal


def judge_workers(journal: Journal) -> Judgement:
    streams = [loader for loader in journal.loaders if loader.stream and loader.workers > 1]
    for loader in streams:
        if loader.times_each == loader.workers:
            return Judgement().find(
                "workers",
                f"Each of {counted(loader.workers, 'worker')} reads the whole stream: each sample comes "
                f"{loader.workers:,} times in a loop over it.",
                "An epoch is as many times as long as it is meant to be, and so is all that is counted by its batches.",
                "Does __iter__ take every n-th sample by torch.utils.data.get_worker_info(), as "
                "course_lib.datasets.IntegerStream does?",
            )
    if streams:
        return Judgement()
    return not_applicable("workers", "no stream is read by several workers; a loader of samples is tried by a fit")
