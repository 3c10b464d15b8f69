"""length: what ends the run, how many epochs it completes, and whether they are as long as their loader says."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.checks.dealt import STREAM_SAMPLES, Dealt
from rehearse.report import Judgement, not_applicable
from rehearse.runs.run import Started


def judge_length(started: Started) -> Judgement:
    judgement = Judgement(facts=_facts(started))
    plan = started.plan
    if started.batches == 0 or started.limit_train_batches == 0:
        judgement.add(_nothing_to_train(started))
        return judgement
    if started.max_time:
        judgement.notes.append("length: max_time may end the run before its planned end")
    limit, whole_epoch = started.limit_train_batches, started.batches_without_limit
    may_mean_all = isinstance(limit, int) and limit == 1 and not started.limits_others
    if may_mean_all and (whole_epoch or 0) > 1 and not started.overfits:
        judgement.find(
            "length",
            f"limit_train_batches=1 is an int and means one batch: an epoch trains 1 of its "
            f"{counted(whole_epoch or 0, 'batch', 'batches')}.",
            "Most samples are never trained, and an epoch is one step.",
            "limit_train_batches=1.0 is all of them; leave it out.",
        )
    elif whole_epoch not in (None, started.batches) and not started.overfits:
        judgement.notes.append(
            f"length: limit_train_batches={limit!r} trains {started.batches:,} of the {whole_epoch:,} batches of an "
            "epoch"
        )
    if started.overfits:
        judgement.notes.append("length: overfit_batches trains on the same few batches")
    if plan is None:
        judgement.add(not_applicable("length", started.why_no_plan))
        return judgement
    whole = started.other_plans.get("max_steps")
    if whole is not None and whole.total_steps > plan.total_steps:
        judgement.find(
            "length",
            f"max_steps={started.max_steps:,} ends the run after {counted(plan.epochs_completed, 'full epoch')} of "
            f"max_epochs={started.max_epochs:,}, which would take {counted(whole.total_steps, 'optimizer step')}.",
            f"The last {counted(started.max_epochs - plan.epochs_completed, 'epoch')} "
            "are not trained or not to their end, and nothing says so.",
            f"Set max_epochs alone, or max_steps={whole.total_steps}; plan_steps counts short last windows too.",
        )
    return judgement


def _nothing_to_train(started: Started) -> Judgement:
    cure = "Give the loader samples."
    whole = started.batches_without_limit
    if whole:
        why = f"limit_train_batches={started.limit_train_batches!r} leaves 0 of {counted(whole, 'batch', 'batches')}"
        cure = "Raise limit_train_batches until an epoch has a batch; 1 (an int) is one batch."
    elif started.samples and started.drop_last:
        size = started.per_rank_batch_size
        batches = "batches" if size is None else f"batches of {size:,}"
        ranks = f" on each of {started.world_size} ranks" if started.world_size > 1 else ""
        why = f"drop_last leaves nothing of {counted(started.samples, 'sample')} in {batches}{ranks}"
        cure = "Make the batch smaller, or leave drop_last out."
    else:
        why = "the loader is empty"
    return Judgement().find(
        "length",
        f"An epoch has 0 batches: {why}.",
        "The fit returns at once: nothing is trained, and no error says so.",
        cure,
    )


def judge_promised_length(dealt: Dealt, *, epochs_end_the_run: bool) -> Judgement:
    """``len(loader)`` against the batches that came."""
    if dealt.stream:
        read = dealt.stream_samples
        if read >= STREAM_SAMPLES and dealt.promised[0] is None and epochs_end_the_run:
            return Judgement().find(
                "length",
                f"The stream has not ended after {counted(read, 'sample')}, and only the number of its epochs "
                "ends the run.",
                "A stream without an end never finishes its first epoch: no validation, no checkpoint, no end.",
                "Set limit_train_batches (an int), which ends an epoch, or max_steps.",
            )
        return Judgement()
    promised = dealt.promised[0] if dealt.promised else None
    if dealt.why_not or promised is None or dealt.overfits:
        return Judgement()
    came = len(dealt.epochs[0])
    if came == promised:
        return Judgement()
    if came > promised:
        unread = counted(came - promised, "batch", "batches")
        means = f"The Trainer counts by len: the last {unread} of an epoch are not trained."
    else:
        means = "The Trainer plans by len: the epoch ends before its last window, its schedule is planned too long."
    return Judgement().find(
        "length",
        f"len(loader) is {promised:,}, and an epoch yields {counted(came, 'batch', 'batches')}.",
        means,
        "Let __len__ of the batch sampler say what __iter__ yields: -(-n // batch_size) with a short last batch.",
    )


def _facts(started: Started) -> dict[str, object]:
    facts: dict[str, object] = {"ranks": started.world_size}
    if started.samples is not None:
        facts["samples"] = started.samples
    if started.batches is not None:
        facts["micro-batches per epoch and rank"] = started.batches
    plan = started.plan
    if plan is None:
        return facts
    per_epoch = plan.steps_per_epoch
    facts["accumulate_grad_batches"] = started.accumulate_grad_batches
    facts["optimizer steps per epoch"] = per_epoch if isinstance(per_epoch, int) else str(per_epoch)
    facts["optimizer steps"] = plan.total_steps
    facts["full epochs"] = plan.epochs_completed
    stopped_by_steps = plan.total_steps == plan.max_steps and started.max_epochs != plan.epochs_completed
    facts["ended by"] = f"max_steps={plan.max_steps}" if stopped_by_steps else f"max_epochs={plan.max_epochs}"
    return facts
