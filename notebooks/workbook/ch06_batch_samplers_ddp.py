"""What chapter 06 shows and asks: who sees which index, as a heatmap and a widget; and the exercises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, RandomSampler

from course_lib.conformance import check_batch_sampler
from course_lib.samplers import ShuffledBatchSampler, TwoStreamBatchSampler
from workbook.display import ORANGE, SKY, VERMILION, new_figure
from workbook.exercises import Exercise, PropertyExercise
from workbook.widgets import Explorer, int_slider

Batches = Sequence[Sequence[int]]


def use_counts(ranks: Sequence[Batches], indices: Sequence[int]) -> NDArray[np.int64]:
    """The numbers behind :func:`figure_of_uses`: one row a rank, and one for all; how often each index was used."""
    rows = [[Counter(i for batch in batches for i in batch)[index] for index in indices] for batches in ranks]
    return np.array([*rows, np.sum(rows, axis=0)])


def figure_of_uses(panels: dict[str, tuple[Sequence[Batches], Sequence[int]]]) -> Figure:
    """Who used which index, one heatmap a panel: a row a rank, and one for all ranks together.

    Blue is once, orange more often, red never; the number is how often.
    """
    most_ranks = max(len(ranks) for ranks, _ in panels.values())
    figure, axes = new_figure(6.2 * len(panels), 1.4 + 0.42 * (most_ranks + 1), columns=len(panels))
    for ax, (title, (ranks, indices)) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        _draw_uses(ax, ranks, indices, title=title)
    return figure


def _draw_uses(axes: Axes, ranks: Sequence[Batches], indices: Sequence[int], *, title: str) -> None:
    counts = use_counts(ranks, indices)
    shown = counts.copy()
    shown[:-1][shown[:-1] == 0] = -1  # that one rank does not see an index is no fault; that none does, is
    colours = ListedColormap(["white", VERMILION, SKY, ORANGE])
    axes.imshow(shown, cmap=colours, norm=BoundaryNorm([-1.5, -0.5, 0.5, 1.5, 99], 4), aspect="auto")
    for (row, column), count in np.ndenumerate(counts):
        if count != 1 and (count or row == len(ranks)):
            axes.text(column, row, str(count), ha="center", va="center", fontsize=8)
    ticks = range(0, len(indices), max(1, len(indices) // 14))
    axes.spines[:].set_visible(True)  # the frame of white cells
    axes.set(title=title, xlabel="index in the dataset")
    axes.set_xticks(ticks, [str(indices[tick]) for tick in ticks], fontsize=8)
    axes.set_yticks(range(len(ranks) + 1), [*(f"rank {rank}" for rank in range(len(ranks))), "all"])


def two_stream_explorer() -> Explorer:
    """Primary, secondary, sizes, ranks, tail → which rank sees what."""

    def render(primary: int, secondary: int, ranks: int, tail: Any, **sizes: int) -> tuple[Figure, str]:
        streams = range(primary), range(100, 100 + secondary)
        batches, lines = [], []
        for rank in range(ranks):
            sampler = TwoStreamBatchSampler(*streams, *sizes.values(), tail=tail, num_replicas=ranks, rank=rank)
            batches.append(list(sampler))
            lines.append(f"rank {rank}: " + " ".join(str(batch) for batch in batches[rank]))
        counts = use_counts(batches, streams[0])[-1]
        lines.append(f"primary: never {int((counts == 0).sum())}, more than once {int((counts > 1).sum())}")
        figure = figure_of_uses({f"{ranks} ranks, tail={tail!r}": (batches, [*streams[0], *streams[1]])})
        return figure, "\n".join(lines)

    controls = {
        "primary": int_slider(13, 30, "primary"),
        "secondary": int_slider(5, 20, "secondary"),
        "sizes": int_slider(2, 6, "primary per batch"),
        "secondary_size": int_slider(1, 6, "secondary per batch"),
        "ranks": int_slider(2, 4, "ranks"),
        "tail": ipywidgets.Dropdown(options=["spread", "drop", "pad"], value="spread", description="tail"),
    }
    return Explorer(controls, render, title="primary, secondary, sizes, ranks, tail → who sees what")


shard_by_hand = Exercise(
    "shard by hand",
    solution=list(ShuffledBatchSampler(10, 2, shuffle=False, num_replicas=2, rank=1)),
    misconceptions={
        "Rank 1 has the second half here. Deal step by step: a step's indices are neighbours, shared by the ranks.": (
            [[5, 6], [7, 8], [9]]
        ),
        "This is DistributedSampler's dealing, every second index to rank 1: here each rank takes neighbours.": (
            [[1, 3], [5, 7], [9]]
        ),
        "8 and 9 are left out: that is tail='drop'. Under 'spread' the ten are shared out over three steps.": (
            [[2, 3], [6, 7]]
        ),
        "The steps here have 4, 4 and 2 indices. 'spread' makes them differ by at most one: 4, 3 and 3.": (
            [[2, 3], [6, 7], [9]]
        ),
        "0 and 1 come again at the end: that is tail='pad'. Under 'spread' nothing is repeated.": (
            [[2, 3], [6, 7], [0, 1]]
        ),
    },
)


class _Dealt:
    """A right sampler of few lines, and what the faults below are made of."""

    def __init__(self, num_samples: int, batch_size: int, num_replicas: int, rank: int, seed: int = 0) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.num_replicas, self.rank, self.seed, self.epoch = num_replicas, rank, seed, 0

    @property
    def sampler(self) -> _Dealt:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(np.random.SeedSequence([self.seed, self.epoch])).permutation(self.num_samples)

    def __len__(self) -> int:
        return -(-self.num_samples // (self.batch_size * self.num_replicas))

    def __iter__(self) -> Iterator[list[int]]:
        parts = np.array_split(self.order(), len(self) * self.num_replicas)
        return iter([part.tolist() for part in parts[self.rank :: self.num_replicas]])


class _DrawsGlobally(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return torch.randperm(self.num_samples).numpy()


class _AddsEpochToSeed(_Dealt):
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed + self.epoch).permutation(self.num_samples)


class _LosesTail(_Dealt):
    def __len__(self) -> int:
        return self.num_samples // (self.batch_size * self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        full = self.order()[: len(self) * self.num_replicas * self.batch_size].reshape(-1, self.batch_size)
        return iter(full[self.rank :: self.num_replicas].tolist())


class _IgnoresEpoch(_Dealt):
    def set_epoch(self, epoch: int) -> None:
        pass


def _fault_of_sampler(make: Any) -> str | None:
    """The first rule that the kit finds broken; ``make`` is the reader's class."""

    def factory(num_replicas: int, rank: int, n: int, seed: int = 0) -> Any:
        return make(n, 3, num_replicas, rank, seed=seed)

    shapes = [{"n": n} for n in (6, 12, 14, 25)]
    report = check_batch_sampler(factory, lambda shape: range(shape["n"]), shapes=shapes, world_sizes=(1, 2, 3))
    if not report.ok:
        rules = ", ".join(str(violation.rule) for violation in report.violations)
        return f"broken: {rules}. First:\n{report.violations[0]}"
    print(f"{sum(report.checks.values()):,} checks of the kit passed.")
    return None


repair_a_sampler = PropertyExercise(
    "repair a sampler",
    _fault_of_sampler,
    {
        "broken: 1. First:": _LosesTail,
        "broken: 4": _DrawsGlobally,
        "broken: 5. First:": _AddsEpochToSeed,
        "broken: 6. First:": _IgnoresEpoch,
    },
)


def _lost_and_repeated(shard: Callable[..., Any], num_samples: int, num_replicas: int) -> tuple[int, int]:
    """How many indices no rank sees, and how many are seen again, in an epoch that each rank shards for itself."""
    seen: Counter[int] = Counter()
    for rank in range(num_replicas):
        torch.manual_seed(1000 + rank)  # what a launcher that seeds each rank by its number does
        batch_sampler = BatchSampler(RandomSampler(range(num_samples)), 2, drop_last=False)
        for batch in shard(batch_sampler, num_replicas, rank, epoch=0):
            seen.update(int(index) for index in batch)
    return num_samples - len(seen), sum(seen.values()) - len(seen)


def _shard_in_turn(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return list(batch_sampler)[rank::num_replicas]


def _shard_by_a_fixed_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    torch.manual_seed(0)
    return _shard_in_turn(batch_sampler, num_replicas, rank, epoch)


def _fault_of_shard(shard: Any) -> str | None:
    """What is wrong unless the ranks together see every index once, and another epoch has another order."""
    for num_samples, num_replicas in ((8, 2), (20, 2), (24, 3)):
        lost, again = _lost_and_repeated(shard, num_samples, num_replicas)
        if lost or again:
            return (
                f"of {num_samples} indices on {num_replicas} ranks, {lost} are lost and {again} come again.\n"
                "Each rank shuffles with its own generator, so they cut different orders: give all ranks one order."
            )
    orders = []
    for epoch in range(3):
        batch_sampler = BatchSampler(RandomSampler(range(30)), 2, drop_last=False)
        orders.append([int(index) for batch in shard(batch_sampler, 1, 0, epoch=epoch) for index in batch])
    if orders[0] == orders[1] == orders[2]:
        return "nothing lost, and one order for ever: the epoch belongs into the seed."
    return None


one_order_for_all_ranks = PropertyExercise(
    "shard",
    _fault_of_shard,
    {
        "Each rank shuffles with its own generator": _shard_in_turn,
        "one order for ever: the epoch belongs into the seed": _shard_by_a_fixed_seed,
    },
)

EXERCISES = (shard_by_hand, repair_a_sampler, one_order_for_all_ranks)
