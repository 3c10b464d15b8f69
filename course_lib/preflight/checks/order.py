"""order: whether each epoch has an order of its own, and all ranks draw the same. changes: whether epochs are alike."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib._words import counted
from course_lib.preflight.checks.dealing import STREAM_SAMPLES, Share
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
    if (not share.draws and not share.set_epoch_would_shuffle) or all(order == sorted(order) for order in orders):
        judgement.notes.append("order: nothing shuffles, every epoch has the same order")
        return judgement
    first, again = twice[0]
    if share.reloads:
        cause = "the loader that is made again in each epoch starts its generator at the same seed"
        cure = "Seed the new loader's generator by SeedSequence([seed, trainer.current_epoch])."
    elif share.set_epoch_would_shuffle:
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
    """The lengths of the epochs against the lengths that the Trainer counts, and those that the module would give."""
    judgement = Judgement()
    if share.why_not or share.stream:
        judgement.not_judged["changes"] = share.why_not or "a stream has no length"
        return judgement
    counts = [len(epoch) for epoch in share.epochs]
    if share.overfits or share.promised[0] not in (None, counts[0]):
        return judgement
    last = share.promised[-1]
    if share.after_validation is not None and last is not None and share.after_validation != last:
        judgement.findings.append(_reset_within_epoch(last, share.after_validation))
        return judgement
    for epoch, (count, promised, asked) in enumerate(zip(counts, share.promised, share.asked_again, strict=False)):
        if epoch and promised is not None and count != promised:
            judgement.findings.append(_miscounted(epoch, count, promised))
            break
        if asked is not None and asked != count and (promised is None or count == promised):
            judgement.findings.append(_asked_too_rarely(epoch, count, asked, share.reloads))
            break
    return judgement


def _miscounted(epoch: int, count: int, promised: int) -> Finding:
    if count < promised:
        means = "The epoch ends early, with its last window and its schedule off."
    else:
        means = f"The last {counted(count - promised, 'batch', 'batches')} are not trained."
    return Finding(
        "changes",
        f"Epoch {epoch} has {counted(count, 'batch', 'batches')}, and the Trainer goes by the {promised:,} that it "
        "counted before.",
        means,
        "Let one batch sampler plan all epochs (ScheduledBatchSampler, SizeScheduleDataModule), or reload the loader: "
        "reload_dataloaders_every_n_epochs=1.",
        "08_changing_batch_size",
    )


def _reset_within_epoch(before: int, after: int) -> Finding:
    return Finding(
        "changes",
        f"A validation within an epoch ends with a hook that has the Trainer count the epoch again: {after:,} batches "
        f"in place of {before:,}.",
        "The epoch that is going on ends at the new count: the rest of its samples is not trained, or it starts over.",
        "Change the size between epochs: reload_dataloaders_every_n_epochs=1, or SizeScheduleDataModule.",
        "08_changing_batch_size",
    )


def _asked_too_rarely(epoch: int, count: int, asked: int, reloads: bool) -> Finding:
    if reloads:
        why = "what it depends on is decided after the Trainer has asked, so each size comes one epoch late"
        cure = "Decide in train_dataloader() itself, by self.trainer.current_epoch."
    else:
        why = "the Trainer asks once and keeps the first loader"
        cure = (
            "Set reload_dataloaders_every_n_epochs=1, or let a batch sampler plan all epochs (ScheduledBatchSampler)."
        )
    return Finding(
        "changes",
        f"In epoch {epoch}, train_dataloader() would give {counted(asked, 'batch', 'batches')}, and {count:,} are "
        f"trained: {why}.",
        "The batch size that was to change does not, or too late; the schedule is planned for another length.",
        cure,
        "08_changing_batch_size",
    )


def judge_promised_length(share: Share, *, epochs_end_the_run: bool) -> Judgement:
    """``len(loader)`` against the batches that came, for the check length."""
    judgement = Judgement()
    if share.stream:
        read = share.stream_samples
        if read >= STREAM_SAMPLES and share.promised[0] is None and epochs_end_the_run:
            judgement.findings.append(
                Finding(
                    "length",
                    f"The stream has not ended after {counted(read, 'sample')}, and only the number of its epochs "
                    "ends the run.",
                    "A stream without an end never finishes its first epoch: no validation, no checkpoint, no end.",
                    "Set limit_train_batches (an int), which ends an epoch, or max_steps.",
                    "05_counting_steps",
                )
            )
        return judgement
    promised = share.promised[0] if share.promised else None
    if share.why_not or promised is None or share.overfits:
        return judgement
    came = len(share.epochs[0])
    if came == promised:
        return judgement
    unread = f"the last {counted(came - promised, 'batch', 'batches')} of an epoch are not trained"
    judgement.findings.append(
        Finding(
            "length",
            f"len(loader) is {promised:,}, and an epoch yields {counted(came, 'batch', 'batches')}.",
            f"The Trainer counts by len: {unread}."
            if came > promised
            else "The Trainer plans by len: the epoch ends before its last window, its schedule is planned too long.",
            "Let __len__ of the batch sampler say what __iter__ yields: -(-n // batch_size) with a short last batch.",
            "05_counting_steps",
        )
    )
    return judgement
