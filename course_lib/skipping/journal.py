"""What was skipped, as JSON lines: written without a collective, readable after a crash, summarized by a command."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHOWN = 5
"""How many skips a summary tells one by one."""


@dataclass(frozen=True)
class Skip:
    """One attempt that was skipped, as one rank saw it: a line of its journal."""

    run: str
    """When the guard was made, the same on all ranks: a run that was restarted appends to the same files."""
    attempt: int
    """1 for the run's first."""
    updates: int
    """How many updates had been made before it."""
    epoch: int | None
    batch_indices: list[int] | None
    """The window's micro-batches, as the loop numbers them."""
    sample_indices: list[int] | None
    """The samples that this rank had in them."""
    rank: int
    """The rank that writes."""
    reason: str
    caused_here: bool | None
    """True: this rank's own loss or `reject`. None: unknown, or of all ranks (a spike, a NaN made by a backward)."""
    norm: float | None
    """Of the gradients after the reduction; None where there were none."""
    norm_limit: float | None
    """What a norm had to stay below; None where norms were not judged."""

    def place(self) -> str:
        parts = [f"attempt {self.attempt}"]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}")
        if self.batch_indices:
            parts.append(f"batch{'es'[: 2 * (len(self.batch_indices) > 1)]} {_listed(self.batch_indices)}")
        if self.sample_indices:
            parts.append(f"samples {_listed(self.sample_indices)} on rank {self.rank}")
        return ", ".join(parts)


class Journal:
    """Appends a line for each skip to this rank's file, in one write: what was written is there after a crash.

    Rank 0 writes to ``path``, rank 1 to ``….rank1.jsonl`` beside it. A disk that takes no more is said once, as a
    warning: training goes on, and later skips try again.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path = path_of_rank(Path(path), rank)
        self._prepared = False
        self._torn = False
        self._warned = False
        self._attempt(b"")

    def write(self, skip: Skip) -> None:
        line = json.dumps({name: _jsonable(value) for name, value in asdict(skip).items()}, allow_nan=False)
        self._attempt(line.encode() + b"\n")

    def _attempt(self, line: bytes) -> None:
        try:
            if not self._prepared:
                self._prepare()
            self._append(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the journal of skipped steps can't be written to {self.path} ({error.strerror or error}): "
                    "training goes on, and what is skipped meanwhile is not recorded",
                    stacklevel=5,
                )

    def _prepare(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            with self.path.open("rb") as before:
                before.seek(max(0, before.seek(0, os.SEEK_END) - 1))
                self._torn = before.read() not in (b"", b"\n")
        self._prepared = True

    def _append(self, line: bytes) -> None:
        if line and self._torn:
            line = b"\n" + line  # what a crash or a full disk cut off costs no other line
        with self.path.open("ab", buffering=0) as file:
            if not line:
                return
            written = file.write(line)
            self._torn = written != len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def path_of_rank(path: Path, rank: int) -> Path:
    """Where a rank's lines are: ``journal.jsonl``, ``journal.rank1.jsonl``, …"""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def read_journal(path: str | os.PathLike[str]) -> tuple[list[Skip], int]:
    """All ranks' skips from rank 0's file and those beside it, by run, attempt and rank; and how many lines were torn.

    Raises:
        OSError: There is no such file, or it can't be read.
    """
    path = Path(path)
    others = sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    skips, torn = [], 0
    for file in [path, *others]:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                fields = json.loads(line)
                fields |= {name: _number(fields[name]) for name in ("norm", "norm_limit")}
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
    runs = dict.fromkeys(run for run, _ in attempts)
    over = f" in {len(runs)} runs" if len(runs) > 1 else ""
    lines = [f"{_counted(len(attempts), 'attempt')} skipped{over}."]
    causes = Counter(_cause(seen) for seen in attempts.values())
    lines += [f"  {count:,} × {cause}" for cause, count in causes.most_common()]
    if attempts:
        run, first, length = max(_rows(attempts), key=lambda row: row[2])
        of = f" of the run of {run}" if len(runs) > 1 else ""
        row = f"{length:,} in a row at most: attempts {first:,} to {first + length - 1:,}{of}."
        lines.append(row if length > 1 else "No two in a row.")
    suspects = [[skip for skip in seen if skip.caused_here] or seen for seen in attempts.values()]
    samples = Counter(index for skips in suspects for skip in skips for index in skip.sample_indices or ())
    again = [f"{index} ({count}×)" for index, count in samples.most_common(10) if count > 1]
    if again:
        lines.append(f"Samples in more than one skipped window: {', '.join(again)}.")
    if attempts:
        lines.append("The last:" if len(attempts) <= SHOWN else f"The last {SHOWN}:")
    lines += [f"  {_told(seen)}" for seen in list(attempts.values())[-SHOWN:]]
    if torn:
        lines.append(f"{_counted(torn, 'line')} could not be read: cut off by a crash or a full disk.")
    return "\n".join(lines)


def _cause(seen: list[Skip]) -> str:
    causing = [skip for skip in seen if skip.caused_here]
    reasons = ", ".join(dict.fromkeys(skip.reason for skip in causing or seen))
    if not causing:
        return reasons
    return f"{reasons}, rank{'s'[: len(causing) > 1]} {_listed([skip.rank for skip in causing])}"


def _told(seen: list[Skip]) -> str:
    shown = next((skip for skip in seen if skip.caused_here), seen[0])
    norm = "" if shown.norm is None else f", norm {shown.norm:.3g}"
    limit = "" if shown.norm_limit is None else f" (limit {shown.norm_limit:.3g})"
    return f"{shown.place()}: {_cause(seen)}{norm}{limit}"


def _rows(attempts: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """The rows of consecutive attempts: run, first attempt, length."""
    rows: list[tuple[str, int, int]] = []
    for run, attempt in attempts:
        if rows and (run, attempt) == (rows[-1][0], rows[-1][1] + rows[-1][2]):
            rows[-1] = (*rows[-1][:2], rows[-1][2] + 1)
        else:
            rows.append((run, attempt, 1))
    return rows


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s'[: number != 1]}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _jsonable(value: Any) -> Any:
    # JSON has no NaN: as text, every reader can load the line.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
