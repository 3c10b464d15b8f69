"""MiniDataLoader against torch's DataLoader: the same batches and errors in the same order, and no process left behind.

Differences that are meant, each with a test of its own below the random ones: a map-style dataset that raises
StopIteration is an error (torch ends the epoch there, without a word); a datapipe is refused; `iter(sampler)` is called
once an epoch with workers too; after an error of `worker_init_fn` each of the worker's tasks gets that error.
"""

import copy
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import typing
import warnings
import weakref
from collections import Counter
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import course_lib.loader.workers as workers_module
from course_lib.launch import run_ranks
from course_lib.loader import MiniDataLoader
from tests import effort
from tests.children import children
from tests.trainer_oracle import CountingModule, quiet_trainer

FORK = multiprocessing.get_context("fork")


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Gate:
    """Lets processes wait for each other, and is not upset by the death of one that waits."""

    def __init__(self):
        self._is_open = FORK.RawValue("b", 0)

    def open(self):
        self._is_open.value = 1

    def wait(self):
        while not self._is_open.value:
            time.sleep(0.001)


def outcomes(iterator, count):
    """Batches, and the errors between them."""
    for _ in range(count):
        try:
            yield next(iterator)
        except Exception as error:
            yield error


def wait_until(holds, seconds=60):
    """For what another process does; nothing is asserted about how long it takes."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------- torch's loader as oracle


class Point(NamedTuple):
    x: torch.Tensor
    y: tuple


class Odd(Exception):
    """Its constructor wants more than a message."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Keyword(Exception):
    message = "unset"

    def __init__(self, *, message):
        super().__init__(message)


ERRORS = {
    "value": lambda text: ValueError(text),
    "key": lambda text: KeyError(text),
    "odd": lambda text: Odd(7, text),
    "keyword": lambda text: Keyword(message=text),
    "unicode": lambda text: UnicodeDecodeError("ascii", b"", 0, 1, text),
}

KINDS = {
    "int": lambda index: index,
    "float": lambda index: index / 4,
    "tensor": lambda index: torch.tensor([index, -index]),
    "array": lambda index: np.array([[index]], dtype=np.float32),
    "dict": lambda index: {"index": index, "text": f"sample {index}", "pair": (index, torch.ones(2, 2) * index)},
    "point": lambda index: Point(torch.tensor(index, dtype=torch.float16), ([index], float(index))),
    "uneven": lambda index: torch.arange(index % 5 // 4),  # cannot be stacked where a 4 or a 9 is
}


class Recipe:
    """What a sample is: a function of its index, unless it is drawn; some indices fail."""

    def __init__(self, n, kind, draws, fails):
        self.n, self.kind, self.draws, self.fails = n, kind, draws, fails

    def sample(self, index):
        if index in self.fails:
            raise ERRORS[self.fails[index]](f"sample {index}")
        sample = KINDS[self.kind](index)
        return (sample, torch.rand(2), np.random.rand(), random.random()) if self.draws else sample  # noqa: NPY002


class Samples(Recipe, Dataset):
    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.sample(index)


class SamplesAtOnce(Samples):
    def __getitems__(self, indices):
        return [self[index] for index in reversed(indices)]


class Stream(Recipe, IterableDataset):
    def __init__(self, *recipe, split=None):
        super().__init__(*recipe)
        self.split = split

    def __iter__(self):
        info, indices = get_worker_info(), range(self.n)
        if info is not None and self.split == "strided":
            indices = indices[info.id :: info.num_workers]
        elif info is not None and self.split == "uneven":
            indices = indices[: self.n // 5] if info.id == 0 else indices[self.n // 5 :]
        for index in indices:
            yield self.sample(index)


class SizedStream(Stream):
    def __len__(self):
        return self.n


class Once:
    """Indices, or lists of them, and at some position an error."""

    def __init__(self, items, fails_at=None):
        self.items, self.fails_at = items, fails_at

    def __iter__(self):
        for position, item in enumerate(self.items):
            if position == self.fails_at:
                raise ValueError(f"the sampler fails at {position}")
            yield item

    def __len__(self):
        return len(self.items)


class Eager:
    """Draws its order in `__iter__` itself, from the global generator."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())

    def __len__(self):
        return self.n


def sampler_of(name, n, generator):
    return {
        "sequential": lambda: SequentialSampler(range(n)),
        "random": lambda: RandomSampler(range(n), generator=generator),
        "replacement": lambda: RandomSampler(range(n), replacement=True, num_samples=n + 3, generator=generator),
        "subset": lambda: SubsetRandomSampler(range(0, n, 2), generator=generator),
        "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(n)], n, generator=generator),
        "list": lambda: list(range(n))[::-1],
        "tensor": lambda: torch.arange(n),
        "eager": lambda: Eager(n),
        "failing": lambda: Once(range(n), n // 2),
    }[name]()


def batch_sampler_of(name, n, generator):
    return {
        "random": lambda: BatchSampler(RandomSampler(range(n), generator=generator), 3, drop_last=False),
        "uneven": lambda: [[0], [1, 2, 3], list(range(n)), [n - 1, n - 1]],
        "failing": lambda: Once([[i, n - 1 - i] for i in range(n)], 3),
    }[name]()


def as_dict(samples):
    return {"samples": samples, "count": len(samples)}


def as_text(samples):
    return str(samples)


def picky(samples):
    if "3" in str(samples):
        raise ValueError("collate_fn fails at 3")
    return samples


COLLATES = {"default": None, "list": list, "dict": as_dict, "text": as_text, "picky": picky}


START = "no start for worker 1"


def fail_in_worker_1(worker):
    if worker == 1:
        raise OSError(START)


def draw_in_worker(worker):
    torch.rand(worker + 1), np.random.rand(), random.random()  # noqa: NPY002


INITS = {"none": None, "draws": draw_in_worker, "fails": fail_in_worker_1}


def random_case(rng):
    n, workers = rng.randint(1, 24), rng.choice([0, 0, 0, 0, 0, 1, 2, 2, 3])
    stream, sampler = rng.random() < 0.3, None
    case = dict(
        seed=rng.randint(0, 99), n=n, draws=rng.random() < 0.3, generator=rng.random() < 0.5,
        kind=rng.choice(["uneven"] + 3 * ["int", "float", "tensor", "array", "dict", "point"]),
        collate=rng.choice(["default"] * 6 + ["list", "dict", "text", "picky"]), asks_length=rng.random() < 0.5,
        fails={rng.randrange(n): rng.choice(list(ERRORS)) for _ in range(rng.choice([0, 0, 1, 3]))},
        stops=[rng.choice([None, None, rng.randint(0, n)]) for _ in range(2)], init="none",
    )  # fmt: skip
    flags = dict(num_workers=workers)
    if workers:
        flags |= dict(prefetch_factor=rng.choice([None, 1, 2, 3]), persistent_workers=rng.random() < 0.7)
        flags |= dict(timeout=rng.choice([0, 60]), in_order=workers > 1 or rng.random() < 0.5)
        case["stops"] += [None] * flags["persistent_workers"]
        case["init"] = rng.choice(["none"] * 8 + ["draws", "draws", "fails"])
    if rng.random() < 0.8:
        flags |= dict(batch_size=rng.randint(1, 7), drop_last=rng.random() < 0.4)
    else:
        flags |= dict(batch_size=None)
    if stream:
        case |= dict(dataset=rng.choice([Stream, SizedStream]), split=rng.choice([None, "strided", "uneven"]))
    else:
        case |= dict(dataset=rng.choice([Samples, Samples, SamplesAtOnce]))
        how = rng.choice(["none", "shuffle", "sampler", "sampler", "batch_sampler"])
        if how == "shuffle":
            flags |= dict(shuffle=True)
        elif how == "sampler":
            names = "sequential random replacement subset weighted list tensor failing".split()
            sampler = (sampler_of, rng.choice(names + ["eager"] * 2 * (not workers)))
        elif how == "batch_sampler":
            sampler = (batch_sampler_of, rng.choice(["random", "uneven", "failing"]))
            flags = {name: flag for name, flag in flags.items() if name not in ("batch_size", "drop_last")}
    return case | dict(sampler=sampler, flags=flags)


def described(value):
    """Type, dtype and values, all the way down."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, described(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(each) for each in value]
    return type(value), value


def kernel(error):
    """Type, first and last line: between them are the lines of a traceback, which are not the same in two files."""
    lines = str(error).strip().splitlines()
    return "error", type(error), lines[0], lines[-1]


def transcript(kind, case):
    """All that can be seen of a loader: batches and errors in their order, warnings, and the generators afterwards."""
    torch.manual_seed(case["seed"]), np.random.seed(case["seed"]), random.seed(case["seed"])  # noqa: NPY002
    generator = torch.Generator().manual_seed(case["seed"]) if case["generator"] else None
    recipe = [case[name] for name in ("n", "kind", "draws", "fails")]
    dataset = case["dataset"](*recipe, **{name: case[name] for name in ("split",) if name in case})
    flags = case["flags"] | dict(collate_fn=COLLATES[case["collate"]], worker_init_fn=INITS[case["init"]])
    if case["sampler"]:
        make, name = case["sampler"]
        flags[make.__name__.removesuffix("_of")] = make(name, case["n"], generator)
    events = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = kind(dataset, generator=generator, **flags)
        if case["asks_length"]:
            try:
                events.append(len(loader))
            except TypeError as error:
                events.append(kernel(error))
        for stop in case["stops"]:
            events.append(f"epoch, to be left after {stop}")
            iterator = None
            for _ in range(100 if stop is None else stop):
                try:
                    iterator = iter(loader) if iterator is None else iterator
                    events.append(described(next(iterator)))
                except StopIteration:
                    events.append("end")
                    break
                except Exception as error:
                    events.append(kernel(error))
                    traceback.clear_frames(error.__traceback__)  # torch's iterator would live on in them
                    if iterator is None or case["init"] == "fails":
                        break
            del iterator
            if case["init"] == "fails":
                break
    lengths = [re.findall(r"reported to be (\d+).*?but (\d+) samples", str(w.message)) for w in caught]
    events.append([length for length in lengths if length])
    events += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    return [*events, generator and generator.get_state().tolist()]


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("seed", range(8))
def test_random_loaders_do_what_torchs_does(seed):
    # 320 in all, with --thorough. What datasets draw in workers is compared too, and so are their seeds.
    rng, seen, numbers = random.Random(f"loader {seed}"), Counter(), range(effort.cases(10, 40))
    for number in numbers:
        case = random_case(rng)
        expected, ours = transcript(DataLoader, case), transcript(MiniDataLoader, case)
        for its, mine in zip(expected, ours, strict=False):
            assert mine == its, f"case {number}: {case}"
        assert len(ours) == len(expected), f"case {number}: {case}"
        seen[case["flags"]["num_workers"]] += 1
        seen["errors"] += any(event[0] == "error" for event in ours if isinstance(event, tuple))
        seen["batches"] += sum(isinstance(event, tuple) and event[0] != "error" for event in ours)
    assert sum(seen[workers] > 0 for workers in (0, 1, 2, 3)) >= effort.cases(2, 4), seen
    assert seen["errors"] >= len(numbers) // 4 and seen["batches"] >= 5 * len(numbers), seen


# ------------------------------------------------------------------------------------ arguments, and what is refused

MANY = Samples(10, "int", False, {})
STREAM = Stream(10, "int", False, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"prefetch_factor": -1, "num_workers": 1}, "prefetch_factor option should be non-negative"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        (
            {"dataset": STREAM, "shuffle": True},
            "IterableDataset: expected unspecified shuffle option, but got shuffle=T",
        ),
        (
            {"dataset": STREAM, "sampler": [1]},
            r"IterableDataset: expected unspecified sampler .*, but got sampler=\[1\]",
        ),
        (
            {"dataset": STREAM, "batch_sampler": [[1]]},
            "IterableDataset: expected unspecified batch_sampler option, but",
        ),
        ({"dataset": STREAM, "batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching"),
        ({"sampler": [1], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler option is mutually exclusive with batch_size"),
        ({"batch_sampler": [[1]], "batch_size": None}, "batch_sampler option is mutually exclusive with batch_size"),
        ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler option is mutually exclusive with batch_size"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler option is mutually exclusive with batch_size"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler option is mutually exclusive with batch_size"),
        ({"batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching and is mutually excl"),
        ({"batch_size": 0}, "batch_size should be a positive integer value"),
        ({"batch_size": -3}, "batch_size should be a positive integer value"),
        ({"batch_size": 1.5}, "batch_size should be a positive integer value"),
        ({"batch_size": True}, "batch_size should be a positive integer value"),
        ({"drop_last": 1}, "drop_last should be a boolean value"),
        ({"dataset": [], "shuffle": True}, "num_samples should be a positive integer value"),
        ({"dataset": iter([]), "shuffle": True}, r"has no len\(\)"),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context can only be used with multi-process loading"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, "should specify a valid start method in"),
        ({"multiprocessing_context": 3, "num_workers": 1}, "should be a valid context object or a string"),
    ],
)
def test_what_torch_refuses_is_refused_with_its_words(arguments, message):
    arguments = {"dataset": MANY} | arguments
    with pytest.raises((ValueError, TypeError), match=message) as its:
        DataLoader(**arguments)
    with pytest.raises(its.type, match=message):
        MiniDataLoader(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": 1}, "timeout option needs num_workers > 0, got num_workers=0"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor option should be .* greater than 0, got 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Exception ignored")  # in torch's, which was not made in full
def test_what_torch_refuses_when_it_is_iterated_gets_a_sentence(arguments, message):
    with pytest.raises(AssertionError):
        iter(DataLoader(MANY, **arguments))
    with pytest.raises(ValueError, match=message):
        iter(MiniDataLoader(MANY, **arguments))


def test_a_datapipe_is_refused():
    with pytest.raises(ValueError, match=r"got a datapipe: torch's DataLoader reads those"):
        iter(MiniDataLoader(IterableWrapper(range(4))))


@pytest.mark.parametrize("name", "batch_size batch_sampler sampler drop_last dataset persistent_workers".split())
def test_what_the_order_was_made_from_may_not_be_set(name):
    for kind in (DataLoader, MiniDataLoader):
        loader = kind(MANY)
        with pytest.raises(
            ValueError, match=f"{name} attribute should not be set after {kind.__name__} is initialized"
        ):
            setattr(loader, name, None)


def test_a_loader_has_torchs_attributes():
    for arguments in (dict(batch_size=3), dict(num_workers=2), dict(batch_sampler=[[1]]), dict(batch_size=None)):
        ours, its = MiniDataLoader(MANY, **arguments), DataLoader(MANY, **arguments)
        for name, value in vars(its).items():
            if not name.startswith("_") and not name.endswith("sampler"):
                assert getattr(ours, name) == value, name
        assert [type(ours.sampler), type(ours.batch_sampler)] == [type(its.sampler), type(its.batch_sampler)]
    ours.collate_fn = str
    assert next(iter(ours)) == "0"


def test_the_context_can_be_set_where_there_are_workers():
    loader = MiniDataLoader(MANY, num_workers=1)
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context.get_start_method() == "fork"
    loader.multiprocessing_context = FORK
    assert [batch.item() for batch in loader] == list(range(10))
    with pytest.raises(ValueError, match="multi-process loading"):
        MiniDataLoader(MANY).multiprocessing_context = FORK


def test_more_workers_than_cores_are_warned_of():
    for kind in (DataLoader, MiniDataLoader):
        with pytest.warns(UserWarning, match="This DataLoader will create 5000 worker processes in total.*excessive"):
            kind(MANY, num_workers=5000)


def test_a_stream_that_yields_more_than_it_said_is_warned_of():
    for workers in (1, 2):
        for kind in (DataLoader, MiniDataLoader):
            loader = kind(SizedStream(4, "int", False, {}), batch_size=None, num_workers=workers)
            assert len(loader) == 4
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert len(list(loader)) == 4 * workers
            told = [str(warning.message) for warning in caught if "reported to be 4" in str(warning.message)]
            assert len(told) == 4 * (workers - 1) and all("For multiprocessing data-loading" in each for each in told)


# --------------------------------------------------------------------------------------------------- how it behaves


class Stops(Samples):
    def __getitem__(self, index):
        if index == 4:
            raise StopIteration
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_style_dataset_that_raises_stop_iteration_is_an_error(workers):
    dataset = Stops(10, "int", False, {})
    assert len(list(DataLoader(dataset, batch_size=2, num_workers=workers))) == 2  # and six samples are never seen
    seen = []
    with pytest.raises(RuntimeError, match=r"raised StopIteration for \[4, 5\]"):
        seen.extend(batch.tolist() for batch in MiniDataLoader(dataset, batch_size=2, num_workers=workers))
    assert seen == [[0, 1], [2, 3]]


class CountsIterations(SequentialSampler):
    iterations = 0

    def __iter__(self):
        self.iterations += 1
        return super().__iter__()


def test_the_sampler_is_asked_once_an_epoch():
    for workers in (0, 2):
        loader = MiniDataLoader(MANY, sampler=CountsIterations(range(10)), num_workers=workers)
        assert [(len(list(loader)), loader.sampler.iterations) for _ in range(2)] == [(10, 1), (10, 2)]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_an_error_of_worker_init_fn_each_task_of_the_worker_gets_it(persistent):
    loader = MiniDataLoader(MANY, num_workers=2, worker_init_fn=fail_in_worker_1, persistent_workers=persistent)
    for _ in range(2):
        *answers, end = outcomes(iter(loader), 11)
        assert [answer.item() for answer in answers[::2]] == list(range(0, 10, 2)) and type(end) is StopIteration
        for error in answers[1::2]:
            assert kernel(error)[1:] == (OSError, "Caught OSError in DataLoader worker process 1.", f"OSError: {START}")


def stop_in_worker(worker):
    raise StopIteration("what init")


def test_stop_iteration_of_worker_init_fn_does_not_end_the_epoch_unheard():
    with pytest.raises(RuntimeError, match=r"(?s)Caught StopIteration in DataLoader worker process 0.*what init"):
        list(MiniDataLoader(MANY, num_workers=1, worker_init_fn=stop_in_worker))


class Info(Samples):
    def __getitem__(self, index):
        info = get_worker_info()
        return info and (info.id, info.num_workers, info.seed, info.dataset is self, torch.initial_seed())


def test_workers_know_what_torchs_know():
    both = []
    for kind in (DataLoader, MiniDataLoader):
        torch.manual_seed(3)
        both.append(list(kind(Info(6, "int", False, {}), batch_size=None, num_workers=2, collate_fn=tuple)))
    assert both[0] == both[1]
    assert [(worker, workers, own) for worker, workers, _, own, _ in both[1]] == [(i % 2, 2, True) for i in range(6)]
    seeds = [seed for _, _, seed, _, _ in both[1]]
    assert seeds[1] == seeds[0] + 1 and [initial for *_, initial in both[1]] == seeds
    assert get_worker_info() is None
    assert list(MiniDataLoader(Info(2, "int", False, {}), batch_size=None, collate_fn=str)) == ["None", "None"]


class Ticks(Samples):
    """Says how many samples each worker has begun, waits before one of them, and returns `nbytes` bytes with each."""

    def __init__(self, n, workers=1, waits_at=None, nbytes=1):
        super().__init__(n, "int", False, {})
        self.begun = [FORK.RawValue("i", 0) for _ in range(workers)]
        self.waits_at, self.gate, self.nbytes = waits_at, Gate(), nbytes

    def __getitem__(self, index):
        self.begun[get_worker_info().id].value += 1
        if index == self.waits_at:
            self.gate.wait()
        return index, bytes(self.nbytes)


def first(samples):
    return samples[0]


def test_without_in_order_a_fast_batch_overtakes_and_each_comes_once():
    dataset = Ticks(12, workers=2, waits_at=0)
    iterator = iter(MiniDataLoader(dataset, num_workers=2, in_order=False, collate_fn=first))
    seen = [next(iterator)[0] for _ in range(3)]  # worker 0 is held at its first
    dataset.gate.open()
    assert 0 not in seen and sorted(seen + [index for index, _ in iterator]) == list(range(12))


def test_with_in_order_a_fast_batch_waits():
    dataset = Ticks(6, workers=2, waits_at=0)
    iterator = iter(MiniDataLoader(dataset, num_workers=2, collate_fn=first))
    wait_until(lambda: dataset.begun[1].value == 2)
    dataset.gate.open()
    assert [index for index, _ in iterator] == list(range(6))


class CountsDraws(Once):
    drawn = 0

    def __iter__(self):
        for item in super().__iter__():
            self.drawn += 1
            yield item


@pytest.mark.parametrize(("factor", "nbytes"), [(1, 1), (3, 1), (3, 10**6)])
def test_workers_are_prefetch_factor_batches_ahead_and_no_more(factor, nbytes):
    # Also with answers that are larger than what a pipe holds.
    counts = []
    for kind in (DataLoader, MiniDataLoader):
        dataset, sampler = Ticks(12, 2, nbytes=nbytes), CountsDraws(range(12))
        loader = kind(dataset, sampler=sampler, num_workers=2, prefetch_factor=factor, collate_fn=first)
        iterator, drawn = iter(loader), []
        for delivered in range(12):
            drawn.append(sampler.drawn)
            for worker in (0, 1):
                most = min(6, (delivered + 1 - worker) // 2 + factor)
                wait_until(lambda w=worker, most=most, begun=dataset.begun: begun[w].value >= most)
                assert dataset.begun[worker].value == most
            next(iterator)
        counts.append(drawn)
        del iterator
    assert counts[0] == counts[1] == [min(12, delivered + 2 * factor) for delivered in range(12)]


class Whole(Samples):
    def __getitems__(self, indices):
        return indices


@pytest.mark.thorough
def test_half_a_million_indices_a_batch_pass_both_ways():
    batches = [range(500_000)] * 6
    loader = MiniDataLoader(
        Whole(10, "int", False, {}), batch_sampler=map(list, batches), num_workers=2, collate_fn=list
    )
    assert [(len(batch), batch[-1]) for batch in loader] == [(500_000, 499_999)] * 6


def remember(samples):
    """How many of the batches that this process made before are still held, by anyone."""
    held = sum(batch() is not None for batch in REMEMBERED)
    batch = torch.tensor([held])
    REMEMBERED.append(weakref.ref(batch))
    return batch


REMEMBERED = []


@pytest.mark.parametrize("workers", [0, 1])
def test_no_batch_is_held_when_the_next_is_made(workers):
    REMEMBERED.clear()
    iterator = iter(
        MiniDataLoader(MANY, num_workers=workers, prefetch_factor=1 if workers else None, collate_fn=remember)
    )
    for _ in range(10):
        batch = next(iterator)
        assert batch.item() == 0
        there = weakref.ref(batch)
        del batch
        assert there() is None


def test_small_and_large_tensors_keep_what_they_share():
    samples = [torch.arange(12.0).view(3, 4), torch.zeros(2, 10**6), torch.empty(0), torch.tensor(5)]
    samples += [samples[0][1], samples[1][0], samples[0].t(), torch.ones(2, requires_grad=True)]
    for limit in (workers_module.INLINE_BYTES, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers_module, "INLINE_BYTES", limit)
            (batch,) = MiniDataLoader([samples], batch_size=None, num_workers=1, collate_fn=list)
        for sample, tensor in zip(samples, batch, strict=True):
            assert torch.equal(sample, tensor) and sample.requires_grad == tensor.requires_grad
            assert (sample.shape, sample.dtype, sample.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        batch[0][1, 2], batch[1][0, 7] = 99, 99
        assert batch[4][2] == batch[6][2, 1] == batch[5][7] == 99


def test_a_copy_or_a_pickled_loader_has_workers_of_its_own():
    generator = torch.Generator().manual_seed(3)
    loader = MiniDataLoader(MANY, 4, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        with pytest.raises(ValueError, match="attribute should not be set"):
            other.dataset = []
        assert sorted(index for batch in other for index in batch.tolist()) == list(range(10))
        assert other._iterator._workers[0].pid != iterator._workers[0].pid
    assert len(list(iterator)) == 2


def squares_in(method):
    loader = MiniDataLoader(
        Info(4, "int", False, {}), 2, num_workers=1, collate_fn=list, multiprocessing_context=method
    )
    return [sample[:2] for batch in loader for sample in batch]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_can_be_spawned(method):
    assert squares_in(method) == [(0, 1)] * 4
    loader = MiniDataLoader(MANY, num_workers=1, collate_fn=lambda samples: samples, multiprocessing_context=method)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda") as caught:
        iter(loader)
    assert caught.value.__notes__ == ["the start method of the workers pickles dataset, collate_fn and worker_init_fn"]


def test_a_loader_can_be_read_in_a_thread_and_in_two_loops_at_once():
    loader, seen = MiniDataLoader(MANY, num_workers=1), []
    thread = threading.Thread(target=lambda: seen.extend(batch.item() for batch in loader))
    thread.start()
    thread.join()
    pairs = [(a.item(), b.item()) for a, b in zip(loader, loader, strict=True)]
    assert seen == list(range(10)) and pairs == [(index, index) for index in range(10)]


# ---------------------------------------------------------------------------------------------- errors from a worker


class Acts(Dataset):
    """Does something else than return a sample, at one index."""

    def __init__(self, act, at=3):
        self.act, self.at = act, at

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.act() if index == self.at else index


def raise_local():
    class Local(Exception):
        pass

    raise Local("of a class that cannot be pickled")


def raise_key_error():
    raise KeyError("two\nlines")


def listed(samples):
    return samples


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (
            lambda: lambda: None,
            RuntimeError,
            "(?s)in DataLoader worker process 1.*Original Traceback.*(pickle|get local object).*<lambda>",
        ),
        (
            raise_local,
            RuntimeError,
            "(?s)Caught Local in DataLoader worker process 1.*of a class that cannot be pickled",
        ),
        (
            raise_key_error,
            KeyError,
            r"(?s)Caught KeyError in DataLoader worker process 1.\nOriginal Traceback.*in raise_key",
        ),
        (lambda: sys.exit(3), RuntimeError, r"worker \(pid\(s\) \d+\) exited unexpectedly: worker 1, exit code 3"),
        (lambda: os._exit(0), RuntimeError, r"exited unexpectedly: worker 1, exit code 0"),
        (
            lambda: signal.raise_signal(signal.SIGTERM),
            RuntimeError,
            r"worker \(pid \d+\) is killed by signal: SIGTERM: worker 1",
        ),
        (
            lambda: signal.raise_signal(signal.SIGBUS),
            RuntimeError,
            "signal: SIGBUS .*shared memory is full.*: worker 1",
        ),
        (lambda: signal.raise_signal(signal.SIGKILL), RuntimeError, "signal: SIGKILL .*out of memory.*: worker 1"),
    ],
)
def test_an_error_says_what_happened_in_which_worker(act, kind, message, monkeypatch):
    # A dead worker is heard of by the end of its pipe: no test would wait for an hour.
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 3600.0)
    before, seen = children(), []
    loader = MiniDataLoader(Acts(act), num_workers=2, collate_fn=listed, multiprocessing_context=FORK)
    with pytest.raises(kind, match=message):
        seen.extend(batch[0] for batch in loader)
    assert seen == [0, 1, 2] and children() <= before


def test_a_worker_ends_by_sigterm_whatever_the_main_process_does_with_it():
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a Trainer, while it fits
    iterator = iter(MiniDataLoader(MANY, num_workers=1))
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"worker \(pid \d+\) is killed by signal: SIGTERM"):
        list(iterator)


def test_a_worker_that_is_killed_while_it_sends_is_named():
    dataset = Ticks(4, nbytes=10**7)
    iterator = iter(MiniDataLoader(dataset, num_workers=1, collate_fn=first))
    wait_until(lambda: dataset.begun[0].value == 2)  # the first answer is on its way, and too large for the pipe
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SIGKILL .*: worker 0|workers of this iterator have ended"):
            next(iterator)


def test_a_persistent_loader_begins_anew_after_a_worker_was_killed():
    loader = MiniDataLoader(MANY, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 10
    os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"SIGKILL .*: worker 1"):
        list(loader)
    assert [batch.item() for batch in loader] == list(range(10))


def test_a_death_is_seen_where_a_child_of_the_worker_holds_its_pipe(monkeypatch):
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.1)
    gate = Gate()

    def act():
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        gate.wait()
        os._exit(0)

    try:
        with pytest.raises(RuntimeError, match=r"SIGKILL .*: worker 0"):
            list(MiniDataLoader(Acts(act), num_workers=1, multiprocessing_context=FORK))
    finally:
        gate.open()


def test_timeout_ends_the_waiting():
    dataset = Ticks(4, waits_at=0)
    iterator = iter(MiniDataLoader(dataset, num_workers=1, timeout=0.2, collate_fn=first))
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.2 seconds$"):
        next(iterator)
    dataset.gate.open()


class BreaksWhenRead:
    def __reduce__(self):
        return int, ("no number",)


def test_indices_that_cannot_be_read_or_sent_do_not_leave_the_loop_waiting():
    with pytest.raises(RuntimeError, match="exited unexpectedly: worker 0, exit code 0"):
        list(MiniDataLoader(MANY, batch_sampler=[[BreaksWhenRead()]], num_workers=1))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        iter(MiniDataLoader(MANY, sampler=[lambda: 0], num_workers=1))


@pytest.mark.thorough
def test_too_many_open_files_is_said():
    script = """
        import resource, torch
        from course_lib.loader import MiniDataLoader
        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
            loader = MiniDataLoader(torch.zeros(300, 10**5), batch_size=None, num_workers=1, collate_fn=torch.clone)
            batches = list(loader)
    """
    run = run_script(script)
    assert run.returncode == 1 and "RuntimeError: Too many open files: each large tensor" in run.stderr, run.stderr


def run_script(script, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------- no process is left behind


class Interrupts(Samples):
    """Presses Ctrl-C in the main process, which waits for this sample."""

    def __getitem__(self, index):
        if index == 3:
            os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
        return index


def read_all(loader):
    assert len(list(loader)) == 10


def leave(loader):
    for batch in loader:
        if batch.item() == 3:
            break


def for_each(loader, step):
    for batch in loader:
        step(batch)


def fail_in_the_loop(loader):
    with pytest.raises(ZeroDivisionError):
        for_each(loader, lambda batch: 1 / 0)


def fail_in_a_worker(loader):
    loader.collate_fn = picky
    with pytest.raises(ValueError, match="collate_fn fails at 3"):
        list(loader)


def fail_at_the_start(loader):
    loader.worker_init_fn = stop_in_worker
    with pytest.raises(RuntimeError, match="Caught StopIteration"):
        next(iter(loader))


def press_ctrl_c_in_the_loop(loader):
    with pytest.raises(KeyboardInterrupt):
        for_each(loader, lambda batch: signal.raise_signal(signal.SIGINT))


def press_ctrl_c_while_it_waits(loader):
    vars(loader)["dataset"] = Interrupts(10, "int", False, {})
    with pytest.raises(KeyboardInterrupt):
        list(loader)


def lose_a_worker(loader):
    iterator = iter(loader)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        list(iterator)


WAYS = [
    read_all, leave, fail_in_the_loop, fail_in_a_worker, fail_at_the_start,
    press_ctrl_c_in_the_loop, press_ctrl_c_while_it_waits, lose_a_worker,
]  # fmt: skip


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_hundred_times_no_worker_is_left(way, persistent):
    # Of the hundred and more in all, at least 7 in each way. Nothing is collected: the last reference is enough.
    before = children()
    gc.disable()
    try:
        for _ in range(7):
            loader = MiniDataLoader(MANY, num_workers=1, persistent_workers=persistent)
            way(loader)
            assert persistent or children() <= before  # those of an earlier test may end meanwhile
            del loader
            assert children() <= before
    finally:
        gc.enable()


def test_ending_two_workers_does_not_wait_for_their_tasks():
    # Of ten tasks that each is ahead, the one that is being fetched is the last.
    dataset = Ticks(100, workers=2, waits_at=1)
    iterator = iter(MiniDataLoader(dataset, num_workers=2, prefetch_factor=10, collate_fn=first))
    next(iterator)
    wait_until(lambda: dataset.begun[1].value == 1)
    threading.Timer(0.1, dataset.gate.open).start()
    iterator._crew.close()
    assert dataset.begun[1].value == 1


def own_a_loader(pids, nbytes):
    iterator = iter(MiniDataLoader(Ticks(100, workers=2, nbytes=nbytes), num_workers=2, collate_fn=first))
    next(iterator)
    pids.send([worker.pid for worker in iterator._workers])
    time.sleep(3600)


@pytest.mark.parametrize("nbytes", [1, 30_000, 10**6])
def test_the_workers_of_a_main_process_that_is_killed_end(nbytes, monkeypatch):
    # Whatever they are about: they wait for tasks, or cannot send an answer, and hold each other's pipes.
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.1)
    receiver, sender = FORK.Pipe()
    owner = FORK.Process(target=own_a_loader, args=(sender, nbytes))
    owner.start()
    pids = receiver.recv()
    assert all(map(alive, pids))
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    wait_until(lambda: not any(map(alive, pids)))


def wait_for_ctrl_c(pids, path):
    os.setsid()  # so that Ctrl-C reaches this process and its workers, and not the test
    sys.stderr = open(path, "a", buffering=1)  # noqa: SIM115
    iterator = iter(MiniDataLoader(Ticks(4, waits_at=0), num_workers=1, collate_fn=first))
    pids.send([worker.pid for worker in iterator._workers])
    next(iterator)


def test_ctrl_c_at_the_terminal_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.1)  # a worker that does not come to its end is killed
    receiver, sender = FORK.Pipe()
    owner = FORK.Process(target=wait_for_ctrl_c, args=(sender, tmp_path / "errors"))
    owner.start()
    pids = receiver.recv()
    time.sleep(0.1)  # not before the worker knows that it is not meant
    os.killpg(owner.pid, signal.SIGINT)
    owner.join()
    assert owner.exitcode == 1 and not any(map(alive, pids))
    assert re.findall("Traceback|.*Interrupt", (tmp_path / "errors").read_text()) == ["Traceback", "KeyboardInterrupt"]


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["", "1 / 0"])
def test_a_main_process_that_ends_ends_its_workers(end):
    script = f"""
        from course_lib.loader import MiniDataLoader
        if __name__ == "__main__":
            loader = MiniDataLoader(range(1000), num_workers=1, persistent_workers=True)
            iterators = [iter(loader), iter(MiniDataLoader(range(1000), num_workers=2))]
            print(*(worker.pid for iterator in iterators for worker in iterator._workers if next(iterator) is not None))
            {end}
    """
    run = run_script(script)
    assert len(run.stdout.split()) == 3 and not any(alive(int(pid)) for pid in run.stdout.split())
    assert (run.returncode, run.stderr.count("Traceback")) == ((1, 1) if end else (0, 0)), run.stderr


def drop(held, loader):
    held.clear()
    gc.collect()
    sys.exit(0 if [batch.item() for batch in loader] == list(range(10)) else 1)


@pytest.mark.thorough
def test_a_fork_of_the_owner_neither_ends_nor_uses_its_workers():
    loader = MiniDataLoader(MANY, num_workers=2, persistent_workers=True)
    held = [iter(loader)]
    assert next(held[0]).item() == 0
    child = FORK.Process(target=drop, args=(held, loader))
    child.start()
    child.join()
    assert child.exitcode == 0 and all(worker.is_alive() for worker in held[0]._workers)
    assert [batch.item() for batch in held[0]] == list(range(1, 10))


# ----------------------------------------------------------------------------------------------------------- pinning


class Batch:
    """A batch of the user's own, which can be pinned."""

    def __init__(self, samples, pinned=False):
        self.samples, self.pinned = samples, pinned

    def pin_memory(self):
        if self.samples == [3]:
            raise KeyError("cannot be pinned")
        return Batch(self.samples, pinned=True)


@pytest.fixture
def accelerator(monkeypatch):
    """As much of one as a loader asks for; a tensor that is pinned on it grows by 100."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_pinned_and_one_that_cannot_be_is_an_error(accelerator, workers):
    loader = MiniDataLoader(range(10), collate_fn=Batch, num_workers=workers, pin_memory=True)
    *answers, end = outcomes(iter(loader), 11)
    assert type(end) is StopIteration
    error = answers.pop(3)
    assert type(error) is KeyError and "cannot be pinned" in str(error)
    assert [batch.samples[0] for batch in answers] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert all(batch.pinned for batch in answers)
    (tensor,) = MiniDataLoader(range(3), batch_size=3, num_workers=workers, pin_memory=True)
    assert tensor.tolist() == [100, 101, 102]


@pytest.mark.parametrize("workers", [0, 1])
def test_without_an_accelerator_batches_are_as_they_are(workers, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for kind in (DataLoader, MiniDataLoader):
        loader = kind(MANY, pin_memory=True, num_workers=workers)
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"):
            assert len(list(loader)) == 10
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    with pytest.warns(UserWarning, match="not supported on MPS"):
        list(MiniDataLoader(MANY, pin_memory=True, num_workers=workers))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_on_a_gpu(workers):
    for persistent in {False, workers > 0}:
        dataset = Samples(20, "dict", False, {})
        flags = dict(batch_size=3, pin_memory=True, num_workers=workers, persistent_workers=persistent)
        ours, its = MiniDataLoader(dataset, **flags), DataLoader(dataset, **flags)
        for _ in range(2):
            for mine, batch in zip(ours, its, strict=True):
                assert described(mine) == described(batch)
                tensors = [mine["index"], *mine["pair"]]
                assert all(tensor.is_pinned() for tensor in tensors)
                on_device = [tensor.to("cuda", non_blocking=True) for tensor in tensors]
                assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, tensors, strict=True))


# ------------------------------------------------------------------------- in a trainer, a DataLoader like torch's own


class KeepsIds(CountingModule):
    def __init__(self):
        super().__init__()
        self.ids = []

    def training_step(self, batch):
        self.ids.append(batch.tolist())
        return super().training_step(batch)


def ids_seen_by_trainers(rank, n, flags):
    """Of each loader's two epochs, the batches that this rank trained on."""
    seen = []
    for kind in (DataLoader, MiniDataLoader):
        model, trainer = KeepsIds(), quiet_trainer(devices=2, strategy="ddp", max_epochs=2)
        trainer.fit(model, kind(range(n), 4, **flags))
        assert type(trainer.train_dataloader) is kind and type(trainer.train_dataloader.sampler) is DistributedSampler
        half = len(model.ids) // 2
        seen.append([model.ids[:half], model.ids[half:]])
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "flags"), [(40, dict(shuffle=True)), (41, dict(shuffle=True, num_workers=1)), (41, dict(drop_last=True))]
)
def test_two_ranks_of_a_trainer_with_default_flags_share_the_samples_as_of_torchs_loader(n, flags):
    # The Trainer re-creates the loader, with a DistributedSampler. That pads 41 samples: one is trained twice.
    ranks = [result.value for result in run_ranks(ids_seen_by_trainers, args=(n, flags), timeout=120)]
    for epoch in range(2):
        its, ours = ([batches for rank in ranks for batches in rank[kind][epoch]] for kind in (0, 1))
        assert ours == its
        times = Counter(index for batch in ours for index in batch)
        if "drop_last" in flags:
            assert len(times) == 40 and set(times.values()) == {1}
        else:
            assert set(times) == set(range(n)) and Counter(times.values())[2] == n % 2 and max(times.values()) <= 2


def test_it_is_annotated_with_what_it_yields_as_torchs():
    for loader in (MiniDataLoader, DataLoader):
        assert typing.get_args(loader[list[torch.Tensor]]) == (list[torch.Tensor],)
