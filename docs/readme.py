"""README.md as pages: the front page with its table of symptoms, how to reuse the library, and what was measured."""

from __future__ import annotations

import re

from chapters import Chapter, seen_here
from symptoms import HEADING_OF_THE_TABLE, Symptom, read_symptoms

FRONT = ("", HEADING_OF_THE_TABLE, "Chapters", "Two commands", "Licence")
"""The sections of the front page, in its order; what stands above the first heading has no name."""
MEASURED = ("Notebooks as tests", "What was measured")
"""Those of the page on tests and measurements; every other section is about use in an own project."""
REUSE = "reuse.md"
HOW_TO_FIND = "Paste your error message into the search at the top of any page, or filter this table."


def readme_pages(readme: str, chapters: list[Chapter]) -> dict[str, str]:
    """The Markdown of each page, by its file; the chapters are told which symptoms they explain.

    Raises:
        ValueError: A symptom's place is no section of its chapter.
    """
    sections = split_sections(with_pages_as_targets(readme))
    symptoms = read_symptoms(readme)
    sections[HEADING_OF_THE_TABLE] = symptom_index(symptoms, chapters)
    for name in sections:
        here = [row for row in symptoms if row.chapter is None and row.place.partition(",")[0] == name]
        sections[name] = f"\n{seen_here(here, level=3)}\n{sections[name]}"
    other = [name for name in sections if name not in FRONT + MEASURED]
    pages = {"index.md": FRONT, REUSE: tuple(other), "measured.md": MEASURED}
    texts = {page: joined(names, sections) for page, names in pages.items()}
    # Each page has one title; the front page's is the README's.
    texts[REUSE] = texts[REUSE].replace("## ", "# ", 1)
    texts["measured.md"] = f"# Tests and measurements\n\n{texts['measured.md']}"
    return texts


def split_sections(readme: str) -> dict[str, str]:
    """The text under each heading of level 2, and that above the first under an empty name."""
    parts = re.split(r"^## (.+)\n", readme, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def joined(names: tuple[str, ...], sections: dict[str, str]) -> str:
    """Sections as one page, each under its heading."""
    return "\n".join(f"## {name}\n{sections[name]}" if name else sections[name] for name in names)


def with_pages_as_targets(text: str) -> str:
    """Links into the repository as links to the site's pages."""
    text = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](chapters/\1.md)", text)
    text = re.sub(r"\]\(notebooks/(\w+\.png)\)", r"](assets/\1)", text)
    return text.replace("](data/README.md)", "](data.md)")


def symptom_index(symptoms: list[Symptom], chapters: list[Chapter]) -> str:
    """The table of symptoms, each with a link to the section that explains it."""
    # The sections themselves hold the symptoms, so that a search leads there rather than here.
    lines = ["| what you see | read | use |", "|---|---|---|"]
    for symptom in symptoms:
        lines.append(f"| {symptom.seen} | {link_to_its_section(symptom, chapters)} | {symptom.use} |")
    start = ["", HOW_TO_FIND, "", '<div class="filtered" data-search-exclude markdown>', ""]
    return "\n".join([*start, *lines, "", "</div>", ""])


def link_to_its_section(symptom: Symptom, chapters: list[Chapter]) -> str:
    """The place of a symptom as a link; a chapter is told of it."""
    if symptom.chapter is None:
        name = symptom.place.partition(",")[0]
        return f"[{name}]({REUSE}#{name.lower().replace(' ', '-')})"
    for chapter in chapters:
        if chapter.stem.startswith(symptom.chapter):
            heading = chapter.explain(symptom)
            return f"[{symptom.place}](chapters/{chapter.stem}.md#{heading.id})"
    raise ValueError(f"README.md sends readers to a chapter that is not there: {symptom.place!r}")
