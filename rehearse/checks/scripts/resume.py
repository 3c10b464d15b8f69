"""resume: whether a rehearsed script saves, what its optimizers' states bring back, and how a second life goes on."""

from __future__ import annotations

from course_lib._words import counted, first_of
from rehearse.checks.scripts.order import FEWEST
from rehearse.report import Judgement, Kind, not_applicable, not_judged
from rehearse.scripts.events import Backward, Delivered, Loaded, Saved, StateLoaded, Step
from rehearse.scripts.journal import ENDED, FAILED, REFUSED, Journal
from rehearse.scripts.lives import SecondLife
from rehearse.scripts.windows import passes_of, samples_of

ROUNDING = 1e-3
"""Of a rate."""
JUMP = 1.25
"""Times the rate that a state holds, from which on a first step has another one."""


def judge_resume(journal: Journal, life: SecondLife | None = None, why_open: str = "") -> Judgement:
    """Of one life: that nothing is saved, or a rate is set back behind a state that was loaded. Then of the second.

    ``why_open``: why none was tried though the run may save.
    """
    counts = journal.counts()
    if journal.savers and not counts["saves"] and journal.end == ENDED:
        steps = counted(counts["optimizer steps"], "optimizer step")
        return Judgement().find(
            "resume",
            f"{journal.savers[0]} saves nothing in the whole run of {steps}: it writes no checkpoint.",
            "A run that is killed has to begin again, and nothing is left of one that ends.",
            "Is it meant to save in this run? every_n_train_steps counts optimizer steps, and an epoch's end comes by "
            "every_n_epochs.",
        )
    held: dict[int, float] = {}
    for event in journal.events:
        if isinstance(event, StateLoaded) and event.rates:
            held[event.optimizer] = event.rates[0]
        elif isinstance(event, Step) and event.optimizer in held and event.rates:
            before = held.pop(event.optimizer)
            if event.rates[0] > JUMP * before > 0:
                return Judgement().find(
                    "resume",
                    f"The optimizer's state is loaded with a rate of {before:.3g}, and the first step behind it has "
                    f"{event.rates[0]:.3g}.",
                    "The resumed run trains with another rate than it was stopped with, until its schedule is called.",
                    "Is the schedule made behind load_state_dict of the optimizer? Making it sets the rate back: make "
                    "it first, and load both states then.",
                )
    if why_open:
        return not_judged("resume", why_open, Kind.OPEN)
    if not counts["saves"]:
        judgement = not_applicable("resume", "the script saves no checkpoint")
        if journal.saving_lines:
            lines = ", ".join(journal.saving_lines[:3])
            judgement.notes.append(f"resume: the script can save ({lines}), and nothing in the whole run does")
        return judgement
    if life is None:
        return not_applicable("resume", "no save has training behind it")
    return judge_second_life(journal, life)


def judge_second_life(journal: Journal, life: SecondLife) -> Judgement:
    """Hold what two lives make together against the run that was not stopped."""
    second, steps = life.journal, journal.counts()["optimizer steps"]
    where = f"the save at {life.line}, after {counted(life.steps_before, 'optimizer step')}"
    if second.end in (FAILED, REFUSED):
        return not_judged("resume", f"started again behind {where}, the script fails:\n{second.says}", Kind.OPEN)
    if second.end != ENDED:
        return not_judged("resume", f"started again behind {where}, it did not come to its end", Kind.OPEN)
    if not life.loads and _goes_on_by_itself(journal):
        return not_applicable("resume", "the script itself goes on from what it has saved, within one run")
    if not life.loads:
        how = 'it loads nothing: say how it resumes, --resume-with "--resume last.pt" or resume_with=[…]'
        return not_judged("resume", f"started again behind {where}, {how}", Kind.OPEN)
    more = second.counts()["optimizer steps"]
    if more + life.steps_before != steps:
        return Judgement().find(
            "resume",
            f"Killed behind {where}, and started again, the run makes {more:,} more: {more + life.steps_before:,} in "
            f"all, and {steps:,} where it is not stopped.",
            "The epochs that it begins with, or their batches, are not those at which it was stopped.",
            "Does it begin with the epoch behind the one that was saved, and with the batches behind those that were "
            "trained?",
        )
    rates, others = journal.rates()[life.steps_before :], second.rates()
    for number, (mine, its) in enumerate(zip(rates, others, strict=False)):
        if any(abs(rate - other) > ROUNDING * max(rate, other) for rate, other in zip(mine, its, strict=False)):
            return Judgement().find(
                "resume",
                f"Killed behind {where}, and started again, step {life.steps_before + number + 1:,} has a rate of "
                f"{its[0]:.3g}, and {mine[0]:.3g} where it is not stopped.",
                "The resumed run trains with other rates than the run that it goes on with.",
                "Are the states of the optimizer and of its schedule both saved and both loaded, and the schedule "
                "made ahead of that?",
            )
    within = _within_the_epoch(journal, life, where)
    return _order_of(journal, life, where) if within is None else within


def _goes_on_by_itself(journal: Journal) -> bool:
    """Whether it loads a file behind one that it has saved, and trains on."""
    kinds = [type(event) for event in journal.events]
    saved = kinds.index(Saved)
    return Loaded in kinds[saved:] and Backward in kinds[kinds.index(Loaded, saved) :]


def _within_the_epoch(journal: Journal, life: SecondLife, where: str) -> Judgement | None:
    """What the second life trains of the epoch that it was stopped in; None where that is right, or not known."""
    behind = _micro_batches_before(journal, life.saved_at)
    epochs = [one for one in passes_of(journal, training=True) if one.micro_batch < behind]
    second = passes_of(life.journal, training=True)
    if not epochs or not second or not epochs[-1].ended:
        return None
    done = behind - epochs[-1].micro_batch
    whole, began = samples_of(journal, epochs[-1]), [len(batch or ()) for batch in epochs[-1].batches[:done]]
    before, rest = whole[: sum(began)], whole[sum(began) :]
    if not rest or not whole or len(set(whole)) < len(whole):  # at its end; or samples come several times by choice
        return None
    sizes = [len(batch or ()) for batch in second[0].batches]
    trained = samples_of(life.journal, second[0])[sum(sizes[: _skipped(life.journal)]) :]
    if not trained or len(trained) > len(rest):
        begins = f"resume: started again behind {where}, within an epoch, the script begins another epoch"
        return Judgement(notes=[begins]) if trained else None
    twice, never = sorted(set(before) & set(trained)), set(rest) - set(trained)
    if len(trained) < len(rest) or not twice:
        return None
    return Judgement().find(
        "resume",
        f"Killed behind {where}, within an epoch, and started again, {counted(len(twice), 'sample')} of that epoch "
        f"are trained twice ({first_of(twice, 3)}) and {len(never):,} never.",
        "The rest of the epoch comes in another order than its beginning.",
        "Is the order drawn from (seed, epoch), and is the epoch told to the sampler that goes on? "
        "course_lib.resume.ResumableDataLoader keeps the place.",
    )


def _skipped(journal: Journal) -> int:
    """The batches that a script draws and leaves ahead of the first that it trains."""
    passes = (at for at, event in enumerate(journal.events) if isinstance(event, Backward))
    return max(0, _micro_batches_before(journal, next(passes, 0)) - 1)


def _order_of(journal: Journal, life: SecondLife, where: str) -> Judgement:
    """Whether the second life begins with an order that was trained already."""
    before = [one for one in passes_of(journal, training=True) if one.ended]
    second = [one for one in passes_of(life.journal, training=True) if one.ended]
    orders = [samples_of(journal, one) for one in before]
    if not second or len(set(map(tuple, orders))) < len(orders):
        return Judgement()
    first, saved_behind = samples_of(life.journal, second[0]), _micro_batches_before(journal, life.saved_at)
    trained = [order for one, order in zip(before, orders, strict=True) if one.micro_batch < saved_behind]
    if first not in trained or len(first) < FEWEST or first == sorted(first):
        return Judgement()
    again = trained.index(first)
    return Judgement().find(
        "resume",
        f"Killed behind {where}, and started again, the first epoch comes in the order of epoch {again}, which was "
        f"trained already: [{', '.join(map(str, first[:4]))}, …].",
        "Each life begins with the same orders, so that samples share their batches with the same others.",
        "Is the order drawn from a seed that is set when the script starts? Draw it from (seed, epoch), by set_epoch.",
    )


def _micro_batches_before(journal: Journal, at: int) -> int:
    trained = journal.trained()
    return sum(isinstance(event, Delivered) and place in trained for place, event in enumerate(journal.events[:at]))
