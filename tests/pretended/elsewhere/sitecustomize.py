"""Plays another system: workers start as REHEARSED_START_METHOD says, and so do ranks where it is spawn.

Python runs this at its start where this folder is in PYTHONPATH: macOS and Windows spawn workers and ranks, and Linux
starts workers from a fork server since Python 3.14.
"""

import multiprocessing
import os
import socket

METHOD = os.environ.get("REHEARSED_START_METHOD")

if METHOD:
    multiprocessing.set_start_method(METHOD, force=True)

if METHOD == "spawn":
    del socket.send_fds  # what a server of ranks needs, and Windows has not
