"""Batch samplers that every rank can share: nothing missing, nothing twice, reshuffled every epoch, resumable.

A batch sampler under DDP is usually written for one process and sharded by somebody else afterwards; that is where
samples get lost, repeated or mixed. The rule: *one order for all ranks, a function of (seed, epoch) alone; each rank
deals itself its part by arithmetic.* So no rank needs to hear from another, and a position in that order is all the
state there is: a run can go on with other workers, and on another number of ranks.

    >>> sampler = ShuffledBatchSampler(10, batch_size=2, num_replicas=2, rank=0)
    >>> sampler.set_epoch(3)
    >>> len(sampler), [len(batch) for batch in sampler]  # the other rank's hold 2, 2 and 2
    (3, [2, 1, 1])

Every sampler has ``set_epoch``, ``state_dict`` and ``load_state_dict``, and a property ``sampler`` that is itself:
trainers call ``batch_sampler.sampler.set_epoch``. Without ``num_replicas`` and ``rank`` they are those of the process
group, read when iterated. Seeds are mixed by ``numpy.random.SeedSequence``: ``seed + epoch`` would give
(seed 0, epoch 1) the order of (seed 1, epoch 0).

Ranks are dealt their part in `dealing_evenly` (samples in turn: `shuffled`, `two_streams`) and `dealing_whole_batches`
(batches of any size: `sharded`); `in_steps` is the base of those that deal in steps, `epoch` that of all.
"""

from course_lib.samplers.batches_everywhere import count_batches_everywhere
from course_lib.samplers.epoch import EpochBatchSampler
from course_lib.samplers.permutation import IndexPermutation
from course_lib.samplers.sharded import ShardedBatchSampler
from course_lib.samplers.shuffled import ShuffledBatchSampler
from course_lib.samplers.two_streams import TwoStreamBatchSampler

__all__ = [
    "EpochBatchSampler",
    "IndexPermutation",
    "ShardedBatchSampler",
    "ShuffledBatchSampler",
    "TwoStreamBatchSampler",
    "count_batches_everywhere",
]
