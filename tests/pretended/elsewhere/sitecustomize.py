"""Plays another system: workers start as REHEARSED_START_METHOD says, and so do ranks where it is spawn.

Python runs this at its start where this folder is in PYTHONPATH: macOS and Windows spawn workers and ranks, and Linux
starts workers from a fork server since Python 3.14.
"""

import multiprocessing
import multiprocessing.forkserver
import os

METHOD = os.environ.get("REHEARSED_START_METHOD")

if METHOD:
    multiprocessing.set_start_method(METHOD, force=True)

if METHOD == "spawn":
    get_context = multiprocessing.get_context

    def spawning(method=None):
        """There is no fork server; macOS has fork, for those who ask for it by name."""
        return get_context("spawn" if method == "forkserver" else method)

    multiprocessing.get_context = spawning
    multiprocessing.forkserver.ensure_running = lambda: None  # it would load torch, for nobody
