"""What a run of the tests does with a test that hangs, and with a terminal that is not there."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.time_bound import STACKS, fail_with_stacks, hear_sigint

FORK = multiprocessing.get_context("fork")


def wait_in_a_fork(ready):
    ready.send(True)
    time.sleep(600)


def wait_in_a_thread(told):
    told.wait()


def test_a_test_that_hangs_fails_with_the_stacks_of_its_processes(pytestconfig):
    told, (receiver, sender) = threading.Event(), FORK.Pipe()
    thread = threading.Thread(target=wait_in_a_thread, args=(told,))
    fork = FORK.Process(target=wait_in_a_fork, args=(sender,))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    fork.start()
    thread.start()
    receiver.recv()
    signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))  # as a Trainer does, which forgets faulthandler's
    try:
        with pytest.raises(pytest.fail.Exception) as failure:
            fail_with_stacks(pytestconfig.stash[STACKS], 600)(signal.SIGALRM, None)
    finally:
        told.set()
        fork.kill()
        other.kill()
    # faulthandler writes an empty line between two threads, too.
    message, *told_of = re.split(r"\n\n(?=Process )", str(failure.value))
    stacks = {int(re.match(r"Process (\d+)", stack)[1]): stack for stack in told_of}
    assert message == "no end within 600 s"
    assert "in wait_in_a_thread" in stacks[os.getpid()] and "test_time_bound" in stacks[os.getpid()]
    assert "in wait_in_a_fork" in stacks[fork.pid]
    assert "time.sleep(600)" in stacks[other.pid] and stacks[other.pid].endswith("it has no handler of SIGUSR2.")
    assert other.wait() == -signal.SIGKILL  # and not of the question


def test_forks_answer_again_where_a_trainer_has_set_the_signal_back(pytestconfig):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    pytestconfig.stash[STACKS].answer()
    receiver, sender = FORK.Pipe()
    fork = FORK.Process(target=wait_in_a_fork, args=(sender,))
    fork.start()
    receiver.recv()
    stacks = pytestconfig.stash[STACKS].of_all_processes()
    fork.kill()
    assert "in wait_in_a_fork" in stacks


def test_every_test_has_a_bound_of_time(request):
    assert request.config.pluginmanager.hasplugin("timeout")
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


def say_what_interrupts(sender):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control does for `command &`
    hear_sigint()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt as error:
        sender.send(type(error))


def test_sigint_is_heard_also_where_a_script_has_put_the_tests_into_the_background():
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    receiver, sender = FORK.Pipe()
    FORK.Process(target=say_what_interrupts, args=(sender,)).start()
    assert receiver.recv() is KeyboardInterrupt
