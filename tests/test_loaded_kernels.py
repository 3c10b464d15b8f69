"""Against an ordinary kernel: what a fork of the loaded server sees, how it is interrupted, and when it ends."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client import launcher
from jupyter_client.provisioning import local_provisioner
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, start_new_kernel

from tests.forked_ranks import with_forked_ranks
from tests.loaded_kernels import LoadedKernel, use_loaded_server

pytestmark = pytest.mark.thorough

OWNER = """
import time
from tests.loaded_kernels import LoadedServer
server = LoadedServer()
print(server.process.pid, server.address, flush=True)
time.sleep(600)
"""
SEEN = """
import multiprocessing, os, signal, sys
import matplotlib
for fact in {
    "folder": os.getcwd(), "path": sys.path, "script": sys.argv[0], "arguments": len(sys.argv),
    "environment": sorted(item for item in os.environ.items() if item[0] != "JPY_PARENT_PID"),
    "sigint": signal.getsignal(signal.SIGINT), "sigchld": signal.getsignal(signal.SIGCHLD),
    "group": os.getpid() == os.getpgid(0) == os.getsid(0), "output": os.readlink("/proc/self/fd/2"),
    "tests": {"pytest", "conftest"} & set(sys.modules), "main": sys.modules["__main__"].__dict__ is globals(),
    "start": multiprocessing.get_start_method(), "backend": matplotlib.get_backend(),
}.items():
    print(*fact)
"""
DRAWN = "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(()).item())"
RANKS = """
import os, psutil
from course_lib.launch import run_ranks
servers = [result.value for result in run_ranks(lambda rank: psutil.Process(os.getppid()).ppid(), 2)]
print([psutil.Process(server).ppid() == os.getpid() for server in servers])
"""


@pytest.fixture(scope="module")
def owner():
    """A process that has started a server, its pid and its address."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", OWNER], cwd=root, stdout=subprocess.PIPE, text=True)
    pid, address = process.stdout.readline().split()
    yield process, int(pid), address
    process.kill()
    process.wait()


@pytest.fixture
def start(owner, monkeypatch, tmp_path):
    """Start a kernel, an ordinary or a loaded one; its manager and its client."""
    started = []

    def start_kernel(loaded):
        monkeypatch.setattr(local_provisioner, "launch_kernel", launcher.launch_kernel)
        if loaded:
            use_loaded_server(owner[2])
        options = {"cwd": str(tmp_path), "stderr": subprocess.DEVNULL}
        started.append(start_new_kernel(kernel_name=CURRENT_ENV_KERNEL_NAME, **options))
        return started[-1]

    yield start_kernel
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client, code, at_output=lambda: None):
    """What a cell prints, and the name of its error; `at_output` is called while it runs."""
    printed = []

    def take(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            at_output()

    reply = client.execute_interactive(code, output_hook=take)
    return "".join(printed), reply["content"].get("ename")


def test_a_loaded_kernel_sees_what_an_ordinary_one_sees(start, monkeypatch):
    monkeypatch.setenv("ONE_THING", "more")
    (_, ordinary), (manager, loaded) = start(False), start(True)
    assert isinstance(manager.provisioner.process, LoadedKernel)
    assert run(loaded, SEEN) == run(ordinary, SEEN)


def test_kernels_of_one_server_draw_each_its_own_random_numbers(start):
    drawn = [run(start(True)[1], DRAWN)[0].split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 6


@with_forked_ranks
def test_a_loaded_kernel_has_its_own_server_of_ranks_and_goes_on_after_an_interrupt(start):
    manager, client = start(True)
    assert run(client, RANKS) == ("[True, True]\n", None)
    wait = "import time; print('waits', flush=True); time.sleep(600)"
    assert run(client, wait, at_output=manager.interrupt_kernel) == ("waits\n", "KeyboardInterrupt")
    kernel = psutil.Process(manager.provisioner.process.pid)
    kernel_and_servers = [kernel, *kernel.children(recursive=True)]
    assert run(client, "print(1)") == ("1\n", None) and manager.is_alive()
    client.shutdown()
    assert manager.provisioner.process.wait(60) == 0 and not manager.is_alive()
    assert not psutil.wait_procs(kernel_and_servers, 60)[1]


def test_server_and_kernels_end_with_the_process_that_started_the_server(start, owner):
    process, pid, address = owner
    manager, _ = start(True)
    processes = [psutil.Process(pid), psutil.Process(manager.provisioner.process.pid)]
    process.kill()
    assert not psutil.wait_procs(processes, 60)[1]
    deadline = time.monotonic() + 60
    while Path(address).parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(address).parent.exists()
