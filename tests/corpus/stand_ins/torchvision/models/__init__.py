"""One network of torchvision's, with random weights; the others can be imported, and not called."""

from torchvision.models.resnet import ResNet, resnet18

__all__ = ["ResNet", "resnet18"]


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"torchvision.models.{name} has no stand-in")

    return missing
