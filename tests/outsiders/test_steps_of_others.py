"""plan_steps against the batches that accelerate deals."""

import itertools

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

from course_lib.steps import plan_steps

SHAPES = list(itertools.product(range(1, 61), range(1, 6), (1, 2, 3)))
"""Samples, samples in a batch, ranks."""


def dealt_and_planned(num_samples, batch_size, world_size, *, drop_last):
    batches = BatchSampler(SequentialSampler(range(num_samples)), batch_size, drop_last)
    on_each_rank = {len(list(BatchSamplerShard(batches, world_size, rank))) for rank in range(world_size)}
    plan = plan_steps(num_samples, batch_size, world_size=world_size, drop_last=drop_last, max_epochs=1)
    (dealt,) = on_each_rank
    return dealt, plan.total_steps


def test_a_plan_counts_what_accelerate_deals():
    for shape in SHAPES:
        dealt, planned = dealt_and_planned(*shape, drop_last=False)
        assert dealt == planned, shape


def test_accelerate_drops_before_it_deals():
    fewer = 0
    for num_samples, batch_size, world_size in SHAPES:
        dealt, planned = dealt_and_planned(num_samples, batch_size, world_size, drop_last=True)
        assert dealt == num_samples // batch_size // world_size
        assert dealt <= planned and (dealt == planned or world_size > 1)
        fewer += dealt < planned
    print(f"accelerate deals fewer batches than are planned with drop_last in {fewer} of {len(SHAPES)} shapes")
    assert fewer
