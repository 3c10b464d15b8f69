"""Count the optimizer steps of a run before it starts.

Most wrong step counts come from a unit that nobody named: samples, batches and optimizer steps are three
clocks, and gradient accumulation, ranks and the short end of an epoch set them apart. The rule of a Trainer:
*an epoch steps once for every full window of micro-batches, and once more for the short one.*

    >>> plan = plan_steps(2500, 64, accumulate_grad_batches=8, max_epochs=10)
    >>> plan.batches_per_epoch, plan.steps_per_epoch, plan.total_steps
    (40, 5, 50)
    >>> plan.windows[-1]
    Window(optimizer_step=49, epoch=9, start=32, stop=40, carried=0, per_rank_samples=452)

Everything is a closed form: a plan for 10**12 samples is as quick as one for ten.
As a command: ``python -m course_lib.steps --help``.
"""

from __future__ import annotations

import numbers
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, SupportsIndex, overload

from course_lib._arguments import int_of_at_least

Tail = Literal["step", "carry", "drop"]
Schedule = int | Mapping[int, int]
PerEpoch = int | dict[int, int]


@dataclass(frozen=True)
class StepPlan:
    """What :func:`plan_steps` found: the optimizer steps of a run and the micro-batches behind each.

    A value per epoch is an int, or ``{first epoch: value}`` where a schedule changes it on the way. Batches are
    those of one rank; samples are counted over all ranks.
    """

    num_samples: int
    world_size: int
    drop_last: bool
    tail: Tail
    max_epochs: int
    """-1: no limit."""
    max_steps: int
    """-1: no limit."""
    stages: tuple[Stage, ...]
    total_steps: int
    """Optimizer steps of the whole run."""
    epochs_completed: int
    """Epochs in which every planned batch ran; a last epoch that ``max_steps`` cuts short does not count."""
    micro_batches: int
    """Forward passes of one rank in the whole run."""
    micro_batches_unused: int
    """Those of ``micro_batches`` whose gradient reaches no optimizer step."""

    @property
    def batches_per_epoch(self) -> PerEpoch:
        """Micro-batches that one rank runs in a full epoch."""
        return self._per_epoch([stage.batches for stage in self.stages])

    @property
    def steps_per_epoch(self) -> PerEpoch:
        """Optimizer steps of a full epoch."""
        return self._per_epoch([stage.steps for stage in self.stages])

    @property
    def samples_dropped(self) -> PerEpoch:
        """Samples of the dataset that a full epoch leaves out (``drop_last``, a limit, or ``tail="drop"``)."""
        return self._per_epoch([max(0, self.num_samples - drawn) for drawn in self._samples_drawn()])

    @property
    def samples_repeated(self) -> PerEpoch:
        """Samples that a full epoch trains twice, because the ranks' shares are padded to equal length."""
        return self._per_epoch([max(0, drawn - self.num_samples) for drawn in self._samples_drawn()])

    @property
    def windows(self) -> Windows:
        """The window behind each optimizer step: a lazy sequence of ``total_steps`` elements."""
        return Windows(self.stages, range(self.total_steps))

    def batches_in_epoch(self, epoch: int) -> int:
        """Micro-batches that one rank runs in this epoch; the last epoch may be cut short, later ones run none."""
        epoch, per_epoch = int_of_at_least(0, "epoch", epoch), self.batches_per_epoch
        if epoch < self.epochs_completed:
            return per_epoch if isinstance(per_epoch, int) else _at(per_epoch, epoch)
        stopped_inside = epoch == self.epochs_completed and self.total_steps and self.windows[-1].epoch == epoch
        return self.windows[-1].stop if stopped_inside else 0

    def explain(self) -> str:
        """Say the plan in words, with every number's unit."""
        return "\n".join([*self.epochs_in_words(), *_end_in_words(self)])

    def epochs_in_words(self) -> Iterator[str]:
        """What an epoch is made of, in each stage."""
        return _epoch_sentences(self)

    def table(self) -> str:
        """Show the plan as aligned lines of a name and its value."""
        names = (
            "batches_per_epoch",
            "steps_per_epoch",
            "total_steps",
            "epochs_completed",
            "micro_batches",
            "micro_batches_unused",
            "samples_dropped",
            "samples_repeated",
        )
        return "\n".join(f"{name:<21} {_per_epoch_text(getattr(self, name))}" for name in names)

    def _per_epoch(self, values: list[int]) -> PerEpoch:
        if len(set(values)) == 1:
            return values[0]
        return {stage.first_epoch: value for stage, value in zip(self.stages, values, strict=True)}

    def _samples_drawn(self) -> list[int]:
        # Rank r holds the positions r, r + G, r + 2G …: the first m positions of every rank are 0 … G·m - 1.
        return [stage.samples_stepped * self.world_size for stage in self.stages]


class Window(NamedTuple):
    """The micro-batches behind one optimizer step."""

    optimizer_step: int
    """Which step of the run this is, from 0."""
    epoch: int
    start: int
    """First micro-batch, counted within the epoch."""
    stop: int
    """One past the last micro-batch."""
    carried: int
    """Micro-batches of earlier epochs whose gradient is in this step too (``tail="carry"`` only)."""
    per_rank_samples: int
    """Samples of one rank in this window, the carried ones included."""

    @property
    def micro_batches(self) -> int:
        return self.carried + self.stop - self.start


class Windows(Sequence[Window]):
    """The windows of a plan, computed when asked for; slices are lazy as well."""

    def __init__(self, stages: tuple[Stage, ...], steps: range) -> None:
        self._stages = stages
        self._steps = steps
        self._steps_before = [stage.steps_before for stage in stages]

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> Windows: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Window | Windows:
        if isinstance(index, slice):
            return Windows(self._stages, self._steps[index])
        return self._window(self._steps[index])

    def _window(self, step: int) -> Window:
        # Stages without a step share their steps_before with the next one: the last of them is the one that steps.
        return self._stages[bisect_right(self._steps_before, step) - 1].window(step)

    def __iter__(self) -> Iterator[Window]:
        return map(self._window, self._steps)

    def __repr__(self) -> str:
        # len() would refuse more than 2**63 windows; a range does not.
        count = max(0, -((self._steps.start - self._steps.stop) // self._steps.step))
        shown = ", ".join(map(repr, self[:2]))
        return f"<{count:,} windows: {shown}{', …' if count > 2 else ''}>"


class PlansItself(Protocol):
    """A schedule that is finer than by epochs: ``course_lib.schedules.SizeSchedule``."""

    @property
    def plan(self) -> Callable[..., StepPlan]: ...


def plan_steps(
    num_samples: int,
    batch_size: Schedule | PlansItself,
    *,
    accumulate_grad_batches: Schedule = 1,
    world_size: int = 1,
    drop_last: bool = False,
    max_epochs: int | None = None,
    max_steps: int = -1,
    limit_train_batches: int | float = 1.0,
    tail: Tail = "step",
) -> StepPlan:
    """Plan the optimizer steps of a run.

    Args:
        num_samples: Samples in the dataset. The ranks share them as ``DistributedSampler`` does: each gets
            ``ceil(num_samples / world_size)``, the missing ones repeated from the start.
        batch_size: Samples in a micro-batch of one rank; ``{epoch: size}`` for a loader that is made anew at
            those epochs (epoch 0 must be given); or a ``course_lib.schedules.SizeSchedule``, dealt by its sampler.
        accumulate_grad_batches: Micro-batches in a window; ``{epoch: k}`` as ``GradientAccumulationScheduler``
            takes it (1 before the first epoch given). A ``SizeSchedule`` says it itself.
        world_size: Number of ranks.
        drop_last: Whether the loader leaves out its short last *batch*. A short *window* is what ``tail`` is about.
        max_epochs: Epochs to run; ``None`` or -1: ``max_steps`` alone ends the run.
        max_steps: Optimizer steps to run; -1: ``max_epochs`` alone ends the run.
        limit_train_batches: A Trainer's flag: an int is a number of batches, a float a share of them.
        tail: What becomes of the micro-batches behind the last full window of an epoch. ``"step"``: they step as a
            short window (Lightning, for all strategies that leave accumulation to it). ``"carry"``: they don't
            step, and their gradient stays for the first window of the next epoch (the loop
            ``if (i + 1) % k == 0: optimizer.step(); optimizer.zero_grad()``). ``"drop"``: their gradient is
            thrown away.

    An epoch without a batch ends the run, as it ends a Trainer's.

    Raises:
        ValueError: An argument is out of its range; neither ``max_epochs`` nor ``max_steps`` is given; or
            ``max_steps`` can't be reached, because no epoch fills a window.
    """
    if hasattr(batch_size, "plan"):
        if accumulate_grad_batches != 1 or tail != "step":
            raise ValueError(
                "a schedule of sizes says its windows itself, and a short one steps: leave accumulate_grad_batches and "
                f"tail out, got {accumulate_grad_batches!r} and {tail!r}"
            )
        run = {"max_epochs": max_epochs, "max_steps": max_steps, "limit_train_batches": limit_train_batches}
        sampler_tail = "drop" if drop_last else "spread"
        return batch_size.plan(num_samples, world_size=world_size, tail=sampler_tail, **run)
    num_samples = int_of_at_least(1, "num_samples", num_samples)
    world_size = int_of_at_least(1, "world_size", world_size)
    batch_sizes = _schedule("batch_size", batch_size, before_first=None)
    ks = _schedule("accumulate_grad_batches", accumulate_grad_batches, before_first=1)
    max_epochs, max_steps, limit_train_batches = checked_stops(max_epochs, max_steps, limit_train_batches)
    if tail not in ("step", "carry", "drop"):
        raise ValueError(f'tail must be "step", "carry" or "drop", got {tail!r}')

    per_rank_samples = -(-num_samples // world_size)
    first_epochs = sorted({0} | {epoch for epoch in (*batch_sizes, *ks) if max_epochs == -1 or epoch < max_epochs})
    stop_epochs: list[int | None] = [*first_epochs[1:], None if max_epochs == -1 else max_epochs]

    stages: list[Stage] = []
    carried, steps_before = Carried(0, 0), 0
    for first_epoch, stop_epoch in zip(first_epochs, stop_epochs, strict=True):
        stage = Stage(
            first_epoch=first_epoch,
            stop_epoch=stop_epoch,
            per_rank_samples=per_rank_samples,
            per_rank_batch_size=_at(batch_sizes, first_epoch),
            accumulate_grad_batches=_at(ks, first_epoch),
            drop_last=bool(drop_last),
            limit_train_batches=limit_train_batches,
            tail=tail,
            steps_before=steps_before,
            carried_in=carried,
        )
        stages.append(stage)
        if stop_epoch is not None:
            steps_before += stage.steps * (stop_epoch - first_epoch)
            carried = stage.carried_out(stop_epoch - first_epoch)

    end = end_of_run(stages, max_steps)
    return StepPlan(
        num_samples=num_samples,
        world_size=world_size,
        drop_last=bool(drop_last),
        tail=tail,
        max_epochs=max_epochs,
        max_steps=max_steps,
        stages=tuple(stages),
        total_steps=end.steps,
        epochs_completed=end.epochs,
        micro_batches=end.micro_batches,
        micro_batches_unused=end.micro_batches - end.micro_batches_stepped,
    )


def max_steps_for(epochs: int, num_samples: int, batch_size: Schedule | PlansItself, **loader: object) -> int:
    """The ``max_steps`` at which a run has made all the optimizer steps of ``epochs`` epochs.

    Takes the keywords of :func:`plan_steps` except the two stops::

        Trainer(max_steps=max_steps_for(10, len(dataset), 64, accumulate_grad_batches=8, world_size=2))
    """
    for stop in ("max_epochs", "max_steps"):
        if stop in loader:
            raise ValueError(f"max_steps_for takes the number of epochs first and no {stop}")
    epochs = int_of_at_least(0, "epochs", epochs)
    return plan_steps(num_samples, batch_size, max_epochs=epochs, **loader).total_steps  # type: ignore[arg-type]


class Carried(NamedTuple):
    """Micro-batches of earlier epochs whose gradient still waits, and their samples on one rank."""

    micro_batches: int
    per_rank_samples: int


@dataclass(frozen=True)
class Stage:
    """Consecutive epochs in which neither the batch size nor the accumulation changes."""

    first_epoch: int
    stop_epoch: int | None
    """One past the last epoch; ``None``: open end."""
    per_rank_samples: int
    per_rank_batch_size: int
    accumulate_grad_batches: int
    drop_last: bool
    limit_train_batches: int | float
    tail: Tail
    steps_before: int
    """Optimizer steps of all earlier stages."""
    carried_in: Carried

    @property
    def batches(self) -> int:
        """Micro-batches of one rank in a full epoch."""
        full, short = divmod(self.per_rank_samples, self.per_rank_batch_size)
        batches = full + (short > 0 and not self.drop_last)
        if isinstance(self.limit_train_batches, float):
            return int(batches * self.limit_train_batches)
        return min(batches, self.limit_train_batches)

    @property
    def steps(self) -> int:
        """Optimizer steps of a full epoch."""
        full, short = divmod(self.batches, self.accumulate_grad_batches)
        return full + (short > 0 and self.tail == "step")

    @property
    def batches_stepped(self) -> int:
        """Micro-batches of an epoch that are in a window of that same epoch."""
        return min(self.steps * self.accumulate_grad_batches, self.batches)

    @property
    def samples_stepped(self) -> int:
        """Samples of one rank and epoch that reach an optimizer step, be it in the next epoch."""
        return self.samples_up_to(self.batches_stepped if self.tail == "drop" else self.batches)

    def samples_up_to(self, batch: int) -> int:
        return min(batch * self.per_rank_batch_size, self.per_rank_samples)

    def carried_out(self, epochs: int) -> Carried:
        """What waits after this many epochs of the stage."""
        if self.tail != "carry" or epochs == 0:
            return self.carried_in
        if self.steps:
            rest = self.samples_up_to(self.batches) - self.samples_up_to(self.batches_stepped)
            return Carried(self.batches - self.batches_stepped, rest)
        return Carried(
            self.carried_in.micro_batches + epochs * self.batches,
            self.carried_in.per_rank_samples + epochs * self.samples_up_to(self.batches),
        )

    def window(self, step: int) -> Window:
        """The window of the run's optimizer step ``step``, which must lie in this stage."""
        epochs_before, window = divmod(step - self.steps_before, self.steps)
        start = window * self.accumulate_grad_batches
        stop = min(start + self.accumulate_grad_batches, self.batches)
        carried = self.carried_out(epochs_before) if window == 0 else Carried(0, 0)
        samples = carried.per_rank_samples + self.samples_up_to(stop) - self.samples_up_to(start)
        return Window(step, self.first_epoch + epochs_before, start, stop, carried.micro_batches, samples)


class EndOfRun(NamedTuple):
    steps: int
    epochs: int
    micro_batches: int
    micro_batches_stepped: int


def end_of_run(stages: list[Stage], max_steps: int) -> EndOfRun:
    """Walk the stages to where the run stops: at a step (``max_steps``), at an epoch's end, or for want of batches."""
    epochs = micro_batches = stepped = 0
    for stage in stages:
        if stage.steps_before == max_steps or stage.batches == 0 or stage.first_epoch == stage.stop_epoch:
            return EndOfRun(stage.steps_before, epochs, micro_batches, stepped)
        steps_left = max_steps - stage.steps_before
        if stage.stop_epoch is None and stage.steps == 0:
            raise ValueError(
                f"max_steps={max_steps} is never reached: {stage.batches} batches per epoch fill no window of "
                f"accumulate_grad_batches={stage.accumulate_grad_batches}, and tail={stage.tail!r} makes no short one; "
                "lower accumulate_grad_batches or give max_epochs"
            )
        stage_epochs = None if stage.stop_epoch is None else stage.stop_epoch - stage.first_epoch
        if max_steps != -1 and (stage_epochs is None or stage_epochs * stage.steps >= steps_left):
            last = stage.window(max_steps - 1)
            full_epochs = last.epoch - stage.first_epoch
            micro_batches += full_epochs * stage.batches + last.stop
            if stage.tail == "drop":
                stepped += full_epochs * stage.batches_stepped + last.stop
            else:
                stepped = micro_batches
            return EndOfRun(max_steps, epochs + full_epochs + (last.stop == stage.batches), micro_batches, stepped)
        assert stage_epochs is not None, "a run without an end was refused in plan_steps"
        epochs += stage_epochs
        micro_batches += stage_epochs * stage.batches
        if stage.tail == "carry":
            stepped = micro_batches - stage.carried_out(stage_epochs).micro_batches
        else:
            stepped += stage_epochs * stage.batches_stepped
    last_stage = stages[-1]
    assert last_stage.stop_epoch is not None
    steps = last_stage.steps_before + last_stage.steps * (last_stage.stop_epoch - last_stage.first_epoch)
    return EndOfRun(steps, epochs, micro_batches, stepped)


def checked_stops(max_epochs: int | None, max_steps: int, limit_train_batches: object) -> tuple[int, int, int | float]:
    """What ends a run and its epochs, or a ValueError: -1 is no limit."""
    max_epochs = -1 if max_epochs is None else int_of_at_least(-1, "max_epochs", max_epochs)
    max_steps = int_of_at_least(-1, "max_steps", max_steps)
    limit = _limit(limit_train_batches)
    if max_epochs == -1 and max_steps == -1:
        raise ValueError(
            "nothing ends this run: give max_epochs, max_steps or both (got max_epochs=None, max_steps=-1)"
        )
    return max_epochs, max_steps, limit


def _schedule(name: str, value: Schedule, *, before_first: int | None) -> dict[int, int]:
    if not isinstance(value, Mapping):
        return {0: int_of_at_least(1, name, value)}
    if not value:
        raise ValueError(f"{name} must be an int or {{epoch: int}} with at least one epoch, got {{}}")
    schedule = {
        int_of_at_least(0, f"an epoch of {name}", epoch): int_of_at_least(1, f"{name}[{epoch!r}]", size)
        for epoch, size in value.items()
    }
    if before_first is not None:
        schedule.setdefault(0, before_first)
    if 0 not in schedule:
        raise ValueError(f"{name} must say its value for epoch 0, got {dict(value)!r}")
    return schedule


def _at(schedule: dict[int, int], epoch: int) -> int:
    return schedule[max(first for first in schedule if first <= epoch)]


def _limit(limit: object) -> int | float:
    # As a Trainer reads it: the type decides, 1 is one batch and 1.0 all of them.
    if isinstance(limit, numbers.Integral) and not isinstance(limit, bool) and int(limit) >= 0:
        return int(limit)
    if isinstance(limit, numbers.Real) and not isinstance(limit, numbers.Integral) and 0.0 <= float(limit) <= 1.0:
        return float(limit)
    raise ValueError(
        "limit_train_batches must be a number of batches (int of at least 0) or a share (float from 0.0 to 1.0), "
        f"got {limit!r}"
    )


def _end_in_words(plan: StepPlan) -> Iterator[str]:
    if plan.total_steps == 0:
        yield "Nothing will train: this run makes 0 optimizer steps."
        return
    stopped_by_steps = plan.total_steps == plan.max_steps
    reason = f"max_steps={plan.max_steps:,}" if stopped_by_steps else f"max_epochs={plan.max_epochs:,}"
    if not stopped_by_steps and plan.epochs_completed != plan.max_epochs:
        reason = f"epoch {plan.epochs_completed:,}, which has no batch,"
    where = f"after {_count(plan.epochs_completed, 'full epoch')}"
    last = plan.windows[-1]
    if stopped_by_steps and last.epoch >= plan.epochs_completed:
        where += f" and {_count(last.stop, 'batch', 'batches')} of the next"
    yield f"{reason} ends the run {where}: {_count(plan.total_steps, 'optimizer step')} in all."
    if plan.micro_batches_unused:
        yield f"The gradients of {_count(plan.micro_batches_unused, 'micro-batch', 'micro-batches')} reach no step."


def _epoch_sentences(plan: StepPlan) -> Iterator[str]:
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    dropping = " (a short last batch is dropped)" if plan.drop_last else ""
    for stage, dropped, repeated in zip(
        plan.stages,
        _per_stage(plan, plan.samples_dropped),
        _per_stage(plan, plan.samples_repeated),
        strict=True,
    ):
        since = f"From epoch {stage.first_epoch:,} on: " if len(plan.stages) > 1 else ""
        k = stage.accumulate_grad_batches
        yield (
            f"{since}{_count(plan.num_samples, 'sample')} in batches of {stage.per_rank_batch_size:,}{dropping} make "
            f"{_count(stage.batches, 'batch', 'batches')} per epoch{ranks}."
        )
        windows = f"Windows of {_count(k, 'micro-batch', 'micro-batches')}"
        yield f"{windows} make {_count(stage.steps, 'optimizer step')} per epoch."
        short = stage.batches % k
        if short:
            fate = {
                "step": "steps too",
                "carry": "waits and leaks into the first step of the next epoch",
                "drop": "is thrown away",
            }[plan.tail]
            yield f"The last window of an epoch is short ({short:,} of {k:,} micro-batches) and {fate}."
        if dropped:
            yield f"An epoch leaves out {_count(dropped, 'sample')} of the dataset."
        if repeated:
            yield f"Padding to equal shares repeats {_count(repeated, 'sample')} per epoch."


def _per_stage(plan: StepPlan, value: PerEpoch) -> list[int]:
    return [value if isinstance(value, int) else value[stage.first_epoch] for stage in plan.stages]


def _count(number: int, unit: str, units: str | None = None) -> str:
    return f"{number:,} {unit if number == 1 else units or unit + 's'}"


def _per_epoch_text(value: PerEpoch) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(f"{number:,} from epoch {epoch:,}" for epoch, number in value.items())


def _main(argv: list[str] | None = None) -> int:
    import argparse

    def schedule(text: str) -> Schedule:
        if ":" not in text:
            return int(text)
        return {int(epoch): int(value) for epoch, value in (pair.split(":") for pair in text.split(","))}

    def limit(text: str) -> int | float:
        return int(text) if text.lstrip("-").isdigit() else float(text)

    parser = argparse.ArgumentParser(
        prog="python -m course_lib.steps", description="Plan the optimizer steps of a training run."
    )
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--batch-size", type=schedule, required=True, help="per rank; or EPOCH:SIZE,EPOCH:SIZE,…")
    parser.add_argument("--accumulate-grad-batches", type=schedule, default=1, help="k; or EPOCH:K,EPOCH:K,…")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--max-epochs", type=int)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--limit-train-batches", type=limit, default=1.0, help="10: ten batches; 0.5: half of them")
    parser.add_argument("--tail", choices=("step", "carry", "drop"), default="step")
    try:
        plan = plan_steps(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
    print(f"{plan.explain()}\n\n{plan.table()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
