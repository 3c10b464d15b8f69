"""What a run of the tests leaves in the tree, beside the environment and the caches of the tools."""

import os
from pathlib import Path

TOOLS = {".git", ".venv", ".matrix", ".outsiders", ".corpus", ".site", "site", "wheelhouse", "__pycache__"}
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints"}


def files(root: Path) -> set[str]:
    """The files under a folder, by their paths in it."""
    found = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in TOOLS | CACHES]
        found |= {str(Path(folder, name).relative_to(root)) for name in names}
    return found
