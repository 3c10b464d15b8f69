"""What chapter 10 asks: three runs to be mended. The second, shared by two ranks: `ch10_two_ranks_exercise`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

from course_lib.callbacks import ExactAccumulation
from workbook.calls import Allowed
from workbook.ch10_fits import MakeRun, Record, fault_of_rehearsal, fitted
from workbook.ch10_runs.parts import IGNORED, Line, Points, Tagger, Tags
from workbook.ch10_two_ranks_exercise import two_ranks
from workbook.exercises import PropertyExercise
from workbook.trainers import quiet_trainer

# ------------------------------------------------------------------------------------------ 1: ten epochs, to the end

EPOCHS = 10


def _fault_of_length(make_run: MakeRun) -> str | None:
    record = fitted(make_run())
    if record.samples != 36:
        return f"the dataset has {record.samples} samples, and 36 were asked for: the data stay as they are."
    dealt = [list(chain.from_iterable(epoch)) for epoch in record.epochs]
    samples = [len(set(epoch)) for epoch in dealt]
    if any(len(epoch) > found for epoch, found in zip(dealt, samples, strict=True)):
        return f"an epoch has {len(dealt[0])} samples, {samples[0]} of them different: each comes once in an epoch."
    if samples and (missing := 36 - max(samples)):
        cause = "the short last batch has to be trained as well" if missing < 8 else "a flag limits the batches"
        return f"{missing} of 36 samples are missing in every epoch: {cause}."
    if samples != [36] * EPOCHS:
        whole, steps = samples.count(36), len(record.rates)
        return f"the run ends after {whole} full epochs and {steps} optimizer steps; {EPOCHS} epochs were asked for."
    return _fault_of_batches(record) or _fault_of_rate(record) or fault_of_rehearsal(make_run)


def _fault_of_batches(record: Record) -> str | None:
    for epoch in record.epochs:
        sizes = [len(batch) for batch in epoch]
        if sizes != [8, 8, 8, 8, 4]:
            return f"an epoch has batches of {sizes}: the batches stay as they were, 8 and a short last one."
    orders = {tuple(chain.from_iterable(epoch)) for epoch in record.epochs}
    if len(orders) < EPOCHS or len(record.rates) != len(sizes) * EPOCHS:
        told = f"all epochs are trained, in {len(orders)} different orders and {len(record.rates)} optimizer steps: "
        return f"{told}the batches stay shuffled, and each of them is a step."
    if all(map(torch.equal, record.weights[0], record.weights[-1])):
        return "all epochs are trained, and the weights are those of the first step: nothing is learned."
    return None


def _fault_of_rate(record: Record) -> str | None:
    peak, last = max(record.rates), record.rates[-1]
    if not peak:
        return "all epochs are trained, and the rate is 0 in each of them: nothing is learned."
    if any(after > before for before, after in pairwise(record.rates)):
        turned = record.rates.index(min(record.rates)) + 1
        if turned == len(record.rates):
            return "all epochs are trained, and the rate rises on the way: the cosine begins at its peak."
        lowest, after = 100 * min(record.rates) / peak, 100 * max(record.rates[turned:]) / peak
        asked = " Ahead of its fit, a Trainer's estimated_stepping_batches is -1." if turned == 2 else ""
        return (
            f"all epochs are trained, and the rate falls to {lowest:.0f} % of its peak by step {turned} of "
            f"{len(record.rates)} and rises again, to {after:.0f} %: the cosine has too few steps.{asked}"
        )
    if last > 0.01 * peak:
        return (
            f"all epochs are trained, and the rate ends at {100 * last / peak:.0f} % of its peak, and not near 0: a "
            "cosine over all steps, stepped at each of them, ends lower."
        )
    if record.rate_at_end > 1e-6 * peak:
        return (
            f"all epochs are trained, and the rate is at {100 * record.rate_at_end / peak:.1f} % of its peak after the "
            "last step, and not at 0: the cosine has a step too many, or too few."
        )
    for step, rate in enumerate(record.rates):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / len(record.rates))
        if abs(rate / peak - cosine) > 0.01:
            return (
                f"all epochs are trained, and the rate is at {100 * rate / peak:.0f} % of its peak in step {step}, "
                f"where a cosine that reaches 0 at the end is at {100 * cosine:.0f} %."
            )
    return None


def _ten_epochs(
    max_steps: int, horizon: int | None, max_epochs: int = EPOCHS, samples: int = 36, **options: Any
) -> MakeRun:
    def make_run() -> Any:
        trainer = quiet_trainer(max_epochs=max_epochs, max_steps=max_steps, accelerator="cpu")
        loader = {"batch_size": 8, "shuffle": True, **options}
        return trainer, Line(horizon), DataLoader(Points(samples), **loader)

    return make_run


stops_early = PropertyExercise(
    "stops early",
    _fault_of_length,
    {
        "the run ends after 8 full epochs and 40 optimizer steps": _ten_epochs(40, 40),
        "the run ends after 12 full epochs": _ten_epochs(-1, 60, max_epochs=12),
        "the short last batch has to be trained as well": _ten_epochs(40, 40, drop_last=True),
        "by step 41 of 50 and rises again, to 12 %": _ten_epochs(50, 40),
        "the rate ends at 43 % of its peak": _ten_epochs(-1, 90),
        "estimated_stepping_batches is -1": _ten_epochs(-1, -1),
        "the cosine has a step too many": _ten_epochs(-1, 51),
        "the rate ends at 100 % of its peak": _ten_epochs(-1, None),
        "the batches stay as they were, 8 and a short last one": _ten_epochs(-1, 40, batch_size=9),
        "the batches stay shuffled": _ten_epochs(-1, 50, shuffle=False),
        "each comes once in an epoch": _ten_epochs(-1, 50, shuffle=None, sampler=RandomSampler(Points(36), True)),
        "the dataset has 40 samples, and 36 were asked for": _ten_epochs(-1, 50, samples=40),
    },
    allowed=Allowed(draw=True),  # the weights of a model
    seconds=300,  # it trains
)


# ----------------------------------------------------------------------------------------- 3: every label counts alike


def _fault_of_gradient(make_run: MakeRun) -> str | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = make_run()
    record = fitted(run)
    reference = _big_batch_gradient(run[1].weights_at_start)
    largest = max(chain.from_iterable(record.epochs[0]))
    if largest > 8:
        return f"a micro-batch holds {largest} words, and the exercise's device holds 8."
    if len(record.rates) != 1:
        return f"the epoch has {len(record.rates)} optimizer steps; its four micro-batches should make one."
    [gradient] = record.gradients
    factor = float(gradient @ reference / (reference @ reference))
    apart = float((gradient - factor * reference).norm() / reference.norm())
    if apart > 1e-4:
        return (
            f"the update differs by {100 * float((gradient - reference).norm() / reference.norm()):.0f} % from "
            "that of one big batch: the labels do not all weigh the same."
        )
    if abs(factor - 1) > 1e-4:
        return (
            f"all labels weigh the same, and the update is {factor:.2f} times that of one big batch: the sum over the "
            "window should be divided by its 14 labels, once, and nothing else should scale it (a clip, other counts)."
        )
    if not _moved_by(run[1], record.rates[0], reference):
        return (
            f"the gradient is that of one big batch, and the update is not: the weights do not move by it times the "
            f"learning rate, {record.rates[0]:g}. The optimizer and the Trainer's other flags stay as they were."
        )
    return fault_of_rehearsal(make_run) or _fault_of_the_next_window(make_run)


def _fault_of_the_next_window(make_run: MakeRun) -> str | None:
    """A second epoch, whose window begins at the weights that the first one's step has left."""
    run = make_run()
    run[0].fit_loop.max_epochs = 2
    record = fitted(run)
    reference = _big_batch_gradient(record.weights[0])
    if float((record.gradients[-1] - reference).norm()) > 1e-4 * float(reference.norm()):
        return (
            "the update of the first window is that of one big batch, and the next one's is not: what is counted for a "
            "window begins at 0 with each."
        )
    return None


def _moved_by(model: Any, rate: float, gradient: Tensor) -> bool:
    before = torch.cat([weights.double().reshape(-1) for weights in model.weights_at_start])
    after = torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
    return rate > 0 and float((before - after - rate * gradient).norm()) < 1e-3 * rate * float(gradient.norm())


def _big_batch_gradient(weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the mean over all labels of the epoch, at these weights."""
    words = Tags()
    weight, bias = (value.double().requires_grad_() for value in weights)
    loss = cross_entropy(words.x.double() @ weight.T + bias, words.tags, ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([weight.grad.reshape(-1), bias.grad.reshape(-1)])  # type: ignore[union-attr]


def _tagger_run(loss: Callable[[Tensor, Tensor], Any], batch_size: int = 8, k: int = 4, exact: bool = False) -> MakeRun:
    class Weighs(Tagger):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return loss(self.scores(batch[0]), batch[1])

    def make_run() -> Any:
        callbacks = [ExactAccumulation()] if exact else []
        flags = {"accumulate_grad_batches": k, "callbacks": callbacks}
        trainer = quiet_trainer(max_epochs=1, accelerator="cpu", **flags)
        return trainer, Weighs(), DataLoader(Tags(), batch_size)

    return make_run


def _counting_on() -> Any:
    """Its count of labels is that of the run, and not of the window."""

    class Counts(Tagger):
        labels = 0

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            self.labels += int(batch[1].ne(IGNORED).sum())
            return _sum(self.scores(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 4 / self.labels

    trainer = quiet_trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=4)
    return trainer, Counts(), DataLoader(Tags(), 8)


def _mean(scores: Tensor, tags: Tensor) -> Tensor:
    return cross_entropy(scores, tags, ignore_index=IGNORED)


def _sum(scores: Tensor, tags: Tensor) -> Tensor:
    return cross_entropy(scores, tags, ignore_index=IGNORED, reduction="sum")


masked_labels = PropertyExercise(
    "masked labels",
    _fault_of_gradient,
    {
        "the labels do not all weigh the same": _tagger_run(_mean),
        "the update is 3.50 times that of one big batch": _tagger_run(_sum),
        "the update is 0.44 times that of one big batch": _tagger_run(lambda scores, tags: _sum(scores, tags) / 8),
        "a micro-batch holds 32 words": _tagger_run(_mean, batch_size=32, k=1),
        "the epoch has 4 optimizer steps": _tagger_run(_mean, k=1),
        "the update of the first window is that of one big batch": _counting_on,
        "the sum comes first": _tagger_run(
            lambda scores, tags: (tags.ne(IGNORED).sum(), _sum(scores, tags)), exact=True
        ),
    },
    allowed=Allowed(draw=True),
    seconds=300,
)

EXERCISES = (stops_early, two_ranks, masked_labels)
