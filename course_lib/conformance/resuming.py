"""The three rules about resumes: on the same ranks, with other workers, on another number of ranks."""

from __future__ import annotations

from dataclasses import replace

from course_lib._words import counted
from course_lib.conformance.tried import Batches, Breach, Checks, difference, sizes_of
from course_lib.conformance.violations import Counterexample
from course_lib.conformance.world import Deal, World


def resumes(world: World) -> Checks:
    """Rule 7: a resume gives the rest of the epoch exactly, within the epoch and at its end."""
    for deal in world.deals[:2]:
        if "state" not in world.offers:
            return
        following = world.deal(deal.epoch + 1)
        for at, rest in deal.stops():
            yield from _within_the_epoch(world, at, rest)
            if "set_epoch" in world.offers:
                yield from _beside_set_epoch(world, at, rest, following)
        if following.ranks:
            for at, batches in deal.by_rank():
                yield from _at_the_boundary(world, replace(at, stop=len(batches)), batches, following)


def _within_the_epoch(world: World, at: Counterexample, rest: Batches) -> Checks:
    state = world.state(at)
    yield difference(at, world.resumed(at, state).read(), rest, "the rest of the epoch is another one")
    if at.epoch and not world.asked.unsound & {4, 6}:
        used = world.used(at).had(at.stop).state()
        text = "of a sampler that has done an epoch before, the rest is another one"
        yield difference(at, world.resumed(at, used).read(), rest, text)
    if at.stop and len(rest) > 1:
        second = world.resumed(at, state).had(1).state()
        text = "after one more batch and a second resume, the rest is another one"
        yield difference(at, world.resumed(at, second).read(), rest[1:], text)


def _beside_set_epoch(world: World, at: Counterexample, rest: Batches, following: Deal) -> Checks:
    """Trainers call set_epoch around a resume, with the same epoch, and with the next one when that has ended."""
    state, unsound = world.state(at), world.asked.unsound
    sampler = world.resumed(at, state).turned(at.epoch)
    yield difference(at, sampler.read(), rest, f"set_epoch({at.epoch}) after load_state_dict loses the position")
    if not following.ranks or 6 in unsound:
        return
    epoch, whole = following.epoch, following.ranks[at.rank or 0]
    text = f"set_epoch({epoch}) after load_state_dict does not begin that epoch at its start"
    yield difference(at, world.resumed(at, state).turned(epoch).read(), whole, text)
    if 4 not in unsound:
        finished = world.resumed(at, state)
        finished.read()
        text = f"epoch {epoch}, after the resumed one, is not whole"
        yield difference(at, finished.turned(epoch).read(), whole, text)


def _at_the_boundary(world: World, at: Counterexample, batches: Batches, following: Deal) -> Checks:
    """After the last batch, the state means the next epoch from its start: at once, or when set_epoch says so."""
    epoch, whole, state = following.epoch, following.ranks[at.rank or 0], world.state(at)
    got = world.resumed(replace(at, epoch=epoch), state).read()
    if "set_epoch" not in world.offers or 6 in world.asked.unsound:  # which order comes next is up to the sampler
        text = f"the state after the last batch gives {counted(len(got), 'batch', 'batches')}, not a whole epoch"
        yield Breach(text, at) if sizes_of(got) != sizes_of(whole) else None
        return
    # Some begin the same epoch again until set_epoch tells the next: trainers do.
    text = f"the state after the last batch means neither epoch {at.epoch} nor {epoch}, nor an epoch's end"
    yield None if not got or got == batches else difference(at, got, whole, text)
    got = world.resumed(at, state).turned(epoch).read()
    text = f"the state after the last batch does not mean epoch {epoch} from its start"
    yield difference(at, got, whole, text)


def other_workers(world: World) -> Checks:
    """Rule 8: a copy in another process yields the same, and a resume does not depend on what workers fetched ahead."""
    for deal in world.deals[:2]:
        for at, batches in deal.by_rank():
            yield difference(at, world.fresh(at).copied().read(), batches, "a pickled copy yields other batches")
        for at, rest in deal.stops() if "state after batches" in world.offers else ():
            stop = at.stop or 0
            for ahead in sorted({1, len(rest)}):
                state = world.fresh(at).had(stop + ahead).state(batches=stop)
                text = f"state_dict(batches={stop}) after {stop + ahead} were fetched: the rest is another one"
                yield difference(at, world.resumed(at, state).read(), rest, text)
            if len(rest) > 2:
                state = world.resumed(at, world.state(at)).had(2).state(batches=1)
                text = "state_dict(batches=1) after the resume, when 2 were fetched: the rest is another one"
                yield difference(at, world.resumed(at, state).read(), rest[1:], text)


def other_world_size(world: World) -> Checks:
    """Rule 9: resumed on another number of ranks, the rest of the epoch is covered exactly once."""
    for other in world.on_all_world_sizes():
        for deal in world.deals[:2]:
            if other is world or not other.deal(deal.epoch).ranks or "state" not in world.offers:
                continue
            for stop in sorted({at.stop or 0 for at, _ in deal.stops()}):
                if not 0 < stop < min(map(len, deal.ranks)):
                    continue
                at = replace(deal.at, stop=stop, resumed_on=other.num_replicas)
                rest = other.deal_after_resume(at, world.state(at))
                if rest.ranks:
                    all_had = [batches[:stop] for batches in deal.ranks] + rest.ranks
                    uneven = None if 2 in world.asked.unsound else rest.uneven_counts()
                    yield world.not_exactly_once(all_had, at) or uneven
                elif rest.fault or rest.refused:
                    yield rest.fault or rest.some_refuse()
