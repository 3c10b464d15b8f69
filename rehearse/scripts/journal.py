"""What a script did while it was rehearsed: its events in their order, and what took part in them.

The checks of a rehearsed script are functions of this alone, so it holds plain values, and no tensor and no module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rehearse.scripts.events import (
    Backward,
    Delivered,
    Event,
    Forward,
    PassBegun,
    PassEnded,
    Step,
    loop_of,
)


@dataclass
class LoaderPlayed:
    """A loader that the script made."""

    dataset: int
    """A number of the data under all subsets; two loaders with the same one read the same samples."""
    samples: int | None
    base_indices: tuple[int, ...] | None = None
    """To each index of a subset, the index in the dataset under it."""
    stream: bool = False
    drop_last: bool = False
    own_sampler: bool = False
    """Whether the order comes from something else than torch's samplers of a whole dataset."""
    drawn_by_torch: bool = False
    """Whether one of torch's samplers draws it, be it of a part, or by weights."""
    replacement: bool = False
    set_epoch: bool = False
    """Whether a sampler in it has ``set_epoch``."""
    ranks: int = 1
    """Among how many its sampler shares the samples out."""
    cycled: bool = False
    """Whether ``itertools.cycle`` gave its batches again."""
    workers: int = 0
    persistent: bool = False
    """Whether these live on from epoch to epoch."""
    times_each: float = 0.0
    """Of a stream with workers, how often each content came in its first loop; 0 where that differs."""


@dataclass
class OptimizerPlayed:
    """An optimizer that the script made."""

    name: str
    without_gradient: tuple[str, ...] = ()
    """The names of those that got none in the real micro-batches."""
    gradients_of_zero: bool = False
    """Whether all that it holds had a gradient of 0 there, behind every pass that reached it."""


@dataclass
class SchedulePlayed:
    """A learning-rate schedule that the script made."""

    name: str
    optimizer: int
    follows_metric: bool = False
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """Of each parameter group, after 0, 1, 2 … calls: those of the run, and then of calls beyond its end."""
    numbers: frozenset[int] = frozenset()
    """Those that its own functions go by (a LambdaLR's), as far as they can be seen."""
    refused: str = ""
    """What it raised at the call after the last of these."""


@dataclass(frozen=True)
class LossWeight:
    """What one real backward pass gave a loss in it that is a mean over its micro-batch, without its sign."""

    backward: int
    """Which pass of the rehearsal it was."""
    line: str
    weight: float


@dataclass
class _Loop:
    """A loop over a loader, while a journal is read."""

    passes: list[int] = field(default_factory=list)
    """The places of its backward passes."""
    evaluates: bool = False
    trains: bool = False


ENDED, FAILED, REFUSED, CUT, SILENT = "ended", "failed", "refused", "cut", "silent"
"""How a rehearsal ends: with the script, by its exception, by its own ``exit``, at the limit, without a sign."""


@dataclass
class Journal:
    """The whole rehearsal."""

    events: list[Event] = field(default_factory=list)
    loaders: list[LoaderPlayed] = field(default_factory=list)
    optimizers: list[OptimizerPlayed] = field(default_factory=list)
    schedules: list[SchedulePlayed] = field(default_factory=list)
    never_stepped: list[SchedulePlayed] = field(default_factory=list)
    """Schedules that were made, and that neither the script nor another schedule has stepped."""
    modules: list[str] = field(default_factory=list)
    """The names of the classes of what was called."""
    weights: list[int] = field(default_factory=list)
    """Of each of these, a number of its first parameter: a wrapper has its module's, and a copy has its own."""
    parts_with_modes: list[int] = field(default_factory=list)
    """Of each of these, how many of its modules behave otherwise in evaluation."""
    optimizers_of: list[set[int]] = field(default_factory=list)
    """Of each of these, the optimizers that hold a parameter of it; known when the script has ended."""
    loss_weights: list[LossWeight] = field(default_factory=list)
    later_weights: list[LossWeight] = field(default_factory=list)
    """Of the passes behind the real ones, where the mean is not within a replayed module."""
    held_by_none: tuple[str, ...] = ()
    """Parameters that got a gradient in the real micro-batches and that no optimizer holds at the end, although one
    holds others of the same module."""
    in_no_module: tuple[str, ...] = ()
    """The shapes of parameters that got a gradient and are in no module that was called, and held by no optimizer."""
    modules_held_by_none: tuple[str, ...] = ()
    """The classes of modules of which all parameters are so."""
    trainer: str = ""
    """The package of a Trainer of Lightning whose fit made the real micro-batches: ``"lightning.pytorch"``."""
    fits: int = 0
    """How often a Trainer was asked to fit."""
    fits_without_a_step: list[int] = field(default_factory=list)
    """Behind the first, by their numbers."""
    savers: tuple[str, ...] = ()
    """By what settings that Trainer's callbacks are to save."""
    saving_lines: tuple[str, ...] = ()
    """The script's own lines with a ``torch.save``; known when it has come to its end."""
    has_validation: bool = False
    """Whether it has a validation's loaders and steps."""
    never_read: list[str] = field(default_factory=list)
    """The lines that make loaders which nothing reads."""
    skipped_by_scaler: int = 0
    """Steps that a GradScaler left out in the real micro-batches."""
    changed_by_hand: int = 0
    """Updates of parameters without an optimizer."""
    closure_calls: dict[int, list[int]] = field(default_factory=dict)
    """Of an optimizer whose step takes a closure: how often each real step called it; empty where none was real."""
    world_size: int = 1
    rank: int = 0
    has_group: bool = False
    """Whether the script has begun a process group."""
    is_wrapped: bool = False
    """Whether it has made a DistributedDataParallel."""
    bypassed: str = ""
    """The first line that calls, in training, a module that a DistributedDataParallel wraps, and not the wrapper."""
    averaged_by_none: tuple[str, ...] = ()
    """Parameters of its optimizers that got a gradient there, and that no DistributedDataParallel averages."""
    unaveraged: int = 0
    """The numbers that these hold."""
    exchanged: int = 0
    """The numbers that the script itself has sent to the other ranks, from its first backward pass on."""
    notes: list[str] = field(default_factory=list)
    line_asked_for: str = ""
    """The script's line that made the event which was asked for: ``"train.py:57"``."""
    lapsed: bool = False
    """Whether forwards were replayed at last."""
    asked_for_gpu: bool = False
    """Whether the script wanted a GPU that is not there."""
    elsewhere: str = ""
    """Where it may train, if not here."""
    seconds: float = 0.0
    """Of CPU time that the rehearsal took."""
    end: str = SILENT
    says: str = ""
    """The exception, shortened, where the script failed."""
    printed: str = ""
    """The end of what the script printed."""
    _trained: tuple[int, set[int]] = field(default_factory=lambda: (-1, set()))
    """How many events were read for what is trained on, and what was found."""

    def counts(self) -> dict[str, int]:
        """What must equal the real run's."""
        kinds = Counter(type(event).__name__ for event in self.events)
        forwards = Counter(event.training for event in self.events if isinstance(event, Forward))
        steps = [event for event in self.events if isinstance(event, Step)]
        counts = {
            "batches": kinds["Delivered"],
            "forwards in training": forwards[True],
            "forwards in evaluation": forwards[False],
            "backward passes": kinds["Backward"],
            "optimizer steps": sum(not step.within for step in steps),
            "scheduler steps": kinds["ScheduleStep"],
            "zero_grad": kinds["ZeroGrad"],
            "set_epoch": kinds["EpochSet"],
            "validations": self.validations(),
            "saves": kinds["Saved"],
            "updates of averages": kinds["Averaged"],
        }
        for number, optimizer in enumerate(self.optimizers):
            counts[f"steps of {optimizer.name} {number}"] = sum(step.optimizer == number for step in steps)
        return counts

    def optimizer_name(self, number: int) -> str:
        """``"Adam"``, or ``"Adam 1"`` where the script has several of that name."""
        name = self.optimizers[number].name
        return f"{name} {number}" if [one.name for one in self.optimizers].count(name) > 1 else name

    def rates(self) -> list[tuple[float, ...]]:
        """Of each optimizer step."""
        return [event.rates for event in self.events if isinstance(event, Step)]

    def validations(self) -> int:
        """Turns from training to evaluation."""
        turns, evaluating = 0, True
        for event in self.events:
            if isinstance(event, Forward):
                turns += not (event.training or evaluating)
                evaluating = not event.training
        return turns

    def used(self) -> set[int]:
        """Where, among the events, a backward pass stands that a step has used; all of them, if none has used any."""
        found: set[int] = set()
        held: list[set[int]] = [set() for _ in self.optimizers]
        since_a_step: list[set[int]] = [set() for _ in self.optimizers]
        for at, event in enumerate(self.events):
            if isinstance(event, Backward):
                for optimizer in event.reached:
                    since_a_step[optimizer].add(at)
                if event.moved:  # by a step that is the script's own code
                    found.update(*held)
                if event.in_a_step:
                    found.add(at)
                for optimizer, cleared in zip(event.reached, event.cleared, strict=True):
                    if cleared:
                        held[optimizer].clear()
                    held[optimizer].add(at)
            elif isinstance(event, Step) and event.optimizer < len(held):
                if event.assigned:
                    found |= since_a_step[event.optimizer]
                elif not event.cleared:
                    found |= held[event.optimizer]
                held[event.optimizer].clear()
                since_a_step[event.optimizer].clear()
        if found and not self.changed_by_hand:
            return found
        return {at for at, event in enumerate(self.events) if isinstance(event, Backward)}

    def evaluating(self) -> set[int]:
        """Where, among the events, a backward pass of an evaluation stands, as of one that attacks its inputs.

        So are those of a loop over a loader with a module in evaluation mode that is in training mode elsewhere, and
        none in training mode that behaves otherwise there, if no step follows a pass of it ahead of another's.
        """
        forwards = (event for event in self.events if isinstance(event, Forward) and event.training)
        trained = {self.weights[event.module] for event in forwards}
        loops: dict[tuple[int, int], _Loop] = {}
        of_all: list[_Loop] = []
        last = behind = None
        for at, event in enumerate(self.events):
            if isinstance(event, PassBegun) or (isinstance(event, Delivered) and loop_of(event) not in loops):
                of_all.append(_Loop())
                loops[loop_of(event)] = of_all[-1]
            if isinstance(event, Delivered):
                last = loops[loop_of(event)]
            elif isinstance(event, PassEnded):
                last = None
            elif isinstance(event, Forward) and last is not None:
                last.evaluates |= not event.training and self.weights[event.module] in trained
                last.trains |= event.training and self.parts_with_modes[event.module] > 0
            elif isinstance(event, Backward):
                behind = last
                if last is not None:
                    last.passes.append(at)
            elif isinstance(event, Step) and behind is not None:
                behind.trains = True
        return set[int]().union(*(loop.passes for loop in of_all if loop.evaluates and not loop.trains))

    def used_in_training(self) -> set[int]:
        """Where, among the events, a backward pass stands that a step has used and that is no evaluation's."""
        return self.used() - self.evaluating()

    def trained(self) -> set[int]:
        """Where, among the events, a loop over a loader that is trained on begins, and where it gives a batch.

        It is trained on if a backward pass that a step uses follows one of its batches before the next batch of another
        loop, and before its own end if it only evaluates; or a step, where there is no backward pass. So a loop that
        evaluates is not one of them, on whatever loader, unless a step uses the gradients that it takes.
        """
        read, known = self._trained
        if read == len(self.events):
            return known
        loops: dict[tuple[int, int], list[int]] = {}  # the places of its events
        found: set[int] = set()
        last: list[int] = []
        used = self.used_in_training()
        forwards: set[bool] = set()  # whether those since the last batch were in training
        for at, event in enumerate(self.events):
            if isinstance(event, Forward):
                forwards.add(event.training)
            elif isinstance(event, PassEnded) and forwards == {False} and last is loops.get(loop_of(event)):
                last = []
            elif isinstance(event, PassBegun):
                loops[loop_of(event)] = [at]
            elif isinstance(event, Delivered):
                last = loops.setdefault(loop_of(event), [])
                last.append(at)
                forwards.clear()
                if last[0] in found:
                    found.add(at)
            elif (at in used or (not used and isinstance(event, Step))) and last and last[0] not in found:
                found.update(last)
        self._trained = (len(self.events), found)
        return found

    def training_loaders(self) -> set[int]:
        """The loaders that are trained on in one loop at least."""
        events = (self.events[at] for at in self.trained())
        return {event.loader for event in events if isinstance(event, Delivered)}

    def micro_batches(self) -> int:
        """The batches of what is trained on; where the script has no loader, its backward passes."""
        given = sum(isinstance(self.events[at], Delivered) for at in self.trained())
        return given or sum(isinstance(event, Backward) for event in self.events)
