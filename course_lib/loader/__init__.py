"""A DataLoader to be read in one sitting, which behaves as torch's does.

Between ``for batch in loader`` and a batch lie a sampler, a fetch, a collate and, with workers, a small distributed
system. ``loader.py`` holds the path in its order: indices, an iterator that fetches and collates by itself, and one
that deals tasks to workers (``workers.py``).
The rule: *one pipe for each worker, one answer for each task: batches come in the order in which their tasks were
dealt, however fast each worker is.*

    >>> loader = MiniDataLoader(range(10), batch_size=4, num_workers=2)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

It is a ``torch.utils.data.DataLoader`` by type, so that trainers treat it as one: they give it a sampler for each
rank. Beyond torch's loader it asks a sampler once an epoch, names a killed worker and its signal at once, and raises
where a batch cannot be pickled, where torch's waits without end. Like torch's it has no state: a loader that goes on
where it was stopped is :class:`course_lib.resume.ResumableDataLoader`.
"""

from course_lib.loader.loader import MiniDataLoader

__all__ = ["MiniDataLoader"]
