"""The rules about going on elsewhere: after a resume (7), with workers (8), on other numbers of ranks (9)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from course_lib.conformance.findings import Checks, Finding, difference, uncovered, uneven_counts
from course_lib.conformance.guarding import Refusal, Unpicklable, pickled
from course_lib.conformance.report import RULES
from course_lib.conformance.trial import Trial
from course_lib.conformance.wording import counted


def resumes(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded()[:2]:
        if not trial.offers.state:
            return
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            state = trial.state(rank, epoch, stop)
            loaded = trial.resumed(rank, state)
            yield difference(at, trial.read(loaded, epoch), rest, "the rest of the epoch is another one")
            if epoch > 0 and not {4, 6} & set(trial.lab.found):
                used = trial.state_of(trial.used_before(rank, epoch), epoch, stop)
                text = "of a sampler that has done an epoch before, the rest is another one"
                yield difference(at, trial.read(trial.resumed(rank, used), epoch), rest, text)
            if 0 < stop < len(ranks[rank]) - 1:
                second = trial.state_of(trial.resumed(rank, state), epoch, 1)
                text = "after one more batch and a second resume, the rest is another one"
                yield difference(at, trial.read(trial.resumed(rank, second), epoch), rest[1:], text)
            yield from _resumes_beside_set_epoch(trial, epoch, stop, rank, loaded)
        for rank, batches in enumerate(ranks):
            yield from _resumes_at_the_boundary(trial, epoch, rank, len(batches))


def _resumes_beside_set_epoch(trial: Trial, epoch: int, stop: int, rank: int, finished: Any) -> Checks:
    """Trainers call set_epoch around a resume, with the same epoch, and with the next one when that has ended."""
    if not trial.offers.set_epoch:
        return
    at = trial.at(epoch=epoch, stop=stop, rank=rank)
    rest = trial.record(epoch).ranks[rank][stop:]
    state = trial.state(rank, epoch, stop)
    kept = trial.resumed(rank, state)
    trial.turn(kept, epoch)
    yield difference(at, trial.read(kept, epoch), rest, f"set_epoch({epoch}) after load_state_dict loses the position")
    following = trial.record(epoch + 1).ranks
    if following and 6 not in trial.lab.found:
        left = trial.resumed(rank, state)
        trial.turn(left, epoch + 1)
        text = f"set_epoch({epoch + 1}) after load_state_dict does not begin that epoch at its start"
        yield difference(at, trial.read(left, epoch + 1), following[rank], text)
    if following and not {4, 6} & set(trial.lab.found):
        trial.turn(finished, epoch + 1)
        text = f"epoch {epoch + 1}, after the resumed one, is not whole"
        yield difference(at, trial.read(finished, epoch + 1), following[rank], text)


def _resumes_at_the_boundary(trial: Trial, epoch: int, rank: int, count: int) -> Checks:
    """After the last batch, the state means the next epoch from its start: at once, or when set_epoch says so."""
    following = trial.record(epoch + 1).ranks
    if not following:
        return
    at = trial.at(epoch=epoch, stop=count, rank=rank)
    state = trial.state(rank, epoch, count)
    got = trial.read(trial.resumed(rank, state), epoch + 1)
    if not trial.offers.set_epoch or 6 in trial.lab.found:  # which order comes next is its own affair
        text = f"the state after the last batch gives {counted(len(got), 'batch', 'batches')}, not a whole epoch"
        yield Finding(text, at) if [*map(len, got)] != [*map(len, following[rank])] else None
        return
    if got != following[rank]:
        turned = trial.resumed(rank, state)
        trial.turn(turned, epoch + 1)
        got = trial.read(turned, epoch + 1)
    text = f"the state after the last batch does not mean epoch {epoch + 1} from its start"
    yield difference(at, got, following[rank], text)


def other_workers(trial: Trial) -> Checks:
    for epoch, ranks in trial.recorded()[:2]:
        for rank, batches in enumerate(ranks):
            at = trial.at(epoch=epoch, rank=rank)
            with contextlib.suppress(Unpicklable):  # rule 11's
                copy = pickled(trial.make(rank, epoch))
                yield difference(at, trial.read(copy, epoch), batches, "a pickled copy yields other batches")
        if not trial.offers.state_after_batches or 7 in trial.lab.found:
            continue
        for stop, rank in trial.stops(ranks):
            rest = ranks[rank][stop:]
            at = trial.at(epoch=epoch, stop=stop, rank=rank)
            for ahead in sorted({1, len(rest)}):
                state = trial.state_of(trial.make(rank, epoch), epoch, stop + ahead, batches=stop)
                text = f"state_dict(batches={stop}) after {stop + ahead} were fetched: the rest is another one"
                yield difference(at, trial.read(trial.resumed(rank, state), epoch), rest, text)
            if len(rest) > 2:
                loaded = trial.resumed(rank, trial.state(rank, epoch, stop))
                state = trial.state_of(loaded, epoch, 2, batches=1)
                text = "state_dict(batches=1) after the resume, when 2 were fetched: the rest is another one"
                yield difference(at, trial.read(trial.resumed(rank, state), epoch), rest[1:], text)


def other_world_size(trial: Trial) -> Checks:
    if {1, 4, 7} & set(trial.lab.found):
        return
    for other in trial.lab.trials_of(trial.shape):
        for epoch, ranks in trial.recorded()[:2]:
            if other is trial or not other.record(epoch).ranks or not trial.offers.state:
                continue
            for stop in sorted({stop for stop, _ in trial.stops(ranks) if 0 < stop < min(map(len, ranks))}):
                at = trial.at(epoch=epoch, stop=stop, resumed_on=other.num_replicas)
                state = trial.state(0, epoch, stop)
                resumed, refused = [], []
                for rank in range(other.num_replicas):
                    try:
                        resumed.append(other.read(other.resumed(rank, state), epoch))
                    except Refusal as refusal:
                        refused.append(str(refusal))
                if refused and resumed:
                    yield Finding(f"only some ranks refuse: {refused[0]}", at, RULES[2][1])
                elif refused:
                    trial.lab.note("refused to resume on another number of ranks", f"{at}: {refused[0]}")
                else:
                    lost = uncovered(trial, [batches[:stop] for batches in ranks] + resumed, at)
                    uneven = None if 2 in trial.lab.found else uneven_counts([*map(len, resumed)], at)
                    yield replace(lost, means="") if lost else uneven
