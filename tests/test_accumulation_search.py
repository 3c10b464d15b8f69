"""Random windows of random models, by `accumulate` and in a Trainer, against one big batch of all ranks in float64."""

import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from course_lib.accumulation import accumulate, windows
from course_lib.callbacks import ExactAccumulation
from course_lib.launch import run_ranks
from tests import effort
from tests.trainer_oracle import quiet_trainer

IGNORED = -100


@dataclass(frozen=True)
class Case:
    way: str
    dtype: torch.dtype
    width: int
    frozen: bool
    tied: bool
    penalty: bool
    """A second loss, of the features, beside that of the tokens."""
    k: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    """For each rank, of each micro-batch: its tokens, and how many of them are ignored."""


@st.composite
def cases(draw, world_size):
    way = draw(st.sampled_from(["DDP", "plain module", "Trainer"]))
    micro_batch = st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda pair: (pair[0], min(pair)))
    k, full = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    ranks = []
    last = draw(st.integers(1, k))
    for _ in range(world_size):
        if way != "Trainer":  # whose ranks must have as many micro-batches
            last = draw(st.integers(1, k))
        length = full * k + last
        ranks.append(draw(st.lists(micro_batch, min_size=length, max_size=length)))
    for start in range(0, full * k + 1, k):  # some token of each window counts
        ranks[draw(st.integers(0, world_size - 1))][start] = (draw(st.integers(1, 9)), 0)
    return Case(
        way=way, dtype=draw(st.sampled_from([torch.float32, torch.float64])), width=draw(st.integers(1, 8)),
        frozen=draw(st.booleans()), tied=draw(st.booleans()), penalty=draw(st.booleans()), k=k,
        ranks=tuple(map(tuple, ranks)),
    )  # fmt: skip


class Net(nn.Module):
    def __init__(self, case, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(case.width)
        self.first = nn.Linear(6, case.width)
        self.hidden = nn.ModuleList([nn.Linear(case.width, case.width) for _ in range(2)])
        if case.tied:
            self.hidden[1] = self.hidden[0]
        self.head = nn.Linear(case.width, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.first.requires_grad_(not case.frozen)
        self.to(dtype)

    def forward(self, x):
        features = self.first(x).tanh()
        for layer in self.hidden:
            features = layer(features).tanh()
        return self.head(features), features


def batches_of(case, rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    found = []
    for tokens, ignored in case.ranks[rank]:
        x = torch.randn(tokens, 6, generator=generator, dtype=torch.float32).to(dtype)
        y = torch.randint(4, (tokens,), generator=generator)
        y[:ignored] = IGNORED
        found.append((x, y))
    return found


def count(batch):
    return (batch[1] != IGNORED).sum()


def loss_sum(model, batch, penalty):
    x, y = batch
    logits, features = model(x)
    loss = F.cross_entropy(logits, y, reduction="sum", ignore_index=IGNORED)
    if penalty:
        loss = loss + 0.1 * features[y != IGNORED].square().sum()
    return loss


def gradients(model):
    return [None if p.grad is None else p.grad.detach().double().clone() for p in model.parameters()]


def expected_of_each_window(case):
    """Gradients of the one big batch in float64, and the size of what they are summed from, which bounds rounding."""
    ranks = [list(windows(batches_of(case, rank, torch.float64), case.k)) for rank in range(len(case.ranks))]
    for parts in zip(*ranks, strict=True):
        batches = [batch for window in parts for batch in window]
        model, size = Net(case, torch.float64), 0.0
        total = sum(int(count(batch)) for batch in batches)
        for batch in batches:
            model.zero_grad()
            (loss_sum(model, batch, case.penalty) / total).backward()
            size += sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
        model.zero_grad()
        (loss_sum(model, tuple(map(torch.cat, zip(*batches, strict=True))), case.penalty) / total).backward()
        yield gradients(model), size


def by_accumulate(case, rank):
    module = Net(case, case.dtype)
    model = DistributedDataParallel(module) if case.way == "DDP" and dist.is_initialized() else module
    for window in windows(batches_of(case, rank, case.dtype), case.k):
        model.zero_grad()
        accumulate(model, window, functools.partial(loss_sum, penalty=case.penalty), count)
        yield gradients(module)


def by_trainer(case, rank):
    found = []

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(case, case.dtype)

        def training_step(self, batch):
            return loss_sum(self.net, batch, case.penalty), count(batch)

        def on_before_optimizer_step(self, optimizer):
            found.append(gradients(self.net))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = quiet_trainer(
        max_epochs=1, accumulate_grad_batches=case.k, callbacks=[ExactAccumulation()], devices=len(case.ranks),
        strategy="ddp" if len(case.ranks) > 1 else "auto", use_distributed_sampler=False,
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(Module(), DataLoader(batches_of(case, rank, case.dtype), batch_size=None))
    return found


def told(case, rank):
    """What is wrong with a case on this rank; empty where nothing is."""
    bar = 1e-6 if case.dtype == torch.float32 else 1e-12
    try:
        found = list(by_trainer(case, rank) if case.way == "Trainer" else by_accumulate(case, rank))
        for number, (ours, (theirs, size)) in enumerate(zip(found, expected_of_each_window(case), strict=True)):
            for one, other in zip(ours, theirs, strict=True):
                if (one is None) != (other is None) or (one is not None and (one - other).norm() > bar * size):
                    return f"window {number}: {one} where the big batch has {other}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def search(rank, world_size, examples):
    # All ranks draw the same cases, and are told the same of each: so they shrink alike.
    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(world_size))
    def every_case_equals_its_big_batch(case):
        answers = [told(case, rank)] * world_size
        if world_size > 1:
            dist.all_gather_object(answers, answers[rank])
        assert not any(answers), answers

    every_case_equals_its_big_batch()


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_windows_of_random_models_equal_their_big_batches(world_size):
    examples = effort.cases(20, 400)
    run_ranks(functools.partial(search, world_size=world_size, examples=examples), world_size, timeout=540)
