"""The README's symptoms lead to sections that exist, as the site needs it; and the way there is found."""

import json
import re

import pytest

from docs.symptoms import find_section, read_symptoms
from tests.notebook_rules import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADINGS = [
    "05 · Why?",
    "Symptom",
    "1 · How many?",
    "Fix",
    "By hand",
    "Exercises",
    "1 · Count",
    "2 · Why did it?",
    "Proof",
]


def headings_of(chapter: str) -> list[str]:
    (path,) = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    return [heading.replace("`", "") for heading in re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)]


@pytest.mark.parametrize("symptom", read_symptoms(README), ids=lambda symptom: symptom.seen[:40])
def test_a_symptom_leads_to_a_section(symptom):
    if symptom.chapter is None:
        assert f"\n## {symptom.place.partition(',')[0]}\n" in README
    else:
        headings = headings_of(symptom.chapter)
        assert headings[find_section(symptom.place, headings)]


@pytest.mark.parametrize(
    ("place", "heading"),
    [
        ("05, Symptom", "Symptom"),
        ("05, How many?", "1 · How many?"),
        ("05, Fix, rung 2", "Fix"),
        ("05, By hand (its picture)", "By hand"),
        ("05, Exercise 2", "2 · Why did it?"),
        ("05, Exercise 1", "1 · Count"),
        ("05, Proof; Exercise 1", "Proof"),
    ],
)
def test_a_place_is_the_beginning_of_a_heading(place: str, heading: str):
    assert HEADINGS[find_section(place, HEADINGS)] == heading


@pytest.mark.parametrize("place", ["05, Mechanism", "05, Exercise 3", "05, many?"])
def test_a_place_that_is_nowhere_is_named(place: str):
    with pytest.raises(ValueError, match=f"no heading of the chapter begins as README.md says: '{re.escape(place)}'"):
        find_section(place, HEADINGS)


def test_a_readme_without_the_table_is_refused():
    with pytest.raises(ValueError, match="no table of three columns"):
        read_symptoms("# A book\n\n## What do you see?\n\nNothing.\n")
