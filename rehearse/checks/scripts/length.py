"""length: how much the script trains, and whether its loaders are as long as they say."""

from __future__ import annotations

from collections import Counter
from typing import Any

from course_lib._words import counted
from rehearse.report import Judgement
from rehearse.scripts.events import Delivered, Forward
from rehearse.scripts.journal import ENDED, Journal
from rehearse.scripts.windows import LoaderPass, batches_behind_the_last_pass, passes_of, windows_of


def judge_length(journal: Journal) -> Judgement:
    judgement = Judgement(facts=facts_of(journal))
    passes = passes_of(journal, training=True) + passes_of(journal, training=False)
    for one in passes:
        came = len(one.batches)
        if one.ended and one.promised is not None and came != one.promised:
            return judgement.find(
                "length",
                f"len(loader) is {one.promised:,}, and a loop over it yields {counted(came, 'batch', 'batches')}.",
                "Whatever is planned by len, as a schedule or a last window, is planned for another number.",
                "Let __len__ say what __iter__ yields: -(-n // batch_size) with a short last batch.",
                at=one.micro_batch,
            )
        if one.ended and came == 0:
            return judgement.find(
                "length",
                "A loop over a loader ends without a batch.",
                "Nothing is done in that loop, and no error says so.",
                "Give the loader samples; drop_last leaves nothing of fewer samples than a batch holds.",
                at=one.micro_batch,
            )
    if journal.fits_without_a_step:
        number = journal.fits_without_a_step[0]
        return judgement.find(
            "length",
            f"Fit {number:,} of {journal.fits:,} makes no optimizer step.",
            "What it was given is not trained, and no error says so.",
            "Is its Trainer one that has come to its end? A second fit goes on by max_epochs: give it a Trainer of its "
            "own.",
        )
    behind = Counter(batches_behind_the_last_pass(journal))
    for number, often in behind.items():
        judgement.notes.append(
            f"length: no backward pass follows the last {counted(number, 'batch', 'batches')} of "
            f"{counted(often, 'loop')} over the training loader"
        )
    loops = passes_of(journal, training=True)
    if journal.end != ENDED:  # it was not the script that left the last one over each loader
        last = {one.loader: one for one in loops}
        loops = [one for one in loops if one is not last[one.loader]]
    cut = Counter(_cut(one) for one in loops if not one.ended)
    for (came, promised), often in cut.items():
        if promised is not None and came < promised:
            times = "" if often == 1 else f", {often:,} times"
            if often == 1 and _cut(loops[-1]) == (came, promised):
                times = f", in epoch {len(loops):,}: the run ends within it"
            judgement.notes.append(f"length: a training loop is left after {came:,} of {promised:,} batches{times}")
    if journal.end == ENDED:
        read = ", ".join(journal.never_read[:4])
        judgement.notes += [f"length: nothing reads the loader that is made in {read}"] if read else []
    return judgement


def _cut(one: LoaderPass) -> tuple[int, int | None]:
    return len(one.batches), one.promised


def facts_of(journal: Journal) -> dict[str, Any]:
    """The run in numbers: whole counts, and rates that are not rounded."""
    counts = journal.counts()
    facts: dict[str, Any] = {}
    if journal.world_size > 1:
        facts["ranks"] = journal.world_size
    epochs = len(passes_of(journal, training=True))
    if epochs:
        facts["epochs"] = epochs
    facts["micro-batches"] = journal.micro_batches()
    samples = _samples_of(journal)
    if samples[0]:
        facts["samples drawn, forwarded, behind a step"] = samples
    facts["optimizer steps"] = counts["optimizer steps"]
    if len(journal.optimizers) > 1:
        facts |= {name: count for name, count in counts.items() if name.startswith("steps of")}
    if journal.changed_by_hand:
        facts["parameters changed in place"] = journal.changed_by_hand
    facts["scheduler steps"] = counts["scheduler steps"]
    rates = [rate[0] for rate in journal.rates() if rate]
    if rates:
        facts["rate of the first, the last step"] = [rates[0], rates[-1]]
        facts["highest rate"] = max(rates)
    names = ("backward passes", "forwards in training", "forwards in evaluation", "validations", "saves")
    facts |= {name: counts[name] for name in names}
    return facts | ({"updates of averages": counts["updates of averages"]} if counts["updates of averages"] else {})


def _samples_of(journal: Journal) -> list[int]:
    """What loaders gave to be trained; what of it a network was given in training; what a step has the gradients of."""
    trained = journal.trained()
    drawn = forwarded = waiting = 0
    forward = False  # whether one came behind the last batch
    for at, event in enumerate(journal.events):
        if isinstance(event, Delivered) and at in trained:
            drawn += event.size
            waiting = event.size + (0 if forward else waiting)
            forward = False
        elif isinstance(event, Forward) and event.training:
            forward = True
            forwarded += min(waiting, event.samples)
            waiting -= min(waiting, event.samples)
    passes = [one for of in windows_of(journal) for window in of.windows for one in window.passes]
    return [drawn, forwarded, sum({one.micro_batch: one.samples for one in passes}.values())]
