"""Whether every rank has made its guard: a guard on some ranks alone would skip where the others step."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import torch.distributed as dist

from course_lib._ranks import world_size_of
from course_lib._words import plural

_guards_made: Counter[tuple[int, ...]] = Counter()


def meet_other_ranks(group: dist.ProcessGroup | None, timeout: float) -> str:
    """Wait until every rank of the group has made its guard, and agree on a name for the run.

    This goes through the group's store: a collective would pair with whatever the others are at, and hang or mix the
    two up.

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
