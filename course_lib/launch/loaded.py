"""The last module that the server loads: until here it was kept from interrupts."""

from __future__ import annotations

import errno
import os
from multiprocessing import reduction
from socket import socket

from course_lib.launch.undisturbed import take_interrupts_again


def _outlive_half_requests() -> None:
    """Python's server dies of a process that was killed while it asked for a rank; this one goes on."""
    receive = reduction.recvfds
    server = os.getpid()

    def recvfds(sock: socket, size: int) -> list[int]:
        try:
            return receive(sock, size)
        except EOFError as error:
            if os.getpid() != server:
                raise
            raise OSError(errno.ECONNABORTED, "the process that asked is gone") from error  # which the server expects

    reduction.recvfds = recvfds


_outlive_half_requests()
take_interrupts_again()
