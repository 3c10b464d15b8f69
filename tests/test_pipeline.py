"""What a trace records against the loader that it is of, and the model against a clock that goes tick by tick."""

import math
import os
import time
import traceback
from collections import Counter, deque, namedtuple
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from course_lib.pipeline import predict_throughput, simulate_pipeline, trace
from course_lib.resume import ResumableDataLoader
from tests.children import children

# ------------------------------------------------------------------------------------------------------- the model

ticks = st.integers(0, 6)
times = ticks | st.lists(ticks, min_size=1, max_size=4)
pipelines = st.fixed_dictionaries(
    {
        "load_s": times,
        "compute_s": times,
        "workers": st.integers(0, 4),
        "prefetch": st.integers(1, 3),
        "batches": st.integers(1, 24),
    }
)


def at(seconds, batch):
    return seconds[batch % len(seconds)] if isinstance(seconds, list) else seconds


def tick_by_tick(load_s, compute_s, workers, prefetch, batches):
    """(worker, fetch start, fetch end, wait start, delivery) of each batch, and the most that one worker was given."""
    queues = [deque() for _ in range(max(1, workers))]
    busy = [None] * len(queues)  # (batch, when it will be done)
    turn, to_deal = cycle(range(len(queues))), iter(range(batches))
    dealt, started, ended, waited, delivered, most = {}, {}, {}, {}, {}, 0

    def deal():
        nonlocal most
        for batch in to_deal:
            dealt[batch] = next(turn)
            queues[dealt[batch]].append(batch)
            for worker in range(len(queues)):
                most = max(most, sum(dealt[b] == worker and b not in delivered for b in dealt))
            return

    for _ in range(prefetch * workers):
        deal()
    now, computing_until = 0, 0
    while len(delivered) < batches:
        moved = True
        while moved:  # what takes no time happens within a tick
            moved = False
            wanted = len(delivered)
            if now >= computing_until and wanted < batches:
                if wanted not in waited:
                    waited[wanted] = now
                    if workers == 0:
                        deal()
                    moved = True
                if wanted in ended:
                    delivered[wanted] = now
                    computing_until = now + at(compute_s, wanted)
                    if workers:
                        deal()
                    moved = True
            for worker, queue in enumerate(queues):
                if busy[worker] is not None and busy[worker][1] == now:
                    ended[busy[worker][0]] = now
                    busy[worker] = None
                    moved = True
                if busy[worker] is None and queue:
                    started[queue[0]] = now
                    busy[worker] = (queue[0], now + at(load_s, queue.popleft()))
                    moved = True
        now += 1
    events = [(started[b], ended[b], waited[b], delivered[b]) for b in range(batches)]
    return [(dealt[b] if workers else None, *event) for b, event in enumerate(events)], most


def events_of(records):
    return [(r.worker, r.fetch_start_s, r.fetch_end_s, r.wait_start_s, r.delivered_s) for r in records]


@given(pipelines)
def test_the_model_is_the_pipeline_tick_by_tick(pipeline):
    events, most = tick_by_tick(**pipeline)
    assert events_of(simulate_pipeline(**pipeline)) == events
    assert most <= (pipeline["prefetch"] if pipeline["workers"] else 1)


@given(pipelines)
def test_batches_are_delivered_in_order_after_they_were_fetched(pipeline):
    records = simulate_pipeline(**pipeline)
    assert [record.batch for record in records] == list(range(pipeline["batches"]))
    assert all(earlier.delivered_s <= later.delivered_s for earlier, later in pairwise(records))
    for record in records:
        assert record.fetch_start_s <= record.fetch_end_s <= record.delivered_s
        assert record.waited_s == record.delivered_s - record.wait_start_s >= 0


@given(pipelines)
def test_a_worker_is_never_given_more_than_its_prefetch(pipeline):
    records = simulate_pipeline(**pipeline)
    for now in (record.fetch_start_s for record in records):
        held = Counter(record.worker for record in records if record.fetch_start_s <= now < record.delivered_s)
        assert max(held.values(), default=0) <= (pipeline["prefetch"] if pipeline["workers"] else 1)


@given(times, times, st.integers(1, 24))
def test_without_workers_all_times_add_up(load_s, compute_s, batches):
    records = simulate_pipeline(load_s, compute_s, workers=0, batches=batches)
    before = [sum(at(load_s, b) + at(compute_s, b) for b in range(batch)) for batch in range(batches)]
    assert [record.wait_start_s for record in records] == before
    assert [record.waited_s for record in records] == [at(load_s, b) for b in range(batches)]


@given(pipelines)
def test_more_prefetching_is_never_slower(pipeline):
    records = simulate_pipeline(**pipeline)
    more = simulate_pipeline(**pipeline | {"prefetch": pipeline["prefetch"] + 1})
    assert all(a.delivered_s >= b.delivered_s for a, b in zip(records, more, strict=True))


def test_prefetching_evens_out_a_slow_batch():
    # Of four batches, three take 1 s and one takes 5 s to load: 2 s on average, as the step does.
    seconds = [
        simulate_pipeline([1, 1, 1, 5], 2, workers=1, prefetch=prefetch, batches=4000)[-1].delivered_s
        for prefetch in (1, 2, 3, 4)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1] == pytest.approx(8000, abs=8)


@pytest.mark.thorough
@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(0, 4), st.integers(1, 3), st.sampled_from([10, 100, 1000]))
def test_the_rate_of_an_epoch_nears_the_closed_form(load, compute, workers, prefetch, batches):
    steady = batches / predict_throughput(load, compute, workers)
    seconds = simulate_pipeline(load, compute, workers, prefetch, batches=batches)[-1].delivered_s + compute
    # An epoch has the fill and the last step to itself, however long it is.
    assert steady * (1 - 1e-9) <= seconds <= (steady + load + compute) * (1 + 1e-9)


def test_nothing_that_takes_time_is_infinitely_fast():
    assert predict_throughput(0, 0, 0) == predict_throughput(0, 0, 3) == math.inf
    assert predict_throughput(torch.tensor(0.5), 0, 1) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_s": -1}, "load_s must be seconds, finite and at least 0, got -1"),
        ({"load_s": []}, "load_s must be .* got"),
        ({"load_s": [1.0, math.inf]}, "load_s must be .* got"),
        ({"compute_s": math.nan}, "compute_s must be .* got nan"),
        ({"compute_s": None}, "compute_s must be .* got None"),
        ({"workers": -1}, "workers must be an int of at least 0, got -1"),
        ({"prefetch": 0}, "prefetch must be a positive int, got 0"),
        ({"batches": 0}, "batches must be a positive int, got 0"),
    ],
)
def test_bad_arguments_of_the_model_are_named(arguments, message):
    arguments = {"load_s": 1, "compute_s": 1, "workers": 1, "prefetch": 1, "batches": 3} | arguments
    with pytest.raises(ValueError, match=message):
        simulate_pipeline(**arguments)
    if arguments["prefetch"] and arguments["batches"]:  # these two are the simulation's alone
        with pytest.raises(ValueError, match=message):
            predict_throughput(*(arguments[name] for name in ("load_s", "compute_s", "workers")))


# -------------------------------------------------------------------------------------------------------- the trace


class Squares(Dataset):
    def __init__(self, n=10):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index * index


class SquaresAtOnce(Squares):
    def __getitem__(self, index):
        raise AssertionError("a batch was to be fetched at once")

    def __getitems__(self, indices):
        return [index * index for index in indices]


class Stream(IterableDataset):
    """0 … n - 1, dealt to the workers; `first` is set in each worker, or left."""

    def __init__(self, n=10, first=0):
        self.n, self.first = n, first

    def __iter__(self):
        info = get_worker_info()
        id, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.first + id, self.n, workers))


class StreamWithLength(Stream):
    def __len__(self):
        return self.n


Pair = namedtuple("Pair", ["value", "negative"])


def as_pair(samples):
    return Pair(torch.tensor(samples), -torch.tensor(samples))


def as_dict(samples):
    return {"value": torch.tensor(samples), "names": [str(sample) for sample in samples]}


def start_at_three(worker):
    get_worker_info().dataset.first = 3


LOADERS = {
    "map": lambda **kw: DataLoader(Squares(), batch_size=3, **kw),
    "shuffled": lambda **kw: DataLoader(
        Squares(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0), **kw
    ),
    "list": lambda **kw: DataLoader(list("abcde"), batch_size=2, **kw),
    "at once": lambda **kw: DataLoader(SquaresAtOnce(), batch_size=3, drop_last=True, **kw),
    "single samples": lambda **kw: DataLoader(Squares(4), batch_size=None, **kw),
    "batch sampler": lambda **kw: DataLoader(
        Squares(), batch_sampler=[[0], [1, 2, 3], [], [9, 9]], collate_fn=list, **kw
    ),
    "namedtuple": lambda **kw: DataLoader(Squares(), batch_size=4, collate_fn=as_pair, **kw),
    "dict": lambda **kw: DataLoader(Squares(), batch_size=4, collate_fn=as_dict, **kw),
    "stream": lambda **kw: DataLoader(Stream(), batch_size=3, **kw),
    "stream, short batch dropped": lambda **kw: DataLoader(Stream(), batch_size=3, drop_last=True, **kw),
    "stream of samples": lambda **kw: DataLoader(StreamWithLength(5), batch_size=None, **kw),
    "empty": lambda **kw: DataLoader([], batch_sampler=[], **kw),
    "resumable": lambda **kw: ResumableDataLoader(Squares(), batch_size=3, **kw),
}


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = children()
    yield
    assert children() <= before


def check_times(records):
    for record in records:
        assert 0 <= record.fetch_start_s <= record.fetch_end_s <= record.delivered_s
        assert 0 <= record.wait_start_s <= record.delivered_s
        assert record.waited_s >= 0
    assert all(earlier.delivered_s <= later.wait_start_s for earlier, later in pairwise(records))


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize(
    ("kind", "workers"),
    [(kind, {"num_workers": workers}) for kind in LOADERS for workers in (0, 2)]
    + [(kind, {"num_workers": 2, "persistent_workers": True}) for kind in ("map", "stream")],
)
def test_a_trace_delivers_the_same_batches(kind, workers):
    loader, seen = LOADERS[kind](**workers), []
    attributes = dict(vars(loader))
    records = trace(loader, compute=seen.append)
    plain = list(LOADERS[kind](**workers))
    assert [type(batch) for batch in seen] == [type(batch) for batch in plain]
    assert repr(seen) == repr(plain)
    assert [record.batch for record in records] == list(range(len(plain)))
    check_times(records)
    if workers["num_workers"]:
        assert [record.worker for record in records] == [batch % 2 for batch in range(len(plain))]
        for worker in (0, 1):
            of_worker = [record for record in records if record.worker == worker]
            assert all(earlier.fetch_end_s <= later.fetch_start_s for earlier, later in pairwise(of_worker))
    else:
        assert {record.worker for record in records} <= {None}
        assert all(record.wait_start_s <= record.fetch_start_s for record in records)
    assert vars(loader) == attributes and all(vars(loader)[name] is attributes[name] for name in attributes)


def test_what_the_step_takes_is_no_waiting():
    spent = []

    def compute(batch):
        begin = time.perf_counter()
        sum(range(1000))
        spent.append(time.perf_counter() - begin)

    records = trace(DataLoader(Squares(), batch_size=2, num_workers=1), compute=compute)
    assert len(records) == len(spent) == 5
    for (earlier, later), seconds in zip(pairwise(records), spent, strict=False):
        assert later.wait_start_s - earlier.delivered_s >= seconds


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_split_by_the_attributes_that_worker_init_fn_sets(workers):
    init = dict(num_workers=2, worker_init_fn=start_at_three) if workers else {}
    loader, seen = DataLoader(Stream(), batch_size=2, **init), []
    trace(loader, compute=lambda batch: seen.extend(batch.tolist()))
    assert sorted(seen) == list(range(3 if workers else 0, 10))
    assert loader.dataset.first == 0


class AsksBack(DataLoader):
    """A subclass that asks for its length and its dataset's attributes, which trace stands in for."""

    def __iter__(self):
        assert not hasattr(self.dataset, "missing")
        if isinstance(self.dataset, IterableDataset):
            with pytest.raises(TypeError, match=r"has no len\(\)"):
                len(self)
        else:
            assert (len(self), self.dataset.n, self.dataset[2]) == (3, 10, 4)
        return super().__iter__()


@pytest.mark.parametrize("dataset", [Squares(), Stream()])
def test_a_subclass_finds_the_dataset_as_it_is(dataset):
    assert len(trace(AsksBack(dataset, batch_size=4))) == 3


@pytest.mark.thorough
def test_a_worker_that_is_spawned_gets_the_dataset_pickled():
    loader, seen = DataLoader(range(10), batch_size=4, num_workers=1, multiprocessing_context="spawn"), []
    records = trace(loader, compute=lambda batch: seen.extend(batch.tolist()))
    assert seen == list(range(10))
    assert [record.worker for record in records] == [0, 0, 0]
    check_times(records)


class Pinned:
    def __init__(self, samples):
        self.samples, self.pinned = samples, False

    def pin_memory(self):
        self.pinned = True
        return self


def test_batches_are_pinned_on_their_way(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for workers in (0, 2):
        loader, seen = DataLoader(Squares(4), 2, collate_fn=Pinned, pin_memory=True, num_workers=workers), []
        check_times(trace(loader, compute=seen.append))
        assert [(batch.samples, batch.pinned) for batch in seen] == [([0, 1], True), ([4, 9], True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trace_of_few_batches_ends_its_workers(workers):
    loader, seen = DataLoader(Squares(1000), num_workers=workers, persistent_workers=workers > 0), []
    before = children()
    records = trace(loader, compute=seen.append, batches=np.int64(3))
    assert children() <= before
    assert [batch.item() for batch in seen] == [0, 1, 4] and len(records) == 3
    assert len(trace(DataLoader(Squares(3)), batches=100)) == 3


def test_the_loaders_own_workers_go_on():
    loader = DataLoader(Squares(4), batch_size=2, num_workers=2, persistent_workers=True)
    first = iter(loader)
    assert next(first).tolist() == [0, 1]
    own = {worker.pid for worker in first._workers}
    assert len(trace(loader)) == 2
    assert next(first).tolist() == [4, 9]
    assert loader._iterator is first and own <= children()
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 9]]
    assert {worker.pid for worker in loader._iterator._workers} == own


def test_a_resumable_loader_moves_on_by_the_epochs_that_were_read():
    loader, twin = (ResumableDataLoader(range(10), batch_size=3, shuffle=True) for _ in range(2))
    seen = []
    trace(loader, batches=2)  # an epoch that is left begins again
    trace(loader, compute=lambda batch: seen.append(batch.tolist()))
    assert [seen, [b.tolist() for b in loader]] == [[b.tolist() for b in twin] for _ in range(2)]
    assert loader.state_dict() == twin.state_dict()


def test_batches_out_of_order_name_the_worker_that_fetched_them():
    loader, seen = DataLoader(Stream(40), batch_size=2, num_workers=2, in_order=False), []
    records = trace(loader, compute=seen.append)
    assert [record.batch for record in records] == list(range(20))
    assert [record.worker for record in records] == [batch[0].item() % 2 for batch in seen]


class Failing(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 5:
            raise KeyError("the sample that fails")
        return index


class FailingStream(IterableDataset):
    def __iter__(self):
        yield from range(5)
        raise KeyError("the sample that fails")


@pytest.mark.parametrize("make", [DataLoader, ResumableDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_comes_through_and_ends_the_workers(make, workers):
    before, seen = children(), []
    with pytest.raises(KeyError, match="the sample that fails") as caught:
        trace(make(Failing(), batch_size=2, num_workers=workers), compute=seen.append)
    # The error is still held here, as a notebook holds its last one.
    assert children() <= before and [batch.tolist() for batch in seen] == [[0, 1], [2, 3]]
    where = "in DataLoader worker process 0" if workers else "in __getitem__"
    assert where in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_stream_or_of_the_step_ends_the_workers(workers):
    before = children()
    with pytest.raises(KeyError, match="the sample that fails") as of_stream:
        trace(DataLoader(FailingStream(), num_workers=workers))
    with pytest.raises(ZeroDivisionError) as of_step:
        trace(DataLoader(Failing(), num_workers=workers), compute=lambda batch: 1 / 0)
    assert children() <= before and of_stream and of_step


def exit_at_nine(samples):
    if 9 in samples:
        os._exit(3)
    return samples


@pytest.mark.thorough
def test_a_worker_that_dies_is_reported_by_torch():
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        trace(DataLoader(Squares(), batch_size=2, num_workers=1, collate_fn=exit_at_nine))


class AsText(DataLoader):
    def __iter__(self):
        return (str(batch) for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "loader must be a torch.utils.data.DataLoader, got list"),
        (AsText(Squares()), "AsText delivers something else than its collate_fn returned: trace the DataLoader"),
        (DataLoader(IterableWrapper([1])), "loader must read a Dataset, got the datapipe"),
    ],
)
def test_what_is_no_loader_of_its_own_batches_is_refused(loader, message):
    with pytest.raises(TypeError, match=message):
        trace(loader)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_batches_must_be_a_positive_int(batches):
    with pytest.raises(ValueError, match=f"batches must be a positive int, got {batches}"):
        trace(DataLoader(Squares()), batches=batches)
