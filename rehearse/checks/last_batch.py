"""setup: the last batch of an epoch, where it is smaller than the others: a fit that dies there dies after an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from course_lib._words import counted
from rehearse._own_files import WritesAFile
from rehearse.report import Judgement, in_a_line
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import MOST_INDICES, Enough, Started

ALIKE = 8
"""Few samples are as many as leave the same rest when they are divided by it: pairs stay pairs."""


def may_be_smaller(started: Started) -> bool:
    """Whether an epoch may end with a batch of another size."""
    if not started.samples or started.samples > MOST_INDICES or started.drop_last or started.overfits:
        return False
    if started.per_rank_batch_size is None:
        return True
    return -(-started.samples // started.world_size) % started.per_rank_batch_size != 0


def judge_last_batch(run: LightningRun) -> Callable[[Path], Judgement]:
    """A trial: train an epoch's last batch alone, if it is smaller than the first."""

    def trial(folder: Path) -> Judgement:
        samples = 0

        def last_alone(loader: Any) -> Any:
            nonlocal samples
            if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
                return None
            batches = [list(batch) for batch in loader.batch_sampler]
            if not batches or len(batches[-1]) >= len(batches[0]):
                return None
            samples = len(batches[-1])
            few, run.samples_tried = run.samples_tried, 0  # it is cut here
            if few and samples > few + ALIKE:
                samples = few + (samples - few) % ALIKE
            return DataLoader(loader.dataset, batch_sampler=[batches[-1][:samples]], collate_fn=loader.collate_fn)

        def begin(*_: Any) -> None:
            if not samples:
                raise Enough

        def end(*_: Any) -> None:
            raise Enough

        try:
            run.start(folder, prepare_loader=last_alone, on_train_start=begin, on_train_batch_end=end)
        except WritesAFile:
            raise
        except Exception as error:
            if not samples:
                raise
            return Judgement().find(
                "setup",
                f"The last batch of an epoch, of {counted(samples, 'sample')}, raises: {in_a_line(error)}.",
                "The fit ends there, at the end of its first epoch.",
                "Set drop_last=True, or choose a batch size that leaves more for the last batch.",
            )
        return Judgement()

    return trial
