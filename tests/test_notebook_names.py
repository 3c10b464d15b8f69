"""A function of a notebook reads no name that only a loop outside of it binds: it would have the loop's last value."""

import ast
import symtable
from collections.abc import Iterator
from itertools import chain

import pytest

from tests.notebook_rules import ROOT, Notebook, code_cells, source, syntax_tree
from tests.test_notebooks import read


class Bound(ast.NodeVisitor):
    """The names that a module's own lines bind, those of its loops apart."""

    def __init__(self) -> None:
        self.by_loops: set[str] = set()
        self.otherwise: set[str] = set()

    def visit_For(self, node: ast.For) -> None:
        self.by_loops |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        for child in (node.iter, *node.body, *node.orelse):
            self.visit(child)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.otherwise.add(node.id)

    def visit_alias(self, node: ast.alias) -> None:
        self.otherwise.add((node.asname or node.name).partition(".")[0])

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.otherwise.add(node.name)

    def _own_scope(self, node: ast.AST) -> None:
        pass

    visit_FunctionDef = visit_ClassDef = _definition
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_Lambda = _own_scope


COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr", "lambda"}
"""They run where they stand; a function at some other time."""


def globals_of(table: symtable.SymbolTable, function: str = "") -> Iterator[tuple[str, str]]:
    for child in table.get_children():
        inside = function
        if child.get_type() == "function" and child.get_name() not in COMPREHENSIONS:
            inside = child.get_name()
        if inside:
            for symbol in child.get_symbols():
                if symbol.is_global() and symbol.is_referenced():
                    yield inside, symbol.get_name()
        yield from globals_of(child, inside)


def left_by_a_loop(notebook: Notebook) -> list[tuple[str, str]]:
    """Functions, and the names in them that have the last value of a loop elsewhere."""
    bound = Bound()
    cells = [cell for cell in code_cells(notebook) if syntax_tree(cell)]
    for cell in cells:
        bound.visit(ast.parse(source(cell)))
    read_names = chain.from_iterable(globals_of(symtable.symtable(source(cell), "", "exec")) for cell in cells)
    return [(function, name) for function, name in read_names if name in bound.by_loops - bound.otherwise]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_function_of_a_notebook_reads_what_a_loop_left_behind(path):
    assert left_by_a_loop(read(path)) == []


LOOP = "for epoch in range(3):\n    print(epoch)"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("def f():\n    for _ in range(3):\n        print(epoch)", [("f", "epoch")]),
        ("def f():\n    def g():\n        return epoch\n    return g()", [("g", "epoch")]),
        ("def f():\n    for epoch in range(3):\n        print(epoch)", []),
        ("def f(epoch):\n    return [epoch for _ in range(2)]", []),
        ("def f():\n    return [epoch for _ in range(2)]", [("f", "epoch")]),
        ("found = [epoch for _ in range(2)]", []),
        ("epoch = 0\ndef f():\n    return epoch", []),
    ],
)
def test_what_a_loop_left_behind_is_found(function, found):
    cells = [{"cell_type": "code", "id": str(n), "source": text} for n, text in enumerate((LOOP, function))]
    assert left_by_a_loop({"cells": cells}) == found
