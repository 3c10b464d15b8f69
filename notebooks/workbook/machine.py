"""The machine that a notebook runs on: which device it computes on, and in which precision."""

from __future__ import annotations

import os

import torch

from course_lib._processes import variables_of_a_job
from course_lib.devices import usable_device


def choose_device() -> torch.device:
    """The GPU if it can be used, else the CPU; in either case without TensorFloat-32.

    A GPU that is there and cannot be used is hidden from the Trainers and ranks of the notebook, so that they agree.
    TF32 rounds what goes into a product to 10 bits: gradients that are equal to 1e-7 would differ by 1e-3.

    What a cluster's job has set in the environment of a kernel inside it is removed: the notebook's Trainers would take
    themselves for the job's ranks.
    """
    for name in variables_of_a_job(os.environ):
        del os.environ[name]
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # for ranks, which start with torch's own settings
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = usable_device()
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return device
