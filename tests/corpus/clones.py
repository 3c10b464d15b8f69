"""The public repositories: a clone of each, and a work tree of it at the commit that is recorded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.corpus.records import Repository


class NotHere(RuntimeError):
    """A repository that is neither in the folder nor could be fetched."""


def work_tree(repository: Repository, clones: Path) -> Path:
    """The repository's files at its commit, made once; ``clones`` holds clones by owner and name.

    Raises:
        NotHere: There is no clone, and none could be fetched.
    """
    tree = clones / ".trees" / f"{repository.name.replace('/', '+')}-{repository.commit[:12]}"
    if tree.exists():
        return tree
    clone = clones / repository.name
    if not _has(clone, repository.commit):
        _fetch(repository, clone)
    unfinished = tree.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    without = [f":(exclude,literal){path}" for path in _lacking(clone, repository.commit)]
    archive = subprocess.run(
        _git(clone, "archive", repository.commit, "--", ".", *without), capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract", "--directory", str(unfinished)], input=archive.stdout, check=True)
    return unfinished.rename(tree)


def _lacking(clone: Path, commit: str) -> list[str]:
    """The files whose contents a partial clone has left away, as it does with large data."""
    listed = subprocess.run(_git(clone, "ls-tree", "-r", "-z", commit), capture_output=True, text=True, check=True)
    entries = [entry.partition("\t") for entry in listed.stdout.split("\0") if entry]
    blobs = "".join(f"{about.split()[2]}\n" for about, _, _ in entries)
    asked = subprocess.run(
        _git(clone, "cat-file", "--batch-check"), input=blobs, capture_output=True, text=True, check=True
    )
    there = asked.stdout.splitlines()
    return [
        path
        for (about, _, path), said in zip(entries, there, strict=True)
        if said.endswith("missing") and about.split()[1] == "blob"
    ]


def _has(clone: Path, commit: str) -> bool:
    return clone.is_dir() and subprocess.run(_git(clone, "cat-file", "-e", commit), capture_output=True).returncode == 0


def _fetch(repository: Repository, clone: Path) -> None:
    """That commit alone, from the public address."""
    clone.mkdir(parents=True, exist_ok=True)
    if not (clone / "HEAD").exists() and not (clone / ".git").exists():
        subprocess.run(["git", "init", "--quiet", "--bare", str(clone)], check=True)
    fetch = _git(clone, "fetch", "--quiet", "--depth", "1", repository.address, repository.commit)
    fetched = subprocess.run(fetch, capture_output=True, text=True, env=_without_prompts())
    if fetched.returncode:
        why = fetched.stderr.strip().splitlines()[-1:] or ["git fetch failed"]
        raise NotHere(f"{clone} has no commit {repository.commit[:12]}, and {repository.address} gave none: {why[0]}")


def _without_prompts() -> dict[str, str]:
    return {**os.environ, "GIT_TERMINAL_PROMPT": "0"}


def _git(clone: Path, *arguments: str) -> list[str]:
    return ["git", "-c", "safe.directory=*", "-C", str(clone), *arguments]
