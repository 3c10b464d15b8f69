"""Exercises whose check names the misconception.

A check runs cases from the simplest on. The first that fails is the diagnosis: what was expected, what came, and, if
the answers so far are those of a catalogued misconception, its name.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn


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
    """

    name: str
    solution: Any
    misconceptions: Mapping[str, Any] | Callable[..., Mapping[str, Any]]
    cases: Sequence[dict[str, Any]] = ({},)
    judge: Callable[[Any], Any] | None = None

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        _require_answer(self.name, answer)
        if callable(self.solution):
            _require_function(self.name, answer)
        if isinstance(self.solution, numbers.Number) and not isinstance(answer, numbers.Number):
            raise NotSolved(f"{self.name}: a number is asked for, got {answer!r}.")
        for number, case in enumerate(self.cases, start=1):
            expected, got = self._call(self.solution, case), self._attempt(answer, case)
            if not _same(got, expected):
                self._diagnose(number, expected, got, answer)
        cases = f", {len(self.cases)} cases" if len(self.cases) > 1 else ""
        print(f"{self.name}: solved{cases}.")

    def wrong_answers(self) -> dict[str, Any]:
        """By what a reader is to be told: the number, or the function, that the reader has handed in."""
        if isinstance(self.misconceptions, Mapping):
            return dict(self.misconceptions)
        messages = self.misconceptions(**copy.deepcopy(self.cases[0]))
        return {message: partial(_wrong_answer, self.misconceptions, message) for message in messages}

    def _attempt(self, answer: Any, case: dict[str, Any]) -> Any:
        try:
            got = self._call(answer, case)
        except Exception as error:
            misnamed = isinstance(error, TypeError) and "argument" in str(error) and "()" in str(error)
            hint = ". Keep the argument names of the stub" if misnamed else ""
            raise NotSolved(f"{self._shown(case)} raised {type(error).__name__}: {error}{hint}") from error
        if got is None or got is ...:
            raise NotSolved(f"{self._shown(case)} returned nothing. Does it end with `return`?")
        return got

    def _diagnose(self, number: int, expected: Any, got: Any, answer: Any) -> NoReturn:
        seen = self.cases[:number]
        failing = self.cases[number - 1]
        # Where the number is the whole answer, it stays the reader's to find.
        if failing:
            told = f"{self._shown(failing)} should be {expected!r}, got {got!r}."
        else:
            told = f"{self.name}: {got} is not it."
        for message, wrong in self.wrong_answers().items():
            if all(_same(self._call(answer, case), self._call(wrong, case)) for case in seen):
                raise NotSolved(f"{told}\n{message.format(got=got)}")
        raise NotSolved(told)

    def _call(self, answer: Any, case: dict[str, Any]) -> Any:
        if self.judge is not None:
            answer = self.judge(answer)
        if callable(answer):
            return answer(**copy.deepcopy(case))  # it may change what it gets
        return answer

    def _shown(self, case: dict[str, Any]) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in case.items())
        return f"{self.name}({arguments})"


def _wrong_answer(misconceptions: Callable[..., Mapping[str, Any]], message: str, /, **case: Any) -> Any:
    return misconceptions(**case)[message]


@dataclass(frozen=True)
class PropertyExercise:
    """A question with many right answers: the first property that an answer lacks is the diagnosis."""

    name: str
    find_fault: Callable[[Any], str | None]
    """Takes the answer, a function or a class, and returns what is wrong with it, or None."""
    misconceptions: Mapping[str, Any]
    """Wrong answers that people really give, by a part of the fault that each has."""

    def wrong_answers(self) -> dict[str, Any]:
        """By what a reader is to be told: what the reader has handed in."""
        return dict(self.misconceptions)

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        _require_answer(self.name, answer)
        _require_function(self.name, answer)
        try:
            fault = self.find_fault(answer)
        except Exception as error:
            raise NotSolved(f"{self.name} raised {type(error).__name__}: {error}") from error
        if fault:
            raise NotSolved(f"{self.name}: {fault}")
        print(f"{self.name}: solved.")


def _require_answer(name: str, answer: Any) -> None:
    if answer is None or answer is ...:
        raise NotSolved(f"{name}: no answer yet. Put yours in the place of `...`.")


def _require_function(name: str, answer: Any) -> None:
    if not callable(answer):
        raise NotSolved(f"{name}: a function is asked for, got {answer!r}.")


def _same(a: Any, b: Any) -> bool:
    a, b = (value.tolist() if hasattr(value, "tolist") else value for value in (a, b))  # of NumPy or torch
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, (int, float)) and isinstance(b, (int, float)) and abs(a - b) <= 1e-9 * max(1.0, abs(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # an array or a tensor of several values
        return False
