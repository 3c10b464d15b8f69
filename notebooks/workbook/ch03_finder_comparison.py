"""What batch size finders do on a device of limited memory: their trials, their errors, and whether the answer ran."""

from __future__ import annotations

import gc
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from course_lib.leaks.census import frozen_by_caller
from course_lib.memory import measure_peak
from course_lib.memory.batch_size import find_batch_size
from course_lib.memory.batch_size_search import Search
from course_lib.memory.ledger import StorageLedger
from workbook.trainers import quiet_trainer

FEATURES, CLASSES, DATASET = 32, 10, 100_000


class Attempt(NamedTuple):
    batch_size: int
    ran: bool


class SimulatedDevice:
    """Runs steps on the CPU, and raises CUDA's out-of-memory error where their tensors hold more than the limit.

    Attributes:
        attempts: The steps that were begun, and whether they came to their end.
        peak_bytes: The most that the last step held, as ``torch.cuda.max_memory_allocated`` says it of a GPU.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.attempts: list[Attempt] = []
        self.peak_bytes = 0

    def run(self, batch_size: int, model: nn.Module, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        self.attempts.append(Attempt(batch_size, False))
        ledger = LimitedLedger(self.limit_bytes)
        with ledger:  # sees each operator and its result
            ledger.name_model(model)  # what is there before the first operator counts too
            ledger.name_optimizer(optimizer)
            value = step()
        self.attempts[-1] = Attempt(batch_size, True)
        self.peak_bytes = ledger.peak_bytes
        return value

    def trials(self) -> list[Attempt]:
        """The attempts, with the steps of one size in a row taken together."""
        by_size = groupby(self.attempts, key=lambda attempt: attempt.batch_size)
        return [Attempt(size, all(step.ran for step in steps)) for size, steps in by_size]


class LimitedLedger(StorageLedger):
    """A list of all storages that are alive, which raises CUDA's error when they are too many bytes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.peak_bytes = limit_bytes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)  # runs the operator
        held = sum(storage.nbytes for storage in self._live.values())
        self.peak_bytes = max(self.peak_bytes, held)
        if held > self.limit_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. (A simulated device of the CPU.)")
        return result


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size, FEATURES), torch.zeros(size, dtype=torch.long)


def make_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def train_step(model: nn.Module, optimizer: Optimizer, size: int) -> None:
    x, y = make_batch(size)
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


class TruePeaks:
    """Bytes that two steps hold at most, measured, each size once."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def __call__(self, size: int) -> int:
        if size not in self.known:
            model = make_model()
            optimizer = make_optimizer(model)

            def steps() -> None:
                for _ in range(2):
                    train_step(model, optimizer, size)

            self.known[size] = measure_peak(steps, model=model, optimizer=optimizer).peak_bytes
        return self.known[size]

    def largest(self, limit_bytes: int) -> int:
        """The largest size within a limit, by trying: doubling, then halving the gap."""
        too_large = 1
        while self(too_large) <= limit_bytes:
            too_large *= 2
        return bisect_right(range(1, too_large), limit_bytes, lo=too_large // 2, key=self)


def ours(device: SimulatedDevice) -> int:
    """`find_batch_size`, whose trials run on the simulated device."""
    model = make_model()
    optimizer = make_optimizer(model)
    steps = Search._steps

    def steps_there(search: Search, size: int) -> None:
        device.run(size, model, optimizer, lambda: steps(search, size))

    with mock.patch.object(Search, "_steps", steps_there):
        return find_batch_size(model, make_batch, optimizer, limit_bytes=device.limit_bytes).batch_size


def halving(device: SimulatedDevice, start: int = 8192) -> int:
    """The retry loop: from a size that is surely too large, half of it after each error."""
    model = make_model()
    optimizer = make_optimizer(model)
    while True:
        try:
            for _ in range(2):
                device.run(start, model, optimizer, partial(train_step, model, optimizer, start))
            return start
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            optimizer.zero_grad()
            start //= 2


class SmallModule(LightningModule):
    """`make_model` in a Trainer; its steps run on a simulated device."""

    def __init__(self, device: SimulatedDevice, batch_size: int) -> None:
        super().__init__()
        self.net, self.simulated, self.batch_size, self.samples = make_model(), device, batch_size, 0
        self.frozen_before = False

    def setup(self, stage: str) -> None:
        # Lightning collects garbage before each trial; what was there before needs no further look.
        self.frozen_before = frozen_by_caller()
        gc.freeze()

    def teardown(self, stage: str) -> None:
        if not self.frozen_before:
            gc.unfreeze()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.samples = len(batch[0])  # which need not be what self.batch_size says

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.zero_grad()  # before the forward pass, as in a plain loop; a Trainer would do it after that
        step = partial(optimizer.step, closure=optimizer_closure)  # the closure is forward and backward
        self.simulated.run(self.samples, self.net, optimizer.optimizer, step)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.net)

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = range(DATASET)
        return DataLoader(data, self.batch_size, collate_fn=lambda samples: make_batch(len(samples)))


def lightning(device: SimulatedDevice, *, own_size: int = 2, **options: Any) -> int | None:
    """Lightning's own finder; `own_size` is the module's batch size before."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder)
        return Tuner(trainer).scale_batch_size(SmallModule(device, own_size), **options)


Finder = Callable[[SimulatedDevice], int | None]
FINDERS: dict[str, Finder] = {
    "find_batch_size": ours,
    "Lightning, power": lightning,
    "Lightning, binsearch": lambda device: lightning(device, mode="binsearch"),
    "retry loop, halving": halving,
}


@dataclass(frozen=True)
class Outcome:
    """What one finder did within one limit."""

    limit_bytes: int
    answer: int
    largest: int
    """The largest size that fits, measured."""
    trials: list[Attempt]

    @property
    def errors(self) -> int:
        return sum(not trial.ran for trial in self.trials)

    @property
    def share(self) -> float:
        return self.answer / self.largest

    @property
    def answer_ran(self) -> bool:
        return Attempt(self.answer, True) in self.trials


def spread_limits(smallest: int, largest: int, number: int) -> list[int]:
    """Bytes, each the same factor above the one before."""
    return [int(limit) for limit in np.geomspace(smallest, largest, number)]


def compare(
    limits: Sequence[int], finders: dict[str, Finder] = FINDERS, peaks: TruePeaks | None = None
) -> dict[str, list[Outcome]]:
    """Each finder within each limit (bytes), on a device of its own.

    A Trainer's step holds some bytes more than the steps that `TruePeaks` measures (a copy of the loss): where a limit
    has no room for them beside one sample, Lightning halves to 0, and its loader raises.
    """
    peaks = peaks or TruePeaks()
    outcomes: dict[str, list[Outcome]] = {}
    for name, finder in finders.items():
        outcomes[name] = []
        for limit in limits:
            device = SimulatedDevice(limit)
            answer = finder(device)
            assert answer is not None
            outcomes[name].append(Outcome(limit, answer, peaks.largest(limit), device.trials()))
    return outcomes


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """A line for each finder: mean trials and errors, the range of answer / largest that fits, how many answers ran."""
    lines = [f"{'finder':<22} {'trials':>6} {'errors':>6}   {'answer / largest':<16} {'answer was run'}"]
    for name, of in outcomes.items():
        trials = sum(len(outcome.trials) for outcome in of) / len(of)
        errors = sum(outcome.errors for outcome in of) / len(of)
        shares = [outcome.share for outcome in of]
        span = f"{min(shares):.2f} … {max(shares):.2f}"
        ran = sum(outcome.answer_ran for outcome in of)
        lines.append(f"{name:<22} {trials:>6.1f} {errors:>6.1f}   {span:<16} {ran} of {len(of)}")
    return "\n".join(lines)
