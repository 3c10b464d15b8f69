"""window: the gradient of a window of micro-batches against that of one big batch, in an epoch's first and last."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, IterableDataset

from course_lib.preflight.checks.dealing import MOST_INDICES
from course_lib.preflight.report import Finding, Judgement
from course_lib.preflight.runs.lightning_run import Enough, LightningRun, nothing
from course_lib.preflight.runs.plain_loop import PlainLoop

CHAPTER = "04_gradient_accumulation"
MOST_BATCHES = 64
TOLERANCE = 1e-3
"""Of the norm of the big batch's gradient; in single precision, rounding is far below."""


@dataclass(frozen=True)
class Compared:
    """One window: the gradient that its step was made with, and the big batch's."""

    batch_sizes: tuple[int, ...]
    last: bool
    """Whether it is the last of an epoch."""
    difference: float
    """The norm of the difference, as a share of the big batch's."""
    factor: float | None
    """Where the two point in one direction: how many times the big batch's gradient was applied."""


def judge_windows(run: LightningRun | PlainLoop) -> Callable[[Path], Judgement]:
    """A trial: make two windows, and hold each gradient against the big batch's at the same weights."""

    def trial(folder: Path) -> Judgement:
        if isinstance(run, PlainLoop):
            k = run.accumulate_grad_batches
            if k == 1:
                return Judgement()
            windows = _of_loop(run)
        else:
            by_epoch = run.accumulate_grad_batches
            sizes = set(by_epoch.values()) if isinstance(by_epoch, dict) else {by_epoch}
            k = max(sizes)
            if k == 1:
                return Judgement()
            if len(sizes) > 1:
                return _not_judged("accumulate_grad_batches changes between epochs")
            windows = _of_trainer(run, folder, k)
        judgement = _judge(windows, k)
        if any(isinstance(module, _BatchNorm) for module in run.model.modules()):
            judgement.notes.append(
                "window: BatchNorm takes the statistics of each micro-batch, so no accumulation equals one "
                "big batch there; it was switched off for the comparison"
            )
        return judgement

    return trial


def _not_judged(why: str) -> Judgement:
    return Judgement(not_judged={"window": why})


# -------------------------------------------------------------------------------------------------------- the trials


def stop_drawing(model: nn.Module) -> None:
    """Put BatchNorm and what drops in evaluation mode, as no accumulation equals one big batch there."""
    for module in model.modules():
        if isinstance(module, _BatchNorm | _DropoutNd) or (module is not model and _drops(module)):
            module.training = False


def _drops(module: nn.Module) -> bool:
    """Whether it may drop by itself, as attention does by a number that it holds, or by that of a Dropout in it."""
    return any("drop" in name for name in (*vars(module), *dict(module.named_children())))


class Windows:
    """Collects the micro-batches of a window, and compares when its step is made."""

    def __init__(self, model: nn.Module, big_loss: Callable[[Any], Tensor], count: int) -> None:
        self.model, self.big_loss, self.count = model, big_loss, count
        self.batches: list[Any] = []
        self.seen = 0
        self.compared: list[Compared] = []
        self.refused = ""

    def batch(self, batch: Any) -> None:
        """A micro-batch is about to be run."""
        self.batches.append(batch)
        self.seen += 1
        stop_drawing(self.model)

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step, and the gradients are there."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        batches, self.batches = self.batches, []
        try:
            big = put_together(batches)
        except ValueError as error:
            self.refused = str(error)
            return
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.big_loss(big), parameters, allow_unused=True)
        applied = _flat([p.grad for p in parameters], parameters)
        reference = _flat(gradients, parameters)
        norm = reference.norm().item()
        if norm == 0:
            return
        factor = (applied @ reference).item() / norm**2
        along = (applied - factor * reference).norm().item() <= TOLERANCE * norm
        self.compared.append(
            Compared(
                batch_sizes=tuple(map(size_of, batches)),
                last=self.seen >= self.count,
                difference=(applied - reference).norm().item() / norm,
                factor=factor if along else None,
            )
        )


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([g.detach().reshape(-1).double() for g in filled])


def _of_trainer(run: LightningRun, folder: Path, k: int) -> Windows:
    trainer, model = run.trainer, run.model
    exact = run.accumulates_exactly
    windows = Windows(model, lambda batch: loss_of(model, batch, exact), 0)
    trainer.gradient_clip_val = None

    def few(loader: Any) -> Any:
        picked = _first_and_last_window(loader, k)
        windows.count = len(picked)
        return DataLoader(loader.dataset, batch_sampler=picked, collate_fn=loader.collate_fn)

    def begin(trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        windows.batch(batch)

    def before_step(trainer: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
        windows.step(optimizer)

    def end(*_: Any) -> None:
        if windows.seen >= windows.count:
            raise Enough

    run.start(
        folder,
        world_size=run.world_size,
        prepare_loader=few,
        on_train_batch_start=begin,
        on_before_optimizer_step=before_step,
        on_train_batch_end=end,
    )
    return windows


def _of_loop(run: PlainLoop) -> Windows:
    k = run.accumulate_grad_batches
    picked = _first_and_last_window(run.loader, k)
    windows = Windows(run.model, lambda batch: run.loss_fn(run.model, batch), len(picked))
    run.optimizer.register_step_pre_hook(windows.step)
    run.optimizer.zero_grad()
    for number, batch in enumerate(
        DataLoader(run.loader.dataset, batch_sampler=picked, collate_fn=run.loader.collate_fn)
    ):
        windows.batch(batch)
        (run.loss_fn(run.model, batch) / k).backward()  # type: ignore[no-untyped-call]
        if (number + 1) % k == 0 or number + 1 == len(picked):
            run.optimizer.step()
            run.optimizer.zero_grad()
    return windows


def _first_and_last_window(loader: Any, k: int) -> list[list[int]]:
    """The indices of the first window and of the last, which may be short, of one epoch."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ValueError("the micro-batches of a stream cannot be chosen")
    if len(loader.dataset) > MOST_INDICES or 2 * k > MOST_BATCHES:
        raise ValueError(f"{len(loader.dataset):,} samples in windows of {k:,} are too many for a trial of seconds")
    batches = [list(batch) for batch in loader.batch_sampler]
    left = len(batches) % k or k
    return batches if len(batches) <= 2 * k else batches[:k] + batches[-left:]


def run_training_step(model: Any, batch: Any) -> Any:
    """What ``training_step`` returns for a batch; what it logs is dropped."""
    step = type(model).training_step
    arguments = (batch, 0)[: len(inspect.signature(step).parameters) - 1]
    own = {name: vars(model)[name] for name in ("log", "log_dict") if name in vars(model)}
    model.__dict__.update(log=nothing, log_dict=nothing)
    try:
        return step(model, *arguments)
    finally:
        for name in ("log", "log_dict"):
            model.__dict__.pop(name)
        model.__dict__.update(own)


def loss_of(model: Any, batch: Any, exact: bool) -> Tensor:
    """The loss that ``training_step`` gives of a batch."""
    output = run_training_step(model, batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if exact and isinstance(loss, tuple | list):
        return loss[0] / loss[1]
    if not isinstance(loss, Tensor):
        raise ValueError(f"training_step gave {type(loss).__name__} for one big batch")
    return loss


def size_of(batch: Any) -> int:
    """The samples of a batch: the length of the first tensor in it."""
    while isinstance(batch, Mapping | list | tuple) and len(batch):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, Tensor) and batch.ndim else 1


def put_together(batches: Sequence[Any]) -> Any:
    """One big batch of several; a ValueError where their shapes do not allow it."""
    first = batches[0]
    if isinstance(first, Tensor):
        if first.ndim == 0 or len({tuple(batch.shape[1:]) for batch in batches}) > 1:
            shapes = " and ".join(str(tuple(batch.shape)) for batch in batches[:2])
            raise ValueError(f"batches of the shapes {shapes} cannot be put together to a big one")
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {key: put_together([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple | list) and any(isinstance(part, Tensor | Mapping | tuple | list) for part in first):
        return [put_together(parts) for parts in zip(*batches, strict=True)]
    if isinstance(first, list):
        return [part for batch in batches for part in batch]
    return first


# --------------------------------------------------------------------------------------------------------- judging


def _judge(windows: Windows, k: int) -> Judgement:
    if windows.refused:
        return _not_judged(windows.refused)
    if not windows.compared:
        return _not_judged("no window had a gradient to compare")
    first = windows.compared[0]
    if len(first.batch_sizes) == k and first.factor is not None and abs(first.factor * k - 1) <= TOLERANCE:
        # The loss is a sum, of which each window takes the k-th part: every sample weighs the same.
        wrong = [w for w in windows.compared if w.factor is None or abs(w.factor * k - 1) > TOLERANCE]
    else:
        wrong = [window for window in windows.compared if window.difference > TOLERANCE]
    return Judgement(findings=[_finding(wrong[0], k)] if wrong else [])


def _finding(window: Compared, k: int) -> Finding:
    sizes = window.batch_sizes
    which = "The last window of an epoch" if window.last else "The first window of an epoch"
    shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
    holds = f"{which}, micro-batches of {shown} samples,"
    exact = "Return (loss_sum, count) and use callbacks.ExactAccumulation, or course_lib.accumulation.accumulate."
    if window.factor is not None:
        short = f": it holds {len(sizes)} micro-batches and is divided by {k}" if len(sizes) < k else ""
        says = f"{holds} steps with {window.factor:.3g} times the gradient of one big batch{short}."
        means = f"Its samples count {window.factor:.3g} times as much as those of a window of {k} micro-batches."
    else:
        says = (
            f"{holds} steps with a gradient that differs by {100 * window.difference:.0f} % from the one big batch's."
        )
        means = "The mean of the micro-batches' means is not the mean of their samples or labels: some weigh more."
    return Finding("window", says, means, exact, CHAPTER)
