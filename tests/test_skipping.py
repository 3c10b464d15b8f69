"""StepGuard on two real ranks, held against loops that never saw the bad windows."""

import copy
import errno
import json
import math
import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from course_lib.accumulation import accumulate
from course_lib.launch import RankError, run_ranks
from course_lib.schedules import ScheduledBatchSampler, SizeSchedule
from course_lib.skipping import StepGuard, TooManySkips, read_journal, summarize, vote
from course_lib.skipping.__main__ import main
from course_lib.skipping.detector import SpikeDetector
from course_lib.skipping.gradients import gradient_norm
from course_lib.skipping.journal import Journal
from course_lib.skipping.nan_signal import NanSignal
from course_lib.skipping.skips import Skip
from tests import effort

NAN, INF = math.nan, math.inf
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
FAULTS = ("NaN input", "infinite loss", "NaN gradient", "spike", "reject", "all ignored", "empty mask")


def make_model(batch_norm=True):
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(6)] if batch_norm else []
    return nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 1))


def make_batch(*key):
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(5, 4, generator=generator)


def loss_of(model, x, fault=None):
    """A loss of about 1; with a fault, what goes wrong in it."""
    if fault == "NaN input":
        x = x.clone()
        x[2, 1] = NAN
    y = model(x)
    errors = (y - x.sum(dim=1, keepdim=True)).square()
    loss = errors.mean()
    if fault == "all ignored":  # the loss is NaN, and its gradients are 0
        return nn.functional.cross_entropy(y, torch.full((len(y),), -100))
    if fault == "empty mask":  # the same
        return errors[torch.zeros_like(errors, dtype=torch.bool)].mean()
    if fault == "infinite loss":
        return loss + INF  # its gradients are finite
    return loss * 1e6 if fault == "spike" else loss


def flat(state):
    """All tensors and numbers of a nested state, by path: equal flats are equal bit for bit."""
    if isinstance(state, dict):
        return {f"{key}/{path}": leaf for key, value in state.items() for path, leaf in flat(value).items()}
    if isinstance(state, list | tuple):
        return flat(dict(enumerate(state)))
    if isinstance(state, torch.Tensor):
        return {"": (str(state.dtype), tuple(state.shape), state.contiguous().reshape(-1).view(torch.uint8).tolist())}
    return {"": state}


def state_of(*parts):
    return flat([part.state_dict() for part in parts])


# ------------------------------------------------------------------------------------------ bit for bit


def random_case(rng):
    number_of_windows = 12
    bad = {}
    for window in rng.sample(range(number_of_windows), rng.randint(1, 5)):
        # A spike is told from three windows that were not skipped; five of them may be.
        fault = rng.choice(FAULTS if window > 7 else [fault for fault in FAULTS if fault != "spike"])
        bad[window] = (rng.choice([(0,), (1,), (0, 1)]), fault)
    optimizer = rng.choice(list(OPTIMIZERS))
    return {
        "optimizer": optimizer,
        "batch_norm": rng.random() < 0.6,
        "k": rng.randint(1, 3),
        "by_found_inf": "fused" in optimizer and rng.random() < 0.5,
        "number_of_windows": number_of_windows,
        "bad": bad,
    }


def leave_to_the_device(guard):
    """Let it decide on a CPU as on a GPU, where the host would have to wait."""
    guard._host_would_wait = lambda gradients: True


def train(rank, case, guarded):
    """The final state; unguarded, of a run whose loader never had the bad windows."""
    model = DistributedDataParallel(make_model(case["batch_norm"]))
    optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    schedule = LambdaLR(optimizer, lambda n: 1 / (n + 1))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averages = [] if case["by_found_inf"] else [average]
    guard = None
    if guarded:
        guard = StepGuard(
            model, optimizer, scheduler=schedule, averages=averages, spike_factor=50, min_history=3
        )  # fmt: skip
        if case["by_found_inf"]:
            leave_to_the_device(guard)
    outcomes = []
    for window in range(case["number_of_windows"]):
        ranks, fault = case["bad"].get(window, ((), None))
        if fault and not guarded:
            continue
        optimizer.zero_grad()
        faulty = window % case["k"]
        for position in range(case["k"]):
            mine = fault if rank in ranks and position == faulty else None
            batch = make_batch(rank, window, position)
            with model.no_sync() if position < case["k"] - 1 else warnings.catch_warnings():
                loss = loss_of(model, batch, mine) / case["k"]
                if mine == "reject":
                    guard.reject("no label")
                weight = model.module[-1].weight
                hook = weight.register_hook(lambda g: g * NAN) if mine == "NaN gradient" else None
                guard.backward(loss) if guarded else loss.backward()
                if hook:
                    hook.remove()
        if guarded:
            outcomes.append(guard.step(batch_indices=window))
        else:
            optimizer.step()
            schedule.step()
            for average in averages:
                average.update_parameters(model)
    if guarded:
        guard.flush()
        assert [bool(outcome) for outcome in outcomes] == [w not in case["bad"] for w in range(len(outcomes))], case
        assert (guard.attempts, guard.skipped) == (case["number_of_windows"], len(case["bad"]))
        assert guard.updates == schedule.last_epoch
    return state_of(model, optimizer, schedule, average), state_of(optimizer, *model.module[::2])


def test_a_guarded_run_ends_where_one_ends_that_never_saw_the_bad_windows():
    def compare(rank, cases):
        alike = []
        for case in cases:
            ours, theirs = train(rank, case, guarded=True), train(rank, case, guarded=False)
            assert ours[0] == theirs[0], (case, [key for key in ours[0] if ours[0][key] != theirs[0].get(key)])
            alike.append(ours[1])
        return alike

    rng = random.Random("guarded")
    cases = [random_case(rng) for _ in range(80)]
    seen = {(case["optimizer"], fault) for case in cases for _, fault in case["bad"].values()}
    assert len(seen) == len(OPTIMIZERS) * len(FAULTS)  # each fault met each optimizer
    cases = cases[: effort.cases(10, 80)]
    first, second = (result.value for result in run_ranks(compare, args=(cases,), timeout=120))
    # Not the buffers: those differ between ranks until the next window's broadcast, in a plain run as well.
    assert first == second


@pytest.mark.thorough
def test_the_bit_for_bit_comparison_sees_a_window_that_left_a_trace():
    case = {"optimizer": "adam", "batch_norm": True, "k": 1, "number_of_windows": 6, "by_found_inf": False}
    case["bad"] = {3: ((0,), "NaN gradient")}

    def with_a_leak(rank, leak):
        if leak == "buffers":
            from course_lib.skipping.buffers import BufferSnapshot

            BufferSnapshot.put_back = lambda self: None
        ours, theirs = train(rank, case, guarded=True)[0], train(rank, case, guarded=False)[0]
        return [key for key in ours if ours[key] != theirs[key]]

    clean, leaky = (run_ranks(with_a_leak, args=(leak,))[0].value for leak in ("", "buffers"))
    assert clean == [] and any("running_mean" in key for key in leaky)


def test_accumulate_takes_the_guards_backward():
    def fit(rank):
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = StepGuard(model, optimizer)
        outcomes = []
        for window in range(4):
            optimizer.zero_grad()
            batches = [make_batch(rank, window, position) for position in range(3)]
            if (rank, window) == (1, 2):
                batches[1][0, 0] = NAN
            accumulate(model, batches, lambda model, x: model(x).square().sum(), len, backward=guard.backward)
            outcomes.append(guard.step())
        return outcomes, bool(torch.stack([p.isfinite().all() for p in model.parameters()]).all())

    assert [result.value for result in run_ranks(fit)] == [([True, True, False, True], True)] * 2


# ------------------------------------------------------------------------------------------ collectives


def test_a_guard_adds_no_collective_and_a_vote_adds_one():
    def count(rank):
        def collectives(guarded, votes=False):
            model = DistributedDataParallel(make_model())
            optimizer = torch.optim.Adam(model.parameters())
            guard = StepGuard(model, optimizer, spike_factor=50, min_history=1) if guarded else None
            before = dist.group.WORLD._get_sequence_number_for_group()
            for window in range(6):
                if votes and vote(rank == 1 and window == 3):
                    guard.skip("no label")
                    continue
                optimizer.zero_grad()
                bad = guarded and rank == 0 and window in (2, 4) and not votes
                loss = loss_of(model, make_batch(rank, window), "NaN input" if bad else None)
                if guarded:
                    guard.backward(loss)
                    guard.step()
                else:
                    loss.backward()
                    optimizer.step()
            skipped = guard.skipped if guarded else 0
            return dist.group.WORLD._get_sequence_number_for_group() - before, skipped

        dist.all_reduce(torch.ones(1))
        return collectives(False), collectives(True), collectives(True, votes=True)

    (plain, _), (guarded, skipped), (voted, skipped_by_vote) = run_ranks(count)[0].value
    assert plain >= 12  # each of the six windows: a broadcast of buffers, a reduction
    assert (guarded, skipped) == (plain, 2)
    assert (voted, skipped_by_vote) == (plain - plain // 6 + 6, 1)


def test_a_vote_is_anybodys():
    def ask(rank):
        return vote(rank == 1), vote(False), vote(True)

    assert [result.value for result in run_ranks(ask)] == [(True, False, True)] * 2
    assert vote(True) is True and vote(False) is False


@pytest.mark.thorough
def test_a_rank_that_does_not_vote_is_an_error_of_the_others():
    def ask(rank):
        if rank == 0:
            return vote(False)
        raise KeyError("no such file")

    with pytest.raises(RankError, match="no such file"):
        run_ranks(ask, timeout=120)


# ------------------------------------------------------------------------------------------ sharded models


def sharded_model():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(state):
    """Nested states, with each sharded tensor's shards put together."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [whole(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


SHARDED_FAULTS = {1: "reject", 3: "NaN input", 4: "all ignored", 8: "spike", 9: "infinite loss"}


def train_sharded(rank, optimizer, guarded):
    """The whole final state; unguarded, of a run whose loader never had the bad windows."""
    model = sharded_model()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    schedule = LambdaLR(optimizer, lambda n: 1 / (n + 1))
    guard = StepGuard(model, optimizer, scheduler=schedule, spike_factor=50, min_history=3) if guarded else None
    outcomes, votes = [], 0
    for window in range(12):
        fault = SHARDED_FAULTS.get(window)
        if fault and not guarded:
            continue
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(rank, window), fault if rank == 1 else None)
        if guarded:
            guard.backward(loss)
            if fault == "reject" and rank == 1:
                guard.reject("after the last backward, too")
            before = dist.group.WORLD._get_sequence_number_for_group()
            outcomes.append(guard.step(batch_indices=window))
            votes += dist.group.WORLD._get_sequence_number_for_group() - before
        else:
            loss.backward()
            optimizer.step()
            schedule.step()
    if guarded:
        assert outcomes == [window not in SHARDED_FAULTS for window in range(12)], outcomes
        assert votes == guard.attempts == 12 and guard.skipped == len(SHARDED_FAULTS)
        assert guard.updates == schedule.last_epoch
    return flat(whole([model.state_dict(), optimizer.state_dict(), schedule.state_dict()]))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
def test_a_sharded_run_ends_where_one_ends_that_never_saw_the_bad_windows(optimizer):
    def compare(rank):
        ours, theirs = (train_sharded(rank, optimizer, guarded) for guarded in (True, False))
        return [key for key in ours if ours[key] != theirs[key]]

    assert [result.value for result in run_ranks(compare, timeout=120)] == [[], []]


def test_a_nan_in_one_shard_alone_is_skipped_on_all_ranks():
    def fit(rank):
        from torch.distributed.fsdp import fully_shard

        layer = fully_shard(nn.Linear(4, 2, bias=False))
        guard = StepGuard(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        first, second = layer(torch.ones(8, 4)).sum(dim=0)
        guard.backward(first + (second * 0).sqrt())  # is finite, and its gradient is not
        return bool(layer.weight.grad.to_local().isfinite().all()), guard.step()

    assert [result.value for result in run_ranks(fit, timeout=120)] == [(True, False), (False, False)]


def test_a_sharded_guard_clips_by_the_norm_over_all_shards():
    def compare(rank):
        model = sharded_model()
        guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.1)
        guard.backward(loss_of(model, make_batch(rank)))
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        assert guard.step()
        clipped = [parameter.grad.full_tensor() for parameter in model.parameters()]
        return gradients, clipped

    for gradients, clipped in (result.value for result in run_ranks(compare, timeout=120)):
        norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
        assert norm > 0.1
        for one, other in zip(clipped, gradients, strict=True):
            torch.testing.assert_close(one, other * 0.1 / norm)


def test_windows_of_a_sharded_model_are_skipped_on_all_ranks(tmp_path):
    def fit(rank):
        model = sharded_model()
        guard = StepGuard(model, torch.optim.AdamW(model.parameters(), lr=0.01), journal=tmp_path / "j.jsonl")
        outcomes = []
        for window in range(4):
            guard.optimizer.zero_grad()
            batches = [make_batch(rank, window, position) for position in range(3)]
            if (rank, window) == (1, 2):
                batches[0][0, 0] = NAN
            accumulate(model, batches, lambda model, x: model(x).square().sum(), len, backward=guard.backward)
            outcomes.append(guard.step())
        return outcomes, flat(whole(model.state_dict()["3.weight"]))

    first, second = (result.value for result in run_ranks(fit, timeout=120))
    assert first == second and first[0] == [True, True, False, True]
    skips, _ = read_journal(tmp_path / "j.jsonl")
    assert [(skip.rank, skip.reason) for skip in skips] == [(0, "non-finite gradient"), (1, "non-finite loss")]


def test_a_scaler_of_a_sharded_model_is_refused():
    def told(rank):
        model = sharded_model()
        with pytest.raises(ValueError, match="scaler must be None where fully_shard has sharded the model"):
            StepGuard(model, torch.optim.SGD(model.parameters()), scaler=torch.amp.GradScaler("cpu"))

    run_ranks(told, timeout=120)


# ------------------------------------------------------------------------------------------ every second bad


def test_every_second_batch_bad_for_200_steps(tmp_path):
    model, journal = make_model(), tmp_path / "run" / "skipped.jsonl"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda n: 1 / (n + 1))
    guard = StepGuard(model, optimizer, scheduler=schedule, journal=journal)
    for index in range(200):
        optimizer.zero_grad()
        guard.backward(loss_of(model, make_batch(index), "NaN input" if index % 2 else None))
        guard.step(epoch=index // 50, batch_indices=index % 50, sample_indices=torch.arange(5) + 5 * index)
    assert (guard.updates, guard.attempts, guard.skipped) == (100, 200, 100)
    assert schedule.get_last_lr() == [1 / 101]
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(lines) == 100
    assert lines[1] == {
        "run": lines[0]["run"], "attempt": 4, "updates": 2, "epoch": 0, "batch_indices": [3],
        "sample_indices": [15, 16, 17, 18, 19], "rank": 0, "reason": "non-finite loss", "caused_here": True,
        "norm": "nan", "norm_limit": None,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ the journal


def test_the_journals_of_two_ranks_name_the_one_that_caused_it(tmp_path):
    def fit(rank, folder):
        model = DistributedDataParallel(make_model())
        guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), journal=Path(folder, "skipped.jsonl"))
        for window in range(6):
            guard.optimizer.zero_grad()
            if (rank, window) == (0, 4):
                guard.reject("no label")
            fault = {(1, 1): "NaN input", (1, 2): "infinite loss", (0, 2): "NaN input"}.get((rank, window))
            guard.backward(loss_of(model, make_batch(rank, window), fault))
            guard.step(batch_indices=window, sample_indices=[7, 8] if rank else [window])
        os._exit(1) if rank else os.kill(os.getpid(), 9)  # no file is closed in order

    with pytest.raises(RankError):
        run_ranks(fit, args=(tmp_path,))
    assert sorted(os.listdir(tmp_path)) == ["skipped.jsonl", "skipped.rank1.jsonl"]
    skips, torn = read_journal(tmp_path / "skipped.jsonl")
    seen = [(skip.attempt, skip.rank, skip.reason, skip.caused_here) for skip in skips]
    assert torn == 0 and seen == [
        (2, 0, "non-finite gradient", None), (2, 1, "non-finite loss", True),
        (3, 0, "non-finite loss", True), (3, 1, "non-finite loss", True),
        (5, 0, "no label", True), (5, 1, "non-finite gradient", None),
    ]  # fmt: skip
    assert len({skip.run for skip in skips}) == 1
    told = subprocess.run(
        [sys.executable, "-m", "course_lib.skipping", tmp_path / "skipped.jsonl"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told == (
        "3 attempts skipped.\n"
        "  1 × non-finite loss, rank 1\n"
        "  1 × non-finite loss, ranks 0, 1\n"
        "  1 × no label, rank 0\n"
        "Samples in more than one skipped window: 7 (2×), 8 (2×).\n"
        "The last:\n"
        "  attempt 2, batch 1, samples 7, 8 on rank 1: non-finite loss, rank 1, norm nan\n"
        "  attempt 3, batch 2, samples 2 on rank 0: non-finite loss, ranks 0, 1, norm nan\n"
        "  attempt 5, batch 4, samples 4 on rank 0: no label, rank 0, norm nan\n"
    )


def skip_one(guard, **place):
    guard.optimizer.zero_grad()
    guard.backward(loss_of(guard.model, make_batch(0), "NaN input"))
    return guard.step(**place)


def make_guard(model=None, make_optimizer=OPTIMIZERS["adam"], **arguments):
    model = make_model() if model is None else model
    return StepGuard(model, make_optimizer(model.parameters()), **arguments)


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path):
    path = tmp_path / "j.jsonl"
    skip_one(make_guard(journal=path))
    path.write_text(path.read_text() + '{"run": "2025-01-01", "att')
    skip_one(make_guard(journal=path))
    skips, torn = read_journal(path)
    assert (len(skips), torn) == (2, 1) and skips[0].run != skips[1].run
    assert summarize(path).splitlines()[0] == "2 attempts skipped in 2 runs."
    assert summarize(path).splitlines()[-1] == "1 line could not be read: cut off by a crash or a full disk."


def test_a_journal_without_skips_and_no_journal(tmp_path, capsys):
    make_guard(journal=tmp_path / "j.jsonl")
    assert summarize(tmp_path / "j.jsonl") == "0 attempts skipped."
    with pytest.raises(SystemExit, match="1"):
        main([str(tmp_path / "none.jsonl")])
    assert capsys.readouterr().err == f"cannot read {tmp_path / 'none.jsonl'}: No such file or directory\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_training_goes_on_with_a_full_disk_and_says_so_once():
    with pytest.warns(UserWarning, match="/dev/full.*training goes on"):
        guard = make_guard(journal="/dev/full")
    assert [skip_one(guard) for _ in range(3)] == [False] * 3  # a second warning would be an error
    assert guard.skipped == 3


def test_training_goes_on_with_a_read_only_disk_and_says_so_once(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.warns(UserWarning, match="Read-only file system.*training goes on"):
        guard = make_guard(journal=tmp_path / "j.jsonl")
    assert [skip_one(guard) for _ in range(2)] == [False] * 2  # a second warning would be an error
    monkeypatch.undo()
    skip_one(guard)  # the disk is back
    assert [skip.attempt for skip in read_journal(tmp_path / "j.jsonl")[0]] == [3]


# ------------------------------------------------------------------------------------------ bad input


def test_what_one_rank_knows_too_late_is_an_error_and_no_silent_update():
    def late(rank):
        model = DistributedDataParallel(make_model())
        guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        guard.backward(loss_of(model, make_batch(rank)))
        if rank == 1:
            guard.reject("late")
        return guard.step()

    with pytest.raises(RankError, match=r"rank 1 found its window bad \(late\), and the reduced gradients"):
        run_ranks(late, timeout=120)
    guard = make_guard()
    guard.backward(loss_of(guard.model, make_batch(0)))
    guard.reject("alone, there is nobody to tell")
    assert guard.step() is False


def test_a_rejection_arrives_where_the_loss_masks_all_gradients():
    def fit(rank):
        model = DistributedDataParallel(nn.Linear(4, 1))
        guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if rank == 1:
            guard.reject("no target")
        nothing = torch.zeros(5, 1, dtype=torch.bool) if rank == 1 else torch.ones(5, 1, dtype=torch.bool)
        guard.backward(model(make_batch(rank))[nothing].sum())
        return guard.step()

    assert [result.value for result in run_ranks(fit)] == [False, False]


def test_sparse_gradients_are_judged_by_what_they_add_up_to():
    embedding = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")
    guard = make_guard(embedding, lambda p: torch.optim.Adagrad(p, lr=0.1), max_consecutive_skips=None)
    before = embedding.weight.detach().clone()
    for factor, expected in ((NAN, False), (1.0, True), (INF, False)):
        guard.optimizer.zero_grad()
        guard.backward((embedding(torch.tensor([[1, 1, 2]])) * factor).sum())
        assert embedding.weight.grad.is_sparse
        assert guard.step() is expected
    changed = (embedding.weight != before).any(dim=1).tolist()
    assert changed == [index in (1, 2) for index in range(10)]
    doubled = torch.sparse_coo_tensor([[1, 1]], [3.0, 4.0], (5,))
    assert gradient_norm([doubled]) == 7.0  # not 5: two entries of one element


def test_sparse_gradients_on_two_ranks():
    def fit(rank):
        model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
        guard = StepGuard(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
        outcomes = []
        for window in range(3):
            guard.optimizer.zero_grad()
            bad = (rank, window) == (1, 1)
            guard.backward((model(torch.tensor([rank, 5])) * (NAN if bad else 1.0)).sum())
            outcomes.append(guard.step())
        return outcomes, model.module.weight.tolist()

    first, second = (result.value for result in run_ranks(fit))
    assert first == second and first[0] == [True, False, True]


def test_parameters_without_gradients_and_an_optimizer_without_state():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    guard = StepGuard(model, torch.optim.Adam(model.parameters()))
    guard.backward(model["used"](torch.full((1, 2), NAN)).sum())
    assert guard.step() is False and not guard.optimizer.state
    guard.optimizer.zero_grad()
    assert guard.step() is False  # no parameter has a gradient: nothing would change
    guard.backward(model["used"](torch.ones(1, 2)).sum())
    assert guard.step() is True
    assert (guard.attempts, guard.updates) == (3, 1)
    assert set(guard.optimizer.state) == set(model["used"].parameters())


def test_buffers_that_a_forward_replaces_are_put_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("cache", None)
            self.register_buffer("positions", torch.zeros(1).expand(3))

        def forward(self, x):
            self.seen = self.seen + 1
            self.cache = x
            return (self.weight * x).sum()

    model = Counts()
    guard = make_guard(model)
    guard.backward(model(torch.ones(1)))
    assert guard.step() and model.seen == 1
    guard.backward(model(torch.tensor([NAN])))
    assert not guard.step() and model.seen == 1 and model.cache == 1


def test_a_validation_between_two_windows_keeps_what_it_changed():
    model = make_model()
    guard = make_guard(model)
    with torch.no_grad():
        model(make_batch(5))  # in training mode, as torch's update_bn does
    after = model[1].running_mean.clone()
    assert skip_one(guard) is False
    assert torch.equal(model[1].running_mean, after)


def test_a_forward_past_the_guards_model_is_an_error():
    model = make_model()
    guard, other = make_guard(model), nn.Sequential(*model)
    guard.backward(loss_of(other, make_batch(0), "NaN input"))
    with pytest.raises(RuntimeError, match=r"guard\.begin\(\)"):
        guard.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spike_factor": 0}, "spike_factor must be a positive number or None, got 0"),
        ({"min_history": 0}, "min_history must be a positive int, got 0"),
        ({"history": 3}, "min_history must be at most history, 3, got 16"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be a positive int, got 0"),
        ({"max_norm": -1.0}, "max_norm must be a positive number or None, got -1.0"),
        ({"make_optimizer": torch.optim.LBFGS}, "must step without a closure, got LBFGS"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_guard(**arguments)


def test_what_is_no_model_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got SGD"):
        StepGuard(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_a_loss_of_many_elements_is_refused():
    with pytest.raises(ValueError, match=r"the loss must be a tensor of one element, got a tensor of shape \(5, 1\)"):
        make_guard().backward(make_model()(make_batch(0)))


# ------------------------------------------------------------------------------------------ spikes


def test_the_detector_is_not_moved_by_what_it_rejected():
    guard = make_guard(spike_factor=10, min_history=5, max_consecutive_skips=None)

    def step(factor):
        guard.optimizer.zero_grad()
        guard.backward(loss_of(guard.model, make_batch(0)) * factor)
        return guard.step()

    assert all(step(1.0) for _ in range(5))
    limit = guard.detector.limit
    assert not any(step(1e4) for _ in range(200))
    assert guard.detector.limit == limit and step(1.0)


def test_the_limit_is_median_plus_mad():
    detector = SpikeDetector(3, history=5, min_history=5)
    for norm in (9.0, 1.0, 2.0, 3.0, 4.0):
        assert detector.limit == INF
        detector.accept(norm)
    assert detector.limit == 3 + 3 * 1.4826 * 1
    for norm in (2.0, 2.0, 2.0):
        detector.accept(norm)
    assert detector.limit == pytest.approx(2 + 3 * 0.1 * 2)  # MAD 0: rounding must not be a spike
    assert SpikeDetector(None).limit == INF


def test_the_norm_is_that_of_one_long_vector():
    gradients = [torch.randn(3, 4), torch.randn(7).double(), torch.randn(5).bfloat16(), torch.tensor(2.0)]
    whole = torch.cat([g.double().reshape(-1) for g in gradients])
    assert gradient_norm(gradients).item() == pytest.approx(whole.norm().item(), rel=1e-6)
    assert gradient_norm([]) == torch.nn.utils.get_total_norm([]) == 0
    assert gradient_norm([torch.full((4,), 200.0, dtype=torch.float16)]).dtype == torch.float32
    assert gradient_norm([torch.full((70_000,), 250.0, dtype=torch.float16)]).isfinite()


def test_clipping_gives_what_torch_gives():
    ours, theirs = make_model(), make_model()
    guard = StepGuard(ours, torch.optim.SGD(ours.parameters(), lr=0.1), max_norm=0.5)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for window in range(3):
        for model, backward in ((ours, guard.backward), (theirs, torch.Tensor.backward)):
            model.zero_grad()
            backward(loss_of(model, make_batch(window)))
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        assert guard.step()
        assert state_of(ours) == state_of(theirs)


# ------------------------------------------------------------------------------------------ limits, states


@pytest.mark.parametrize("fused", [False, True])
def test_too_many_skips_in_a_row_end_the_run_and_name_the_batches(fused):
    guard = make_guard(make_optimizer=lambda p: torch.optim.AdamW(p, fused=fused), max_consecutive_skips=3)
    if fused:
        leave_to_the_device(guard)
    guard.backward(loss_of(guard.model, make_batch(0)))
    assert guard.step()
    before = state_of(guard.model, guard.optimizer)

    def go_on():
        for index in range(10):
            skip_one(guard, epoch=2, batch_indices=[index, index + 1], sample_indices=lambda: [4, 2])

    with pytest.raises(TooManySkips) as caught:
        go_on()
    assert str(caught.value).splitlines()[1:] == [
        f"  attempt {index + 2}, epoch 2, batches {index}, {index + 1}, samples 4, 2 on rank 0: non-finite loss"
        for index in range(3)
    ]
    assert state_of(guard.model, guard.optimizer) == before and guard.skipped == 3
    assert len(caught.value.skips) == 3


def test_a_limit_that_is_not_reached_in_a_row_ends_nothing():
    guard = make_guard(max_consecutive_skips=2)
    for _ in range(4):
        skip_one(guard)
        guard.optimizer.zero_grad()
        guard.backward(loss_of(guard.model, make_batch(0)))
        guard.step()
    assert (guard.updates, guard.skipped) == (4, 4)


def test_counters_and_history_go_on_from_a_state():
    first = make_guard(spike_factor=10, min_history=2)
    for _ in range(3):
        first.optimizer.zero_grad()
        first.backward(loss_of(first.model, make_batch(0)))
        first.step()
    skip_one(first)
    second = make_guard(spike_factor=10, min_history=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (second.attempts, second.updates, second.skipped) == (4, 3, 1)
    assert second.detector.limit == first.detector.limit < INF


def test_a_closed_guard_lets_the_model_go():
    guard = make_guard()
    guard.close()
    guard.model(make_batch(0))
    assert not guard._buffers.taken


# ------------------------------------------------------------------------------------------ found_inf, scaler


class NoAverage:
    """An average, beside which the host decides, that keeps nothing."""

    def update_parameters(self, model):
        pass


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_decision_left_on_the_device_is_the_same_decision(name, tmp_path):
    def fit(averages):
        model = make_model()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, fused=True)
        schedule = LambdaLR(optimizer, lambda n: 1 / (n + 1))
        guard = StepGuard(
            model, optimizer, scheduler=schedule, spike_factor=20, min_history=3, max_norm=1.0, averages=averages,
            journal=tmp_path / f"{len(averages)}.jsonl",
        )  # fmt: skip
        leave_to_the_device(guard)  # but for one with averages
        kinds = set()
        for window in range(20):
            optimizer.zero_grad()
            fault = {0: "NaN input", 7: "infinite loss", 8: "NaN input", 12: "spike", 19: "NaN input"}.get(window)
            if window == 15:
                guard.reject("no label")
            guard.backward(loss_of(model, make_batch(window), fault))
            kinds.add(type(guard.step(batch_indices=window)))
            assert guard.attempts == window + 1
        assert (guard.updates, guard.skipped) == (14, 6)
        told = [(s.attempt, s.updates, s.batch_indices, s.reason) for s in read_journal(guard._journal.path)[0]]
        return kinds, told, state_of(model, optimizer, schedule)

    host, device = fit([NoAverage()]), fit([])
    assert (host[0], device[0]) == ({bool}, {bool, torch.Tensor})  # the first steps make the optimizer's state
    assert host[1] == device[1] and len(host[1]) == 6
    assert host[2] == device[2]


def fit_with_scaler(bad, guarded=True):
    """Ten windows with a scale that grows every second update; unguarded, without those that are bad."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    guard = StepGuard(model, optimizer, scaler=scaler, spike_factor=50, min_history=2) if guarded else None
    for window in range(10):
        if window in bad and not guarded:
            continue
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(window), bad.get(window))
        if guarded:
            # As an overflow looks: the loss is finite, and the scaled gradient isn't.
            hook = model[0].weight.register_hook(lambda g: g * INF) if bad.get(window) == "overflow" else None
            guard.backward(loss)
            assert guard.step() is (window not in bad)
            if hook:
                hook.remove()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return state_of(model, optimizer), scaler.state_dict()


def test_a_bad_loss_and_a_spike_leave_the_scaler_as_it_was():
    bad = {0: "NaN input", 3: "infinite loss", 4: "NaN input", 8: "spike"}
    assert fit_with_scaler(bad) == fit_with_scaler(bad, guarded=False)


def test_an_overflow_lowers_the_scale_and_nothing_else():
    bad = {5: "overflow"}
    (state, scaler), (expected, _) = fit_with_scaler(bad), fit_with_scaler(bad, guarded=False)
    assert scaler["scale"] == 8 * 2**2 / 2 * 2**2  # grew twice, was halved, grew twice
    assert state == expected


def test_two_ranks_tell_an_overflow_from_a_bad_loss():
    def fit(rank):
        model = DistributedDataParallel(make_model())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler)
        scales = []
        for window, fault in enumerate((None, "NaN input", "overflow")):
            guard.optimizer.zero_grad()
            bad_here = rank == 1 and fault
            hook = model.module[0].weight.register_hook(lambda g, bad=bad_here == "overflow": g * INF if bad else g)
            guard.backward(loss_of(model, make_batch(rank, window), fault if bad_here else None))
            hook.remove()
            guard.step()
            scales.append(scaler.get_scale())
        return scales, guard.updates

    assert [result.value for result in run_ranks(fit)] == [([8.0, 8.0, 4.0], 1)] * 2


@pytest.mark.gpu
def test_on_a_gpu_a_fused_optimizer_is_not_waited_for():
    def fit(averages):
        model = make_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        guard = StepGuard(model, optimizer, averages=averages)
        kinds = []
        for window in range(6):
            optimizer.zero_grad()
            x = make_batch(window).cuda()
            torch.cuda.synchronize()
            if not averages and window > 2:
                torch.cuda.set_sync_debug_mode("error")
            guard.backward(loss_of(model, x * (NAN if window % 2 else 1.0)))
            kinds.append(type(guard.step()))
            torch.cuda.set_sync_debug_mode("default")
        return kinds, guard.updates, state_of(model, optimizer)

    device, host = fit([]), fit([NoAverage()])
    assert device[0][-1] is torch.Tensor and host[0] == [bool] * 6
    assert device[1:] == host[1:]


def nan_window(guard, model):
    guard.optimizer.zero_grad()
    guard.backward(model(torch.full((8, 4), math.nan)).mean())
    return guard.step()


def test_an_abandoned_window_leaves_nothing():
    model = make_model()
    before = [buffer.clone() for buffer in model.buffers()]
    guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.backward(model(torch.full((8, 4), math.nan)).mean())
    guard.abandon()
    assert all(map(torch.equal, model.buffers(), before))
    guard.optimizer.zero_grad()
    guard.backward(model(torch.ones(8, 4)).mean())
    assert guard.step() and (guard.attempts, guard.updates) == (1, 1)


def test_a_forward_before_a_checkpoint_is_loaded_opens_no_window():
    model = make_model()
    guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(8, 4))
    guard.load_state_dict(guard.state_dict())
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7)
    assert not nan_window(guard, model)
    assert all((buffer == 7).all() for buffer in model.buffers())


def test_a_detector_without_a_scale_judges_nothing():
    detector = SpikeDetector(10.0, min_history=4)
    for _ in range(4):
        detector.accept(0.0)
    assert detector.limit == math.inf
    for _ in range(5):
        detector.accept(1.0)
    assert detector.limit < math.inf


def test_a_forward_past_the_model_is_noticed_in_the_first_window():
    model = make_model()
    guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.backward(nn.Sequential(*model)(torch.ones(8, 4)).mean())
    with pytest.raises(RuntimeError, match="the window's forward did not go through the model"):
        guard.step()


@pytest.mark.parametrize("index", [3, torch.tensor(3), np.int64(3), [3], torch.tensor([3])])
def test_batches_may_be_named_by_any_integer(index, tmp_path):
    model = make_model()
    guard = StepGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), journal=tmp_path / "journal.jsonl")
    guard.backward(model(torch.full((8, 4), math.nan)).mean())
    guard.step(batch_indices=index)
    skips, _ = read_journal(tmp_path / "journal.jsonl")
    assert [skip.batch_indices for skip in skips] == [[3]]


def head_outside(rank):
    model, head = DistributedDataParallel(make_model()), nn.Linear(1, 1)
    StepGuard(model, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1))


def test_parameters_that_ddp_does_not_reduce_are_refused():
    with pytest.raises(RankError, match="some parameters that are trained are outside DistributedDataParallel"):
        run_ranks(head_outside, timeout=120, backend="gloo")


def test_parameters_that_are_not_the_models_are_refused():
    model, head = make_model(), nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"holds 6 parameters \(of 6\) that the guard's model does not have"):
        StepGuard(model, torch.optim.AdamW(make_model().parameters()))
    both = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    with pytest.raises(ValueError, match=r"holds 2 parameters \(of 8\).*Give the guard a module that holds all"):
        StepGuard(model, both)
    guard = StepGuard(nn.ModuleList([model, head]), both)
    before = state_of(model, head)
    guard.begin()
    guard.backward(head(model(make_batch(0) * NAN)).sum())
    assert not guard.step() and state_of(model, head) == before


# ------------------------------------------------------------------------------------------ guards and copies


def test_the_parts_of_a_gan_have_guards_of_their_own():
    both = nn.ModuleList([nn.Linear(2, 4), nn.Linear(4, 1)])
    guards = [StepGuard(part, torch.optim.SGD(part.parameters(), lr=0.1)) for part in both]
    for part, size, bad in ((0, 2, True), (1, 4, False)):
        guards[part].backward(both[part](torch.full((3, size), NAN if bad else 1.0)).sum())
    assert [guard.step() for guard in guards] == [False, True]


def test_a_guard_that_nobody_holds_is_gone():
    model = make_model(batch_norm=False)
    StepGuard(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    StepGuard(model, torch.optim.SGD(model[-1].parameters(), lr=0.1))
    assert model(make_batch(0)).shape == (5, 1)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "pickle"])
def test_a_copy_of_a_guarded_model_has_no_guard(how, tmp_path):
    def copied(model):
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model.pt")
        return torch.load(tmp_path / "model.pt", weights_only=False)

    model = make_model()
    plain = len(pickle.dumps(model))
    optimizer = torch.optim.Adam(model.parameters())
    model.guard = StepGuard(model, optimizer, scheduler=LambdaLR(optimizer, lambda n: 1 / (n + 1)))
    assert skip_one(model.guard) is False
    assert len(pickle.dumps(model)) < plain + 200
    again = copied(copied(model))
    assert again.guard is None
    before = state_of(model)
    again(torch.full((5, 4), NAN)).sum().backward()
    assert again[1].running_mean.isnan().all()  # nobody puts it back
    torch.optim.SGD(again.parameters(), lr=0.1).step()
    assert state_of(model) == before and not model.guard._buffers.taken
    assert StepGuard(again, torch.optim.SGD(again.parameters(), lr=0.1)) and skip_one(model.guard) is False


@pytest.mark.thorough
def test_a_file_of_a_guarded_model_needs_nothing_of_this_library(tmp_path):
    model = nn.Linear(4, 1)
    guard = make_guard(model)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['course_lib'] = None; "
        "model = torch.load(sys.argv[1], weights_only=False); print(model(torch.ones(2, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.stdout == "torch.Size([2, 1])\n", done.stderr
    assert guard.model is model


def test_an_optimizer_whose_step_needs_a_closure_is_refused():
    class TwoEvaluations(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    with pytest.raises(ValueError, match="must step without a closure, got TwoEvaluations"):
        make_guard(make_optimizer=lambda p: TwoEvaluations(p, lr=0.1))


# ------------------------------------------------------------------------------------------ a signal by NaN


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("fault", ["all ignored", "empty mask", "infinite loss"])
def test_a_loss_that_is_not_finite_with_a_gradient_that_is_is_skipped_on_all_ranks(fault):
    def fit(rank):
        model = DistributedDataParallel(make_model())
        guard = StepGuard(model, torch.optim.Adam(model.parameters(), lr=0.01))
        outcomes = []
        for window in range(6):
            guard.optimizer.zero_grad()
            for position in range(2):
                bad = rank == 1 and (window, position) in ((2, 0), (4, 1))
                with model.no_sync() if position == 0 else warnings.catch_warnings():
                    guard.backward(loss_of(model, make_batch(rank, window, position), fault if bad else None))
            outcomes.append(guard.step())
        return outcomes, state_of(guard.optimizer, *model.module[::2])

    first, second = (result.value for result in run_ranks(fit))
    assert first == second and first[0] == [True, True, False, True, False, True]


def test_the_signal_multiplies_one_small_gradient():
    model = make_model()
    signal = NanSignal()
    signal.mark(loss_of(model, make_batch(0), "all ignored"), list(model.parameters())).backward()
    poisoned = [name for name, p in model.named_parameters() if p.grad.isnan().any()]
    assert poisoned == ["3.bias"]
    signal.reset()
    assert not any(p._backward_hooks for p in model.parameters())


# ------------------------------------------------------------------------------------------ sizes and rates


SIZES = SizeSchedule({0: (16, 16), 3: (32, 8), 7: (64, 4)}, unit="optimizer_steps")
FACTOR = SIZES.plan(1000, max_epochs=1).lr_factor("linear")


@pytest.mark.parametrize("fused", [False, True])
def test_the_rate_that_goes_with_a_size_follows_the_attempts(fused):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=16.0, fused=fused)
    guard = StepGuard(model, optimizer)
    if fused:
        leave_to_the_device(guard)
    guard.scheduler = LambdaLR(optimizer, lambda update: FACTOR(guard.attempts))
    pairs = []
    for number, batch in zip(range(10), ScheduledBatchSampler(1000, SIZES), strict=False):
        guard.flush()  # the schedule follows what was left to the device
        pairs.append((len(batch), optimizer.param_groups[0]["lr"]))  # 16 where the batch is 16
        optimizer.zero_grad()
        guard.backward(model(torch.full((len(batch), 1), NAN if number in {0, 2, 6, 7} else 1e-4)).sum())
        guard.step()
    assert [size for size, _ in pairs] == [16] * 3 + [8] * 4 + [4] * 3
    assert all(size == rate for size, rate in pairs)


def test_a_warm_up_by_updates_goes_with_a_rate_by_attempts():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=16.0)
    guard = StepGuard(model, optimizer)
    guard.scheduler = LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4) * FACTOR(guard.attempts))
    rates = []
    for number in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        guard.backward(model(torch.full((1, 1), NAN if number in (1, 2) else 1e-4)).sum())
        guard.step()
    assert rates == [4, 8, 8, 4, 6, 8, 8, 4, 4, 4]


def test_a_rate_of_sizes_that_goes_by_updates_is_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"got LambdaLR\(optimizer, lr_factor\(.*: make the guard first"):
        StepGuard(model, optimizer, scheduler=LambdaLR(optimizer, FACTOR))


# ------------------------------------------------------------------------------------------ what is not taken back


def test_dropouts_draws_are_not_taken_back():
    def end(bad, give_back):
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        guard = make_guard(model)
        for window in range(6):
            drawn = torch.get_rng_state()
            if window == 2 and not bad:
                continue
            guard.optimizer.zero_grad()
            guard.backward(loss_of(model, make_batch(window), "NaN input" if window == 2 else None))
            if not guard.step() and give_back:
                torch.set_rng_state(drawn)
        return state_of(model, guard.optimizer)

    never_seen = end(bad=False, give_back=False)
    assert end(bad=True, give_back=False) != never_seen  # the generator has moved
    assert end(bad=True, give_back=True) == never_seen  # and that is all


def test_what_a_forward_writes_to_a_trained_parameter_is_not_taken_back():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(6, 3, max_norm=0.5)
            nn.init.ones_(self.words.weight)

        def forward(self, words):
            return self.words(words).sum()

    model = Tagger()
    guard = make_guard(model)
    guard.backward(model(torch.tensor([1, 2])) * NAN)
    assert not guard.step()
    norms = model.words.weight.detach().norm(dim=1)
    looked_up, others = 0.5, 3**0.5
    torch.testing.assert_close(norms, torch.tensor([others, looked_up, looked_up, others, others, others]))


def test_journals_whose_name_has_brackets_are_found_on_all_ranks(tmp_path):
    path = tmp_path / "lr[0.1].jsonl"
    for rank in 0, 1:
        Journal(path, rank).write(Skip("run", 1, 0, None, None, [rank], rank, "non-finite loss", True, None, None))
    (tmp_path / "lr[0.1].ranking.jsonl").write_text("no journal\n")
    skips, torn = read_journal(path)
    assert [skip.rank for skip in skips] == [0, 1] and torn == 0
