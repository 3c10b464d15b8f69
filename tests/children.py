"""Which processes this one has started, directly or by a server: what a test compares to see that none is left."""

from multiprocessing import forkserver, resource_tracker

import psutil

from course_lib._processes import SERVERS


def children() -> set[int]:
    """Without the tracker of shared memory and the servers, which come with the first process, and stay."""
    helpers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    return {process.pid for process in psutil.Process().children(recursive=True)} - helpers - SERVERS
