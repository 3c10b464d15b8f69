"""Exercises whose check names the misconception, and searches for what nobody thought of.

A check runs cases from the simplest on. The first that fails is the diagnosis: what was expected, what came, and, if
the answers so far are those of a catalogued misconception, its name. Then cases are drawn at random and compared with
the solution. An answer that hangs is ended; one that prints, or changes what is not its own, is told so.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import math
import numbers
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from workbook.calls import NOTHING, Allowed, Call, OutOfTime, Watch, call, ended_after, put_back

SEARCHED = 200
"""So many cases are drawn at random, where an exercise says nothing else."""
AGREE_IN = 10
"""An answer that fails in drawn cases is a misconception if it returns the same in so many of them."""
LOOKED_BACK = 8
"""So many of the last results are looked at again after a call."""
ONE_RESULT = "But it changes a result that it has returned before: make a new one in each call."


class NotSolved(AssertionError):
    """An exercise's answer is missing or wrong; the message says in what."""

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: the frames of the check would bury its message.
        return f"NotSolved: {self}".splitlines()


@dataclass(frozen=True)
class Exercise:
    """A question with a number or a function for an answer.

    ``cases`` are the keyword arguments with which an answer is called, the simplest first; a question whose answer is
    a number has the one case ``{}``. ``misconceptions`` are wrong answers that people really give, by what to tell
    those who give them, which may use {got}; or a function of a case: what wrong functions return for it. Where it
    isn't what a function returns that makes it right, ``judge`` turns an answer (the solution, a misconception) into
    the function of the cases whose value is compared.

    ``search`` draws one more case from a generator, corners included; ``searched`` of them follow the others, and of
    those that fail the shortest is told. A right answer may do what is ``allowed``, and takes at most ``seconds``.
    """

    name: str
    solution: Any
    misconceptions: Mapping[str, Any] | Callable[..., Mapping[str, Any]]
    cases: Sequence[dict[str, Any]] = ({},)
    judge: Callable[[Any], Any] | None = None
    search: Callable[[random.Random], dict[str, Any]] | None = None
    searched: int = SEARCHED
    allowed: Allowed = NOTHING
    seconds: float = 20

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        _require_answer(self.name, answer)
        if callable(self.solution):
            _require_function(self.name, answer)
        elif isinstance(self.solution, numbers.Number):
            answer = _number(self.name, answer)
        elif self.judge is None and callable(answer):
            raise NotSolved(f"{self.name}: the answer itself is asked for, got a function that may return it.")
        elif isinstance(answer, Iterator):
            answer = list(itertools.islice(answer, MANY))  # it can be read once, and there may be several cases
        printed: list[str] = []
        returned = Returned()
        running = self.cases[0]
        try:
            with put_back(), ended_after(self.seconds):
                for number, running in enumerate(self.cases, start=1):
                    if fault := self._fault(answer, running, printed, returned):
                        self._tell(fault, answer, self.cases[:number])
                failed = []
                for running in self._drawn():
                    if fault := self._fault(answer, running, printed, returned):
                        failed.append(fault)
                if failed:
                    failed.sort(key=lambda fault: len(repr(fault.case)))
                    self._tell(failed[0], answer, [*self.cases, *(fault.case for fault in failed[:AGREE_IN])])
        except OutOfTime:
            raise NotSolved(f"{self._shown(running)} {_no_end(self.seconds)}") from None
        cases = f", {len(self.cases)} cases" if len(self.cases) > 1 else ""
        drawn = f" and {self.searched} drawn at random" if self.search else ""
        print(f"{self.name}: solved{cases}{drawn}.{_told_of_print(printed)}")

    def wrong_answers(self) -> dict[str, Any]:
        """By what a reader is to be told: the number, or the function, that the reader has handed in."""
        if isinstance(self.misconceptions, Mapping):
            return dict(self.misconceptions)
        messages = self.misconceptions(**copy.deepcopy(self.cases[0]))
        return {message: partial(_wrong_answer, self.misconceptions, message) for message in messages}

    def _drawn(self) -> Iterator[dict[str, Any]]:
        if self.search:
            generator = random.Random(0)
            for _ in range(self.searched):
                yield self.search(generator)

    def _fault(self, answer: Any, case: dict[str, Any], printed: list[str], returned: Returned) -> _Fault | None:
        """Of the answer in one case. What it printed is added to ``printed``, and what it made to ``returned``."""
        expected = self._call(self.solution, case).value
        try:
            seen = self._call(answer, case)
        except NotSolved:  # the judge says what is asked for
            raise
        except (Exception, SystemExit) as error:
            misnamed = isinstance(error, TypeError) and "argument" in str(error) and "()" in str(error)
            hint = ". Keep the argument names of the stub" if misnamed else ""
            return _Fault(case, f"raised {type(error).__name__}: {error}{hint}", error=error)
        if seen.printed:
            printed.append(seen.printed)
        if seen.value is None or seen.value is ...:
            hint = f" It prints {_shortened(seen.printed)}: `return` that instead." if seen.printed else ""
            return _Fault(case, f"returned nothing. Does it end with `return`?{hint}")
        got = _as_asked(seen.value, expected)
        if not _same(got, expected):
            got = _plain(got)
            return _Fault(case, f"should be {expected!r}, got {got!r}.", got)
        if seen.changed:
            return _Fault(case, f"returns what it should. {seen.changed}")
        if returned.has_changed():
            return _Fault(case, f"returns what it should. {ONE_RESULT}")
        if isinstance(seen.value, list | dict):
            returned.add(seen.value)
        return None

    def _tell(self, fault: _Fault, answer: Any, seen: Sequence[dict[str, Any]]) -> NoReturn:
        # Where the number is the whole answer, it stays the reader's to find.
        told = f"{self._shown(fault.case)} {fault.told}" if fault.case else f"{self.name}: {fault.got} is not it."
        if fault.got is not _NO_VALUE:
            for message, wrong in self.wrong_answers().items():
                if all(self._agree(answer, wrong, case) for case in seen):
                    raise NotSolved(f"{told}\n{message.format(got=fault.got)}")
        raise NotSolved(told) from fault.error

    def _agree(self, answer: Any, wrong: Any, case: dict[str, Any]) -> bool:
        try:
            theirs = self._call(wrong, case).value
            return _same(_as_asked(self._call(answer, case).value, theirs), theirs)
        except Exception:  # a misconception need not be defined for every case
            return False

    def _call(self, answer: Any, case: dict[str, Any]) -> Call:
        if self.judge is not None:
            answer = self.judge(answer)
        if callable(answer):
            return call(_read_to_the_end(answer), allowed=self.allowed, **copy.deepcopy(case))
        return Call(answer)

    def _shown(self, case: dict[str, Any]) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in case.items())
        return f"{self.name}({arguments})"


class Returned:
    """What an answer has returned so far, with copies: a later call must not change it."""

    def __init__(self) -> None:
        self._with_copies: list[tuple[Any, Any]] = []

    def add(self, value: Any) -> None:
        self._with_copies.append((value, copy.deepcopy(value)))

    def has_changed(self) -> bool:
        return any(not _same(value, copied) for value, copied in self._with_copies[-LOOKED_BACK:])


def _read_to_the_end(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The answer, and what it yields as a list: the body of a generator runs, and is watched, while it is read."""

    @functools.wraps(answer)
    def read(**case: Any) -> Any:
        value = answer(**case)
        return list(itertools.islice(value, MANY)) if isinstance(value, Iterator) else value

    return read


_NO_VALUE = object()


@dataclass(frozen=True)
class _Fault:
    case: dict[str, Any]
    told: str
    got: Any = _NO_VALUE
    """A wrong value, which may be that of a misconception."""
    error: BaseException | None = None


def _wrong_answer(misconceptions: Callable[..., Mapping[str, Any]], message: str, /, **case: Any) -> Any:
    return misconceptions(**case)[message]


@dataclass(frozen=True)
class PropertyExercise:
    """A question with many right answers: the first property that an answer lacks is the diagnosis.

    The calls of an answer that is a function are watched; of a class, its author's ``find_fault`` sees to it.
    """

    name: str
    find_fault: Callable[[Any], str | None]
    """Takes the answer, a function or a class, and returns what is wrong with it, or None."""
    misconceptions: Mapping[str, Any]
    """Wrong answers that people really give, by a part of the fault that each has."""
    allowed: Allowed = NOTHING
    seconds: float = 30

    def wrong_answers(self) -> dict[str, Any]:
        """By what a reader is to be told: what the reader has handed in."""
        return dict(self.misconceptions)

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        _require_answer(self.name, answer)
        _require_function(self.name, answer)
        watch = Watch(self.allowed)
        try:
            with put_back(), ended_after(self.seconds):
                fault = self.find_fault(watch.over(answer)) or watch.changed
        except OutOfTime:
            raise NotSolved(f"{self.name} {_no_end(self.seconds)}") from None
        except (Exception, SystemExit) as error:
            raise NotSolved(f"{self.name} raised {type(error).__name__}: {error}") from error
        if fault:
            raise NotSolved(f"{self.name}: {fault}")
        print(f"{self.name}: solved.{_told_of_print(watch.printed)}")


def _no_end(seconds: float) -> str:
    return f"has not come to an end after {seconds:g} s, and was ended. Does a loop, or a wait, go on without end?"


def _told_of_print(printed: Sequence[str]) -> str:
    if not printed:
        return ""
    return f" It prints as well, in {len(printed)} calls, which is not asked for: first {_shortened(printed[0])}."


def _shortened(text: str) -> str:
    return repr(text.strip() if len(text) <= 60 else f"{text.strip()[:60]} …")


def _require_answer(name: str, answer: Any) -> None:
    if answer is None or answer is ...:
        raise NotSolved(f"{name}: no answer yet. Put yours in the place of `...`.")


def _require_function(name: str, answer: Any) -> None:
    if not callable(answer):
        raise NotSolved(f"{name}: a function is asked for, got {answer!r}.")


def _number(name: str, answer: Any) -> Any:
    number = _plain(_only_element(answer))
    if not _is_number(number):
        raise NotSolved(f"{name}: a number is asked for, got {answer!r}.")
    return number


MANY = 100_000
"""No answer is a longer list, and an iterator may be endless."""


def _as_asked(got: Any, expected: Any) -> Any:
    """The number in an array of one, where a number is expected."""
    return _only_element(got) if _is_number(expected) else got


def _only_element(value: Any) -> Any:
    """The number in an array or a tensor of one element, whatever its shape."""
    if hasattr(value, "tolist") and hasattr(value, "reshape"):
        elements = value.reshape(-1)
        return elements[0] if len(elements) == 1 else value
    return value


def _plain(value: Any) -> Any:
    """For a message: the numbers of NumPy and torch as those of Python."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 1) == 0 else value


def _same(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    tolerance = max(tolerance, _rounding(a), _rounding(b))
    if _is_number(b):
        a = _only_element(a)
    a, b = (value.tolist() if hasattr(value, "tolist") else value for value in (a, b))  # of NumPy or torch
    if isinstance(a, range) and isinstance(b, (list, tuple)):
        a = list(a[:MANY])
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if _is_number(b) and not _is_number(a):  # some objects say that they are equal to anything
        return False
    if _is_fraction(a) or _is_fraction(b):
        tolerance = max(tolerance, _rounding_of_single_precision(a))
        return _is_number(a) and _is_number(b) and _is_close(float(a), float(b), tolerance)
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # an array or a tensor of several values
        return False


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, Decimal))


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and not isinstance(value, numbers.Integral)


def _rounding_of_single_precision(value: Any) -> float:
    """The same of a float that single precision has exactly: it may have been computed so, as by ``tensor.item()``."""
    computed_so = _is_fraction(value) and not float(value).is_integer() and ctypes.c_float(value).value == value
    return 1e-6 if computed_so else 0.0


def _rounding(value: Any) -> float:
    """How far a right value may be off: the floats of NumPy and torch may be of single precision."""
    dtype = str(getattr(value, "dtype", ""))
    return 1e-5 if "float" in dtype and "64" not in dtype else 1e-9
