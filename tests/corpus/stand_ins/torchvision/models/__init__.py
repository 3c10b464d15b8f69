"""One network of torchvision's, with random weights."""

from torchvision.models.resnet import ResNet, resnet18

__all__ = ["ResNet", "resnet18"]
