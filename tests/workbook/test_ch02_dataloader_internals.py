"""The numbers behind chapter 02's figures and widget, and the datasets that its workers read."""

import itertools
import os
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from workbook import ch02_dataloader_internals as chapter
from workbook.ch02_exercises import padding
from workbook.display import png_bytes
from workbook.exercises import NotSolved

from course_lib.datasets import Integers
from course_lib.pipeline import BatchTrace, simulate_pipeline


def test_a_worker_answers_tasks_in_their_order_until_it_is_told_to_end():
    pipe = chapter.start_worker(Integers(10))
    for task in ([3, 1], [9]):
        pipe.send(task)
    assert [pipe.recv().tolist(), pipe.recv().tolist()] == [[3, 1], [9]]
    pipe.send(None)
    with pytest.raises(EOFError):
        pipe.recv()


def test_sleeping_takes_time_and_computing_takes_cpu_time():
    for dataset, clock in ((chapter.Sleepy([0.05]), time.perf_counter), (chapter.Busy([0.05]), time.process_time)):
        start = clock()
        assert dataset[0] == 0
        assert clock() - start >= 0.05


def test_an_image_has_the_size_of_the_attribute_of_the_tensor_or_of_the_index():
    assert chapter.Resizable(4, 8)[0].shape == (8, 8)
    assert chapter.Resizable(4, torch.tensor(16))[0].shape == (16, 16)
    assert chapter.SizedByIndex(4, 8)[(0, 32)].shape == (32, 32) == chapter.blank_image("sample", 32).shape


def test_draws_by_index_depend_on_epoch_and_index_alone():
    first, second = chapter.Draws(8, "by index"), chapter.Draws(8, "by index")
    assert [first[i] for i in range(8)] == [second[i] for i in reversed(range(8))][::-1]
    second.epoch = 1
    assert first[0] != second[0]


def test_a_batch_sampler_counts_its_iterators_and_what_was_drawn():
    sampler = chapter.CountingBatchSampler(5, 2)
    assert list(sampler) == [[0, 1], [2, 3], [4]] and len(sampler) == 3
    next(iter(sampler))
    assert (sampler.iterators, sampler.drawn) == (2, 1)


@pytest.mark.skipif(not chapter.can_fork(), reason="measures forked workers")
def test_a_list_grows_in_workers_and_an_array_hardly():
    as_list, as_array = (
        sum(chapter.growth_of_workers(kind(200_000))) for kind in (chapter.InList, chapter.InArray)
    )  # fmt: skip
    assert as_list > 2_000_000 > as_array


def test_a_worker_reads_elsewhere():
    assert (torch.cat(list(DataLoader(chapter.ReaderIds(4), num_workers=1))) != os.getpid()).all()


class Cores(Integers):
    def __getitem__(self, index):
        return len(psutil.Process().cpu_affinity())


@pytest.mark.skipif(not chapter.can_keep_on_one_core(), reason="this system has no call for it")
def test_workers_are_kept_on_one_core_and_this_process_is_not():
    before = psutil.Process().cpu_affinity()
    loader = DataLoader(Cores(4), num_workers=2, worker_init_fn=chapter.keep_on_one_core)
    assert [batch.item() for batch in loader] == [1, 1, 1, 1]
    assert psutil.Process().cpu_affinity() == before


# ----------------------------------------------------------------------------------------------------- charts


def test_the_bars_of_an_epoch_without_workers_take_turns():
    found = chapter.bars(simulate_pipeline(0.3, 0.2, 0, batches=2))
    assert [(bar.row, bar.kind, bar.batch) for bar in found] == [
        ("main", "fetch", 0),
        ("main", "fetch", 1),
        ("main", "compute", 0),
    ]
    assert [bar[3:] for bar in found] == [pytest.approx(times) for times in ((0, 0.3), (0.5, 0.8), (0.3, 0.5))]


def test_the_bars_of_workers_lie_behind_the_steps_and_the_main_process_waits():
    found = chapter.bars(simulate_pipeline(0.3, 0.2, 1, batches=3))
    assert {(bar.row, bar.kind) for bar in found} == {("worker 0", "fetch"), ("main", "wait"), ("main", "compute")}
    assert [bar[3:] for bar in found if bar.kind == "wait"] == [
        pytest.approx(times) for times in ((0, 0.3), (0.5, 0.6), (0.8, 0.9))
    ]


def test_times_begin_with_the_first_fetch():
    trace = [BatchTrace(0, 0, 5.0, 5.3, 4.9, 5.4), BatchTrace(1, 0, 5.3, 5.6, 5.5, 5.7)]
    assert [(bar.start, bar.end) for bar in chapter.bars(trace)] == [
        pytest.approx(times) for times in ((0, 0.3), (0, 0.4), (0.3, 0.6), (0.5, 0.7), (0.4, 0.5))
    ]


@pytest.mark.parametrize(("workers", "at_once", "behind"), [(0, 1, 0), (1, 1, 5), (2, 2, 4), (6, 6, 0)])
def test_fetches_are_counted_at_one_time_and_behind_a_step(workers, at_once, behind):
    traces = simulate_pipeline(0.3, 0.2, workers, batches=6)  # those that are fetched first have no step to hide behind
    assert (chapter.fetches_at_once(traces), chapter.fetches_behind_a_step(traces)) == (at_once, behind)


def test_the_figure_draws_the_bars():
    traces = simulate_pipeline(0.3, 0.2, 2, batches=4)
    figure = chapter.figure_of_epochs({"2 workers": traces})
    drawn = {(round(p.get_x()), round(p.get_width())) for p in figure.axes[0].patches if p.get_width()}
    bars = chapter.bars(traces)
    assert drawn == {(round(1000 * b.start), round(1000 * (b.end - b.start))) for b in bars if b.end > b.start}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["main", "worker 0", "worker 1"]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_the_widget_follows_its_controls():
    explorer = chapter.pipeline_explorer()
    assert explorer.set(workers=0).startswith("16.7 batches/s in the long run (the two in turn set the pace)")
    assert "480 ms waiting for 12 batches" in explorer.text
    assert explorer.set(workers=1).startswith("25.0 batches/s in the long run (the workers")
    assert explorer.set(workers=2).startswith("50.0 batches/s in the long run (the step")


def test_a_sweep_measures_each_kind_with_each_number_of_workers():
    rates = chapter.sweep([0, 1], {"slow": chapter.Sleepy([0.01] * 4)}, epochs=1)
    assert list(rates) == ["slow"] and len(rates["slow"]) == 2
    assert 0 < rates["slow"][0] <= 100


def test_the_recorded_sweep_shows_what_the_chapter_says():
    _, workers, rates, cores = chapter.RECORDED
    relative = {
        kind.partition(":")[0]: dict(zip(workers, np.array(by) / by[0], strict=True)) for kind, by in rates.items()
    }
    assert max(relative["light"][number] for number in workers if number) < 0.1
    assert relative["slow"][8] > 6 > cores > relative["heavy"][2] > 1.7
    assert max(relative["heavy"][4], relative["heavy"][8]) < 1.05 * relative["heavy"][2]
    assert max(relative["medium"].values()) < 1.3


def test_the_recorded_epochs_show_what_the_chapter_says():
    in_turn, behind, two_at_a_time = chapter.recorded_epochs().values()
    assert [chapter.fetches_at_once(traces) for traces in (in_turn, behind, two_at_a_time)] == [1, 1, 2]
    assert [chapter.fetches_behind_a_step(traces) for traces in (in_turn, behind, two_at_a_time)] == [0, 4, 3]
    assert all(trace.waited_s > 0.05 for trace in (*in_turn, *behind))
    assert all(trace.waited_s < 0.01 for trace in two_at_a_time[1:])


def test_the_figure_of_the_sweep_draws_speed_relative_to_no_workers():
    figure = chapter.figure_of_sweep([0, 1, 2], {"a": [10.0, 5.0, 20.0]}, cores=2)
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 1], [1, 0.5], [2, 2]]


# -------------------------------------------------------------------------------------------------- exercises


def test_padding_is_what_fills_up_each_batch_to_its_longest():
    assert padding([[0, 1], [2]], lengths=[5, 2, 9]) == 3


def test_an_answer_that_changes_its_samples_does_not_change_the_question():
    def in_place(samples, pad):
        for sample in samples:
            sample.extend([pad] * (max(map(len, samples)) - len(sample)))
        return torch.tensor(samples), torch.tensor([len(sample) for sample in samples])

    for _ in range(2):
        with pytest.raises(NotSolved, match="Each sample got the length of the longest"):
            chapter.pad_collate.check(in_place)


def test_other_right_answers_pass(capsys):
    def by_remainder(lines, info):
        return (line for i, line in enumerate(lines) if info is None or i % info.num_workers == info.id)

    chapter.share.check(by_remainder)

    def chunks(lengths, batch_size, seed, epoch):  # sorts within chunks of a shuffle
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(lengths)).tolist()
        size = 16 * batch_size
        order = list(
            itertools.chain.from_iterable(
                sorted(order[start : start + size], key=lengths.__getitem__) for start in range(0, len(order), size)
            )
        )
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        return [batches[i] for i in rng.permutation(len(batches))]

    chapter.bucket_batches.check(chunks)
    assert capsys.readouterr().out == "share: solved.\nbucket_batches: solved.\n"


@pytest.mark.parametrize("exercise", [chapter.bucket_batches, chapter.prefetched, chapter.share])
@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "no answer yet"), (6, "a function is asked for"), (lambda *_: 1 / 0, "raised ZeroDivisionError")],
)
def test_what_is_no_answer_is_told(exercise, answer, message):
    with pytest.raises(NotSolved, match=message):
        exercise.check(answer)
