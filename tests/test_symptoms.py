"""The symptoms lead to sections that exist, as the site needs it."""

import json
import re

import pytest

from docs.symptoms import find_section, read_symptoms
from tests.notebook_rules import ROOT

PAGES = ROOT / "docs" / "pages"
SYMPTOMS = read_symptoms((PAGES / "symptoms.md").read_text(encoding="utf-8"))
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


def test_every_symptom_leads_to_a_section():
    titles = [path.read_text(encoding="utf-8").partition("\n")[0] for path in PAGES.glob("*.md")]
    headings = {path.stem[:2]: headings_of(path.stem[:2]) for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(SYMPTOMS) > 70
    for symptom in SYMPTOMS:
        if symptom.chapter is None:
            assert f"# {symptom.place}" in titles
        else:
            for place in symptom.place.partition(", ")[2].split("; "):
                assert headings[symptom.chapter][find_section(f"{symptom.chapter}, {place}", headings[symptom.chapter])]


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
    with pytest.raises(
        ValueError, match=f"no heading of the chapter begins as the table of symptoms says: '{re.escape(place)}'"
    ):
        find_section(place, HEADINGS)


@pytest.mark.parametrize("rows", ["", "| symptom | read | use |\n|---|---|---|\n| a | 05, Fix |\n"])
def test_a_page_without_the_table_is_refused(rows: str):
    with pytest.raises(ValueError, match="no table of symptoms of three columns"):
        read_symptoms(f"# What do you see?\n\n{rows}\n")
