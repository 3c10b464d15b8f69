"""order: whether each epoch of a rehearsed script has an order of its own."""

from __future__ import annotations

from course_lib._words import counted
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.events import EpochSet
from rehearse.scripts.journal import Journal
from rehearse.scripts.windows import LoaderPass, passes_of, samples_of, trained_beside_others

FEWEST = 8
"""Samples from which on two shuffled epochs are not alike by chance."""


def judge_order(journal: Journal) -> Judgement:
    orders: dict[tuple[frozenset[int], int, tuple[int, ...]], tuple[int, LoaderPass]] = {}
    known = few = 0
    told = any(isinstance(event, EpochSet) for event in journal.events)
    beside = trained_beside_others(journal)
    others = [one for one in passes_of(journal, training=False) if one.loader in beside]
    for epoch, one in [*enumerate(passes_of(journal, training=True)), *enumerate(others)]:
        indices = one.indices()
        if not one.ended or indices is None:
            continue
        waits_for_its_epoch = journal.loaders[one.loader].set_epoch and not told and indices != sorted(indices)
        if len(indices) < FEWEST and not waits_for_its_epoch:
            few += 1
            continue
        known += 1
        played = journal.loaders[one.loader]  # one that is made anew in each epoch reads the same samples
        key = frozenset(one.trained), played.dataset, tuple(samples_of(journal, one))
        first_epoch, first = orders.setdefault(key, (epoch, one))
        if first is one or (first.loader != one.loader and first.micro_batch == one.micro_batch):  # side by side
            continue
        if indices == sorted(indices) and (one.loader in beside or first.loader != one.loader):
            continue
        if indices == sorted(indices):
            return Judgement(notes=["order: nothing shuffles, every epoch has the same order"])
        return _twice(journal, one, first_epoch, epoch, indices)
    streams = [one for one in passes_of(journal, training=True) if journal.loaders[one.loader].stream]
    if streams:
        return _of_streams(journal, streams)
    if known:
        return Judgement()
    why = f"two epochs of fewer than {FEWEST} samples may be alike by chance"
    return not_applicable("order", why if few else "no epoch has an order of samples that are known by an index")


def _of_streams(journal: Journal, passes: list[LoaderPass]) -> Judgement:
    """Streams have no indices: what their first batches hold tells whether they begin alike."""
    begun: dict[tuple[int, ...], tuple[int, LoaderPass]] = {}
    for epoch, one in enumerate(passes):
        if len(set(one.contents)) < 2:
            continue
        first_epoch, first = begun.setdefault((one.loader, *one.contents), (epoch, one))
        if first is one:
            continue
        loader = journal.loaders[one.loader]
        alike = f"Epochs {first_epoch} and {epoch} of a stream begin with the same {len(one.contents):,} batches"
        if not first.ended and not one.ended:
            return Judgement().find(
                "order",
                f"{alike}, and are left after {counted(len(one.batches), 'batch', 'batches')}.",
                "Only the beginning of the stream is ever trained, again and again.",
                "Is the stream meant to go on? Then keep one iterator of it, iter(loader), over all epochs.",
                at=one.micro_batch,
            )
        if not loader.set_epoch:
            return Judgement(notes=[f"order: {alike[0].lower()}{alike[1:]}; it has no set_epoch to draw others by"])
        told = any(isinstance(event, EpochSet) for event in journal.events)
        cause = "its dataset has set_epoch, and nothing calls it"
        cure = "Is another order meant? Then call dataset.set_epoch(epoch) ahead of each epoch's loop."
        if told and loader.workers and loader.persistent:
            cause = "set_epoch is called, and its workers persist: their copies of the dataset stay at the first epoch"
            cure = "Does it hold with persistent_workers=False? Else keep the epoch in shared memory, share_memory_()."
        elif told:
            cause = "set_epoch is called, and changes nothing of it"
            cure = "Does __iter__ of the dataset go by the epoch?"
        means = "The samples that share a batch are the same in each of these epochs; nothing says so."
        return Judgement().find("order", f"{alike}: {cause}.", means, cure, at=one.micro_batch)
    if any(len(set(one.contents)) > 1 for one in passes[1:]):
        return Judgement()
    return not_applicable("order", "a stream of one epoch, or whose batches are all alike")


def _twice(journal: Journal, one: LoaderPass, first: int, again: int, indices: list[int]) -> Judgement:
    start = f"[{', '.join(map(str, indices[:4]))}, …]"
    played = journal.loaders[one.loader]
    called = any(isinstance(event, EpochSet) for event in journal.events)
    means = "The samples that share a batch are the same in each of these epochs; nothing says so."
    if played.cycled:
        cause = "itertools.cycle keeps the batches of its first loop and gives them again, augmented as they were"
        cure = "Begin each loop anew: def forever(loader): while True: yield from loader."
        means += " All batches of that loop stay in memory."
    elif played.set_epoch and not called:
        cause = "its sampler has set_epoch, and nothing calls it"
        cure = "Call sampler.set_epoch(epoch) at the start of each epoch, before the loop over the loader."
    elif not played.own_sampler or played.drawn_by_torch:
        cause = "its generator starts at the same seed in each of them"
        cure = "Seed once, before the first epoch; or seed from (seed, epoch): SeedSequence([seed, epoch])."
    else:
        return Judgement(notes=[f"order: epochs {first} and {again} have the same order, {start}, by their sampler"])
    says = f"Epochs {first} and {again} have the same shuffled order, {start}: {cause}."
    return Judgement().find("order", says, means, cure, at=one.micro_batch)
