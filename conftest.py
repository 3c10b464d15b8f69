"""Settings that the tests and the notebooks need from wherever pytest is started."""

import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.loaded_kernels import LoadedServer, start_forked_server_of_ranks, use_loaded_server
from tests.loaded_plays import LoadedPlays
from tests.time_bound import STACKS, Stacks, fail_with_stacks, hear_sigint

# Kernels, ranks and xdist's workers share the cores: with a thread for each core, all of them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFLIGHT_PROGRESS", "0")  # what a slow machine writes to stderr is no output of a notebook

# The same examples in every run, so that what passed passes again; searches by other seeds have commands of their own.
# An example takes as long as the machine is busy: pytest-timeout ends what hangs.
settings.register_profile("the same in every run", derandomize=True, deadline=None)
settings.load_profile("the same in every run")

ROOT = Path(__file__).parent
SHARE_A_WORKER = re.compile(
    r"[^:]*\.ipynb|tests/test_loaded_(kernels|plays)\.py|tests/test_packaging\.py|tests/workbook/test_refresh\.py|"
    r"tests/preflight/test_faults_are_faults\.py::test_a_fault_of_two_ranks"
)
"""The beginnings of the names of tests that share what is dear: a kernel, a server, a wheel, a project, two ranks."""
LOADED_SERVER = pytest.StashKey[LoadedServer]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run every random case: a few times as many, in minutes")
    parser.addoption("--loaded", action="store_true", help="fork kernels, ranks, plays of processes that have imported")


def pytest_configure(config: pytest.Config) -> None:
    hear_sigint()
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "nbval_sanitize.cfg")
    if config.getoption("--thorough"):
        os.environ["THOROUGH"] = "1"  # read by tests/effort.py, also in xdist's workers
    if config.pluginmanager.hasplugin("nbval"):
        _start_kernels_again()
    if sys.platform == "linux":
        config.stash[STACKS] = Stacks()
    if config.getoption("--loaded") and sys.platform == "linux":
        _start_loaded_kernels(config)


def _start_kernels_again() -> None:
    """Kernels that start at the same time may be given the same port; one of them then dies before it replies."""
    from nbval import kernel

    start = kernel.start_new_kernel

    def start_again(*args: Any, **kwargs: Any) -> Any:
        for _ in range(4):
            with suppress(RuntimeError):
                return start(*args, **kwargs)
        return start(*args, **kwargs)

    kernel.start_new_kernel = start_again


@pytest.hookimpl(optionalhook=True, wrapper=True)  # where pytest-timeout is
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    result = yield
    if settings.method == "signal" and sys.platform == "linux":
        stacks = item.config.stash[STACKS]
        stacks.answer()
        signal.signal(signal.SIGALRM, fail_with_stacks(stacks, settings.timeout))
    return result


def _start_loaded_kernels(config: pytest.Config) -> None:
    """xdist's workers use the server of the process that has started them."""
    if hasattr(config, "workerinput"):
        use_loaded_server(config.workerinput["loaded_kernels"])
        return
    server = LoadedServer()
    config.add_cleanup(server.stop)
    config.stash[LOADED_SERVER] = server
    use_loaded_server(server.address)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is
def pytest_configure_node(node: Any) -> None:
    if LOADED_SERVER in node.config.stash:
        node.workerinput["loaded_kernels"] = node.config.stash[LOADED_SERVER].address


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items and session.config.getoption("--loaded") and sys.platform == "linux":
        # A rank imports the module of its function, with pytest and all: as a fork of this process it has them.
        start_forked_server_of_ranks(session.config.stash[STACKS].descriptor)
        plays = LoadedPlays()
        session.config.add_cleanup(plays.stop)
        from course_lib.timelapse import player

        player.Popen = plays.start  # type: ignore[assignment,misc]


def pytest_collectstart(collector: pytest.Collector) -> None:
    # Warnings and progress bars differ between versions of the libraries: what a cell proves goes to stdout.
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup what has one kernel or fixture shares a worker; other tests go where there is room.

    A mark would not do: xdist writes its groups into names that nbval's cells have not, nor any test of pytest 9.2.
    """
    from xdist.scheduler import LoadGroupScheduling

    class SharedWorkers(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = SHARE_A_WORKER.match(nodeid)
            return together[0] if together else nodeid

    return SharedWorkers(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("this test needs a CUDA device, and torch sees none on this machine", pytrace=False)


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no GPU, however many there are, nor do their ranks; those marked `gpu` and the notebooks do."""
    if not request.node.get_closest_marker("gpu"):
        import torch

        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """A Trainer whose loader cannot start leaves its handler behind: later forks would not end by SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _own_random_numbers() -> None:
    """A test that draws without a seed draws the same in every run, whatever ran before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the global generator is the one to be seeded
    torch.manual_seed(0)
