"""The equality laboratory: how far an accumulated gradient is from the one big batch's, cause by cause."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from course_lib.accumulation import accumulate, windows
from course_lib.callbacks import ExactAccumulation
from course_lib.launch import run_ranks
from workbook.ch03_memory import SavedTensor
from workbook.ch04_small_jobs import Tokens as Tokens
from workbook.ch04_small_jobs import answers_alone as answers_alone
from workbook.ch04_small_jobs import collate as collate
from workbook.ch04_small_jobs import conv_net_without_dropout as conv_net_without_dropout
from workbook.ch04_small_jobs import five_of_sixteen as five_of_sixteen
from workbook.ch04_small_jobs import gpt as gpt
from workbook.ch04_small_jobs import passages as passages
from workbook.ch04_small_jobs import pictures as pictures
from workbook.ch04_small_jobs import three_of_four as three_of_four
from workbook.ch04_small_jobs import twelve as twelve
from workbook.trainers import quiet_trainer

WAYS = ("usual recipe", "Trainer", "accumulate", "ExactAccumulation")


@dataclass(frozen=True)
class Case:
    """One epoch of micro-batches for each rank, and what else could make the gradients differ."""

    ranks: list[list[Tokens]]
    k: int
    dropout: float = 0.0
    batch_norm: bool = False
    reduction: str = "mean"
    """How the usual recipe and the Trainer reduce a micro-batch's losses."""
    draw: int = 0
    """Which dropout masks are drawn; the big batch draws others."""
    dtype: torch.dtype = torch.float64


def random_tokens(generator: torch.Generator, tokens: int, masked: int = 0) -> Tokens:
    """A micro-batch, the last `masked` of its tokens masked; the class depends on the features."""
    features = torch.randn(tokens, 6, generator=generator, dtype=torch.float64)
    classes = (features[:, :4] + 0.5 * torch.randn(tokens, 4, generator=generator, dtype=torch.float64)).argmax(1)
    classes[tokens - masked :] = -100
    return features, classes


def measure(rank: int, cases: list[Case], ways: Sequence[str] = WAYS) -> list[dict[str, float]]:
    """For each case and way: the largest relative error over its windows. Runs in each of as many ranks as the case's.

    The error is ‖g − G‖ / ‖G‖ with the gradient G of one batch that holds all ranks' tokens of that window. It is NaN
    where that of any window is: a mean over masked tokens alone is 0 / 0.
    """
    measured = []
    for case in cases:
        reference = big_batch(case)
        measured.append({way: _largest_error(_RUN[way](case, rank), reference) for way in ways})
    return measured


def big_batch(case: Case) -> list[Tensor]:
    """The gradient of each window's tokens, of all ranks, as one batch: the reference."""
    model, found = make_model(case.dropout, case.batch_norm).to(case.dtype), []
    in_windows = [list(windows(batches, case.k)) for batches in case.ranks]
    for of_each_rank in zip(*in_windows, strict=True):
        micro_batches = list(itertools.chain(*of_each_rank))
        features = torch.cat([features for features, _ in micro_batches]).to(case.dtype)
        classes = torch.cat([classes for _, classes in micro_batches])
        model.zero_grad()
        torch.manual_seed(2 * case.draw + 1)
        mean = loss_sum(model, (features, classes)) / count((features, classes))
        mean.backward()
        found.append(gradient(model))
    return found


def make_model(dropout: float = 0.0, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12) if batch_norm else nn.Identity()
    layers = nn.Linear(6, 12), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4)
    return nn.Sequential(*layers).double()


def loss_sum(model: nn.Module, batch: Tokens) -> Tensor:
    device = next(model.parameters()).device
    scores, targets = model(batch[0].to(device)), batch[1].to(device)
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")


def count(batch: Tokens) -> Tensor:
    return (batch[1] != -100).sum()


Batch = Sequence[Tokens]
"""A window's micro-batches."""


class Reader(LightningModule):
    """The GPT, with an ordinary mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt().eval()  # no dropout for now

    def training_step(self, batch: Tokens) -> Any:
        scores, targets = self.net(batch[0]), batch[1]
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def update_of(pieces: Any, batch_size: int, k: int, model: Any = None, **more: Any) -> Tensor:
    model = model or Reader()
    start = weights_of(model)
    trainer = quiet_trainer(devices=1, max_epochs=1, accumulate_grad_batches=k, **more)
    loader: Any = DataLoader(pieces, batch_size, collate_fn=collate)
    trainer.fit(model, loader)
    return weights_of(model) - start


class OneWeight(LightningModule):
    """A single weight, whose gradient is 1 for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(())), list[float]()

    def training_step(self, batch: Any) -> Any:
        self.seen.append(self.weight.item())
        return self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, divided by the norm of the second."""
    return ((a - b).norm() / b.norm()).item()


class EachLoss(nn.Module):
    """64 samples: the loss of each is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = nn.Parameter(torch.ones(64))

    def forward(self, indices: Tensor) -> Tensor:
        return self.losses[indices]


def sample_weights(rank: int, way: Callable[..., Any], window_of_ranks: Sequence[Any]) -> list[float]:
    """In 64ths: what each sample weighs in the gradient of the window, accumulated in some way."""
    each = EachLoss()
    model = DistributedDataParallel(each) if dist.is_initialized() else each
    way(model, window_of_ranks[rank], lambda model, batch: model(batch).sum(), len)
    assert each.losses.grad is not None
    return [round(64 * weight, 2) for weight in each.losses.grad.tolist()]


RAGGED = [torch.arange(64).split([40, 16, 4, 4])]
TWO_RANKS = [torch.arange(0, 48).split(24), torch.arange(48, 64).split(8)]


def check(way: Callable[..., Any], device: Any = "cpu") -> list[float]:
    """A rung: the symptom, and the weights in two windows of 64 samples, by one way of accumulating."""
    one_by_one = [collate([passage]) for passage in passages()]
    net = gpt().eval().to(device)
    way(net, one_by_one, loss_sum, count)
    found = gradient(net)
    net.zero_grad()
    big = collate(passages())
    (loss_sum(net, big) / count(big)).backward()
    print(f"{way.__name__}: distance {distance(found, gradient(net)):.4f}", end=", ")
    weights = sample_weights(0, way, RAGGED)
    on_ranks: list[float] = run_ranks(sample_weights, args=(way, TWO_RANKS), backend="gloo")[0].value
    print(f"weights {min(weights)} to {max(weights)}, on two ranks {min(on_ranks)} to {max(on_ranks)}")
    return on_ranks


def run_in(k: int, net: nn.Module) -> None:
    inputs, targets = collate(passages(of_one_length=True))
    for x, y in zip(inputs.chunk(k), targets.chunk(k), strict=True):
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        (loss / k).backward()


def bytes_and_passes(k: int) -> tuple[int, int]:
    """The most bytes that autograd holds at one time, and how often a bias gets a gradient."""
    net, passes = gpt().eval(), list[Any]()
    list(net.parameters())[-1].register_post_accumulate_grad_hook(passes.append)
    return peak_saved_bytes(lambda: run_in(k, net), net), len(passes)


def accumulated_gradient(model: nn.Module, window: Batch) -> Tensor:
    model.zero_grad()
    for inputs, targets in window:
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        (loss / len(window)).backward()
    return gradient(model)  # all parameters' .grad as one tensor


def gradients(model: nn.Module, draw_window: Callable[[], Batch], first_seed: int) -> Tensor:
    """32 draws of the masks, or of the window: a row for each."""
    found = []
    for draw in range(32):
        torch.manual_seed(first_seed + draw)
        found.append(accumulated_gradient(model, draw_window()))
    return torch.stack(found)


def plain_loop(model: nn.Module, window: Batch, loss_sum: Callable[..., Tensor], count: Any) -> None:
    for batch in window:
        loss_sum(model, batch).backward()


def count_all_reduces(rank: int, ways: Sequence[Callable[..., Any]]) -> list[int]:
    """How many all-reduces of gradients each way makes for a window of 8. A hook of DDP sees them."""
    counts = []
    for way in ways:
        model, seen = DistributedDataParallel(make_model()), list[Any]()

        def hook(state, bucket, seen=seen):  # type: ignore[no-untyped-def]
            seen.append(bucket)  # this model fits in one bucket
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        model.register_comm_hook(None, hook)
        generator = torch.Generator().manual_seed(rank)
        way(model, [random_tokens(generator, tokens=6) for _ in range(8)], loss_sum, count)
        counts.append(len(seen))
    return counts


def random_features(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 6, generator=generator, dtype=torch.float64)


def classify(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), (x[:, 0] > 0.5).long())


def weighted(net: nn.Module, x: Tensor) -> Tensor:
    class_weights = torch.tensor([1, 10, 1, 1], dtype=x.dtype)
    return F.cross_entropy(net(x), (x[:, 0] > 0.5).long(), weight=class_weights)


def contrastive(net: nn.Module, x: Tensor) -> Tensor:
    one, other = (F.normalize(net(view), dim=1) for view in (x, x + 0.1 * x.flip(1)))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


def dice(net: nn.Module, x: Tensor) -> Tensor:
    guess, truth = net(x)[:, 0].sigmoid(), (x[:, 0] > 0.5).double()
    return 1 - 2 * (guess * truth).sum() / (guess.sum() + truth.sum())


def gradient_of_mean(loss: Callable[[nn.Module, Tensor], Tensor], parts: Sequence[Tensor]) -> Tensor:
    """That of the mean of the parts' losses, by the usual recipe."""
    model = make_model()
    for x in parts:
        (loss(model, x) / len(parts)).backward()
    return gradient(model)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def peak_saved_bytes(run: Callable[[], Any], model: nn.Module) -> int:
    """The largest sum of bytes that autograd holds for the backward pass at one time, the parameters left out."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    alive: WeakSet[SavedTensor] = WeakSet()
    peak = 0

    def pack(tensor: Tensor) -> SavedTensor:
        nonlocal peak
        saved = SavedTensor(tensor)
        alive.add(saved)
        storages = {(each.tensor.data_ptr(), each.tensor.nbytes) for each in alive}  # two operations may save one
        peak = max(peak, sum(nbytes for pointer, nbytes in storages if pointer not in parameters))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run()
    return peak


def _largest_error(mine: Iterable[Tensor], of_big_batch: list[Tensor]) -> float:
    errors = [(g - big).norm() / big.norm() for g, big in zip(mine, of_big_batch, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is, as Python's max is not


def _batches(case: Case, rank: int) -> list[Tokens]:
    return [(features.to(case.dtype), classes) for features, classes in case.ranks[rank]]


def _wrapped(case: Case) -> Any:
    model = make_model(case.dropout, case.batch_norm).to(case.dtype)
    torch.manual_seed(2 * case.draw)
    return DistributedDataParallel(model) if dist.is_initialized() else model


def usual_recipe(case: Case, rank: int) -> Iterator[Tensor]:
    """The gradient of each window by `(loss / k).backward()`."""
    model = _wrapped(case)
    for window in windows(_batches(case, rank), case.k):
        model.zero_grad()
        for position, (features, classes) in enumerate(window, start=1):
            # ranks may hold unequally many micro-batches
            not_yet = position < len(window) and dist.is_initialized()
            with model.no_sync() if not_yet else nullcontext():
                loss = F.cross_entropy(model(features), classes, reduction=case.reduction)
                (loss / case.k).backward()
        yield gradient(model)


def _accumulate(case: Case, rank: int) -> Iterator[Tensor]:
    model = _wrapped(case)
    for window in windows(_batches(case, rank), case.k):
        model.zero_grad()
        accumulate(model, window, loss_sum, count)
        yield gradient(model)


class _Recorder(LightningModule):
    """Keeps the gradient of each window as the optimizer would see it."""

    def __init__(self, case: Case, *, exact: bool) -> None:
        super().__init__()
        self.model = make_model(case.dropout, case.batch_norm).to(case.dtype)
        self.case, self.exact = case, exact
        self.found: list[Tensor] = []

    def training_step(self, batch: Tokens, batch_idx: int) -> Any:
        if batch_idx == 0:
            torch.manual_seed(2 * self.case.draw)  # the dropout masks of all four ways are the same
        if self.exact:
            return loss_sum(self.model, batch), count(batch)
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction=self.case.reduction, ignore_index=-100)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.found.append(gradient(self.model))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(case: Case, rank: int, *, exact: bool) -> list[Tensor]:
    module = _Recorder(case, exact=exact)
    callbacks: list[Callback] = [ExactAccumulation()] if exact else []
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=len(case.ranks),
        strategy="ddp" if len(case.ranks) > 1 else "auto",
        use_distributed_sampler=False,
        accumulate_grad_batches=case.k,
        max_epochs=1,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(_batches(case, rank), batch_size=None))  # type: ignore[arg-type]
    return module.found


_RUN: dict[str, Callable[[Case, int], Any]] = {
    "usual recipe": usual_recipe,
    "Trainer": lambda case, rank: _fit(case, rank, exact=False),
    "accumulate": _accumulate,
    "ExactAccumulation": lambda case, rank: _fit(case, rank, exact=True),
}


def causes() -> dict[str, Case]:
    """Eight windows, each with one cause of inequality alone."""
    generator = torch.Generator().manual_seed(4)

    def of(sizes: list[int], masked: tuple[int, ...] = ()) -> list[Tokens]:
        hidden = masked or (0,) * len(sizes)
        return [random_tokens(generator, n, m) for n, m in zip(sizes, hidden, strict=True)]

    return {
        "equal micro-batches": Case([of([16, 16, 16, 16])], 4),
        "ragged micro-batches": Case([of([40, 16, 4, 4])], 4),
        "short window": Case([of([16])], 4),
        "masked tokens": Case([of([16, 16, 16, 16], (15, 12, 8, 0))], 4),
        "unequal ranks": Case([of([24, 24]), of([8, 8])], 2),
        "dropout 0.5": Case([of([16, 16, 16, 16])], 4, dropout=0.5),
        "BatchNorm": Case([of([4] * 16)], 16, batch_norm=True),
        "sum loss over k": Case([of([16, 16, 16, 16])], 4, reduction="sum"),
    }
