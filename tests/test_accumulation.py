"""Accumulated gradients against one big batch: random cases, each cause of inequality, every refusal."""

import itertools
import math
import os
import random
import re
import statistics
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from workbook.ch04_accumulation_lab import Case, causes, count, gradient, loss_sum, measure, random_tokens

from course_lib.accumulation import NothingToAverage, accumulate, windows
from course_lib.launch import RankError, run_ranks
from tests import effort

# ------------------------------------------------------------------------------------------------------- windows


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class StreamWithLength(Stream):
    def __len__(self):
        return self.n


SOURCES = {
    "list": lambda n: list(range(n)),
    "loader": lambda n: DataLoader(range(n), batch_size=None),
    "loader of batches": lambda n: DataLoader(range(n), 2, collate_fn=list),
    "loader of a stream with a length": lambda n: DataLoader(StreamWithLength(n), batch_size=None),
    "loader of a stream": lambda n: DataLoader(Stream(n), batch_size=None),
    "generator": lambda n: (i for i in range(n)),
}


@pytest.mark.thorough
@given(st.sampled_from(list(SOURCES)), st.integers(0, 25), st.integers(1, 9))
def test_windows_are_the_chunks_of_the_list(source, n, k):
    batches, found = list(SOURCES[source](n)), list(windows(SOURCES[source](n), k))
    assert found == [batches[i : i + k] for i in range(0, len(batches), k)]
    assert [window.number for window in found] == list(range(1, len(found) + 1))
    known = None if source in ("loader of a stream", "generator") else len(found)
    assert [window.number_of_windows for window in found] == [known] * len(found)


@pytest.mark.parametrize("known", [True, False])
def test_windows_fetch_nothing_that_they_need_not(known):
    fetched = []

    class Batches:
        def __iter__(self):
            for i in range(8):
                fetched.append(i)
                yield i

    class BatchesWithLength(Batches):
        def __len__(self):
            return 8

    found = windows(BatchesWithLength() if known else Batches(), 3)
    assert fetched == []
    for window in found:
        assert len(fetched) == window[-1] + 1
    assert len(fetched) == 8


def _epoch_of_unequal_ranks(rank: int) -> int:
    model = DistributedDataParallel(nn.Linear(4, 1))
    batches = [torch.ones(2, 4)] * (0 if rank else 4)
    return sum(
        accumulate(model, window, lambda model, batch: model(batch).sum(), len).count for window in windows(batches, 2)
    )


@pytest.mark.thorough
def test_a_rank_without_a_batch_raises_and_is_not_waited_for():
    with pytest.raises(RankError, match="rank 1 of 2 has no batch: ranks that have one would wait for it"):
        run_ranks(_epoch_of_unequal_ranks, 2, timeout=60)


@pytest.mark.parametrize("k", [0, -1, True, 2.5, "4", None])
def test_windows_name_a_bad_k_at_once(k):
    with pytest.raises(ValueError, match=re.escape(f"k must be a positive int, got {k!r}")):
        windows([1, 2], k)


# ----------------------------------------------------------------------------------------------- the random cases

EXACT = ("accumulate", "ExactAccumulation")


def random_cases(world_size, number=250) -> list[Case]:
    """Epochs of ragged, masked micro-batches, with fp64 and fp32 in turn.

    Ranks have as many windows, the last of 1 … k micro-batches, and some token is counted in each.
    """
    rng = random.Random(f"{world_size} ranks")
    generator = torch.Generator().manual_seed(world_size)

    def micro_batch():
        tokens = rng.randint(1, 12)
        return random_tokens(generator, tokens, masked=rng.choice([0, 0, rng.randint(0, tokens), tokens]))

    cases = []
    for i in range(number):
        k, full = rng.randint(1, 6), rng.randint(0, 2)
        ranks = [[micro_batch() for _ in range(full * k + rng.randint(1, k))] for _ in range(world_size)]
        for start in range(0, full * k + 1, k):
            if not sum(count(batch) for batches in ranks for batch in batches[start : start + k]):
                rng.choice(ranks)[start] = random_tokens(generator, rng.randint(1, 12))
        cases.append(Case(ranks, k, dtype=(torch.float64, torch.float32)[i % 2]))
    return cases


def of_equal_length(case):
    """The same tokens; ranks with fewer micro-batches get masked ones: a Trainer's ranks must have as many."""
    longest = max(map(len, case.ranks))
    masked = torch.zeros(1, 6, dtype=torch.float64), torch.tensor([-100])
    return replace(case, ranks=[batches + [masked] * (longest - len(batches)) for batches in case.ranks])


def test_the_cases_hold_what_could_go_wrong():
    for world_size in (1, 2):
        cases = random_cases(world_size)
        assert {(c.k, (len(c.ranks[0]) - 1) % c.k + 1) for c in cases} == {
            (k, n) for k in range(1, 7) for n in range(1, k + 1)
        }
        assert sum(any(count(b) == 0 for batches in c.ranks for b in batches) for c in cases) > 100
        assert sum(len({len(b[1]) for batches in c.ranks for b in batches}) > 1 for c in cases) > 100
    assert sum(len(c.ranks[0]) != len(c.ranks[1]) for c in cases) > 100
    silent = (batches[i : i + c.k] for c in cases for batches in c.ranks for i in range(0, len(batches), c.k))
    assert any(sum(map(count, window)) == 0 for window in silent), "a rank without a token in a window of both"


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_cases_equal_their_big_batches(world_size):
    cases = random_cases(world_size)[: effort.cases(8, 250)]
    padded = [of_equal_length(case) for case in cases]

    def errors_of_each_way(rank):
        given = {"usual recipe": cases, "accumulate": cases, "ExactAccumulation": padded, "Trainer": padded}
        return {way: [error[way] for error in measure(rank, its_cases, (way,))] for way, its_cases in given.items()}

    if world_size == 1:
        ranks = [errors_of_each_way(0)]
    else:
        ranks = [result.value for result in run_ranks(errors_of_each_way, world_size, timeout=240)]

    print(f"\n{len(cases)} cases, ranks: {world_size}. Largest error:", end=" ")
    over = []
    for way, (dtype, bar) in itertools.product(EXACT, {torch.float64: 1e-12, torch.float32: 1e-6}.items()):
        errors = {
            (rank, number): errors[way][number]
            for rank, errors in enumerate(ranks)
            for number, case in enumerate(cases)
            if case.dtype == dtype
        }
        over += [(way, *where, error) for where, error in errors.items() if not error <= bar]
        print(f"{way} {max(errors.values()):.1e} ({dtype})", end=", ")
    typical = {
        way: statistics.median(math.inf if math.isnan(error) else error for errors in ranks for error in errors[way])
        for way in ("usual recipe", "Trainer")
    }
    print("median error:", ", ".join(f"{way} {error:.2f}" for way, error in typical.items()))
    assert over == []
    assert min(typical.values()) > 0.1, "the comparison doesn't compare"


@pytest.mark.parametrize("cause", causes())
def test_each_cause_alone(cause):
    case = causes()[cause]
    results = run_ranks(measure, len(case.ranks), args=([case],)) if len(case.ranks) > 1 else None
    for (error,) in [result.value for result in results] if results else [measure(0, [case])]:
        unequal = {way for way in error if error[way] > 0.1}
        equal = {way for way in error if error[way] <= 1e-12}
        if cause == "equal micro-batches":
            assert equal == set(error)
        elif cause in ("dropout 0.5", "BatchNorm"):  # the forward itself differs
            assert unequal == set(error)
        else:
            assert (equal, unequal) == (set(EXACT), {"usual recipe", "Trainer"})


# ------------------------------------------------------------------------------------------------ one's own model


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches_of(*sizes, seed=0, masked=0):
    generator = torch.Generator().manual_seed(seed)
    return [random_tokens(generator, size, masked) for size in sizes]


def mean_loss(model, batches):
    """The oracle's: one batch, one mean."""
    features, classes = map(torch.cat, zip(*batches, strict=True))
    return F.cross_entropy(model(features), classes, ignore_index=-100)


def big_gradient(batches, model=None):
    model = model or make_net()
    mean_loss(model, batches).backward()
    return gradient(model)


def assert_near(gradient, expected, bar=1e-12):
    assert ((gradient - expected).norm() / expected.norm()).item() <= bar


def test_the_returned_sums_give_the_global_mean():
    ranks = [batches_of(3, 9, masked=2), batches_of(5, 1, 4, seed=1)]

    def accumulate_window(rank):
        return accumulate(DistributedDataParallel(make_net()), ranks[rank], loss_sum, count)

    parts = [result.value for result in run_ranks(accumulate_window)]
    assert [(part.count, part.global_count) for part in parts] == [(8, 18), (10, 18)]
    mean = sum(part.loss_sum for part in parts) / parts[0].global_count
    torch.testing.assert_close(mean, mean_loss(make_net(), ranks[0] + ranks[1]).detach(), rtol=1e-12, atol=0)
    assert mean.dim() == 0 and not any(part.loss_sum.requires_grad for part in parts)


def test_one_reduction_and_one_count_a_window():
    batches = batches_of(3, 5, 2, 4, 1, 6)

    def reductions(rank):
        counted, reduced = [], []

        def reduce(state, bucket):  # where DDP reduces; one bucket holds all of so small a model
            reduced.append(bucket.index())
            return allreduce_hook(state, bucket)

        def all_reduce(*args, original=dist.all_reduce, **kwargs):
            reduced.append(args[0].numel())
            return original(*args, **kwargs)

        def all_gather(*args, original=dist.all_gather, **kwargs):
            counted.append(args[1].numel())
            return original(*args, **kwargs)

        found = []
        dist.all_gather = all_gather
        for loop in ("accumulate", "without no_sync", "accumulate, plain module"):
            model = make_net()
            if loop == "accumulate, plain module":
                dist.all_reduce = all_reduce
            else:
                model = DistributedDataParallel(model)
                model.register_comm_hook(None, reduce)
            for window in windows(batches, 4):
                reduced.clear(), counted.clear()
                model.zero_grad()
                if loop != "without no_sync":
                    accumulate(model, window, loss_sum, count)
                else:
                    for batch in window:
                        loss_sum(model, batch).backward()
                found.append((loop, len(window), len(reduced), len(counted)))
        return found

    for result in run_ranks(reductions):
        assert result.value == [
            ("accumulate", 4, 1, 1),
            ("accumulate", 2, 1, 1),
            ("without no_sync", 4, 4, 0),
            ("without no_sync", 2, 2, 0),
            ("accumulate, plain module", 4, 1, 1),
            ("accumulate, plain module", 2, 1, 1),
        ]


class Branches(nn.Module):
    """Which parameters a batch reaches is in the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleDict({name: nn.Linear(6, 4).double() for name in ("always", "sometimes", "never")})

    def forward(self, features, names):
        return sum(self.heads[name](features) for name in names)


def branches_loss_sum(model, batch):
    (features, classes), names = batch
    return F.cross_entropy(model(features, names), classes, reduction="sum")


def branches_count(batch):
    return len(batch[0][1])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain module", "DDP"])
def test_a_parameter_may_be_unused_on_one_rank_or_on_all(wrapped):
    # Rank 0's first micro-batch alone reaches "sometimes": not the one in whose backward the ranks reduce.
    names = [[("always", "sometimes"), ("always",)], [("always",), ("always",), ("always",)]]
    sizes = [batches_of(3, 7), batches_of(2, 5, 1, seed=1)]
    ranks = [list(zip(batches, which, strict=True)) for batches, which in zip(sizes, names, strict=True)]

    def accumulate_twice(rank):
        module = Branches()
        model = DistributedDataParallel(module, find_unused_parameters=True) if wrapped else module
        for _ in range(2):
            model.zero_grad()
            accumulate(model, ranks[rank], branches_loss_sum, branches_count)
        return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}

    one = Branches()
    (sum(branches_loss_sum(one, b) for b in ranks[0] + ranks[1]) / 18).backward()
    for result in run_ranks(accumulate_twice):
        for name, parameter in one.named_parameters():
            if ".never." in name:
                assert result.value[name] is None and parameter.grad is None
            else:
                assert_near(result.value[name], parameter.grad)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain module", "DDP"])
def test_gradients_are_added_to_those_that_are_there(wrapped):
    ranks = [batches_of(3, 9), batches_of(5, 1, 4, seed=1)]

    def accumulate_three_times(rank):
        model = DistributedDataParallel(make_net()) if wrapped else make_net()
        for _ in range(3):
            accumulate(model, ranks[rank], loss_sum, count)
        return gradient(model)

    for result in run_ranks(accumulate_three_times):
        assert_near(result.value, 3 * big_gradient(ranks[0] + ranks[1]))


def test_ranks_with_buffers_and_different_numbers_of_micro_batches_stay_in_step():
    # DDP broadcasts buffers in a window's first forward: once a window on both ranks, however many forwards follow.
    ranks = [batches_of(4, 4, 4, 4), batches_of(4, 4, seed=1) + batches_of(4, seed=2)]

    def train(rank):
        model = DistributedDataParallel(nn.Sequential(make_net(), nn.BatchNorm1d(4).double()))
        for window in windows(ranks[rank], 2):
            model.zero_grad()
            accumulate(model, window, loss_sum, count)
        return gradient(model)

    first, second = (result.value for result in run_ranks(train, timeout=120))
    assert torch.equal(first, second)


def test_counts_may_be_weights():
    generator = torch.Generator().manual_seed(3)
    window = [(*batch, torch.rand(len(batch[1]), generator=generator)) for batch in batches_of(3, 7, 2)]

    def weighted_sum(model, batch):
        features, classes, weights = batch
        return (F.cross_entropy(model(features), classes, reduction="none") * weights).sum()

    model, oracle = make_net(), make_net()
    found = accumulate(model, window, weighted_sum, lambda batch: batch[2].double().sum())
    features, classes, weights = map(torch.cat, zip(*window, strict=True))
    losses = F.cross_entropy(oracle(features), classes, reduction="none")
    (losses @ weights.double() / weights.double().sum()).backward()
    assert_near(gradient(model), gradient(oracle))
    assert 0 < found.global_count < len(weights) and found.global_count % 1


@pytest.mark.parametrize(
    "count_fn",
    [len, lambda classes: torch.tensor(len(classes)), lambda classes: torch.tensor([float(len(classes))]).double()],
    ids=["int", "0-dim tensor", "float tensor of one"],
)
def test_counts_of_every_kind(count_fn):
    model, window = make_net(), batches_of(3, 7)
    found = accumulate(model, window, loss_sum, lambda batch: count_fn(batch[1]))
    assert (found.count, found.global_count) == (10, 10) and type(found.count) is float
    assert_near(gradient(model), big_gradient(window))


def test_the_length_of_a_dict_is_no_count():
    window = [dict(zip("xy", batch, strict=True)) for batch in batches_of(3, 7)]

    def loss_of_dict(model, batch):
        return loss_sum(model, (batch["x"], batch["y"]))

    with pytest.raises(ValueError, match=r"got len, which counts the keys of a micro-batch that is a dict: write"):
        accumulate(make_net(), window, loss_of_dict, len)
    model = make_net()
    accumulate(model, window, loss_of_dict, lambda batch: len(batch["y"]))
    assert_near(gradient(model), big_gradient(batches_of(3, 7)))


def mean_times_count(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100) * count(batch)


def divided_sum_times_count(model, batch):
    # Unlike cross_entropy's, the gradient of such a mean over nothing is NaN as well.
    return loss_sum(model, batch) / count(batch) * count(batch)


@pytest.mark.parametrize("loss_fn", [mean_times_count, divided_sum_times_count])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_mean_over_nothing_is_a_sum_of_nothing(loss_fn, place):
    window, (masked,) = batches_of(3, 7), batches_of(4, masked=4, seed=1)
    expected = accumulate(make_net(), window, loss_sum, count).loss_sum
    window.insert(place, masked)
    model = make_net()
    found = accumulate(model, window, loss_fn, count)
    torch.testing.assert_close(found.loss_sum, expected, rtol=1e-12, atol=0)
    assert found.count == 10
    assert_near(gradient(model), big_gradient(window))


def test_a_mean_over_nothing_at_the_end_still_reduces_the_gradients_of_all_ranks():
    ranks = [batches_of(3, 7), batches_of(2, seed=1) + batches_of(4, masked=4, seed=2)]

    def gradient_of(rank):
        model = DistributedDataParallel(make_net())
        accumulate(model, ranks[rank], mean_times_count, count)
        return gradient(model)

    for result in run_ranks(gradient_of):
        assert_near(result.value, big_gradient(ranks[0] + ranks[1]))


class OfOneArgument:
    def __init__(self, model):
        self.model = model

    def __call__(self, batch):
        return loss_sum(self.model, batch)

    def method(self, batch):
        return loss_sum(self.model, batch)


@pytest.mark.parametrize("kind", ["lambda", "object", "method", "with a default", "of two", "of two and more"])
def test_a_loss_function_takes_the_model_or_has_it(kind):
    model, window = make_net(), batches_of(3, 7)
    fn = {
        "lambda": lambda batch: loss_sum(model, batch),
        "object": OfOneArgument(model),
        "method": OfOneArgument(model).method,
        "with a default": lambda batch, scale=1.0: loss_sum(model, batch) * scale,
        "of two": loss_sum,
        "of two and more": lambda net, batch, *args, scale=1.0: loss_sum(net, batch) * scale,
    }[kind]
    accumulate(model, window, fn, count)
    assert_near(gradient(model), big_gradient(window))


def test_a_gradient_scaler_runs_the_backward():
    model, window = make_net().float(), [(x.float(), y) for x, y in batches_of(3, 7, 2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    accumulate(model, window, loss_sum, count, backward=lambda loss: scaler.scale(loss).backward())
    expected = big_gradient(window, make_net().float())
    assert_near(gradient(model), 2.0**12 * expected, 1e-6)
    scaler.unscale_(optimizer)
    assert_near(gradient(model), expected, 1e-6)
    scaler.step(optimizer)
    scaler.update()


def test_autocast_runs_the_forward_in_bfloat16():
    model, window, seen = make_net().float(), [(x.float(), y) for x, y in batches_of(30, 70, 20)], []

    def autocast_sum(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(model(batch[0]).dtype)
            return loss_sum(model, batch)

    accumulate(model, window, autocast_sum, count)
    assert set(seen) == {torch.bfloat16}
    assert_near(gradient(model), big_gradient(window, make_net().float()), 0.02)


def test_losses_in_half_precision_are_added_in_float32():
    model, window = make_net().bfloat16(), [(x.bfloat16(), y) for x, y in batches_of(*[5] * 40)]
    losses = [loss_sum(model, batch).detach() for batch in window]
    found = accumulate(model, window, loss_sum, count).loss_sum
    assert losses[0].dtype == torch.bfloat16
    assert torch.equal(found, torch.stack(losses).float().sum()) and found != torch.stack(losses).sum()


def test_fabric_runs_the_backward_on_two_ranks():
    ranks = [batches_of(3, 9), batches_of(5, 1, 4, seed=1)]

    def train(rank):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model, _ = fabric.setup(make_net(), torch.optim.SGD(make_net().parameters(), lr=0.1))
        accumulate(model, ranks[rank], loss_sum, count, backward=fabric.backward)
        return gradient(model)

    for result in run_ranks(train):
        assert_near(result.value, big_gradient(ranks[0] + ranks[1]))


# ------------------------------------------------------------------------------------------------------- refusals

MEANS = {
    'reduction="mean"': lambda x, y: F.cross_entropy(x, y),
    ".mean()": lambda x, y: F.cross_entropy(x, y, reduction="none").mean(),
    "mean / k": lambda x, y: F.cross_entropy(x, y) / 4,
    "-mean": lambda x, y: -F.cross_entropy(x, y),
    "mean, cast": lambda x, y: F.cross_entropy(x, y).to(torch.bfloat16),
    "mean + mean": lambda x, y: F.cross_entropy(x, y) + x.square().mean(),
    "mean.squeeze()": lambda x, y: F.cross_entropy(x, y).squeeze(),
    "mean.reshape(())": lambda x, y: F.cross_entropy(x, y).reshape(()),
    "mean.clone()": lambda x, y: F.cross_entropy(x, y).clone(),
    "sum over features, then mean over samples": lambda x, y: squares(x, y).sum(1).mean(),
    "the same from the end": lambda x, y: squares(x, y).sum(-1).mean(0),
    "mse": lambda x, y: F.mse_loss(x, F.one_hot(y, 4).double()),
    "l1": lambda x, y: F.l1_loss(x, F.one_hot(y, 4).double()),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, F.one_hot(y, 4).double()),
    "class weights": lambda x, y: F.cross_entropy(x, y, weight=torch.ones(4).double()),
    "label smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "label smoothing / k": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1) / 4,
    "probabilities": lambda x, y: F.cross_entropy(x, F.one_hot(y, 4).double()),
    "0.5 * mean": lambda x, y: 0.5 * F.cross_entropy(x, y),
    "mean + 0.1 * mean": lambda x, y: 0.9 * F.cross_entropy(x, y) + 0.1 * x.square().mean(),
    "weights in tensors": lambda x, y: torch.tensor(0.5) * F.cross_entropy(x, y) - 1.5 * x.abs().mean(),
    "batchmean": lambda x, y: F.kl_div(x.log_softmax(1), F.one_hot(y, 4).double(), reduction="batchmean"),
    "sum / len": lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(y),
    "sum / count in a tensor": lambda x, y: F.cross_entropy(x, y, reduction="sum") / (y != -100).sum(),
    "mean of each sample's Dice": lambda x, y: (1 - dice(x, y, dim=1)).mean(),
    "nanmean": lambda x, y: F.cross_entropy(x, y, reduction="none").nanmean(),
}


def squares(x, y):
    return F.mse_loss(x, F.one_hot(y, 4).double(), reduction="none")


def dice(x, y, dim=None):
    p, target = x.softmax(1), F.one_hot(y, 4).double()
    return (2 * (p * target).sum(dim) + 1) / ((p + target).sum(dim) + 1)


def penalty(model, kind):
    weights = list(model.parameters())
    if kind == "squares":
        return 0.01 * sum((w * w).sum() for w in weights)
    if kind == "powers":
        return sum(w.pow(2).sum() for w in weights) / 100
    if kind == "norms":
        return 0.01 * torch.stack([torch.linalg.vector_norm(w) for w in weights]).sum()
    return 0.01 * torch.cat([w.abs().reshape(-1) for w in weights]).sum()


@pytest.mark.parametrize("kind", ["squares", "powers", "norms", "absolutes"])
@pytest.mark.parametrize("of", ["mean", "sum", "penalty alone"])
def test_a_penalty_on_the_weights_hides_no_mean_and_makes_none(of, kind):
    def loss_fn(model, batch):
        loss = penalty(model, kind)
        if of != "penalty alone":
            loss = F.cross_entropy(model(batch[0]), batch[1], reduction=of) + loss
        return loss

    if of == "mean":
        with pytest.raises(ValueError, match="got a mean"):
            accumulate(make_net(), batches_of(5, 3), loss_fn, count)
    else:
        accumulate(make_net(), batches_of(5, 3), loss_fn, count)


BEYOND = {
    "a mean times a learned weight": lambda x, y: F.cross_entropy(x, y) * (-x.detach().mean().requires_grad_()).exp(),
    "a mean times 1.5": lambda x, y: 1.5 * F.cross_entropy(x, y),
    "a ratio": lambda x, y: 1 - dice(x, y),
    "a compiled function": torch.compile(lambda x, y: F.cross_entropy(x, y), backend="aot_eager"),
    "a sum over another count": lambda x, y: F.cross_entropy(x, y, reduction="sum") / 20,
    "a mean added to a sum": lambda x, y: F.cross_entropy(x, y, reduction="sum") + x.square().mean(),
    "a clamped mean": lambda x, y: F.cross_entropy(x, y).clamp(max=10),
    "the root of a mean": lambda x, y: F.cross_entropy(x, y).sqrt(),
    "a median": lambda x, y: F.cross_entropy(x, y, reduction="none").median(),
    "a nanmean that leaves some out": lambda x, y: (
        F.cross_entropy(x, y, reduction="none").where(y != y[0], math.nan).nanmean()
    ),
}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("name", BEYOND)
def test_what_no_graph_tells_is_taken_for_a_sum(name):
    # The bound that the docstring of checked_loss_sum names: the gradient is that of what was given, over the count.
    model, oracle, (batch,) = make_net(), make_net(), batches_of(5)
    try:
        alone = BEYOND[name](oracle(batch[0]), batch[1])
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"this torch compiles nothing on this Python: {error}")
    (alone / 5).backward()
    accumulate(model, [batch], lambda batch: BEYOND[name](model(batch[0]), batch[1]), count)
    assert_near(gradient(model), gradient(oracle))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused_where_it_is_over_more_than_one(name):
    def mean(model, batch):
        return MEANS[name](model(batch[0]), batch[1])

    model, window = make_net(), batches_of(5, 3)
    message = "the loss must be a sum over the micro-batch's count of 5, got a mean (by its grad_fn): use reduction="
    with pytest.raises(ValueError, match=re.escape(message)):
        accumulate(model, window, mean, count)
    accumulate(model, window, mean, lambda batch: 1)
    assert gradient(model).isfinite().all()


SUMS = {
    'reduction="sum"': lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "a mean over features, times 1": lambda x, y: squares(x, y).sum(0).mean() * 1,
    "divided by a learned weight, times 1": lambda x, y: (
        F.cross_entropy(x, y, reduction="sum") / x.detach().mean().exp().requires_grad_() * 1
    ),
    "mean * 1, as the docstring has it": lambda x, y: F.cross_entropy(x, y) * 1,
    "0.1 * mean * n": lambda x, y: 0.1 * F.cross_entropy(x, y) * len(y),
    "mean * count in a tensor": lambda x, y: F.cross_entropy(x, y) * torch.tensor(len(y)),
    "sum of each sample's Dice": lambda x, y: (1 - dice(x, y, dim=1)).sum(),
    "sum - mean": lambda x, y: F.cross_entropy(x, y, reduction="sum") - 0.5 * x.square().mean(),
    "0.5 * sum": lambda x, y: 0.5 * F.cross_entropy(x, y, reduction="sum"),
    "mean * n": lambda x, y: F.cross_entropy(x, y) * len(y),
    "n * mean": lambda x, y: len(y) * F.cross_entropy(x, y),
    "sum / 2": lambda x, y: F.cross_entropy(x, y, reduction="sum") / 2,
    "sum.mul": lambda x, y: F.cross_entropy(x, y, reduction="sum").mul(0.5),
    "weighted by sample": lambda x, y: (F.cross_entropy(x, y, reduction="none") * torch.arange(len(y))).sum(),
    "mean over features": lambda x, y: squares(x, y).mean(1).sum(),
    "sum + mean": lambda x, y: F.cross_entropy(x, y, reduction="sum") + x.square().mean(),
    "label smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum"),
    "probabilities": lambda x, y: F.cross_entropy(x, F.one_hot(y, 4).double(), reduction="sum"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_taken_however_it_was_made(name):
    model, oracle, (batch,) = make_net(), make_net(), batches_of(5)
    accumulate(model, [batch], lambda batch: SUMS[name](model(batch[0]), batch[1]), count)
    (SUMS[name](oracle(batch[0]), batch[1]) / 5).backward()
    assert_near(gradient(model), gradient(oracle))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda x, y: F.cross_entropy(x, y, reduction="none"), "a tensor of shape (5,)"),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum").reshape(1), "a tensor of shape (1,)"),
        (lambda x, y: 1.5, "1.5"),
        (lambda x, y: None, "None"),
    ],
    ids=["a vector", "a vector of one", "a float", "None"],
)
def test_a_loss_that_is_no_0_dim_tensor_is_named(loss, got):
    model, window = make_net(), batches_of(5)
    message = f"the loss must be a 0-dim tensor, the sum over the micro-batch, got {got}"
    with pytest.raises(ValueError, match=re.escape(message)):
        accumulate(model, window, lambda batch: loss(model(batch[0]), batch[1]), count)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, None, "many", torch.tensor([1, 2]), torch.tensor(-1.0)])
def test_a_bad_count_is_named_before_any_forward(bad):
    window, forwards = batches_of(5, 3), []
    message = f"a micro-batch's count must be a finite number of at least 0, got {bad!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        accumulate(make_net(), window, forwards.append, lambda batch: bad if len(batch[1]) == 3 else 5)
    assert forwards == []


def test_a_window_with_nothing_to_average_is_named():
    epoch = batches_of(4) + batches_of(4, 3, seed=1, masked=3)[1:]
    _, window = windows(epoch, 1)
    for held, name in ((window, "window 2"), (list(window), "the window")):
        message = f"the total count of {name} must be above 0, got 0 over 1 rank: there is nothing to average"
        with pytest.raises(ValueError, match=message):
            accumulate(make_net(), held, loss_sum, count)
    with pytest.raises(ValueError, match=r"must hold at least one micro-batch, got an empty one \(rank 0: 0\): every"):
        accumulate(make_net(), [], loss_sum, count)


def mean_of_all(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def refusals(rank):
    """What this rank is told for each bad input of two ranks, after how many windows."""

    def told(window_of, fn=loss_sum, count_fn=count):
        # Buffers are broadcast in the first forward of a window: a rank that raises before would be waited for.
        model, done = DistributedDataParallel(nn.Sequential(make_net(), nn.BatchNorm1d(4).double())), 0
        try:
            for window in window_of:
                accumulate(model, window, fn, count_fn)
                done += 1
        except Exception as error:
            return done, type(error), str(error)
        return done, None, ""

    def past_ddp(model, batch):
        with torch.no_grad():
            model(batch[0])
        return loss_sum(model.module, batch)

    own = batches_of(*range(2, 6 + 2 * rank))  # 4 and 6 micro-batches
    masked = batches_of(3, 3, masked=3)
    return {
        "known lengths": told(windows(own, 2)),
        "two epochs of generators": told(itertools.chain(windows(iter(own), 2), windows(iter(own), 2))),
        "a list, and a generator": told(windows(own if rank == 0 else iter(own), 2)),
        "nothing to average": told([own, masked]),
        "an empty window": told([own if rank == 0 else []]),
        "an empty window after another": told([own, own if rank == 0 else []]),
        "past DDP": told([own], fn=lambda model, batch: loss_sum(model.module, batch)),
        "past DDP, but for what needs no gradient": told([own], fn=past_ddp),
        "a mean": told([own], fn=mean_of_all),
        "a bad count": told([own], count_fn=lambda batch: -1),
        "a bad count of rank 1": told([own, own], count_fn=lambda batch: -1 if rank == 1 and len(batch[1]) == 7 else 2),
        "a count_fn of rank 1 that fails": told([own], count_fn=lambda batch: [1][rank]),
    }


def test_both_ranks_are_told_at_once():
    results = run_ranks(refusals, timeout=120)
    assert max(result.seconds for result in results) < 10
    unequal = "the ranks have different numbers of windows (rank 0: window {}, rank 1: window {}): the longer ones"
    empty = "at least one micro-batch, got an empty one (rank 0: 4, rank 1: 0): every rank takes part"
    around = "loss_sum_fn did not run the forward through the DistributedDataParallel model"
    refused = "a count was refused on rank 1, whose own message says why"
    negative = "a micro-batch's count must be a finite number of at least 0, got -1"
    for name, expected in {
        "known lengths": (0, ValueError, unequal.format("1 of 2", "1 of 3")),
        "two epochs of generators": (2, ValueError, unequal.format("1 of ?", "3 of ?")),
        "a list, and a generator": (0, ValueError, unequal.format("1 of 2", "1 of ?")),
        "nothing to average": (1, NothingToAverage, "the total count of the window must be above 0, got 0 over 2"),
        "an empty window": (0, ValueError, empty),
        "an empty window after another": (1, ValueError, empty),
        "past DDP": (0, RuntimeError, around),
        "past DDP, but for what needs no gradient": (0, RuntimeError, around),
        "a mean": (0, ValueError, "got a mean (by its grad_fn)"),
        "a bad count": (0, ValueError, negative),
        "a bad count of rank 1": [(0, ValueError, refused), (0, ValueError, negative)],
        "a count_fn of rank 1 that fails": [(0, ValueError, refused), (0, IndexError, "list index out of range")],
    }.items():
        for rank, (done, error, message) in enumerate(expected if isinstance(expected, list) else [expected] * 2):
            assert results[rank].value[name][:2] == (done, error), name
            assert message in results[rank].value[name][2]


@pytest.mark.thorough
def test_the_mistake_of_one_rank_ends_the_run():
    window = batches_of(5, 3)

    def accumulate_mean(rank):
        accumulate(DistributedDataParallel(make_net()), window, mean_of_all if rank else loss_sum, count)

    # Not a RankTimeout: rank 0, which waits for rank 1 in DDP's reduction, is not waited for.
    with pytest.raises(RankError, match="rank 1 raised: ValueError: the loss must be a sum") as caught:
        run_ranks(accumulate_mean)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_is_gone_is_missed_in_the_count():
    window = batches_of(5, 3)

    def accumulate_until_gone(rank):
        model = make_net()
        accumulate(model, window, loss_sum, count)
        if rank == 0:
            os._exit(3)
        accumulate(model, window, loss_sum, count)

    with pytest.raises(RankError, match="rank 0 exited with code 3") as caught:
        run_ranks(accumulate_until_gone, timeout=120)
    (report,) = (report for report in caught.value.reports if report.rank == 1)
    assert "RuntimeError: a rank did not answer" in report.error


def sharded_net(rank, mesh=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = make_net(), mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole_gradient(model):
    return torch.cat([parameter.grad.full_tensor().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sharded_model_accumulates_the_big_batchs_gradient(world_size, dtype):
    ranks = [batches_of(3 + rank, 9, 1, 4, 2 + rank, masked=rank % 2, seed=rank) for rank in range(world_size)]
    ranks = [[(x.to(dtype), y) for x, y in batches] for batches in ranks]

    def gradients_of_windows(rank):
        model, found = sharded_net(rank).to(dtype), []
        for window in windows(ranks[rank], 2):  # the last one is short
            model.zero_grad()
            with torch.no_grad():
                model(window[0][0])  # a validation leaves the whole parameters behind
            accumulate(model, window, loss_sum, count)
            found.append(whole_gradient(model))
        accumulate(model, window, loss_sum, count)  # is added to what is there
        return [*found, whole_gradient(model) / 2]

    expected = []
    for start in (0, 2, 4):
        batches = [batch for batches in ranks for batch in batches[start : start + 2]]
        expected.append(big_gradient([(x.double(), y) for x, y in batches]))
    for result in run_ranks(gradients_of_windows, world_size, timeout=120):
        for ours, theirs in zip(result.value, [*expected, expected[-1]], strict=True):
            assert_near(ours.double(), theirs, 1e-12 if dtype == torch.float64 else 1e-6)


def refusal_of(model, window, fn=loss_sum, **arguments):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are compared by the caller
        accumulate(model, window, fn, count, **arguments)
    return str(caught.value)


def assert_each_rank_says(messages, refusals_by_name):
    for result in run_ranks(refusals_by_name, timeout=120):
        for name, message in messages.items():
            assert message in result.value[name]


def test_what_a_sharded_models_ranks_cannot_do_is_an_error_of_all():
    def told_of_each(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        part = nn.ModuleList([nn.Linear(1, 1), sharded_net(rank)])
        pairs = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
        return {
            "unequal": refusal_of(sharded_net(rank), batches_of(*[3] * (rank + 1))),
            "mean over nothing": refusal_of(
                sharded_net(rank), batches_of(3, masked=3) + batches_of(3), mean_times_count
            ),
            "partly": refusal_of(part, batches_of(3)),
            "two dimensions": refusal_of(fully_shard(make_net(), mesh=pairs), batches_of(3)),
        }

    messages = {
        "unequal": "must have as many micro-batches in a window, got rank 0: 1, rank 1: 2",
        "mean over nothing": "the loss over a count of 0 must be 0, got NaN",
        "partly": "(0 for parameters outside fully_shard, whose gradients would stay each rank's own)",
        "two dimensions": "over one mesh of one dimension, got 1 meshes, of [2] dimensions",
    }
    assert_each_rank_says(messages, told_of_each)


def test_models_whose_reduction_it_does_not_know_are_refused():
    def told_of_each(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh, parts = init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}

        alone = [dist.new_group([number]) for number in range(2)][rank]
        replica = DistributedDataParallel(make_net())
        with replica.no_sync():
            within = refusal_of(replica, batches_of(3))
        words = [(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]))]
        return {
            "static": refusal_of(DistributedDataParallel(make_net(), static_graph=True), batches_of(3)),
            "within no_sync": within,
            "of a smaller group": refusal_of(replica, batches_of(3), group=alone),
            "partly": refusal_of(nn.ModuleList([replica, nn.Linear(1, 1)]), batches_of(3)),
            "sparse": refusal_of(nn.Embedding(2, 4, sparse=True), words),
            "DTensor": refusal_of(parallelize_module(make_net(), mesh, parts), batches_of(3)),
        }

    messages = {
        "DTensor": "over one mesh of one dimension, got DTensor parameters (tensor parallelism)",
        "static": "static_graph=True does not go with no_sync in the first window",
        "within no_sync": "accumulate was called within no_sync(), where DDP reduces nothing: call it outside",
        "of a smaller group": "group has 1 ranks, the model's gradients are averaged over 2: leave group out",
        "partly": "some parameters that are trained are outside DistributedDataParallel",
        "sparse": "sparse gradients of a plain module are not averaged over ranks: wrap it in DDP",
    }
    assert_each_rank_says(messages, told_of_each)


def test_a_masked_mean_of_nothing_in_the_last_micro_batch_spoils_no_rank():
    def masked(model, batch):
        x, mask = batch
        return (model(x).squeeze(1) ** 2 * mask).sum() / mask.sum() * mask.sum()

    def gradient_of(rank, wrapped):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        window = [(torch.ones(4, 3), torch.ones(4)), (torch.ones(4, 3), torch.full((4,), float(rank > 0)))]
        accumulate(DistributedDataParallel(net) if wrapped else net, window, masked, lambda batch: batch[1].sum())
        return net.weight.grad

    by_ddp, by_hand = (run_ranks(gradient_of, args=(wrapped,)) for wrapped in (True, False))
    assert by_hand[0].value.isfinite().all()
    for one, other in zip(by_ddp, by_hand, strict=True):
        torch.testing.assert_close(one.value, other.value)
