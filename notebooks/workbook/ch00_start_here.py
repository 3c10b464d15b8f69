"""What notebook 00 asks: one exercise, to see how a check answers."""

from workbook.exercises import Exercise, Misconception

first_answer = Exercise(
    "the first answer",
    solution=40,
    misconceptions=[
        Misconception(10, "{got} is the number of optimizer steps: how many micro-batches does each take?"),
        Misconception(8, "{got}? More micro-batches than steps: several of them make one."),
        Misconception(32, "{got} leaves out a window: there are 10, the first and the last included."),
    ],
)

EXERCISES = (first_answer,)
