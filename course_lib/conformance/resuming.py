"""The three rules about resumes: on the same ranks, with other workers, on another number of ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from course_lib._words import counted
from course_lib.conformance.breaches import Breach, Checks, difference, not_exactly_once, sizes_of, uneven_counts
from course_lib.conformance.calls import SamplerRefusal, Unpicklable, pickled
from course_lib.conformance.simulated_world import SimulatedWorld
from course_lib.conformance.violations import RULES


def resumes(world: SimulatedWorld) -> Checks:
    """Rule 7: a resume gives the rest of the epoch exactly, within the epoch and at its end."""
    for epoch, ranks in world.recorded()[:2]:
        if not world.offers.state:
            return
        for stop, rank in world.stops(ranks):
            rest = ranks[rank][stop:]
            at = world.at(epoch=epoch, stop=stop, rank=rank)
            state = world.state(rank, epoch, stop)
            loaded = world.resumed(rank, state)
            yield difference(at, world.read(loaded, epoch), rest, "the rest of the epoch is another one")
            if epoch > 0 and not world.examination.not_held(4, 6):
                used = world.state_of(world.used_before(rank, epoch), epoch, stop)
                text = "of a sampler that has done an epoch before, the rest is another one"
                yield difference(at, world.read_resumed(rank, used, epoch), rest, text)
            if 0 < stop < len(ranks[rank]) - 1:
                second = world.state_of(world.resumed(rank, state), epoch, 1)
                text = "after one more batch and a second resume, the rest is another one"
                yield difference(at, world.read_resumed(rank, second, epoch), rest[1:], text)
            yield from _resumes_beside_set_epoch(world, epoch, stop, rank, loaded)
        for rank, batches in enumerate(ranks):
            yield from _resumes_at_the_boundary(world, epoch, rank, len(batches))


def _resumes_beside_set_epoch(world: SimulatedWorld, epoch: int, stop: int, rank: int, finished: Any) -> Checks:
    """Trainers call set_epoch around a resume, with the same epoch, and with the next one when that has ended."""
    if not world.offers.set_epoch:
        return
    at = world.at(epoch=epoch, stop=stop, rank=rank)
    rest = world.record(epoch).ranks[rank][stop:]
    state = world.state(rank, epoch, stop)
    kept = world.resumed(rank, state)
    world.turn(kept, epoch)
    yield difference(at, world.read(kept, epoch), rest, f"set_epoch({epoch}) after load_state_dict loses the position")
    following = world.record(epoch + 1).ranks
    if following and not world.examination.not_held(6):
        left = world.resumed(rank, state)
        world.turn(left, epoch + 1)
        text = f"set_epoch({epoch + 1}) after load_state_dict does not begin that epoch at its start"
        yield difference(at, world.read(left, epoch + 1), following[rank], text)
    if following and not world.examination.not_held(4, 6):
        world.turn(finished, epoch + 1)
        text = f"epoch {epoch + 1}, after the resumed one, is not whole"
        yield difference(at, world.read(finished, epoch + 1), following[rank], text)


def _resumes_at_the_boundary(world: SimulatedWorld, epoch: int, rank: int, count: int) -> Checks:
    """After the last batch, the state means the next epoch from its start: at once, or when set_epoch says so."""
    following = world.record(epoch + 1).ranks
    if not following:
        return
    at = world.at(epoch=epoch, stop=count, rank=rank)
    state = world.state(rank, epoch, count)
    got = world.read_resumed(rank, state, epoch + 1)
    if not world.offers.set_epoch or world.examination.not_held(6):  # which order comes next is up to the sampler
        text = f"the state after the last batch gives {counted(len(got), 'batch', 'batches')}, not a whole epoch"
        yield Breach(text, at) if sizes_of(got) != sizes_of(following[rank]) else None
        return
    if got != following[rank]:
        # Some begin the same epoch again until set_epoch tells the next: trainers do.
        text = f"the state after the last batch means neither epoch {epoch} nor {epoch + 1}, nor an epoch's end"
        yield None if not got or got == world.record(epoch).ranks[rank] else difference(at, got, following[rank], text)
        turned = world.resumed(rank, state)
        world.turn(turned, epoch + 1)
        got = world.read(turned, epoch + 1)
    text = f"the state after the last batch does not mean epoch {epoch + 1} from its start"
    yield difference(at, got, following[rank], text)


def other_workers(world: SimulatedWorld) -> Checks:
    """Rule 8: a copy in another process yields the same, and a resume does not depend on what workers fetched ahead."""
    for epoch, ranks in world.recorded()[:2]:
        for rank, batches in enumerate(ranks):
            at = world.at(epoch=epoch, rank=rank)
            with contextlib.suppress(Unpicklable):  # rule 11 finds it
                copy = pickled(world.make(rank, epoch))
                yield difference(at, world.read(copy, epoch), batches, "a pickled copy yields other batches")
        if not world.offers.state_after_batches or world.examination.not_held(7):
            continue
        for stop, rank in world.stops(ranks):
            rest = ranks[rank][stop:]
            at = world.at(epoch=epoch, stop=stop, rank=rank)
            for ahead in sorted({1, len(rest)}):
                state = world.state_of(world.make(rank, epoch), epoch, stop + ahead, batches=stop)
                text = f"state_dict(batches={stop}) after {stop + ahead} were fetched: the rest is another one"
                yield difference(at, world.read_resumed(rank, state, epoch), rest, text)
            if len(rest) > 2:
                loaded = world.resumed(rank, world.state(rank, epoch, stop))
                state = world.state_of(loaded, epoch, 2, batches=1)
                text = "state_dict(batches=1) after the resume, when 2 were fetched: the rest is another one"
                yield difference(at, world.read_resumed(rank, state, epoch), rest[1:], text)


def other_world_size(world: SimulatedWorld) -> Checks:
    """Rule 9: resumed on another number of ranks, the rest of the epoch is covered exactly once."""
    if world.examination.not_held(1, 4, 7):
        return
    for other in world.on_all_world_sizes():
        for epoch, ranks in world.recorded()[:2]:
            if other is world or not other.record(epoch).ranks or not world.offers.state:
                continue
            for stop in sorted({stop for stop, _ in world.stops(ranks) if 0 < stop < min(map(len, ranks))}):
                at = world.at(epoch=epoch, stop=stop, resumed_on=other.num_replicas)
                state = world.state(0, epoch, stop)
                resumed, refused = [], []
                for rank in range(other.num_replicas):
                    try:
                        resumed.append(other.read_resumed(rank, state, epoch))
                    except SamplerRefusal as refusal:
                        refused.append(str(refusal))
                if refused and resumed:
                    yield Breach(f"only some ranks refuse: {refused[0]}", at, RULES[2][1])
                elif refused:
                    world.examination.note("refused to resume on another number of ranks", f"{at}: {refused[0]}")
                else:
                    had = [batches[:stop] for batches in ranks] + resumed
                    lost = not_exactly_once(world, had, at)
                    if lost:
                        yield replace(lost, means="")
                    elif world.examination.not_held(2):
                        yield None
                    else:
                        yield uneven_counts(resumed, at)
