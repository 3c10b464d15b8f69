"""A decision about data that one rank alone can make."""

from __future__ import annotations

import torch.distributed as dist

from course_lib._ranks import gathered


def vote(bad: bool, *, group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank says that it is bad: one small collective. Every rank must vote, or the others wait.

    For what a rank sees before its forward: a file that does not open, a batch without a label.

        if vote(batch_is_bad):
            guard.skip("broken file", batch_indices=batch_index)
            continue

    Without a process group, this process decides alone.

    Raises:
        RuntimeError: A rank ended, or did not vote within the group's timeout.
    """
    return any(said for [said] in gathered([bool(bad)], group))
