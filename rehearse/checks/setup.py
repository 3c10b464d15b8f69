"""setup: the first micro-batches are run, to see which parameters are trained and what the steps are counted by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from course_lib._words import counted, plural
from rehearse.checks.first_steps import FirstSteps, WatchedParameter
from rehearse.report import Judgement, not_judged
from rehearse.runs.run import Settings, Started


def judge_setup(steps: FirstSteps, settings: Settings, frozen: Collection[str] = ()) -> Judgement:
    """What the first windows show of the parameters; ``frozen``: prefixes of names that are not to be trained."""
    batches = counted(steps.batches, "micro-batch", "micro-batches")
    if not settings.automatic and not steps.global_step and not any(p.has_gradient for p in steps.parameters):
        return not_judged("setup", f"the module's own code makes no backward pass and no step in its first {batches}")
    judgement = Judgement()
    meant = tuple(frozen)
    trained = [p for p in steps.parameters if p.trainable and not (meant and p.name.startswith(meant))]
    loose = [p.name for p in trained if not p.held and p.has_gradient and not p.moved]
    if steps.strangers:  # they stand for layers that were replaced
        loose = [p.name for p in trained if not p.held and not p.moved]
    silent = [p for p in trained if p.held and not p.has_gradient and not p.moved]
    judgement.notes += _kept_out(trained, loose)
    cut_off = [p.name for p in silent if p.used]
    unused = [p.name for p in silent if not p.used]
    still_trained = [
        p.name for p in steps.parameters if meant and p.name.startswith(meant) and p.has_gradient and p.held
    ]
    if loose:
        stranger = (
            f"; it holds {counted(steps.strangers, 'tensor')} that the model does not have" if steps.strangers else ""
        )
        judgement.find(
            "setup",
            f"No optimizer holds {_named(loose)}: {len(loose):,} of "
            f"{counted(len(trained), 'trainable parameter')}{stranger}.",
            "What no optimizer holds keeps the values that it has now; nothing says so.",
            "Give the optimizer model.parameters() when the model is complete, or groups that leave none out. "
            "Replace layers before that, in __init__ or configure_model. If it is meant, set requires_grad=False "
            "or expect={'frozen': [...]}.",
        )
    if cut_off:
        judgement.find(
            "setup",
            f"{_named(cut_off)} {'gets' if len(cut_off) == 1 else 'get'} no gradient in {batches}, though the "
            "forward runs through there.",
            "They are never trained" + (", and DDP waits for their gradients." if settings.world_size > 1 else "."),
            "Look for a detach, a no_grad or a .data between them and the loss.",
        )
    # DDP waits for a parameter that no optimizer holds as well.
    waited_for = unused + [p.name for p in trained if not p.held and not p.has_gradient]
    if waited_for and settings.world_size > 1 and not settings.finds_unused:
        judgement.find(
            "setup",
            f"No gradient reaches {_named(waited_for)} in {batches}.",
            "DDP waits for a gradient of every parameter: the second batch raises, or the run hangs.",
            "Take it out, freeze it (requires_grad_(False)), or use strategy='ddp_find_unused_parameters_true'.",
        )
    elif unused:
        judgement.notes.append(f"setup: {_named(unused)} not used by the forward, and so not trained")
    asleep = [
        name
        for name in steps.in_evaluation
        if any(p.held and p.has_gradient and p.name.startswith(f"{name}." if name else "") for p in steps.parameters)
    ]
    if asleep:
        names = _named([name or "the whole model" for name in asleep])
        judgement.find(
            "setup",
            f"{names} {plural(len(asleep), 'is', 'are')} in evaluation mode in all of {batches}, and trained: "
            "a Trainer leaves each module in the mode that it finds.",
            "Nothing is dropped there, and BatchNorm keeps the statistics that it has.",
            "Call model.train() before the fit (from_pretrained leaves a model in evaluation mode). If it is meant, "
            "freeze its parameters, or call eval() in on_train_epoch_start, where a reader sees it.",
        )
    unknown = [prefix for prefix in meant if not any(p.name.startswith(prefix) for p in steps.parameters)]
    if unknown:
        judgement.find(
            "setup",
            f"No parameter's name begins with {_named(unknown)}, which expect={{'frozen': [...]}} names.",
            "What was to stay as it is may be trained; a name with a slip in it holds nothing.",
            f"Name parameters, or their beginning: {_named([p.name for p in steps.parameters])}.",
        )
    if still_trained:
        judgement.find(
            "setup",
            f"{_named(still_trained)} {plural(len(still_trained), 'is', 'are')} trained, and meant to be frozen.",
            "What was to stay as it is moves.",
            "Set requires_grad=False before the optimizer is made.",
        )
    return judgement


def _kept_out(trained: Sequence[WatchedParameter], loose: Collection[str]) -> list[str]:
    """Notes on parameters that no optimizer holds, and that are not waiting for one either."""
    out = [p for p in trained if not p.held and p.name not in loose]
    moved = [p.name for p in out if p.moved]
    still = [p.name for p in out if not p.moved]
    notes = []
    if moved:
        notes.append(f"setup: no optimizer holds {_named(moved)}, and the module's own code writes to them")
    if still:
        notes.append(f"setup: no optimizer holds {_named(still)}, and no gradient reaches them: they stay as they are")
    return notes


def judge_refusal(sentence: str) -> Judgement:
    """A run that Lightning or course_lib refuses before or in its first batch."""
    return Judgement().find(
        "setup",
        f"The fit ends before 1 optimizer step: {sentence.rstrip('.')}.",
        "Nothing is trained.",
        "Follow that sentence; the page `What goes with what` lists the pairs that are refused.",
        chapter="09_all_at_once",
    )


def judge_counting(steps: FirstSteps, started: Started) -> Judgement:
    """What ``max_steps`` counts where the module steps by itself."""
    judgement = Judgement()
    if started.automatic or not started.batches or started.max_steps == -1 or not steps.global_step:
        return judgement
    per_batch = steps.global_step / steps.batches
    batches = int(started.max_steps / per_batch)
    judgement.facts["global_step per micro-batch"] = f"{per_batch:g}"
    if started.optimizers < 2 or per_batch <= 1:
        return judgement
    told = f"{counted(started.optimizers, 'optimizer')} count {per_batch:g} steps for each micro-batch"
    whole = started.max_epochs * started.batches
    if started.max_epochs != -1 and batches < whole:
        judgement.find(
            "setup",
            f"{told}: max_steps={started.max_steps:,} ends the run after {batches:,} of the {whole:,} "
            f"micro-batches of max_epochs={started.max_epochs}.",
            "global_step counts the calls of all optimizers, and the run ends early without a message.",
            f"Set max_steps={int(whole * per_batch)}, or max_epochs alone.",
            chapter="05_counting_steps",
        )
    else:
        judgement.notes.append(f"setup: {told}, so max_steps={started.max_steps:,} is {batches:,} micro-batches")
    return judgement


def _named(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
