"""Ranks for real: every way a call can end, and what is left behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankError, RankTimeout, caller, run_ranks, server
from course_lib.launch.rank import FORKS_MAY_HANG, REST_SECONDS
from tests import effort
from tests.forked_ranks import with_forked_ranks


class Pair:
    def __init__(self, rank):
        self.rank = rank


def test_ranks_share_a_group_and_return_in_order():
    def total(rank, weight):
        x = torch.tensor([float(weight * rank)])
        dist.all_reduce(x)
        return x.item(), dist.get_rank(), dist.get_world_size(), dist.get_backend()

    results = run_ranks(total, 3, args=(10,), backend="gloo")
    assert [r.value for r in results] == [(30.0, rank, 3, "gloo") for rank in range(3)]
    assert [r.rank for r in results] == [0, 1, 2]
    assert all(r.seconds > 0 for r in results)


def test_local_functions_and_classes_travel_both_ways():
    class Local(Pair):
        pass

    def make(rank):
        return Local(rank)

    values = [r.value for r in run_ranks(make)]
    assert [type(v) is Local for v in values] == [True, True]
    assert [v.rank for v in values] == [0, 1]


def test_a_function_that_sets_what_torch_keeps_in_a_module_of_its_own_class_travels():
    def set_cudnn(rank):
        torch.backends.cudnn.benchmark = rank == 1
        return torch.backends.cudnn.benchmark

    assert type(torch.backends.cudnn) is not type(torch)
    assert [r.value for r in run_ranks(set_cudnn)] == [False, True]


def test_output_of_python_and_of_native_code_is_kept():
    def talk(rank):
        print("python", rank)
        os.write(1, b"native\n")
        os.write(2, b"error\n")

    results = run_ranks(talk)
    assert [r.stdout for r in results] == ["python 0\nnative\n", "python 1\nnative\n"]
    assert [r.stderr for r in results] == ["error\n"] * 2


def test_ranks_see_the_callers_environment_folder_and_path(monkeypatch, tmp_path):
    def look(rank):
        import helper_module

        return (
            os.environ["MARK"],
            os.getcwd(),
            helper_module.NAME,
            os.environ["WORLD_SIZE"],
            os.environ["RANK"],
        )

    (tmp_path / "helper_module.py").write_text("NAME = 'found'")
    monkeypatch.setenv("MARK", "set after the server started")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = [r.value for r in run_ranks(look)]
    assert values == [("set after the server started", str(tmp_path), "found", "2", str(rank)) for rank in range(2)]


OUTER_JOB = {
    "torch": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "4"},
    "Lightning": {"PL_GLOBAL_SEED": "7", "PL_SEED_WORKERS": "1", "LT_DEVICES": "4"},
    "SLURM": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_JOB_NAME": "train"},
    "MPI": {"OMPI_COMM_WORLD_RANK": "5", "PMI_RANK": "5", "PMIX_RANK": "5"},
    "LSF": {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "/none", "JSM_NAMESPACE_RANK": "5"},
    "Kubeflow": {"KUBERNETES_PORT": "tcp://10.0.0.1:443"},
    "accelerate": {"ACCELERATE_USE_FSDP": "true"},
}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("family", OUTER_JOB)
def test_ranks_see_nothing_of_the_job_that_the_caller_runs_in(family, monkeypatch):
    def look(rank):
        return dict(os.environ), dist.get_rank(), dist.get_world_size()

    for name in [name for variables in OUTER_JOB.values() for name in variables]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GROUP", "a name that only looks like one of them")
    without = [result.value for result in run_ranks(look)]
    for name, value in OUTER_JOB[family].items():
        monkeypatch.setenv(name, value)
    inside = [result.value for result in run_ranks(look)]
    for (seen, *own), (seen_without, *own_without) in zip(inside, without, strict=True):
        assert own == own_without
        assert {**seen, "MASTER_PORT": ""} == {**seen_without, "MASTER_PORT": ""}
    assert inside[1][0]["RANK"] == "1" and inside[1][0]["TORCHELASTIC_RUN_ID"] == "run_ranks"


def test_a_trainer_in_a_rank_is_no_part_of_the_callers_job(monkeypatch):
    def fit(rank):
        from tests.trainer_oracle import count_real_fit

        return count_real_fit(33, 8, max_epochs=1, devices=2, strategy="ddp").totals, os.environ.get("PL_GLOBAL_SEED")

    for variables in OUTER_JOB.values():
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    assert [r.value for r in run_ranks(fit)] == [((3, 1, 3), None)] * 2


def test_works_after_the_caller_used_openmp():
    x = torch.randn(600, 600)
    (x @ x).sum().item()
    assert [r.value for r in run_ranks(lambda rank: (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item())] == [
        600.0**3
    ] * 2


@pytest.mark.thorough
def test_large_arguments_and_values_pass():
    big = torch.arange(2_000_000)
    results = run_ranks(lambda rank, x: x + rank, args=(big,))
    assert all(torch.equal(r.value, big + r.rank) for r in results)


def test_one_rank_is_a_group_too():
    assert run_ranks(lambda rank: dist.get_world_size(), 1)[0].value == 1


def test_a_rank_may_use_dataloader_workers_and_leaves_none():
    def load(rank):
        loader = torch.utils.data.DataLoader(range(8), 4, num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        first = next(iterator).tolist()
        globals()["kept"] = iterator
        return first, [child.pid for child in psutil.Process().children(recursive=True)]

    for result in run_ranks(load):
        first, workers = result.value
        assert first == [0, 1, 2, 3]
        assert len(workers) >= 2
        left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(left, timeout=10)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_lightning_and_fabric_join_the_group():
    def fit(rank):
        import lightning

        from tests.trainer_oracle import count_real_fit

        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        total = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item()
        return (
            total,
            fabric.global_rank,
            count_real_fit(33, 8, max_epochs=1, devices=2, strategy="ddp").totals,
        )

    assert [r.value for r in run_ranks(fit)] == [(1.0, 0, (3, 1, 3)), (1.0, 1, (3, 1, 3))]


def test_an_exception_is_reported_first_with_where_the_others_were():
    def step(rank):
        if rank == 1:
            raise KeyError("bad batch")
        dist.barrier()

    with pytest.raises(RankError) as caught:
        run_ranks(step, 3)
    error = caught.value
    assert not isinstance(error, RankTimeout)
    assert error.summary == "rank 1 of 3 failed; first: rank 1 raised: KeyError: 'bad batch'"
    assert [r.rank for r in error.reports] == [1, 0, 2]
    assert [r.state for r in error.reports] == ["raised", "was running", "was running"]
    assert 'raise KeyError("bad batch")' in error.reports[0].details
    assert error.reports[0].functions == ("step",)
    assert error.reports[1].functions[0] == "step" and "barrier" in error.reports[1].functions
    assert isinstance(error.__cause__, KeyError)
    assert "run_ranks" not in str(error) and "rank_main" not in str(error)


def test_all_failures_of_one_moment_are_reported():
    def fail(rank):
        dist.barrier()
        raise ValueError(f"rank {rank} fails")

    with pytest.raises(RankError) as caught:
        run_ranks(fail)
    assert sorted(r.error for r in caught.value.reports) == [
        "ValueError: rank 0 fails",
        "ValueError: rank 1 fails",
    ]


@pytest.mark.thorough
def test_the_first_cause_stands_first_though_another_rank_complains():
    def fail(rank):
        if rank == 1:
            raise ValueError("the cause")
        try:
            dist.barrier()
        finally:
            raise RuntimeError("a consequence")

    def fail_later(rank):
        if rank == 0:
            time.sleep(0.2)
            raise RuntimeError("later")
        raise ValueError("the cause")

    for fn in (fail, fail_later):
        with pytest.raises(RankError) as caught:
            run_ranks(fn)
        assert caught.value.reports[0].error == "ValueError: the cause"


def test_an_exception_that_cannot_travel_still_reports():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__("odd")
            self.lock = threading.Lock()

    def fail(rank):
        raise Odd(1, 2)

    with pytest.raises(RankError, match="Odd: odd") as caught:
        run_ranks(fail, 1)
    assert caught.value.__cause__ is None


def test_chained_exceptions_are_shown_whole():
    def fail(rank):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RankError) as caught:
        run_ranks(fail, 1)
    assert "ZeroDivisionError" in str(caught.value) and "direct cause" in str(caught.value)


@pytest.mark.parametrize("exit_call", ["sys.exit(3)", "sys.exit(0)"])
def test_sys_exit_is_a_failure(exit_call):
    with pytest.raises(RankError, match="SystemExit"):
        run_ranks(lambda rank: exec(f"import sys; {exit_call}"), 1)


def test_a_silent_exit_is_a_failure():
    def leave(rank):
        if rank == 1:
            os._exit(0)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 exited with code 0"):
        run_ranks(leave)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_with_its_signal_and_last_words(number):
    def die(rank):
        print("alive", file=sys.stderr)
        if rank == 1:
            os.kill(os.getpid(), number)
        dist.barrier()

    with pytest.raises(RankError) as caught:
        run_ranks(die)
    first = caught.value.reports[0]
    assert (first.rank, first.state) == (1, f"was killed by {signal.Signals(number).name}")
    assert "alive" in first.stderr and "alive" in str(caught.value)


def test_a_deadlock_is_a_report_with_both_stacks():
    def step(rank):
        if rank == 0:
            dist.barrier()
        else:
            wait_for_ever()

    def wait_for_ever():
        threading.Event().wait()

    with pytest.raises(RankTimeout) as caught:
        run_ranks(step, timeout=0.5)
    zero, one = caught.value.reports
    assert caught.value.summary == "ranks 0, 1 of 2 did not return within 0.5 s"
    assert zero.functions[0] == "step" and "barrier" in zero.functions
    assert one.functions[:2] == ("step", "wait_for_ever")
    assert "threading.Event().wait()" in one.details
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.skipif(not FORKS_MAY_HANG, reason="a fork of this Python does not hang, so nothing waits for it")
def test_each_fork_of_a_rank_gives_threads_at_the_end_of_a_collective_their_time():
    def fork(rank):
        before = time.monotonic()
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return time.monotonic() - before

    assert run_ranks(fork, 1)[0].value >= REST_SECONDS


@pytest.mark.thorough
def test_a_timeout_names_the_late_ranks_alone():
    with pytest.raises(RankTimeout) as caught:
        run_ranks(lambda rank: time.sleep(60 * rank), timeout=0.5)
    assert caught.value.summary.startswith("rank 1 of 2")
    assert [r.state for r in caught.value.reports] == ["had returned", "was running"]


@pytest.mark.thorough
def test_a_busy_loop_is_reported_as_well():
    def spin(rank):
        while True:
            pass

    with pytest.raises(RankTimeout, match="while True"):
        run_ranks(spin, 1, timeout=0.5)


@pytest.mark.thorough
def test_a_stopped_rank_is_killed_and_said_to_be_silent():
    with pytest.raises(RankTimeout, match="It did not answer: it is stopped"):
        run_ranks(lambda rank: os.kill(os.getpid(), signal.SIGSTOP), 1, timeout=0.5)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def helper():
        return lock

    def uses(rank):
        return [helper for _ in range(1)]

    with pytest.raises(ValueError, match=r"helper \(function: cannot pickle '_thread.lock'"):
        run_ranks(uses)
    pair = Pair(0)
    pair.items = [1, {"log": lock}]
    with pytest.raises(ValueError, match=r"rank: args\[1\] \(Pair: cannot pickle '_thread.lock'"):
        run_ranks(lambda rank, a, b: None, args=(1, pair))
    with pytest.raises(ValueError, match=r"rank: cannot pickle '_thread.lock' object"):
        run_ranks(pair.__init__)


def test_what_cannot_be_returned_is_named():
    with pytest.raises(RankError, match=r"cannot be sent back: dict: cannot pickle 'generator'"):
        run_ranks(lambda rank: {"a": [1, (i for i in range(3))]}, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "fn must be a function of the rank, got 3"),
        ({"world_size": 0}, "world_size must be a positive int, got 0"),
        ({"world_size": 2.0}, "world_size must be a positive int, got 2.0"),
        ({"args": 5}, "args must be a tuple"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": None}, "timeout must be a positive number of seconds, got None"),
        ({"backend": "mpi"}, 'backend must be "auto", "gloo" or "nccl", got \'mpi\''),
        ({"backend": "nccl", "world_size": 10_000}, "needs a GPU for each rank: 10000 ranks"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(**{"fn": print} | arguments)


@pytest.mark.thorough
def test_spawn_gives_the_same(monkeypatch):
    monkeypatch.setattr(caller, "forks_ranks", lambda: False)

    def total(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item(), multiprocessing.get_start_method()

    assert [r.value for r in run_ranks(total)] == [(1, multiprocessing.get_start_method())] * 2


def is_running(pid):
    with_status = psutil.Process(pid)
    return with_status.status() != psutil.STATUS_ZOMBIE


SERVERS = """
import os, signal
from course_lib.launch import run_ranks, server, warm_up

def pid():
    return server._server and server._server.process.pid

def server_of(rank):
    return psutil.Process(os.getppid()).ppid()

import psutil
server.PRELOAD = ("torch", "course_lib.launch")  # these ranks need no Lightning
print(pid())
warm_up()
first = pid()
[result] = run_ranks(server_of, 1)
print(first == pid() == result.value)
os.kill(first, signal.SIGKILL)
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
[result] = run_ranks(server_of, 1)
print(first != pid() == result.value)
"""


@pytest.mark.thorough
@with_forked_ranks
def test_the_server_may_be_started_ahead_of_time_and_one_that_was_killed_is_started_again():
    done = subprocess.run([sys.executable, "-c", SERVERS], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "True", "True"], done.stderr


@pytest.mark.thorough
def test_many_calls_leave_nothing(monkeypatch, tmp_path):
    def total(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    def left_behind():
        me = psutil.Process()
        server_and_tracker = {child.pid for child in me.children(recursive=True)}
        sockets = [c for p in (me, *me.children(recursive=True)) for c in p.net_connections() if c.status == "LISTEN"]
        return (
            server_and_tracker,
            me.num_fds(),
            len(sockets),
            sorted(os.listdir(tmp_path)),
            threading.active_count(),
        )

    run_ranks(total)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = left_behind()
    for call in range(effort.cases(10, 100)):
        if call % 10 == 9:
            with pytest.raises(RankError):
                run_ranks(lambda rank: os.abort() if rank else dist.barrier())
        else:
            assert [r.value for r in run_ranks(total)] == [1, 1]
    assert left_behind() == before


LEAN = "from course_lib.launch import server\nserver.PRELOAD = ('torch', 'course_lib.launch')\n"
"""For scripts whose ranks need no Lightning: their server starts in half of the time."""
INTERRUPTED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""For scripts that get SIGINT: it is ignored where the tests were started in the background of a script."""
SPAWNED = "import socket\ndel socket.send_fds\n"
"""For scripts whose ranks are spawned, as where there is no server."""
SCRIPT = """
    # No `if __name__ == "__main__"`: a script may call run_ranks as a notebook does.
    import os, time, torch
    from course_lib.launch import run_ranks

    class Batch:
        def __init__(self, x): self.x = x

    def work(rank, folder):
        torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
        gathered = [None, None]
        torch.distributed.all_gather_object(gathered, Batch(rank))
        open(f"{folder}/{rank}-{os.getpid()}", "w").close()
        if folder_mode == "hang":
            time.sleep(600)
        if folder_mode == "hold":
            import re
            re.match(r"(a+)+$", "a" * 60 + "b")
        if folder_mode == "linger":
            import threading
            threading.Thread(target=time.sleep, args=(600,)).start()
        return [b.x for b in gathered]

    folder_mode = "MODE"
    print([r.value for r in run_ranks(work, args=("FOLDER",), timeout=600)])
"""


@pytest.fixture
def short_path():
    """As tmp_path, which may be too long for the address of a socket in it."""
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def start_script(folder, mode, begin=INTERRUPTED):
    script = begin + LEAN + textwrap.dedent(SCRIPT)
    script = script.replace("MODE", mode).replace("FOLDER", str(folder))
    path = folder / "script.py"
    path.write_text(script)
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
    )


@pytest.mark.thorough
@pytest.mark.parametrize("begin", ["", SPAWNED])
def test_a_script_needs_no_main_guard_and_its_classes_pickle(short_path, begin):
    out, err = start_script(short_path, "return", begin).communicate(timeout=120)
    assert out == "[[0, 1], [0, 1]]\n", err


KILLED = [(signal.SIGINT, "hang"), (signal.SIGKILL, "linger"), (signal.SIGKILL, "hold")]
KILLED += [(signal.SIGINT, "hold"), (signal.SIGINT, "linger"), (signal.SIGKILL, "hang")]


def wait_for_ranks(process, folder):
    """What the script has started, when both ranks are in its function."""
    while len(pids := [int(p.name.split("-")[1]) for p in folder.glob("?-*")]) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert {p.pid for p in descendants} >= set(pids)
    return descendants


def end_all(processes):
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("number", "mode"), KILLED[: effort.cases(2, 6)])
def test_no_rank_outlives_its_interrupted_or_killed_caller(short_path, number, mode):
    process = start_script(short_path, mode)
    descendants = wait_for_ranks(process, short_path)
    try:
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(descendants, timeout=60)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        end_all([process, *descendants])
    assert list((short_path / "tmp").glob("run_ranks-*")) == []
    if number == signal.SIGINT and mode != "linger":  # that one may have ended by itself
        assert "KeyboardInterrupt" in err


WAITS_FOR_ITS_SERVER = """
from course_lib.launch import run_ranks, server
server.PRELOAD = (*server.PRELOAD, "loads_until_told")
server._running_server()
print("starts a rank", flush=True)
run_ranks(print)
"""


@pytest.mark.thorough
@with_forked_ranks
@pytest.mark.parametrize("handled", [False, True])
def test_a_caller_that_is_ended_while_its_server_loads_leaves_no_folder(short_path, handled):
    folder, temporary = short_path / "modules", short_path / "tmp"
    folder.mkdir(), temporary.mkdir()
    waits = f"import os, time\nwhile not os.path.exists({str(short_path / 'go on')!r}):\n    time.sleep(0.05)\n"
    (folder / "loads_until_told.py").write_text(waits)
    begin = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n" if handled else ""
    process = subprocess.Popen(
        [sys.executable, "-c", begin + LEAN + WAITS_FOR_ITS_SERVER], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(folder)},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "starts a rank\n"
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(timeout=60) == (3 if handled else -signal.SIGTERM)
        (short_path / "go on").touch()
        _, alive = psutil.wait_procs(descendants, timeout=60)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
        assert list(temporary.glob("run_ranks-*")) == []
    finally:
        end_all([process, *descendants])


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_where_interrupts_are_ignored_from_the_start_sigterm_ends_the_call(short_path):
    process = start_script(short_path, "hang", begin="import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n")
    descendants = wait_for_ranks(process, short_path)
    try:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM
        _, alive = psutil.wait_procs(descendants, timeout=60)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        end_all([process, *descendants])
        process.communicate()


@pytest.fixture
def interrupts(monkeypatch):
    """SIGINT raises KeyboardInterrupt here, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
def test_an_interrupt_that_does_not_wake_the_waiting_thread_is_seen(interrupts, tmp_path):
    # As one does that comes just before the system's wait begins: Python notes it, and the wait goes on.
    def hang(rank):
        (tmp_path / "running").touch()
        time.sleep(40)
        (tmp_path / "slept").touch()

    def interrupt():
        while not (tmp_path / "running").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(hang, 1)
    other.join()
    assert not (tmp_path / "slept").exists()


def test_a_script_that_is_hidden_from_ranks_keeps_its_names():
    main = sys.modules["__main__"]
    main.kept = "a name"
    try:
        with server._hidden_main():
            hidden = sys.modules["__main__"]
            assert hidden is not main and hidden.kept == "a name"
            assert hidden.__spec__ is None and not hasattr(hidden, "__file__")
        assert sys.modules["__main__"] is main
    finally:
        del main.kept


@with_forked_ranks
def test_a_watcher_that_is_killed_takes_its_ranks_along(tmp_path):
    def kill_the_watcher(rank):
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        if rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RuntimeError, match="the process that starts the ranks was killed"):
        run_ranks(kill_the_watcher)
    deadline = time.monotonic() + 30
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    while any(psutil.pid_exists(rank) and is_running(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2 and not any(psutil.pid_exists(rank) and is_running(rank) for rank in ranks)


def test_a_killed_rank_is_noticed_though_its_workers_live():
    def die(rank):
        loader = torch.utils.data.DataLoader(range(8), 4, num_workers=1, persistent_workers=True)
        next(iter(loader))
        os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
        run_ranks(die, 1)
    assert time.monotonic() - begin < 4.5  # torch's workers look for their parent every five seconds


def test_a_stack_deeper_than_a_dump_shows_where_the_rank_is():
    def deep(levels):
        return deep(levels - 1) if levels else time.sleep(60)

    with pytest.raises(RankTimeout) as caught:
        run_ranks(lambda rank: deep(200), 1, timeout=0.5)
    assert caught.value.reports[0].functions[-3:] == ("deep",) * 3


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it adopts what callers leave")
def test_signals_at_random_moments_are_not_lost_and_leave_nothing():
    # A few of the moments of tests/hunt/interrupts.py, which tries thousands.
    command = [sys.executable, "-m", "tests.hunt.interrupts", "--seed", "0"]
    command += ["--moments", str(effort.cases(12, 100)), *(["--no-kernels"] if effort.cases(1, 0) else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_cells_of_a_notebook_travel_and_tracebacks_show_their_lines():
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    cells = [
        LEAN + "import torch\nfrom course_lib.launch import RankError, run_ranks",
        "x = torch.ones(500, 500)\n(x @ x).sum()",
        "class Batch:\n    def __init__(self, x):\n        self.x = x",
        "def step(rank):\n    if rank == 1:\n        raise ValueError('in a cell')\n    return Batch(rank)",
        "print([type(r.value) is Batch for r in run_ranks(step, 1)])",
        "try:\n    run_ranks(step)\nexcept RankError as error:\n    print(error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = ["".join(o.get("text", "") for o in cell.outputs if o.output_type == "stream") for cell in notebook.cells]
    assert outputs[4] == "[True]\n"
    assert "Cell In[4], line 3, in step" in outputs[5]
    assert "raise ValueError('in a cell')" in outputs[5]


@pytest.mark.gpu
def test_works_after_the_caller_used_cuda_and_takes_nccl_where_every_rank_has_a_gpu():
    torch.ones(3, device="cuda").sum().item()

    def total(rank):
        device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
        x = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(x)
        return x.item(), dist.get_backend(), torch.cuda.is_available()

    assert [r.value for r in run_ranks(total, 1)] == [(1.0, "nccl", True)]
    gpus = torch.cuda.device_count()
    more = run_ranks(total, gpus + 1)
    assert {r.value for r in more} == {(sum(range(gpus + 2)) * 1.0, "gloo", False)}
    shared = run_ranks(lambda rank: torch.ones(1, device="cuda").item(), 2, backend="gloo")
    assert [r.value for r in shared] == [1.0, 1.0]


@pytest.mark.thorough
def test_the_callers_own_classes_stay_as_they_are(tmp_path):
    script = """
        import enum
        from course_lib.launch import run_ranks

        class Model:
            count = 0
            def scaled(self): return scale

        class Color(enum.Enum):
            RED = 1

        scale = "old"
        def work(rank):
            Model.count = 99
            class Born: x = 3
            return Model(), Color.RED, Born()

        model, color, born = run_ranks(work)[0].value
        scale = "new"
        print(Model.count, model.scaled(), type(model) is Model, color is Color.RED, born.x)
    """
    (tmp_path / "script.py").write_text(LEAN + textwrap.dedent(script))
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout == "0 new True True 3\n", done.stderr


@pytest.mark.thorough
def test_classes_that_only_arguments_mention_pickle_in_a_rank(tmp_path):
    script = """
        import dataclasses, enum, functools
        import torch.distributed as dist
        from course_lib.launch import run_ranks

        @dataclasses.dataclass
        class Config: x: int
        class Mode(enum.Enum): FAST = 1

        def gather(rank, config, mode):
            out = [None, None]
            dist.all_gather_object(out, (config, mode))
            return out[0][0].x, out[1][1] is mode

        print([r.value for r in run_ranks(functools.partial(gather, mode=Mode.FAST), args=(Config(3),))])
    """
    (tmp_path / "script.py").write_text(LEAN + textwrap.dedent(script))
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout == "[(3, True), (3, True)]\n", done.stderr


def hold_the_lock():
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


@pytest.mark.thorough
def test_a_rank_that_holds_the_interpreter_lock_shows_its_stack():
    def stuck(rank):
        hold_the_lock()

    with pytest.raises(RankTimeout) as caught:
        run_ranks(stuck, timeout=0.5)
    assert all(report.functions[:2] == ("stuck", "hold_the_lock") for report in caught.value.reports)


@pytest.mark.thorough
def test_a_leftover_thread_does_not_delay_the_ranks_one_by_one():
    def leave_thread(rank):
        threading.Thread(target=time.sleep, args=(600,)).start()
        return os.getpid()

    for result in run_ranks(leave_thread, 3):
        assert not psutil.pid_exists(result.value) or not is_running(result.value)


@pytest.mark.thorough
def test_an_error_stays_the_first_cause_when_another_rank_dies_soon_after():
    def fail(rank):
        if rank == 0:
            raise ValueError("the cause")
        time.sleep(0.35)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as caught:
        run_ranks(fail)
    assert [r.rank for r in caught.value.reports] == [0, 1]
    assert isinstance(caught.value.__cause__, ValueError)


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def test_odd_ends_are_rank_errors_too():
    with pytest.raises(RankError, match="killed by signal 40"):
        run_ranks(lambda rank: os.kill(os.getpid(), 40), 1)
    with pytest.raises(RankError, match="rank 0 returned what cannot be read here: ValueError"):
        run_ranks(lambda rank: Unreadable(), 1)

    def die(rank):
        print("half a line", end="", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="half a line"):
        run_ranks(die, 1)


def test_errors_can_be_pickled():
    import pickle

    with pytest.raises(RankError) as caught:
        run_ranks(lambda rank: 1 / 0, 1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.reports == caught.value.reports


@pytest.mark.thorough
def test_long_timeouts_and_numpys_numbers_are_taken():
    import numpy as np

    for timeout in (float("inf"), 3e6, np.int64(60), np.float32(60)):
        assert run_ranks(lambda rank: rank, 1, timeout=timeout)[0].value == 0


def test_a_generator_is_no_result():
    def generator(rank):
        yield rank

    with pytest.raises(RankError, match="what the function returned cannot be sent back: generator"):
        run_ranks(generator, 1)


@pytest.mark.thorough
def test_a_forked_child_starts_a_server_of_its_own(monkeypatch):
    run_ranks(lambda rank: rank, 1)
    monkeypatch.setattr(server, "PRELOAD", ("torch", "course_lib.launch"))

    def in_child(queue):
        queue.put([r.value for r in run_ranks(lambda rank: rank * 2)])

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    child.join(60)
    assert not queue.empty() and queue.get() == [0, 2]


def test_modules_imported_in_a_rank_see_the_callers_environment(monkeypatch, tmp_path):
    run_ranks(lambda rank: rank, 1)
    (tmp_path / "reads_environment.py").write_text(
        "import os\nSEEN = os.environ.get('MARK'), os.environ.get('RANK')\ndef work(rank): return SEEN"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MARK", "late")
    import reads_environment

    assert [r.value for r in run_ranks(reads_environment.work)] == [("late", "0"), ("late", "1")]
