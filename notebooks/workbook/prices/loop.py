"""The training loop that both jobs and all faults share. A fault changes one place of :func:`train`."""

from __future__ import annotations

import math
from dataclasses import replace as replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from workbook.prices.jobs import Job, cross_entropy_sum, shuffled, warm_up_then_cosine, windows
from workbook.prices.jobs import split as split


class Reading(NamedTuple):
    """What the validation of an epoch says."""

    loss: float
    accuracy: float


def train(job: Job, seed: int) -> list[Reading]:
    torch.manual_seed(seed)
    model = job.model()
    optimizer = job.optimizer(model)
    micro_batches = math.ceil(len(job.training) / job.micro_batch)
    total_steps = job.epochs * math.ceil(micro_batches / job.k)
    schedule = LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, total_steps))
    readings = []
    for epoch in range(job.epochs):
        order = shuffled(job.training, seed, epoch)
        loader = DataLoader(job.samples, job.micro_batch, sampler=order, collate_fn=list)
        model.train()
        for window in windows(enumerate(loader), job.k):
            batches = []
            for number, samples in window:
                rng = np.random.default_rng([seed, epoch, number])
                batches.append(job.collate(samples, rng))
            count = sum(batch.target_count for batch in batches)
            for batch in batches:
                loss = job.loss_sum(model, batch) / count
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm.isfinite():
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        loss_sum, right, count = 0.0, 0.0, 0
        for samples in DataLoader(job.samples, 64, sampler=job.validation, collate_fn=list):
            batch = job.collate(samples, None)
            with torch.no_grad():
                scores = model(batch.inputs)
            loss_sum += cross_entropy_sum(scores, batch.targets).item()
            right += int((scores.argmax(-1) == batch.targets).sum())
            count += batch.target_count
        readings.append(Reading(loss_sum / count, right / count))
    return readings
