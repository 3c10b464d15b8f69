"""Random computations, made once with held numbers and once with the plain ones: the results are the same.

It is run as a process of its own, since held numbers change ``math`` and ``statistics`` for good:
``python -m tests.rehearse.scripts.held_search 2000 1``.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
import random
import statistics
import sys
import warnings
from typing import Any

import numpy as np
import torch

from rehearse.scripts.held import held, held_call, is_held, plain
from rehearse.scripts.journal import Journal
from rehearse.scripts.lapse import Lapse
from rehearse.scripts.values import Comparisons

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, divmod, min, max),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(np.add, np.minimum, np.maximum, np.less, np.hypot, np.allclose, np.isclose, math.hypot, math.isclose),
]
UNARY = [
    *(operator.neg, operator.pos, abs, round, float, int, bool, str, repr, json.dumps, copy.deepcopy),
    *(lambda value: pickle.loads(pickle.dumps(value)), lambda value: round(value, 2), lambda value: f"{value:.3f}"),
    *(torch.tensor, torch.as_tensor, lambda value: torch.ones(2) * value, lambda value: np.arange(3) * value),
    *(np.exp, np.sqrt, np.isnan, np.isfinite, np.sign, np.abs, np.float32, np.float64, np.int64, np.asarray, np.round),
    *(math.ceil, math.exp, math.isnan, math.sqrt, lambda value: value**2, lambda value: 2 / (abs(value) + 1)),
    *(lambda value: value.item(), lambda value: value.round(1), lambda value: value.dtype, lambda value: value.mean()),
]
OF_LISTS = [
    *(np.mean, np.average, np.sum, np.median, np.std, np.var, np.min, np.max, np.array, np.asarray, np.cumsum, np.sort),
    *(np.argmin, np.argmax, np.isnan, np.isfinite, np.diff, np.linalg.norm, np.stack, np.nanmean, np.unique, np.prod),
    *(sum, min, max, sorted, len, statistics.fmean, statistics.median, math.fsum, torch.tensor, list, tuple, str),
    *(lambda values: np.percentile(values, 30), lambda values: np.round(values, 1), lambda values: values[-1]),
    *(lambda values: np.concatenate([values, values]), lambda values: [*values], json.dumps),
]
OF_ARRAYS = [
    *(lambda array: array.mean(), lambda array: array.sum(), lambda array: array.max(), lambda array: array.tolist()),
    *(lambda array: array[1:], lambda array: array[0], lambda array: array[array > 0], lambda array: array.argmin()),
    *(lambda array: array > 0, lambda array: (array > 0).all(), lambda array: (array < 0).any(), torch.from_numpy),
    *(lambda array: array.astype(int), lambda array: array - array.mean(), lambda array: array.reshape(-1, 1), np.dot),
    *(lambda array: pickle.loads(pickle.dumps(array)), copy.deepcopy, repr, lambda array: array.std(), np.mean, np.sum),
]


def outcome(function: Any, *values: Any) -> Any:
    """What a function gives, or the class of what it raises."""
    by_numpy = getattr(function, "__module__", "") in ("numpy", "numpy.linalg") or isinstance(function, np.ufunc)
    try:
        return held_call(function, *values) if by_numpy else function(*values)
    except Exception as error:
        return type(error)


def same(mine: Any, theirs: Any) -> bool:
    """Equal, and of the same kind."""
    if isinstance(mine, list | tuple):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(9e9), theirs.nan_to_num(9e9))
    if isinstance(theirs, np.ndarray | np.number):
        alike = type(mine) is type(theirs) and mine.dtype == theirs.dtype
        return alike and np.array_equal(mine, theirs, equal_nan=True)
    if isinstance(theirs, float) and math.isnan(theirs):
        return isinstance(mine, float) and math.isnan(mine)
    return type(mine) is type(theirs) and bool(mine == theirs)


def main(cases: int, seed: int) -> None:
    Comparisons(Lapse(Journal(), folder="/no folder", limit=math.inf, end=lambda _: None)).install()
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    raised = kept = 0
    for _ in range(cases):
        pool: list[Any] = [rng.choice([rng.uniform(-2, 2), rng.randint(-3, 3), math.nan, 0.0]) for _ in range(4)]
        if rng.random() < 0.3:
            pool[0] = np.float64(pool[0])
        values, twins = [held(value) for value in pool], list(pool)
        story = [f"{pool}"]
        for _ in range(4):
            functions, many = rng.choice([(BINARY, 2), (UNARY, 1), (OF_LISTS, 0), (OF_ARRAYS, -1)])
            function = rng.choice(functions)
            places = [rng.randrange(len(twins)) for _ in range(max(many, 0))]
            if many > 0:
                mixed = [plain(one) if many == 2 and rng.random() < 0.2 else one for one in values]
                given = [[of[place] for place in places] for of in (mixed, twins)]
            else:
                whole = [one for one, twin in zip(values, twins, strict=True) if isinstance(twin, int | float)]
                plain_whole = [twin for twin in twins if isinstance(twin, int | float)]
                given = [[whole], [plain_whole]]
                if many < 0:
                    given = [[held(np.array(plain_whole))], [np.array(plain_whole)]]
            story.append(f"{getattr(function, '__name__', function)} of {given[1]}")
            mine, theirs = outcome(function, *given[0]), outcome(function, *given[1])
            if not same(plain(mine), theirs):
                raise SystemExit(f"{'; '.join(story)}: {plain(mine)!r} in place of {theirs!r}")
            raised += isinstance(theirs, type)
            kept += is_held(mine)
            if isinstance(theirs, int | float | np.number) and not isinstance(theirs, bool):
                values.append(mine)
                twins.append(theirs)
    print(f"{cases} cases: {kept} results held, {raised} errors, all as they are without held numbers")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
