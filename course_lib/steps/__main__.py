"""``python -m course_lib.steps``: a plan of optimizer steps from a shell."""

from __future__ import annotations

import argparse
from typing import get_args

from course_lib.steps import plan_steps
from course_lib.steps.arguments import PerEpoch, ShortWindow


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.steps", description="Plan the optimizer steps of a training run."
    )
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--batch-size", type=per_epoch, required=True, help="per rank; or EPOCH:SIZE,EPOCH:SIZE,…")
    parser.add_argument("--accumulate-grad-batches", type=per_epoch, default=1, help="k; or EPOCH:K,EPOCH:K,…")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--max-epochs", type=int)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--limit-train-batches", type=limit, default=1.0, help="10: ten batches; 0.5: half of them")
    parser.add_argument(
        "--short-window",
        choices=get_args(ShortWindow),
        default="step",
        help="what a short window does: step if not given",
    )
    try:
        plan = plan_steps(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
    print(f"{plan.explain()}\n\n{plan.table()}")
    return 0


def per_epoch(text: str) -> PerEpoch:
    if ":" not in text:
        return int(text)
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(epoch): int(value) for epoch, value in pairs}


def limit(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


if __name__ == "__main__":
    raise SystemExit(main())
