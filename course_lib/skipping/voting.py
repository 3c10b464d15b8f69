"""A decision about data that one rank alone can make, told to all."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist

from course_lib._ranks import rank_device, world_size_of


@overload
def vote(bad: bool, *, group: dist.ProcessGroup | None = None, async_op: Literal[False] = False) -> bool: ...


@overload
def vote(bad: bool, *, group: dist.ProcessGroup | None = None, async_op: Literal[True]) -> Vote: ...


def vote(bad: bool, *, group: dist.ProcessGroup | None = None, async_op: bool = False) -> bool | Vote:
    """Whether any rank says that it is bad: one all-reduce of one byte. Every rank must vote, or the others wait.

    For what a rank sees before its forward: a file that does not open, a batch without a label. With ``async_op`` the
    ranks vote while the batch is copied or the last step finishes, and ``wait()`` gives the outcome:

        ballot = vote(batch_is_bad, async_op=True)
        batch = batch.to(device)
        if ballot.wait():
            guard.skip("broken file", batch_indices=batch_index)
            continue

    Without a process group, this process decides alone.
    """
    ballot = Vote(bad, group)
    if async_op:
        return ballot
    return ballot.wait()


class Vote:
    """A vote on its way through the ranks."""

    def __init__(self, bad: bool, group: dist.ProcessGroup | None = None) -> None:
        self._bad = bool(bad)
        self._work = None
        if world_size_of(group) > 1:
            self._byte = torch.tensor([self._bad], dtype=torch.uint8, device=rank_device(group))
            self._work = dist.all_reduce(self._byte, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> bool:
        """The outcome, the same on every rank.

        Raises:
            RuntimeError: A rank ended, or did not vote within the group's timeout.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    "a rank did not vote: it ended, failed, or went another way. Every rank has to call vote() for "
                    "every batch, the good ones too; its own message says what happened there"
                ) from error
            self._work = None
            self._bad = bool(self._byte.item())
        return self._bad
