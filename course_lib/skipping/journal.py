"""What was skipped, as JSON lines: written without a collective, readable after a crash, summarized by a command."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course_lib._words import counted, first_of, plural
from course_lib.skipping.skips import Skip

SHOWN = 5
"""How many skips a summary tells one by one."""


class Journal:
    """Appends a line for each skip to this rank's file, in one write: what was written is there after a crash.

    Rank 0 writes to ``path``, rank 1 to ``….rank1.jsonl`` beside it. When the disk takes no more, one warning says so;
    training goes on, and later skips try again.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        path = Path(path)
        self.path = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._warned = False
        self._append(b"")  # what can't be written to is told now, and a run without a skip has a file

    def write(self, skip: Skip) -> None:
        line = json.dumps({name: _jsonable(value) for name, value in asdict(skip).items()}, allow_nan=False)
        self._append(line.encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # what a crash or a full disk has cut off costs no other line
                        line = b"\n" + line
                file.write(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the journal of skipped steps can't be written to {self.path} ({error.strerror or error}): "
                    "training goes on, and what is skipped meanwhile is not recorded",
                    stacklevel=4,
                )


def read_journal(path: str | os.PathLike[str]) -> tuple[list[Skip], int]:
    """All ranks' skips from rank 0's file and those beside it, by run, attempt and rank; and how many lines were torn.

    Raises:
        OSError: There is no such file, or it can't be read.
    """
    path = Path(path)
    named = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix))
    others = sorted(file for file in path.parent.iterdir() if named.fullmatch(file.name))
    skips, torn = [], 0
    for file in [path, *others]:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                fields = json.loads(line)
                for name in ("norm", "norm_limit"):
                    fields[name] = None if fields[name] is None else float(fields[name])
                skips.append(Skip(**fields))
            except (ValueError, TypeError, KeyError):
                torn += bool(line.strip())
    return sorted(skips, key=lambda skip: (skip.run, skip.attempt, skip.rank)), torn


def summarize(path: str | os.PathLike[str]) -> str:
    """What was skipped, why, through which rank, and which batches and samples come up again and again."""
    skips, torn = read_journal(path)
    attempts: dict[tuple[str, int], list[Skip]] = {}
    for skip in skips:
        attempts.setdefault((skip.run, skip.attempt), []).append(skip)
    runs = {run for run, _ in attempts}
    over = f" in {len(runs)} runs" if len(runs) > 1 else ""
    lines = [f"{counted(len(attempts), 'attempt')} skipped{over}."]
    causes = Counter(_cause(seen) for seen in attempts.values())
    lines += [f"  {count:,} × {cause}" for cause, count in causes.most_common()]
    suspects = [skip for seen in attempts.values() for skip in _suspects(seen)]
    samples = Counter(index for skip in suspects for index in skip.sample_indices or ())
    again = [f"{index} ({count}×)" for index, count in samples.most_common(10) if count > 1]
    if again:
        lines.append(f"Samples in more than one skipped window: {', '.join(again)}.")
    if attempts:
        lines.append("The last:" if len(attempts) <= SHOWN else f"The last {SHOWN}:")
    lines += [f"  {_told(seen)}" for seen in list(attempts.values())[-SHOWN:]]
    if torn:
        lines.append(f"{counted(torn, 'line')} could not be read: cut off by a crash or a full disk.")
    return "\n".join(lines)


def _suspects(seen: list[Skip]) -> list[Skip]:
    """Of one attempt, as the ranks saw it: those ranks that caused the skip, or all where none is known to have."""
    return [skip for skip in seen if skip.caused_here] or seen


def _cause(seen: list[Skip]) -> str:
    suspects = _suspects(seen)
    reasons = ", ".join(dict.fromkeys(skip.reason for skip in suspects))
    if not suspects[0].caused_here:
        return reasons
    return f"{reasons}, {plural(len(suspects), 'rank')} {first_of([skip.rank for skip in suspects])}"


def _told(seen: list[Skip]) -> str:
    shown = _suspects(seen)[0]
    norm = "" if shown.norm is None else f", norm {shown.norm:.3g}"
    limit = "" if shown.norm_limit is None else f" (limit {shown.norm_limit:.3g})"
    return f"{shown.place()}: {_cause(seen)}{norm}{limit}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN: as text, every reader can load the line
    return value
