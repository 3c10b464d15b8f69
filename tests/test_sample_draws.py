"""What samples draw at random: a function of the sample, whoever makes the batch, however often a run was killed."""

# ruff: noqa: NPY002 - NumPy's global generator is what datasets draw from

import copy
import pickle
import random
from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, RandomSampler, Subset, get_worker_info

from course_lib.callbacks import ExactResume, SizeScheduleDataModule
from course_lib.launch import run_ranks
from course_lib.pipeline import trace
from course_lib.resume import ResumableDataLoader, epoch_of_this_batch
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler, TwoStreamBatchSampler
from course_lib.schedules import ScheduledBatchSampler, SizedDataset, SizeSchedule
from tests import effort

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.* indices are in both streams"),
]


def drawn():
    """A number of each generator, a normal one among them, of which two are made at a time; and the epoch."""
    return torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)


class Augmented(Dataset):
    def __init__(self, n=23):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return int(index), epoch_of_this_batch(), *drawn()


def with_draws(samples):
    return samples, (epoch_of_this_batch(), *drawn())


def batches_of(loader, epochs=2):
    return [batch for _ in range(epochs) for batch in loader]


def make_loader(dataset=None, **arguments):
    settings = {"batch_size": 3, "collate_fn": with_draws}
    if "batch_sampler" in arguments:
        del settings["batch_size"]
    else:
        settings |= {"shuffle": True, "seed": 4}
    return ResumableDataLoader(Augmented() if dataset is None else dataset, **settings | arguments)


def by_sample(batches):
    """Whatever was drawn, by (index, epoch); a list, as a sample may come more than once."""
    found = {}
    for samples, _ in batches:
        for index, epoch, *draws in samples:
            found.setdefault((index, epoch), []).append(tuple(draws))
    return {key: sorted(draws) for key, draws in found.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "prefetch_factor": 7},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
)
def test_a_sample_is_augmented_alike_with_any_workers(workers):
    assert batches_of(make_loader(**workers)) == batches_of(make_loader())


def test_every_sample_epoch_seed_and_batch_has_draws_of_its_own():
    batches = batches_of(make_loader(), epochs=3) + batches_of(make_loader(seed=5), epochs=3)
    assert [epoch for _, (epoch, *_) in batches] == [epoch for epoch in range(3) for _ in range(8)] * 2
    draws = [sample[2:] for samples, _ in batches for sample in samples] + [of_batch[1:] for _, of_batch in batches]
    for of_generator in zip(*draws, strict=True):
        assert len(set(of_generator)) == len(draws) == 6 * (23 + 8)


def test_neither_neighbours_nor_the_three_generators_begin_alike():
    draws = [sample[2:] for samples in ResumableDataLoader(Augmented(500), collate_fn=list) for sample in samples]
    assert np.abs(np.corrcoef(np.array(draws).T) - np.eye(5)).max() < 0.2
    pairs = np.concatenate([np.array(draws)[:-1], np.array(draws)[1:]], axis=1)
    assert np.abs(np.corrcoef(pairs.T) - np.eye(10)).max() < 0.2


@pytest.mark.parametrize("seed", [0, 1])
def test_the_main_process_keeps_its_own_generators(seed):
    def run(loader):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        np.random.randn(), random.gauss(0, 1), torch.randn(())  # each keeps a second normal number
        own = []
        for _ in loader:
            own += drawn()
        return own

    class Fails(Augmented):
        def __getitem__(self, index):
            drawn()
            raise KeyError(index)

    assert run(make_loader()) == run(make_loader(dataset=range(23), collate_fn=list)) == run(range(8))
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    expected = drawn()
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    with pytest.raises(KeyError):
        list(make_loader(Fails()))
    assert drawn() == expected


def test_without_seed_samples_the_draws_are_the_process_own():
    torch.manual_seed(0)
    first, rest = torch.rand(()), torch.rand(22)
    torch.manual_seed(0)
    loader = ResumableDataLoader(RandOnly(23), batch_size=5, seed_samples=False)
    draws = torch.cat(list(loader))
    assert draws[0] == first and torch.equal(draws[1:], rest)
    epochs = [of_batch[0] for _, of_batch in batches_of(make_loader(seed_samples=False, num_workers=2))]
    assert epochs == [0] * 8 + [1] * 8


class RandOnly(Augmented):
    def __getitem__(self, index):
        return torch.rand(())


class AtOnce(Augmented):
    def __getitems__(self, indices):
        return [(int(index), epoch_of_this_batch(), "at once") for index in indices]


def test_samples_draw_alike_through_subsets_and_are_asked_for_one_at_a_time():
    plain = by_sample(batches_of(make_loader()))
    assert by_sample(batches_of(make_loader(AtOnce(), num_workers=2))) == plain
    assert by_sample(batches_of(make_loader(Subset(Augmented(), range(23))))) == plain
    assert by_sample(batches_of(make_loader(Subset(AtOnce(), range(23))))) == plain
    both = ConcatDataset([Subset(Augmented(), range(10)), Subset(Augmented(), range(10, 23))])
    assert by_sample(batches_of(make_loader(both, num_workers=1))) == plain
    unseeded = by_sample(batches_of(make_loader(AtOnce(), seed_samples=False)))
    assert unseeded.keys() == plain.keys() and all(draws == [("at once",)] for draws in unseeded.values())


class Named(Dataset):
    names = ("a", ("b", 1), ("b", 2), "c")

    def __len__(self):
        return len(self.names)

    def __getitem__(self, name):
        return self.names.index(name), epoch_of_this_batch(), *drawn()


class OwnSampler:
    """Somebody's own: any indices, an order by the epoch, its place in batches."""

    def __init__(self, batches, seed=3):
        self.batches, self.seed = batches, seed
        self.epoch = self.steps_before = 0

    def __len__(self):
        return len(self.batches) - self.steps_before

    def __iter__(self):
        order = random.Random(f"{self.seed} {self.epoch}").sample(range(len(self.batches)), len(self.batches))
        return iter([self.batches[place] for place in order][self.steps_before :])

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.steps_before = epoch, 0

    def state_dict(self, batches=0):
        done = self.steps_before + batches
        return {"epoch": self.epoch + done // len(self.batches), "steps": done % len(self.batches)}

    def load_state_dict(self, state):
        self.epoch, self.steps_before = state["epoch"], state["steps"]


@pytest.mark.thorough
def test_indices_of_any_kind_that_is_the_same_everywhere():
    def run(workers, names=Named.names):
        return batches_of(make_loader(Named(), batch_sampler=OwnSampler([[name] for name in names]), **workers))

    assert run({}) == run({"num_workers": 1, "multiprocessing_context": "spawn"})
    with pytest.raises(TypeError, match="no more than where it lies in memory"):
        run({}, [object()])


class AnyIndex(Named):
    names = range(8)

    def __getitem__(self, index):
        return drawn()


def test_every_index_has_draws_of_its_own_and_equal_ones_the_same():
    def draws(*indices):
        loader = make_loader(AnyIndex(), batch_sampler=OwnSampler([list(indices)]), collate_fn=list)
        return list(*loader)

    assert len(set(draws(0, 2**32, 2**64 + 1, -1, "a", "0", ("a", 1), (1, 2), None, 0.5))) == 10
    assert len(set(draws(7, np.int64(7), torch.tensor(7)))) == 1


TWO = [0, 1, 2, 2, 3]
SAMPLERS = {
    "shuffled, pad": lambda **at: ShuffledBatchSampler(11, 2, seed=7, tail="pad", **at),
    "pad, often": lambda **at: ShuffledBatchSampler(2, 3, seed=7, tail="pad", **at),
    "two streams": lambda **at: TwoStreamBatchSampler(range(13), range(13, 18), 2, 3, seed=7, **at),
    "two streams, pad": lambda **at: TwoStreamBatchSampler(range(13), [20, 21], 2, 3, seed=7, tail="pad", **at),
    "doubled and in both": lambda **at: TwoStreamBatchSampler([*range(9), 2, 2], TWO, 2, 2, seed=7, **at),
    "sharded": lambda **at: ShardedBatchSampler(
        BatchSampler(RandomSampler(range(9), replacement=True, num_samples=24), 3, False), seed=7, **at
    ),
    "sharded, pad": lambda **at: ShardedBatchSampler([[1, 2], [3], [1, 1], [4], [5]], seed=7, tail="pad", **at),
    "scheduled, pad": lambda **at: ScheduledBatchSampler(11, SizeSchedule({0: (8, 2)}), tail="pad", **at),
}


def on_ranks(make, world_size, epoch, workers=0):
    """(index, draws) of all ranks, in the order of the steps and ranks, and which batch it was in the epoch."""
    dealt = []
    for rank in range(world_size):
        loader = make_loader(Augmented(30), batch_sampler=make(num_replicas=world_size, rank=rank), num_workers=workers)
        loader.set_epoch(epoch)
        dealt.append(list(loader))
    return [batch for step in zip(*dealt, strict=True) for batch in step]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sample_is_augmented_alike_on_any_number_of_ranks_and_each_time_in_its_own_way(kind):
    for epoch in range(2):
        one = on_ranks(SAMPLERS[kind], 1, epoch)
        expected = by_sample(one)
        assert all(len(set(draws)) == len(draws) for draws in expected.values())
        for world_size, workers in ((2, 0), (3, 0), (2, 2)):
            found = by_sample(on_ranks(SAMPLERS[kind], world_size, epoch, workers))
            # Another number of ranks repeats others at the end; what both have is the same.
            for key in found.keys() & expected.keys():
                fewer, more = sorted((set(found[key]), set(expected[key])), key=len)
                assert fewer <= more and len(set(found[key])) == len(found[key])
            if "pad" not in kind and "two streams" not in kind:
                assert found == expected or kind == "doubled and in both"
    numbers = [of_batch for _, of_batch in on_ranks(SAMPLERS[kind], 2, 0)]
    alone = [of_batch for _, of_batch in on_ranks(SAMPLERS[kind], 1, 0)]
    assert all(one == two for one, two in zip(numbers, alone, strict=False)) and len(set(numbers)) == len(numbers)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("kind", [*SAMPLERS, "own, repeats"])
def test_a_loop_that_is_killed_twice_anywhere_delivers_bit_for_bit_the_same(kind):
    def new(workers=0):
        sampler = OwnSampler([[1, 2], [1, 1], [3, 2], [4, 1], [2]]) if kind == "own, repeats" else SAMPLERS[kind]()
        return make_loader(Augmented(30), batch_sampler=sampler, num_workers=workers)

    rng, whole = random.Random(kind), batches_of(new(), 3)
    for case in range(effort.cases(2, 40)):
        seen, state = [], None
        for stop in (*sorted(rng.sample(range(1, len(whole)), 2)), 10**6):
            loader = new(rng.choice([0, 0, 1, 2]))
            if state is not None:
                loader.load_state_dict(state)
            while loader.epoch < 3 and len(seen) < stop:
                for batch in loader:
                    seen.append(batch)
                    state = pickle.loads(pickle.dumps(loader.state_dict()))
                    if len(seen) == stop:
                        break
        assert seen == whole, case


class Noisy(Dataset):
    def __init__(self, n=29):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        noise = torch.rand(2) + np.random.rand() + random.random()
        return torch.tensor([index % 3, index % 5]) + noise


def mixed(samples):
    return torch.stack(samples) * (1 + 0.1 * torch.rand(()) + 0.1 * np.random.rand() + 0.1 * random.random())


class Killed(RuntimeError):
    pass


class Learner(LightningModule):
    def __init__(self, kill_at=None):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.kill_at = kill_at

    def training_step(self, batch, batch_idx):
        if self.kill_at is not None and self.trainer.fit_loop.epoch_loop.batch_progress.total.ready > self.kill_at:
            raise Killed
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


EPOCHS, BATCH = 3, 4


def fit(folder, workers, kill_at=None, checkpoint=None, **flags):
    loader = ResumableDataLoader(
        Noisy(), BATCH, shuffle=True, seed=2, collate_fn=mixed, num_workers=workers, persistent_workers=workers == 2
    )
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    model = Learner(kill_at)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver, ExactResume()], default_root_dir=folder, max_epochs=EPOCHS, **flags,
    )  # fmt: skip
    if kill_at is None:
        trainer.fit(model, loader, ckpt_path=checkpoint)
    else:
        with pytest.raises(Killed):
            trainer.fit(model, loader, ckpt_path=checkpoint)
    return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])


def killed_twice(folder, seed, steps, **flags):
    """The weights of a run that an exception ends at two random batches, each time resumed from a random checkpoint."""
    rng = random.Random(f"kills {seed}")
    saved = []
    for life in range(3):
        at = folder / f"{life}"
        begin = saved[-1][0] if saved else 0
        if life == 2:
            return fit(at, rng.choice([0, 1, 2]), checkpoint=saved[-1][1], **flags)
        kill_at = rng.randint(begin + 1, steps - 2 + life)
        fit(at, rng.choice([0, 1, 2]), kill_at, saved[-1][1] if saved else None, **flags)
        step = rng.randint(begin + 1, kill_at)
        saved.append((step, at / f"step={step}.ckpt"))


def test_a_trainer_that_is_killed_twice_anywhere_ends_with_the_same_weights(tmp_path):
    whole = fit(tmp_path / "whole", 0)
    steps = EPOCHS * -(-29 // BATCH)
    for seed in range(effort.cases(3, 40)):
        assert torch.equal(killed_twice(tmp_path / f"{seed}", seed, steps), whole), seed


@pytest.mark.thorough
def test_two_ranks_that_are_killed_twice_anywhere_end_with_the_same_weights(tmp_path):
    def run(rank, seeds):
        flags = {"devices": 2, "strategy": "ddp"}
        whole = fit(tmp_path / "whole", 0, **flags)
        steps = EPOCHS * -(-29 // (2 * BATCH))
        return [torch.equal(killed_twice(tmp_path / f"{seed}", seed, steps, **flags), whole) for seed in seeds]

    seeds = list(range(effort.cases(1, 8)))
    results = run_ranks(run, args=(seeds,), timeout=60 + 60 * len(seeds))
    assert [result.value for result in results] == [[True] * len(seeds)] * 2


def draw_at(sample, size):
    return *sample, size


@pytest.mark.thorough
def test_a_size_schedule_augments_alike_with_any_workers():
    seen = {}

    class Collects(LightningModule):
        def __init__(self, workers):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen = seen.setdefault(workers, [])

        def training_step(self, batch, batch_idx):
            self.seen.append(batch)
            return self.weight * 1.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for workers in (0, 1, 3):
        schedule = SizeSchedule({0: (8, 3), 1: (16, 3)})
        data = SizeScheduleDataModule(
            Augmented(), schedule, draw_at, num_workers=workers, collate_fn=with_draws, seed=5
        )
        Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
            enable_checkpointing=False,
        ).fit(Collects(workers), datamodule=data)  # fmt: skip
    assert seen[0] == seen[1] == seen[3] and len(seen[0]) == 16
    assert {(sample[1], sample[-1]) for samples, _ in seen[0] for sample in samples} == {(0, 8), (1, 16)}


# --------------------------------------------------------------------------------------- the loader stays as it is


class Marks(Augmented):
    mark = 0

    def __getitem__(self, index):
        return self.mark, type(get_worker_info().dataset) is Marks


def mark_dataset(worker):
    get_worker_info().dataset.mark = worker + 1


@pytest.mark.thorough
def test_dataset_collate_fn_and_worker_init_fn_stay_the_readers():
    dataset = Marks()
    for context, workers in (("fork", 2), ("spawn", 1)):
        loader = make_loader(
            dataset, num_workers=workers, worker_init_fn=mark_dataset, collate_fn=list, multiprocessing_context=context
        )
        assert set(chain.from_iterable(loader)) == {(worker + 1, True) for worker in range(workers)}
        assert loader.dataset is dataset and loader.collate_fn is list and loader.worker_init_fn is mark_dataset
    assert dataset.mark == 0


def test_a_trace_and_copies_of_a_loader_draw_alike():
    whole = batches_of(make_loader(), 1)
    for workers in (0, 2):
        seen = []
        trace(make_loader(num_workers=workers), compute=seen.append)
        assert seen == whole
    loader = make_loader()
    taken = next(iter(loader))
    copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    assert [batches_of(copied, 1) for copied in copies] == [whole] * 3
    assert taken == whole[0] and all(copied.state_dict()["epoch"] == 1 for copied in copies)


def test_the_epoch_is_asked_for_where_a_batch_is_made():
    with pytest.raises(RuntimeError, match="asked where no batch is being made: call it in the __getitem__"):
        epoch_of_this_batch()
    with pytest.raises(RuntimeError, match=r"of a course_lib\.resume\.ResumableDataLoader"):
        list(torch.utils.data.DataLoader(Augmented()))
    loader = make_loader(num_workers=2, persistent_workers=True, prefetch_factor=4)
    batches_of(loader, 2)
    iterator = iter(loader)
    next(iterator)
    resumed = make_loader(num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert {of_batch[0] for _, of_batch in resumed} == {2}


class ReadsAnother(Augmented):
    """A dataset that reads a loader of its own for a sample."""

    def __getitem__(self, index):
        first = drawn()
        inner = [sample for samples, _ in make_loader(Augmented(4)) for sample in samples]
        return int(index), epoch_of_this_batch(), *first, *drawn(), inner


@pytest.mark.parametrize("isolated", [torch.random.fork_rng, isolate_rng])
def test_draws_behind_which_the_generator_is_put_back_are_a_function_of_the_sample(isolated):
    class Isolated(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            with isolated():
                return index, torch.rand(()).item()

    drawn = [
        [sample for batch in make_loader(Isolated(), collate_fn=list, num_workers=n) for sample in batch]
        for n in (0, 1, 2)
    ]
    assert drawn[0] == drawn[1] == drawn[2] and len({number for _, number in drawn[0]}) == 8


def test_a_loader_within_a_dataset_leaves_the_samples_draws_alone():
    whole = batches_of(make_loader(ReadsAnother(5)), 2)
    assert batches_of(make_loader(ReadsAnother(5), num_workers=2), 2) == whole
    assert {sample[1] for samples, _ in whole[2:] for sample in samples} == {1}


class Counts(Augmented):
    seen = 0

    def __getitem__(self, index):
        self.seen += 1
        return self.seen


def test_what_is_not_reached_what_a_dataset_counts():
    own = [list(chain.from_iterable(make_loader(Counts(), num_workers=w, collate_fn=list))) for w in (0, 2)]
    assert own[0] != own[1] and len(set(own[1])) < 23  # the two workers count the same


def test_what_is_not_reached_indices_that_come_again_from_a_sampler_that_does_not_tell():
    class Twice(ShuffledBatchSampler):
        def _batches(self, *where):
            return (batch + batch for batch in super()._batches(*where))

    own = by_sample(batches_of(make_loader(Augmented(4), batch_sampler=Twice(4, 2)), 1))
    assert all(len(times) == 2 and len(set(times)) == 1 for times in own.values())
    wrapped = by_sample(
        batches_of(make_loader(Augmented(4), batch_sampler=ShardedBatchSampler(Twice(4, 2, num_replicas=1, rank=0))), 1)
    )
    assert all(len(set(times)) == 2 for times in wrapped.values())


class OwnGenerator(Augmented):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index):
        return self.rng.random()


def test_what_is_not_reached_a_generator_that_a_dataset_keeps_for_itself():
    own = [list(chain.from_iterable(make_loader(OwnGenerator(), num_workers=w, collate_fn=list))) for w in (0, 2)]
    rng = np.random.default_rng(3)
    assert own[0] == [rng.random() for _ in range(23)] and len(set(own[1])) < 23


def test_a_sized_index_draws_as_its_index():
    schedule = SizeSchedule({0: (8, 3)})
    sized = ResumableDataLoader(
        SizedDataset(Augmented(), draw_at), batch_sampler=ScheduledBatchSampler(23, schedule, seed=4), collate_fn=list
    )
    plain = make_loader(collate_fn=list)
    assert sorted(sample[:-1] for batch in sized for sample in batch) == sorted(s for batch in plain for s in batch)
