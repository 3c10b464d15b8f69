"""Say what a run skipped: ``python -m course_lib.skipping journal.jsonl``."""

from __future__ import annotations

import argparse

from course_lib.skipping.journal import summarize


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m course_lib.skipping", description=__doc__)
    parser.add_argument("journal", help="rank 0's file; those of the other ranks are found beside it")
    path = parser.parse_args(arguments).journal
    try:
        print(summarize(path))
    except OSError as error:
        parser.exit(1, f"cannot read {path}: {error.strerror}\n")


if __name__ == "__main__":
    main()
