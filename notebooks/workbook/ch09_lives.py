"""The lives of a run: what it trained until it was killed, and after it was started again.

A run that is killed and resumed consists of several lives. Each life's ranks write a line for every micro-batch, and
what was written before a kill stays. The rule: *a micro-batch counts if its window was applied, and was not undone by a
kill.*
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from course_lib.callbacks import SkipBadSteps, StepAudit
from course_lib.schedules import ScheduledBatchSampler, SizeSchedule
from workbook.ch09_training_script import EPOCHS, NUM_SAMPLES


class MicroBatch(NamedTuple):
    """What one rank trained in one forward and backward pass."""

    life: int
    """From 1."""
    rank: int
    epoch: int
    window: int
    """How many attempts of an optimizer step the run had made before."""
    side: int
    """Pixels a side."""
    samples: list[int]
    labelled: int
    """How many of the samples have a label."""


class Diary(Callback):
    """Writes a line for each micro-batch, which is on disk before the micro-batch is trained."""

    def __init__(self, folder: str | os.PathLike[str], life: int) -> None:
        self.folder, self.life = Path(folder), life

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        images, labels, numbers = batch
        micro_batch = MicroBatch(
            self.life, trainer.global_rank, trainer.current_epoch, trainer.global_step + _skipped(trainer),
            images.shape[-1], numbers.tolist(), int((labels >= 0).sum()),
        )  # fmt: skip
        with open(self.folder / f"diary.life{self.life}.rank{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(micro_batch) + "\n")


def _skipped(trainer: Trainer) -> int:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return sum(int(callback.skipped) for callback in callbacks if isinstance(callback, SkipBadSteps))


class Kill(Callback):
    """Kills all ranks by SIGKILL when they have trained so many micro-batches of this life; None: never."""

    def __init__(self, micro_batches: int | None) -> None:
        self.left = micro_batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.left == 0:
            if dist.is_initialized():
                dist.barrier()  # so that no rank is ahead
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        if self.left is not None:
            self.left -= 1


class End(NamedTuple):
    """How a run ended, on one rank."""

    weights: list[Tensor]
    """Parameters and buffers."""
    rate: float
    """The learning rate, as a share of its peak."""
    planned: int | None
    """Attempts, by the audit; None without one, and on other ranks, which it does not plan."""
    planned_updates: int | None
    """By the script's own plan."""
    attempts: int
    skipped: int
    audit: str


def end_of(trainer: Trainer) -> End:
    """What a Trainer that has fitted can tell."""
    audits = [callback for callback in trainer.callbacks if isinstance(callback, StepAudit)]  # type: ignore[attr-defined]
    plan_of_script = getattr(trainer.lightning_module, "plan", None)
    group = trainer.optimizers[0].param_groups[0]
    skipped = _skipped(trainer)
    return End(
        weights=[tensor.detach().cpu().clone() for tensor in trainer.lightning_module.state_dict().values()],
        rate=group["lr"] / group["initial_lr"],
        planned=audits[0].plan.total_steps if audits and audits[0].plan else None,
        planned_updates=plan_of_script and plan_of_script.total_steps,
        attempts=trainer.global_step + skipped,
        skipped=skipped,
        audit=audits[0].explain() if audits else "",
    )


def read_diary(folder: str | os.PathLike[str]) -> list[MicroBatch]:
    """All lives' micro-batches, by life and rank, in the order in which they were trained."""
    found = []
    for path in Path(folder).glob("diary.life*.rank*.jsonl"):
        found += [MicroBatch(*json.loads(line)) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda micro_batch: micro_batch[:2])  # stable: within a rank as written


def applied(diary: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Those whose window was not undone: a life undoes the windows from its first one on."""
    first_window: dict[int, int] = {}
    for micro_batch in diary:
        first_window.setdefault(micro_batch.life, micro_batch.window)
    kept = []
    for micro_batch in diary:
        later = [window for life, window in first_window.items() if life > micro_batch.life]
        if micro_batch.window < min(later, default=micro_batch.window + 1):
            kept.append(micro_batch)
    return kept


def missing_and_twice(diary: Iterable[MicroBatch], num_samples: int, epochs: int) -> list[tuple[int, int]]:
    """For each epoch: how many samples were never applied, and how many more than once."""
    counts: list[Counter[int]] = [Counter() for _ in range(epochs)]
    for micro_batch in diary:
        counts[micro_batch.epoch].update(micro_batch.samples)
    told = []
    for count in counts:
        missing = num_samples - len(count)
        twice = sum(times > 1 for times in count.values())
        told.append((missing, twice))
    return told


def missing_and_twice_of_run(diary: Iterable[MicroBatch]) -> tuple[int, int]:
    """The same for all epochs of the script's run together."""
    by_epoch = missing_and_twice(diary, NUM_SAMPLES, EPOCHS)
    return sum(missing for missing, _ in by_epoch), sum(twice for _, twice in by_epoch)


def weights_of_labels(diary: Sequence[MicroBatch], k: int, ranks: int) -> list[float]:
    """For each window: a labelled sample's weights in the update, times what they should be; smallest and largest.

    A Trainer gives each of ``k`` micro-batches and each rank the same weight, however many labelled samples it has. In
    one big batch all labelled samples of the window have the same.
    """
    windows: dict[int, list[int]] = {}
    for micro_batch in diary:
        windows.setdefault(micro_batch.window, []).append(micro_batch.labelled)
    ratios = []
    for labelled in windows.values():
        ratios += [sum(labelled) / (k * ranks * count) for count in labelled if count]
    return [min(ratios), max(ratios)]


def planned_attempts(diary: Sequence[MicroBatch], end: End, bad_sample: int, life: int | None = None) -> int:
    """Of a run that came to other ranks with a life: the updates of its plan, and what was skipped before that life.

    By default with its last one.
    """
    if end.planned is not None:  # it came to none: no life on others has saved anything
        return end.planned
    assert end.planned_updates is not None
    return end.planned_updates + _windows_with(_before(diary, life or _last_life(diary)), bad_sample)


def rate_by_hand(diary: Sequence[MicroBatch], end: End, samples_of_run: int, bad_sample: int) -> float:
    """Where a cosine ends that follows the run's progress, if the ranks have changed with the last life.

    What was done before counts by its share of the samples, and the rest by this life's updates.
    """
    life = _last_life(diary)
    before = _before(diary, life)
    first_window = min(micro_batch.window for micro_batch in diary if micro_batch.life == life)
    done = sum(len(micro_batch.samples) for micro_batch in before) / samples_of_run
    updates = end.attempts - first_window - (end.skipped - _windows_with(before, bad_sample))
    progress = done + (1 - done) * updates / (planned_attempts(diary, end, bad_sample) - first_window)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _last_life(diary: Sequence[MicroBatch]) -> int:
    return max(micro_batch.life for micro_batch in diary)


def _before(diary: Sequence[MicroBatch], life: int) -> list[MicroBatch]:
    return [micro_batch for micro_batch in applied(diary) if micro_batch.life < life]


def _windows_with(diary: Sequence[MicroBatch], sample: int) -> int:
    return len({micro_batch.window for micro_batch in diary if sample in micro_batch.samples})


def not_finite(end: End) -> int:
    """How many numbers of the weights are NaN or infinite."""
    return sum(int((~tensor.isfinite()).sum()) for tensor in end.weights)


def differing_weights(end: End, other: End) -> int:
    """How many numbers of the weights differ, bit for bit."""
    pairs = zip(end.weights, other.weights, strict=True)
    return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def simulate(
    kills: Sequence[int | None],
    ranks: Sequence[int],
    schedule: SizeSchedule,
    *,
    num_samples: int,
    epochs: int,
    save_every: int,
    bad_sample: int,
    seed: int,
) -> list[MicroBatch]:
    """The diary of a run without training it: its sampler deals, and checkpoints are taken where a Trainer takes them.

    Args:
        kills: After how many micro-batches each life ends; None: at the end of the run.
        ranks: Of each life.
        save_every: A checkpoint is taken after as many updates; an attempt with the bad sample is none.
    """
    diary: list[MicroBatch] = []
    saved: dict[str, Any] | None = None
    window_saved = updates_saved = 0
    for life, (kill, world_size) in enumerate(zip(kills, ranks, strict=True), start=1):
        samplers = [
            ScheduledBatchSampler(num_samples, schedule, seed=seed, num_replicas=world_size, rank=rank)
            for rank in range(world_size)
        ]
        if saved is not None:
            for sampler in samplers:
                sampler.load_state_dict(saved)
        k = schedule.accumulate_grad_batches(world_size)
        assert isinstance(k, int)
        window, updates, trained, has_bad = window_saved, updates_saved, 0, False
        for epoch in range(samplers[0].epoch, epochs):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            before = samplers[0].steps_before
            dealt = list(zip(*samplers, strict=True))
            for number, batches in enumerate(dealt, start=1):
                if trained == kill:
                    break
                for rank, batch in enumerate(batches):
                    samples = [int(index) for index in batch]
                    has_bad |= bad_sample in samples
                    diary.append(MicroBatch(life, rank, epoch, window, int(batch[0].size), samples, 0))
                trained += 1
                if (before + number) % k == 0 or number == len(dealt):
                    window, updates, has_bad = window + 1, updates + (not has_bad), False
                    if updates % save_every == 0 and updates != updates_saved:
                        saved, window_saved, updates_saved = samplers[0].state_dict(number), window, updates
            if trained == kill:
                break
    return sorted(diary, key=lambda micro_batch: micro_batch[:2])
