"""The exercises of chapter 05, and what a reader is told who falls for one of its traps."""

from __future__ import annotations

import math
import random
from typing import Any

from course_lib.steps import plan_steps
from workbook.exercises import Exercise

count_by_hand = Exercise(
    "count by hand",
    solution=plan_steps(260, 8, accumulate_grad_batches=4, max_epochs=5).total_steps,
    misconceptions={
        "{got} leaves out the short window of each epoch, by a floor or by leaving out the last batch. "
        "drop_last=False keeps that batch, and its window steps.": 40,
        "{got} rounds down once, for the whole run: a Trainer starts a new window in each epoch.": 41,
        "{got} lets windows reach across epochs: a Trainer starts a new window in each epoch.": 42,
        "{got} holds a part of a step, and lets windows reach across epochs: round up in each epoch.": 41.25,
        "{got} holds a part of a step. Count whole batches first, then whole windows, in each epoch.": 40.625,
        "{got} counts micro-batches: four of them make one optimizer step.": 165,
        "{got} counts micro-batches, and leaves out the short one: it trains, and four make one step.": 160,
        "{got} counts micro-batches, in part even, and lets them reach across epochs.": 162.5,
        "{got} counts micro-batches as if a batch could reach across epochs.": 163,
        "{got} counts the micro-batches of one epoch: four of them make one step, and the run has five epochs.": 33,
        "{got} counts the whole micro-batches of one epoch: the short one trains, and four make one step.": 32,
        "{got} is one epoch; the run has five.": 9,
        "{got} is one epoch, without its short window; the run has five.": 8,
        "{got} is one epoch, and holds a part of a step: count whole batches, then whole windows.": 8.125,
        "{got} is one epoch, and holds a part of a step: the short window is a whole step.": 8.25,
        "{got} divides the samples by the window: a window is counted in micro-batches, not in samples.": 325,
        "{got} divides the samples of one epoch by the window: a window is counted in micro-batches.": 65,
    },
)


def _steps_per_epoch(**asked: Any) -> int:
    steps = plan_steps(**asked, max_epochs=1).steps_per_epoch
    assert isinstance(steps, int)
    return steps


def _steps_of_share(share: int, batch_size: int, k: int, drop_last: bool) -> int:
    batches = share // batch_size if drop_last else math.ceil(share / batch_size)
    return math.ceil(batches / k)


def _wrong_steps(
    num_samples: int, batch_size: int, accumulate_grad_batches: int, world_size: int, drop_last: bool
) -> dict[str, float]:
    k, per_step = accumulate_grad_batches, batch_size * accumulate_grad_batches * world_size
    options = dict(batch_size=batch_size, accumulate_grad_batches=k, drop_last=drop_last)
    right = _steps_per_epoch(num_samples=num_samples, world_size=world_size, **options)
    on_one_rank = _steps_per_epoch(num_samples=num_samples, **options)
    share, share_down = math.ceil(num_samples / world_size), num_samples // world_size
    batches_of_all = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    batches = share // batch_size if drop_last else math.ceil(share / batch_size)
    return {
        "{got} is what floor division gives: the short last window steps too.": num_samples // per_step,
        "{got} holds a part of a step: round each division to whole batches and whole windows.": num_samples / per_step,
        "{got} leaves out the short last batch, although drop_last is False: it trains.": math.ceil(
            share // batch_size / k
        ),
        "{got} ignores drop_last: the 6 samples left of 70 make no batch, so they start no window. "
        "(The line ceil(N / (b·k·G)) does that too.)": math.ceil(num_samples / per_step),
        "{got} drops the short window together with the short batch: drop_last is about batches, and a short window "
        "steps all the same. (A floor of the whole line N / (b·k·G) does that too.)": (
            batches // k if drop_last else math.ceil(batches / k)
        ),
        "{got} counts micro-batches: divide by accumulate_grad_batches.": math.ceil(share / batch_size),
        "{got} forgets the ranks: each has its share of the samples.": on_one_rank,
        "{got} divides steps by the ranks: they divide the samples, once, before there are batches.": (
            on_one_rank // world_size
        ),
        "{got} rounds a rank's share down: the sampler pads the shares to equal length, so it is rounded up.": (
            _steps_of_share(share_down, batch_size, k, drop_last)
        ),
        "{got} lacks the padding where drop_last is set: the sampler pads the shares to equal length all the same. So "
        "round a rank's share up, and cut that into batches.": (
            _steps_of_share(share_down if drop_last else share, batch_size, k, drop_last)
        ),
        "{got} shares out batches or steps: the ranks share samples, and each cuts its own batches from its share.": (
            math.ceil(batches_of_all / k / world_size)
        ),
        "{got} adds the ranks' steps up: they step together, and it counts once.": world_size * right,
        "{got} adds one window to the full ones, also where they hold all batches: then nothing is left to step for.": (
            batches // k + 1
        ),
        "{got} counts each micro-batch of the short window as a step: they make one together.": (
            batches // k + batches % k
        ),
        "{got} adds the samples that do not divide to one rank's share: the shares are equal, each a sample longer.": (
            _steps_of_share(share_down + num_samples % world_size, batch_size, k, drop_last)
        ),
    }


def _any_loader(drawn: random.Random) -> dict[str, Any]:
    batch_size = drawn.choice([1, 2, 3, 8, drawn.randint(1, 20), 2 ** drawn.randint(4, 10)])
    k = drawn.choice([1, 2, 4, 150, 10**6, drawn.randint(1, 9)])
    world_size = drawn.choice([1, 2, 3, drawn.randint(1, 9)])
    at_a_border = batch_size * k * world_size * drawn.randint(0, 4) + drawn.randint(-3, 3)
    return dict(
        num_samples=max(1, drawn.choice([at_a_border, drawn.randint(1, 300)])), batch_size=batch_size,
        accumulate_grad_batches=k, world_size=world_size, drop_last=drawn.random() < 0.5,
    )  # fmt: skip


steps_per_epoch = Exercise(
    "optimizer_steps_per_epoch",
    solution=_steps_per_epoch,
    cases=[
        dict(num_samples=64, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=72, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=65, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=70, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=True),
        dict(num_samples=72, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=True),
        dict(num_samples=33, batch_size=8, accumulate_grad_batches=2, world_size=1, drop_last=True),
        dict(num_samples=70, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=False),
        dict(num_samples=65, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=False),
        dict(num_samples=15, batch_size=8, accumulate_grad_batches=1, world_size=2, drop_last=True),
        dict(num_samples=24, batch_size=8, accumulate_grad_batches=1, world_size=2, drop_last=True),
        dict(num_samples=15, batch_size=8, accumulate_grad_batches=2, world_size=2, drop_last=True),
        dict(num_samples=7, batch_size=8, accumulate_grad_batches=2, world_size=1, drop_last=True),
        dict(num_samples=56, batch_size=8, accumulate_grad_batches=4, world_size=1, drop_last=False),
        dict(num_samples=35, batch_size=4, accumulate_grad_batches=1, world_size=4, drop_last=False),
    ],
    misconceptions=_wrong_steps,
    search=_any_loader,
)


def _wrong_horizons(num_batches: int, accumulate_grad_batches: int, epochs: int) -> dict[str, float]:
    k, steps = accumulate_grad_batches, math.ceil(num_batches / accumulate_grad_batches)
    micro_batches = num_batches * epochs
    return {
        "{got} counts micro-batches, but the schedule is stepped once per update: the learning rate stays high.": (
            micro_batches
        ),
        "{got} turns updates back into micro-batches: the schedule would get only a part of its way.": (
            steps * epochs * k
        ),
        "{got} divides by the window twice: the first line has counted updates already.": math.ceil(steps * epochs / k),
        "{got} divides by the window a second time, rounded down: the first line has counted updates already.": (
            steps * epochs // k
        ),
        "{got} forgets the short window of each epoch: the schedule ends early, and a cosine turns back up.": (
            num_batches // k * epochs
        ),
        "{got} lets windows reach across epochs: round up in each epoch, then multiply.": math.ceil(micro_batches / k),
        "{got} adds one window to the full ones, also where they hold all batches: then nothing is left to step for.": (
            (num_batches // k + 1) * epochs
        ),
        "{got} is one epoch: multiply by the epochs.": steps,
        "{got} holds a part of a step: the short window is a whole one.": num_batches / k * epochs,
    }


def _any_schedule(drawn: random.Random) -> dict[str, Any]:
    k = drawn.choice([drawn.randint(1, 9), drawn.randint(10, 64), 10**6])
    at_a_border = max(1, k * drawn.randint(1, 3) + drawn.randint(-1, 1))
    num_batches = drawn.choice([at_a_border, drawn.randint(1, 200)])
    return dict(num_batches=num_batches, accumulate_grad_batches=k, epochs=drawn.randint(1, 9))


schedule_horizon = Exercise(
    "horizon",
    solution=lambda num_batches, accumulate_grad_batches, epochs: (
        math.ceil(num_batches / accumulate_grad_batches) * epochs
    ),
    cases=[
        dict(num_batches=8, accumulate_grad_batches=1, epochs=3),
        dict(num_batches=10, accumulate_grad_batches=4, epochs=1),
        dict(num_batches=10, accumulate_grad_batches=4, epochs=2),
        dict(num_batches=3, accumulate_grad_batches=4, epochs=5),
    ],
    misconceptions=_wrong_horizons,
    search=_any_schedule,
)

max_steps_on_four_ranks = Exercise(
    "max_steps on four ranks",
    solution=plan_steps(2559, 64, accumulate_grad_batches=3, world_size=4, drop_last=True, max_epochs=10).total_steps,
    misconceptions={
        "{got} is right for one rank: each of four draws a quarter of the samples.": 130,
        "{got} is 3 steps per epoch. Either a floor left out the short window, which steps too; or a rank got 9 "
        "batches, as in 2559 // (64 * 4). The shares are padded: each rank draws 640 samples.": 30,
        "{got} holds a part of a step: divide the samples by four, and count batches and windows again.": 32.5,
        "{got} holds a part of a step: count whole batches, then whole windows.": 100 / 3,
        "{got} divides the steps by four: divide the samples, and count the batches and windows again.": 32,
        "{got} rounds down once, for the whole run, or divides the steps by four: a Trainer starts a new window in "
        "each epoch.": 33,
        "{got} lets windows reach across epochs, rounded up: a Trainer starts a new one in each epoch.": 34,
        "{got} adds the ranks' steps up: they step together, and it counts once.": 160,
        "{got} counts micro-batches: a window of three makes one step.": 100,
        "{got} counts micro-batches of 9 in an epoch: the share is padded to 640 samples, and three make a step.": 90,
        "{got} is one epoch; the run has ten.": 4,
        "{got} is one epoch, without its short window; the run has ten.": 3,
    },
)

max_steps_on_two_ranks = Exercise(
    "max_steps on two ranks",
    solution=plan_steps(2800, 64, accumulate_grad_batches=7, world_size=2, drop_last=True, max_epochs=10).total_steps,
    misconceptions={
        "{got} is 4 steps per epoch. Either the samples that drop_last leaves out got a window of their own, as in "
        "ceil(1400 / 64 / 7), or batches or steps were shared between the ranks. They share samples: count one rank's "
        "whole batches, then its windows.": 40,
        "{got} is right for one rank: each of two draws half of the samples.": 70,
        "{got} halves the steps: halve the samples, and count batches and windows again.": 35,
        "{got} holds a part of a step: count whole batches, then whole windows.": 31.25,
        "{got} rounds once, for the whole run: count whole batches and windows in each epoch.": 32,
        "{got} rounds down once, for the whole run: count whole batches and windows in each epoch.": 31,
        "{got} adds the ranks' steps up: they step together, and it counts once.": 60,
        "{got} counts micro-batches: a window of seven makes one step.": 210,
        "{got} counts micro-batches, the dropped one included: a window of seven makes one step.": 220,
        "{got} is one epoch; the run has ten.": 3,
    },
)

EXERCISES = (count_by_hand, steps_per_epoch, schedule_horizon, max_steps_on_four_ranks, max_steps_on_two_ranks)
