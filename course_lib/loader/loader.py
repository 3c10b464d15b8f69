"""The loader and its iterators, from an index to a batch; what each worker does stands in ``workers.py``."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe
from typing_extensions import TypeVar

from course_lib._ranks import world_size_of
from course_lib.loader.fetching import make_fetch
from course_lib.loader.pinning import PinningThread, can_pin, pin
from course_lib.loader.workers import LOOK_SECONDS, Crew, EpochBegins, Failure, StreamEnds
from course_lib.samplers.epoch import EpochBatchSampler
from course_lib.samplers.sharded import is_of_torch

Sample = TypeVar("Sample", covariant=True, default=Any)


class MiniDataLoader(DataLoader[Sample]):
    """Batches of a dataset, by the arguments of ``torch.utils.data.DataLoader`` and with their meaning.

    Torch's constructor checks the arguments and makes the samplers; the iterators and the workers are our own.

    Args:
        dataset: Map-style (``__getitem__``; ``__getitems__``, where it exists) or an ``IterableDataset``; a datapipe
            only without ``shuffle`` and without workers.
        batch_size: Samples in a batch; ``None`` delivers single samples.
        shuffle: A new order in each epoch, drawn from ``generator``.
        sampler: Yields indices; excludes ``shuffle``.
        batch_sampler: Yields lists of indices; excludes ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``.
        num_workers: Processes that fetch and collate; with 0, the process that asks for a batch makes it.
        collate_fn: Makes a batch of a list of samples. Default: torch's, which keeps tuples, dicts and their nesting.
        pin_memory: Copy tensors to page-locked memory where there is an accelerator; with workers, in a thread.
        drop_last: Leave out a smaller last batch (of a stream: of each worker).
        timeout: Seconds to wait for a batch from workers; 0 waits as long as they live.
        worker_init_fn: Called in each worker with its id, after it was seeded.
        multiprocessing_context: A start method or a context; default: the platform's.
        generator: Of the order and of the workers' seeds; default: torch's global one.
        prefetch_factor: Batches that each worker may be ahead (2): memory against uneven loading times.
        persistent_workers: Keep the workers, and their copies of the dataset, for the next epoch.
        pin_memory_device: Without effect, as in torch.
        in_order: ``False`` delivers what is ready first.

    Raises:
        ValueError, TypeError: An argument is out of its range, or two exclude each other.
        RuntimeError: In an epoch: a worker was killed or has left, or ``timeout`` is over. An error of the dataset, of
            ``collate_fn`` or of ``worker_init_fn`` brings the worker's traceback, and keeps its type where that can be
            made from one text.
    """

    _iterator: Any  # the _WorkerBatches whose workers live on, or None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        if isinstance(dataset, IterDataPipe) and (shuffle or num_workers):
            raise ValueError(
                "a datapipe is read in its own order and without workers, as torch shuffles and shards it in its own "
                f"iterators: got {type(dataset).__name__} with shuffle={shuffle} and num_workers={num_workers}"
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,  # type: ignore[arg-type]
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Torch finds these two when the loader is iterated, and by an assertion.
        if timeout and num_workers == 0:
            raise ValueError(f"timeout option needs num_workers > 0, got num_workers=0 and timeout={timeout}")
        if self.prefetch_factor == 0:
            raise ValueError("prefetch_factor option should be an int greater than 0, got 0")
        self._position: dict[str, Any] = {}  # in the epoch that runs; empty between epochs
        self._resume: dict[str, Any] = {}  # of the epoch to go on with

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _make_fetch(self) -> Callable[[], Callable[[Any], Any]]:
        return functools.partial(make_fetch, self.dataset, self._auto_collation, self.collate_fn, self.drop_last)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}  # a copy will have workers of its own

    def __iter__(self) -> _Batches:  # type: ignore[override]
        if self._iterator is not None and not self._iterator.closed:
            self._iterator.begin_epoch(self)
            return self._iterator
        iterator = self._get_iterator()
        if self.persistent_workers:
            self._iterator = iterator
        return iterator

    def _get_iterator(self) -> _Batches:  # type: ignore[override]
        return _WorkerBatches(self) if self.num_workers else _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """What the order of this epoch is drawn from, and the number of its batches that were *delivered*.

        Batches that workers have fetched ahead do not count. Once an epoch has ended, the state is that of the next.
        A Lightning Trainer reads a stream without a length one batch ahead of its training, and that batch counts:
        ``ExactResume`` refuses such a state within an epoch.
        Raises ValueError within an epoch that workers deliver without ``in_order``: it has no position.
        """
        if self._position and not (self._resume or self.in_order or self.num_workers < 2):
            raise ValueError("batches out of order have no position: take the state between epochs, or set in_order")
        return copy.deepcopy(self._resume or self._position or self._start())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch the one of ``state``, and begin it after the batches that were delivered.

        Its order comes out again: the generator that it is drawn from is set back (torch's global one, where none was
        given), and the sampler by its own ``load_state_dict``, where it has one, or to its epoch. A stream has no
        position, so its batches are read again up to there; it needs the same number of workers as before.

        Raises:
            ValueError: The state is no state of such a loader; or it was taken within an epoch, and that had other
                batches here, other workers of a stream, or was shared by another number of ranks; or its sampler is
                none of torch's, and has no state.
        """
        start = self._start()
        if set(state) != set(start):
            raise ValueError(f"not a state of {type(self).__name__}: its keys are {sorted(map(str, state))}")
        delivered = state["batches_delivered"]
        sampler = self._index_sampler
        comes_again = is_of_torch(sampler) or hasattr(sampler, "load_state_dict")
        if not comes_again and 0 < delivered != length_hint(sampler, -1):  # something is left of it
            raise ValueError(
                f"the state is within an epoch that {type(sampler).__name__} has ordered, which has no state: another "
                "order may come. Give it state_dict and load_state_dict, wrap it in a ShardedBatchSampler that a "
                "ResumableDataLoader reads, or take a state from between two epochs"
            )
        if delivered and state["ranks"] != start["ranks"]:
            raise ValueError(
                f"the state is within an epoch that {state['ranks']} rank(s) shared, here {start['ranks']} do: "
                "course_lib.resume.ResumableDataLoader can go on with other ranks"
            )
        if not self._is_stream and delivered > length_hint(sampler, delivered):
            raise ValueError(
                f"the state is {delivered} batches into an epoch, this loader's has {len(self)}: it was saved with "
                "another dataset, sampler or batch size"
            )
        others = [name for name in SHAPE if None not in (state[name], start[name]) and state[name] != start[name]]
        if delivered and others:
            told = " and ".join(f"{SHAPE[name]} {state[name]}, here {start[name]}" for name in others)
            raise ValueError(
                f"the state is within an epoch that had {told}: its position means other samples here. Make the loader "
                "as it was, or take a state from between two epochs"
            )
        self._resume = copy.deepcopy(dict(state))

    def leave_epoch(self) -> bool:
        """Have the next iteration begin the next epoch, as a trainer does that counts; False: none has begun.

        One that has delivered nothing is the next epoch: what it has drawn is taken back, and drawn again.
        """
        self._resume = dict(self._resume or self._position)
        if not self._resume:
            return False
        if self._resume["batches_delivered"]:
            _LeftEpoch(self)
        else:
            self._begin_epoch()
        self._position = {}
        return True

    def _start(self) -> dict[str, Any]:
        sampler, dealer = self._index_sampler, self._dealer
        return {
            "batches_delivered": 0,
            "order_generator": self.order_generator.get_state(),
            "sampler": sampler.state_dict() if hasattr(sampler, "state_dict") else None,
            "epoch": dealer.epoch if isinstance(dealer, DistributedSampler) else None,
            "ranks": getattr(dealer, "num_replicas", 1) or world_size_of(),
            "draws_worker_seed": self._iterator is None or self._iterator.closed,
            "order_drawn": False,  # from the generator as it stood then, behind the seed of new workers
            "batch_size": getattr(sampler, "batch_size", self.batch_size),
            "drop_last": getattr(sampler, "drop_last", None if self.batch_size is None else self.drop_last),
            "samples": None if self._is_stream else length_hint(self.dataset, -1),
            "workers": self.num_workers if self._is_stream else None,
        }

    def _begin_epoch(self) -> dict[str, Any]:
        """The position to count in: a restored one, with the sources of its order set back, or a new one."""
        self._position, self._resume = dict(self._resume), {}
        if not self._position:
            self._position = self._start()
            if isinstance(self._index_sampler, EpochBatchSampler):  # by default: where its last iterator stands
                self._position["sampler"] = self._index_sampler.state_dict(batches=0)
        else:
            self.order_generator.set_state(self._position["order_generator"])
            if self._position["sampler"] is not None:
                self._index_sampler.load_state_dict(self._position["sampler"])
            if self._position["batches_delivered"] and self._position["epoch"] is not None:
                self._dealer.set_epoch(self._position["epoch"])  # a Trainer does so after its iter(loader)
        return self._position

    @property
    def _dealer(self) -> Any:
        """The sampler that may deal the order to ranks."""
        return getattr(self._index_sampler, "sampler", self._index_sampler)

    @property
    def order_generator(self) -> torch.Generator:
        """The generator whose state is the order's: a sampler's, the loader's or torch's global one."""
        samplers = (self._index_sampler, self._dealer)
        generators = (*(getattr(sampler, "generator", None) for sampler in samplers), self.generator)
        return next((each for each in generators if isinstance(each, torch.Generator)), torch.default_generator)


SHAPE = {
    "batch_size": "batches of",
    "drop_last": "drop_last",
    "samples": "samples:",
    "workers": "workers:",
}
"""What the batches behind a position depend on, and how it is said."""
NOTHING_LEFT = (
    "the state that was loaded stood behind its epoch's last batch: nothing is left of this epoch. A Lightning Trainer "
    "takes that for the next epoch, which is lost: add course_lib.callbacks.ExactResume() there"
)


class _Batches:
    """The iterator over an epoch; this one fetches where it is asked."""

    def __init__(self, loader: MiniDataLoader[Any]) -> None:
        self._index_sampler, self._dataset, self._is_stream = loader._index_sampler, loader.dataset, loader._is_stream
        self._loader = weakref.ref(loader)
        self._pins = can_pin(loader)
        self._begin(loader, new_workers=True)
        self._prepare(loader)

    def _begin(self, loader: MiniDataLoader[Any], new_workers: bool) -> None:
        """Draw in torch's order: ``iter(sampler)``, a seed where workers are new, and later the first index."""
        self._position, self._told_length, self._yielded = loader._begin_epoch(), loader._IterableDataset_len_called, 0
        self._read = 0 if self._is_stream else self._position["batches_delivered"]  # those that failed count too
        self._order_generator = loader.order_generator
        self._indices = iter(self._index_sampler)
        self._first_index = not self._is_stream
        if self._position["draws_worker_seed"]:
            self._base_seed = _draw_seed(loader.generator)
        elif new_workers:  # the epoch that is resumed had its workers already
            self._base_seed = _draw_seed(loader.order_generator.clone_state())
        self._seeds_workers = (loader.generator or torch.default_generator) is self._order_generator
        self._began_at = self._order_generator.get_state() if self._read else None

    def _prepare(self, loader: MiniDataLoader[Any]) -> None:
        self._fetch = loader._make_fetch()

    def _read_again(self) -> None:
        """Come to a stream's position; not in ``iter(loader)``, where Lightning hides what a sample raises."""
        try:
            for _ in range(self._position.get("batches_delivered", 0) - self._read):
                self._next_batch()
        except StopIteration:
            raise RuntimeError("the stream is over before the position of the state that was loaded") from None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __getstate__(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled: give the other process the loader")

    def __next__(self) -> Any:
        self._read_again()
        try:
            batch = self._next_batch()
        except StopIteration:
            if self._position.get("batches_delivered") and not self._yielded:
                warnings.warn(NOTHING_LEFT, stacklevel=2)
            self._position.clear()
            raise
        if self._position:
            self._position["batches_delivered"] = self._read
        if (loader := self._loader()) is not None:
            loader._position = self._position  # of several iterators, the one that moved last
        self._yielded += 1
        if self._told_length is not None and self._yielded > self._told_length and self._is_stream:
            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {self._told_length} (when accessing "
                f"len(dataloader)), but {self._yielded} samples have been fetched. For multiprocessing data-loading, "
                "this may be workers that do not each read a part of their own: see torch.utils.data.get_worker_info",
                stacklevel=2,
            )
        return batch

    def _draw_order(self) -> None:
        """Draw the first index from where the state says; without one, say where the generator stands now.

        Since ``iter(loader)`` somebody may have seeded it, as a Trainer's callback does.
        """
        position = self._position
        if position["order_drawn"]:
            self._order_generator.set_state(position["order_generator"])
            if position["draws_worker_seed"] and self._seeds_workers:
                _draw_seed(self._order_generator)
        else:
            now = {"order_generator": self._order_generator.get_state(), "draws_worker_seed": False}
            position |= now | {"order_drawn": True}

    def _come_to_position(self, ahead: int = 0) -> None:
        self._first_index = False
        now = self._order_generator.get_state()
        if self._position:
            self._draw_order()
        self._pass_over(self._read + ahead)
        if self._began_at is not None and not torch.equal(now, self._began_at):
            self._order_generator.set_state(now)  # somebody has seeded it for what samples draw, as ExactResume does

    def _pass_over(self, batches: int) -> None:
        next(itertools.islice(self._indices, batches, batches), None)

    def _next_batch(self) -> Any:
        if self._first_index:
            self._come_to_position()
        indices, self._read = next(self._indices), self._read + 1
        batch = self._fetch(indices)
        return pin(batch) if self._pins else batch


def _draw_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class _LeftEpoch(_Batches):
    """An epoch of which no batch is wanted: what it would have drawn is drawn."""

    def _prepare(self, loader: MiniDataLoader[Any]) -> None:
        if not self._is_stream:
            self._come_to_position(ahead=loader.num_workers * (loader.prefetch_factor or 0))


class _WorkerBatches(_Batches):
    """The iterator over an epoch that workers fetch: a task is dealt for each batch that is delivered."""

    def _prepare(self, loader: MiniDataLoader[Any]) -> None:
        self._crew = Crew(loader, loader._make_fetch, self._base_seed)
        self._workers = self._crew.processes
        weakref.finalize(self, self._crew.close)
        self._answers: Any = PinningThread(self._crew) if self._pins else self._crew
        self._timeout, self._persistent = loader.timeout, loader.persistent_workers
        self._prefetch_factor: int = loader.prefetch_factor or 1
        self._deal_first()

    @property
    def closed(self) -> bool:
        return self._crew.closed

    def begin_epoch(self, loader: MiniDataLoader[Any]) -> None:
        while any(self._load):  # what an epoch that was left has not been given
            self._take()
        for worker in range(len(self._workers)):
            self._crew.send(worker, EpochBegins())
        self._begin(loader, new_workers=False)
        self._deal_first()

    def _deal_first(self) -> None:
        self._turns = deque(range(len(self._workers)))  # of the workers that have more to read
        self._load = [0] * len(self._workers)  # tasks that each has to answer
        self._pass_over(self._read)
        for _ in range(self._prefetch_factor * len(self._workers)):
            self._deal()
        self._position["order_drawn"] = True

    def _deal(self) -> None:
        """Send one task more to the worker whose turn it is; without ``in_order`` to the one that has fewest."""
        if not self._turns:
            return
        try:
            indices = next(self._indices)
        except StopIteration:
            return
        worker = self._turns[0] if self._crew.in_order else min(self._turns, key=self._load.__getitem__)
        self._turns.rotate(-1)
        self._crew.deal(worker, indices)
        self._load[worker] += 1

    def _take(self) -> tuple[int, Any]:
        while (item := self._answers.answer(self._timeout or LOOK_SECONDS)) is None:
            self._crew.look()
            if self._timeout:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        self._load[item[0]] -= 1
        return item  # type: ignore[no-any-return]

    def _next_batch(self) -> Any:
        while any(self._load):
            worker, answer = self._take()
            if isinstance(answer, StreamEnds):
                if worker in self._turns:
                    self._turns.remove(worker)
                    self._deal()
                continue
            self._read += 1
            self._deal()
            if isinstance(answer, Failure):
                raise answer.error()
            return answer
        if not self._persistent:
            self._crew.close()
        raise StopIteration
