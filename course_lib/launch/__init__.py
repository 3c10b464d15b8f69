"""Run a function on several ranks from wherever you are: a notebook cell, a script, a test.

A process group needs several processes, and a notebook is one. If it is forked after it has used OpenMP or CUDA, the
copies hang; new processes take seconds to start and cannot see what a cell defines; and a deadlock freezes the kernel
without a word. The rule: *ranks start from a clean server that has torch loaded, the function travels by value, and
every end is reported.*

    >>> import torch
    >>> def total(rank, weight):
    ...     x = torch.tensor([weight * rank])
    ...     torch.distributed.all_reduce(x)
    ...     return x.item()
    >>> [result.value for result in run_ranks(total, 2, args=(10,))]
    [10, 10]

The first call of a process waits some seconds for that server; :func:`warm_up` starts it ahead of time. A rank that
raises ends the call with a :class:`RankError`, a hang with a :class:`RankTimeout`; both show where every rank was. No
process of a rank's group outlives the call, however it ends.

``caller.py`` is the calling process, ``server.py`` the server that all others start from, ``watcher.py`` the process
that has the ranks of one call, ``rank.py`` the process of a rank, ``travel.py`` what goes from one to the other, and
``ends.py`` what a call returns or raises.
"""

from course_lib._ranks import rank_device
from course_lib.launch.caller import run_ranks
from course_lib.launch.ends import RankError, RankTimeout
from course_lib.launch.server import warm_up

__all__ = ["RankError", "RankTimeout", "rank_device", "run_ranks", "warm_up"]
