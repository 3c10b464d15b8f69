"""Stopped anywhere, resumed anyhow: what was delivered before and after is the epoch, once."""

import itertools
import os
import pickle
import random
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from course_lib.callbacks import ExactResume, SizeScheduleDataModule, SkipBadSteps, StepAudit
from course_lib.launch import RankError, run_ranks
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler, TwoStreamBatchSampler
from course_lib.schedules import ScheduledBatchSampler, SizeSchedule
from tests import effort


def random_sampler(rng):
    """A function of (num_replicas, rank) that makes one of our samplers, and the indices of its epoch."""
    n, size, seed = rng.randint(10, 60), rng.randint(2, 6), rng.randint(0, 3)
    kind = rng.choice(["shuffled", "two streams", "sharded"])

    def make(num_replicas=None, rank=None):
        at = dict(seed=seed, num_replicas=num_replicas, rank=rank)
        if kind == "shuffled":
            return ShuffledBatchSampler(n, size, **at)
        if kind == "two streams":
            return TwoStreamBatchSampler(range(n), range(100, 107), size, 3, **at)
        return ShardedBatchSampler(BatchSampler(RandomSampler(range(n)), size, drop_last=False), **at)

    return make, set(range(n))


def loader_of(sampler, workers=0, **arguments):
    return ResumableDataLoader(range(107), batch_sampler=sampler, num_workers=workers, **arguments)


def taken(iterator, count):
    return [batch.tolist() for _, batch in zip(range(count), iterator, strict=False)]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("seed", range(effort.cases(3, 8)))
def test_random_stops_workers_and_ranks(seed):
    # At least 40 cases each that can be dealt, 320 with --thorough. Every sixth uses workers, which are slow to start.
    rng = random.Random(f"resume {seed}")
    judged = 0
    for case in range(60):
        make, once = random_sampler(rng)
        before, after = rng.randint(1, 4), rng.randint(1, 4)
        workers = rng.sample([0, 1, 2], 2) if case % 6 == 0 else (0, 0)
        epoch = rng.randint(0, 2)
        try:
            loaders = [loader_of(make(before, rank), workers[0]) for rank in range(before)]
            [loader.set_epoch(epoch) for loader in loaders]
            stop = rng.randint(0, len(loaders[0]) - 1)
            seen = [taken(iter(loader), stop) for loader in loaders]
            states = [pickle.loads(pickle.dumps(loader.state_dict())) for loader in loaders]
            assert all(state == states[0] for state in states)
            resumed = [loader_of(make(after, rank), workers[1]) for rank in range(after)]
            for loader in resumed:
                loader.load_state_dict(states[0])
                loader.set_epoch(epoch)
            rest = [taken(loader, 10**6) for loader in resumed]
        except ValueError as error:
            if "without an empty batch" not in str(error):
                raise
            continue
        judged += 1
        delivered = Counter(index for batches in seen + rest for batch in batches for index in batch if index < 100)
        assert delivered == Counter(once), (case, before, after, stop)
        if before == after:
            for rank in range(before):
                whole = loader_of(make(before, rank))
                whole.set_epoch(epoch)
                assert seen[rank] + rest[rank] == taken(whole, 10**6)
    assert judged >= 40


def test_a_loop_without_set_epoch_gets_a_new_order_each_epoch_and_resumes_across_the_boundary():
    loader = ResumableDataLoader(range(10), batch_size=3, shuffle=True)
    epochs = [[i for batch in loader for i in batch.tolist()] for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3

    at_end = ResumableDataLoader(range(10), batch_size=3, shuffle=True)
    iterator = iter(at_end)
    taken(iterator, 4)  # the last batch was delivered; the end of the iterator was not asked for
    resumed = ResumableDataLoader(range(10), batch_size=3, shuffle=True)
    resumed.load_state_dict(at_end.state_dict())
    assert [i for batch in resumed for i in batch.tolist()] == epochs[1]
    assert [i for batch in resumed for i in batch.tolist()] == epochs[2]


def test_length_counts_the_batches_before_the_resume():
    loader = ResumableDataLoader(range(20), batch_size=3)
    taken(iter(loader), 2)
    resumed = ResumableDataLoader(range(20), batch_size=3)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == len(loader) == 7
    assert len(list(resumed)) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches_before", [0, 1])
def test_a_stop_iteration_of_the_dataset_is_no_end_of_the_epoch(workers, batches_before):
    class Empties(list):
        def __getitem__(self, index):
            return next(iter([])) if index == 6 else super().__getitem__(index)

    loader = ResumableDataLoader(Empties(range(12)), batch_size=2, num_workers=workers)
    assert sum(1 for _ in DataLoader(Empties(range(12)), 2, num_workers=workers)) == 3  # torch's own: half of the epoch
    if batches_before:
        first = ResumableDataLoader(range(12), batch_size=2)
        taken(iter(first), batches_before)
        loader.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=f"after {3 - batches_before} of the {6 - batches_before} batches .*next()"):
        list(loader)
    assert loader.epoch == 0 and loader.state_dict()["position"] == 6


@pytest.mark.thorough
def test_nothing_is_fetched_before_the_first_batch_is_asked_for():
    sampler = ShuffledBatchSampler(12, 3)
    loader = loader_of(sampler, workers=2)
    iterator = iter(loader)
    sampler.set_epoch(5)
    expected = ShuffledBatchSampler(12, 3)
    expected.set_epoch(5)
    assert taken(iterator, 10) == list(expected)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_an_iteration_cannot_go_on_with_is_told(persistent):
    flags = dict(num_workers=1, persistent_workers=True) if persistent else {}
    for look in (
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: next(iter(loader)),  # a look at a batch
        list,  # an accuracy on the training set
    ):
        loader = ResumableDataLoader(list(range(12)), 2, **flags)
        batches = iter(loader)
        next(batches)
        look(loader)
        with pytest.raises(RuntimeError, match=r"cannot go on: since its last batch another .* or a state"):
            next(batches)


def test_an_epoch_that_a_trainer_tells_ahead_of_its_iteration_has_the_state_of_its_start():
    loader = loader_of(ShuffledBatchSampler(12, 3))
    batches = iter(loader)
    taken(batches, 4)  # all of them, as a Trainer that counts
    loader.sampler.set_epoch(1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["steps"]) == (1, 0)
    assert len(list(loader)) == 4 and loader.epoch == 2


def test_persistent_workers_start_again_after_an_abandoned_epoch():
    loader = ResumableDataLoader(range(30), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True)
    expected = [taken(ResumableDataLoader(range(30), batch_size=3, shuffle=True), 99)]
    taken(iter(loader), 3)
    assert loader.state_dict()["steps"] == 3
    assert taken(iter(loader), 99) == expected[0]


class DrawsInWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(())


def test_what_workers_draw_is_a_function_of_the_epoch():
    def draws(epoch):
        loader = ResumableDataLoader(DrawsInWorker(), batch_size=3, num_workers=2, seed=4)
        loader.set_epoch(epoch)
        return torch.cat(list(loader)).tolist()

    torch.manual_seed(1)
    first = draws(0)
    torch.manual_seed(2)
    assert draws(0) == first != draws(1)


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append((self.trainer.current_epoch, batch.tolist()))
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, loader, checkpoint=None, callbacks=(), **flags):
    model = Recorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver, *callbacks], default_root_dir=folder, **flags,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model.seen


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(effort.cases(2, 4)))
def test_a_trainer_resumes_bit_identically(tmp_path, seed):
    rng = random.Random(f"trainer {seed}")
    for case in range(6):
        make, _ = random_sampler(rng)
        workers = rng.sample([0, 1, 2], 2)
        persistent = [dict(persistent_workers=True) if w else {} for w in workers]
        limit = rng.choice([1.0, 3, 0.5])
        flags = dict(max_epochs=3, limit_train_batches=limit)
        whole = fit(tmp_path / f"{case}a", loader_of(make()), **flags)
        stop = rng.randint(1, len(whole) - 1)
        stopped = fit(
            tmp_path / f"{case}b", loader_of(make(), workers[0], **persistent[0]), **flags | {"max_steps": stop}
        )
        assert stopped == whole[:stop]
        checkpoint = tmp_path / f"{case}b" / f"step={stop}.ckpt"
        resumed = fit(tmp_path / f"{case}c", loader_of(make(), workers[1], **persistent[1]), checkpoint, **flags)
        assert stopped + resumed == whole, (case, stop, limit)


def primary(seen):
    return [(epoch, index) for epoch, batch in seen for index in batch if index < 100]


def loader_state_in(checkpoint):
    (state,) = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return state


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("before", "after", "ahead"), [(2, 1, False), (1, 2, True), (2, 3, False)])
def test_a_trainer_resumes_on_another_number_of_ranks(tmp_path, before, after, ahead):
    def run(rank, world_size, folder, checkpoint, ahead, callbacks, flags):
        loader = loader_of(TwoStreamBatchSampler(range(37), range(100, 107), 3, 2))
        if ahead:
            loader.load_state_dict(loader_state_in(checkpoint))
        flags = flags | dict(devices=world_size, strategy="ddp")
        return fit(folder, loader, checkpoint, callbacks=[callback() for callback in callbacks], **flags)

    def on_ranks(world_size, folder, checkpoint, ahead=False, callbacks=(), **flags):
        arguments = (world_size, tmp_path / folder, checkpoint, ahead, callbacks, flags)
        results = run_ranks(run, world_size, args=arguments, timeout=240)
        return [entry for result in results for entry in result.value]

    stop = 9 if before == 2 else 17  # within the second epoch
    first = on_ranks(before, "a", None, max_epochs=2, max_steps=stop)
    checkpoint = tmp_path / "a" / f"step={stop}.ckpt"
    if ahead:
        with pytest.raises(RankError, match=r"add course_lib\.callbacks\.ExactResume\(\) to the callbacks"):
            on_ranks(after, "b", checkpoint, max_epochs=2)
    second = on_ranks(after, "b", checkpoint, ahead, callbacks=(ExactResume,), max_epochs=2)
    assert Counter(primary(first + second)) == Counter((epoch, index) for epoch in range(2) for index in range(37))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "how", ["default flags", "own sharding", "plain loader", "fabric", "fabric, own sharding", "plain DDP"]
)
def test_every_way_gives_the_same_batches(how, workers):
    def run(rank):
        sampler = TwoStreamBatchSampler(range(13), range(100, 107), 2, 3)
        kind = DataLoader if how == "plain loader" else ResumableDataLoader
        loader = kind(range(107), batch_sampler=sampler, num_workers=workers)
        flags = {"use_distributed_sampler": False} if "own" in how else {}
        if how == "plain DDP":
            return [(epoch, batch.tolist()) for epoch in range(3) for batch in loader]
        if "fabric" in how:
            import lightning

            fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
            fabric.launch()
            loader = fabric.setup_dataloaders(loader, **flags)
            return [(epoch, batch.tolist()) for epoch in range(3) for batch in loader]
        model = Recorder()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **flags,
        )  # fmt: skip
        trainer.fit(model, loader)
        return model.seen

    seen = [result.value for result in run_ranks(run, timeout=240)]
    for rank in range(2):
        expected = []
        for epoch in range(3):
            sampler = TwoStreamBatchSampler(range(13), range(100, 107), 2, 3, num_replicas=2, rank=rank)
            sampler.set_epoch(epoch)
            expected += [(epoch, batch) for batch in sampler]
        assert seen[rank] == expected
    assert Counter(primary(seen[0] + seen[1])) == Counter((epoch, index) for epoch in range(3) for index in range(13))


def train_and_die(rank, world_size, path, die_at, workers):
    """Every step is committed by rank 0 (what all ranks saw, and the loader's state); at a step, one rank is killed."""
    import torch.distributed as dist

    sampler = TwoStreamBatchSampler(range(41), range(100, 107), 3, 2, seed=1)
    loader = ResumableDataLoader(range(107), batch_sampler=sampler, num_workers=workers)
    seen = []
    if os.path.exists(path):
        with open(path, "rb") as file:
            state, seen = pickle.load(file)
        loader.load_state_dict(state)
    steps = 0
    while loader.batch_sampler.epoch < 2:
        epoch = loader.batch_sampler.epoch
        for batch in loader:
            if steps == die_at and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            everywhere = [None] * world_size
            dist.all_gather_object(everywhere, (epoch, batch.tolist()))
            seen += everywhere
            if rank == 0:
                with open(f"{path}.new", "wb") as file:
                    pickle.dump((loader.state_dict(), seen), file)
                os.replace(f"{path}.new", path)
            steps += 1
    return seen


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("case", range(effort.cases(3, 20)))
def test_a_killed_run_goes_on_with_other_ranks_and_workers(tmp_path, case):
    rng = random.Random(f"kill {case}")
    path = str(tmp_path / "checkpoint")
    before, after = rng.randint(1, 3), rng.randint(1, 3)
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(train_and_die, before, args=(before, path, rng.randint(0, 8), rng.choice([0, 0, 2])), timeout=240)
    seen = run_ranks(train_and_die, after, args=(after, path, -1, rng.choice([0, 0, 2])), timeout=240)[0].value
    assert Counter(primary(seen)) == Counter((epoch, index) for epoch in range(2) for index in range(41))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "dataset must be map-style and have a length"),
        ({"sampler": SequentialSampler(range(5))}, "sampler is not taken"),
        ({"batch_sampler": ShuffledBatchSampler(5, 2), "batch_size": 3}, "not taken beside batch_sampler, which has"),
        ({"batch_sampler": ShuffledBatchSampler(5, 2), "seed": 1}, "and seed are not taken beside batch_sampler"),
        ({"batch_sampler": ShuffledBatchSampler(5, 2), "shuffle": True}, "shuffle, drop_last and seed are not taken"),
        ({"batch_sampler": ([i] for i in range(5))}, "generator cannot say its position .*wrap it"),
        ({"generator": torch.Generator()}, r"generator is not taken: order and draws are functions of \(seed, epoch\)"),
        ({"in_order": False, "num_workers": 2}, "in_order=False is not taken: batches out of order have no position"),
        ({"batch_sampler": BatchSampler(range(5), 2, False)}, "cannot say its position .*wrap it"),
        ({"batch_sampler": ShuffledBatchSampler(6, 2)}, "yields indices up to 5, the dataset has 5 samples"),
        ({"batch_size": 0}, "batch_size must be a positive int"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResumableDataLoader(**{"dataset": range(5)} | arguments)


@pytest.mark.thorough
def test_the_loop_of_the_docstring_is_right_wherever_it_was_killed():
    def loop(kill_at, state):
        """What was trained in five epochs of four batches each, and the state behind the last batch of it."""
        loader, trained = ResumableDataLoader(range(10), batch_size=3, shuffle=True), []
        if state is not None:
            loader.load_state_dict(state)
        for epoch in range(loader.epoch, 5):
            for batch in loader:
                trained.append((epoch, batch.tolist()))
                state = loader.state_dict()
                if len(trained) == kill_at:
                    return trained, state
        return trained, state

    whole, _ = loop(None, None)
    assert len(whole) == 20
    for first in range(1, 20):
        for second in (1, 3, 4):
            one, state = loop(first, None)
            two, state = loop(second, state)
            three, _ = loop(None, state)
            assert (one + two + three)[:20] == whole and (len(one + two + three) == 20 or first + second > 20)


def test_under_fabric_a_loader_goes_on_in_its_epoch_and_a_later_one_is_read_without_fabrics_count():
    import lightning

    def new(state=None):
        loader = ResumableDataLoader(range(13), batch_size=3, shuffle=True)
        if state is not None:
            loader.load_state_dict(state)
        return loader, lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)

    loader, of_fabric = new()
    whole = [[batch.tolist() for batch in of_fabric] for _ in range(3)]
    for epoch in range(3):
        loader, of_fabric = new()
        for _ in range(epoch):
            list(of_fabric)
        seen = taken(iter(of_fabric), 2)
        state = loader.state_dict()
        resumed, of_fabric = new(state)
        if epoch:
            with pytest.raises(RuntimeError, match=rf"of epoch {epoch}\. Fabric's loader counts .* fabric\.to_device"):
                list(of_fabric)
            of_fabric = resumed
        assert seen + [batch.tolist() for batch in of_fabric] == whole[epoch]
        if epoch < 2:
            assert [batch.tolist() for batch in of_fabric] == whole[epoch + 1]
        resumed.load_state_dict(state)
        resumed.set_epoch(0)  # begins anew
        assert [batch.tolist() for batch in resumed] == whole[0][2 if epoch == 0 else 0 :]


def checkpoint_of(folder, loader, **flags):
    path = folder / "run.ckpt"
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=2,
        callbacks=[ExactResume(), SkipBadSteps(), StepAudit()], enable_checkpointing=False, **flags,
    )  # fmt: skip
    model = Recorder()
    if isinstance(loader, LightningDataModule):
        trainer.fit(model, datamodule=loader)
    else:
        trainer.fit(model, loader)
    trainer.save_checkpoint(path)
    return path


def of_module(sample, size):
    return sample


@pytest.mark.parametrize("kind", ["shuffled", "two streams", "sharded", "scheduled"])
def test_what_the_pieces_save_is_loaded_as_weights_only(tmp_path, kind):
    def new():
        if kind == "two streams":
            return loader_of(TwoStreamBatchSampler(range(13), range(100, 107), 2, 3))
        if kind == "sharded":
            return loader_of(ShardedBatchSampler(BatchSampler(RandomSampler(range(13)), 2, False)))
        if kind == "scheduled":
            return SizeScheduleDataModule(range(13), SizeSchedule({0: (8, 3), 1: ((16, 8), 2)}), of_module)
        return ResumableDataLoader(range(13), 2, shuffle=True)

    path = checkpoint_of(tmp_path, new())
    checkpoint = torch.load(path, weights_only=True)
    assert len(checkpoint["callbacks"]) >= 3
    if kind != "scheduled":
        resumed = new()
        resumed.load_state_dict(loader_state_in(path))
        assert resumed.state_dict()["steps"] == 2 and resumed.epoch == 0


def test_overfit_batches_makes_the_loader_again_with_what_it_was_given(tmp_path):
    class Spy(Recorder):
        def on_train_start(self):
            self.loader = self.trainer.train_dataloader

    model = Spy()
    loader = ResumableDataLoader(range(13), 2, shuffle=True, seed_samples=False, collate_fn=torch.tensor)
    Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        overfit_batches=2, enable_checkpointing=False,
    ).fit(model, loader)  # fmt: skip
    assert model.seen == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
    assert model.loader.seed_samples is False and model.loader.collate_fn is torch.tensor


def test_arrays_and_defaults_are_torchs():
    loader = ResumableDataLoader(np.arange(10), batch_size=4, drop_last=True)
    assert [b.tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_wrapped_sampler_remembers_otherwise_is_refused():
    class CountsItsRuns(SequentialSampler):
        runs = 0

        def __iter__(self):
            self.runs += 1
            return ((index * self.runs) % 11 for index in range(11))

    batches = ShardedBatchSampler(BatchSampler(CountsItsRuns(range(11)), 3, drop_last=False))
    with pytest.raises(ValueError, match="yields other batches when it is read twice"):
        next(iter(ResumableDataLoader(range(11), batch_sampler=batches)))


def exactly(loader):
    batches = iter(loader)
    for _ in range(len(loader.batch_sampler)):
        yield next(batches)


ASKS_FOR_NO_MORE = {
    "islice": lambda loader: itertools.islice(loader, len(loader.batch_sampler)),
    "zip": lambda loader: (batch for _, batch in zip(range(len(loader.batch_sampler)), loader, strict=False)),
    "next": exactly,
}


@pytest.mark.parametrize("read", ASKS_FOR_NO_MORE)
def test_a_loop_that_asks_for_no_batch_more_has_the_epochs_of_one_that_does(read):
    def made():
        return ResumableDataLoader(range(8), batch_size=2, shuffle=True, seed=3)

    def epochs_of(loader, taken, number=3):
        return [[batch.tolist() for batch in taken(loader)] for _ in range(number)]

    whole, states, loader = epochs_of(made(), iter), [], made()
    for epoch in whole:
        for batch, expected in zip(ASKS_FOR_NO_MORE[read](loader), epoch, strict=True):
            assert batch.tolist() == expected
            states.append(loader.state_dict())
    for done, state in enumerate(states[:-1], start=1):
        stopped = made()
        stopped.load_state_dict(state)
        rest = list(itertools.chain(*epochs_of(stopped, ASKS_FOR_NO_MORE[read], 3 - done // 4)))
        assert rest == list(itertools.chain(*whole))[done:], done


@pytest.mark.parametrize("kind", ["shuffled", "scheduled", "sharded"])
def test_a_plain_loader_without_workers_goes_on_with_the_next_epochs_order(tmp_path, kind):
    """A resuming Trainer asks for an iterator before it turns to the epoch: the order is that of when it is read."""
    make = {
        "shuffled": lambda: ShuffledBatchSampler(9, 2),
        "scheduled": lambda: ScheduledBatchSampler(9, SizeSchedule({0: (8, 2)})),
        "sharded": lambda: ShardedBatchSampler(BatchSampler(RandomSampler(range(9)), 2, drop_last=False)),
    }[kind]
    whole = fit(tmp_path / "whole", DataLoader(range(9), batch_sampler=make()), max_epochs=2)
    fit(tmp_path / "first", DataLoader(range(9), batch_sampler=make()), max_epochs=1)
    checkpoint = tmp_path / "first" / "step=5.ckpt"
    resumed = fit(tmp_path / "second", DataLoader(range(9), batch_sampler=make()), checkpoint, max_epochs=2)
    assert resumed == whole[5:]


def test_an_iterator_that_is_not_read_takes_a_new_epoch_and_one_that_is_read_refuses_it():
    sampler = ScheduledBatchSampler(9, SizeSchedule({0: (8, 2)}))
    first, unread, begun = list(sampler), iter(sampler), iter(sampler)
    next(begun)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="the sampler was turned to epoch 1 when batches of epoch 0 had been drawn"):
        next(begun)
    sampler.set_epoch(0)
    begun = iter(sampler)
    batches = [next(begun)]
    sampler.set_epoch(1)
    assert first != list(sampler) == list(unread)  # a look that is taken within an epoch
    assert [*batches, *begun] == first


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, ResumableDataLoader])
def test_a_loader_that_a_fit_has_used_begins_the_next_fit_with_epoch_0_or_is_refused(tmp_path, kind, workers):
    loader = kind(range(12), batch_sampler=ShuffledBatchSampler(12, 2), num_workers=workers)
    first = fit(tmp_path / "first", loader, max_epochs=2)
    if kind is DataLoader and workers:
        with pytest.raises(RuntimeError, match="gets a loader that was used before"):
            fit(tmp_path / "second", loader, max_epochs=2)
    else:
        assert fit(tmp_path / "second", loader, max_epochs=2) == first


def test_a_resumed_trainer_does_not_train_an_epoch_in_another_ones_order(tmp_path):
    def made():
        return DataLoader(range(12), batch_sampler=ShuffledBatchSampler(12, 2), num_workers=2)

    fit(tmp_path / "first", made(), max_epochs=1)
    with pytest.raises(RuntimeError, match="turned to epoch 1 when batches of epoch 0 had been drawn"):
        fit(tmp_path / "second", made(), tmp_path / "first" / "step=6.ckpt", max_epochs=2)


def test_an_iterator_that_is_not_read_refuses_an_epoch_that_cannot_be_dealt():
    sampler = ShuffledBatchSampler(5, 1)
    sampler.load_state_dict(sampler.state_dict(1))
    sampler.num_replicas, sampler.rank = 2, 0  # as it would find the process group
    unread = iter(sampler)
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match="empty batch"):
        next(unread)
