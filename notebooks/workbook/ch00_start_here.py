"""What notebook 00 asks: one exercise, to see how a check answers."""

from workbook.exercises import Exercise

first_answer = Exercise(
    "the first answer",
    solution=40,
    misconceptions={
        "{got} is the number of optimizer steps: how many micro-batches does each take?": 10,
        "{got}? More micro-batches than steps: several of them make one.": 8,
        "{got} leaves out a window: there are 10, the first and the last included.": 32,
    },
)

EXERCISES = (first_answer,)
