"""ResumableDataLoader with the augmentations of other libraries, each of which draws in its own way.

Those that keep generators for themselves are seeded for each sample, by a number of a global one.
"""

import random

import albumentations
import kornia.augmentation
import monai.transforms
import numpy as np
import pytest
import timm.data
import torch
import torchvision.transforms
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from course_lib.resume import ResumableDataLoader

IMAGES = np.random.default_rng(0).integers(0, 255, (13, 32, 32, 3), dtype=np.uint8)


def as_tensor(number):
    return torch.from_numpy(IMAGES[number]).permute(2, 0, 1)


def by_torchvision_v1():
    """By torch's generator."""
    names = torchvision.transforms
    blurs = names.RandomApply([names.GaussianBlur(3)])
    augment = names.Compose([names.RandAugment(), names.RandomResizedCrop(24), blurs])
    return lambda number: augment(as_tensor(number))


def by_torchvision_v2():
    colours = [v2.TrivialAugmentWide(), v2.ColorJitter(0.4, 0.4), v2.ToDtype(torch.float32), v2.GaussianNoise()]
    augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(24), *colours, v2.RandomErasing(p=1)])
    return lambda number: augment(as_tensor(number))


def by_timm():
    """By Python's, NumPy's and torch's."""
    erases = dict(re_prob=0.5, re_mode="pixel")
    augment = timm.data.create_transform(32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", **erases)
    return lambda number: augment(Image.fromarray(IMAGES[number]))


def by_albumentations():
    """By two generators of its own, which its transforms share."""
    names = albumentations
    one = names.OneOf([names.Blur(p=1), names.ColorJitter(p=1)], p=1)
    parts = [names.HorizontalFlip(p=0.5), names.RandomCrop(24, 24), names.GaussNoise(p=1), one]
    augment = names.Compose(parts)

    def seeded(number):
        augment.set_random_seed(random.getrandbits(32))
        return torch.from_numpy(augment(image=IMAGES[number])["image"])

    return seeded


def by_monai():
    """By a RandomState of each transform's own."""
    names = monai.transforms
    crops = names.RandSpatialCrop((24, 24), random_size=False)
    augment = names.Compose([names.RandFlip(0.5), names.Compose([names.RandGaussianNoise(prob=1), crops])])

    def seeded(number):
        augment.set_random_state(random.getrandbits(32))
        return torch.as_tensor(augment(as_tensor(number).float()))

    return seeded


def by_kornia():
    """By modules, and so by torch's; which of them, by Python's."""
    names = kornia.augmentation
    parts = [names.RandomHorizontalFlip(), names.RandomGaussianNoise(p=1.0), names.RandomAffine(20.0)]
    augment = names.AugmentationSequential(*parts, random_apply=2, data_keys=["input"])
    return lambda number: augment(as_tensor(number).float()[None] / 255)[0]


AUGMENTATIONS = {
    "torchvision, v1": by_torchvision_v1,
    "torchvision, v2": by_torchvision_v2,
    "timm": by_timm,
    "albumentations": by_albumentations,
    "MONAI": by_monai,
    "kornia": by_kornia,
}


class Augmented(Dataset):
    def __init__(self, augment):
        self.augment = augment

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, number):
        return number, self.augment(number)


def made(name, num_workers, seed):
    """As another process makes it: all three global generators stand elsewhere."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # noqa: NPY002
    samples = Augmented(AUGMENTATIONS[name]())
    return ResumableDataLoader(samples, batch_size=3, shuffle=True, seed=3, num_workers=num_workers)


def read(loader, batches=None):
    """Each image by its number, of the rest of an epoch or of so many batches."""
    seen = {}
    for count, (numbers, images) in enumerate(loader, 1):
        seen |= zip(numbers.tolist(), images.clone(), strict=True)
        if count == batches:
            break
    return seen


def same(images, others):
    return images.keys() == others.keys() and all(torch.equal(images[number], others[number]) for number in images)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_is_augmented_alike_with_any_workers_and_after_kills(name):
    loader = made(name, num_workers=0, seed=1)
    first, second = read(loader), read(loader)
    assert not same(first, second)
    for num_workers in (1, 2):
        loader = made(name, num_workers, seed=2 + num_workers)
        assert same(read(loader), first) and same(read(loader), second)
    stopped, state = {}, None
    for life, (num_workers, batches) in enumerate([(0, 2), (2, 1), (0, None)]):
        loader = made(name, num_workers, seed=10 + life)
        if state is not None:
            loader.load_state_dict(state)
        stopped |= read(loader, batches)
        state = loader.state_dict()
    assert same(stopped, first)
