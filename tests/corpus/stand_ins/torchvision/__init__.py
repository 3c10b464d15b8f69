"""The part of torchvision that training scripts ask for, over generated images of the true number, size and classes."""

from torchvision import datasets, models, transforms, utils

__version__ = "0.28.0"
__all__ = ["datasets", "models", "transforms", "utils"]
