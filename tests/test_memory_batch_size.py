"""find_batch_size on devices of simulated memory, against the largest size that measurably fits."""

import copy
import functools
import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from workbook.ch03_finder_comparison import (
    FINDERS,
    SimulatedDevice,
    TruePeaks,
    compare,
    halving,
    lightning,
    make_batch,
    make_model,
    make_optimizer,
    ours,
    spread_limits,
    table,
)

from course_lib.launch import RankError, run_ranks
from course_lib.memory import batch_size_search
from course_lib.memory.batch_size import find_batch_size, find_batch_sizes
from course_lib.memory.measuring import measure_peak
from course_lib.memory.predicting import predict_peak
from tests import effort

PEAKS = TruePeaks()


def limits(number):
    """From what holds one sample to what holds some hundreds, off the peaks of whole sizes."""
    return spread_limits(PEAKS(1) + 1, 200_000, number)


@pytest.fixture
def remembered(monkeypatch):
    """A size is predicted once for all limits."""
    known = {}

    def predict(*args, batch_size, **options):
        if batch_size not in known:
            known[batch_size] = predict_peak(*args, batch_size=batch_size, **options)
        return known[batch_size]

    monkeypatch.setattr(batch_size_search, "predict_peak", predict)


def fit(limit, **options):
    model = make_model()
    return find_batch_size(model, make_batch, make_optimizer(model), limit_bytes=limit, **options)


# ------------------------------------------------------------------------------------------------ how good it is


@pytest.mark.thorough
def test_fifty_limits(remembered):
    number = effort.cases(8, 50)
    outcomes = compare(limits(50)[:number], {"find_batch_size": ours}, PEAKS)["find_batch_size"]
    assert min(outcome.share for outcome in outcomes) >= 0.95
    assert all(outcome.answer <= outcome.largest and outcome.answer_ran for outcome in outcomes)
    assert max(len(outcome.trials) for outcome in outcomes) <= 3
    assert sum(outcome.errors for outcome in outcomes) == 0
    assert len({outcome.answer for outcome in outcomes}) > 0.8 * number and outcomes[0].answer == 1


def test_the_peak_moves_from_the_optimizers_step_to_the_forward():
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = find_batch_size(model, lambda n: torch.ones(n, 16), optimizer, limit_bytes=4 * 2**20)
    assert len(fitted.trials) == 1
    assert fitted.measured_bytes == fitted.predicted_bytes
    assert 0.999 * 4 * 2**20 < fitted.measured_bytes <= 4 * 2**20


def test_the_result_in_words():
    assert str(fit(PEAKS(100) + 7)).splitlines() == [
        f"batch size 100: measured {PEAKS(100) / 1024:.1f} KiB, predicted {PEAKS(100) / 1024:.1f} KiB, "
        f"limit {(PEAKS(100) + 7) / 1024:.1f} KiB",
        f"  tried 100: {PEAKS(100) / 1024:.1f} KiB",
    ]


@pytest.mark.parametrize(("multiple_of", "expected"), [(1, 100), (8, 96), (64, 64), ("power of two", 64)])
def test_multiples(remembered, multiple_of, expected):
    assert fit(PEAKS(100), multiple_of=multiple_of).batch_size == expected


def test_largest_size(remembered):
    fitted = fit(10**9, max_batch_size=48)
    assert fitted.batch_size == 48
    assert fit(10**9, max_batch_size=1).batch_size == 1
    assert fit(PEAKS(1), max_batch_size=2).batch_size == 1
    assert fit(PEAKS(2), max_batch_size=3).batch_size == 2


def test_a_table_per_shape():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = find_batch_sizes([8, 16], model, lambda n, side: torch.ones(n, 1, side, side), optimizer, limit_bytes=10**6)
    assert found[8].batch_size > 4 * found[16].batch_size
    assert all(0.95 * 10**6 < fitted.measured_bytes <= 10**6 for fitted in found.values())
    options = dict(limit_bytes=10**6, max_batch_size=2)
    of_a_list = find_batch_sizes([[1, 8, 8]], model, lambda n, shape: torch.ones(n, *shape), optimizer, **options)
    assert of_a_list[1, 8, 8].batch_size == 2


def test_without_a_limit_a_fraction_of_what_is_free(remembered):
    fitted = fit(None, fraction=1e-4, max_batch_size=4)
    assert 10**5 < fitted.limit_bytes < 10**9


# --------------------------------------------------------------------------------------------- where prediction fails


class Hidden(torch.autograd.Function):
    """Holds real memory that a prediction does not see."""

    @staticmethod
    def forward(ctx, x, factor, constant):
        if type(x) is torch.Tensor:
            ctx.kept = torch.ones(int(x.numel() * factor) + constant)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(("factor", "constant"), [(0.3, 0), (0, 5000), (3, 0), (0.2, 3000)])
def test_more_than_predicted_is_corrected_and_said(factor, constant):
    model = make_model()
    optimizer = make_optimizer(model)

    def loss(model, batch):
        return F.cross_entropy(Hidden.apply(model(batch[0]), factor, constant), batch[1])

    fitted = find_batch_size(model, make_batch, optimizer, loss_fn=loss, limit_bytes=400_000)
    assert len(fitted.trials) <= 3
    assert 0.95 * 400_000 < fitted.measured_bytes <= 400_000
    assert fitted.predicted_bytes < fitted.measured_bytes


def test_an_error_that_nobody_could_foresee_is_caught_counted_and_cleaned_up():
    model = make_model()
    optimizer = make_optimizer(model)

    def loss(model, batch):
        if len(batch[0]) > 60 and type(batch[0]) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 EiB.")
        return F.cross_entropy(model(batch[0]), batch[1])

    fitted = find_batch_size(model, make_batch, optimizer, loss_fn=loss, limit_bytes=PEAKS(100))
    assert [(trial.batch_size, trial.ran) for trial in fitted.trials] == [(100, False), (50, True)]
    assert fitted.batch_size == 50 and "tried 100: out of memory" in str(fitted)
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state


def test_a_step_that_cannot_be_predicted_is_refused():
    def reading(model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1])
        return total if total.item() < 1e9 else total * 0

    with pytest.raises(RuntimeError, match=r"the step reads a value.*use measure_peak"):
        fit(PEAKS(100), loss_fn=reading)
    lstm = nn.LSTM(8, 16, batch_first=True)
    with pytest.raises(RuntimeError, match=r"recurrent layer.*use measure_peak"):
        find_batch_size(lstm, lambda size: torch.randn(size, 12, 8), make_optimizer(lstm), limit_bytes=2**21)


@pytest.mark.thorough
@pytest.mark.parametrize("indices", ["ai,bi->ab", "ai,bi,ci->abc"])
def test_a_step_whose_bytes_grow_faster_than_the_batch(indices):
    first, limit = nn.Linear(64, 8), 30 * 2**20

    def loss(model, batch):
        rows = model(batch)
        return torch.einsum(indices, *[rows] * (indices.count(",") + 1)).square().mean()

    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    fitted = find_batch_size(first, lambda size: torch.randn(size, 64), optimizer, loss_fn=loss, limit_bytes=limit)

    def measured(size):
        return measure_peak(lambda: loss(first, torch.randn(size, 64)).backward(), model=first).peak_bytes

    assert fitted.measured_bytes <= limit < measured(int(fitted.batch_size * 1.1) + 1)
    assert len(fitted.trials) <= 3
    assert max(trial.nbytes for trial in fitted.trials) < 1.2 * limit


def test_batches_of_many_lengths_are_refused():
    model, lengths = nn.Linear(8, 8), itertools.cycle([15, 15, 15, 10, 19])  # the first ones are equal by chance
    with pytest.raises(ValueError, match=r"differ in shape .*of the longest samples"):
        find_batch_size(model, lambda n: torch.ones(n, next(lengths), 8), make_optimizer(model), limit_bytes=200_000)


def test_a_bug_of_the_step_comes_through():
    with pytest.raises(RuntimeError, match=r"must have same reduction dim, but got \[2, 4\]"):
        find_batch_size(model := nn.Linear(3, 1), lambda n: torch.ones(n, 4), make_optimizer(model))


# ----------------------------------------------------------------------------------------------- nothing is left behind


class Everything(nn.Module):
    """Parameters, one of them frozen, buffers of both kinds, dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.seen = 0

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor in its place
        self.seen = self.seen + len(x)
        return self.body(x) * self.frozen


def everything_of(model, optimizer):
    own = vars(optimizer)["param_groups"]
    return [
        {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        model.seen,
        copy.deepcopy(optimizer.state_dict()),
        vars(optimizer).get("_opt_called"),
        [{key: value for key, value in group.items() if key != "params"} for group in own],
        torch.get_rng_state(),
        list(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
        torch.is_grad_enabled(),
    ]


def equal(a, b):
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_a_factory_in_the_models_place_is_named():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model must be the nn\.Module itself.*got function"):
        find_batch_size(lambda: nn.Linear(2, 2), lambda size: torch.ones(size, 2), optimizer)


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("meddling", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), capturable=False, foreach=False),
        functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    ],
)
def test_everything_is_as_before(meddling, steps_before, make):
    torch.manual_seed(1)
    model = Everything()
    optimizer = make(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # notes on the optimizer that it has stepped
    for _ in range(steps_before):
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    model.body[0].zero_grad(set_to_none=True)
    model.body[2].eval()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    before = everything_of(model, optimizer)

    def loss(tried, batch):
        if meddling and tried is model:  # not a prediction's copy
            meddle()
        return tried(batch).square().sum()

    def meddle():
        model.train()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
        optimizer.param_groups[0]["extra"] = 1
        random.random(), np.random.rand()  # noqa: NPY002
        optimizer.zero_grad()
        model.body[1].weight.data.add_(1)

    with torch.no_grad():
        before[-1] = False
        find_batch_size(model, lambda n: torch.randn(n, 6), optimizer, loss_fn=loss, limit_bytes=50_000)
        assert all(map(equal, before, everything_of(model, optimizer)))
    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(tensors, after, strict=True))


# ------------------------------------------------------------------------------------------------------------ all ranks


def fitted_on(rank, limits, fails=None):
    model = make_model()
    if fails == "ddp":
        model = nn.parallel.DistributedDataParallel(model)

    def batch(size):
        if fails == rank and size > 4:
            raise KeyError("no such file")
        return make_batch(size)

    fitted = find_batch_size(model, batch, make_optimizer(model), limit_bytes=limits[rank])
    dist.barrier()
    return fitted.batch_size, fitted.limit_bytes, len(fitted.trials)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("fails", [None, "ddp"])
def test_two_ranks_of_different_limits_find_the_smaller_answer(fails):
    small, large = PEAKS(70), PEAKS(300)
    results = run_ranks(fitted_on, 2, args=((large, small), fails))
    assert [result.value for result in results] == [(70, large, 1), (70, small, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limits", "fails", "error", "cause"),
    [
        ((10**6, 10**6), 1, "KeyError", "rank 1 raised, whose own message"),
        ((10**6, 100), None, "MemoryError", "rank 1 raised, whose own message"),
        ((0, 10**6), None, "limit_bytes must be a positive int, got 0", "rank 0 raised, whose own message"),
    ],
)
def test_where_one_rank_raises_all_do(limits, fails, error, cause):
    with pytest.raises(RankError) as caught:
        run_ranks(fitted_on, 2, args=(limits, fails), timeout=30)
    told = str(caught.value)
    assert error in told and cause in told and all(report.state == "raised" for report in caught.value.reports)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_bytes": 0}, "limit_bytes must be a positive int, got 0"),
        ({"limit_bytes": -5}, "limit_bytes must be a positive int, got -5"),
        ({"fraction": 0}, "fraction must be above 0 and at most 1, got 0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1, got 1.5"),
        ({"max_batch_size": 0}, "max_batch_size must be a positive int, got 0"),
        ({"multiple_of": 0}, "multiple_of must be a positive int, got 0"),
        ({"batch_fn": lambda n: make_batch(8)}, r"same shapes for sizes 2 and 4 \(\(8, 32\), …\)"),
        ({"batch_fn": lambda n: make_batch(min(n, 30))}, "If its data ran out, set max_batch_size"),
        ({"batch_fn": 8}, "batch_fn must be a function of the size, got int"),
        ({"batch_fn": DataLoader(range(9))}, r"a function of the size, got DataLoader: .*collate_fn\(\[longest_sample"),
        ({"optimizer": [make_optimizer]}, r"optimizer must be one torch\.optim\.Optimizer, got list"),
        ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "got LBFGS, which evaluates the loss several times"),
    ],
)
def test_bad_arguments(options, message):
    model = make_model()
    options = {"batch_fn": make_batch, "optimizer": make_optimizer(model), "limit_bytes": 10**6} | options
    with pytest.raises(ValueError, match=message):
        find_batch_size(model, **options)


def test_an_optimizer_of_something_else():
    with pytest.raises(ValueError, match="optimizer has 4 parameters that model doesn't hold"):
        find_batch_size(make_model(), make_batch, make_optimizer(make_model()), limit_bytes=10**6)


def test_not_even_one_sample_fits():
    with pytest.raises(MemoryError, match="not even a batch of 1 fits into 10,000 B") as caught:
        fit(10_000)
    assert "parameters" in str(caught.value) and "optimizer" in str(caught.value)


def test_no_multiple_fits():
    with pytest.raises(MemoryError, match="the largest batch that fits is 5, and multiple_of=8"):
        fit(PEAKS(5), multiple_of=8)


# ------------------------------------------------------------------------------------------------- other finders


@pytest.mark.thorough
def test_the_comparison():
    outcomes = compare([PEAKS(6) + 100], FINDERS, PEAKS)
    ours, power, binsearch, retry = (outcomes[name][0] for name in FINDERS)
    assert [o.answer for o in (ours, power, binsearch, retry)] == [6, 4, 5, 4]
    assert [len(o.trials) for o in (ours, power, binsearch, retry)] == [1, 3, 5, 12]
    assert [o.errors for o in (ours, power, binsearch, retry)] == [0, 1, 2, 11]
    assert table(outcomes).splitlines() == [
        "finder                 trials errors   answer / largest answer was run",
        "find_batch_size           1.0    0.0   1.00 … 1.00      1 of 1",
        "Lightning, power          3.0    1.0   0.67 … 0.67      1 of 1",
        "Lightning, binsearch      5.0    2.0   0.83 … 0.83      0 of 1",
        "retry loop, halving      12.0   11.0   0.67 … 0.67      1 of 1",
    ]


@pytest.mark.thorough
def test_lightnings_doubling_returns_sizes_that_it_never_tried():
    # The next power of two is taken as the answer, untried, once it reaches max_val, and max_val does not cap it.
    device = SimulatedDevice(PEAKS(12))
    assert lightning(device, max_val=10) == 16
    assert device.trials() == [(2, True), (4, True), (8, True)]
    # The first trial runs on the loader that is there, whatever init_val says.
    device = SimulatedDevice(PEAKS(20))
    assert lightning(device, init_val=512, own_size=4) == 512
    assert device.trials() == [(4, True), (1024, False)]


class DrawsByItself(nn.Module):
    """Drops samples by generators of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.python, self.numpy = nn.Linear(8, 4), random.Random(1), np.random.default_rng(1)
        self.generator, self.old = torch.Generator().manual_seed(1), np.random.RandomState(1)

    def forward(self, x):
        kept = torch.rand(len(x), 1, generator=self.generator) > 0.1
        return self.linear(x) * kept + self.python.random() + self.numpy.random() + self.old.rand()

    def draws(self):
        drawn = self.python.random(), self.numpy.random(), self.old.rand()
        return drawn, torch.rand((), generator=self.generator).item()


def test_a_modules_own_generators_stand_where_they_stood():
    model = DrawsByItself()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted = find_batch_size(
        model, lambda n: (torch.ones(n, 8), torch.zeros(n, dtype=torch.long)), optimizer, limit_bytes=2**20
    )
    assert fitted.measured_bytes == fitted.predicted_bytes and len(fitted.trials) == 1
    assert model.draws() == DrawsByItself().draws()


def test_halving_answers_with_a_size_that_ran():
    device = SimulatedDevice(PEAKS(20))
    assert halving(device, 64) == 16 and device.trials() == [(64, False), (32, False), (16, True)]


@pytest.mark.gpu
def test_on_a_gpu():
    limit = 2 * 2**30
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = find_batch_size(
        model,
        lambda n: (torch.ones(n, 512, device="cuda"), torch.zeros(n, dtype=torch.long, device="cuda")),
        optimizer,
        limit_bytes=limit,
    )
    assert 0.9 * limit < fitted.measured_bytes <= limit
    assert len(fitted.trials) <= 3 and all(trial.ran for trial in fitted.trials)
    assert not optimizer.state
