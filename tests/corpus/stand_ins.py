"""Stand-ins for what a public script imports and this project does not have: generated data of the same shapes.

``torchvision`` gets its data sets (random images, of the true number, size and classes), the transforms that scripts
ask for, and a ResNet-18. Any other module that is missing becomes one whose every name does nothing.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import urllib.error
import urllib.request
from unittest.mock import MagicMock

import numpy as np
import torch
from PIL import Image
from torch import nn
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
        self.data = random.integers(0, 256, (HELD, *shape), dtype=np.uint8)
        if len(shape) == 2:
            self.data = torch.from_numpy(self.data)
        self.targets = random.integers(0, classes, self.samples).tolist()
        self.classes = [str(label) for label in range(classes)]
        self.transform, self.target_transform = transform, target_transform

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image = Image.fromarray(np.asarray(self.data[int(index) % HELD]))
        label = self.targets[index]
        return (image if self.transform is None else self.transform(image)), label


class Transform:
    """Does its part of a transform, and nothing where that does not change the shape."""

    def __init__(self, *arguments, **_):
        self.arguments = arguments

    def __call__(self, image):
        return image


class Compose(Transform):
    def __call__(self, image):
        for transform in self.arguments[0]:
            image = transform(image)
        return image


class ToTensor(Transform):
    def __call__(self, image):
        array = np.asarray(image, dtype=np.float32) / 255
        return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


class Normalize(Transform):
    def __init__(self, mean, std, **_):
        self.mean, self.std = (torch.as_tensor(value, dtype=torch.float32).view(-1, 1, 1) for value in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class RandomHorizontalFlip(Transform):
    def __call__(self, image):
        if torch.rand(()) < 0.5:
            return image
        return image.flip(-1) if isinstance(image, torch.Tensor) else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class Resized(Transform):
    def __init__(self, size, **_):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image):
        if isinstance(image, torch.Tensor):
            return nn.functional.interpolate(image[None], self.size)[0]
        return image.resize(self.size[::-1])


class Lambda(Transform):
    def __call__(self, image):
        return self.arguments[0](image)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.downsample(x))


class ResNet18(nn.Module):
    """The layers of a ResNet-18, by the names that scripts replace some of them by."""

    def __init__(self, num_classes=1_000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        for number, (inputs, outputs, stride) in enumerate(sizes, 1):
            layer = nn.Sequential(Residual(inputs, outputs, stride), Residual(outputs, outputs, 1))
            setattr(self, f"layer{number}", layer)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(weights=None, pretrained=False, num_classes=1_000, **_):
    return ResNet18(num_classes)


def make_grid(images, *_, **__):
    return images[0] if isinstance(images, list) else images.reshape(-1, *images.shape[-2:])[:3]


def _module(name, **names):
    module = types.ModuleType(name)
    vars(module).update(names, __getattr__=lambda other: MagicMock(name=f"{name}.{other}"))
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module that nobody else has found."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _module(spec.name)

    def exec_module(self, module):
        """It has all its names."""


def no_network(url, *_, **__):
    raise urllib.error.HTTPError(url, 404, "there is no network here", None, None)


def install():
    """Have them imported from now on."""
    transforms = dict.fromkeys(("ColorJitter", "RandomGrayscale", "GaussianBlur", "RandomApply"), Transform)
    transforms |= {cls.__name__: cls for cls in (Compose, ToTensor, Normalize, RandomHorizontalFlip, Lambda)}
    transforms |= dict.fromkeys(("Resize", "RandomResizedCrop", "RandomCrop", "CenterCrop"), Resized)
    transforms["RandomCrop"] = Transform
    functional = _module("torchvision.transforms.functional", equalize=lambda image: image)
    vision = _module("torchvision", __version__="0.28")
    data_sets = {name: type(name, (Images,), {"name": name}) for name in SHAPES}
    vision.datasets = _module("torchvision.datasets", **data_sets)
    vision.transforms = _module("torchvision.transforms", functional=functional, **transforms)
    vision.utils = _module("torchvision.utils", make_grid=make_grid)
    vision.models = _module("torchvision.models", resnet18=resnet18)
    _module("torchvision.models.resnet", resnet18=resnet18)
    sys.meta_path.append(Missing({"seaborn", "IPython", "pandas", "tabulate", "tqdm", "kornia", "torch_geometric"}))
    urllib.request.urlretrieve = no_network
