"""window: the gradient of a window of micro-batches against that of one big batch, in an epoch's first and last."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, IterableDataset

from course_lib._tensors import parameters_of
from course_lib._words import counted, plural
from rehearse.report import Judgement, not_applicable, not_judged
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import MOST_INDICES, Enough, seed_as_another_process

MOST_BATCHES = 64
_CHANGING = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""The hooks that may change a gradient. The first of a module, and all of a callback, come before the comparison."""
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


def judge_windows(run: LightningRun, by_epoch: int | dict[int, int], limit: int | float) -> Callable[[Path], Judgement]:
    """A trial: make two windows, and hold each gradient against the big batch's at the same weights.

    ``by_epoch``: the micro-batches of a window, as the run has it when it has started; a dict says it by epoch.
    ``limit``: its ``limit_train_batches``.
    """

    def trial(folder: Path) -> Judgement:
        sizes = set(by_epoch.values()) if isinstance(by_epoch, dict) else {by_epoch}
        k = max(sizes)
        if k == 1:
            return Judgement()
        if "dataloader_iter" in inspect.signature(getattr(run.model, "training_step", trial)).parameters:
            return _zeroed_late(k)
        if len(sizes) > 1:
            return not_applicable("window", "accumulate_grad_batches changes between epochs")
        try:
            judgement = _judge(_compared(run, folder, k, limit), k)
        except Streamed:
            return not_applicable("window", "the micro-batches of a stream cannot be chosen")
        if any(isinstance(module, _BatchNorm) for module in run.model.modules()):
            judgement.notes.append(
                "window: BatchNorm takes the statistics of each micro-batch, so no accumulation equals one "
                "big batch there; it was switched off for the comparison"
            )
        return judgement

    return trial


class Streamed(Exception):
    """The samples come as a stream."""


def stop_drawing(model: nn.Module) -> None:
    """Put BatchNorm and what drops in evaluation mode, as no accumulation equals one big batch there."""
    for module in model.modules():
        if isinstance(module, _BatchNorm | _DropoutNd) or (module is not model and _drops(module)):
            module.training = False


def _drops(module: nn.Module) -> bool:
    """Whether it may drop by itself, as attention does by a number that it holds, or by that of a Dropout in it."""
    return any("drop" in name for name in (*vars(module), *dict(module.named_children())))


class ComparedWindows:
    """Collects the micro-batches of a window, and compares when its step is made."""

    def __init__(self, run: LightningRun) -> None:
        self.run = run
        self.count = 0
        """Micro-batches that are run."""
        self.begun = 0
        self.batches: list[Any] = []
        self.compared: list[Compared] = []
        self.changed_by = ""
        """The hook of the module, or of a callback, that has changed a gradient; empty where none has."""
        self.changed_before = False
        """Whether one has changed them before they were compared."""
        self.refused = ""
        self.not_finite = self.ruined = False
        """Whether the gradient of one big batch is not; and then, after the step, the weights."""

    def watch(self, owner: Any, hook: str) -> None:
        """Notice where this hook changes a gradient, as one does that divides it by the labels."""
        original, parameters = getattr(owner, hook), list(self.run.model.parameters())
        of_module = owner is self.run.model

        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            before = _flat([p.grad for p in parameters], parameters)
            returned = original(*arguments, **options)
            if not torch.equal(before, _flat([p.grad for p in parameters], parameters)):
                self.changed_by = f"{'the module' if of_module else type(owner).__name__}'s `{hook}`"
                self.changed_before |= not of_module or hook == _CHANGING[0]
            return returned

        setattr(owner, hook, watched)

    def batch(self, batch: Any) -> None:
        """A micro-batch is about to be run."""
        self.batches.append(batch)
        self.begun += 1
        stop_drawing(self.run.model)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, and the gradients are there."""
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        batches, self.batches = self.batches, []
        try:
            big = put_together(batches)
        except ValueError as error:
            self.refused = str(error)
            return
        applied = _flat([p.grad for p in parameters], parameters)
        reference = self._gradient(big, parameters, seed=0)
        norm = reference.norm().item()
        if norm == 0:
            return
        if not math.isfinite(norm):
            self.not_finite = True
            return
        difference = (applied - reference).norm().item() / norm
        if not difference <= TOLERANCE:  # NaN is none
            noise = (self._gradient(big, parameters, seed=1) - reference).norm().item() / norm
            if noise > TOLERANCE:
                self.refused = (
                    f"the forward draws random numbers: the gradient of one big batch differs by {100 * noise:.2g} % "
                    "from itself under another seed, so a window's cannot be held against it"
                )
                return
        factor = (applied @ reference).item() / norm**2
        along = (applied - factor * reference).norm().item() <= TOLERANCE * norm
        self.compared.append(
            Compared(
                batch_sizes=tuple(map(size_of, batches)),
                last=self.begun >= self.count,
                difference=difference,
                factor=factor if along else None,
            )
        )

    def _gradient(self, batch: Any, parameters: Sequence[Tensor], seed: int) -> Tensor:
        seed_as_another_process(seed)
        with torch.enable_grad():
            loss = self.run.loss_of(self.run.model, batch)
            return _flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([g.detach().reshape(-1).double() for g in filled])


def _compared(run: LightningRun, folder: Path, k: int, limit: int | float) -> ComparedWindows:
    windows = ComparedWindows(run)

    def few(loader: Any) -> Any:
        picked = _first_and_last_window(loader, k, limit)
        windows.count = read = len(picked)
        while picked and isinstance(limit, float) and int(limit * read) < windows.count:
            read += 1  # the trial's Trainer has the limit, too
        picked += picked[-1:] * (read - len(picked))
        return DataLoader(loader.dataset, batch_sampler=picked, collate_fn=loader.collate_fn)

    def end(*_: Any) -> None:
        if windows.not_finite:  # what skips such a step leaves the weights as they were
            windows.ruined |= not all(bool(p.isfinite().all()) for p in run.model.parameters())
        if windows.begun >= windows.count:
            raise Enough

    for owner, hook in run.own_hooks(*_CHANGING):
        windows.watch(owner, hook)
    run.start(
        folder,
        prepare_loader=few,
        on_train_batch_start=lambda trainer, model, batch, batch_idx: windows.batch(batch),
        on_before_optimizer_step=lambda trainer, model, optimizer: windows.step(optimizer),
        on_train_batch_end=end,
    )
    return windows


def _first_and_last_window(loader: Any, k: int, limit: int | float) -> list[list[int]]:
    """The indices of the first window and of the last, which may be short, of one epoch."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise Streamed
    if len(loader.dataset) > MOST_INDICES or 2 * k > MOST_BATCHES:
        raise ValueError(f"{len(loader.dataset):,} samples in windows of {k:,} are too many for a trial of seconds")
    batches = [list(batch) for batch in loader.batch_sampler]
    batches = batches[: limit if isinstance(limit, int) else int(limit * len(batches))]
    left = len(batches) % k or k
    return batches if len(batches) <= 2 * k else batches[:k] + batches[-left:]


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


def _judge(windows: ComparedWindows, k: int) -> Judgement:
    if windows.refused:
        return not_applicable("window", windows.refused)
    if not windows.compared and not windows.not_finite:
        return not_judged(
            "window", "no window had a gradient other than 0 to compare; a loss that is a constant teaches nothing"
        )
    factors = [w.factor or 0.0 for w in windows.compared if len(w.batch_sizes) == k]
    if factors and abs(factors[0] * k - 1) <= TOLERANCE and all(abs(factor - 1) > TOLERANCE for factor in factors):
        # The loss is a sum, of which each window takes the k-th part: every sample weighs the same.
        wrong = [w for w in windows.compared if w.factor is None or abs(w.factor * k - 1) > TOLERANCE]
    else:
        wrong = [window for window in windows.compared if not window.difference <= TOLERANCE]
    if not wrong and windows.ruined:
        return not_judged("window", "the gradient of one big batch is not finite, and its step makes the weights NaN")
    if not wrong and windows.not_finite:
        return not_applicable("window", "the gradient of one big batch is not finite, and its step is skipped")
    if not wrong:
        return Judgement(compared={"window": "the gradients of an epoch's first and last window with one big batch's"})
    if windows.changed_before or (windows.changed_by and wrong[0].factor is not None):
        changes = "changes the gradients, and how it would change the one big batch's is not known"
        return not_applicable("window", f"{windows.changed_by} {changes}")
    return _wrong(wrong[0], k)


def _zeroed_late(k: int) -> Judgement:
    """Seen coming in Lightning #18619."""
    return Judgement().find(
        "window",
        "training_step takes the loader's iterator (dataloader_iter), and there Lightning zeroes the gradients of a "
        f"window one micro-batch late: one of {k} micro-batches steps with those of the last {k - 1}.",
        "The first micro-batch of each window is lost; a last window of one also has the gradients of the one before.",
        "Take the batch in training_step, or accumulate yourself under manual optimization.",
    )


def _wrong(window: Compared, k: int) -> Judgement:
    sizes = window.batch_sizes
    which = "The last window of an epoch" if window.last else "The first window of an epoch"
    shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
    holds = f"{which}, {plural(len(sizes), 'a micro-batch', 'micro-batches')} of {shown} samples,"
    exact = "Return (loss_sum, count) and use callbacks.ExactAccumulation, or course_lib.accumulation.accumulate."
    if window.factor is not None:
        short = (
            f": it holds {counted(len(sizes), 'micro-batch', 'micro-batches')} and is divided by {k}"
            if len(sizes) < k
            else ""
        )
        says = f"{holds} steps with {window.factor:.3g} times the gradient of one big batch{short}."
        those = f"those of a window of {k} micro-batches" if short else "in one big batch"
        means = f"Its samples count {window.factor:.3g} times as much as {those}."
    elif math.isnan(window.difference):
        says = f"{holds} steps with a gradient that is NaN, and that of one big batch is not."
        means = "The mean of a micro-batch without a label is 0 / 0: the weights become NaN, or the step is skipped."
    else:
        says = (
            f"{holds} steps with a gradient that differs by {100 * window.difference:.0f} % from the one big batch's."
        )
        means = "The mean of the micro-batches' means is not the mean of their samples or labels: some weigh more."
    return Judgement().find("window", says, means, exact)
