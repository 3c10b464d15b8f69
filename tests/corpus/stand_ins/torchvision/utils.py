"""Grids of images."""

import numpy as np
from PIL import Image


def make_grid(tensor, *_, **__):
    """The first image, in three channels."""
    first = tensor[0]
    return first.reshape(-1, *first.shape[-2:])[:1].expand(3, -1, -1)


def save_image(tensor, path, *_, **__):
    """Write the first of them, in grey."""
    array = tensor.detach().reshape(-1, *tensor.shape[-2:])[0].clamp(0, 1).numpy()
    Image.fromarray((255 * array).astype(np.uint8)).save(path)
