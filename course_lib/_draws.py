"""What a dataset and a ``collate_fn`` draw at random, as a function of the sample and of the batch.

Workers are seeded when they start, and draw as their batches come. So what a sample draws depends on the number of
workers, on what was prefetched and on where the run was stopped. The rule: *what a draw may depend on is sent along
with the indices.* Before each sample, Python's, NumPy's and torch's global generators are seeded from (seed, epoch,
index, occurrence of this index in the epoch), and before ``collate_fn`` from (seed, epoch, number of the batch in the
epoch over all ranks).

A dataset's own generators are seeded as well: those that it, its transforms or their code hold. (Of these the sampler's
seed decides, and not how they were seeded; two that began alike draw alike.)

To seed all three takes 10 µs and more, as much as a small sample. So the first batch shows which of them are drawn
from, and the others are left alone and watched. One that is drawn from later is found by its state; the batch is then
thrown away, and made once more with this generator seeded, too.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, get_worker_info

from course_lib._generators import CPU_GENERATORS, generators_that_are_set
from course_lib._held_generators import HeldGenerator, held_within
from course_lib._occurrences import RepeatedIndices
from course_lib._ranks import rank_of_this_process, world_size_of

SAMPLES, BATCHES = 3, 4
"""Of the streams of random numbers that a seed has; 0, 1 and 2 are orders and workers."""
BITS = 32
"""Of a seed: of more, neither NumPy's nor torch's global generator makes use."""
OF_EACH_GENERATOR = (0x00000000, 0x9E3779B9, 0x85EBCA6B)
"""The three are of one kind: they must not begin alike."""
MOST_OF_ITS_OWN = 32
"""Generators of a dataset: where it has more, as one for each sample, they are left alone."""
OF_HELD_ONES = 0xC2B2AE3D
"""Nor the dataset's own: an odd factor, so that no two multiples are the same."""


def epoch_of_this_batch() -> int:
    """The epoch of the batch that is being made, where it is made: in a dataset or a ``collate_fn``.

    An attribute that the main process sets (``dataset.epoch = 3``) reaches neither a worker that runs already nor a
    batch that was prefetched; this comes with the batch. For a dataset that draws from a generator of its own::

        def __getitem__(self, index):
            rng = np.random.default_rng([self.seed, epoch_of_this_batch(), index])

    Raises:
        RuntimeError: No :class:`~course_lib.resume.ResumableDataLoader` is making a batch here.
    """
    if _being_made is None:
        raise RuntimeError(
            "epoch_of_this_batch() is asked where no batch is being made: call it in the __getitem__ or the collate_fn "
            "of a course_lib.resume.ResumableDataLoader"
        )
    return _being_made.epoch


def iterator_with_draws(loader: DataLoader[Any], draws: Draws) -> Any:
    """torch's iterator over a loader's batches; the loader, its dataset and its sampler stay as they are."""
    twin = copy.copy(loader)
    replaced: dict[str, object] = {
        "dataset": _BatchMaker(loader.dataset, loader.collate_fn, draws),
        "collate_fn": _as_it_is,
        "batch_sampler": _NumberedBatches(loader.batch_sampler),
        "worker_init_fn": _WorkerStart(loader.worker_init_fn),
    }
    vars(twin).update(replaced)  # torch lets nobody set them
    return DataLoader._get_iterator(twin)


class Draws:
    """The generators of a process: which are seeded for each sample, and which are only watched.

    Args:
        seeded: Whether any is; else they stay as they are.
    """

    def __init__(self, seeded: bool) -> None:
        self.seeded = seeded
        self._watch(CPU_GENERATORS)

    def _watch(self, generators: Sequence[Any]) -> None:
        self._generators = generators
        own = generators[len(CPU_GENERATORS) :]
        groups = {print_: number for number, print_ in enumerate(dict.fromkeys(one.mark() for one in own), 1)}
        of_own = [OF_HELD_ONES * groups[one.mark()] % 2**BITS for one in own]
        self._apart = (*OF_EACH_GENERATOR, *of_own)
        """What each one's seed differs by."""
        self._all = tuple(range(len(generators)))
        self._awake: tuple[int, ...] = self._all if self.seeded else ()
        """The generators that are seeded, by their numbers."""
        self._idle: tuple[int, ...] = ()
        """Those that nobody was seen to draw from."""
        self._seen: set[int] | None = set() if self.seeded else None
        """Those that the first batch has drawn from, until it is made."""
        self._left: list[object] | None = None
        """The marks behind the last batch, with which a worker begins its next: nobody else draws in it."""
        self._kept: list[object] = [None] * len(generators)
        """The marks of the main process's own generators before a batch, and their states."""
        self._states: list[Any] = [None] * len(generators)

    def __getstate__(self) -> dict[str, Any]:
        return {"seeded": self.seeded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def look_at(self, dataset: Any, collate_fn: Any) -> bool:
        """Find the generators that these hold; whether they are others than before."""
        own = held_within([dataset, collate_fn], in_data=True) if self.seeded else []
        if len(own) > MOST_OF_ITS_OWN:
            own = []
        known = [one.generator for one in self._generators[len(CPU_GENERATORS) :]]
        if len(own) == len(known) and all(one is other for one, other in zip(own, known, strict=True)):
            return False
        self._watch((*CPU_GENERATORS, *map(HeldGenerator, own)))
        return True

    def _marks(self) -> list[object]:
        """Equal as long as nobody draws from any."""
        return [generator.mark() for generator in self._generators]

    @property
    def idle(self) -> bool:
        """Whether nothing has to be seeded."""
        return not self._awake

    def during(self, make: Callable[[], Any], put_back: bool) -> Any:
        """What ``make()`` returns, when every generator that it drew from was seeded.

        Args:
            make: Calls :meth:`of` for whatever may draw. It is called again where a generator was drawn from that was
                only watched: at most once for each generator in the life of a process.
            put_back: Whether the generators stand afterwards where they stood before.
        """
        if not self.seeded:
            return make()
        before = self._left
        if put_back or before is None:
            before = self._marks()
        if put_back and before != self._kept:
            self._keep(before)
        self._left = None
        try:
            while True:
                try:
                    made = make()
                    after = self._marks()
                    if after == before or not self._wake(before, after):
                        break
                except Exception:
                    if not self._wake(before, self._marks()):
                        raise
            if self._seen is not None:
                self._end_first_batch()
            self._left = after
            return made
        finally:
            if put_back and self._left != before:
                self._put_back(before)

    def of(self, seed: int, act: Callable[[Any], Any], argument: Any) -> Any:
        """``act(argument)``, with the generators seeded."""
        for which in self._awake:
            self._generators[which].seed(seed ^ self._apart[which])
        if self._seen is None:
            return act(argument)
        before = self._marks()
        with generators_that_are_set() as were_set:  # as fork_rng does, behind which they stand where they stood
            try:
                return act(argument)
            finally:
                after = self._marks()
                self._seen |= {which for which in self._awake if after[which] != before[which] or which in were_set}

    def _end_first_batch(self) -> None:
        assert self._seen is not None
        self._awake = tuple(sorted(self._seen))
        self._idle = tuple(which for which in self._all if which not in self._seen)
        self._seen = None

    def _wake(self, before: list[object], after: list[object]) -> bool:
        """Whether somebody drew from a generator that was not seeded: from now on it is."""
        moved = {which for which in self._idle if after[which] != before[which]}
        self._awake = tuple(sorted({*self._awake, *moved}))
        self._idle = tuple(which for which in self._idle if which not in moved)
        return bool(moved)

    def _keep(self, before: list[object]) -> None:
        for which, mark in enumerate(before):
            if self._kept[which] != mark:
                self._kept[which], self._states[which] = mark, self._generators[which].state()

    def _put_back(self, before: list[object]) -> None:
        for which, mark in enumerate(self._marks()):
            if mark != before[which]:
                self._generators[which].restore(self._states[which])
        self._kept = self._marks()  # where a state leaves something open, the marks of equal states may differ


class _Task(NamedTuple):
    """What is sent to where a batch is made."""

    indices: Sequence[Any]
    occurrences: Sequence[int] | None
    """Of each index; None: each comes for the first time."""
    seed: int
    epoch: int
    number: int
    """Of the batch, in the whole epoch over all ranks."""


_being_made: _Task | None = None


class _BatchMaker:
    """Stands for a loader's dataset and its ``collate_fn``, in whichever process makes the batches."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], draws: Draws) -> None:
        self.dataset, self.collate_fn, self.draws = dataset, collate_fn, draws
        self._looked_at = False
        self._one_at_a_time = True
        """Whether ``__getitems__`` returns a list of samples, as torch asks, so that it can be asked for each."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, task: _Task) -> Any:
        global _being_made
        outer, _being_made = _being_made, task
        # A worker's generators are nobody else's, unless its dataset reads a loader of its own for a sample.
        put_back = get_worker_info() is None or outer is not None
        try:
            if not self._looked_at:
                self._looked_at = True  # in this process; its copies in workers look again
                self.draws.look_at(self.dataset, self.collate_fn)
                made = self.draws.during(lambda: self._made(task), put_back)
                if not self.draws.look_at(self.dataset, self.collate_fn):
                    return made  # else a sample has made its generator when it was asked for
            return self.draws.during(lambda: self._made(task), put_back)
        finally:
            _being_made = outer

    def _made(self, task: _Task) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        if self.draws.idle:
            samples = at_once(task.indices) if at_once else [self.dataset[index] for index in task.indices]
            return self.collate_fn(samples)
        of_batch = _seed_of(task.number, task.seed, BATCHES, task.epoch, 0)
        samples = self._samples(task, at_once)
        if samples is None:
            samples = self.draws.of(of_batch, self.dataset.__getitems__, task.indices)
        return self.draws.of(of_batch, self.collate_fn, samples)

    def _samples(self, task: _Task, at_once: Any) -> list[Any] | None:
        """The samples, each with its own draws; None where they have to be asked for as a whole."""
        if at_once and not (self._one_at_a_time and type(task.indices) in (list, tuple, RepeatedIndices)):
            return None
        get = self._get_one if at_once else functools.partial(operator.getitem, self.dataset)
        first_time = _rounds(task.seed, SAMPLES, task.epoch, 0, 0)
        samples = []
        for index, occurrence in zip(task.indices, task.occurrences or itertools.repeat(0), strict=False):
            if type(index) is int and 0 <= index < 2**BITS and not occurrence:
                seed = _mixed(index, first_time)  # the same, quicker
            else:
                seed = _seed_of(index, task.seed, SAMPLES, task.epoch, occurrence)
            samples.append(self.draws.of(seed, get, index))
            if not self._one_at_a_time:
                return None
        return samples

    def _get_one(self, index: Any) -> Any:
        samples = self.dataset.__getitems__([index])
        self._one_at_a_time = isinstance(samples, list | tuple) and len(samples) == 1
        return samples[0] if self._one_at_a_time else None


def _as_it_is(batch: Any) -> Any:
    return batch


class _WorkerStart:
    """A loader's ``worker_init_fn``, which finds the dataset itself at ``get_worker_info().dataset``."""

    def __init__(self, init_fn: Callable[[int], object] | None) -> None:
        self.init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.init_fn is not None:
            self.init_fn(worker)


class _NumberedBatches:
    """Stands for a loader's batch sampler: each batch with what its draws depend on."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[_Task]:
        sampler = self.batch_sampler
        ranks = getattr(sampler, "num_replicas", None) or world_size_of()
        rank = getattr(sampler, "rank", None)
        rank = rank_of_this_process() if rank is None else rank
        steps = sampler.steps_before
        first = sampler.state_dict(batches=0).get("batches", steps * ranks) + rank
        counted = None
        # A subclass may yield what it likes, so that it has to say so itself.
        if "tells_occurrences" not in vars(type(sampler)):
            counted = _count_again(sampler, steps)
        seed = getattr(sampler, "seed", 0)
        seed = seed % 2**64 if isinstance(seed, int) else 0
        return self._tasks(iter(sampler), sampler.epoch, seed, first, ranks, counted)

    def _tasks(
        self, batches: Iterator[Any], epoch: int, seed: int, first: int, ranks: int, counted: Counter[object] | None
    ) -> Iterator[_Task]:
        occurrences: Sequence[int] | None
        for step, batch in enumerate(batches):
            if counted is not None:
                occurrences = _count(batch, counted)
            else:
                occurrences = batch.occurrences if isinstance(batch, RepeatedIndices) else None
            yield _Task(batch, occurrences, seed, epoch, first + step * ranks)


def _count_again(sampler: Any, steps: int) -> Counter[object]:
    """How often a rank's batches have had each index before a position within the epoch."""
    counted: Counter[object] = Counter()
    if steps:
        again = copy.deepcopy(sampler)
        again.set_epoch(sampler.epoch + 1)  # and back: at the epoch's start
        again.set_epoch(sampler.epoch)
        for _, batch in zip(range(steps), again, strict=False):
            _count(batch, counted)
    return counted


def _count(batch: Any, counted: Counter[object]) -> list[int]:
    occurrences = []
    for index in batch:
        key = _key_of(index)
        occurrences.append(counted[key])
        counted[key] += 1
    return occurrences


def _key_of(index: Any) -> int | str:
    """An index as what is the same in every process."""
    try:
        return int(operator.index(index))
    except TypeError:
        text = repr(index)
    if " at 0x" in text:
        raise TypeError(
            f"what a sample draws is a function of its index, and {text} says no more than where it lies in memory: "
            "let the batch sampler yield ints, strings or tuples of them, or give seed_samples=False"
        )
    return text


def _seed_of(index: Any, *entropy: int) -> int:
    """The seed of an index: among the first 2**32 of the same entropy, no two have the same."""
    key = _key_of(index)
    if isinstance(key, str):
        key = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=12).digest(), "little")
    high, low = divmod(key, 2**BITS)
    return _mixed(low, _rounds(*entropy, high % 2**64))


def _mixed(seed: int, rounds: tuple[tuple[int, int], ...]) -> int:
    for multiplier, addend in rounds:
        # Both can be undone, so that no two meet: an odd factor has an inverse, and a shift leaves the upper half.
        seed = (seed * multiplier + addend) & 0xFFFFFFFF
        seed ^= seed >> 16
    return seed


@functools.lru_cache(maxsize=256)
def _rounds(*entropy: int) -> tuple[tuple[int, int], ...]:
    # In words, two for each, as a SeedSequence takes 2**32 for (0, 1).
    words = [word for number in entropy for word in divmod(number, 2**32)]
    drawn = np.random.SeedSequence(words).generate_state(8, np.uint32).tolist()
    return tuple((multiplier | 1, addend) for multiplier, addend in zip(drawn[:4], drawn[4:], strict=True))
