"""The README's table of symptoms: what is seen, and the section of a chapter that explains it.

A place reads `02, When do workers pay?`: a chapter's number, and the beginning of a heading, whose own number may be
left out; or `05, Exercise 3`. What stands in parentheses, after a semicolon, or after `, rung`, is for the reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADING_OF_THE_TABLE = "What do you see?"
OWN_PAGE = "below"
"""The place of a symptom that the README itself explains ends with this word."""


@dataclass(frozen=True)
class Symptom:
    """A row of the table, in Markdown."""

    seen: str
    place: str
    use: str

    @property
    def chapter(self) -> str | None:
        """The chapter's two digits; None where the README explains it."""
        return None if self.place.endswith(OWN_PAGE) else self.place[:2]


def read_symptoms(readme: str) -> list[Symptom]:
    """All rows of the table, in order.

    Raises:
        ValueError: The README has no such table.
    """
    section = readme.partition(f"\n## {HEADING_OF_THE_TABLE}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    if len(rows) < 3 or any(len(row) != 3 for row in rows[2:]):
        raise ValueError(f"README.md has no table of three columns under {HEADING_OF_THE_TABLE!r}")
    return [Symptom(*(cell.strip() for cell in row)) for row in rows[2:]]


def find_section(place: str, headings: list[str]) -> int:
    """Which of a chapter's headings a place means: its position.

    Args:
        place: As the table has it.
        headings: The chapter's, as plain text, in order.

    Raises:
        ValueError: No heading begins so.
    """
    wanted = place.partition(", ")[2].replace("`", "")
    exercise = re.match(r"Exercise (\d+)", wanted)
    if exercise:
        start, beginning = headings.index("Exercises"), f"{exercise[1]} · "
    else:
        start, beginning = 0, re.split(r" \(|; |, rung", wanted)[0]
    for position, heading in enumerate(headings[start:], start):
        if heading.startswith(beginning) or re.sub(r"^\d+ · ", "", heading).startswith(beginning):
            return position
    raise ValueError(f"no heading of the chapter begins as README.md says: {place!r}, of {headings}")
