"""changes: whether the epochs have the lengths that the Trainer counts by, and those that the module would give."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.checks.dealt import Dealt
from rehearse.report import Judgement, not_applicable


def judge_changes(dealt: Dealt) -> Judgement:
    """The lengths of the epochs against the lengths that the Trainer counts, and those that the module would give."""
    if dealt.why_not:
        return Judgement(not_judged={"changes": dealt.why_not})
    if dealt.stream:
        return not_applicable("changes", "a stream has no length")
    counts = [len(epoch) for epoch in dealt.epochs]
    if dealt.overfits or dealt.promised[0] not in (None, counts[0]):
        return Judgement()
    last = dealt.promised[-1]
    if dealt.after_validation is not None and last is not None and dealt.after_validation != last:
        return _reset_within_epoch(last, dealt.after_validation)
    for epoch, (count, promised, asked) in enumerate(zip(counts, dealt.promised, dealt.asked_again, strict=False)):
        if epoch and promised is not None and count != promised:
            return _miscounted(epoch, count, promised)
        if asked is not None and asked != count and (promised is None or count == promised):
            return _asked_too_rarely(epoch, count, asked, dealt.reloads)
    return Judgement()


def _miscounted(epoch: int, count: int, promised: int) -> Judgement:
    if count < promised:
        means = "The epoch ends early, with its last window and its schedule off."
    else:
        means = f"The last {counted(count - promised, 'batch', 'batches')} are not trained."
    return Judgement().find(
        "changes",
        f"Epoch {epoch} has {counted(count, 'batch', 'batches')}, and the Trainer goes by the {promised:,} that it "
        "counted before.",
        means,
        "Does the batch sampler do without __len__? A Trainer then goes by what comes. Or let one plan all epochs "
        "(ScheduledBatchSampler, SizeScheduleDataModule).",
    )


def _reset_within_epoch(before: int, after: int) -> Judgement:
    return Judgement().find(
        "changes",
        f"A validation within an epoch ends with a hook that has the Trainer count the epoch again: {after:,} batches "
        f"in place of {before:,}.",
        "The epoch that is going on ends at the new count: the rest of its samples is not trained, or it starts over.",
        "Change the size between epochs: reload_dataloaders_every_n_epochs=1, or SizeScheduleDataModule.",
    )


def _asked_too_rarely(epoch: int, count: int, asked: int, reloads: bool) -> Judgement:
    if reloads:
        why = "what it depends on is decided after the Trainer has asked, so each size comes one epoch late"
        cure = "Decide in train_dataloader() itself, by self.trainer.current_epoch."
    else:
        why = "the Trainer asks once and keeps the first loader"
        cure = (
            "Set reload_dataloaders_every_n_epochs=1, or let a batch sampler plan all epochs (ScheduledBatchSampler)."
        )
    return Judgement().find(
        "changes",
        f"In epoch {epoch}, train_dataloader() would give {counted(asked, 'batch', 'batches')}, and {count:,} are "
        f"trained: {why}.",
        "The batch size that was to change does not, or too late; the schedule is planned for another length.",
        cure,
    )
