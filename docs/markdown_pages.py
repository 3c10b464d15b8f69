"""README.md as the front page, and the pages of docs/pages/, whose links are turned from the repository to the site."""

from __future__ import annotations

import re
from pathlib import Path

from chapters import Chapter, seen_here
from symptoms import Symptom

PAGES = Path(__file__).with_name("pages")
SYMPTOMS = "symptoms.md"
PLAYED_SCRIPT = "chapters/10_check_your_run.md#an-unchanged-script"
"""Where the site shows the file that the README's report is of."""
HOW_TO_FIND = "Paste your error message into the search at the top of any page, or filter this table."


def titles() -> dict[str, str]:
    """The title of each page of docs/pages/, by its file."""
    first_lines = {path.name: path.read_text(encoding="utf-8").partition("\n")[0] for path in PAGES.glob("*.md")}
    return {name: line.removeprefix("# ") for name, line in first_lines.items()}


def front_page(readme: str) -> str:
    """README.md, whose links are turned to the site's pages."""
    return links_to_pages(readme)


def other_page(name: str, text: str, symptoms: list[Symptom], chapters: list[Chapter]) -> str:
    """A page of docs/pages/: under its title stand the symptoms that it explains.

    Raises:
        ValueError: A symptom's place is no section of its chapter.
    """
    if name == SYMPTOMS:
        return f"# {titles()[name]}\n\n{symptom_index(symptoms, chapters)}"
    title, _, rest = links_to_pages(text).partition("\n")
    here = [symptom for symptom in symptoms if symptom.chapter is None and f"# {symptom.place}" == title]
    return f"{title}\n\n{seen_here(here, level=3)}\n{rest}"


def links_to_pages(text: str) -> str:
    """Links into the repository, from its top or from docs/pages/, as links to the site's pages."""
    text = text.replace("](../../", "](")
    text = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](chapters/\1.md)", text)
    text = re.sub(r"\]\(notebooks/(\w+\.png)\)", r"](assets/\1)", text)
    text = text.replace("](notebooks/workbook/ch10_runs/train.py)", f"]({PLAYED_SCRIPT})")
    text = re.sub(r"\]\(docs/pages/(\w+\.(?:md|png))\)", r"](\1)", text)
    text = text.replace("](CHANGELOG.md)", "](changes.md)").replace("](CONTRIBUTING.md)", "](contributing.md)")
    return text.replace("](data/README.md)", "](data.md)").replace("](README.md)", "](index.md)")


def symptom_index(symptoms: list[Symptom], chapters: list[Chapter]) -> str:
    """The table of symptoms, each with a link to the section that explains it."""
    # The sections themselves hold the symptoms, so that a search leads there rather than here.
    lines = ["| what you see | read | use |", "|---|---|---|"]
    for symptom in symptoms:
        lines.append(f"| {symptom.seen} | {link_to_its_section(symptom, chapters)} | {symptom.use} |")
    start = [HOW_TO_FIND, "", '<div class="filtered" data-search-exclude markdown>', ""]
    return "\n".join([*start, *lines, "", "</div>", ""])


def link_to_its_section(symptom: Symptom, chapters: list[Chapter]) -> str:
    """The place of a symptom as a link."""
    if symptom.chapter is None:
        (page,) = (name for name, title in titles().items() if title == symptom.place)
        return f"[{symptom.place}]({page})"
    for chapter in chapters:
        if chapter.stem.startswith(symptom.chapter):
            return f"[{symptom.place}](chapters/{chapter.stem}.md#{chapter.section_of(symptom).id})"
    raise ValueError(f"{SYMPTOMS} sends readers to a chapter that is not there: {symptom.place!r}")
