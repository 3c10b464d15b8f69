"""Run the cells of a notebook that use the device, elsewhere than in a kernel, and compare what they print.

    python -m tests.pretended.cells notebooks/04_gradient_accumulation.ipynb cuda noise:1 noise:2

prints a JSON object: which cells were compared, and for each pretence what differed. A cell uses the device if a
statement of it names the device, or something that such a statement made. What those need of other cells runs along.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import copy
import functools
import json
import os
import re
import symtable
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from tests.notebook_rules import ROOT, Cell, Notebook, code_cells, is_ignored, joined, source, tags

DEVICE = {"device", "cuda", "choose_device", "rank_device", "pin_memory"}
"""Names, attributes and arguments that stand for the device."""
MUTATING = {"append", "extend", "update", "add", "commit", "clear", "pop", "fit"}


def cells_that_use_the_device(notebook: Notebook) -> list[Cell]:
    """Those that name it, and those that use what such a statement has made, in order."""
    made: set[str] = set()
    found = []
    for cell in code_cells(notebook):
        for statement in _statements(source(cell)):
            if _names_the_device(statement) or made & _loaded(statement):
                made |= _bound(statement) | _changed(statement)
                if cell not in found:
                    found.append(cell)
            else:
                made -= _bound(statement)
    return found


def names_the_device(notebook: Notebook) -> bool:
    """Whether a cell does, so that there are cells that use it."""
    return any(_names_the_device(statement) for cell in code_cells(notebook) for statement in _statements(source(cell)))


def cells_to_run(notebook: Notebook, wanted: list[Cell]) -> list[Cell]:
    """The wanted cells, and of the earlier ones the statements that bind or change what they read."""
    chosen, needed = [], set[str]()
    for cell in reversed(code_cells(notebook)):
        statements = _statements(source(cell))
        if cell not in wanted:
            statements = _of_use(statements, needed)
            cell = cell | {"source": _code(statements)}
        if statements:
            chosen.append(cell)
            needed = _needed(statements, needed)
    return chosen[::-1]


def _of_use(statements: list[ast.stmt], needed: set[str]) -> list[ast.stmt]:
    """Those that bind or change what is needed after them."""
    found: list[ast.stmt] = []
    for statement in reversed(statements):
        if (_bound(statement) | _changed(statement)) & needed:
            found.insert(0, statement)
            needed = _needed([statement], needed)
    return found


def cells_without(left_out: Collection[str], notebook: Notebook, wanted: list[Cell]) -> list[Cell]:
    """The wanted cells that run without what the cells of these ids do; what they define is there."""
    found = []
    for cell in wanted:
        run = [each for each in cells_to_run(notebook, [cell]) if each["id"] in left_out]
        if not any(map(_does, run)):
            found.append(cell)
    return found


def _does(cell: Cell) -> bool:
    definitions = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return not all(isinstance(statement, definitions) for statement in _statements(source(cell)))


def _code(statements: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, statements))


@functools.cache
def _statements(code: str) -> list[ast.stmt]:
    return ast.parse(code).body


def _needed(statements: list[ast.stmt], afterwards: Iterable[str] = ()) -> set[str]:
    """Global names that must have a value before the statements, for them and for what is needed afterwards."""
    names = set(afterwards)
    for statement in reversed(statements):
        names -= _bound(statement)
        names |= _loaded(statement)
    return names


def _names_the_device(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    nodes = list(ast.walk(statement))
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {node.arg for node in nodes if isinstance(node, ast.keyword)}
    return bool(DEVICE & words)


@functools.cache
def _loaded(statement: ast.stmt) -> set[str]:
    """Global names that it reads, those of its functions included."""
    if isinstance(statement, ast.For):
        inside = _needed(statement.body) | _needed(statement.orelse)
        return inside - _bound(ast.Assign([statement.target], ast.Constant(0))) | _loaded(ast.Expr(statement.iter))
    if isinstance(statement, ast.With):
        headers = ast.With(statement.items, [ast.Pass()])
        return _read(headers) | _needed(statement.body) - _bound(headers)
    if isinstance(statement, ast.If):
        return _read(ast.Expr(statement.test)) | _needed(statement.body) | _needed(statement.orelse)
    if isinstance(statement, ast.Try):
        names = _needed(statement.body + statement.orelse) | _needed(statement.finalbody)
        for handler in statement.handlers:
            names |= _needed(handler.body) - {handler.name}
            names |= _read(ast.Expr(handler.type)) if handler.type else set()
        return names
    return _read(statement)


def _read(statement: ast.stmt) -> set[str]:
    top = _scope(statement)
    inner, ahead = [], list(top.get_children())
    while ahead:
        inner.append(ahead.pop())
        ahead += inner[-1].get_children()
    names = {symbol.get_name() for scope in inner for symbol in scope.get_symbols() if symbol.is_global()}
    return names | {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}


@functools.cache
def _bound(statement: ast.stmt) -> set[str]:
    """Global names that it gives a value."""
    if isinstance(statement, ast.AugAssign):
        return set()
    symbols = _scope(statement).get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


class _ComprehensionsAsGenerators(ast.NodeTransformer):
    """From Python 3.12 on a comprehension has no scope of its own in the symbol table; a generator has one."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return ast.GeneratorExp(self.visit(node.elt), [self.visit(each) for each in node.generators])

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        pair = ast.Tuple([self.visit(node.key), self.visit(node.value)], ast.Load())
        return ast.GeneratorExp(pair, [self.visit(each) for each in node.generators])


def _scope(statement: ast.stmt) -> symtable.SymbolTable:
    analysed = _ComprehensionsAsGenerators().visit(copy.deepcopy(statement))
    return symtable.symtable(ast.unparse(ast.fix_missing_locations(analysed)), "cell", "exec")


@functools.cache
def _changed(statement: ast.stmt) -> set[str]:
    """Names whose object a statement changes: `x.append(1)`, `x[0] = 1`, `x |= y`, `trainer.fit(x)`."""
    changed = _root(statement.target) if isinstance(statement, ast.AugAssign) else set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            changed |= _root(node.func)
            if node.func.attr == "fit":
                changed = changed.union(*map(_root, node.args))
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed |= _root(node)
    return changed


def _root(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


# ------------------------------------------------------------------------------------------------------- running


def run_pretended(path: Path, pretences: list[str], left_out: Collection[str] = ()) -> dict[str, Any]:
    """Run the cells once for each of ``"plain"``, ``"cuda"``, ``"noise:<seed>"`` and ``"cuda+noise:<seed>"``."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    wanted = cells_without(left_out, notebook, cells_that_use_the_device(notebook))
    cells = cells_to_run(notebook, wanted)
    differences, seconds = {}, {}
    for pretence in pretences:
        start = time.perf_counter()
        with _fresh_process_state(), _mode(pretence):
            differences[pretence] = list(_differences(cells, wanted))
        seconds[pretence] = round(time.perf_counter() - start, 1)
    return {"compared": [cell["id"] for cell in wanted], "differences": differences, "seconds": seconds}


def send_pretended(connection: Connection, *arguments: Any) -> None:
    """Send what :func:`rehearse` returns, or the traceback of what it raises."""
    try:
        connection.send(run_pretended(*arguments))
    except BaseException:
        connection.send(traceback.format_exc())


@contextlib.contextmanager
def _mode(pretence: str) -> Iterator[None]:
    from tests.pretended.pretend_cuda import pretend_cuda
    from tests.pretended.rounding import RoundingNoise

    kinds, _, seed = pretence.partition(":")
    with contextlib.ExitStack() as stack:
        if "noise" in kinds:
            stack.enter_context(RoundingNoise(int(seed)))
        if "cuda" in kinds:  # the last is asked first: what it passes on has no device any more
            stack.enter_context(pretend_cuda())
        yield


@contextlib.contextmanager
def _fresh_process_state() -> Iterator[None]:
    from course_lib import devices

    environment, folder = dict(os.environ), os.getcwd()
    devices._try_gpu.cache_clear()
    os.chdir(ROOT / "notebooks")
    try:
        with mock.patch("course_lib.launch.warm_up"):  # no rank starts here, so none needs a server
            yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)


def _differences(cells: list[Cell], wanted: list[Cell]) -> Iterator[str]:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_, **__: None  # type: ignore[method-assign]
    for cell in cells:
        with capture_output() as captured:
            result = shell.run_cell(source(cell), store_history=False)
        error = result.error_in_exec or result.error_before_exec
        expected, got = _stored_text(cell), sanitised(captured.stdout) + _shown(captured.outputs)
        if error is not None:
            got += sanitised(f"{type(error).__name__}: {error}")
        must_be_equal = cell in wanted and not is_ignored(cell)
        if must_be_equal and got.split() != expected.split():
            yield f"cell {cell['id']} printed\n{got}\nstored is\n{expected}"
        elif cell in wanted and error is not None and "raises-exception" not in tags(cell):
            yield f"cell {cell['id']} raised {type(error).__name__}: {error}"


def _stored_text(cell: Cell) -> str:
    texts = [joined(o["text"]) for o in cell["outputs"] if o.get("name") == "stdout"]
    shown = [o["data"] for o in cell["outputs"] if "data" in o]
    errors = [f"{o['ename']}: {o['evalue']}" for o in cell["outputs"] if o["output_type"] == "error"]
    return sanitised("".join(texts)) + "".join(map(_text_of, shown)) + sanitised("".join(errors))


def _shown(outputs: list[Any]) -> str:
    return "".join(_text_of(output.data) for output in outputs)


def _text_of(data: dict[str, Any]) -> str:
    kinds = [kind for kind in ("text/markdown", "text/html", "text/plain") if kind in data]
    text = sanitised(joined(data[kinds[0]])) if kinds else ""
    return "" if "[RATE]" in text else text  # a progress bar, which is drawn otherwise outside a kernel


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "tests" / "nbval_sanitize.cfg")
    return [(re.compile(settings[name]["regex"]), settings[name]["replace"]) for name in settings.sections()]


def sanitised(text: str) -> str:
    for pattern, replacement in _patterns():
        text = pattern.sub(replacement, text)
    return text


if __name__ == "__main__":
    print("\n" + json.dumps(run_pretended(Path(sys.argv[1]), sys.argv[2:])))
