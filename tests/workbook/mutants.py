"""Mutants of the solutions of the exercises: each has one slip, and a good check refuses it.

``python -m tests.workbook.mutants 05`` prints those that the checks of chapter 05 accept and that are not listed as
equivalent; with ``--all`` those that are listed, too.
"""

import argparse
import ast
import contextlib
import copy
import difflib
import importlib
import io
import json
import math
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from workbook.calls import OutOfTime, ended_after
from workbook.exercises import Exercise, NotSolved, PropertyExercise

from tests.workbook.equivalent_mutants import EQUIVALENT

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
SECONDS = 5
"""For a mutant of an exercise that needs fewer when the answer is right; others have what their check allows."""


@dataclass(frozen=True)
class Solved:
    """An exercise of a notebook, and the solution that is printed there."""

    chapter: str
    cell: str
    """Of the check."""
    exercise: Exercise | PropertyExercise
    sources: dict[str, str]
    """Of all cells of its notebook, by their ids."""
    answer: str
    """What the reader's answer is called."""

    @property
    def name(self) -> str:
        return self.cell.removeprefix("check-")

    @property
    def solution(self) -> str:
        found = re.search(r"```python\n(.*?)```", self.sources[f"solution-{self.name}"], re.DOTALL)
        assert found
        return found.group(1)


class Mutant(NamedTuple):
    change: str
    """What stands there, and what stands there instead."""
    code: str


def exercises() -> Iterator[Solved]:
    for notebook in CHAPTERS:
        sources = cell_sources(notebook)
        catalogue = importlib.import_module(f"workbook.ch{notebook}")
        for cell, source in sources.items():
            if cell.startswith("check-"):
                found = re.search(r"\w+\.(\w+)\.check\((\w+)\)", source)
                assert found
                yield Solved(notebook[:2], cell, getattr(catalogue, found[1]), sources, found[2])


def cell_sources(notebook: str) -> dict[str, str]:
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def run(code: str, answer: str) -> Any:
    """What a reader's cell gives the name ``answer``."""
    reader = types.ModuleType("reader")  # a module of its own, so that the classes in it can be pickled
    sys.modules["reader"] = reader
    vars(reader).update(math=math, np=np, torch=torch)
    exec(code, vars(reader))
    return getattr(reader, answer)


def is_accepted(solved: Solved, mutant: Mutant) -> bool:
    """Whether the check accepts it; code that raises, or never ends, before there is an answer is no answer."""
    exercise = solved.exercise
    if exercise.seconds <= 30:
        exercise = replace(exercise, seconds=SECONDS)
    grad = torch.is_grad_enabled()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        try:
            with ended_after(exercise.seconds):
                answer = run(mutant.code, solved.answer)
        except (Exception, OutOfTime):
            return False
        try:
            exercise.check(answer)
        except NotSolved:
            return False
        finally:
            torch.set_grad_enabled(grad)
    return True


def mutants(code: str) -> list[Mutant]:
    """All mutants of the code, each other than the code and once."""
    tree = ast.parse(code)
    original = ast.unparse(tree)
    found: dict[str, Mutant] = {}
    for position in range(len(list(ast.walk(tree)))):
        for number in range(MANY):
            changed = copy.deepcopy(tree)
            changes = list(_changes(list(ast.walk(changed))[position]))
            if number >= len(changes):
                break
            changes[number]()
            with contextlib.suppress(ValueError):  # a part that cannot be left out
                mutated = ast.unparse(ast.fix_missing_locations(changed))
                if mutated != original and mutated not in found and _is_python(mutated):
                    found[mutated] = Mutant(_told(original, mutated), mutated)
    return list(found.values())


MANY = 1000
"""No part of a solution has as many mutants."""


def _is_python(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _told(original: str, mutated: str) -> str:
    lines = [line for line in difflib.ndiff(original.splitlines(), mutated.splitlines()) if line[0] in "-+"]
    was, now = ([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return f"{' / '.join(was)}  ->  {' / '.join(now) or '(left out)'}"


BINARY: dict[type[ast.operator], list[type[ast.operator]]] = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.FloorDiv, ast.Add],
    ast.Div: [ast.Mult, ast.FloorDiv],
    ast.FloorDiv: [ast.Div, ast.Mult],
    ast.Mod: [ast.FloorDiv],
    ast.Pow: [ast.Mult],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
    ast.BitXor: [ast.BitAnd],
    ast.LShift: [ast.RShift],
    ast.RShift: [ast.LShift],
}
COMPARED: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OTHER_ROUNDING = {"floor": "ceil", "ceil": "floor"}


def _changes(node: ast.AST) -> Iterator[Any]:
    """Functions without arguments, each of which changes the node in one way."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        yield from (_set(node, "op", other()) for other in BINARY.get(type(node.op), []))
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            yield from (_put(node.ops, place, other()) for other in COMPARED[type(operator)])
    if isinstance(node, ast.BoolOp):
        yield _set(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield from _left_out(node.values, least=2)
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    if isinstance(node, (ast.Name, ast.Attribute)):
        field = "id" if isinstance(node, ast.Name) else "attr"
        if (name := getattr(node, field)) in OTHER_ROUNDING:
            yield _set(node, field, OTHER_ROUNDING[name])
    if isinstance(node, ast.Call):
        yield from _left_out(node.args)
        yield from _left_out(node.keywords)
    if isinstance(node, (ast.List, ast.Set, ast.Tuple)) and not isinstance(getattr(node, "ctx", None), ast.Store):
        yield from _left_out(node.elts)
    if isinstance(node, ast.Dict):
        for place in range(len(node.keys)):
            yield _both(_without(node.keys, place), _without(node.values, place))
    if isinstance(node, ast.comprehension):
        yield from _left_out(node.ifs)
    yield from _inner(node)
    yield from _statements(node)


def _constants(node: ast.Constant) -> Iterator[Any]:
    if isinstance(node.value, bool):
        yield _set(node, "value", not node.value)
    elif isinstance(node.value, (int, float)):
        yield from (_set(node, "value", node.value + by) for by in (1, -1))


def _inner(node: ast.AST) -> Iterator[Any]:
    """Changes of the expressions in a node that put another kind of node into their place."""
    for field, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        for place, inner in enumerate(values):
            other = None
            if isinstance(inner, ast.UnaryOp):  # `not`, a sign, ~
                other = inner.operand
            elif isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv):
                negated = ast.BinOp(ast.UnaryOp(ast.USub(), inner.left), ast.FloorDiv(), inner.right)
                other = ast.UnaryOp(ast.USub(), negated)  # the division rounded up
            elif isinstance(inner, ast.IfExp):
                yield _put(value, place, inner.body) if isinstance(value, list) else _set(node, field, inner.body)
                other = inner.orelse
            if other is not None:
                yield _put(value, place, other) if isinstance(value, list) else _set(node, field, other)
            if _is_rounded_up(inner):
                floored = ast.BinOp(inner.operand.left.operand, ast.FloorDiv(), inner.operand.right)  # type: ignore
                yield _put(value, place, floored) if isinstance(value, list) else _set(node, field, floored)


def _is_rounded_up(node: Any) -> bool:
    """``-(-a // b)``"""
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.BinOp)
        and isinstance(node.operand.op, ast.FloorDiv)
        and isinstance(node.operand.left, ast.UnaryOp)
        and isinstance(node.operand.left.op, ast.USub)
    )


def _statements(node: ast.AST) -> Iterator[Any]:
    """A statement left out; of one that has others inside, also its head alone."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            if isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_docstring(statement):
                continue
            yield _put(body, place, ast.Pass())
            if isinstance(statement, (ast.If, ast.With)):
                yield _splice(body, place, statement.body)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _left_out(parts: list[Any], least: int = 1) -> Iterator[Any]:
    if len(parts) >= least:
        yield from (_without(parts, place) for place in range(len(parts)))


def _set(node: ast.AST, field: str, value: Any) -> Any:
    return lambda: setattr(node, field, value)


def _put(parts: list[Any], place: int, value: Any) -> Any:
    return lambda: parts.__setitem__(place, value)


def _splice(parts: list[Any], place: int, values: list[Any]) -> Any:
    return lambda: parts.__setitem__(slice(place, place + 1), values)


def _without(parts: list[Any], place: int) -> Any:
    return lambda: parts.pop(place)


def _both(one: Any, other: Any) -> Any:
    return lambda: (one(), other())


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="python -m tests.workbook.mutants", description=(__doc__ or "").split("\n")[0]
    )
    arguments.add_argument("chapters", nargs="*", help="05 07; without any: all")
    arguments.add_argument("--check", default="", help="a part of the name of a check: those alone")
    arguments.add_argument("--all", action="store_true", help="print also those that are listed as equivalent")
    chosen = arguments.parse_args()
    for solved in exercises():
        if (chosen.chapters and solved.chapter not in chosen.chapters) or chosen.check not in solved.name:
            continue
        found, listed, unlisted = mutants(solved.solution), 0, []
        for mutant in found:
            if is_accepted(solved, mutant):
                known = (solved.name, mutant.change) in EQUIVALENT[solved.chapter]
                listed += known
                if chosen.all or not known:
                    unlisted.append(f"    {mutant.change}{'   (listed)' if known else ''}")
        print(
            f"{solved.chapter} {solved.name}: {len(found)} mutants, {listed} of them listed as equivalent", flush=True
        )
        print("".join(f"{line}\n" for line in unlisted), end="", flush=True)


if __name__ == "__main__":
    main()
