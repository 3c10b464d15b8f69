"""changes: whether the epochs of a rehearsed script are of one length."""

from __future__ import annotations

from rehearse.report import Judgement, not_applicable
from rehearse.scripts.journal import Journal
from rehearse.scripts.windows import passes_of


def judge_changes(journal: Journal) -> Judgement:
    """Epochs of other lengths are a choice; where a schedule counts by the first, ``horizon`` finds it."""
    counts = [len(one.batches) for one in passes_of(journal, training=True) if one.ended]
    if not counts:
        return not_applicable("changes", "no loop over the training batches comes to their end")
    if len(set(counts)) == 1:
        return Judgement()
    shown = ", ".join(f"{count:,}" for count in counts[:6])
    more = ", …" if len(counts) > 6 else ""
    return Judgement(notes=[f"changes: the epochs have {shown}{more} batches"])
