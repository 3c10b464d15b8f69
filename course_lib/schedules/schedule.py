"""Which size and which batch, when: by epoch, by optimizer steps, or by samples seen.

A size four times as large wants a batch four times as small, and one of the two is usually forgotten where it is
written down a second time. The rule: *one table says size and batch together; a budget of pixels or tokens makes it.*

    >>> schedule = SizeSchedule.with_budget({0: 32, 3: 64}, budget=65536, effective_batch_size=64)
    >>> schedule.stage_at(4)
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

from course_lib._words import int_of_at_least
from course_lib.samplers.epoch import SamplerTail
from course_lib.schedules.batch_sizes import fit_budget, pixels
from course_lib.schedules.schedule_plan import SchedulePlan
from course_lib.schedules.sized import Size, checked_size, size_text
from course_lib.schedules.stage_steps import RunPosition, Walk
from course_lib.schedules.stages import SizeStage, Stages, Unit
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
        cost: Callable[[Any], float] = pixels,
        multiple_of: int = 1,
        **schedule: Any,
    ) -> SizeSchedule:
        """The largest batch of each size that a fixed budget holds.

        Args:
            sizes: ``{start: size}``.
            budget: What a batch of one rank may cost.
            cost: ``cost(size)`` of a sample; default: its pixels, of a square side or of a tuple. ``cost=int`` for
                tokens; bytes; or the square of a length, where attention decides.
            multiple_of: Round batch sizes down to a multiple of this.
            schedule: ``unit``, ``effective_batch_size`` and ``accumulate_grad_batches`` as above.

        Raises:
            ValueError: The budget does not hold ``multiple_of`` samples of some size.
        """
        sizes = _checked(sizes)
        fitted = fit_budget(sizes.values(), budget, cost, multiple_of)
        made = cls([(start, size, fitted[size].batch_size) for start, size in sizes.items()], **schedule)
        made.stages = tuple(replace(stage, budget_used=fitted[stage.size].budget_used) for stage in made.stages)
        return made

    @classmethod
    def from_batch_sizes(cls, sizes: Mapping[int, Size], table: Mapping[Any, Any], **schedule: Any) -> SizeSchedule:
        """The batch of each size from a table of what was found to fit.

        ``table``: ``{size: batch size, or an object with .batch_size}``, as ``memory.find_batch_sizes`` makes it; the
        others as in ``with_budget``.
        """
        sizes = _checked(sizes)
        missing = [size for size in sizes.values() if size not in table]
        if missing:
            raise ValueError(f"the table has no batch size for the sizes {missing}, only for {list(table)!r}")
        stages = {start: (size, getattr(table[size], "batch_size", table[size])) for start, size in sizes.items()}
        return cls(stages, **schedule)

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

        ``tail`` is the sampler's; ``run``: ``max_epochs``, ``max_steps``, ``limit_train_batches``, ``steps_done`` and
        ``samples_done``. An epoch that a limit cuts counts in full for the schedule.
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
        for stage in self.stages:
            factor = self.samples_per_step(stage) / self.samples_per_step(self.stages[0])
            used = "-" if stage.budget_used is None else f"{stage.budget_used:.1%}"
            k, root = self.window_size(stage, world_size), math.sqrt(factor)
            numbers = (f"{stage.start}", size_text(stage.size), f"{stage.batch_size}", used, f"{k}")
            rows.append((*numbers, f"{factor:.3g}", f"{root:.3g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeSchedule) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """All that makes it this schedule and no other."""
        stages = ", ".join(f"{s.start}: ({s.size!r}, {s.batch_size})" for s in self.stages)
        effective = f", effective_batch_size={self.effective_batch_size}" if self.effective_batch_size else ""
        window = f", accumulate_grad_batches={self.micro_batches}" if self.micro_batches > 1 else ""
        return f"SizeSchedule({{{stages}}}, unit={self.unit!r}{effective}{window})"


def _checked(sizes: object) -> dict[int, Size]:
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be {{start: size}}, got {sizes!r}")
    return {start: checked_size(f"the size at {start!r}", size) for start, size in sizes.items()}
