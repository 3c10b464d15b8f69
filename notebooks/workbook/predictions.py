"""Predict, then see: the reader commits to a number before the cell that shows it.

>>> predictions = Predictions()
>>> predictions.commit("epochs until it stops", 10)
epochs until it stops: you say 10.
>>> predictions.reveal("epochs until it stops", 8)
epochs until it stops: you said 10, it is 8.
"""

from __future__ import annotations

from workbook.display import print_wrapped, show_table


class Predictions:
    """What the reader said, kept until the end of the chapter."""

    def __init__(self) -> None:
        self._said: dict[str, float | bool] = {}
        self._found: dict[str, float | bool] = {}

    def commit(self, question: str, answer: float | bool) -> None:
        """Keep an answer. It can be changed until the question is revealed."""
        if answer is None or answer is ...:
            wanted = f"put a number in the place of {answer!r}; a wrong one teaches more than none"
            raise ValueError(f"{question!r}: {wanted}")
        if question in self._found:
            print_wrapped(f"{question}: it has been revealed, so your {self._said[question]} stays.")
            return
        self._said[question] = answer
        print_wrapped(f"{question}: you say {answer}.")

    def reveal(self, question: str, found: float | bool) -> None:
        """Show what came out beside what was said."""
        if question not in self._said:
            raise ValueError(f"{question!r} has no prediction; committed are: {', '.join(self._said) or 'none'}")
        self._found[question] = found
        said = self._said[question]
        if said == found:
            print_wrapped(f"{question}: it is {found}, as you said.")
        else:
            print_wrapped(f"{question}: you said {said}, it is {found}.")

    def summary(self) -> None:
        """Show all predictions of the chapter as a table."""
        rows = []
        for question, said in self._said.items():
            found = self._found.get(question, "not yet seen")
            rows.append([question, said, found, "yes" if said == found else "no"])
        show_table(["question", "you said", "it is", "right"], rows)
