"""Values that the lapse holds still: where the script compares one, the line and its answer are noted.

``item()``, ``tolist()`` and ``numpy()`` give numbers that survive arithmetic, also NumPy's where the script's own
lines call it, but not in a dataset, nor ahead of the training; a tensor that is asked whether it is true, or equal to
another, is seen as well. A rehearsal in which one line gives the same answer each time, the rarer one, shows what
hangs on it. What goes through a text is not seen, nor what is written into an array that was there before.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import operator
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rehearse.scripts.held import (
    NUMBERS,
    HeldInt,
    held,
    held_call,
    held_function,
    is_held,
    keep_what_is_computed,
    plain,
)
from rehearse.scripts.journal import Comparison
from rehearse.scripts.lapse import Lapse, instead_of, is_librarys

COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
ASKING_TENSORS = ("allclose", "equal", "is_nonzero")
OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv"}
ORDERS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def held_float(value: Any = 0.0) -> Any:
    """``float``, where the script calls it."""
    return held(float(value)) if isinstance(value, Tensor) or is_held(value) else float(value)


def held_int(value: Any = 0, *base: Any, **options: Any) -> Any:
    """``int``, where the script calls it."""
    number = int(value, *base, **options)
    return held(number) if isinstance(value, Tensor) or is_held(value) else number


def held_operation(name: str, left: Any, right: Any) -> Any:
    """What ``operator`` has by this name, where the script has its sign."""
    if name in REFLECTED and type(left) is float and type(right) is HeldInt:
        name, left, right = REFLECTED[name], right, left
    result = getattr(operator, name)(left, right)
    return held(result) if is_held(right) and name not in REFLECTED else result


_HELD_CALLS = {call.__name__: call for call in (held_call, held_float, held_function, held_int, held_operation)}
"""What a script's changed code calls."""


class _Watched(ast.NodeTransformer):
    """What is computed without asking a held number: a float and a whole one, ``float``, ``int``, NumPy with lists."""

    def __init__(self) -> None:
        self.of_numpy: set[str] = set()
        """The script's names for NumPy, and for what it imports of it."""

    def visit_Import(self, node: ast.Import) -> ast.AST:
        self.of_numpy |= {one.asname or "numpy" for one in node.names if one.name == "numpy"}
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        self.of_numpy |= {one.asname or one.name for one in node.names if node.module == "numpy"}
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if jitted:  # what numba compiles knows of no such calls
            return node
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = node.value and self.visit(node.value)
        return node

    def _as_it_is(self, node: ast.AST) -> ast.AST:
        return node

    visit_arg = visit_MatchValue = _as_it_is  # annotations and patterns are no computations

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and _root(node) in self.of_numpy:
            return _held_function(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _held_function(node) if isinstance(node.ctx, ast.Load) and node.id in self.of_numpy else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        sign = OPERATIONS.get(type(node.op))
        return _call(node, sign, node.left, node.right) if sign else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1 and all(map(_is_plain, node.comparators[:-1])):  # a < b < c, as a < b and b < c
            terms = [node.left, *node.comparators]
            pairs = [
                ast.copy_location(ast.Compare(copy.deepcopy(left), [sign], [right]), node)
                for left, sign, right in zip(terms, node.ops, terms[1:], strict=False)
            ]
            return self.generic_visit(ast.copy_location(ast.BoolOp(ast.And(), list[ast.expr](pairs)), node))
        self.generic_visit(node)
        if len(node.ops) > 1 or type(node.ops[0]) not in ORDERS:
            return node
        return _call(node, ORDERS[type(node.ops[0])], node.left, node.comparators[0])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        sign = OPERATIONS.get(type(node.op))
        if not sign or not _is_plain(node.target):
            return node
        left = copy.deepcopy(node.target)
        left.ctx = ast.Load()
        return ast.copy_location(ast.Assign([node.target], _call(node, f"i{sign}", left, node.value)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func
        self.generic_visit(node)
        if isinstance(called, ast.Name) and called.id in ("float", "int"):
            called.id = f"held_{called.id}"
        elif _root(called) in self.of_numpy:
            node.func, node.args = ast.Name("held_call", ast.Load()), [called, *node.args]
            ast.fix_missing_locations(node)
        return node


def _root(called: ast.expr) -> str:
    """``"np"`` of ``np.linalg.norm``; empty where it is no chain of names."""
    while isinstance(called, ast.Attribute):
        called = called.value
    return called.id if isinstance(called, ast.Name) else ""


def _held_function(value: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name("held_function", ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


def _is_plain(target: ast.expr) -> bool:
    """Whether it may be read once more than the script does: ``x``, ``self.x``, ``x["a"]``, ``x[i]``."""
    if isinstance(target, ast.Attribute):
        return isinstance(target.value, ast.Name)
    if isinstance(target, ast.Subscript):
        return isinstance(target.value, ast.Name) and isinstance(target.slice, ast.Constant | ast.Name)
    return isinstance(target, ast.Name)


def _call(node: ast.AST, name: str, left: ast.expr, right: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name("held_operation", ast.Load()), [ast.Constant(name), left, right], [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def watched(source: bytes, path: str) -> CodeType:
    """The code of a script, in which ``100. * correct`` is a call of :func:`held_operation`, and calls of ``float`` and
    ``int`` are those of :func:`held_float` and :func:`held_int`."""
    vars(builtins).update(_HELD_CALLS)  # in whatever process the code is run
    code: CodeType = compile(_Watched().visit(ast.parse(source, path)), path, "exec", dont_inherit=True)
    return code


def watch_imports(is_own: Callable[[str], bool]) -> None:
    """Change what a script imports of its own files as the script is changed; none of it is kept on disk."""

    @instead_of(SourceFileLoader)
    def get_code(code_of: Any, loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        return watched(loader.get_data(path), path) if is_own(path) else code_of(loader, name)


class Comparisons:
    """Notes each comparison of a value that is held; ``turned``: a place, and what it answers each time."""

    def __init__(self, lapse: Lapse, turned: tuple[str, bool] | None = None) -> None:
        self.lapse, self.turned = lapse, turned
        self._by_line: dict[str, list[int]] = {}

    def install(self) -> None:
        for kind, base in NUMBERS:
            for name in COMPARISONS:
                setattr(kind, name, self._comparing(base, name))
            is_true = self._asked_by_the_script(base.__bool__)
            setattr(kind, "__bool__", is_true)  # noqa: B010  # a rehearsal installs it, and no import
        keep_what_is_computed(self.answered)

        @instead_of(Tensor)
        def item(value_of: Any, tensor: Tensor) -> Any:
            value = value_of(tensor)
            if _by_torch() or self._is_of_data():
                return value
            return self.answered(value) if isinstance(value, bool) else held(value)

        @instead_of(Tensor)
        def tolist(values_of: Any, tensor: Tensor) -> Any:
            is_a_list_of_indices = tensor.ndim > 0 and not tensor.is_floating_point()
            is_plain = _by_torch() or self._is_of_data() or is_a_list_of_indices
            return values_of(tensor) if is_plain else held(values_of(tensor))

        @instead_of(Tensor)
        def numpy(array_of: Any, tensor: Tensor, **options: Any) -> Any:
            array = array_of(tensor, **options)
            may_be_indices = tensor.ndim > 0 and array.dtype.kind not in "fb"
            return array if _by_torch() or self._is_of_data() or may_be_indices else held(array)

        @instead_of(Tensor)
        def __bool__(is_true: Any, tensor: Tensor) -> bool:
            answer: bool = is_true(tensor)
            return answer if _by_torch() else self.answered(answer)

        for holder in (torch, Tensor):
            for name in ASKING_TENSORS:
                setattr(holder, name, self._asked_by_the_script(getattr(holder, name)))

        @instead_of(ReduceLROnPlateau)
        def step(take: Any, schedule: Any, *arguments: Any, **options: Any) -> None:
            self.lapse.note(
                "ReduceLROnPlateau goes by a metric, which a rehearsal does not compute: its rates are guessed, as is "
                "what hangs on them"
            )
            take(schedule, *arguments, **options)

    def _is_of_data(self) -> bool:
        """What is computed ahead of the training, or for a sample, hangs on no loss."""
        return not self.lapse.backwards or self.lapse.inside["fetch"] > 0

    def _asked_by_the_script(self, ask: Any) -> Any:
        """Its answers to the script's own lines are noted; libraries ask much that no run hangs on."""

        @functools.wraps(ask)
        def asked(*values: Any, **options: Any) -> bool:
            answer: bool = ask(*values, **options)
            return self.answered(answer) if self.lapse.is_own(sys._getframe(1).f_code.co_filename) else answer

        return asked

    def answered(self, answer: bool) -> bool:
        """The answer that the script gets."""
        if not self.lapse.fast:
            return answer
        place = self.lapse.line()
        if not place or self.lapse.asserts():  # the other answer would end the script, and not lead elsewhere
            return answer
        # Each by itself: with both answers turned, 0 < loss < 1 stays as it is.
        in_line, instruction = self._by_line.setdefault(place, []), self.lapse.instruction()
        if instruction not in in_line:
            in_line.append(instruction)
        number = in_line.index(instruction)
        place += f", comparison {number + 1}" if number else ""
        noted = self.lapse.journal.comparisons.setdefault(place, Comparison(place))
        noted.answers[answer] += 1
        return self.turned[1] if self.turned and place == self.turned[0] else answer

    def _comparing(self, base: type, name: str) -> Any:
        compare = getattr(base, name)

        def compared(value: Any, other: Any) -> Any:
            if isinstance(other, np.generic) and base in (int, float):
                return NotImplemented  # by Python's rules it is for NumPy to answer
            answer = compare(value, other) if base in (int, float) else compare(plain(value), plain(other))
            if answer is NotImplemented and base is int and isinstance(other, float):
                answer = getattr(operator, name.strip("_"))(int(value), float(other))
            return answer if answer is NotImplemented else type(answer)(self.answered(bool(answer)))

        return compared


def _by_torch() -> bool:
    """Whether torch's own code asks a tensor for its value, or the lapse's."""
    return is_librarys(sys._getframe(3).f_code.co_filename)
