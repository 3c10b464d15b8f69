"""Settings that the tests and the notebooks need from wherever pytest is started."""

import os
from pathlib import Path

import pytest

# Kernels, ranks and xdist's workers share the cores: with a thread for each core, all of them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "nbval_sanitize.cfg")


def pytest_collectstart(collector: pytest.Collector) -> None:
    # Warnings and progress bars differ between versions of the libraries: what a cell proves goes to stdout.
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("this test needs a CUDA device, and torch sees none on this machine", pytrace=False)
