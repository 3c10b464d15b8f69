"""Data sets of random images."""

import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SHAPES = {
    "MNIST": (60_000, 10_000, (28, 28), 10),
    "FashionMNIST": (60_000, 10_000, (28, 28), 10),
    "CIFAR10": (50_000, 10_000, (32, 32, 3), 10),
    "CIFAR100": (50_000, 10_000, (32, 32, 3), 100),
    "SVHN": (73_257, 26_032, (32, 32, 3), 10),
    "STL10": (5_000, 8_000, (96, 96, 3), 10),
}
"""By data set: samples for training, for tests, the shape of an image, classes."""
HELD = 256
"""Images that are generated; the others repeat them."""


class Images(Dataset):
    """One of the data sets: images by PIL, as torchvision gives them."""

    name = ""

    def __init__(self, root="", train=True, transform=None, target_transform=None, download=False, split=None, **_):
        training, test, shape, classes = SHAPES[self.name]
        train = train if split is None else split != "test"
        if split == "unlabeled":
            training = 100_000
        self.samples, self.train = (training if train else test), train
        random = np.random.default_rng(int(train))
        self.held = random.integers(0, 256, (HELD, *shape), dtype=np.uint8)
        self.targets = random.integers(0, classes, self.samples)
        self.is_grey = len(shape) == 2
        self.targets = torch.from_numpy(self.targets) if self.is_grey else self.targets.tolist()
        self.classes = [str(label) for label in range(classes)]
        self.transform, self.target_transform = transform, target_transform

    @property
    def data(self):
        """All images in one array."""
        images = self.held[np.arange(self.samples) % HELD]
        return torch.from_numpy(images) if self.is_grey else images

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image, label = Image.fromarray(self.held[int(index) % HELD]), int(self.targets[int(index)])
        if self.target_transform is not None:
            label = self.target_transform(label)
        return (image if self.transform is None else self.transform(image)), label


MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN, STL10 = (type(name, (Images,), {"name": name}) for name in SHAPES)


class FakeData(Dataset):
    """torchvision's own data set of random images."""

    def __init__(self, size=1_000, image_size=(3, 224, 224), num_classes=10, transform=None, target_transform=None):
        self.size, self.image_size, self.num_classes, self.transform = size, image_size, num_classes, transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        random = np.random.default_rng(int(index))
        channels, height, width = self.image_size
        image = Image.fromarray(random.integers(0, 256, (height, width, channels), dtype=np.uint8))
        label = int(random.integers(self.num_classes))
        return (image if self.transform is None else self.transform(image)), label


class ImageFolder(Dataset):
    """Images in folders named by their classes."""

    def __init__(self, root, transform=None, **_):
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(root, name, file), label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(os.path.join(root, name)))
        ]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        image = Image.open(path).convert("RGB")
        return (image if self.transform is None else self.transform(image)), label
