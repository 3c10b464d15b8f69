"""Answers to the exercises of 06 to 10 for which no check was written: wrong ones fail, right ones pass."""

import math
import os
import random
from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate, cycle, islice, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.random import default_rng
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from workbook.ch06_exercises import _Dealt, one_order_for_all_ranks, repair_a_sampler, shard_by_hand
from workbook.ch07_exercises import batches_trained, learning_rates, update_together
from workbook.ch08_exercises import batch_sizes, gain, windows
from workbook.ch09_exercises import faults, steps_after_resume, updates_made
from workbook.ch10_exercises import masked_labels, stops_early, two_ranks
from workbook.ch10_runs.parts import Line, Neighbours, Points, Tagger, Tags
from workbook.exercises import NotSolved
from workbook.trainers import quiet_trainer

from course_lib.callbacks import ExactAccumulation
from course_lib.samplers import ShardedBatchSampler

# ------------------------------------------------------------------------------- 06/2: a sampler in one piece


class SeedInTheUpperBits(_Dealt):
    def order(self):  # torch's generator on the CPU takes the lower 32 bits of a seed alone
        generator = torch.Generator().manual_seed(self.seed * 2**32 + self.epoch)
        return torch.randperm(self.num_samples, generator=generator).numpy()


class HashesAString(_Dealt):
    def order(self):
        return np.random.default_rng(abs(hash(f"{self.seed}, {self.epoch}"))).permutation(self.num_samples)


class JoinsTheSeeds(_Dealt):
    def order(self):
        return np.random.default_rng(int(f"{self.seed}{self.epoch}")).permutation(self.num_samples)


class AddsAMultiple(_Dealt):
    def order(self):
        return np.random.default_rng(self.seed + 9973 * self.epoch).permutation(self.num_samples)


class MultipliesThem(_Dealt):
    def order(self):
        return np.random.default_rng(self.seed * self.epoch).permutation(self.num_samples)


class TurnsEverySecondRound(_Dealt):
    def order(self):
        order = np.random.default_rng([self.seed, self.epoch // 2]).permutation(self.num_samples)
        return order[:: (-1) ** self.epoch]


class CountsItsEpochs(_Dealt):
    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1


class ShufflesOneCopy(_Dealt):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.indices = list(range(self.num_samples))

    def order(self):
        random.Random(f"{self.seed}, {self.epoch}").shuffle(self.indices)  # of what the last epoch has left
        return np.array(self.indices)


class ShortOnTheLastRank(_Dealt):
    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches if self.rank < self.num_replicas - 1 or self.num_replicas == 1 else batches[::-1])

    def __len__(self):
        return super().__len__() + (self.num_replicas == 3)


class DrawsFromThreeStates(_Dealt):
    def order(self):
        return np.random.default_rng([self.seed, self.epoch % 3]).permutation(self.num_samples)


class SortsEvenEpochs(_Dealt):
    def order(self):
        return np.arange(self.num_samples) if self.epoch == 0 else super().order()


class ShufflesBlocksOfThree(_Dealt):
    def order(self):
        blocks = np.split(np.arange(self.num_samples), range(3, self.num_samples, 3))
        order = np.random.default_rng([7, self.seed, self.epoch]).permutation(len(blocks))
        return np.concatenate([blocks[number] for number in order])


class YieldsArrays(_Dealt):
    def __iter__(self):
        return iter(self.parts()[self.rank :: self.num_replicas])


class YieldsTuplesLazily(_Dealt):
    def __iter__(self):
        for part in self.parts()[self.rank :: self.num_replicas]:
            yield tuple(part)


class FillsBatchesFirst(_Dealt):
    """Full batches while they last, and the rest as evenly as it goes."""

    def parts(self):
        order, replicas = self.order(), self.num_replicas
        steps = -(-self.num_samples // (self.batch_size * replicas))
        full = (steps - 1) * replicas * self.batch_size
        if self.num_samples - full < replicas:
            return super().parts()
        ends = range(self.batch_size, full + 1, self.batch_size)
        return [*np.split(order, ends)[: len(ends)], *np.array_split(order[full:], replicas)]


class TorchsGenerator(_Dealt):
    def order(self):
        seed = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0])
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed)).numpy()


class TheLastEpochsAlike(_Dealt):
    def order(self):
        return np.random.default_rng([self.seed, min(self.epoch, 19)]).permutation(self.num_samples)


class BitsOfBoth(_Dealt):
    def order(self):
        return default_rng(16_777_259 * self.seed ^ self.epoch).permutation(self.num_samples)

    def __iter__(self):
        return super().__iter__()


class SeedAboveTheEpoch(_Dealt):
    def order(self):
        return np.random.default_rng((self.seed << 32) + self.epoch).permutation(self.num_samples)


class DrawsEpochAfterEpoch(_Dealt):
    def order(self):
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epoch + 1):
            order = torch.randperm(self.num_samples, generator=generator)
        return order.numpy()


class PythonsGenerator(_Dealt):
    def order(self):
        indices = list(range(self.num_samples))
        random.Random(f"{self.seed}, {self.epoch}").shuffle(indices)
        return np.array(indices)


# ------------------------------------------------------------------------------------------------- 06/3: a wrapper


def seeded(batch_sampler, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return list(batch_sampler)


def dealt(batches, num_replicas, rank):
    steps = -(-len(batches) // num_replicas)
    return list(islice(cycle(batches), rank, steps * num_replicas, num_replicas))


def repeats_the_last(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, 1000 * epoch + num_replicas)
    return (batches + batches[-1:] * (-len(batches) % num_replicas))[rank::num_replicas]


def seeded_by(seed_of_epoch):
    return lambda batch_sampler, num_replicas, rank, epoch: dealt(
        seeded(batch_sampler, seed_of_epoch(epoch)), num_replicas, rank
    )


def rolls_one_order(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, 0)
    turn = epoch % len(batches)
    return dealt(batches[turn:] + batches[:turn], num_replicas, rank)


def reverses_one_order(batch_sampler, num_replicas, rank, epoch):
    return dealt(seeded(batch_sampler, epoch // 2)[:: (-1) ** epoch], num_replicas, rank)


def holds_the_generator(batch_sampler, num_replicas, rank, epoch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        yield from dealt(list(batch_sampler), num_replicas, rank)


def gives_it_a_generator(batch_sampler, num_replicas, rank, epoch):
    batch_sampler.sampler.generator = torch.Generator().manual_seed(epoch)
    return dealt(list(batch_sampler), num_replicas, rank)


def makes_another_sampler(batch_sampler, num_replicas, rank, epoch):
    generator = torch.Generator().manual_seed(epoch)
    sampler = RandomSampler(batch_sampler.sampler.data_source, generator=generator)
    return dealt(list(BatchSampler(sampler, batch_sampler.batch_size, False)), num_replicas, rank)


def joins_the_last(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, epoch)
    if len(batches) > 1 and len(batches) % num_replicas:
        batches[-2:] = [batches[-2] + batches[-1]]
    return dealt(batches, num_replicas, rank)


def repeats_its_own(batch_sampler, num_replicas, rank, epoch):
    mine = seeded(batch_sampler, epoch)[rank::num_replicas]
    return mine + mine[:1] if rank else mine


def one_more_than_needed(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, epoch)
    return list(islice(cycle(batches), rank, (len(batches) // num_replicas + 1) * num_replicas, num_replicas))


def sorts_its_batches(batch_sampler, num_replicas, rank, epoch):
    return dealt(sorted(sorted(batch) for batch in seeded(batch_sampler, epoch)), num_replicas, rank)


def by_blocks(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, epoch)
    steps = -(-len(batches) // num_replicas)
    return list(islice(cycle(batches), rank * steps, (rank + 1) * steps))


def with_a_mixed_seed(batch_sampler, num_replicas, rank, epoch):
    seed = int(np.random.SeedSequence([7, epoch]).generate_state(1)[0])
    return np.array(dealt(seeded(batch_sampler, seed), num_replicas, rank), dtype=object)


# ------------------------------------------------------------------------------------------------------- 08/3: gains


def cost(run):
    return list(accumulate(side**2 for side, _ in run))


def gain_by(accuracy, budget_of=min, digits=4):
    def answer(baseline, resized):
        budget = budget_of(cost(baseline)[-1], cost(resized)[-1])
        return round(accuracy(resized, budget) - accuracy(baseline, budget), digits)

    return answer


def by_bisection(run, budget):
    done = bisect_right(cost(run), budget)
    return run[done - 1][1] if done else 0.0


def interpolated(run, budget):
    return float(np.interp(budget, [0, *cost(run)], [0.0, *(accuracy for _, accuracy in run)]))


def mean_within(run, budget):
    within = [accuracy for (_, accuracy), spent in zip(run, cost(run), strict=True) if spent <= budget]
    return sum(within) / len(within) if within else 0.0


def one_epoch_earlier(run, budget):
    done = bisect_right(cost(run), budget)
    return run[done - 2][1] if done > 1 else 0.0


def cheapest_first(run, budget):
    return by_bisection(sorted(run), budget)


def sizes(of_side):
    return lambda sides, budget, multiple_of: [of_side(side, budget, multiple_of) for side in sides]


def window(of_batch):
    return lambda batch_sizes, effective_batch_size, world_size: [
        of_batch(batch, effective_batch_size, world_size) for batch in batch_sizes
    ]


# ----------------------------------------------------------------------------------------------- 10/1: ten epochs


def ten_epochs(module=None, trainer=None, **loader):
    def make_run():
        data = DataLoader(Points(36), **(loader or dict(batch_size=8, shuffle=True)))
        made = quiet_trainer(accelerator="cpu", **(trainer or dict(max_epochs=10)))
        return made, (module or Line)(50), data

    return make_run


class FallsInALine(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.horizon)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class FallsAtTheEnd(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        factor = lambda step: 1.0 if step < self.horizon - 1 else 0.0  # noqa: E731
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class HasNoRate(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.horizon)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class LearnsNothing(Line):
    def training_step(self, batch, batch_idx):
        return 0 * super().training_step(batch, batch_idx)


class AsksTheTrainer(Line):
    def configure_optimizers(self):
        self.horizon = int(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


class ShortFirst:
    """The short batch comes first from the second epoch on."""

    def __init__(self):
        self.epoch = 0

    sampler = property(lambda self: self)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __iter__(self):
        order = np.random.default_rng([1, self.epoch]).permutation(36)
        sizes = [8, 8, 8, 8, 4] if self.epoch == 0 else [9, 9, 9, 8, 1]
        return iter([part.tolist() for part in np.split(order, np.cumsum(sizes)[:-1])])


# ----------------------------------------------------------------------------------------------- 10/2: two ranks


class Parts(Neighbours):
    """Eleven batches for two ranks, the last one cut; ``seed`` says what the order of an epoch is drawn from."""

    seed = staticmethod(lambda epoch, rank: [2026, epoch])

    def __len__(self):
        return 6

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(self.parts(self.seed(self.epoch, rank))[rank::2])

    def parts(self, seed):
        order = np.random.default_rng(seed).permutation(11).tolist()
        batches = [list(range(4 * number, 4 * number + 4)) for number in order]
        return [*batches[:-1], batches[-1][:2], batches[-1][2:]]


class RankTimesEpoch(Parts):
    seed = staticmethod(lambda epoch, rank: [2026, epoch * (rank + 1)])


class OneOrder(Parts):
    """The first epoch's batches again, as ``arrange(batches, epoch, rank)`` gives them to a rank."""

    def __init__(self, arrange):
        super().__init__(44)
        self.arrange = arrange

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(self.arrange(self.parts(2026), self.epoch, rank))


class RankOfTheEnvironment(Parts):
    def __init__(self, num_samples):
        super().__init__(num_samples)
        self.rank = int(os.environ.get("LOCAL_RANK", "0"))

    def __iter__(self):
        return iter(self.parts([2026, self.epoch])[self.rank :: 2])


class AllToBothLater(Parts):
    def __iter__(self):
        if not self.epoch:
            return super().__iter__()
        return islice(Neighbours.__iter__(self), 6)


def shared_by_two(make_batches, **flags):
    def make_run():
        two = {"devices": 2, "strategy": "ddp", "accelerator": "cpu", "max_epochs": 2}
        return quiet_trainer(**two | flags), Line(), DataLoader(Points(44), batch_sampler=make_batches())

    return make_run


# ---------------------------------------------------------------------------------------------- 10/3: masked labels


def tagger(loss, rate=0.05, exact=False, **flags):
    class Weighs(Tagger):
        def training_step(self, batch, batch_idx):
            return loss(self.scores(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=rate)

    def make_run():
        callbacks = [ExactAccumulation()] if exact else []
        options = {"max_epochs": 1, "accumulate_grad_batches": 4, "callbacks": callbacks}
        return quiet_trainer(accelerator="cpu", **options | flags), Weighs(), DataLoader(Tags(), 8)

    return make_run


def divided_in(hook):
    """Sums of losses, and a hook of the module that divides the gradient by the window's labels."""

    class Divides(Tagger):
        labels = batches = 0

        def training_step(self, batch, batch_idx):
            self.labels, self.batches = self.labels + int((batch[1] != -100).sum()), self.batches + 1
            return 4 * loss_sum(self.scores(batch[0]), batch[1])  # a Trainer divides by its window of 4

    def divide(self, *args, **options):
        if self.batches == 4:
            for parameter in self.parameters():
                parameter.grad /= self.labels
            self.labels = self.batches = 0

    setattr(Divides, hook, divide)

    def make_run():
        options = {"max_epochs": 1, "accumulate_grad_batches": 4, "accelerator": "cpu"}
        return quiet_trainer(**options), Divides(), DataLoader(Tags(), 8)

    return make_run


def loss_sum(scores, tags):
    return cross_entropy(scores, tags, ignore_index=-100, reduction="sum")


def sum_and_count(scores, tags):
    return loss_sum(scores, tags), (tags != -100).sum()


WRONG = {
    "06/1 a function": (shard_by_hand, lambda: shard_by_hand.solution),
    "06/1 a part too few": (shard_by_hand, [[3, 4], [7, 8]]),
    "06/1 the parts in reverse": (shard_by_hand, [[11, 12], [7, 8], [3, 4]]),
    "06/1 a set of each": (shard_by_hand, [{3, 4}, {7, 8}, {11, 12}]),
    "06/1 counted from 1": (shard_by_hand, [[4, 5], [8, 9], [12, 13]]),
    "06/2 counts its epochs": (repair_a_sampler, CountsItsEpochs),
    "06/2 shuffles one copy": (repair_a_sampler, ShufflesOneCopy),
    "06/2 too long on three ranks": (repair_a_sampler, ShortOnTheLastRank),
    "06/2 three orders": (repair_a_sampler, DrawsFromThreeStates),
    "06/2 epoch 0 in order": (repair_a_sampler, SortsEvenEpochs),
    "06/2 hash of a string": (repair_a_sampler, HashesAString),
    "06/2 seed in the upper bits": (repair_a_sampler, SeedInTheUpperBits),
    "06/2 seeds joined": (repair_a_sampler, JoinsTheSeeds),
    "06/2 a product": (repair_a_sampler, MultipliesThem),
    "06/2 the last epochs alike": (repair_a_sampler, TheLastEpochsAlike),
    "06/2 bits of both": (repair_a_sampler, BitsOfBoth),
    "06/2 a sum of a multiple": (repair_a_sampler, AddsAMultiple),
    "06/2 every second order from its end": (repair_a_sampler, TurnsEverySecondRound),
    "06/2 blocks of three": (repair_a_sampler, ShufflesBlocksOfThree),
    "06/3 epoch modulo 12": (one_order_for_all_ranks, seeded_by(lambda epoch: epoch % 12)),
    "06/3 epoch modulo 100": (one_order_for_all_ranks, seeded_by(lambda epoch: epoch % 100)),
    "06/3 epochs up to 50": (one_order_for_all_ranks, seeded_by(lambda epoch: min(epoch, 50))),
    "06/3 repeats the last, the number of ranks in the seed": (one_order_for_all_ranks, repeats_the_last),
    "06/3 one order, rolled": (one_order_for_all_ranks, rolls_one_order),
    "06/3 one order, reversed": (one_order_for_all_ranks, reverses_one_order),
    "06/3 holds the generator": (one_order_for_all_ranks, holds_the_generator),
    "06/3 gives it a generator": (one_order_for_all_ranks, gives_it_a_generator),
    "06/3 makes another sampler": (one_order_for_all_ranks, makes_another_sampler),
    "06/3 joins the last": (one_order_for_all_ranks, joins_the_last),
    "06/3 repeats its own": (one_order_for_all_ranks, repeats_its_own),
    "06/3 one more than needed": (one_order_for_all_ranks, one_more_than_needed),
    "06/3 sorts its batches": (one_order_for_all_ranks, sorts_its_batches),
    "07/1 below 1e15": (
        update_together,
        lambda own_loss, reduced_gradient: all(abs(g) < 1e15 for g in reduced_gradient),
    ),
    "07/1 a large own loss": (
        update_together,
        lambda own_loss, reduced_gradient: (
            not 1e3 < own_loss < math.inf and all(map(math.isfinite, reduced_gradient))
        ),
    ),
    "07/1 a sum below 1e30": (update_together, lambda own_loss, reduced_gradient: sum(reduced_gradient) < 1e30),
    "07/1 a product": (
        update_together,
        lambda own_loss, reduced_gradient: math.isfinite(math.prod(reduced_gradient)),
    ),
    "07/1 neighbours differ": (
        update_together,
        lambda own_loss, reduced_gradient: all(
            math.isfinite(a - b) for a, b in pairwise(reduced_gradient)
        ),
    ),
    "07/1 reads the text": (
        update_together,
        lambda own_loss, reduced_gradient: not any(str(g) in ("nan", "inf") for g in reduced_gradient),
    ),
    "07/1 counts the good": (
        update_together,
        lambda own_loss, reduced_gradient: sum(map(math.isfinite, reduced_gradient)),
    ),
    "07/1 answers in words": (
        update_together,
        lambda own_loss, reduced_gradient: "update" if all(map(math.isfinite, reduced_gradient)) else "skip",
    ),
    "07/1 below 10 ** 19": (
        update_together,
        lambda own_loss, reduced_gradient: all(abs(g) < 1e19 for g in reduced_gradient),
    ),
    "07/2 a cosine": (
        learning_rates,
        lambda finite, horizon: [0.5 + 0.5 * math.cos(math.pi * u / horizon) for u in range(sum(finite))],
    ),
    "07/2 six digits": (
        learning_rates,
        lambda finite, horizon: [round(1 - u / horizon, 6) for u in range(sum(finite))],
    ),
    "07/2 the last alone": (
        learning_rates,
        lambda finite, horizon: [1 - (sum(finite) - 1) / horizon] if any(finite) else [],
    ),
    "07/2 a skip in a row counts once": (
        learning_rates,
        lambda finite, horizon: [
            1 - sum(finite[: i]) / (horizon + (0 if all(finite) else 1)) for i, ok in enumerate(finite) if ok
        ],
    ),
    "07/2 pairs": (learning_rates, lambda finite, horizon: [(u, 1 - u / horizon) for u in range(sum(finite))]),
    "07/3 a list of epochs": (batches_trained, [5, 6, 0]),
    "07/3 in words": (batches_trained, "eleven"),
    "08/1 a mask of bits": (batch_sizes, sizes(lambda s, b, m: b // s**2 & ~(m - 1))),
    "08/1 the padded side": (batch_sizes, sizes(lambda s, b, m: b // (-(-s // 8) * 8) ** 2 // m * m)),
    "08/1 one multiple less where it is full": (batch_sizes, sizes(lambda s, b, m: max(0, (b - 1) // s**2) // m * m)),
    "08/1 in a dict": (
        batch_sizes,
        lambda sides, budget, multiple_of: {s: budget // s**2 // multiple_of * multiple_of for s in sides},
    ),
    "08/1 shares the budget": (
        batch_sizes,
        lambda sides, budget, multiple_of: [
            budget // len(sides) // s**2 // multiple_of * multiple_of for s in sides
        ],
    ),
    "08/2 one rank is the leader": (windows, window(lambda b, e, w: e // (b * max(1, w - 1)))),
    "08/2 one more": (windows, window(lambda b, e, w: e // (b * w) + (w > 1))),
    "08/2 a power of two": (windows, window(lambda b, e, w: 1 << (e // (b * w)).bit_length() - 1)),
    "08/2 of the mean batch": (
        windows,
        lambda batch_sizes, effective_batch_size, world_size: [
            effective_batch_size * len(batch_sizes) // (sum(batch_sizes) * world_size)
        ]
        * len(batch_sizes),
    ),
    "08/3 interpolated": (gain, gain_by(interpolated)),
    "08/3 mean of the epochs": (gain, gain_by(mean_within)),
    "08/3 one epoch earlier": (gain, gain_by(one_epoch_earlier)),
    "08/3 cheapest first": (gain, gain_by(cheapest_first)),
    "08/3 a mean budget": (gain, gain_by(by_bisection, lambda *costs: sum(costs) / 2)),
    "08/3 without a sign": (gain, lambda baseline, resized: abs(gain_by(by_bisection)(baseline, resized))),
    "08/3 five digits": (gain, gain_by(by_bisection, digits=5)),
    "08/3 cut off": (
        gain,
        lambda baseline, resized: int(gain_by(by_bisection, digits=9)(baseline, resized) * 1e4) / 1e4,
    ),
    "09/1 all lines": (faults, range(1, 15)),
    "09/1 between two lines": (faults, {3.7, 6.2, 8.9, 9.5, 13.1}),
    "09/1 counted from 0": (faults, {2, 5, 7, 8, 12}),
    "09/1 bytes": (faults, b"\x03\x06\x08\t\r"),
    "09/2 one more": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: (
            samples_left // (batch_size * k * ranks) + 1
            + epochs_later * (num_samples // (batch_size * k * ranks) + 1)
        ),
    ),
    "09/2 a whole epoch is no rest": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: sum(
            math.ceil(n / (batch_size * k * ranks))
            for n in [samples_left % num_samples, *[num_samples] * epochs_later]
        ),
    ),
    "09/2 never ends on one": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: sum(
            math.ceil(max(n, ranks) / (batch_size * k * ranks)) if n > 1 else 0
            for n in [samples_left, *[num_samples] * epochs_later]
        ),
    ),
    "09/2 rounded": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: sum(
            round(n / (batch_size * k * ranks)) for n in [samples_left, *[num_samples] * epochs_later]
        ),
    ),
    "09/3 a set": (updates_made, {27}),
    "09/3 attempts": (updates_made, 29),
    "10/1 a line": (stops_early, ten_epochs(FallsInALine)),
    "10/1 falls at the end": (stops_early, ten_epochs(FallsAtTheEnd)),
    "10/1 no rate": (stops_early, ten_epochs(HasNoRate)),
    "10/1 learns nothing": (stops_early, ten_epochs(LearnsNothing)),
    "10/1 other batches later": (stops_early, ten_epochs(batch_sampler=ShortFirst())),
    "10/1 two batches a step": (stops_early, ten_epochs(trainer=dict(max_epochs=10, accumulate_grad_batches=2))),
    "10/2 rank times epoch": (two_ranks, shared_by_two(lambda: RankTimesEpoch(44), use_distributed_sampler=False)),
    "10/2 all to both later": (two_ranks, shared_by_two(lambda: AllToBothLater(44), use_distributed_sampler=False)),
    "10/2 rolled": (
        two_ranks,
        shared_by_two(
            lambda: OneOrder(lambda parts, epoch, rank: (parts[epoch:] + parts[:epoch])[rank::2]),
            use_distributed_sampler=False,
        ),
    ),
    "10/2 from the end": (
        two_ranks,
        shared_by_two(
            lambda: OneOrder(lambda parts, epoch, rank: parts[:: -1 if epoch else 1][rank::2]),
            use_distributed_sampler=False,
        ),
    ),
    "10/2 by the hash of a text": (
        two_ranks,
        shared_by_two(
            lambda: OneOrder(
                lambda parts, epoch, rank: sorted(parts, key=lambda part: hash(f"{epoch}, {part}"))[rank::2]
            ),
            use_distributed_sampler=False,
        ),
    ),
    "10/2 ranks exchanged": (
        two_ranks,
        shared_by_two(
            lambda: OneOrder(lambda parts, epoch, rank: parts[(rank + epoch) % 2 :: 2]), use_distributed_sampler=False
        ),
    ),
    "10/3 no rate": (masked_labels, tagger(sum_and_count, rate=0.0, exact=True)),
    "10/3 clipped": (masked_labels, tagger(sum_and_count, exact=True, gradient_clip_val=0.01)),
    "10/3 counts all words": (masked_labels, tagger(lambda s, t: (loss_sum(s, t), torch.tensor(len(t))), exact=True)),
    "10/3 smoothed": (
        masked_labels,
        tagger(lambda s, t: (cross_entropy(s, t, reduction="sum", label_smoothing=0.1), (t != -100).sum()), exact=True),
    ),
}  # fmt: skip


def sorting_the_sides(sides, budget, multiple_of):
    sizes = [budget // side**2 // multiple_of * multiple_of for side in sides]
    sides.sort()
    return sizes


def test_the_sides_are_their_callers():
    with pytest.raises(NotSolved, match="changes `sides`, which is its caller's"):
        batch_sizes.check(sorting_the_sides)


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize(("exercise", "answer"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_of_another_kind_is_refused(exercise, answer):
    with pytest.raises(NotSolved):
        exercise.check(answer)


RIGHT = {
    "06/1 tuples": (shard_by_hand, ((3, 4), (7, 8), (11, 12))),
    "06/1 arrays": (shard_by_hand, np.array_split(np.arange(13), 6)[1::2]),
    "06/1 ranges": (shard_by_hand, [range(3, 5), range(7, 9), range(11, 13)]),
    "06/1 tensors": (shard_by_hand, torch.arange(13).tensor_split(6)[1::2]),
    "06/2 torch's generator, a mixed seed": (repair_a_sampler, TorchsGenerator),
    "06/2 Python's generator": (repair_a_sampler, PythonsGenerator),
    "06/2 one draw for each epoch": (repair_a_sampler, DrawsEpochAfterEpoch),
    "06/2 the seed above the epoch": (repair_a_sampler, SeedAboveTheEpoch),
    "06/2 arrays": (repair_a_sampler, YieldsArrays),
    "06/2 tuples, lazily": (repair_a_sampler, YieldsTuplesLazily),
    "06/2 full batches first": (repair_a_sampler, FillsBatchesFirst),
    "06/3 cycled": (one_order_for_all_ranks, seeded_by(lambda epoch: epoch)),
    "06/3 the number of ranks in the seed": (
        one_order_for_all_ranks,
        lambda batch_sampler, num_replicas, rank, epoch: dealt(
            seeded(batch_sampler, 1000 * epoch + num_replicas), num_replicas, rank
        ),
    ),
    "06/3 by blocks": (one_order_for_all_ranks, by_blocks),
    "06/3 a mixed seed, an array": (one_order_for_all_ranks, with_a_mixed_seed),
    "07/1 by the text": (
        update_together,
        lambda own_loss, reduced_gradient: not any(str(g).strip("-") in ("nan", "inf") for g in reduced_gradient),
    ),
    "07/1 zero times": (update_together, lambda own_loss, reduced_gradient: sum(0 * g for g in reduced_gradient) == 0),
    "07/1 a number": (update_together, lambda own_loss, reduced_gradient: int(np.isfinite(reduced_gradient).all())),
    "07/2 step by step": (
        learning_rates,
        lambda finite, horizon: list(accumulate([1.0] + [-1 / horizon] * sum(finite)))[: sum(finite)],
    ),
    "07/2 float32": (learning_rates, lambda finite, horizon: 1 - np.arange(sum(finite), dtype=np.float32) / horizon),
    "07/2 never below 0": (
        learning_rates,
        lambda finite, horizon: [max(0.0, (horizon - u) / horizon) for u in range(finite.count(True))],
    ),
    "07/3 an array of one": (batches_trained, np.array([11])),
    "07/3 a float": (batches_trained, 11.0),
    "08/1 the budget in multiples": (batch_sizes, sizes(lambda s, b, m: b // m // s**2 * m)),
    "08/1 less what is over": (batch_sizes, sizes(lambda s, b, m: b // s**2 - b // s**2 % m)),
    "08/1 yielded": (
        batch_sizes,
        lambda sides, budget, multiple_of: (budget // (multiple_of * s**2) * multiple_of for s in sides),
    ),
    "08/2 an array": (windows, lambda batch_sizes, effective_batch_size, world_size: (
        effective_batch_size // (np.array(batch_sizes) * world_size))),
    "08/2 fractions": (windows, window(lambda b, e, w: int(Fraction(e, b * w)))),
    "08/3 by bisection": (gain, gain_by(by_bisection)),
    "08/3 as text": (
        gain,
        lambda baseline, resized: float(f"{gain_by(by_bisection, digits=12)(baseline, resized):.4f}"),
    ),
    "09/1 an array": (faults, np.array([3, 6, 8, 9, 13])),
    "09/1 a generator": (faults, (line for line in (13, 3, 9, 6, 8))),
    "09/2 one division": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: sum(
            -(-n // (batch_size * k * ranks)) for n in [samples_left] + [num_samples] * epochs_later
        ),
    ),
    "09/2 counted": (
        steps_after_resume,
        lambda samples_left, num_samples, epochs_later, batch_size, k, ranks: sum(
            len(range(0, n, batch_size * k * ranks)) for n in [samples_left] + [num_samples] * epochs_later
        ),
    ),
    "09/3 a tensor": (updates_made, torch.tensor(27)),
    "10/1 asks the Trainer": (stops_early, ten_epochs(AsksTheTrainer)),
    "10/1 steps alone": (stops_early, ten_epochs(trainer=dict(max_epochs=-1, max_steps=50))),
    "10/2 cuts by hand": (two_ranks, shared_by_two(lambda: Parts(44), use_distributed_sampler=False)),
    "10/2 default flag": (two_ranks, shared_by_two(lambda: ShardedBatchSampler(Neighbours(44)))),
    "10/2 the environment's rank": (
        two_ranks,
        shared_by_two(lambda: RankOfTheEnvironment(44), use_distributed_sampler=False),
    ),
    "10/3 divided before a step": (masked_labels, divided_in("on_before_optimizer_step")),
    "10/3 divided for clipping": (masked_labels, divided_in("configure_gradient_clipping")),
    "10/3 divided after the last backward": (masked_labels, divided_in("on_after_backward")),
    "10/3 divided by hand": (masked_labels, tagger(lambda s, t: loss_sum(s, t) * 4 / 14)),
}  # fmt: skip


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("exercise", "answer"), RIGHT.values(), ids=RIGHT)
def test_a_right_answer_in_another_style_passes(exercise, answer):
    exercise.check(answer)
