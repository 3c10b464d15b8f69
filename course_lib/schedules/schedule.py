"""Which size and which batch, when: by epoch, by optimizer steps, or by samples seen.

A size four times as large wants a batch four times as small, and one of the two is usually forgotten where it is
written down a second time. The rule: *one table says size and batch together; a budget of pixels or tokens makes it.*

    >>> schedule = SizeSchedule.with_budget({0: 32, 3: 64}, budget=65536, effective_batch_size=64)
    >>> schedule.stage_at(epoch=4)
    SizeStage(start=3, size=64, batch_size=16, budget_used=1.0)
    >>> schedule.accumulate_grad_batches()
    {0: 1, 3: 4}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

from course_lib._arguments import int_of_at_least
from course_lib.samplers.epoch import SamplerTail
from course_lib.schedules.batch_sizes import batch_size_in, fit_budget
from course_lib.schedules.lr_factor import LrFactor, LrRule, lr_factor
from course_lib.schedules.schedule_plan import SchedulePlan
from course_lib.schedules.sized import Size, checked_size, size_text
from course_lib.schedules.stages import SizeStage, Stages, Unit
from course_lib.schedules.walk import RunPosition, Walk
from course_lib.steps.arguments import ShortWindow, checked_run, refuse_within_an_epoch


class SizeSchedule(Stages):
    """Sizes and batch sizes in stages; the last stage goes on for as long as the run does.

    Args:
        stages: ``{start: (size, batch_size)}``, or a list of ``(start, size, batch_size)``: from 0 on, growing. A
            batch size is one rank's, of a micro-batch.
        unit: What the starts count. ``"epochs"``; ``"optimizer_steps"`` of the run; ``"samples"`` of the run, over all
            ranks, an epoch counting as ``num_samples`` whatever its tail drops or repeats.
        effective_batch_size: Samples of an update over all ranks, held by accumulation: every stage's window has
            ``effective_batch_size / (batch_size · ranks)`` micro-batches. Default: the batch changes with the stage.
        accumulate_grad_batches: Micro-batches of every window, where ``effective_batch_size`` does not decide.

    Raises:
        ValueError: Stages that don't begin at 0 or don't grow, or a batch size that ``effective_batch_size`` is no
            multiple of; with the number of ranks, the methods that are told it check again.
    """

    def __init__(
        self,
        stages: Mapping[int, tuple[Size, int]] | Sequence[tuple[int, Size, int]],
        *,
        unit: Unit = "epochs",
        effective_batch_size: int | None = None,
        accumulate_grad_batches: int = 1,
    ) -> None:
        try:
            if isinstance(stages, Mapping):
                stages = [(start, *of_start) for start, of_start in stages.items()]
            stages = [(start, size, batch_size) for start, size, batch_size in stages]
        except (TypeError, ValueError):
            raise ValueError(
                "stages must be {start: (size, batch_size)} or a list of (start, size, batch_size), got " + repr(stages)
            ) from None
        checked = tuple(
            SizeStage(
                int_of_at_least(0, "the start of a stage", start),
                checked_size("the size of a stage", size),
                int_of_at_least(1, f"the batch size of size {size!r}", batch_size),
            )
            for start, size, batch_size in stages
        )
        starts = [stage.start for stage in checked]
        if starts[:1] != [0] or any(start >= end for start, end in pairwise(starts)):
            raise ValueError(f"the starts of the stages must begin at 0 and grow, got {starts}")
        if unit not in get_args(Unit):
            raise ValueError(f'unit must be "epochs", "optimizer_steps" or "samples", got {unit!r}')
        self.stages, self.unit, self.effective_batch_size = checked, unit, None
        self.micro_batches = int_of_at_least(1, "accumulate_grad_batches", accumulate_grad_batches)
        if effective_batch_size is not None:
            self.effective_batch_size = int_of_at_least(1, "effective_batch_size", effective_batch_size)
            if self.micro_batches != 1:
                raise ValueError("give effective_batch_size or accumulate_grad_batches: one decides the other")
        for stage in checked:
            self.window_size(stage, world_size=1)

    @classmethod
    def with_budget(
        cls,
        sizes: Mapping[int, Size],
        budget: float,
        *,
        dims: int = 2,
        cost: Callable[[Any], float] | None = None,
        multiple_of: int = 1,
        max_batch_size: int | None = None,
        **schedule: Any,
    ) -> SizeSchedule:
        """The largest batch of each size that a fixed budget holds.

        Args:
            sizes: ``{start: size}``.
            budget: What a batch of one rank may cost: pixels, tokens, bytes.
            dims: A sample of size s costs ``s**dims`` (2: a square image's pixels, 1: tokens); of a tuple, the product.
            cost: ``cost(size)`` instead: bytes, or the square of a length where attention decides.
            multiple_of: Round batch sizes down to a multiple of this.
            max_batch_size: Never more than this.
            schedule: ``unit``, ``effective_batch_size`` and ``accumulate_grad_batches`` as above.

        Raises:
            ValueError: The budget does not hold ``multiple_of`` samples of some size.
        """
        sizes = {start: checked_size(f"the size at {start!r}", size) for start, size in _by_start(sizes).items()}
        fitted = fit_budget(sizes.values(), budget, dims, cost, multiple_of, max_batch_size)
        made = cls([(start, size, fitted[size].batch_size) for start, size in sizes.items()], **schedule)
        made.stages = tuple(replace(stage, budget_used=fitted[stage.size].budget_used) for stage in made.stages)
        return made

    @classmethod
    def from_batch_sizes(cls, sizes: Mapping[int, Size], table: Mapping[Any, Any], **schedule: Any) -> SizeSchedule:
        """The batch of each size from a table of what was found to fit.

        Args:
            sizes: ``{start: size}``.
            table: ``{size or shape of a sample: batch size, or an object with .batch_size}``. A shape fits a size that
                it ends with: ``(3, 64, 64)`` the sizes 64 and (64, 64). ``(512,)`` fits the size 512.
            schedule: ``unit``, ``effective_batch_size`` and ``accumulate_grad_batches`` as above.
        """
        if not isinstance(table, Mapping):
            raise ValueError(f"table must be {{size or shape: batch size}}, got {table!r}")
        return cls([(start, size, batch_size_in(table, size)) for start, size in _by_start(sizes).items()], **schedule)

    def stage_at(
        self, *, epoch: int | None = None, optimizer_step: int | None = None, samples: int | None = None
    ) -> SizeStage:
        """The stage at a time, in the schedule's own unit: an epoch, an optimizer step, or the samples before it."""
        given = {"epochs": epoch, "optimizer_steps": optimizer_step, "samples": samples}
        if [unit for unit, time in given.items() if time is not None] != [self.unit]:
            name = {"epochs": "epoch", "optimizer_steps": "optimizer_step", "samples": "samples"}[self.unit]
            raise ValueError(f"this schedule counts {self.unit}: ask stage_at({name}=…), and nothing else")
        return self.stages[self.number_at(int_of_at_least(0, "the time", given[self.unit]))]

    def accumulate_grad_batches(self, world_size: int = 1) -> int | dict[int, int]:
        """What a Trainer's ``accumulate_grad_batches`` must be: an int, or ``{epoch: k}``.

        Raises:
            ValueError: It would change within an epoch, which a Trainer cannot do.
        """
        world_size = int_of_at_least(1, "world_size", world_size)
        window_sizes = [self.window_size(stage, world_size) for stage in self.stages]
        if len(set(window_sizes)) == 1:
            return window_sizes[0]
        if self.unit != "epochs":
            raise ValueError(
                f"accumulation changes within an epoch here (windows of {window_sizes} micro-batches, by {self.unit}), "
                'and a Trainer has one number for an epoch. Use unit="epochs", or an own loop: take the next '
                "k batches for each k of ScheduledBatchSampler.window_sizes(), and give them to "
                "course_lib.accumulation.accumulate"
            )
        return {stage.start: k for stage, k in zip(self.stages, window_sizes, strict=True)}

    def lr_factor(self, rule: LrRule = "linear") -> LrFactor:
        """The factor of the learning rate, a function of the time in the schedule's own unit, for ``LambdaLR``.

        ``"linear"`` in the samples of an update, relative to the first stage's, ``"sqrt"`` of them, or ``"none"``. By
        optimizer step, for any unit: ``plan(...).lr_factor(rule)``.
        """
        samples = [float(self.samples_per_step(stage)) for stage in self.stages]
        return lr_factor(rule, [stage.start for stage in self.stages], samples)

    def plan(
        self,
        num_samples: int,
        *,
        world_size: int = 1,
        tail: SamplerTail = "spread",
        accumulate_grad_batches: int = 1,
        short_window: ShortWindow = "step",
        **run: Any,
    ) -> SchedulePlan:
        """Plan the optimizer steps of a run with a ``ScheduledBatchSampler``; see ``course_lib.steps.plan_steps``.

        A run whose epochs are cut by ``limit_train_batches`` has the sizes of whole ones: an epoch counts in full for
        the schedule.

        Args:
            num_samples: Samples in the dataset.
            world_size: Number of ranks.
            tail: The sampler's.
            accumulate_grad_batches, short_window: The schedule says its windows itself: nothing else is taken.
            run: ``max_epochs``, ``max_steps``, ``limit_train_batches``, ``steps_done`` and ``samples_done``.
        """
        if accumulate_grad_batches != 1 or short_window != "step":
            raise ValueError(
                "a schedule of sizes says its windows itself, and a short one steps: leave accumulate_grad_batches and "
                f"short_window out, got {accumulate_grad_batches!r} and {short_window!r}"
            )
        checked = checked_run(**run)
        num_samples = int_of_at_least(1, "num_samples", num_samples)
        world_size = int_of_at_least(1, "world_size", world_size)
        if tail not in get_args(SamplerTail):
            raise ValueError(f'tail must be "spread", "drop" or "pad", got {tail!r}')
        epoch, position = divmod(checked.samples_done, num_samples)
        refuse_within_an_epoch(position, num_samples, checked)
        place = RunPosition(epoch, position, checked.steps_done, position)
        return SchedulePlan.of_epochs(
            Walk(self, num_samples, tail, world_size).epochs_to_deal(place),
            checked,
            all_are_known=False,
            num_samples=num_samples,
            world_size=world_size,
            schedule=self,
        )

    def table(self, world_size: int = 1) -> str:
        """Show the schedule as aligned columns."""
        rows = [("from", "size", "batch_size", "budget_used", "accumulate", "lr_linear", "lr_sqrt")]
        for stage, factor in zip(self.stages, self.lr_factor("linear").factors, strict=True):
            used = "-" if stage.budget_used is None else f"{stage.budget_used:.1%}"
            k, root = self.window_size(stage, world_size), math.sqrt(factor)
            numbers = (f"{stage.start}", size_text(stage.size), f"{stage.batch_size}", used, f"{k}")
            rows.append((*numbers, f"{factor:.3g}", f"{root:.3g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def identity(self) -> dict[str, Any]:
        """What makes it this schedule and no other, as JSON keeps it."""
        stages = [[s.start, list(s.size) if isinstance(s.size, tuple) else s.size, s.batch_size] for s in self.stages]
        return {
            "unit": self.unit,
            "stages": stages,
            "effective_batch_size": self.effective_batch_size,
            "accumulate_grad_batches": self.micro_batches,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeSchedule) and self.identity() == other.identity()

    def __hash__(self) -> int:
        return hash(str(self.identity()))

    def __repr__(self) -> str:
        stages = ", ".join(f"{s.start}: ({s.size!r}, {s.batch_size})" for s in self.stages)
        effective = f", effective_batch_size={self.effective_batch_size}" if self.effective_batch_size else ""
        k = self.micro_batches
        window = f", accumulate_grad_batches={k}" if k > 1 else ""
        return f"SizeSchedule({{{stages}}}, unit={self.unit!r}{effective}{window})"


def _by_start(sizes: object) -> Mapping[Any, Any]:
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be {{start: size}}, got {sizes!r}")
    return sizes
