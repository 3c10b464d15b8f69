"""order: whether each epoch has an order of its own, and all ranks draw the same. changes: whether epochs are alike."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib._words import counted
from course_lib.preflight.dealing import STREAM_SAMPLES, Share
from course_lib.preflight.report import Finding, Judgement

CHAPTER = "06_batch_samplers_ddp"
FEWEST = 8
"""Samples of a rank from which on two shuffled epochs are not alike by chance."""


def judge_order(share: Share) -> Judgement:
    """The epochs of one rank."""
    judgement = Judgement()
    if share.why_not or share.stream:
        judgement.not_judged["order"] = share.why_not or "a stream has no indices"
        return judgement
    orders = [share.epoch(number) for number in range(len(share.epochs))]
    if share.overfits or len(orders) < 2 or len(orders[0]) < FEWEST:
        return judgement
    twice = [(a, b) for b in range(len(orders)) for a in range(b) if orders[a] == orders[b]]
    if not twice:
        return judgement
    if not share.draws and not share.has_set_epoch or all(order == sorted(order) for order in orders):
        judgement.notes.append("order: nothing shuffles, every epoch has the same order")
        return judgement
    first, again = twice[0]
    if share.reloads:
        cause = "the loader that is made again in each epoch starts its generator at the same seed"
        cure = "Seed the new loader's generator by SeedSequence([seed, trainer.current_epoch])."
    elif share.has_set_epoch:
        cause = "its sampler has set_epoch, and the Trainer's call does not arrive there"
        cure = (
            "A Trainer calls set_epoch of loader.sampler and of loader.batch_sampler.sampler: give the batch sampler a "
            "property sampler that is the one with set_epoch, or use one of course_lib.samplers."
        )
    else:
        cause = "its sampler starts its generator at the same seed whenever it is asked"
        cure = "Draw the order from SeedSequence([seed, epoch]), with the epoch that set_epoch brings."
    judgement.findings.append(
        Finding(
            "order",
            f"Epochs {first} and {again} have the same shuffled order, {_start(orders[first])}: {cause}.",
            "The samples that share a batch are the same in each of these epochs; nothing says so.",
            cure,
            CHAPTER,
        )
    )
    return judgement


def _start(order: Sequence[int]) -> str:
    return f"[{', '.join(map(str, order[:4]))}, …]"


def judge_changes(share: Share) -> Judgement:
    """The lengths of the epochs against the length that the Trainer counts."""
    judgement = Judgement()
    if share.why_not or share.stream or share.promised is None:
        judgement.not_judged["changes"] = share.why_not or "a stream has no length"
        return judgement
    counts = [len(epoch) for epoch in share.epochs]
    if share.overfits or counts[0] != share.promised:
        return judgement
    other = next((number for number, count in enumerate(counts) if count != share.promised), None)
    if other is None:
        return judgement
    fewer = counts[other] < share.promised
    judgement.findings.append(
        Finding(
            "changes",
            f"Epoch {other} has {counted(counts[other], 'batch', 'batches')}, and the Trainer counts "
            f"{share.promised:,} in every epoch, as in the first.",
            "The epoch ends early, with its last window and its schedule off."
            if fewer
            else f"The last {counted(counts[other] - share.promised, 'batch', 'batches')} are not trained.",
            "Let one batch sampler plan all epochs (ScheduledBatchSampler), with SizeScheduleDataModule in a Trainer.",
            "08_changing_batch_size",
        )
    )
    return judgement


def judge_promised_length(share: Share, *, epochs_end_the_run: bool) -> Judgement:
    """``len(loader)`` against the batches that came, for the check length."""
    judgement = Judgement()
    if share.stream:
        read = len(share.epochs[0]) if share.epochs else 0
        if read >= STREAM_SAMPLES and not share.ended and share.promised is None and epochs_end_the_run:
            judgement.findings.append(
                Finding(
                    "length",
                    f"The stream has not ended after {counted(read, 'sample')}, and only the number of its epochs ends the run.",
                    "A stream without an end never finishes its first epoch: no validation, no checkpoint, no end.",
                    "Set limit_train_batches (an int), which ends an epoch, or max_steps.",
                    "05_counting_steps",
                )
            )
        return judgement
    if share.why_not or share.promised is None or share.overfits:
        return judgement
    came = len(share.epochs[0])
    if came == share.promised:
        return judgement
    unread = f"the last {counted(came - share.promised, 'batch', 'batches')} of an epoch are not trained"
    judgement.findings.append(
        Finding(
            "length",
            f"len(loader) is {share.promised:,}, and an epoch yields {counted(came, 'batch', 'batches')}.",
            f"The Trainer counts by len: {unread}."
            if came > share.promised
            else "The Trainer plans by len: the epoch ends before its last window, and the schedule is planned too long.",
            "Let __len__ of the batch sampler say what __iter__ yields: -(-n // batch_size) with a short last batch.",
            "05_counting_steps",
        )
    )
    return judgement
