"""Trials with a few samples in each batch: an image model's step takes as long as its samples do.

The rule: *few samples may only acquit.* What such a trial finds, or fails at, is tried again with whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rehearse.report import Judgement, Kind
from rehearse.runs.copies import Answer, try_on_copies
from rehearse.runs.lightning_run import LightningRun

Found = TypeVar("Found")
FEWEST = 2
"""Samples of a batch: two can still be told apart, and normalized."""
SECONDS = 2.0
"""CPU time that the forward and backward passes of a trial should take; it decides on the number of samples."""


def with_few_samples(run: LightningRun, trial: Callable[[Path], Found], samples: int) -> Callable[[Path], Found]:
    """The trial, with so many samples in each batch: a step takes as long as its samples do."""

    def few(folder: Path) -> Found:
        run.samples_tried = samples
        return trial(folder)

    return few


class Trial(NamedTuple):
    """How a check is tried."""

    check: str
    """Under which its failure is told."""
    judge: Callable[[Path], Judgement]
    micro_batches: int = 0
    """That it runs through the model; 0: none, or their size is what it looks at."""


def judged_by(
    run: LightningRun, trials: Sequence[Trial], seconds_a_sample: float, batch_size: int | None, *, seconds: float
) -> list[Answer]:
    """The answers of the trials, with as many samples in a batch as take a moment, and where needed with all.

    ``seconds_a_sample``: CPU time of a forward and backward pass; 0 where it is not known. ``batch_size``: of a whole
    batch, as far as it is known. Where whole batches would take longer than ``seconds``, a finding of few stands.
    """
    seconds_a_batch = seconds_a_sample * (batch_size or 1)

    def few(trial: Trial) -> Callable[[Path], Judgement]:
        if not trial.micro_batches:
            return trial.judge
        samples = FEWEST
        if seconds_a_sample:
            samples = max(FEWEST, int(SECONDS / (seconds_a_sample * trial.micro_batches)))
        return with_few_samples(run, trial.judge, samples)

    answers = try_on_copies(list(map(few, trials)), seconds=seconds)
    doubtful = [n for n, one in enumerate(trials) if one.micro_batches and not _acquits(answers[n])]
    in_time = [n for n in doubtful if answers[n].error or trials[n].micro_batches * seconds_a_batch < seconds]
    again = dict(zip(in_time, try_on_copies([trials[n].judge for n in in_time], seconds=seconds), strict=True))
    for number in doubtful:
        if number in again and (answers[number].error or not again[number].timed_out):
            answers[number] = again[number]
        else:
            said = f"{trials[number].check}: tried with few samples of each batch, as whole ones would take too long"
            answers[number].value.notes.append(said)
    return answers


def _acquits(answer: Answer) -> bool:
    if answer.error:
        return answer.timed_out  # with more samples it would take longer still
    judgement: Judgement = answer.value
    failed = any(unjudged.kind is Kind.FAILED for unjudged in judgement.not_judged.values())
    return not judgement.findings and not failed
