"""resume: whether what a played script saves is taken up again by some line of it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable
from pathlib import Path

from course_lib.preflight.report import Judgement, not_applicable
from course_lib.timelapse.journal import Journal, Loaded, Saved

ANY = "*"
"""Among the keys that are read: one that is no text in the source, as in a loop over names."""
STATES = {"optimizer": "the optimizer's state", "schedule": "the schedule's state", "scaler": "the GradScaler's state"}


def judge_resume(journal: Journal) -> Judgement:
    saves = [event for event in journal.events if isinstance(event, Saved)]
    if not saves:
        return not_applicable("resume", "the script saves no checkpoint")
    keys = {key: kind for event in saves for key, kind in event.states if key and kind in STATES}
    if not keys:
        return not_applicable("resume", "what the script saves holds no state of an optimizer under a key")
    read = keys_read(journal.sources)
    taken_up = {event.what for event in journal.events if isinstance(event, Loaded)}
    loaded = {key for key, kind in keys.items() if key in read or ANY in read or kind in taken_up}
    if not loaded:
        return Judgement(notes=[f"resume: no line of the script reads {_named(keys)} from a checkpoint again"])
    forgotten = [key for key in keys if key not in loaded]
    if forgotten:
        key = forgotten[0]
        return Judgement().find(
            "resume",
            f'The checkpoint holds {STATES[keys[key]]} under "{key}", and no line of the script reads it again; '
            f"{_named(loaded)} is read.",
            "A run that is resumed goes on with that state at its start: a schedule begins anew, averages are lost.",
            f'Take it up where the rest is: ….load_state_dict(checkpoint["{key}"]).',
        )
    models = {key for event in saves for key, kind in event.states if key and kind == "model"}
    if ANY not in read and models - read:
        return Judgement(notes=[f"resume: no line of the script reads {_named(models - read)} from a checkpoint again"])
    kinds = {keys[key] for key in loaded}
    if journal.schedules and "optimizer" in kinds and "schedule" not in set(keys.values()):
        return Judgement(notes=["resume: no checkpoint holds the schedule's state"])
    return Judgement()


def _named(keys: Iterable[str]) -> str:
    return ", ".join(f'"{key}"' for key in sorted(keys))


def keys_read(sources: Iterable[str]) -> set[str]:
    """The texts that lines of the sources look something up by."""
    found: set[str] = set()
    for source in sources:
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            for node in ast.walk(ast.parse(Path(source).read_text(encoding="utf-8"))):
                found |= _key_of(node)
    return found


def _key_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict":
        states = [one for one in node.args[:1] if isinstance(one, ast.Subscript)]
        return {ANY for one in states if not isinstance(one.slice, ast.Constant)}
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        key = node.args[0] if node.args else None
    return {key.value} if isinstance(key, ast.Constant) and isinstance(key.value, str) else set()
