"""The numbers behind chapter 02's figures and widget, and the datasets that its workers read."""

import functools
import itertools
import json
import math
import os
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.mark.thorough
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


class Clock(Integers):
    def __getitem__(self, index):
        return time.perf_counter()


def start_late(begin, started_s, worker_id):
    if worker_id == 1:
        time.sleep(0.3)
        started_s.value = time.perf_counter()
    begin(worker_id)


@pytest.mark.thorough
def test_workers_that_begin_together_wait_for_the_last_one():
    started_s = torch.multiprocessing.get_context().Value("d", math.inf)
    options = chapter.begin_together(2)
    options["worker_init_fn"] = functools.partial(start_late, options["worker_init_fn"], started_s)
    first, _ = DataLoader(Clock(2), batch_size=None, **options)  # worker 0 reads it
    assert first > started_s.value
    assert chapter.begin_together(0) == {"num_workers": 0}


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


@pytest.mark.thorough
def test_the_widget_follows_its_controls():
    explorer = chapter.pipeline_explorer()
    assert explorer.text == chapter.simulate_epoch(load=60, compute=40, workers=2, prefetch=2, slow=300)[1]
    by_prefetch = [explorer.set(prefetch=prefetch) for prefetch in (1, 2, 4)]
    assert [text.partition(",")[0] for text in by_prefetch] == [
        "last batch after 1040 ms",
        "last batch after 960 ms",
        "last batch after 920 ms",
    ]
    explorer.set(slow=60)
    assert explorer.set(prefetch=1) == explorer.set(prefetch=4)
    for workers, pace in ((0, "10.0"), (1, "16.7"), (2, "25.0"), (3, "25.0")):
        assert explorer.set(workers=workers).endswith(f"{pace} batches per second")


def test_the_figure_of_sizes_draws_each_batch_and_where_epochs_begin():
    curves = {"set": [8, 8, 16, 16], "attribute": [8, 8, 8, 8], "task": [8, 8, 16, 16]}
    (axes,) = chapter.figure_of_sizes(curves, 2, "title").axes
    assert [line.get_ydata().tolist() for line in axes.lines[:3]] == list(curves.values())
    assert [line.get_xdata()[0] for line in axes.lines[3:]] == [1.5]


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
    assert [chapter.fetches_behind_a_step(traces) for traces in (in_turn, behind, two_at_a_time)] == [0, 5, 4]
    assert all(trace.waited_s > 0.01 for trace in (*in_turn, *behind))
    assert all(trace.waited_s < 0.002 for trace in two_at_a_time[1:])


def test_the_figure_of_the_sweep_draws_speed_relative_to_no_workers():
    figure = chapter.figure_of_sweep([0, 1, 2], {"a": [10.0, 5.0, 20.0]}, cores=2)
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 1], [1, 0.5], [2, 2]]


# -------------------------------------------------------------------------------------------------- exercises


def test_padding_is_what_fills_up_each_batch_to_its_longest():
    assert padding([[0, 1], [2]], lengths=[5, 2, 9]) == 3


def shuffled_by(seed_of):
    def buckets(lengths, batch_size, seed, epoch):
        rng = np.random.default_rng(seed_of(seed, epoch))
        order = rng.permutation(len(lengths)).tolist()
        order.sort(key=lengths.__getitem__)
        tasks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        return [tasks[i] for i in rng.permutation(len(tasks))]

    return buckets


def turned(lengths, batch_size, seed, epoch):
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)).tolist()
    order.sort(key=lengths.__getitem__)
    tasks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    k = int(rng.integers(len(tasks))) if tasks else 0
    return tasks[k:] + tasks[:k]


def sorting_its_argument(lengths, batch_size, seed, epoch):
    answer = shuffled_by(lambda *pair: pair)(lengths, batch_size, seed, epoch)
    lengths.sort()
    return answer


def by_torchs_global_generator(lengths, batch_size, seed, epoch):
    torch.manual_seed(1_000_003 * seed + epoch)
    return shuffled_by(lambda *_: torch.randint(2**40, ()).item())(lengths, batch_size, seed, epoch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (shuffled_by(lambda seed, epoch: seed + epoch), "Their sum, or what else treats the two alike"),
        (shuffled_by(lambda seed, epoch: seed ^ epoch), "seed \\^ epoch is 0"),
        (shuffled_by(lambda seed, epoch: seed * epoch), "A product or a power of the two"),
        (shuffled_by(lambda seed, epoch: 31 * seed + epoch), "seed \\* 31 \\+ epoch is one number"),
        (shuffled_by(lambda seed, epoch: 1000 * seed + epoch), "seed \\* 1000 \\+ epoch is one number"),
        (shuffled_by(lambda seed, epoch: (seed << 16) + epoch), "seed \\* 65536 \\+ epoch is one number"),
        (by_torchs_global_generator, "the call changed a global generator"),
        (shuffled_by(lambda seed, epoch: epoch), "The seed belongs in the generator, too"),
        (shuffled_by(lambda seed, epoch: seed), "The epoch belongs in the generator's seed"),
        (shuffled_by(lambda seed, epoch: (seed + 1) * (epoch + 1)), "Their product, also of seed \\+ 1 and epoch"),
        (shuffled_by(lambda seed, epoch: abs(hash(f"{seed}, {epoch}"))), "hash\\(\\) of a text has another value"),
        (shuffled_by(lambda seed, epoch: abs(hash(("run", seed, epoch)))), "hash\\(\\) of a text has another value"),
        (turned, "The batches still follow the lengths"),
        (sorting_its_argument, "changes `lengths`, which is its caller's"),
    ],
)
def test_wrong_ways_to_combine_seed_and_epoch_are_told_apart(answer, message):
    for _ in range(2):
        with pytest.raises(NotSolved, match=message):
            chapter.bucket_batches.check(answer)


def refilled_after_yield(fetch, tasks, ahead):
    tasks = iter(tasks)
    with ThreadPoolExecutor() as pool:
        pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))


def with_threads(number_of, take_first=True):
    def prefetched(fetch, tasks, ahead):
        tasks = iter(tasks)
        with ThreadPoolExecutor(number_of(ahead)) as pool:
            pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
            while pending:
                result = pending.popleft()
                if not take_first:
                    result = result.result()
                pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
                yield result.result() if take_first else result

    return prefetched


def with_next(take, there_is=lambda task: True):
    def prefetched(fetch, tasks, ahead):
        tasks = iter(tasks)
        with ThreadPoolExecutor() as pool:
            pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
            while pending:
                oldest = pending.popleft()
                if there_is(task := take(tasks)):
                    pending.append(pool.submit(fetch, task))
                yield oldest.result()

    return prefetched


def keeping_all(fetch, tasks, ahead):
    tasks, given = iter(tasks), 0
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(fetch, task) for task in itertools.islice(tasks, ahead)]
        while given < len(futures):
            futures += [pool.submit(fetch, task) for task in itertools.islice(tasks, 1)]
            yield futures[given].result()
            given += 1


def forgiving(skip):
    def prefetched(fetch, tasks, ahead):
        tasks = iter(tasks)
        with ThreadPoolExecutor() as pool:
            pending = deque(pool.submit(fetch, task) for task in itertools.islice(tasks, ahead))
            while pending:
                oldest = pending.popleft()
                pending.extend(pool.submit(fetch, task) for task in itertools.islice(tasks, 1))
                try:
                    result = oldest.result()
                except Exception:
                    if skip:
                        continue
                    result = None
                yield result

    return prefetched


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refilled_after_yield, "Submit before you yield"),
        (with_threads(lambda ahead: 1), "One thread fetches one task at a time"),
        (with_next(lambda tasks: next(tasks)), "islice\\(tasks, 1\\)` gives one task, or none"),
        (with_next(lambda tasks: next(tasks, None), lambda task: task), "Ask whether there is a task, not whether"),
        (with_next(lambda tasks: next(tasks, None), lambda task: task is not None), "Ask whether there is a task"),
        (keeping_all, "A list that keeps all futures keeps all their results"),
        (forgiving(skip=True), "whoever swallows it trains on fewer samples"),
        (forgiving(skip=False), "whoever swallows it trains on fewer samples"),
        (lambda fetch, tasks, ahead: map(fetch, tasks), "the thread that asks fetches"),
        (lambda fetch, tasks, ahead: [fetch(task) for task in tasks], "the thread that asks fetches"),
    ],
)
def test_wrong_ways_to_prefetch_are_told_apart(answer, message):
    with pytest.raises(NotSolved, match=message):
        chapter.prefetched.check(answer)


def dealt(lines, info):
    return lines if info is None else itertools.islice(lines, info.id, None, info.num_workers)


def without_blank_lines(lines, info):
    return dealt((line for line in lines if line is not None and str(line).strip()), info)


def stripping(lines, info):
    return (line.strip() if isinstance(line, str) else line for line in dealt(lines, info))


def by_hash(lines, info):
    return lines if info is None else (line for line in lines if hash(line) % info.num_workers == info.id)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (by_hash, "the content decides here"),
        (lambda lines, info: list(lines) if info is None else list(lines)[info.id :: info.num_workers], "A list holds"),
        (lambda lines, info: lines if info is None else lines[info.id :: info.num_workers], "islice does the same"),
        (lambda lines, info: itertools.islice(lines, info.id, None, info.num_workers), "`info` is None, and one"),
        (lambda lines, info: None, "`return` what this worker reads"),
        (without_blank_lines, "blank ones count, and nothing is stripped"),
        (stripping, "blank ones count, and nothing is stripped"),
        (lambda lines, info: lines if info is None else [*lines][: len(lines)], "Nobody knows how many"),
    ],
)
def test_wrong_ways_to_share_are_told_apart(answer, message):
    with pytest.raises(NotSolved, match=message):
        chapter.share.check(answer)


@pytest.mark.thorough
def test_other_right_answers_pass(capsys):
    def by_remainder(lines, info):
        return (line for i, line in enumerate(lines) if info is None or i % info.num_workers == info.id)

    chapter.share.check(by_remainder)
    chapter.prefetched.check(with_threads(lambda ahead: ahead))
    chapter.prefetched.check(with_threads(lambda ahead: ahead + 1, take_first=False))
    chapter.bucket_batches.check(shuffled_by(lambda seed, epoch: [epoch, seed]))

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
    assert capsys.readouterr().out.count("solved.") == 5


def test_the_dataset_for_readers_projects_draws_by_epoch_and_index():
    notebook = Path(chapter.__file__).parents[1] / "02_dataloader_internals.ipynb"
    (cell,) = [c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["id"] == "project-reading"]
    code = re.search(r"```python\n(.*?)```", "".join(cell["source"]), re.DOTALL).group(1)
    names = {"__name__": "__main__"}
    exec(code.replace("num_workers=2, persistent_workers=True", "num_workers=0"), names)
    assert int(names["dataset"].epoch) == 2
    first = [names["dataset"][i] for i in range(4)]
    names["dataset"].epoch.fill_(0)
    assert len({*first, *(names["dataset"][i] for i in range(4))}) == 8


@pytest.mark.parametrize("exercise", [chapter.bucket_batches, chapter.prefetched, chapter.share])
@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "no answer yet"), (6, "a function is asked for"), (lambda *_: 1 / 0, "raised ZeroDivisionError")],
)
def test_what_is_no_answer_is_told(exercise, answer, message):
    with pytest.raises(NotSolved, match=message):
        exercise.check(answer)
