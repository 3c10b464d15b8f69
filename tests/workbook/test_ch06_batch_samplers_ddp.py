"""The numbers behind chapter 06's figures and widget, what its helpers count, and what its exercises say."""

import itertools
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler
from workbook import ch06_batch_samplers_ddp as chapter
from workbook import ch06_exercises as exercises
from workbook.ch06_two_ranks import as_asked, fit, missing_and_twice, stream_of, summary
from workbook.display import png_bytes
from workbook.exercises import NotSolved


def test_streams_are_told_by_their_indices():
    assert [stream_of(i) for i in (0, 19, 20, 99, 100)] == [
        "primary", "primary", "neither", "neither", "secondary",
    ]  # fmt: skip
    assert as_asked([[100, 0, 19, 107], [0, 1, 2, 100], [0, 1, 50, 100], [0, 1, 100]]) == 1


def test_the_figure_of_batches_shows_the_first_ones_and_names_the_streams_that_are_there():
    batches = [[0, 1, 100, 101]] * 9
    figure = chapter.figure_of_batches({"one": batches, "two": [[2, 50, 3, 107]]}, title="Mixed", most=3)
    assert png_bytes(figure).startswith(b"\x89PNG")
    assert [len(axes.texts) for axes in figure.axes] == [12, 4]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "primary, 0–19", "secondary, 100–107", "of neither, 20–99",
    ]  # fmt: skip


@pytest.mark.parametrize(("samples", "batch_size", "ranks"), [(10, 2, 2), (13, 3, 2), (7, 1, 1), (24, 5, 4)])
def test_the_figure_deals_as_the_ladders_sampler_does(samples, batch_size, ranks):
    steps = -(-samples // (batch_size * ranks))
    parts = np.array_split(np.arange(samples), steps * ranks)
    dealt = chapter.dealt(0, samples, batch_size, ranks)
    assert [list(range(part.begin, part.end)) for part in dealt] == [part.tolist() for part in parts]
    assert [(part.step, part.rank) for part in dealt] == [divmod(number, ranks) for number in range(len(parts))]


def test_a_resumed_row_begins_at_the_position_and_covers_the_rest():
    whole, resumed = chapter.dealt_and_resumed(10, 2, 2, stop=1, ranks_after=3)
    assert resumed[:2] == whole[:2]
    assert [tuple(part) for part in resumed[2:]] == [(4, 6, 0, 1), (6, 8, 1, 1), (8, 10, 2, 1)]
    assert chapter.dealt_and_resumed(10, 2, 2, stop=3, ranks_after=3) == [whole, whole]
    with pytest.raises(ValueError, match="2 samples would leave one of 3 ranks with an empty batch"):
        chapter.dealt_and_resumed(10, 2, 2, stop=2, ranks_after=3)


@pytest.mark.thorough
def test_the_widget_begins_with_the_stored_picture_and_follows_its_controls():
    explorer = chapter.dealing_explorer()
    assert explorer._image.value == png_bytes(chapter.figure_of_dealing(10, 2, 2, 0, 1, 3))
    assert explorer.text == ("rank 0: [4, 6] [3, 5]\nrank 1: [2, 7] [9, 0]\nrank 2: [8, 1]\n2 steps, batches of 2")
    assert explorer.set(stop=0, ranks_after=2).endswith("3 steps, batches of 1 or 2")
    assert "empty batch" in explorer.set(stop=2, ranks_after=3)
    assert explorer.set(samples=20, epoch=3).startswith("rank 0: [")


def test_what_is_missing_and_what_is_seen_twice():
    ranks = [[[0, 1], [2, 7]], [[2, 3], [7, 7]]]
    assert missing_and_twice(ranks, range(6)) == (2, 1)
    epochs = [[[[0, 1]], [[0, 2]]], [[[2, 3]], [[3, 1]]]]  # by rank, by epoch
    assert summary(epochs, 4) == "missing [0, 0], twice [0, 0], different orders: 2"
    assert summary(["TypeError: no", "TypeError: no"], 4) == "TypeError: no"


@pytest.mark.parametrize("loader_made", ["in train_dataloader", "before fit"])
def test_a_fit_returns_the_batches_of_each_epoch(loader_made):
    batches = partial(BatchSampler, range(5), 2, False)
    assert fit(batches, 5, epochs=2, loader_made=loader_made) == [[[0, 1], [2, 3], [4]]] * 2


# ------------------------------------------------------------------------------------------------------- exercises


class LostArgument(exercises._Dealt):
    def __init__(self, num_samples, batch_size, num_replicas, rank, seed=0, sampler=None):
        super().__init__(num_samples, batch_size, num_replicas, rank, seed)
        self.extra = sampler.num_replicas if sampler else 0  # reads what it was handed, and deals as it should


class EmptyBatches(exercises._Dealt):
    def parts(self):
        return [*super().parts(), *np.split(self.order()[:0], self.num_replicas)]


OTHER_SAMPLERS = {
    "batch 2 is empty": EmptyBatches,
    "a function is asked for": 5,
    "raised": types.SimpleNamespace,
}


@pytest.mark.parametrize(("message", "answer"), OTHER_SAMPLERS.items(), ids=OTHER_SAMPLERS)
def test_other_wrong_samplers_are_told_what_is_wrong(message, answer):
    with pytest.raises(NotSolved, match=message):
        chapter.repair_a_sampler.check(answer)


@pytest.mark.thorough
def test_a_sampler_that_looks_at_the_trainers_and_ignores_it_is_right(capsys):
    chapter.repair_a_sampler.check(LostArgument)
    assert "a Trainer's default flags on two ranks" in capsys.readouterr().out


def seeded(batch_sampler, epoch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        return list(batch_sampler)


def shares_indices_out(batch_sampler, num_replicas, rank, epoch):
    order = [index for batch in seeded(batch_sampler, epoch) for index in batch]
    steps = -(-len(order) // (2 * num_replicas))
    return [part.tolist() for part in np.array_split(order, steps * num_replicas)[rank::num_replicas]]


def puts_the_generator_back_by_hand(batch_sampler, num_replicas, rank, epoch):
    state = torch.get_rng_state()
    torch.manual_seed(epoch)
    batches = list(batch_sampler)
    torch.set_rng_state(state)
    missing = -len(batches) % num_replicas
    return [*batches, *itertools.islice(itertools.cycle(batches), missing)][rank::num_replicas]


def yields_tuples(batch_sampler, num_replicas, rank, epoch):
    batches = np.array(seeded(batch_sampler, epoch), dtype=object)
    for number in range(-(-len(batches) // num_replicas)):
        yield tuple(batches[(rank + number * num_replicas) % len(batches)])


@pytest.mark.thorough
@pytest.mark.parametrize("answer", [puts_the_generator_back_by_hand, yields_tuples])
def test_other_right_wrappers_pass(answer):
    chapter.one_order_for_all_ranks.check(answer)


def takes_the_first_share(batch_sampler, num_replicas, rank, epoch):
    batches = seeded(batch_sampler, epoch)
    return batches[: len(batches) // num_replicas]


def sorts_what_it_gets(batch_sampler, num_replicas, rank, epoch):
    return sorted(batch_sampler)[rank::num_replicas]


OTHER_WRAPPERS = {
    "each rank takes whole batches of the wrapped sampler, none is cut or joined": shares_indices_out,
    "All ranks take the same batches": takes_the_first_share,
    "Each rank shuffles with its own generator": sorts_what_it_gets,
}


@pytest.mark.parametrize(("message", "answer"), OTHER_WRAPPERS.items(), ids=["joined", "first share", "sorted"])
def test_other_wrong_wrappers_are_told_what_is_wrong(message, answer):
    with pytest.raises(NotSolved, match=message):
        chapter.one_order_for_all_ranks.check(answer)
