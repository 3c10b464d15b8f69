"""Exercises whose check names the misconception.

A check runs cases from the simplest on. The first that fails is the diagnosis: what was expected, what came, and, if
the answers so far are those of a catalogued misconception, its name.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


class NotSolved(AssertionError):
    """An exercise's answer is missing or wrong; the message says in what."""

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: the frames of the check would bury its message.
        return f"NotSolved: {self}".splitlines()


@dataclass(frozen=True)
class Misconception:
    """A wrong answer that people really give, and what to tell them."""

    answer: Any
    """The wrong function, or the wrong number."""
    message: str
    """May use {got}."""


@dataclass(frozen=True)
class Exercise:
    """A question with a number or a function for an answer.

    ``cases`` are the keyword arguments with which an answer is called, the simplest first; a question whose answer is
    a number has the one case ``{}``. Where it isn't what a function returns that makes it right, ``judge`` turns an
    answer (the solution, a misconception) into the function of the cases whose value is compared.
    """

    name: str
    solution: Any
    misconceptions: Sequence[Misconception]
    cases: Sequence[dict[str, Any]] = ({},)
    judge: Callable[[Any], Any] | None = None

    def check(self, answer: Any) -> None:
        """Print that the answer is right, or raise :class:`NotSolved` with the diagnosis."""
        if answer is None or answer is ...:
            raise NotSolved(f"{self.name}: no answer yet. Put yours in the place of `...`.")
        if callable(self.solution) and not callable(answer):
            raise NotSolved(f"{self.name}: a function is asked for, got {answer!r}.")
        if isinstance(self.solution, numbers.Number) and not isinstance(answer, numbers.Number):
            raise NotSolved(f"{self.name}: a number is asked for, got {answer!r}.")
        for number, case in enumerate(self.cases, start=1):
            expected, got = self._call(self.solution, case), self._attempt(answer, case)
            if not _same(got, expected):
                self._diagnose(number, expected, got, answer)
        count = len(self.cases)
        print(f"{self.name}: solved" + (f", {count} cases." if count > 1 else "."))

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
        told = (
            f"{self._shown(failing)} should be {expected!r}, got {got!r}."
            if failing
            else f"{self.name}: {got} is not it."
        )
        for misconception in self.misconceptions:
            if all(_same(self._call(answer, case), self._call(misconception.answer, case)) for case in seen):
                raise NotSolved(f"{told}\n{misconception.message.format(got=got)}")
        raise NotSolved(told)

    def _call(self, answer: Any, case: dict[str, Any]) -> Any:
        if self.judge is not None:
            answer = self.judge(answer)
        return answer(**copy.deepcopy(case)) if callable(answer) else answer  # it may change what it gets

    def _shown(self, case: dict[str, Any]) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in case.items())
        return f"{self.name}({arguments})"


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
