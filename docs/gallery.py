"""The gallery, docs/pages/gallery.md, from the records of the corpus: ``python docs/gallery.py`` writes it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

# ruff: noqa: E501  # paragraphs of Markdown

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "corpus" / "records.toml"
PAGE = ROOT / "docs" / "pages" / "gallery.md"
START = """\
# Public scripts, judged

{scripts} training scripts of {repositories} public repositories, at the commits that are named here, were rehearsed or tried as they stand: `make corpus` does it again, and fails where a report differs from what was read in the script by hand. The data alone is generated, in the form of the true data, so nothing here says how well a model learns.

**{right} of the {judged} that could be judged have nothing against them.** {found} below have a finding that is true, and in {missed} more something is true that no check looks for.{failing} Most are examples, written to show one thing in few lines, and they show it: a finding says what a longer run would do that is built on one. Each can be read at its link; none of their code is quoted.

## What was found
"""
MISSED = """
## What was not found
"""
RIGHT = """
## What was right

Steps are those that the script makes, reckoned from it by hand; the report counts the same number.

| script | started with | optimizer steps |
|---|---|---|
"""
FAILING = """
## What did not start

With the versions that this book uses (its lock file), or without a GPU; the report says why, and judges nothing.

| script | why |
|---|---|
"""


def gallery_page(records: str) -> str:
    """The page in Markdown; ``records``: the text of records.toml."""
    written = tomllib.loads(records)
    scripts = [(repository, script) for repository in written["repository"] for script in repository["scripts"]]
    found = [pair for pair in scripts if pair[1].get("findings")]
    failing = [pair for pair in scripts if pair[1].get("fails")]
    missed = [pair for pair in scripts if pair[1].get("missed")]
    right = [pair for pair in scripts if pair not in [*found, *missed, *failing]]
    page = START.format(
        scripts=len(scripts),
        repositories=len(written["repository"]),
        judged=len(scripts) - len(failing),
        right=len(right),
        found=len(found),
        missed=len(missed),
        failing=f" {len(failing)} did not start here." if failing else "",
    )
    page += "".join(_told(*pair, "findings") for pair in found)
    page += MISSED + "".join(_told(*pair, "missed") for pair in missed)
    page += RIGHT
    for repository, script in right:
        steps = f"{script['steps']:,}: " if "steps" in script else ""
        page += f"| {_link(repository, script)} | {_started(script)} | {steps}{script['reckoned']} |\n"
    if failing:
        page += FAILING
        page += "".join(f"| {_link(*pair)} | {pair[1]['because']} |\n" for pair in failing)
    return page


def _told(repository: dict[str, Any], script: dict[str, Any], name: str) -> str:
    text = f"\n### {repository['name']}, {script['file']}\n\n"
    text += f"[The script]({_address(repository, script)}) at {repository['commit'][:7]}, {_started(script)}.\n"
    for finding in script[name]:
        text += f"\n**`{finding['check']}`**: {finding['what']} *Why it is true:* {finding['why']} "
        text += f"*What it costs their run:* {finding['costs']}\n"
    return text


def _link(repository: dict[str, Any], script: dict[str, Any]) -> str:
    shown = f"{repository['name']}, {script['file']}"
    return f"[{shown}]({_address(repository, script)}) at {repository['commit'][:7]}"


def _address(repository: dict[str, Any], script: dict[str, Any]) -> str:
    return f"https://github.com/{repository['name']}/blob/{repository['commit']}/{script['file']}"


def _started(script: dict[str, Any]) -> str:
    arguments = " ".join(script.get("arguments", []))
    return f"`{arguments}`" if arguments else "no arguments"


if __name__ == "__main__":
    PAGE.write_text(gallery_page(RECORDS.read_text(encoding="utf-8")), encoding="utf-8")
