"""resume: whether what a rehearsed script saves is taken up again by some line of it."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rehearse.report import Judgement, not_applicable
from rehearse.scripts.journal import Journal, Loaded, Saved

ANY = "*"
"""Among the keys that are read: one that is no text in the source, as in a loop over names."""
STATES = {"optimizer": "the optimizer's state", "schedule": "the schedule's state", "scaler": "the GradScaler's state"}


def judge_resume(journal: Journal) -> Judgement:
    saves = [event for event in journal.events if isinstance(event, Saved)]
    if not saves:
        return not_applicable("resume", "the script saves no checkpoint")
    trees = list(_trees(journal.sources))
    keys = {key: kind for event in saves for key, kind in event.states if key and kind in STATES}
    numbers = {key for event in saves for key, kind in event.states if kind == "number"}
    if not keys:
        all_kinds = {kind for event in saves for _, kind in event.states}
        if not all_kinds & {*STATES, "nested"} and (begun := _begun_by(numbers, trees)):
            return _without_states(journal, begun, trees)
        return not_applicable("resume", "what the script saves holds no state of an optimizer under a key")
    read = _keys_read(trees)
    taken_up = {event.what for event in journal.events if isinstance(event, Loaded)}
    loaded = {key for key, kind in keys.items() if key in read or ANY in read or kind in taken_up}
    if not loaded:
        if begun := _begun_by(numbers, trees):
            return _forgotten(keys, next(iter(keys)), {begun})
        return Judgement(notes=[f"resume: no line of the script reads {_named(keys)} from a checkpoint again"])
    forgotten = [key for key in keys if key not in loaded]
    if forgotten:
        return _forgotten(keys, forgotten[0], loaded)
    models = {key for event in saves for key, kind in event.states if key and kind == "model"}
    if ANY not in read and models - read:
        return Judgement(notes=[f"resume: no line of the script reads {_named(models - read)} from a checkpoint again"])
    kinds = {keys[key] for key in loaded}
    if journal.schedules and "optimizer" in kinds and "schedule" not in set(keys.values()):
        return Judgement(notes=["resume: no checkpoint holds the schedule's state"])
    return Judgement()


def _forgotten(keys: Mapping[str, str], key: str, read: Iterable[str]) -> Judgement:
    return Judgement().find(
        "resume",
        f'The checkpoint holds {STATES[keys[key]]} under "{key}", and no line of the script reads it again; '
        f"{_named(read)} is read.",
        "A run that is resumed goes on with that state at its start: a schedule begins anew, averages are lost.",
        f'Take it up where the rest is: ….load_state_dict(checkpoint["{key}"]).',
    )


def _without_states(journal: Journal, begun: str, trees: Iterable[ast.AST]) -> Judgement:
    """The run goes on from a number in the checkpoint, and nothing else of the optimizer is in it."""
    optimizers = {optimizer.name for optimizer in journal.optimizers}
    begins_anew = bool(journal.schedules) and not _is_moved_to_its_epoch(trees)
    if not begins_anew and optimizers <= {"SGD"}:  # which may keep nothing; a rehearsal does not know its momentum
        return Judgement(notes=[f'resume: what begins at the checkpoint\'s "{begun}" has no state of the optimizer'])
    lost = "the schedule begins anew" if begins_anew else f"{' and '.join(sorted(optimizers))} has no averages"
    return Judgement().find(
        "resume",
        f'The script goes on from the "{begun}" of a checkpoint, which holds no state of an optimizer or a schedule.',
        f"A run that is resumed is another one: {lost}.",
        "Save their state_dict() beside the weights, and load them again: "
        'checkpoint = {…, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}.',
    )


def _begun_by(numbers: set[str], trees: Iterable[ast.AST]) -> str:
    """The number of a checkpoint with which a loop of the script begins; empty where none does.

    It is looked up by its key, and the name that it gets stands at the beginning of a ``range``, or in the condition
    with which a ``while`` ends.
    """
    for tree in trees:
        key_of_name: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                found = numbers & set().union(*(_key_of(part) for part in ast.walk(node.value)))
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                key_of_name |= {ast.unparse(target): key for key in found for target in targets}
        for node in ast.walk(tree):
            for part in _parts_of_a_beginning(node):
                if isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in key_of_name:
                    return key_of_name[ast.unparse(part)]
    return ""


def _is_moved_to_its_epoch(trees: Iterable[ast.AST]) -> bool:
    """Whether a schedule may be at its place without a state: by ``last_epoch=``, by a number that ``step`` is given,
    or by steps that are made up for, ``for _ in range(start): schedule.step()``."""
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Call) and any(keyword.arg == "last_epoch" for keyword in node.keywords):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".step") and node.args:
            given = ast.unparse(node.args[0])
            if "optim" not in given and "closure" not in given:  # scaler.step(optimizer), optimizer.step(closure)
                return True
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range":
            only_steps = all(ast.unparse(line).endswith(".step()") for line in node.body)
            if only_steps and len(node.iter.args) == 1:
                return True
    return False


def _parts_of_a_beginning(node: ast.AST) -> Iterator[ast.AST]:
    """Of the place where a loop's number begins."""
    if isinstance(node, ast.While):
        yield from ast.walk(node.test)
        for line in node.body:  # while True: … if number > last: break
            if isinstance(line, ast.If) and any(isinstance(one, ast.Break) for one in line.body):
                yield from ast.walk(line.test)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "trange") and len(node.args) > 1:
        yield from ast.walk(node.args[0])


def _named(keys: Iterable[str]) -> str:
    return ", ".join(f'"{key}"' for key in sorted(keys))


def _keys_read(trees: Iterable[ast.AST]) -> set[str]:
    """The texts that lines of the sources look something up by."""
    return set().union(*map(_key_of, itertools.chain.from_iterable(map(ast.walk, trees))))


def _trees(sources: Iterable[str]) -> Iterator[ast.Module]:
    for source in sources:
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            yield ast.parse(Path(source).read_text(encoding="utf-8"))


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
