"""What chapter 10 asks: three runs to be mended. Each is trained and counted, and then judged by preflight as well."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

from course_lib.callbacks import ExactAccumulation, Preflight
from course_lib.launch import RankError, run_ranks
from course_lib.preflight import preflight
from course_lib.samplers import ShardedBatchSampler
from workbook.calls import Allowed
from workbook.ch10_runs.parts import IGNORED, Line, Neighbours, Points, Tagger, Tags
from workbook.exercises import PropertyExercise
from workbook.trainers import quiet_trainer

MakeRun = Callable[[], Any]
STILL = "what was counted is right, and preflight still finds this:"


class Uneven(Exception):
    """The ranks have different numbers of batches: trained, they would wait for each other without an end."""


class Record(Callback):
    """What a fit is given and does."""

    def __init__(self) -> None:
        self.epochs: list[list[list[int]]] = []
        """The indices of each batch of each epoch; of batches without indices, their size."""
        self.rates: list[float] = []
        self.gradient: Tensor | None = None
        """That of the first optimizer step, flat."""
        self.counts: list[int] = []
        """The batches of an epoch on each rank."""
        self.samples = 0
        """Of the dataset."""
        self.rate_at_end = 0.0
        """That of a step after the last one."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.samples = len(trainer.train_dataloader.dataset)
        if trainer.world_size > 1:
            own = sum(1 for _ in trainer.train_dataloader.batch_sampler)
            counts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(counts, own)
            self.counts = counts
            if len(set(counts)) > 1:
                raise Uneven

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.epochs[-1].append(batch[2].tolist() if len(batch) == 3 else [len(batch[0])])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: where a sum and a count are returned, the sum comes first")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rate_at_end = trainer.optimizers[0].param_groups[0]["lr"]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.reshape(-1).double() for p in pl_module.parameters()])


def _fit(run: Any, callback: Callback) -> None:
    if not (isinstance(run, tuple | list) and len(run) == 3):
        values = f" of {len(run)} values" if isinstance(run, tuple | list) else ""
        raise ValueError(f"the function should return (trainer, model, data), got {type(run).__name__}{values}")
    trainer, model, data = run
    trainer.callbacks.append(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data)


def _fitted(run: Any) -> Record:
    record = Record()
    _fit(run, record)
    return record


def _fault_of_preflight(make_run: MakeRun) -> str | None:
    for finding in preflight(*make_run()).findings:
        return f"{STILL} {finding.says}"
    return None


# ------------------------------------------------------------------------------------------ 1: ten epochs, to the end

EPOCHS = 10


def _fault_of_length(make_run: MakeRun) -> str | None:
    record = _fitted(make_run())
    if record.samples != 36:
        return f"the dataset has {record.samples} samples, and 36 were asked for: the data stay as they are."
    dealt = [list(chain.from_iterable(epoch)) for epoch in record.epochs]
    samples = [len(set(epoch)) for epoch in dealt]
    if any(len(epoch) > found for epoch, found in zip(dealt, samples, strict=True)):
        return f"an epoch has {len(dealt[0])} samples, {samples[0]} of them different: each comes once in an epoch."
    if samples and (missing := 36 - max(samples)):
        return f"{missing} of 36 samples are missing in every epoch: the short last batch has to be trained as well."
    if samples != [36] * EPOCHS:
        whole, steps = samples.count(36), len(record.rates)
        return f"the run ends after {whole} full epochs and {steps} optimizer steps; {EPOCHS} epochs were asked for."
    return _fault_of_batches(record) or _fault_of_rate(record) or _fault_of_preflight(make_run)


def _fault_of_batches(record: Record) -> str | None:
    for epoch in record.epochs:
        sizes = [len(batch) for batch in epoch]
        if sizes != [8, 8, 8, 8, 4]:
            return f"an epoch has batches of {sizes}: the batches stay as they were, 8 and a short last one."
    orders = {tuple(chain.from_iterable(epoch)) for epoch in record.epochs}
    if len(orders) < EPOCHS or len(record.rates) != len(sizes) * EPOCHS:
        told = f"all epochs are trained, in {len(orders)} different orders and {len(record.rates)} optimizer steps: "
        return f"{told}the batches stay shuffled, and each of them is a step."
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
        return f"all epochs are trained, and the rate ends at {100 * last / peak:.0f} % of its peak, and not near 0."
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


# --------------------------------------------------------------------------------------------- 2: shared by two ranks


class _Dealt(NamedTuple):
    epochs: list[list[list[int]]]
    """The batches of this rank."""
    counts: list[int]
    samples: int


def _dealt_to(rank: int, make_run: MakeRun) -> _Dealt:
    record = Record()
    with contextlib.suppress(Uneven):
        _fit(make_run(), record)
    return _Dealt(record.epochs, record.counts, record.samples)


def _judged_on(rank: int, make_run: MakeRun) -> list[str]:
    """What preflight finds on a rank of the run: a Trainer of several ranks cannot be made in Jupyter."""
    judge = Preflight(strict=False)
    _fit(make_run(), judge)
    assert judge.report is not None
    return [finding.says for finding in judge.report.findings]


def _travels_by_value(function: Any) -> None:
    module = sys.modules[function.__module__]
    if module.__spec__ is None and module.__name__ != "__main__":  # no file that a rank could import it from
        cloudpickle.register_pickle_by_value(module)


def _fault_of_dealing(make_run: MakeRun) -> str | None:
    _travels_by_value(make_run)
    try:
        ranks = [result.value for result in run_ranks(_dealt_to, args=(make_run,), timeout=120, backend="gloo")]
    except RankError as error:
        raised = next((report.error for report in error.reports if report.error), error.summary)
        return f"on two ranks it raises {raised[:200]}"
    first = ranks[0]
    if len(first.counts) != 2:
        return "the run has one rank: it should have devices=2 and strategy='ddp'."
    if first.counts[0] != first.counts[1]:
        return (
            f"rank 0 has {first.counts[0]} batches in an epoch and rank 1 has {first.counts[1]}: the one with more "
            "waits for gradients that never come. (The check stopped before that.)"
        )
    if first.samples != 44:
        return f"the dataset has {first.samples} samples, and 44 were asked for: the data stay as they are."
    if len(first.epochs) != 2:
        return f"two epochs were asked for, and the run trains {len(first.epochs)}."
    epochs = [[batch for rank in ranks for batch in rank.epochs[number]] for number in (0, 1)]
    for name, batches in zip(("first", "second"), epochs, strict=True):
        given = Counter(chain.from_iterable(batches))
        missing, twice = 44 - len(given), sum(times > 1 for times in given.values())
        if twice == 44:
            return "both ranks train all 44 samples: nobody shares them out."
        if missing or twice:
            return f"of the 44 samples, {missing} are trained by no rank in the {name} epoch, and {twice} twice."
        if torn := sum(len({index // 4 for index in batch}) > 1 for batch in batches):
            return f"every sample comes once, and {torn} batches hold samples that are no neighbours."
        if alone := sum(len(batch) == 1 for batch in batches):
            return f"every sample comes once, and {alone} batches hold one sample, which has no neighbour in them."
    neighbourhoods = [[batch[0] // 4 for batch in of_epoch] for of_epoch in epochs]
    if neighbourhoods[0] == neighbourhoods[1]:
        return "every sample comes once, and both epochs have the same order: Neighbours has another in each."
    for says in run_ranks(_judged_on, args=(make_run,), timeout=120, backend="gloo")[0].value:
        return f"{STILL} {says}"
    return None


class _EverySecond(Neighbours):
    """Each rank takes every second batch, and one has more of them."""

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), dist.get_rank() if dist.is_initialized() else 0, None, 2)


class _DealtOnce:
    """Draws and cuts the batches when it is made: each epoch has their first order."""

    def __init__(self) -> None:
        batches = list(Neighbours(44))
        self.batches = [*batches[:-1], batches[-1][:2], batches[-1][2:]]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, dist.get_rank() if dist.is_initialized() else 0, None, 2)


class _Turned(Neighbours):
    """Deals the first epoch's batches again, each from its end."""

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, 0
        batches = list(super().__iter__())
        self.epoch = epoch
        return iter([batch[::-1] if epoch else batch for batch in batches])


class _Injected(Neighbours):
    """Takes what a Trainer hands over, and ignores it: so does each rank."""

    def __init__(self, num_samples: int, sampler: Any = None) -> None:
        super().__init__(num_samples)


def _two_ranks(
    make_batches: Callable[[], Any] | None,
    deal: bool = False,
    devices: int = 2,
    max_epochs: int = 2,
    samples: int = 44,
    batch_size: int = 4,
) -> MakeRun:
    def make_run() -> Any:
        several = {"devices": 2, "strategy": "ddp"} if devices == 2 else {"devices": 1}
        trainer = quiet_trainer(max_epochs=max_epochs, accelerator="cpu", use_distributed_sampler=deal, **several)
        if make_batches is None:
            return trainer, Line(), DataLoader(Points(44), batch_size, shuffle=True)
        return trainer, Line(), DataLoader(Points(samples), batch_sampler=make_batches())

    return make_run


two_ranks = PropertyExercise(
    "two ranks",
    _fault_of_dealing,
    {
        "both ranks train all 44 samples": _two_ranks(lambda: Neighbours(44)),
        "on two ranks it raises TypeError": _two_ranks(lambda: Neighbours(44), deal=True),
        "batches hold samples that are no neighbours": _two_ranks(None, deal=True),
        "rank 0 has 6 batches in an epoch and rank 1 has 5": _two_ranks(lambda: _EverySecond(44)),
        "4 are trained by no rank in the first epoch, and 0 twice": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44), tail="drop")
        ),
        "0 are trained by no rank in the first epoch, and 4 twice": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44), tail="pad")
        ),
        "two epochs were asked for, and the run trains 1": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44)), max_epochs=1
        ),
        "the dataset has 45 samples, and 44 were asked for": _two_ranks(
            lambda: ShardedBatchSampler(Neighbours(44)), samples=45
        ),
        "both epochs have the same order": _two_ranks(_DealtOnce),
        "both epochs have the same order: ": _two_ranks(lambda: ShardedBatchSampler(_Turned(44))),
        "44 batches hold one sample": _two_ranks(None, deal=True, batch_size=1),
        "on two ranks it raises IndexError": _two_ranks(lambda: ShardedBatchSampler(Neighbours(48))),
        "the run has one rank": _two_ranks(lambda: Neighbours(44), devices=1),
    },
    allowed=Allowed(draw=True),  # the weights of a model
    seconds=300,  # it trains
)


# ----------------------------------------------------------------------------------------- 3: every label counts alike


def _fault_of_gradient(make_run: MakeRun) -> str | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = make_run()
    record = _fitted(run)
    reference = _big_batch_gradient(run[1])
    largest = max(chain.from_iterable(record.epochs[0]))
    if largest > 8:
        return f"a micro-batch holds {largest} words, and the exercise's device holds 8."
    if len(record.rates) != 1 or record.gradient is None:
        return f"the epoch has {len(record.rates)} optimizer steps; its four micro-batches should make one."
    factor = float(record.gradient @ reference / (reference @ reference))
    apart = float((record.gradient - factor * reference).norm() / reference.norm())
    if apart > 1e-4:
        return (
            f"the update differs by {100 * float((record.gradient - reference).norm() / reference.norm()):.0f} % from "
            "that of one big batch: the labels do not all weigh the same."
        )
    if abs(factor - 1) > 1e-4:
        return (
            f"all labels weigh the same, and the update is {factor:.2f} times that of one big batch: the sum over the "
            "window should be divided by its 14 labels."
        )
    if not _moved_by(run[1], record.rates[0], reference):
        return (
            f"the gradient is that of one big batch, and the update is not: the weights do not move by it times the "
            f"learning rate, {record.rates[0]:g}. The optimizer and the Trainer's other flags stay as they were."
        )
    return _fault_of_preflight(make_run)


def _moved_by(model: Any, rate: float, gradient: Tensor) -> bool:
    before = torch.cat([weights.double().reshape(-1) for weights in model.weights_at_start])
    after = torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
    return rate > 0 and float((before - after - rate * gradient).norm()) < 1e-3 * rate * float(gradient.norm())


def _big_batch_gradient(model: Any) -> Tensor:
    """The gradient of the mean over all labels of the epoch, at the weights that the run started from."""
    words = Tags()
    weight, bias = (value.double().requires_grad_() for value in model.weights_at_start)
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
        "the sum comes first": _tagger_run(
            lambda scores, tags: (tags.ne(IGNORED).sum(), _sum(scores, tags)), exact=True
        ),
    },
    allowed=Allowed(draw=True),
    seconds=300,
)

EXERCISES = (stops_early, two_ranks, masked_labels)
