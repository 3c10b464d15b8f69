"""Settings that the tests and the notebooks need from wherever pytest is started.

Two tiers. What a newcomer waits for carries no mark: each promise once, each message once, in at most a third of a
second. Searches, catalogues, waits, kills and further parameters are marked `thorough`, and run by
`pytest --thorough`; `thorough(but=2)` leaves two of a test's parameters, the first and the last, to every run.
"""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import left_behind
from tests.loaded_kernels import LoadedServer, start_forked_server_of_ranks, use_loaded_server

# Kernels, ranks and xdist's workers share the cores: with a thread for each core, all of them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("REHEARSE_PROGRESS", "0")  # what a slow machine writes to stderr is no output of a notebook

# The same examples in every run, so that what passed passes again; searches by other seeds have commands of their own.
# An example takes as long as the machine is busy: pytest-timeout ends what hangs.
settings.register_profile("quick", derandomize=True, deadline=None)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=500)
settings.load_profile("quick")

ROOT = Path(__file__).parent
LOADED = pytest.StashKey[bool]()
LOADED_SERVER = pytest.StashKey[LoadedServer]()
BEFORE = pytest.StashKey[set[str]]()
"""The files of the tree ahead of the run; LEFT: those that it has added."""
LEFT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run what is marked `thorough`, and every random case")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job ignores what tests send
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "nbval_sanitize.cfg")
    if config.getoption("--thorough"):
        settings.load_profile("thorough")
        os.environ["THOROUGH"] = "1"  # read by tests/effort.py, also in the processes that tests start
    if config.pluginmanager.hasplugin("nbval"):
        _start_kernels_again()
    if not config.getoption("--thorough") and sys.platform == "linux" and "REHEARSED_START_METHOD" not in os.environ:
        _start_loaded_kernels(config)
    if not hasattr(config, "workerinput"):
        config.stash[BEFORE] = left_behind.files(ROOT)


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


def _start_loaded_kernels(config: pytest.Config) -> None:
    """xdist's workers use the server of the process that has started them."""
    config.stash[LOADED] = True
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


def pytest_collectstart(collector: pytest.Collector) -> None:
    # Warnings and progress bars differ between versions of the libraries: what a cell proves goes to stdout.
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)


def pytest_collection_finish(session: pytest.Session) -> None:
    # A rank imports the module of its function, with pytest and all: as a fork of this process it has them.
    if session.items and LOADED in session.config.stash:
        start_forked_server_of_ranks()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --thorough, leave out what is marked so; what the command line names by `::` runs all the same."""
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return
    of_each_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_each_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for of_one in of_each_test.values() for item in _thorough_ones(of_one)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _thorough_ones(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of one test's items, those that are marked; `but` of them, evenly spread from the first to the last, are kept."""
    marks = [item.get_closest_marker("thorough") for item in items]
    marked = [item for item, mark in zip(items, marks, strict=True) if mark is not None]
    but = max((mark.kwargs.get("but", 0) for mark in marks if mark is not None), default=0)
    kept = {round(number * (len(marked) - 1) / max(but - 1, 1)) for number in range(but)}
    return [item for number, item in enumerate(marked) if number not in kept]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of the tests leaves the tree as it was, or fails."""
    if BEFORE in session.config.stash:
        left = sorted(left_behind.files(ROOT) - session.config.stash[BEFORE])
        if left:
            session.config.stash[LEFT] = left
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if LEFT in config.stash:
        terminalreporter.section("left behind", red=True)
        terminalreporter.line("a test or a cell wrote into the tree: " + ", ".join(config.stash[LEFT]))


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
