"""Prove a batch sampler, or find out where it is wrong: any sampler, on any number of ranks, in one process.

A batch sampler that is wrong under DDP seldom fails: it trains on some samples twice, on others never, or in the same
order in every epoch, and no single process shows it. The rule: *what a sampler promises, it promises for all ranks
together: write down what every rank yields, and count.* The kit plays all ranks, stops and resumes them, and judges
eleven rules.

    >>> def make(num_replicas, rank, n, batch_size, seed=0):
    ...     return MyBatchSampler(n, batch_size, seed=seed, num_replicas=num_replicas, rank=rank)
    >>> shapes = [dict(n=n, batch_size=4) for n in (3, 20, 50)]
    >>> def test_my_sampler():
    ...     assert_batch_sampler(make, lambda shape: range(shape["n"]), shapes=shapes)

All rules but the fourth are judged as in a run that has seeded the global generators alike on all ranks, so that a
sampler that draws from them breaks one rule, not all. The caller's generators are put back afterwards.

Start with ``RULES``, which names the eleven rules; ``rules.py`` and ``resuming.py`` have one function for each.
"""

from course_lib.conformance.check import assert_batch_sampler, check_batch_sampler
from course_lib.conformance.violations import RULES

__all__ = ["RULES", "assert_batch_sampler", "check_batch_sampler"]
