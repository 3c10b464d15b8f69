"""What chapter 09 asks: the faults of a script, a resume that is planned by hand, and what a journal tells."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

from workbook.exercises import Exercise, NotSolved

FAULTY_LINES = frozenset({3, 6, 8, 9, 13})
NUM_LINES = 14


def _judged(answer: Any) -> Any:
    asked = "faults: a set of line numbers is asked for, as {1, 2}"
    if isinstance(answer, str | bytes) or not isinstance(answer, Iterable):
        raise NotSolved(f"{asked}, got {answer!r}.")
    try:
        lines = {int(line) for line in answer}
        whole = all(int(line) == float(line) for line in answer)
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise NotSolved(f"{asked}, got {answer!r}.")
    if beyond := sorted(lines - set(range(1, NUM_LINES + 1))):
        raise NotSolved(f"faults: the script has the lines 1 to {NUM_LINES}, got {beyond} as well.")
    if {line + 1 for line in lines} == FAULTY_LINES:
        raise NotSolved(f"faults: got {sorted(lines)}. The lines are counted from 1.")
    if len(lines ^ FAULTY_LINES) > 1:  # a single line is told by its reason
        found, right = len(lines & FAULTY_LINES), len(lines - FAULTY_LINES)
        raise NotSolved(
            f"faults: you name {found} of the {len(FAULTY_LINES)} faulty lines, and {right} that "
            f"{'is' if right == 1 else 'are'} right."
        )
    return lambda line: line in lines


faults = Exercise(
    "faults",
    solution=FAULTY_LINES,
    judge=_judged,
    cases=[dict(line=line) for line in range(1, NUM_LINES + 1)],
    misconceptions={
        "Shuffling is no fault (line 1): a Trainer replaces the order by one that the ranks share.": {1, *FAULTY_LINES},
        "Line 3 leaves something out of the division. How many ranks share the samples, and what becomes of a "
        "remainder?": FAULTY_LINES - {3},
        "Line 5 is right: whether a value is NaN can be asked of a tensor. What is done about it is the question.": {
            5,
            *FAULTY_LINES,
        },
        "Line 6 skips on this rank alone, and a Trainer with several ranks ends there with an error (chapter 07).": (
            FAULTY_LINES - {6}
        ),
        "Line 8 takes the mean over this micro-batch's labels. Do all micro-batches of a window have as many?": (
            FAULTY_LINES - {8}
        ),
        "Line 9 counts what? An epoch's length in micro-batches is not one in optimizer steps (chapter 05).": (
            FAULTY_LINES - {9}
        ),
        "Line 11 is right: with that flag a Trainer steps once in 4 micro-batches, and on an epoch's short rest.": {
            11,
            *FAULTY_LINES,
        },
        "Line 12 is right: it writes a checkpoint after every 50 optimizer steps. What is resumed from it is the "
        "question.": {12, *FAULTY_LINES},
        "Line 13 resumes a Trainer, and a plain loader knows no position (chapter 06).": FAULTY_LINES - {13},
        "Line 14 is no fault: it saves the run as it ended.": {14, *FAULTY_LINES},
    },
)


def _windows(samples: int, batch_size: int, k: int, ranks: int) -> int:
    return math.ceil(math.ceil(samples / (batch_size * ranks)) / k)


def _steps(samples_left: int, num_samples: int, epochs_later: int, batch_size: int, k: int, ranks: int) -> int:
    return _windows(samples_left, batch_size, k, ranks) + epochs_later * _windows(num_samples, batch_size, k, ranks)


def _short_dropped(samples_left: int, num_samples: int, epochs_later: int, batch_size: int, k: int, ranks: int) -> int:
    left, whole = (math.ceil(samples // (batch_size * ranks) / k) for samples in (samples_left, num_samples))
    return left + epochs_later * whole


def _drawn_resume(generator: Random) -> dict[str, int]:
    num_samples = generator.choice([1, 2, 3, generator.randint(1, 60), generator.randint(1, 500), 2**16 + 1])
    return dict(
        samples_left=generator.choice([1, num_samples, generator.randint(1, num_samples)]),
        num_samples=num_samples,
        epochs_later=generator.randint(0, 3),
        batch_size=generator.choice([1, generator.randint(1, 9), 2 ** generator.randint(4, 13)]),
        k=generator.choice([1, 1000, generator.randint(1, 5)]),
        ranks=generator.choice([1, 2, generator.randint(1, 7)]),
    )


def _wrong_steps(
    samples_left: int, num_samples: int, epochs_later: int, batch_size: int, k: int, ranks: int
) -> dict[str, int]:
    here = samples_left, num_samples, epochs_later
    whole = num_samples * epochs_later
    per_update = batch_size * k * ranks
    return {
        "{got} forgets that the ranks share the samples, or adds up their steps: they step together.": _steps(
            *here, batch_size, k, 1
        ),
        "{got} counts micro-batches: a window of k is one step.": _steps(*here, batch_size, 1, ranks),
        "{got} rounds a rank's share down. Where the ranks do not divide the samples, the longest share counts.": (
            _steps(samples_left // ranks, num_samples // ranks, epochs_later, batch_size, k, 1)
        ),
        "{got} leaves out the last samples of an epoch, which fill no micro-batch on every rank: they are trained, "
        "too.": _short_dropped(*here, batch_size, k, ranks),
        "{got} rounds down: the short window at an epoch's end steps as well. (Ranks divide samples, not steps.)": (
            samples_left // per_update + epochs_later * (num_samples // per_update)
        ),
        "{got} rounds down within the epoch that goes on: its short window steps as well.": samples_left // per_update
        + epochs_later * _windows(num_samples, batch_size, k, ranks),
        "{got} lets windows run across the ends of epochs: each epoch ends with a window of its own.": math.ceil(
            (samples_left + whole) / per_update
        ),
        "{got} leaves out the epochs that come after this one.": _windows(samples_left, batch_size, k, ranks),
        "{got} leaves out the rest of the epoch that was cut off.": epochs_later
        * _windows(num_samples, batch_size, k, ranks),
        "{got} trains the epoch that was cut off from its start again.": (epochs_later + 1)
        * _windows(num_samples, batch_size, k, ranks),
    }


steps_after_resume = Exercise(
    "steps_after_resume",
    solution=_steps,
    cases=[
        dict(samples_left=8, num_samples=16, epochs_later=0, batch_size=4, k=1, ranks=1),
        dict(samples_left=8, num_samples=16, epochs_later=0, batch_size=4, k=1, ranks=2),
        dict(samples_left=8, num_samples=32, epochs_later=1, batch_size=4, k=1, ranks=1),
        dict(samples_left=16, num_samples=32, epochs_later=1, batch_size=2, k=2, ranks=2),
        dict(samples_left=16, num_samples=40, epochs_later=1, batch_size=2, k=4, ranks=2),
        dict(samples_left=20, num_samples=32, epochs_later=1, batch_size=2, k=4, ranks=2),
        dict(samples_left=4, num_samples=36, epochs_later=2, batch_size=2, k=4, ranks=2),
        dict(samples_left=20, num_samples=40, epochs_later=2, batch_size=2, k=4, ranks=3),
        dict(samples_left=87, num_samples=187, epochs_later=1, batch_size=9, k=4, ranks=3),
    ],
    misconceptions=_wrong_steps,
    search=_drawn_resume,
)

PLANNED = 30
JOURNAL = """
life 1  skipped.jsonl        attempt 4    attempt 9
        skipped.rank1.jsonl  attempt 4    attempt 9
life 2  skipped.jsonl        attempt 9    attempt 22
        skipped.rank1.jsonl  attempt 9    attempt 22
"""
"""What the ranks of a run wrote that was killed between attempts 9 and 10, and resumed from a checkpoint after 7."""

updates_made = Exercise(
    "updates made",
    solution=PLANNED - 3,
    misconceptions={
        "{got} takes every line of the journal for a skip of its own: each rank writes one, and attempt 9 was made "
        "twice.": PLANNED - 8,
        "{got} counts attempt 9 twice: the kill undid the first try, and the second life made it again.": PLANNED - 4,
        "{got} counts a skip for each rank: all ranks skip together, and each writes it down.": PLANNED - 6,
        "{got} counts the last life alone: the skip of attempt 4 is in the checkpoint from which it went on.": PLANNED
        - 2,
        "{got} leaves out attempts 8 and 9, which the kill undid: the second life made them again.": PLANNED - 5,
        "{got} is what was planned: a skipped attempt is none that updated.": PLANNED,
        "{got} is the number of skipped attempts. How many updates are left?": 3,
        "{got} adds the skips: an attempt that is skipped is not made up for, where epochs end the run.": PLANNED + 3,
    },
)

EXERCISES = (faults, steps_after_resume, updates_made)
