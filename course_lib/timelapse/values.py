"""Values that the lapse holds still: where the script compares one, the line and its answer are noted.

``item()`` and ``tolist()`` give numbers that survive arithmetic; a tensor that is asked whether it is true, or equal to
another, is seen as well. A play in which one line answers the other way round shows what hangs on it. What goes through
NumPy or a text is not seen.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib
import itertools
import math
import operator
import statistics
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from course_lib.timelapse.journal import Comparison
from course_lib.timelapse.lapse import LIBRARIES, Lapse, instead_of

COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
ARITHMETIC = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ "
    "__rmod__ __pow__ __rpow__ __divmod__ __rdivmod__ __neg__ __pos__ __abs__ __round__"
).split()
ASKING = ("isfinite", "isnan", "isinf", "isclose")
ASKING_TENSORS = ("allclose", "equal", "is_nonzero")
OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv"}
ORDERS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class HeldFloat(float):
    """A float that came from a tensor."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


class HeldInt(int):
    """A whole number that came from a tensor."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _have_yaml_write_them() -> None:
    """As the numbers that they are; PyYAML goes by the exact class, where json and pickle do not."""
    try:
        representer: Any = importlib.import_module("yaml.representer")
    except ImportError:
        return
    for into in (representer.SafeRepresenter, representer.Representer):
        into.add_representer(HeldFloat, lambda dumper, value: dumper.represent_float(value.__reduce__()[1][0]))
        into.add_representer(HeldInt, lambda dumper, value: dumper.represent_int(value.__reduce__()[1][0]))


def _is_held(value: Any) -> bool:
    return isinstance(value, HeldFloat | HeldInt)


def _held(value: Any) -> Any:
    if type(value) is float:
        return HeldFloat(value)
    if type(value) in (tuple, list):
        return type(value)(map(_held, value))
    return HeldInt(value) if type(value) is int else value


def held_float(value: Any = 0.0) -> Any:
    """``float``, where the script calls it."""
    return _held(float(value)) if isinstance(value, Tensor) or _is_held(value) else float(value)


def held_int(value: Any = 0, *base: Any, **options: Any) -> Any:
    """``int``, where the script calls it."""
    number = int(value, *base, **options)
    return _held(number) if isinstance(value, Tensor) or _is_held(value) else number


def held_operation(name: str, left: Any, right: Any) -> Any:
    """What ``operator`` has by this name, where the script has its sign."""
    if name in REFLECTED and type(left) is float and type(right) is HeldInt:
        name, left, right = REFLECTED[name], right, left
    result = getattr(operator, name)(left, right)
    return _held(result) if _is_held(right) else result


_HELD_CALLS = {call.__name__: call for call in (held_float, held_int, held_operation)}
"""What a script's changed code calls."""


class _Watched(ast.NodeTransformer):
    """What Python computes without asking a held number: a float and a whole one, ``float`` and ``int``."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        return node if jitted else self.generic_visit(node)  # what numba compiles knows of no such calls

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
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("float", "int"):
            node.func.id = f"held_{node.func.id}"
        return node


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


def plain(value: Any) -> Any:
    """A value without held numbers, in dicts, lists and tuples; what holds none is given back as it is."""
    if _is_held(value):
        return float(value) if isinstance(value, float) else int(value)
    if type(value) is dict:
        made = {key: plain(part) for key, part in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        parts = [plain(part) for part in value]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return type(value)(parts) if changed else value
    return value


class Comparisons:
    """Notes each comparison of a value that is held; ``flipped``: the place that answers the other way round."""

    def __init__(self, lapse: Lapse, flipped: str = "") -> None:
        self.lapse, self.flipped = lapse, flipped
        self._by_line: dict[str, list[int]] = {}

    def install(self) -> None:
        for kind, base in ((HeldFloat, float), (HeldInt, int)):
            for name in COMPARISONS:
                setattr(kind, name, self._comparing(base, name))
            is_true = self._asked_by_the_script(base.__bool__)  # type: ignore[attr-defined]
            setattr(kind, "__bool__", is_true)  # noqa: B010  # a play installs it, and no import
            for name in ARITHMETIC:
                setattr(kind, name, _computing(base, name))
            setattr(kind, "__hash__", base.__hash__)  # noqa: B010  # goes with __eq__
        _have_yaml_write_them()
        for module in (math, statistics):
            for name, compute in vars(module).copy().items():
                if callable(compute) and not isinstance(compute, type) and name[0] != "_":
                    setattr(module, name, self._asking(compute) if name in ASKING else _computing_if_held(compute))

        @instead_of(Tensor)
        def item(value_of: Any, tensor: Tensor) -> Any:
            value = value_of(tensor)
            if _by_torch():
                return value
            return self.answered(value) if isinstance(value, bool) else _held(value)

        @instead_of(Tensor)
        def tolist(values_of: Any, tensor: Tensor) -> Any:
            is_a_list_of_indices = tensor.ndim > 0 and not tensor.is_floating_point()
            return values_of(tensor) if _by_torch() or is_a_list_of_indices else _held(values_of(tensor))

        @instead_of(Tensor)
        def __bool__(is_true: Any, tensor: Tensor) -> bool:
            answer: bool = is_true(tensor)
            return answer if _by_torch() else self.answered(answer)

        for holder in (torch, Tensor):
            for name in ASKING_TENSORS:
                setattr(holder, name, self._asked_by_the_script(getattr(holder, name)))

        @instead_of(ReduceLROnPlateau)
        def step(take: Any, schedule: Any, *arguments: Any, **options: Any) -> None:
            self.lapse.note("ReduceLROnPlateau goes by a metric, which a play does not compute: its rates are a guess.")
            take(schedule, *arguments, **options)

    def _asking(self, ask: Any) -> Any:
        @functools.wraps(ask)
        def asked(*values: Any, **options: Any) -> bool:
            answer: bool = ask(*values, **options)
            return self.answered(answer) if any(map(_is_held, values)) else answer

        return asked

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
        return not answer if place == self.flipped else answer

    def _comparing(self, base: type, name: str) -> Any:
        compare = getattr(base, name)

        def compared(value: Any, other: Any) -> Any:
            answer = compare(value, other)
            if answer is NotImplemented and base is int and isinstance(other, float):
                answer = getattr(operator, name.strip("_"))(int(value), float(other))
            return answer if answer is NotImplemented else self.answered(answer)

        return compared


def _by_torch() -> bool:
    """Whether torch's own code asks a tensor for its value, or the lapse's."""
    return sys._getframe(3).f_code.co_filename.startswith(LIBRARIES)


def _computing(base: type, name: str) -> Any:
    compute = getattr(base, name)
    with_ints = base is int

    def computed(value: Any, *others: Any) -> Any:
        result = compute(value, *others)
        if result is NotImplemented and with_ints and others and isinstance(others[0], float):
            # An int does not compute with a float; the float does, and its class knows of no held ones.
            operation = getattr(operator, name.strip("_").removeprefix("r"), None)
            if operation is not None and not name.startswith("__r"):
                return _held(operation(float(value), float(others[0])))
        return _held(result)

    return computed


def _computing_if_held(compute: Any) -> Any:
    """A function of numbers, or of iterables of them."""

    @functools.wraps(compute)
    def computed(*values: Any, **options: Any) -> Any:
        values = tuple(list(one) if isinstance(one, Iterable) else one for one in values)
        result = compute(*values, **options)
        given = itertools.chain.from_iterable(one if isinstance(one, list) else (one,) for one in values)
        return _held(result) if any(map(_is_held, given)) else result

    return computed
