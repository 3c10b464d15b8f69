"""Say what a run skipped: ``python -m course_lib.skipping journal.jsonl``."""

from __future__ import annotations

import argparse
import sys

from course_lib.skipping.journal import summarize


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course_lib.skipping", description=__doc__)
    parser.add_argument("journal", help="rank 0's file; those of the other ranks are found beside it")
    path = parser.parse_args(arguments).journal
    try:
        print(summarize(path))
    except OSError as error:
        print(f"cannot read {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
