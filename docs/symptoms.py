"""The table of symptoms, docs/pages/symptoms.md: what is seen, and the section of a chapter that explains it.

A place reads `02, When do workers pay?`: a chapter's number, and the beginning of a heading, whose own number may be
left out; or `05, Exercise 3`; or the title of a page of docs/pages/. What stands in parentheses, after a semicolon, or
after `, rung`, is for the reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A row of the table, in Markdown."""

    seen: str
    place: str
    use: str

    @property
    def chapter(self) -> str | None:
        """The chapter's two digits; None where a page of docs/pages/ explains it."""
        return self.place[:2] if self.place[:2].isdigit() else None


def read_symptoms(text: str) -> list[Symptom]:
    """All rows of the first table whose head is `symptom | read | use`, in order.

    Raises:
        ValueError: There is no such table, or a row has not three columns.
    """
    table = text.partition("\n| symptom | read | use |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[1:]]
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError("there is no table of symptoms of three columns, `symptom | read | use`")
    return [Symptom(*(cell.strip() for cell in row)) for row in rows]


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
    raise ValueError(f"no heading of the chapter begins as the table of symptoms says: {place!r}, of {headings}")
