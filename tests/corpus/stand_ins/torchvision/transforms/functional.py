"""The functions of the transforms."""

from torchvision.transforms import Resize, ToTensor

to_tensor = ToTensor()


def resize(image, size, *_, **__):
    return Resize(size)(image)


def equalize(image):
    return image
