"""Images that grow and batches that shrink: the size of a sample travels in its index.

Progressive resizing wants another image size and another batch size on the way. A loader that is reset within an epoch
cuts it short without a word, a batch size that is set on the fly loses samples, and an attribute of the dataset does
not reach workers that live on. The rule: *plan the sizes as a function of the position, and send each with its index.*

    >>> schedule = SizeSchedule.with_budget({0: 16, 16: 32}, budget=4096, unit="samples")
    >>> sampler = ScheduledBatchSampler(48, schedule)
    >>> [(len(batch), batch[0].size) for batch in sampler]
    [(16, 16), (4, 32), (4, 32), (4, 32), (4, 32), (4, 32), (4, 32), (4, 32), (4, 32)]

``ResumableDataLoader(SizedDataset(images, render), batch_sampler=sampler, num_workers=4)`` then tells its workers the
size of each sample, and ``plan_steps(48, schedule, max_epochs=10)`` counts the run's optimizer steps before it starts.
"""

from course_lib.schedules.sampler import ScheduledBatchSampler
from course_lib.schedules.schedule import SizeSchedule
from course_lib.schedules.sized import SizedDataset

__all__ = ["ScheduledBatchSampler", "SizeSchedule", "SizedDataset"]
