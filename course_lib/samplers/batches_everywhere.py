"""Ranks with different numbers of batches fall out of step: one small collective before the epoch says so."""

from __future__ import annotations

from typing import Any

from course_lib._ranks import gathered


def count_batches_everywhere(loader: Any, *, group: Any = None) -> int:
    """The number of batches of an epoch, after making sure that all ranks have as many.

    Else one's last batch meets the next epoch of the others, silently, and the run hangs where all ranks meet.

    Args:
        loader: Anything with ``len()``: a loader or a batch sampler.
        group: The process group; default: the whole world. Without a group there is one rank.

    Raises:
        ValueError: The ranks' counts differ; the message names each rank's.
        RuntimeError: A rank did not answer.
    """
    counts = [int(count) for [count] in gathered([len(loader)], group)]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(counts))
        raise ValueError(
            f"the ranks have different numbers of batches ({told}): they would go on out of step, and hang at the end. "
            "Shard with ShardedBatchSampler or ShuffledBatchSampler, which give all ranks as many"
        )
    return counts[0]
