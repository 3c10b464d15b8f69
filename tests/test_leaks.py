"""Loops with a planted leak, whose holder is known, and loops that are clean."""

import collections
import functools
import gc
import itertools
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from course_lib.launch import run_ranks
from course_lib.leaks import processes, watch_growth
from course_lib.leaks.trend import growth, slowest_third
from course_lib.loader import MiniDataLoader


@pytest.fixture(autouse=True, scope="module")
def put_aside_what_the_test_session_holds():
    # Half a million objects of plugins; a look at all of them is as right, and slow.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


class Trainer:
    """One plain step, and places where a leak can be planted."""

    def __init__(self, optimizer=torch.optim.SGD, **options):
        self.model = small_model()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **options)
        self.total = 0
        self.losses = []
        self.history = {"loss": []}

    def loss(self):
        return self.model(torch.randn(4, 8)).square().mean()

    def step(self):
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


# -------------------------------------------------------------------------------------------------- planted leaks

running = 0
LEAKS = {}
NAMELESS = "a tensor in no list, dict, set or deque"


def leak(kind, *holders):
    def register(make):
        LEAKS[make.__name__] = (make, kind, holders)
        return make

    return register


@leak("graph", "tensor `total` (closure of `step`)")
def total_in_a_closure():
    trainer, total = Trainer(), 0

    def step():
        nonlocal total
        total = total + trainer.step()

    return step


@leak("graph", f"tensor `running` (global of {__name__})")
def total_in_a_global():
    trainer = Trainer()

    def step():
        global running
        running = running + trainer.step()

    return step


@leak("graph", "tensor `total` (attribute of Trainer)")
def total_in_an_attribute():
    trainer = Trainer()

    def step():
        trainer.total += trainer.step()

    return step


@leak("graph", "tensor `total` (closure of `step`)")
def total_in_place_in_an_evaluation():
    trainer, total = Trainer(), torch.zeros(())

    def step():
        nonlocal total
        total += trainer.loss()

    return step


@leak("graph", "tensor `hidden` (closure of `step`)")
def hidden_state_that_is_carried():
    # The loss of the last step reaches the whole graph as well: it was made from `hidden`, and is not to blame.
    cell, hidden, loss = nn.RNNCell(4, 4), torch.zeros(1, 4), None

    def step():
        nonlocal hidden, loss
        hidden = cell(torch.randn(1, 4), hidden)
        loss = hidden.square().mean()

    return step


@leak("graph", "list `losses` (attribute of Trainer)")
def list_of_losses():
    trainer = Trainer()
    return lambda: trainer.losses.append(trainer.step())


@leak("graph", "list `history['loss']` (attribute of Trainer)")
def list_of_losses_in_a_dict():
    trainer = Trainer()
    return lambda: trainer.history["loss"].append(trainer.step())


@leak("tensors", "list `outputs` (closure of `<lambda>`)")
def list_of_detached_tensors():
    trainer, outputs = Trainer(), []
    return lambda: outputs.append(trainer.step().detach())


@leak("tensors", NAMELESS)
def list_that_is_made_anew():
    trainer, outputs = Trainer(), []

    def step():
        nonlocal outputs
        outputs = [*outputs, trainer.step().detach()]

    return step


@leak("tensors", "dict `cache` (closure of `step`)")
def dict_by_step():
    model, cache, number = small_model(), {}, itertools.count()

    def step():
        with torch.no_grad():
            cache[next(number)] = model(torch.randn(4, 8))

    return step


@leak("objects", "dict `cache` (closure of `<lambda>`)")
def dict_of_arrays():
    # gc tracks neither arrays nor a dict of them.
    cache, number = {}, itertools.count()
    return lambda: cache.update({next(number): np.zeros(1000)})


@leak("objects", "list `rows` (closure of `step`)")
def a_dict_a_step_in_a_list():
    rows, number = [], itertools.count()

    def step():
        rows.append({"step": next(number), "prediction": np.zeros(1000)})

    return step


class LayerWithKeys:
    def __init__(self):
        self.keys = []


@leak("objects", "list `keys` (attribute of LayerWithKeys)")
def a_list_in_an_object_in_a_list():
    layers, number = [LayerWithKeys()], itertools.count()

    def step():
        layers[0].keys.append({"text": f"{next(number)}" * 1000})

    return step


@leak("tensors", "dict `embed` (closure of `<lambda>`)")
def unbounded_cache_of_tensors():
    @functools.cache
    def embed(x):
        return x * 2

    return lambda: embed(torch.randn(4, 8))


@leak("hooks", "dict `_forward_hooks` (attribute of Linear)")
def hook_registered_in_each_step():
    trainer = Trainer()

    def step():
        trainer.model[0].register_forward_hook(lambda module, args, output: None)
        trainer.step()

    return step


@leak("graph", "list `activations` (closure of `keep`)")
def activations_kept_by_a_hook():
    trainer, activations = Trainer(), []

    def keep(module, args, output):
        activations.append(output)

    trainer.model[0].register_forward_hook(keep)
    return trainer.step


@leak("tensors", "list `errors` (closure of `step`)")
def exceptions_with_their_frames():
    errors = []

    def step():
        batch = torch.randn(64, 64)
        try:
            batch @ torch.randn(3, 3)
        except RuntimeError as error:
            errors.append(error)

    return step


@leak("tensors", "list `param_groups` (attribute of SGD)")
def parameter_group_in_each_step():
    trainer = Trainer()

    def step():
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        trainer.step()

    return step


@leak("graph", NAMELESS)
def gradient_with_its_graph():
    weight = nn.Parameter(torch.ones(3))

    def step():
        (weight**3).sum().backward(create_graph=True)

    return step


@leak("graph", NAMELESS)
def cycle_of_parameter_and_gradient():
    def step():
        weight = nn.Parameter(torch.ones(3))
        (weight**3).sum().backward(create_graph=True)

    return step


@leak("tensors", NAMELESS)
def tensor_that_gets_longer():
    trainer, buffer = Trainer(), torch.zeros(0, 8)
    trainer.model.append(nn.Linear(1, 10_000))  # larger, and not to blame

    def step():
        nonlocal buffer
        trainer.step()
        buffer = torch.cat([buffer, torch.randn(64, 8)])

    return step


def longer_by(tensor, width):
    return torch.cat([tensor, torch.randn(1, 2, 1, width)], dim=2)


@leak("tensors", NAMELESS)
def keys_and_values_of_each_layer():
    cache = [[torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8)] for _ in range(3)]

    def step():
        for layer, (keys, values) in enumerate(cache):
            cache[layer] = [longer_by(keys, 8), longer_by(values, 8)]

    return step


@leak("tensors", "list `predictions` (closure of `step`)")
def arrays_that_are_views_of_tensors():
    model, predictions = small_model(), []

    def step():
        predictions.append(model(torch.randn(4, 8)).detach().cpu().numpy())

    return step


@leak("tensors", "list `predictions` (closure of `step`)")
def slices_of_arrays_in_tuples():
    predictions = []

    def step():
        predictions.append((torch.randn(64, 64).numpy()[:2], "a name"))

    return step


@leak("tensors", NAMELESS)
def tuples_in_tuples():
    chain = ()

    def step():
        nonlocal chain
        chain = (chain, torch.zeros(3))

    return step


@leak("tensors", "list without a name")
def list_in_a_generator():
    def train():
        seen = []
        while True:
            yield seen.append(torch.zeros(3))

    return functools.partial(next, train())


@pytest.mark.thorough(but=5)
@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("name", [*LEAKS])
def test_the_culprit_has_its_name(name):
    make, kind, holders = LEAKS[name]
    report = watch_growth(make())
    assert not report.ok
    assert {culprit.kind for culprit in report.culprits} == {kind}, str(report)
    for holder in holders:
        assert any(holder in culprit.holder for culprit in report.culprits), str(report)
    assert len(report.culprits) == len(holders), str(report)


class Records(Dataset):
    def __init__(self, n):
        self.records = [(f"a record of one sample, number {i}", float(i)) for i in range(n)]
        self.reads = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        self.reads += 1
        return self.records[i][1]


def batches_of(dataset, batch_size, kind=DataLoader):
    loader = kind(dataset, batch_size, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    while True:
        yield from loader


@pytest.mark.thorough(but=1)
@pytest.mark.skipif(sys.platform == "win32", reason="workers are not forked on Windows")
@pytest.mark.parametrize("kind", [DataLoader, MiniDataLoader])
def test_workers_that_copy_what_they_read(kind):
    records, batch_size = Records(200_000), 7_000
    batches, step_number = batches_of(records, batch_size, kind), itertools.count(1)

    def step():
        next(batches)
        ahead, deadline = next(step_number) + 2, time.monotonic() + 60  # 2 is the worker's prefetch_factor
        while records.reads < ahead * batch_size:
            assert time.monotonic() < deadline, "the worker has not read what it was asked for"
            time.sleep(0.001)

    (culprit,) = watch_growth(step).culprits
    assert culprit.kind == "workers"
    assert culprit.holder == "list `records` (attribute of Records), read by 1 DataLoader worker"
    # To read a record writes the counts of its tuple and its float, 96 bytes: 672 kB a batch, and more where other
    # objects lie between them.
    assert 600_000 < culprit.per_step_bytes < 1_000_000


def load_for_a_while(loaded, room):
    """What a process does that starts: it takes more and more memory, and then waits."""
    kept = []
    while loaded.value < 30:
        kept.append(bytearray(os.urandom(200 * 1024)))
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        loaded.value += 1
    room.wait()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="the process is forked")
def test_a_process_that_still_starts_is_waited_for():
    context = multiprocessing.get_context("fork")
    loaded, room, number = context.Value("i", 0), context.Event(), itertools.count(1)
    child = context.Process(target=load_for_a_while, args=(loaded, room))

    def step():
        if not child.pid:
            child.start()
        ahead = min(30, next(number))
        while loaded.value < ahead:  # each step sees it 200 KiB further
            time.sleep(0.001)

    try:
        report = watch_growth(step)
        assert report.ok, str(report)
        assert loaded.value == 30
    finally:
        room.set()
        child.join()


def spin(end):
    while not end.is_set():
        pass


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="the process is forked")
def test_a_process_that_never_rests_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(processes, "REST_SECONDS", 0.5)
    waits = []
    works = processes._works
    monkeypatch.setattr(processes, "_works", lambda child: waits.append(child.pid) or works(child))
    context = multiprocessing.get_context("fork")
    end = context.Event()
    child = context.Process(target=spin, args=(end,))
    child.start()
    try:
        watched = processes.Children()
        watched.private_bytes()
        assert child.pid in waits
        waits.clear()
        assert watched.private_bytes() > 0
        assert child.pid not in waits
    finally:
        end.set()
        child.join()


# ---------------------------------------------------------------------------------------------------- clean loops

CLEAN = []


def clean(make):
    CLEAN.append(make)
    return make


@clean
def plain_sgd():
    return Trainer().step


@clean
def adamw_with_a_schedule():
    trainer = Trainer(torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 100)
    return lambda: (trainer.step(), schedule.step())


@clean
def logs_of_numbers_and_strings():
    trainer, log, rows = Trainer(), [], {}

    def step():
        loss = trainer.step().item()
        log.append(loss)
        rows[len(log)] = {"step": len(log), "loss": loss, "message": f"step {len(log)}: {loss:.3f}"}

    return step


@clean
def bounded_deque():
    trainer, recent = Trainer(), collections.deque(maxlen=100)
    return lambda: recent.append(trainer.step().detach())


@clean
def moving_average():
    trainer = Trainer()
    average = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    smooth = torch.zeros(())

    def step():
        nonlocal smooth
        smooth = 0.9 * smooth + 0.1 * trainer.step().detach()
        for mean, parameter in zip(average, trainer.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    return step


@clean
def moving_average_module():
    trainer = Trainer()
    average = torch.optim.swa_utils.AveragedModel(trainer.model)
    return lambda: (trainer.step(), average.update_parameters(trainer.model))


@clean
def four_micro_batches():
    # Up and down: the list of losses, and the graph behind it, are let go in each fourth call.
    trainer, window = Trainer(), []

    def step():
        window.append(trainer.loss())
        if len(window) == 4:
            trainer.optimizer.zero_grad()
            torch.stack(window).mean().backward()
            trainer.optimizer.step()
            window.clear()

    return step


@clean
def cache_that_fills_up():
    model, cache, number = small_model(), {}, itertools.count()

    def step():
        key = next(number) % 8
        if key not in cache:
            cache[key] = model(torch.randn(4, 8)).detach()

    return step


@clean
def keys_and_values_of_one_sequence_after_the_other():
    number, cache = itertools.count(), []

    def step():
        if next(number) % 4 == 0:
            cache[:] = [torch.zeros(1, 2, 0, 8)] * 6
        cache[:] = [longer_by(tensor, 8) for tensor in cache]

    return step


@clean
def arrays_that_are_replaced():
    held = {}

    def step():
        held["last"] = [torch.randn(64, 64).numpy() for _ in range(3)]

    return step


@clean
def carried_state_that_is_detached():
    cell, hidden, loss = nn.RNNCell(4, 4), torch.zeros(1, 4), None

    def step():
        nonlocal hidden, loss
        hidden = cell(torch.randn(1, 4), hidden.detach())
        loss = hidden.square().mean()

    return step


@clean
def batches_of_random_sizes():
    trainer, draw, held = Trainer(), random.Random(0), {}

    def step():
        held["batch"] = torch.randn(draw.randrange(1, 100), 8)
        held["list"] = list(range(draw.randrange(100)))
        trainer.step()

    return step


@clean
def new_model_in_each_step():
    return lambda: Trainer().step()


@clean
def cycles_that_gc_collects():
    def step():
        ring = [torch.zeros(100)]
        ring.append(ring)

    return step


@clean
def exceptions_as_strings():
    errors = []

    def step():
        try:
            torch.zeros(2, 2) @ torch.zeros(3, 3)
        except RuntimeError as error:
            errors.append(str(error))

    return step


@clean
def workers_over_a_tensor():
    return functools.partial(next, batches_of(TensorDataset(torch.randn(60_000, 4)), 2_000))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
def test_a_clean_loop_is_silent(make):
    report = watch_growth(make())
    assert report.ok, str(report)
    assert str(report).startswith("nothing grew in 12 steps: ")


# ------------------------------------------------------------------------------------------------------ the trend


@pytest.mark.parametrize(
    ("series", "rate"),
    [
        (range(12), 1),
        ([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3], 0.25),
        ([step + 5 * (step % 2) for step in range(30)], 1),
        (range(13), 1),
        ([7] * 12, 0),
        ([1, 2, 3, 0] * 3, 0),
        ([min(step, 8) for step in range(12)], 0),  # full
        ([*range(6), *range(6)], 0),
        ([0] * 11 + [1], 0),  # once
        (range(12, 0, -1), 0),
    ],
)
def test_growth(series, rate):
    assert growth(list(series)) == pytest.approx(rate, abs=0.2 if rate else 0)


def test_a_burst_is_no_steady_growth():
    steady = [100 * step for step in range(12)]
    assert slowest_third(steady) == 100
    assert slowest_third([*steady[:9], 2000, 3000, 4000]) == 100
    assert slowest_third([0] * 9 + [1000, 2000, 3000]) == 0
    assert slowest_third([5, 5, 5, 9, 9, 9]) == 0


def test_noise_seldom_grows():
    draw = random.Random(0)
    assert sum(growth([draw.random() for _ in range(12)]) > 0 for _ in range(10_000)) < 100


# ------------------------------------------------------------------------------------------- numbers, words, traces


@pytest.mark.thorough
def test_the_numbers_of_a_list_of_losses():
    trainer, losses = Trainer(), []
    (culprit,) = (report := watch_growth(lambda: losses.append(trainer.step()), steps=9, warmup=1)).culprits
    assert len(losses) == 10
    assert culprit.per_step_count == 1
    assert "1 more entry a step, with 1 of shape (), float32, cpu and a graph of 7 nodes" in culprit.what
    assert report.series["graph_nodes"] == [4 + 7 * n for n in range(2, 11)]  # 4 parameters' AccumulateGrad
    assert str(report).startswith("1 thing grew in 9 steps\ngraph: list `losses` (closure of `<lambda>`) gets 1 more")
    assert "`loss.item()`" in str(report)


@pytest.mark.thorough
def test_bytes_of_what_is_held():
    outputs, views, whole = [], [], torch.zeros(1000)
    (culprit,) = watch_growth(lambda: (outputs.append(torch.zeros(100, 100)), len(outputs))).culprits
    assert 40_000 <= culprit.per_step_bytes < 41_000
    (culprit,) = watch_growth(lambda: views.append(whole[:10])).culprits
    assert culprit.per_step_bytes < 1000  # the storage was there before


def test_two_culprits_are_told_apart():
    trainer, outputs = Trainer(), []

    def step():
        trainer.total = trainer.total + trainer.step()
        outputs.append(torch.zeros(3))

    found = {culprit.kind: culprit.holder for culprit in watch_growth(step).culprits}
    assert found == {"tensors": "list `outputs` (closure of `step`)", "graph": "tensor `total` (attribute of Trainer)"}


@pytest.mark.thorough
def test_the_notebooks_own_names_are_none():
    main = sys.modules["__main__"]
    try:
        main.kept = main._ = main._5 = []
        (culprit,) = watch_growth(lambda: main.kept.append(torch.zeros(3))).culprits
        assert culprit.holder == "list `kept` (global of __main__)"
    finally:
        for name in ("kept", "_", "_5"):
            vars(main).pop(name, None)


@pytest.mark.thorough
def test_the_server_that_ranks_start_from_is_no_worker():
    before = watch_growth(lambda: None, 6, warmup=0).series["worker_bytes"]
    run_ranks(lambda rank: None, 1)  # it is there, and holds over 100 MiB of its own; multiprocessing's tracker holds 6
    after = watch_growth(lambda: None, 6, warmup=0).series["worker_bytes"]
    assert max(after) < max(before) + 20 * 2**20


@pytest.mark.thorough
def test_it_leaves_nothing_behind():
    model, losses, seen = small_model(), [], []

    def step():
        batch = torch.zeros(3)
        seen.append(weakref.ref(batch))
        losses.append(model(torch.zeros(4, 8)).sum())

    states = random.getstate(), torch.get_rng_state()
    assert not watch_growth(step).ok
    assert gc.isenabled() and gc.get_freeze_count() > 0  # as the fixture wants it
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert [ref() for ref in seen] == [None] * 15
    held = [weakref.ref(loss) for loss in losses]
    losses.clear()
    assert [ref() for ref in held] == [None] * 15


@pytest.mark.thorough
def test_modules_are_not_asked_what_they_hold(monkeypatch):
    # gc.get_referents(_asyncio) makes Python before 3.12.6 hang in its next collection (python/cpython #122695).
    asked, get_referents = set(), gc.get_referents

    def recorded(*objects):
        asked.update(map(type, objects))
        return get_referents(*objects)

    monkeypatch.setattr(gc, "get_referents", recorded)
    gc.unfreeze()  # modules are among what the fixture has put aside
    try:
        watch_growth(lambda: None, steps=6)
    finally:
        gc.freeze()
    assert types.CellType in asked
    assert not [kind for kind in asked if issubclass(kind, types.ModuleType)]


FRESH = """
import gc
kept = []
import torch
from course_lib.leaks import watch_growth
from course_lib.leaks.census import frozen_by_caller

print(frozen_by_caller())
watch_growth(lambda: None, steps=6)
try:
    watch_growth(lambda: 1 / 0, steps=6, warmup=0)
except ZeroDivisionError:
    print(frozen_by_caller())
print(watch_growth(lambda: kept.append(torch.zeros(3))).culprits[0].holder)
gc.freeze()
print(frozen_by_caller())
"""


@pytest.mark.thorough
def test_a_second_watch_sees_what_is_older_than_the_first():
    # In a process of its own, as it comes: a few releases of Python have objects frozen from the start.
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "False", "list `kept` (global of __main__)", "True"]


# ------------------------------------------------------------------------------------------------------- bad input


def test_an_error_in_step_comes_through_and_keeps_nothing():
    number, error = itertools.count(), KeyError("mine")

    def step():
        if next(number) == 5:
            raise error

    with pytest.raises(KeyError) as raised:
        watch_growth(step)
    assert raised.value is error
    containers = [o for o in gc.get_objects() if type(o).__name__ == "Census"]
    assert not any(census.containers() or census.holders or census.tensors_before() for census in containers)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(step=torch.zeros(())), TypeError, "step must be callable without arguments, got tensor(0.): give the"),
        (dict(step=print, steps=5), ValueError, "steps must be an int of at least 6, got 5"),
        (dict(step=print, steps=12.0), ValueError, "steps must be an int of at least 6, got 12.0"),
        (dict(step=print, warmup=-1), ValueError, "warmup must be an int of at least 0, got -1"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        watch_growth(**arguments)


@pytest.mark.gpu
def test_cuda_memory():
    model, outputs = small_model().cuda(), []
    report = watch_growth(lambda: outputs.append(model(torch.randn(256, 8, device="cuda")).detach()))
    (culprit,) = report.culprits
    assert "1 of shape (256, 1), float32, cuda:0" in culprit.what
    assert report.series["tensor_bytes"][-1] - report.series["tensor_bytes"][0] == 11 * 1024
    assert watch_growth(lambda: model(torch.randn(256, 8, device="cuda")).sum().backward()).ok
