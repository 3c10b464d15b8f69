"""The uninterrupted run once more, in plain torch, from the batches that it logged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hunt.pieces import DrawnRun

Line = dict[str, Any]
"""One micro-batch of one rank: its number in the run, its epoch, its indices, and its tensors."""


def lines_of(folder: Path, life: int, rank: int) -> list[Line]:
    """What one rank of one life wrote: the micro-batches that it trained, and ahead of them how many were done."""
    path = Path(folder, f"life-{life}-{rank}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kept_lines(folder: Path, ranks_of_lives: Sequence[int]) -> list[list[Line]]:
    """Of each life, what the run's end rests on: what came behind the last checkpoint that was resumed is left out.

    A life may have begun several times, with the same objects. A closure that is called again writes the same line.
    """
    kept: list[list[Line]] = []
    for life, ranks in enumerate(ranks_of_lives):
        kept.append([])
        written = [lines_of(folder, life, rank) for rank in range(ranks)]
        per_rank = [[next(same) for _, same in itertools.groupby(lines, key=str)] for lines in written]
        for number, line in enumerate(per_rank[0]):
            if "resumed" in line:
                kept = [[one for one in lines if one["number"] <= line["resumed"]] for lines in kept]
            else:
                kept[-1] += [lines[number] for lines in per_rank if number < len(lines)]
    return kept


def can_be_trained_by_hand(run: DrawnRun) -> bool:
    """Whether nothing but the batches decides: no draws in the forward, no averages."""
    averages = any("Averaging" in name for name in run.callbacks)
    otherwise = run.schedule.startswith(("plateau", "every other"))
    # It may stop within a window, whose gradients are then left.
    otherwise |= run.stops_early == "val" and run.val_check_interval is not None
    drawn = run.dropout or run.noisy_forward
    otherwise |= run.own_code != () or run.precision != ""
    otherwise |= run.batch_norm and max(run.ranks) > 1
    return not (drawn or run.goes_by_metrics or averages or otherwise)


def trained_by_hand(run: DrawnRun, make_net: Any, make_optimizer: Any, lines: Iterable[Line]) -> nn.Module:
    """Windows of k micro-batches; each is an update of the mean over its samples, or of its micro-batches' means."""
    net = make_net()
    if run.frozen:
        net[0].requires_grad_(False)
    made = make_optimizer(net)
    optimizer, schedule = (made, None) if isinstance(made, torch.optim.Optimizer) else _parts(made)
    for epoch, of_epoch in itertools.groupby(lines, key=lambda line: line["epoch"]):
        steps = [list(of_step) for _, of_step in itertools.groupby(of_epoch, key=lambda line: line["number"])]
        if run.thaws and epoch == 1:
            net[0].requires_grad_(True)
        k = [length for first, length in run.window_lengths.items() if first <= epoch][-1]
        for begin in range(0, len(steps), k):
            window = list(itertools.chain(*steps[begin : begin + k]))
            ranks = len(steps[begin])
            indices = [i for line in window for i in line["indices"]]
            if ("SkipBadSteps" in run.callbacks and run.bad_sample in indices) or run.unusable in indices:
                continue
            samples = sum(len(line["indices"]) for line in window)
            optimizer.zero_grad()
            for line in window:
                x = torch.tensor(line["x"], dtype=torch.float64)
                y = torch.tensor(line["y"], dtype=torch.float64)
                squares = nn.functional.mse_loss(net(x), y, reduction="sum")
                share = 1 / samples if run.weighs_samples else 1 / (len(y) * k * ranks)
                (squares * share).backward()
            if run.clip:
                clip = nn.utils.clip_grad_value_ if run.clips_values else nn.utils.clip_grad_norm_
                clip(net.parameters(), 0.5)
            optimizer.step()
            if schedule is not None and run.schedule != "step of epochs":
                schedule.step()
        if schedule is not None and run.schedule == "step of epochs":
            schedule.step()
    return net


def _parts(made: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    return made["optimizer"], made["lr_scheduler"]["scheduler"]
