"""The claims' ledger as a page: a table of advice that circulates, each row with a link to the cell that settles it."""

from __future__ import annotations

import json
from html import escape

from chapters import Chapter, inline

VERDICTS = {"T": "true", "I": "imprecise", "F": "false", "V": "depends on the version"}
INTRODUCTION = """# Claims

Advice on batches that circulates, and what became of it when a chapter tried it. Each row leads to the cell that
settles the claim; that cell runs as a test, and raises an error where the verdict no longer holds.
"""


def ledger_page(claims: str, chapters: list[Chapter]) -> str:
    """The page's Markdown, from the text of ``data/claims.json``."""
    titles = {chapter.stem: chapter.title for chapter in chapters}
    head = "<th>claim</th><th data-choices>verdict</th><th>because</th><th data-choices>chapter</th>"
    rows = []
    for row in json.loads(claims):
        chapter = row["chapter"]
        where = chapter[:2]
        if chapter in titles:
            title = escape(titles[chapter], quote=True)
            where = f'<a href="chapters/{chapter}.html#cell-{row["cell"]}" title="{title}">{where}</a>'
        cells = (inline(row["claim"]), VERDICTS[row["verdict"]], inline(row["reason"]), where)
        rows.append(f'<tr id="{row["id"]}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    # Each chapter has its own rows: a search leads there.
    return f'{INTRODUCTION}\n<div class="filtered" data-search-exclude>{table}</div>\n'
