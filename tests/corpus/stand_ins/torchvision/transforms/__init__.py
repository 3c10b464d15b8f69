"""Transforms that keep their part of the shapes; what changes values alone does nothing."""

from enum import Enum

import numpy as np
import torch
from PIL import Image
from torch import nn


class InterpolationMode(Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


class Transform:
    """Does nothing to an image."""

    def __init__(self, *arguments, **_):
        self.arguments = arguments

    def __call__(self, image):
        return image


class Compose(Transform):
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor(Transform):
    def __call__(self, image):
        array = np.asarray(image)
        scaled = array.astype(np.float32) / 255 if array.dtype == np.uint8 else array
        return torch.from_numpy(scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1).copy())


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


class Resize(Transform):
    def __init__(self, size, *_, **__):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image):
        if isinstance(image, torch.Tensor):
            return nn.functional.interpolate(image[None], self.size)[0]
        return image.resize(self.size[::-1])


class CenterCrop(Resize):
    pass


class RandomCrop(Resize):
    pass


class RandomResizedCrop(Resize):
    pass


class Pad(Transform):
    def __call__(self, image):
        by = 2 * self.arguments[0]
        return image.resize((image.size[0] + by, image.size[1] + by))


class Lambda(Transform):
    def __call__(self, image):
        return self.arguments[0](image)


class ColorJitter(Transform):
    pass


class GaussianBlur(Transform):
    pass


class RandomApply(Transform):
    pass


class RandomGrayscale(Transform):
    pass


class RandomRotation(Transform):
    pass
