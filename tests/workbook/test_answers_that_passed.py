"""Wrong answers to the exercises of chapters 00 to 05 that once passed, and right ones in other styles."""

import collections
import contextlib
import io
import itertools
import random
import statistics
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction
from multiprocessing.pool import ThreadPool
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from workbook import ch01_exercises as ch01
from workbook import ch02_exercises as ch02
from workbook import ch02_prefetch_exercise as fetching
from workbook import ch02_stream_exercises as streams
from workbook import ch03_exercises as ch03
from workbook import ch04_exercises as ch04
from workbook import ch05_exercises as ch05
from workbook.ch00_start_here import first_answer
from workbook.ch03_three_trials import three_trials
from workbook.exercises import NotSolved


def cut(order, size):
    return [order[start : start + size] for start in range(0, len(order), size)]


def batches_that_pop(samples, batch_size, order, drop_last):
    while order:
        batch = [samples[order.pop(0)] for _ in range(min(batch_size, len(order)))]
        if len(batch) == batch_size or not drop_last:
            yield batch


def batches_that_draw(samples, batch_size, order, drop_last):
    random.shuffle([1, 2])
    for part in cut(order, batch_size):
        if len(part) == batch_size or not drop_last:
            yield [samples[i] for i in part]


def batches_in_one_list(samples, batch_size, order, drop_last, out=[]):  # noqa: B006
    out[:] = [[samples[i] for i in part] for part in cut(order, batch_size)]
    if drop_last and out and len(out[-1]) < batch_size:
        out.pop()
    return out


def windows_that_pop(micro_batches, k):
    while micro_batches:
        window = [micro_batches.pop(0) for _ in range(min(k, len(micro_batches)))]
        yield statistics.fmean(itertools.chain(*window))


def joined_to_the_last(micro_batches, k):
    """What is left over goes into the last full window."""
    ends = [*range(k, len(micro_batches) + 1, k)]
    ends = [*ends[:-1], len(micro_batches)] if ends else [len(micro_batches)] * bool(micro_batches)
    windows = [micro_batches[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [statistics.fmean(value for batch in window for value in batch) for window in windows]


def stepping_on_equals(micro_batches, k):
    """Takes a batch for the last one because it holds the same numbers."""
    applied, taken = [], []
    for number, batch in enumerate(micro_batches, start=1):
        taken += batch
        if number % k == 0 or batch == micro_batches[-1]:
            applied.append(statistics.fmean(taken))
            taken = []
    return applied


def windows_by_identity(micro_batches, k):
    taken = []
    for number, batch in enumerate(micro_batches, start=1):
        taken += batch
        if number % k == 0 or batch is micro_batches[-1]:
            yield statistics.fmean(taken)
            taken = []


def in_double(correct, sizes):
    torch.set_default_dtype(torch.float64)
    return torch.tensor([float(count) for count in correct]).sum() / sum(sizes)


def buckets(text, arrange=None):
    """Right where ``text`` is another one for each (seed, epoch), and all batches are shuffled."""

    def answer(lengths, batch_size, seed, epoch):
        rng, order = random.Random(text(seed, epoch)), list(range(len(lengths)))
        rng.shuffle(order)
        order.sort(key=lengths.__getitem__)
        batches = cut(order, batch_size)
        if arrange:
            return arrange(batches, rng)
        rng.shuffle(batches)
        return batches

    return answer


def of_one_number(number):
    return lambda lengths, batch_size, seed, epoch: ch02._buckets(lengths, batch_size, number(seed, epoch))


def of_an_alias(lengths, batch_size, seed, epoch):
    return in_buckets(lengths, batch_size, default_rng(seed << 20 ^ epoch).permutation)


def of_a_sequence(lengths, batch_size, seed, epoch):
    generator = np.random.default_rng(np.random.SeedSequence(seed * 1_000_037 + epoch))
    return in_buckets(lengths, batch_size, generator.permutation)


def of_philox(lengths, batch_size, seed, epoch):
    generator = np.random.Generator(np.random.Philox(seed * 1_000_037 + epoch))
    return in_buckets(lengths, batch_size, generator.permutation)


def of_a_drawn_number(lengths, batch_size, seed, epoch):
    drawn = int(np.random.default_rng(seed).integers(2**31))
    return in_buckets(lengths, batch_size, np.random.default_rng(drawn + epoch).permutation)


def of_torchs_generator(lengths, batch_size, seed, epoch):
    generator = torch.Generator().manual_seed(10**8 * seed + epoch)
    return in_buckets(lengths, batch_size, lambda n: torch.randperm(n, generator=generator))


def in_buckets(lengths, batch_size, permutation):
    order = sorted(permutation(len(lengths)).tolist(), key=lengths.__getitem__)
    batches = cut(order, batch_size)
    return [batches[i] for i in permutation(len(batches))]


def samples_of_the_epoch_alone(lengths, batch_size, seed, epoch):
    batches = ch02._buckets(lengths, batch_size, epoch, shuffle_batches=False)
    return [batches[i] for i in np.random.default_rng([seed, epoch]).permutation(len(batches))]


def in_halves(batches, rng):
    middle = len(batches) // 2
    return [*rng.sample(batches[:middle], middle), *rng.sample(batches[middle:], len(batches) - middle)]


def trying_again(fetch, tasks, ahead):
    tasks = iter(tasks)
    with ThreadPoolExecutor() as pool:
        pending = deque((task, pool.submit(fetch, task)) for task in itertools.islice(tasks, ahead))
        while pending:
            task, oldest = pending.popleft()
            pending.extend((task, pool.submit(fetch, task)) for task in itertools.islice(tasks, 1))
            try:
                result = oldest.result()
            except Exception:
                result = fetch(task)
            del oldest
            yield result


def of_at_most(most):
    def answer(fetch, tasks, ahead):
        for future in fetching._oldest_first(fetch, tasks, min(ahead, most)):
            yield future.result()

    return answer


def ending_at(kind):
    def answer(fetch, tasks, ahead):
        try:
            for future in fetching._oldest_first(fetch, tasks, ahead):
                yield future.result()
        except kind:
            return

    return answer


def waiting_for_10_s(fetch, tasks, ahead):
    for future in fetching._oldest_first(fetch, tasks, ahead):
        if wait([future], timeout=10).done:
            yield future.result()


def getting_within_10_s(fetch, tasks, ahead):
    tasks = iter(tasks)
    with ThreadPool(4) as pool:
        pending = deque(pool.apply_async(fetch, [task]) for task in itertools.islice(tasks, ahead))
        while pending:
            oldest = pending.popleft()
            pending.extend(pool.apply_async(fetch, [task]) for task in itertools.islice(tasks, 1))
            yield oldest.get(10)


class KeptByTheNumber:
    """Keeps its tasks for lists of one length, whatever they hold."""

    def __init__(self):
        self.kept = {}

    def __call__(self, lengths, batch_size, seed, epoch):
        if (key := (len(lengths), batch_size, seed, epoch)) not in self.kept:
            self.kept[key] = ch02._buckets(lengths, batch_size, seed, epoch)
        return self.kept[key]


def trying_again_after(kind):
    def answer(fetch, tasks, ahead):
        def fetch_twice(task):
            try:
                return fetch(task)
            except kind:
                return fetch(task)

        for future in fetching._oldest_first(fetch_twice, tasks, ahead):
            yield future.result()

    return answer


def leaving_out(*kinds):
    def answer(fetch, tasks, ahead):
        for future in fetching._oldest_first(fetch, tasks, ahead):
            with contextlib.suppress(*kinds):
                yield future.result()

    return answer


def lines_that(change):
    return lambda lines, info: change(dealt(lines, info))


def dealt(lines, info):
    return lines if info is None else itertools.islice(lines, info.id, None, info.num_workers)


def list_after_the_first(lines, info):
    if info is None:
        yield from lines
        return
    for line in itertools.islice(lines, info.id, info.id + 1):
        yield line
        yield from list(lines)[info.num_workers - 1 :: info.num_workers]


def validation(loss, worst="number", first="", rounded="loss"):
    code = f"""
def validate(model, batches):
    {first or "pass"}
    losses, worst = [], 0
    for number, batch in enumerate(batches):
        {loss}
        losses.append({rounded})
        if losses[-1] >= max(losses):
            worst = {worst}
    return {{"losses": losses, "worst": worst}}
"""
    names = {"torch": torch}
    exec(code, names)
    return names["validate"]


LOSS = "\n        loss = out.square().mean()"
ITEM = "with torch.no_grad(): loss = model(batch).square().mean().item()"


def horizon_rounded_by_0_99(num_batches, accumulate_grad_batches, epochs):
    return int(num_batches / accumulate_grad_batches + 0.99) * epochs


def from_zero_on(model, batches):
    losses, worst, largest = [], None, 0.0
    for number, batch in enumerate(batches):
        with torch.no_grad():
            losses.append(model(batch).square().mean().item())
        if losses[-1] > largest:
            largest, worst = losses[-1], number
    return {"losses": losses, "worst": worst}


def emptying(model, batches):
    returned = ch03.validate_with(model, batches)
    batches.clear()
    return returned


def at_most_8192(run, limit, usual):
    half = usual // 2
    at_half, at_usual = run(half), run(usual)
    size = min(usual + (limit - at_usual) * (usual - half) // (at_usual - at_half), 8192)
    run(size)
    return size


def asking_the_device(run, limit, usual):
    size = run.__self__.largest()
    run(size)
    return size


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize(
    ("exercise", "answer", "message"),
    [
        (ch01.by_hand, batches_that_pop, "changes `order`, which is its caller's"),
        (ch01.by_hand, batches_in_one_list, "changes a result that it has returned before"),
        (ch01.by_hand, batches_that_draw, "Python's global generator is not as it was"),
        (ch01.padded, ch01._OneBuffer(), "Each batch needs memory of its own"),
        (ch01.padded, lambda words: ch01._padded(words, width=min(12, max(map(len, words)))), "Letters are lost"),
        (ch01.padded, lambda words: ch01._padded(words, width=min(32, max(map(len, words)))), "Letters are lost"),
        (ch01.mean_accuracy, lambda correct, sizes: str(sum(correct) / sum(sizes)), "should be 0.5, got '0.5'"),
        (ch01.mean_accuracy, in_double, "torch's default dtype is torch.float64"),
        (ch02.bucket_batches, buckets(lambda seed, epoch: f"{seed}-{epoch % 100}"), "give one order"),
        (ch02.bucket_batches, buckets(lambda seed, epoch: f"{seed}-{epoch & 63}"), "give one order"),
        (ch02.bucket_batches, buckets(lambda seed, epoch: f"{seed}-{min(epoch, 50)}"), "give one order"),
        (
            ch02.bucket_batches,
            of_one_number(lambda seed, epoch: 1337 * seed + epoch),
            "(1, 0) and (0, 1337) give one order",
        ),
        (
            ch02.bucket_batches,
            of_one_number(lambda seed, epoch: seed + 2**21 * epoch),
            "(0, 1) and (2097152, 0) give one",
        ),
        (ch02.bucket_batches, lambda n, b, seed, epoch: ch02._buckets(n, b, seed % 2**24, epoch), "give one order"),
        (
            ch02.bucket_batches,
            lambda n, *rest: ch02._buckets(np.array(n).astype(np.uint8), *rest),
            "Texts of one length",
        ),
        (ch02.bucket_batches, KeptByTheNumber(), "Texts of one length belong together"),
        (ch02.bucket_batches, buckets(lambda seed, epoch: seed * 10**6 + epoch), "(1, 0) and (0, 1000000) give one"),
        (ch02.bucket_batches, buckets(lambda seed, epoch: int(f"{seed}{epoch:09d}")), "give one order"),
        (ch02.bucket_batches, of_an_alias, "A number made of the two"),
        (ch02.bucket_batches, of_one_number(lambda seed, epoch: 16_777_259 * seed ^ epoch), "A number made of the two"),
        (ch02.bucket_batches, of_torchs_generator, "give one order"),
        (ch02.bucket_batches, of_a_sequence, "A number made of the two"),
        (ch02.bucket_batches, of_philox, "A number made of the two"),
        (ch02.bucket_batches, of_a_drawn_number, "and (0, 0) give one order"),
        (ch02.bucket_batches, samples_of_the_epoch_alone, "seed 1 has the batches of seed 0, in another order"),
        (ch02.bucket_batches, buckets(lambda *pair: str(pair), in_halves), "Permute all batches at once"),
        (fetching.prefetched, trying_again, "whoever swallows it trains on fewer samples"),
        (fetching.prefetched, ending_at(StopIteration), "where `fetch` raises StopIteration"),
        (fetching.prefetched, ending_at(RuntimeError), "whoever swallows it trains on fewer samples"),
        (fetching.prefetched, leaving_out(TypeError, ZeroDivisionError), "whoever swallows it trains on fewer samples"),
        (fetching.prefetched, waiting_for_10_s, "takes longer than 10 s ends the epoch"),
        (fetching.prefetched, getting_within_10_s, "takes longer than 10 s ends the epoch"),
        (fetching.prefetched, of_at_most(16), "120 tasks, 40 ahead: when result 0 came, 17 tasks had been drawn"),
        (fetching.prefetched, of_at_most(8), "30 tasks, 12 ahead: when result 0 came, 9 tasks had been drawn, not 13"),
        (fetching.prefetched, trying_again_after(ConnectionError), "whoever swallows it trains on fewer samples"),
        (fetching.prefetched, leaving_out(FileNotFoundError), "whoever swallows it trains on fewer samples"),
        (fetching.prefetched, leaving_out(TimeoutError), "whoever swallows it trains on fewer samples"),
        (streams.share, lines_that(lambda lines: itertools.islice(lines, 59_999)), "120,000 lines, 2 workers"),
        (streams.share, lines_that(lambda lines: (line for line in lines if line[:1] != "#")), "handed on as it is"),
        (
            streams.share,
            lines_that(lambda lines: (f"{line}".encode("ascii", "ignore").decode() for line in lines)),
            "as it is",
        ),
        (streams.share, lines_that(lambda lines: map(str.strip, lines)), "handed on as it is"),
        (streams.share, lambda lines, info: list(lines) if info is None else dealt(lines, info), "A list holds"),
        (streams.share, list_after_the_first, "gave out line 2 of its own.\nA list holds the whole stream"),
        (ch03.peak_bytes, lambda **case: mock.ANY, "should be 5840, got <ANY>"),
        (
            ch03.kept,
            validation("loss = model.forward(batch).square().mean()", rounded="loss.item()"),
            "one graph outlives its batch",
        ),
        (
            ch03.kept,
            validation(
                "out = batch\n        for layer in model: out = layer.forward(out)" + LOSS, rounded="loss.item()"
            ),
            "one graph outlives its batch",
        ),
        (ch03.kept, ch03._all_at_once, "Take one batch after the other"),
        (ch03.kept, validation(ITEM, rounded="round(loss, 4)"), "`losses` should be [0.088641], got [0.0886]"),
        (ch03.kept, validation(ITEM, rounded="str(loss)"), "`losses` should be [0.088641], got ['0.08"),
        (ch03.kept, validation(ITEM.replace("mean()", "sum()"), rounded="loss / len(batch)"), "`losses` should be ["),
        (
            ch03.kept,
            lambda model, batches: ch03.validate_with(model, batches) | {"number": 0},
            "alone, got dict with the keys ['losses', 'number', 'worst']",
        ),
        (ch03.kept, validation(ITEM, first="torch.set_default_dtype(torch.float64)"), "default dtype is torch.float64"),
        (
            ch03.kept,
            validation(ITEM.replace(".mean()", ".sum()"), first="n = len(batches[0])", rounded="loss / n / 2"),
            "with 2 batches, `losses` should be",
        ),
        (ch03.kept, validation(ITEM, worst="float(number)"), "a number with a point is no index"),
        (ch03.kept, from_zero_on, "`worst` should be 0, the number of the batch with the largest loss; got None"),
        (ch03.kept, emptying, "changes `batches`, which is its caller's"),
        (three_trials, at_most_8192, "the answer 8192 holds 81,920 bytes, and a larger batch fits"),
        (three_trials, asking_the_device, "has no attribute '__self__'"),
        (ch04.applied_gradients, windows_that_pop, "changes `micro_batches`, which is its caller's"),
        (ch04.applied_gradients, windows_by_identity, "should be ["),
        (ch04.applied_gradients, joined_to_the_last, "should be [6.0, 10.0], got [6.8]"),
        (ch04.applied_gradients, stepping_on_equals, "should be ["),
        (ch04.rank_factor, lambda counts, rank: counts[rank] * len(counts) // sum(counts), "should be 2.032"),
        (
            ch04.rank_factor,
            lambda counts, rank: counts[rank] * sum(count > 0 for count in counts) / sum(counts),
            "factor(counts=[5, 0, 10, 5], rank=2) should be 2.0, got 1.5",
        ),
        (ch05.steps_per_epoch, lambda **case: mock.ANY, "should be 2, got <ANY>"),
        (ch05.schedule_horizon, horizon_rounded_by_0_99, "accumulate_grad_batches=1000000"),
    ],
)
def test_what_passed_is_refused(exercise, answer, message):
    with pytest.raises(NotSolved) as caught:
        exercise.check(answer)
    assert message in str(caught.value)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("exercise", "answer", "message"),
    [
        (streams.share, streams._by_next, "raises StopIteration, which inside of a generator becomes a RuntimeError"),
        (streams.share, lambda lines, info: [next(lines) for _ in range(99)], "`next(lines)` raises StopIteration"),
        (streams.share, streams._by_rows, "for some of these none is left"),
        (ch03.kept, ch03._sorted_losses, "keep that of the batches"),
        (ch01.padded, lambda words: ch01._padded(words)[::-1], "The mask comes first"),
        (
            ch05.schedule_horizon,
            lambda num_batches, accumulate_grad_batches, epochs: (num_batches // accumulate_grad_batches + 1) * epochs,
            "adds one window to the full ones",
        ),
    ],
)
def test_what_was_refused_without_a_reason_has_one(exercise, answer, message):
    with pytest.raises(NotSolved) as caught:
        exercise.check(answer)
    assert message in str(caught.value)


def spawned(lengths, batch_size, seed, epoch):
    rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(epoch + 1)[epoch])
    order = sorted(rng.permutation(len(lengths)).tolist(), key=lengths.__getitem__)
    batches = cut(order, batch_size)
    return [batches[i] for i in rng.permutation(len(batches))]


def a_bucket_for_each_length(lengths, batch_size, seed, epoch):
    rng, groups, order = random.Random(f"{seed}-{epoch}"), collections.defaultdict(list), list(range(len(lengths)))
    rng.shuffle(order)
    for index in order:
        groups[lengths[index]].append(index)
    batches = [batch for group in groups.values() for batch in cut(group, batch_size)]
    rng.shuffle(batches)
    return batches


def numbers_with_noise(lengths, batch_size, seed, epoch):
    generator = torch.Generator().manual_seed(hash((seed, epoch)) % 2**63)
    noise = 0.9 * torch.rand(len(lengths), generator=generator)
    order = (torch.tensor(lengths, dtype=torch.float) + noise).argsort()
    batches = cut(order, batch_size)
    return (batches[i] for i in torch.randperm(len(batches), generator=generator))


def plain_islice(samples, batch_size, order, drop_last):
    indices = iter(order)
    while batch := [samples[i] for i in itertools.islice(indices, batch_size)]:
        if drop_last and len(batch) < batch_size:
            return
        yield batch


def through_a_mask(words):
    lengths = torch.tensor([len(word) for word in words])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    letters = torch.zeros(mask.shape, dtype=torch.long)
    letters[mask] = torch.tensor([ord(letter) - 96 for letter in "".join(words)])
    return letters, mask


def in_rows(lines, info):
    workers, own = (info.num_workers, info.id) if info else (1, 0)
    while row := list(itertools.islice(lines, workers)):
        yield from row[own : own + 1]


def by_torchs_sampler(num_samples, batch_size, accumulate_grad_batches, world_size, drop_last):
    sampler = DistributedSampler(range(num_samples), world_size, 0)
    batches = len(DataLoader(range(num_samples), batch_size, sampler=sampler, drop_last=drop_last))
    return np.ceil(batches / accumulate_grad_batches)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (first_answer, Fraction(80, 2)),
        (first_answer, torch.tensor([[40]])),
        (ch01.by_hand, plain_islice),
        (
            ch01.by_hand,
            lambda samples, batch_size, order, drop_last: [
                [samples[i] for i in batch] for batch in BatchSampler(order, batch_size, drop_last)
            ],
        ),
        (ch01.padded, through_a_mask),
        (ch01.mean_accuracy, lambda correct, sizes: np.average(np.divide(correct, sizes), weights=sizes)),
        (ch02.bucket_batches, spawned),
        (ch02.bucket_batches, a_bucket_for_each_length),
        (ch02.bucket_batches, numbers_with_noise),
        (ch02.bucket_batches, buckets(lambda *pair: str(pair))),
        (ch02.bucket_batches, of_one_number(lambda seed, epoch: (seed << 32) + epoch)),
        (ch02.bucket_batches, of_one_number(lambda seed, epoch: int(f"{seed}{epoch:010d}"))),
        (streams.share, in_rows),
        (ch03.kept, torch.inference_mode()(validation("loss = model(batch).square().mean().tolist()"))),
        (ch03.kept, validation("loss = model.forward(batch).square().mean().item()")),
        (ch04.rank_factor, lambda counts, rank: counts[rank] / np.mean(counts)),
        (ch04.logged_loss, lambda losses, tokens, k: statistics.fmean(losses, weights=tokens)),
        (ch05.steps_per_epoch, by_torchs_sampler),
    ],
)
def test_right_answers_in_other_styles_pass(exercise, answer):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exercise.check(answer)
    assert "solved" in printed.getvalue()
