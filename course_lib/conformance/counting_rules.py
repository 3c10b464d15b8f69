"""The rules that count what all ranks yield in an epoch: 1, 2, 3, 10 and 11."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import zip_longest

from course_lib.conformance.findings import Checks, Finding, difference, uncovered, uneven_counts
from course_lib.conformance.guarding import Fault, pickled
from course_lib.conformance.trial import Trial
from course_lib.conformance.wording import counted, listed


def covers_exactly_once(trial: Trial) -> Checks:
    for epoch in trial.lab.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.fault:
            yield Finding(
                record.fault, replace(at, rank=record.faulty_rank), "the run ends there, or trains on nothing"
            )
        elif record.ranks:
            yield uncovered(trial, record.ranks, at)


def equal_counts(trial: Trial) -> Checks:
    for epoch in trial.lab.epochs:
        record = trial.record(epoch)
        at = trial.at(epoch=epoch)
        if record.refused and len(record.refused) < trial.num_replicas:
            rank, why = next(iter(record.refused.items()))
            yield Finding(f"only some ranks refuse, rank {rank} with ValueError: {why}", replace(at, rank=rank))
        counts = [len(batches) for batches in record.ranks]
        yield uneven_counts(counts, at) if counts else None


def true_length(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        if not trial.offers.length:
            return
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            told = trial.length(trial.make(rank, epoch))
            text = f"len() is {told}, {counted(len(batches), 'batch', 'batches')} are yielded"
            yield Finding(text, at) if told != len(batches) else None
        for stop, rank in trial.stops(ranks):
            trial.at(epoch=epoch, rank=rank)
            try:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                told, yielded = trial.length(loaded), len(trial.read(loaded, epoch))
            except Fault:
                continue  # rule 7's
            text = f"len() is {told} after the resume, {counted(yielded, 'batch', 'batches')} are yielded"
            yield Finding(text, trial.at(epoch=epoch, stop=stop, rank=rank)) if told != yielded else None


def even_use(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        uses = Counter(dict.fromkeys(trial.secondary, 0))
        for step, batches in enumerate(zip_longest(*ranks, fillvalue=[])):
            for rank, batch in enumerate(batches):
                at = trial.at(epoch=epoch, rank=rank, step=step)
                second_stream = [index for index in batch if index not in trial.once]
                for stream, size in ((trial.primary([batch]), len(trial.once)), (second_stream, len(trial.secondary))):
                    twice = _repeated(stream)
                    text = f"the batch holds {listed(twice)} more than once, and {size} could fill {len(stream)} places"
                    wrong = twice and len(stream) <= size
                    means = "the batch is smaller than its size says, and some samples weigh double in its gradient"
                    yield Finding(text, replace(at, indices=tuple(twice)), means) if wrong else None
                uses.update(second_stream)
            most, least = max(uses.values(), default=0), min(uses.values(), default=0)
            if most - least > 1:
                often = [index for index, count in uses.items() if count == most]
                seldom = [index for index, count in uses.items() if count == least]
                text = f"of the cycled stream, {listed(often)} had come {most} times, {listed(seldom)} {least} times"
                yield Finding(text, replace(trial.at(epoch=epoch, step=step), indices=(*often, *seldom)))


def _repeated(indices: list[int]) -> list[int]:
    return [index for index, count in Counter(indices).items() if count > 1] if len({*indices}) < len(indices) else []


def usable_again(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded():
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            pickled(trial.make(rank, epoch))
            for text, got in trial.read_more_than_once(rank, epoch):
                # Where only the order differs, it is rule 4's.
                same_sizes = [*map(len, got)] == [*map(len, batches)]
                yield None if same_sizes else difference(at, got, batches, text)
