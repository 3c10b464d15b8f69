"""The first micro-batches are run: what becomes of each parameter, who steps the schedules, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from course_lib._tensors import parameters_of
from rehearse.checks.window import size_of
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough

WINDOWS = 2
"""Windows that are run."""
MOST_BATCHES = 16
MOST_NUMBERS = 1_024
"""Of a parameter, that are looked at to see whether it has moved."""


@dataclass(frozen=True)
class WatchedParameter:
    """One parameter after the first micro-batches."""

    name: str
    trainable: bool
    held: bool
    """Whether some optimizer has it."""
    has_gradient: bool
    used: bool
    """Whether the module that it belongs to was called."""
    moved: bool = False
    """Whether it has been written to since the run began."""


@dataclass(frozen=True)
class FirstSteps:
    """What is seen in the first micro-batches."""

    batches: int
    windows: int
    global_step: int
    parameters: tuple[WatchedParameter, ...]
    strangers: int
    """Parameters that an optimizer holds and the model does not have."""
    schedules_stepped: tuple[tuple[str, int, int], ...] = ()
    """Of each schedule that the run steps: its name, its calls, and those of them that the run made."""
    schedules_of_its_own: tuple[tuple[str, int], ...] = ()
    """Of each schedule that only the module's own code can step: its name and its calls."""
    in_evaluation: tuple[str, ...] = ()
    """The outermost modules that were in evaluation mode before the run and are so while it trains, and that drop or
    normalize by batches when they train."""
    rates_changed: str = ""
    """The rates of the first and the second micro-batch, where they differ and no schedule was stepped between."""
    seconds_a_sample: float = 0.0
    """CPU time of its forward and backward pass, in the quickest micro-batch."""


class Watch:
    """Sees which parameters of a model get a gradient or are written to, and which of its modules are called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.with_gradient: set[int] = set()
        self.called: set[int] = set()
        self._known: set[int] = set()
        self._evaluating = {id(module) for module in model.modules() if not module.training}
        self._began: dict[int, tuple[Any, ...]] = {}

    def look(self) -> None:
        """Watch what has been added since the last look as well."""
        for module in self.model.modules():
            if id(module) not in self._known:
                self._known.add(id(module))
                module.register_forward_pre_hook(self._was_called)
        for parameter in self.model.parameters():
            if id(parameter) not in self._known and parameter.requires_grad:
                self._known.add(id(parameter))
                self._began[id(parameter)] = _state_of(parameter)
                parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def in_evaluation(self) -> tuple[str, ...]:
        """Those of the modules that the caller left in evaluation mode; what a hook has put there is the author's."""
        found: list[str] = []
        for name, module in self.model.named_modules():
            within = any(not outer or name.startswith(f"{outer}.") for outer in found)
            if id(module) in self._evaluating and not module.training and not within and _differs_in_training(module):
                found.append(name)
        return tuple(found)

    def _was_called(self, module: nn.Module, _: Any) -> None:
        self.called.add(id(module))

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        self.with_gradient.add(id(parameter))

    def parameters(self, held: set[int]) -> tuple[WatchedParameter, ...]:
        owners = {id(p): id(module) for module in self.model.modules() for p in module.parameters(recurse=False)}
        return tuple(
            WatchedParameter(
                name=name,
                trainable=parameter.requires_grad,
                held=id(parameter) in held,
                has_gradient=id(parameter) in self.with_gradient,
                used=owners.get(id(parameter)) in self.called,
                moved=id(parameter) in self._began and _has_moved(parameter, self._began[id(parameter)]),
            )
            for name, parameter in self.model.named_parameters()
        )

    def strangers(self, held: set[int]) -> int:
        return len(held - {id(parameter) for parameter in self.model.parameters()})


def _differs_in_training(module: nn.Module) -> bool:
    """Whether it holds layers with weights, and some that drop or normalize by batches when they train."""
    parts = list(module.modules())
    acts = any((isinstance(part, _DropoutNd) and part.p > 0) or isinstance(part, _BatchNorm) for part in parts)
    # A BatchNorm that is put into evaluation mode by itself is a choice.
    return acts and any(
        not isinstance(part, _BatchNorm) and next(part.parameters(recurse=False), None) is not None for part in parts
    )


def _state_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Who writes the same numbers again, as a target network's first copy does, is seen by the version."""
    return parameter._version, parameter.data_ptr(), parameter.detach().reshape(-1)[:MOST_NUMBERS].clone()


def _has_moved(parameter: torch.Tensor, began: tuple[Any, ...]) -> bool:
    version, place, numbers = _state_of(parameter)
    return (version, place) != began[:2] or not torch.equal(numbers, began[2])


@dataclass
class ScheduleWatch:
    """Counts the calls of each schedule, and which of them a Trainer makes."""

    run: LightningRun
    calls: dict[int, int] = field(default_factory=dict)
    of_trainer: dict[int, int] = field(default_factory=dict)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """Of all groups, when the first micro-batches begin."""
    calls_before: list[int] = field(default_factory=list)
    """Of all schedules together, at these moments."""
    _stepped: list[Any] = field(default_factory=list)
    _own: list[Any] = field(default_factory=list)
    _by_trainer: bool = False

    def begin(self) -> None:
        self._stepped = self.run.schedules_stepped()
        self._own = self.run.schedules_of_its_own()
        for schedule in (*self._stepped, *self._own):
            schedule.step = self._counting(schedule, schedule.step)
        of_module = getattr(self.run.model, "lr_scheduler_step", None)
        if of_module is not None:
            self.run.model.__dict__["lr_scheduler_step"] = self._as_trainer(of_module)

    def _counting(self, schedule: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[id(schedule)] = self.calls.get(id(schedule), 0) + 1
            if self._by_trainer:
                self.of_trainer[id(schedule)] = self.of_trainer.get(id(schedule), 0) + 1
            return step(*arguments, **options)

        return counted

    def _as_trainer(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **options: Any) -> Any:
            self._by_trainer = True
            try:
                return step(*arguments, **options)
            finally:
                self._by_trainer = False

        return stepped

    def begin_batch(self) -> None:
        self.rates.append(tuple(float(group["lr"]) for one in self.run.optimizers for group in one.param_groups))
        self.calls_before.append(sum(self.calls.values()))

    def stepped(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(
            (type(one).__name__, self.calls.get(id(one), 0), self.of_trainer.get(id(one), 0)) for one in self._stepped
        )

    def of_its_own(self) -> tuple[tuple[str, int], ...]:
        return tuple((type(one).__name__, self.calls.get(id(one), 0)) for one in self._own)

    def rates_changed(self) -> str:
        if len(self.rates) < 2 or self.calls_before[1] or len(self.rates[0]) != len(self.rates[1]):
            return ""
        pairs = zip(self.rates[0], self.rates[1], strict=True)
        return next((f"{before:.3g}, then {after:.3g}" for before, after in pairs if before != after), "")


class SampleCosts:
    """The CPU time of a sample's forward and backward pass: that of a micro-batch, without its step."""

    def __init__(self) -> None:
        self.least = 0.0
        self._began, self._passed, self._samples = 0.0, 0.0, 1

    def begin(self, batch: Any) -> None:
        self._began, self._passed, self._samples = time.process_time(), 0.0, max(1, size_of(batch))

    def passed(self) -> None:
        self._passed = time.process_time()

    def end(self) -> None:
        seconds = ((self._passed or time.process_time()) - self._began) / self._samples
        self.least = min(self.least or seconds, seconds)


def first_steps(run: LightningRun) -> Callable[[Path], FirstSteps]:
    """A trial: train the first windows."""

    def trial(folder: Path) -> FirstSteps:
        watch, schedules = Watch(run.model), ScheduleWatch(run)
        seen: FirstSteps | None = None
        in_evaluation: tuple[str, ...] = ()
        trained, costs = 0, SampleCosts()

        def begin(*_: Any) -> None:
            watch.look()
            schedules.begin()

        def begin_batch(trainer: Any, model: Any, batch: Any, *_: Any) -> None:
            nonlocal in_evaluation
            in_evaluation = watch.in_evaluation()
            watch.look()
            schedules.begin_batch()
            # With manual optimization, nobody but the module's own code knows how long its windows are.
            stepped = run.settings.automatic or run.global_step >= WINDOWS
            if trained >= (enough(run) if stepped else MOST_BATCHES):
                look()  # what the last batch's own hooks have done as well
                raise Enough
            costs.begin(batch)

        def end_batch(*_: Any) -> None:
            nonlocal trained
            costs.end()
            trained = run.batches_begun
            look()

        def look(*_: Any) -> None:
            nonlocal seen
            held = {id(parameter) for optimizer in run.optimizers for parameter in parameters_of(optimizer)}
            seen = FirstSteps(
                batches=trained,
                windows=trained // run.window,
                global_step=run.global_step,
                parameters=watch.parameters(held),
                strangers=watch.strangers(held),
                schedules_stepped=schedules.stepped(),
                schedules_of_its_own=schedules.of_its_own(),
                in_evaluation=in_evaluation,
                rates_changed=schedules.rates_changed(),
                seconds_a_sample=costs.least,
            )

        def end_epoch(*_: Any) -> None:
            raise Enough

        run.start(
            folder,
            on_train_start=begin,
            on_train_batch_start=begin_batch,
            on_before_optimizer_step=lambda *_: costs.passed(),
            on_train_batch_end=end_batch,
            on_train_epoch_end=end_epoch,
        )
        if seen is None:
            raise RuntimeError("the run has no batch")
        return seen

    return trial


def enough(run: LightningRun) -> int:
    """Micro-batches that are trained to see the first windows."""
    return min(MOST_BATCHES, WINDOWS * run.window)
