"""A notebook as a page: nbconvert renders its cells and stored outputs; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

from markdown.extensions.toc import nest_toc_tokens, slugify, unique
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from symptoms import Symptom, find_section
from traitlets.config import Config

TEMPLATE = Path(__file__).with_name("notebook.html.j2")


@dataclass
class Heading:
    """A heading of a page, and the symptoms that its section explains."""

    level: int
    text: str
    html: str
    id: str
    symptoms: list[Symptom] = field(default_factory=list)

    def render(self) -> str:
        """The heading with a link to itself, and what readers may have come for."""
        link = f'<a class="headerlink" href="#{self.id}" title="Link to this section">¶</a>'
        heading = f'<h{self.level} id="{self.id}">{self.html}{link}</h{self.level}>'
        return heading + seen_here(self.symptoms, self.level + 1)


class Chapter:
    """A notebook's page.

    Attributes:
        stem: The notebook's name without its ending, which is the page's too.
        headings: In order; the first is the title.
        images: What the page shows besides its text: contents by file names relative to the page.
    """

    def __init__(self, notebook: Path) -> None:
        self.stem = notebook.stem
        body, resources = exporter().from_filename(str(notebook), {"output_files_dir": notebook.stem})
        # The theme looks for <code>, for its colours and for the button that copies.
        self._body = re.sub(r"<pre><span></span>(.*?)</pre>", r"<pre><code>\1</code></pre>", body, flags=re.DOTALL)
        self.images: dict[str, bytes] = resources["outputs"]
        self.headings: list[Heading] = []
        ids: set[str] = set()
        for level, html in re.findall(r"<h([1-6])[^>]*>(.*?)</h\1>", self._body, re.DOTALL):
            text = unescape(re.sub(r"<[^>]+>", "", html))
            self.headings.append(Heading(int(level), text, html, unique(slugify(text, "-"), ids)))

    @property
    def title(self) -> str:
        """The question that the chapter opens with, and its number."""
        return self.headings[0].text

    def explain(self, symptom: Symptom) -> None:
        """Note at its section that the chapter explains a symptom."""
        self.section_of(symptom).symptoms.append(symptom)

    def section_of(self, symptom: Symptom) -> Heading:
        """The heading of the section that explains a symptom."""
        return self.headings[find_section(symptom.place, [heading.text for heading in self.headings])]

    def html(self) -> str:
        """The body of the page."""
        headings = iter(self.headings)
        body = re.sub(r"<h([1-6])[^>]*>.*?</h\1>", lambda _: next(headings).render(), self._body, flags=re.DOTALL)
        return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', body)

    def toc_tokens(self) -> Sequence[dict[str, Any]]:
        """The headings as a tree, as MkDocs wants them."""
        return nest_toc_tokens(
            [
                {"level": h.level, "id": h.id, "name": h.text, "html": h.html, "data-toc-label": ""}
                for h in self.headings
            ]
        )


def seen_here(symptoms: list[Symptom], level: int) -> str:
    """What a section explains: a heading of its own for each symptom, as the search finds and names headings."""
    if not symptoms:
        return ""
    rows = []
    for row in symptoms:
        ref = "seen-" + slugify(row.seen, "-")
        rows.append(f'<h{level} id="{ref}">{inline(row.seen)}</h{level}><p>Use: {inline(row.use)}</p>')
    title = '<p class="admonition-title">What you may have seen</p>'
    return f'<div class="admonition symptom">{title}{"".join(rows)}</div>'


def exporter() -> HTMLExporter:
    """nbconvert's, with the template beside this file."""
    config = Config({"HTMLExporter": {"preprocessors": ["nbconvert.preprocessors.ExtractOutputPreprocessor"]}})
    html_exporter = HTMLExporter(config, template_file=str(TEMPLATE), exclude_anchor_links=True)
    html_exporter.register_filter("what_it_shows", partial(bracketed, "figure"))
    html_exporter.register_filter("what_it_moves", partial(bracketed, "interactive"))
    return html_exporter


def bracketed(kind: str, text: str) -> str:
    """What the workbook says in place of a picture or a widget, `[kind: …]`; empty if it is something else."""
    found = re.fullmatch(rf"\[{kind}: (.*)\]", text.strip(), re.DOTALL)
    return found[1] if found else ""


def inline(markdown: str) -> str:
    """A line of Markdown as HTML, without a paragraph round it."""
    return re.sub(r"^<p>|</p>$", "", markdown2html(markdown).strip())
