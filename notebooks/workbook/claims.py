"""The ledger of circulating advice: each claim is settled by a cell of the chapter that owns it.

claims = Claims("05_counting_steps")
claims.settle("C5", steps_counted > steps_expected)
"""

from __future__ import annotations

import json
from typing import Any

from course_lib.datasets import data_path
from workbook.display import show_table, wrapped

VERDICTS = {"T": "true", "I": "imprecise", "F": "false", "V": "depends on the version"}


def load_claims() -> list[dict[str, Any]]:
    """All rows of ``data/claims.json``: id, chapter, claim, verdict, reason, and the cell that shows it."""
    return json.loads(data_path("claims.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


class Claims:
    """The claims of one chapter, settled one by one while its notebook runs."""

    def __init__(self, chapter: str) -> None:
        self.rows = {row["id"]: row for row in load_claims() if row["chapter"] == chapter}
        if not self.rows:
            raise ValueError(f"no claim in data/claims.json belongs to chapter {chapter!r}")
        self.settled: set[str] = set()

    def settle(self, claim: str, evidence: bool) -> None:
        """Print the verdict on a claim, if the experiment above bears it out.

        Args:
            claim: Its id in the ledger.
            evidence: What the cell measured, as a condition that holds if the ledger's verdict does.

        Raises:
            AssertionError: The experiment came out otherwise than the ledger says.
        """
        row = self.rows[claim]
        if not evidence:
            raise AssertionError(f"{claim}: this run does not bear out the ledger's verdict: {self._line(row)}")
        self.settled.add(claim)
        print(self._line(row))

    def show(self) -> None:
        """Show the chapter's claims as a table; claims that no cell has settled in this run are said to be open."""
        rows = []
        for claim, row in self.rows.items():
            verdict = VERDICTS[row["verdict"]] if claim in self.settled else "open"
            rows.append([claim, row["claim"], verdict, row["reason"]])
        show_table(["", "claim", "verdict", "because"], rows)

    @staticmethod
    def _line(row: dict[str, Any]) -> str:
        reason = f"{VERDICTS[row['verdict']]}: {row['reason']}"
        claim = f"{row['id']} \u201c{row['claim']}\u201d"
        return f"{wrapped(claim)}\n{wrapped(reason, '   ')}"
