"""Generators that a dataset, its transforms or their code hold: what they draw is a function of the sample, too."""

import dataclasses
import functools
import random
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from course_lib.callbacks import ExactResume
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader, epoch_of_this_batch
from course_lib.samplers import ShuffledBatchSampler
from tests.callbacks.test_in_no_checkpoint import AT_EPOCHS_ENDS, fit
from tests.callbacks.test_own_code import Plain, state_of
from tests.callbacks.whole_run import same

OF_THE_FILE = np.random.default_rng(3)


def drawn_by_a_function():
    return OF_THE_FILE.random()


class Noise:
    """As a transform that has a generator of its own."""

    def __init__(self, seed=3):
        self.rng = np.random.default_rng(seed)

    def __call__(self):
        return self.rng.random()


class Sums:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self):
        return sum(transform() for transform in self.transforms)


TRANSFORM = Sums(Noise(), Sums(Noise(4)))


class Samples(Dataset):
    """Each with what it draws."""

    def __init__(self, n=13):
        self.n = n
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)

    def __len__(self):
        return self.n

    def draw(self):
        raise NotImplementedError

    def __getitem__(self, index):
        return self.x[index] * self.draw(), self.y[index], index


class Attribute(Samples):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def draw(self):
        return self.rng.random()


class ThreeKinds(Samples):
    def __init__(self):
        super().__init__()
        self.held = {"numpy": np.random.RandomState(3), "python": [random.Random(4)]}
        self.torch = SimpleNamespace(generator=torch.Generator().manual_seed(2))

    def draw(self):
        of_torch = torch.rand((), generator=self.torch.generator).item()
        return self.held["numpy"].rand() + self.held["python"][0].random() + of_torch


class OfTheClass(Samples):
    rng = np.random.default_rng(3)

    def draw(self):
        return self.rng.random()


class OfTheFile(Samples):
    def draw(self):
        return OF_THE_FILE.random()


class ByAFunction(Samples):
    @staticmethod
    def other():
        return drawn_by_a_function()

    def draw(self):
        return self.other()


class InAClosure(Samples):
    def __init__(self):
        super().__init__()
        own = random.Random(3)
        self.draw = lambda: own.random()


class AMethodOfIt(Samples):
    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(3).random


class APartial(Samples):
    def __init__(self):
        super().__init__()
        self.draw = functools.partial(lambda rng: rng.random(), np.random.default_rng(3))


class Transforms(Samples):
    def __init__(self):
        super().__init__()
        self.draw = Sums(Noise(), Sums(Noise(4)))


class TransformsOfTheFile(Samples):
    def draw(self):
        return TRANSFORM()


class WhenItIsAsked(Samples):
    rng = None

    def draw(self):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return self.rng.random()


class AClassOfTheFile:
    generator = np.random.default_rng(3)


class ByAClass(Samples):
    transform = Noise()

    def draw(self, rng=np.random.default_rng(5)):  # noqa: B008
        return self.transform() + AClassOfTheFile.generator.random() + rng.random()


@dataclasses.dataclass(slots=True)
class InASlot:
    generator: np.random.Generator


class Slots(Samples):
    def __init__(self):
        super().__init__()
        self.records = [{f"{k}": k for k in range(12)} for _ in range(900)]
        self.held = InASlot(np.random.default_rng(3))
        self.of_another_kind = np.random.RandomState(np.random.PCG64(3))

    def draw(self):
        return self.held.generator.random() + self.of_another_kind.rand()


def within_others():
    return Subset(ConcatDataset([Attribute(), Transforms()]), list(range(5, 24)))


KINDS = (Attribute, ThreeKinds, OfTheClass, OfTheFile, ByAFunction, InAClosure, AMethodOfIt, APartial)
KINDS += (Transforms, TransformsOfTheFile, WhenItIsAsked, ByAClass, Slots, within_others)
PICKLED = (Attribute, OfTheFile, ByAFunction, Transforms, TransformsOfTheFile, WhenItIsAsked)


def numbers_of(loader, epochs=2):
    return [x.tolist() for _ in range(epochs) for x, _, _ in loader]


def make_loader(dataset, **arguments):
    return ResumableDataLoader(dataset, batch_size=3, shuffle=True, seed=4, **arguments)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_draws_alike_with_any_workers_and_after_a_kill(kind):
    expected = numbers_of(make_loader(kind()))
    assert len({tuple(row) for batch in expected for row in batch}) == sum(map(len, expected))  # none comes twice
    assert numbers_of(make_loader(kind(), num_workers=2)) == expected
    killed = make_loader(kind())
    iterator = iter(killed)
    begun = [next(iterator)[0].tolist() for _ in range(2)]
    again = make_loader(kind(), num_workers=1, persistent_workers=True)
    again.load_state_dict(killed.state_dict())
    assert begun + numbers_of(again) == expected


@pytest.mark.parametrize("kind", [Attribute, Transforms, WhenItIsAsked])
def test_a_sample_draws_alike_on_any_ranks(kind):
    def by_sample(ranks):
        samplers = [ShuffledBatchSampler(13, 3, num_replicas=ranks, rank=rank, seed=4) for rank in range(ranks)]
        loaders = [ResumableDataLoader(kind(), batch_sampler=sampler) for sampler in samplers]
        batches = [(epoch, *batch) for loader in loaders for epoch in range(2) for batch in loader]
        return {
            (epoch, int(i)): row.tolist() for epoch, x, _, index in batches for i, row in zip(index, x, strict=True)
        }

    assert by_sample(1) == by_sample(2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", PICKLED)
def test_also_in_a_worker_that_is_spawned(kind):
    spawned = make_loader(kind(), num_workers=1, multiprocessing_context="spawn")
    assert numbers_of(spawned, epochs=1) == numbers_of(make_loader(kind()), epochs=1)


def test_of_their_seeds_the_samplers_decides():
    def numbers(seed, own):
        dataset = Attribute()
        dataset.rng = np.random.default_rng(own)
        return numbers_of(ResumableDataLoader(dataset, batch_size=3, seed=seed), epochs=1)

    assert numbers(4, own=3) == numbers(4, own=5) != numbers(5, own=3)


def test_those_that_begin_alike_draw_alike_and_others_do_not():
    class Pairs(Samples):
        def __init__(self, *seeds):
            super().__init__()
            self.transforms = [Noise(seed) for seed in seeds]

        def __getitem__(self, index):
            return torch.tensor([transform() for transform in self.transforms]), 0, index

    alike, apart = (
        [row for batch in numbers_of(make_loader(Pairs(*seeds))) for row in batch] for seeds in ((3, 3), (3, 4))
    )
    assert all(image == mask for image, mask in alike)
    assert all(one != other for one, other in apart)


def test_they_stand_afterwards_where_they_stood_and_the_order_is_another_matter():
    dataset = Attribute()
    expected = np.random.default_rng(3).random()
    numbers_of(make_loader(dataset))
    assert dataset.rng.random() == expected


def test_one_that_is_made_for_each_sample_stays_a_function_of_it():
    class Remade(Samples):
        def draw(self):
            self.rng = np.random.default_rng([7, epoch_of_this_batch()])
            return self.rng.random()

    first, second = (np.random.default_rng([7, epoch]).random() for epoch in range(2))
    dataset = Remade()
    for batch, number in zip(make_loader(dataset), [first] * 5, strict=True):
        assert torch.equal(batch[0], dataset.x[batch[2]] * number)
    loader = make_loader(dataset)
    list(loader)
    assert all(torch.equal(x, dataset.x[index] * second) for x, _, index in loader)


class ReadWhenAsked(Mapping):
    """As one does that opens files."""

    def __getitem__(self, key):
        raise AssertionError("it was read")

    __len__ = __iter__ = keys = values = __getitem__


def test_where_there_are_very_many_they_are_left_alone():
    class OneForEach(Samples):
        def __init__(self):
            super().__init__(40)
            self.generators = [np.random.default_rng(seed) for seed in range(40)]

        def __getitem__(self, index):
            return torch.tensor([self.generators[index].random()]), 0, index

    expected = [np.random.default_rng(seed).random() for seed in range(40)]
    loader = ResumableDataLoader(OneForEach(), batch_size=4)
    assert [row[0] for batch in numbers_of(loader, epochs=1) for row in batch] == pytest.approx(expected)


def test_a_generator_that_an_order_goes_by_is_left_alone(tmp_path):
    def order(*callbacks):
        module = Plain()
        module.generator = torch.Generator().manual_seed(7)
        data = DataLoader(Attribute(), 2, shuffle=True, generator=module.generator)
        return fit(tmp_path, *callbacks, module=module, data=data, saves=AT_EPOCHS_ENDS).trained

    assert order(ExactResume()) == order()


def test_the_search_reads_nothing():
    dataset = Attribute()
    dataset.files = ReadWhenAsked(), type("Files", (dict,), {"values": ReadWhenAsked.__getitem__})(a=1)
    dataset.lazy = type(
        "Lazy", (), {"__getattr__": ReadWhenAsked.__getitem__, "of": property(ReadWhenAsked.__getitem__)}
    )()

    class Gone(random.Random):
        def getstate(self):
            raise NotImplementedError

    gone = Noise()
    dataset.proxies = weakref.proxy(gone), Gone(), type("Odd", (), {"__dict__": property(lambda self: None)})()
    del gone
    dataset.slots = type("Slots", (), {"__slots__": (), "__getattr__": ReadWhenAsked.__getitem__})()
    assert numbers_of(make_loader(dataset)) == numbers_of(make_loader(Attribute()))


@pytest.mark.parametrize("kind", [Attribute, OfTheFile, Transforms])
@pytest.mark.parametrize("make", [lambda data: DataLoader(data, 2, shuffle=True), lambda data: MiniDataLoader(data, 2)])
def test_another_loaders_samples_draw_on_from_an_epochs_end(kind, make, tmp_path):
    def fit_anew(folder, checkpoint=None):
        OF_THE_FILE.bit_generator.state = np.random.default_rng(3).bit_generator.state  # as in a new process
        return fit(folder, ExactResume(), data=make(kind()), checkpoint=checkpoint, max_epochs=3, saves=AT_EPOCHS_ENDS)

    whole = fit_anew(tmp_path / "whole")
    for path in sorted((tmp_path / "whole").glob("*.ckpt"))[:-1]:
        assert same(state_of(whole), state_of(fit_anew(tmp_path / "on", path))), path.name
