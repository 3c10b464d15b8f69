"""What MkDocs calls: the site is made of the notebooks, README.md, docs/pages/, the ledger and the docstrings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chapters import Chapter
from ledger import ledger_page
from markdown_pages import SYMPTOMS, front_page, other_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import get_toc
from reference import public_modules, reference_page
from symptoms import Symptom, read_symptoms

ROOT = Path(__file__).parents[1]
CHAPTERS: dict[str, Chapter] = {}
"""By the page's file; filled at the start of a build."""
SEEN: list[Symptom] = []
"""All symptoms; filled with the chapters."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read the notebooks, and list the pages."""
    for notebook in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        CHAPTERS[f"chapters/{notebook.stem}.md"] = Chapter(notebook)
    SEEN[:] = read_symptoms((ROOT / "docs" / "pages" / SYMPTOMS).read_text(encoding="utf-8"))
    for symptom in SEEN:
        for chapter in CHAPTERS.values():
            if symptom.chapter and chapter.stem.startswith(symptom.chapter):
                chapter.explain(symptom)
    config.nav = [
        {"Every Batch Counts": "index.md"},
        {"What do you see?": SYMPTOMS},
        {"Chapters": [{chapter.title.replace("`", ""): page} for page, chapter in CHAPTERS.items()]},
        {"Check your run": "rehearse.md"},
        {"Public scripts, judged": "gallery.md"},
        {"In your own project": "reuse.md"},
        {"What goes with what": "together.md"},
        {"API": [{name: f"api/{name}.md"} for name in (*public_modules(ROOT / "course_lib"), "rehearse")]},
        {"Claims": "claims.md"},
        {"Notebooks as tests": "tests.md"},
        {"What was measured": "measured.md"},
        {"What each fault costs": "prices.md"},
        {"Installing": "install.md"},
        {"Data": "data.md"},
        {"Changes": "changes.md"},
        {"Contributing": "contributing.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and their pictures."""
    chapters = list(CHAPTERS.values())
    pages = {"index.md": front_page((ROOT / "README.md").read_text(encoding="utf-8"))}
    pages["claims.md"] = ledger_page((ROOT / "data" / "claims.json").read_text(encoding="utf-8"), chapters)
    pages["data.md"] = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    pages["changes.md"] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pages["contributing.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in public_modules(ROOT / "course_lib"):
        pages[f"api/{name}.md"] = reference_page(f"course_lib.{name}")
    pages["api/rehearse.md"] = reference_page("rehearse")
    for page, chapter in CHAPTERS.items():
        pages[page] = ""  # on_page_content has its HTML
        for name, content in chapter.images.items():
            files.append(File.generated(config, f"chapters/{name}", content=content))
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for picture in (ROOT / "notebooks").glob("*.png"):
        files.append(File.generated(config, f"assets/{picture.name}", abs_src_path=str(picture)))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page of docs/pages/ with its symptoms, and its links turned."""
    name = page.file.src_uri
    if not name.startswith(("chapters/", "index")):
        page.meta.setdefault("search", {"boost": 0.5})  # a reader with a message is led to the chapters first
    if page.file.generated_by:
        return markdown
    return other_page(name, markdown, SEEN, list(CHAPTERS.values()))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """A chapter's body, and its table of contents."""
    chapter = CHAPTERS.get(page.file.src_uri)
    if chapter is None:
        return html
    page.toc = get_toc(chapter.toc_tokens())
    page.present_anchor_ids = {heading.id for heading in chapter.headings}
    return chapter.html()


@event_priority(-50)  # the plugin `search` has written its index, and `offline` is to make a script of it
def on_post_build(config: MkDocsConfig) -> None:
    """A reader with a message is led to what explains it, before pages that happen to hold the same words."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        if "#seen-" in entry["location"]:
            entry["boost"] = 20
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
