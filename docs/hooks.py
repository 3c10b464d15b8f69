"""What MkDocs calls: every page of the site is made from the notebooks, README.md, the ledger and the docstrings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chapters import Chapter
from ledger import ledger_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import get_toc
from readme import readme_pages
from reference import public_modules, reference_page

ROOT = Path(__file__).parents[1]
CHAPTERS: dict[str, Chapter] = {}
"""By the page's file; filled at the start of a build."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read the notebooks, and list the pages."""
    for notebook in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        CHAPTERS[f"chapters/{notebook.stem}.md"] = Chapter(notebook)
    config.nav = [
        {"What do you see?": "index.md"},
        {"Chapters": [{chapter.title.replace("`", ""): page} for page, chapter in CHAPTERS.items()]},
        {"In your own project": "reuse.md"},
        {"API": [{name: f"api/{name}.md"} for name in public_modules(ROOT / "course_lib")]},
        {"Claims": "claims.md"},
        {"Tests and measurements": "measured.md"},
        {"Data": "data.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and their pictures."""
    chapters = list(CHAPTERS.values())
    pages = readme_pages((ROOT / "README.md").read_text(encoding="utf-8"), chapters)
    pages["claims.md"] = ledger_page((ROOT / "data" / "claims.json").read_text(encoding="utf-8"), chapters)
    pages["data.md"] = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    for name in public_modules(ROOT / "course_lib"):
        pages[f"api/{name}.md"] = reference_page(name)
    for page, chapter in CHAPTERS.items():
        pages[page] = ""  # on_page_content has its HTML
        for name, content in chapter.images.items():
            files.append(File.generated(config, f"chapters/{name}", content=content))
    for page, text in pages.items():
        if not page.startswith(("chapters/", "index")):
            text = f"---\nsearch:\n  boost: 0.5\n---\n{text}"  # a reader with a message is led to the chapters first
        files.append(File.generated(config, page, content=text))
    for picture in (ROOT / "notebooks").glob("*.png"):
        files.append(File.generated(config, f"assets/{picture.name}", abs_src_path=str(picture)))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    return files


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
