"""The equality laboratory: how far an accumulated gradient is from the one big batch's, cause by cause."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from course_lib.accumulation import accumulate, windows
from course_lib.callbacks import ExactAccumulation
from workbook.trainers import quiet_trainer

Tokens = tuple[Tensor, Tensor]
"""A micro-batch: features (tokens, 6) and classes (tokens,) in 0…3, or -100 where a token is masked."""

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
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum", ignore_index=-100)


Batch = Sequence[Tokens]
"""A window's micro-batches."""


def collate(batch: Sequence[str]) -> Tokens:
    """Words of any length as one batch; -100 is the target of the padding."""
    encoded = []
    for word in batch:
        letters = [ord(letter) - 96 for letter in word]
        encoded.append(torch.tensor([0, *letters, 0]))  # 0 stands before and after a word
    before = pad_sequence([letters[:-1] for letters in encoded], batch_first=True)
    targets = [letters[1:] for letters in encoded]
    return before, pad_sequence(targets, batch_first=True, padding_value=-100)


class Letters(LightningModule):
    """Guesses each letter of a word from the one before it, with an ordinary mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(27, 16), nn.Tanh(), nn.Linear(16, 27))

    def training_step(self, batch: Tokens) -> Any:
        outputs = self.net(batch[0])
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def deep_net_and_data(device: Any) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Six layers of 256, and 64 samples with their labels."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    net = nn.Sequential(*layers, nn.Linear(256, 10)).to(device)
    return net, torch.randn(64, 256, device=device), torch.randint(0, 10, (64,), device=device)


def accumulated_gradient(model: nn.Module, window: Batch) -> Tensor:
    model.zero_grad()
    for features, classes in window:
        (F.cross_entropy(model(features), classes) / len(window)).backward()
    return gradient(model)  # all parameters' .grad as one tensor


def big_batch_gradient(model: nn.Module, window: Batch) -> Tensor:
    model.zero_grad()
    features, classes = (torch.cat(column) for column in zip(*window, strict=True))
    F.cross_entropy(model(features), classes).backward()
    return gradient(model)


def with_other_masks(
    gradient_of: Callable[[nn.Module, Batch], Tensor], window: Batch, first_seed: int, draws: int = 200
) -> Tensor:
    """A row for each draw of dropout's masks."""
    model, found = make_model(dropout=0.5), []
    for draw in range(draws):
        torch.manual_seed(2 * draw + first_seed)
        found.append(gradient_of(model, window))
    return torch.stack(found)


def with_other_parts(window: Batch, parts_of: int, draws: int = 200) -> tuple[Tensor, Tensor]:
    """With BatchNorm: a row for each way to cut the window's samples into parts, and rows of the big batch."""
    model, found = make_model(batch_norm=True), []
    features, classes = (torch.cat(column) for column in zip(*window, strict=True))
    for draw in range(draws):
        order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(draw))
        parts = [(features[part], classes[part]) for part in order.split(parts_of)]
        found.append(accumulated_gradient(model, parts))
    return torch.stack(found), big_batch_gradient(model, window).expand(draws, -1)


def random_features(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 6, generator=generator, dtype=torch.float64)


def classify(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), (x[:, 0] > 0.5).long())


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


def count(batch: Tokens) -> Tensor:
    return (batch[1] != -100).sum()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


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
