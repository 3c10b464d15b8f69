"""The pages of the API: mkdocstrings reads the docstrings without importing anything."""

from __future__ import annotations

import re
from pathlib import Path

import griffe


def public_modules(library: Path) -> list[str]:
    """The topics, and the callbacks: what stands in the library's folder without an underscore."""
    names = {path.stem for path in library.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return sorted(name for name in names if not name.startswith("_"))


def reference_page(module: str) -> str:
    """The Markdown from which mkdocstrings makes the page of a module."""
    return f"# `{module}`\n\n::: {module}\n"


class RolesAsCode(griffe.Extension):
    """Docstrings in Markdown: a cross-reference (``:func:`name` ``) becomes code, a literal block's ``::`` a colon."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
