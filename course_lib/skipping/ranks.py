"""What the ranks agree on: that each has its guard, and a decision about data that one rank alone can make."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Literal, overload

import torch
import torch.distributed as dist

from course_lib._ranks import rank_device, world_size_of
from course_lib._words import plural


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
    return ballot if async_op else ballot.wait()


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


_guards_made: Counter[tuple[int, ...]] = Counter()


def meet_other_ranks(group: dist.ProcessGroup | None, timeout: float) -> str:
    """Wait until every rank of the group has made its guard, and agree on a name for the run.

    A guard on some ranks alone would skip where the others step. This goes through the group's store: a collective
    would pair with whatever the others are at.

    Raises:
        RuntimeError: Another rank made no guard within ``timeout`` seconds.
    """
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    if world_size_of(group) == 1:
        return now
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    prefix = f"course_lib.skipping/{'-'.join(map(str, ranks))}/{_guards_made[ranks]}"
    _guards_made[ranks] += 1
    store.set(f"{prefix}/{dist.get_rank()}", now)
    try:
        store.wait([f"{prefix}/{rank}" for rank in ranks], timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [str(rank) for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        raise RuntimeError(
            f"rank {dist.get_rank()} made a StepGuard, and {plural(len(missing), 'rank')} {', '.join(missing)} did not "
            f"within {timeout:g} s: a guard on some ranks alone would skip where the others step. Make it on every "
            "rank, in the same order, or give a longer timeout"
        ) from error
    return str(store.get(f"{prefix}/{ranks[0]}").decode())
