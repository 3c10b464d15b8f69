"""``python -m course_lib.preflight package.module:make_run``: judge a run from a shell.

``make_run()`` returns ``(trainer, model, data)``, ``(trainer, model)``, or a dict of the arguments of
``preflight_loop``.
The exit code is 0 where the run is ready, 1 where something was found, and 2 where that is not known: the run could
not be tried, or a check failed to be judged, by an error or for time, and ``--allow-unjudged`` does not name it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from course_lib._words import in_a_line
from course_lib.preflight import PreflightReport, preflight, preflight_loop

READY, FINDINGS, NOT_JUDGED = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.preflight", description="Judge a training run before it starts."
    )
    parser.add_argument("make_run", metavar="package.module:make_run", help="returns (trainer, model, data)")
    parser.add_argument("--deep", action="store_true", help="make the checks that take longer as well")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave a check out")
    parser.add_argument(
        "--allow-unjudged", action="append", default=[], metavar="CHECK", help="accept that it fails to be judged"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="what each trial may take (20)")
    arguments = parser.parse_args(argv)
    options = vars(arguments).copy()
    options.pop("make_run")
    try:
        report = judged(made(arguments.make_run), options)
    except Exception as error:
        print(f"Could not judge: {in_a_line(error)}", file=sys.stderr)
        return NOT_JUDGED
    print(report)
    if report.findings:
        return FINDINGS
    return READY if report.ok else NOT_JUDGED


def made(place: str) -> Any:
    """The run that ``package.module:make_run`` makes; modules are found from the working directory on."""
    module, _, function = place.partition(":")
    if not function:
        raise ValueError(f"say the function as well, as in package.module:make_run, got {place!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    return getattr(importlib.import_module(module), function)()


def judged(run: Any, options: dict[str, Any]) -> PreflightReport:
    if isinstance(run, dict):
        return preflight_loop(**run, **options)
    return preflight(*run, **options)


if __name__ == "__main__":
    raise SystemExit(main())
