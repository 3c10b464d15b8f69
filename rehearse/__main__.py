"""``python -m rehearse package.module:make_run``, or ``… [options] train.py [its arguments]``.

A script is rehearsed to its end as it stands; see :func:`rehearse.rehearse_script`. ``make_run()`` returns
``(trainer, model, data)``, and the validation's loaders where the fit is given them, or ``(trainer, model)``, or a dict
of the arguments of ``rehearse_loop``.
The exit code is 0 where the run is ready, 1 where something was found, and 2 where nobody judged what the run has:
it could not be tried, or a check could not, and ``--allow-unjudged`` does not name it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from rehearse import NotRehearsed, RehearsalReport, rehearse, rehearse_loop, rehearse_script
from rehearse.report import in_a_line

READY, FINDINGS, NOT_JUDGED = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    # Our options stand before the path, as Python's own do; what stands behind it is the script's.
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    try:
        if script is None:
            report, options = _run_judged(words)
        else:
            report, options = _script_judged(words[:script], words[script], words[script + 1 :])
    except NotRehearsed as error:
        print(f"Could not judge: {error}", file=sys.stderr)
        return NOT_JUDGED
    except Exception as error:
        print(f"Could not judge: {in_a_line(error)}", file=sys.stderr)
        return NOT_JUDGED
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    try:
        print(report)
        if options.get("plot"):
            print(f"\nThe picture of the night is {options['plot']}")
        sys.stdout.flush()
    except BrokenPipeError:  # head has read enough: the verdict stands in the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if report.findings or (report.notes and options["fail_on"] == "notes"):
        return FINDINGS
    return READY if report.ok else NOT_JUDGED


def _parser(what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rehearse", description=f"Judge {what}.")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave a check out")
    parser.add_argument(
        "--allow-unjudged", action="append", default=[], metavar="CHECK", help="accept that it fails to be judged"
    )
    parser.add_argument(
        "--expect",
        action=Expectations,
        default={},
        metavar="NAME=VALUE",
        help="what is meant so: final_lr=0, repeats=WHY, frozen=backbone,embed",
    )
    parser.add_argument(
        "--fail-on", choices=["findings", "notes"], default="findings", help="exit code 1 for notes too"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    return parser


class Expectations(argparse.Action):
    """``--expect final_lr=0 --expect frozen=backbone,embed`` as a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, given, value = values.partition("=")
        if not given:
            parser.error(f"--expect must be NAME=VALUE, as final_lr=0, got {values!r}")
        read: Any = value
        if name == "final_lr":
            try:
                read = float(value)
            except ValueError:
                parser.error(f"--expect final_lr must be a number, got {value!r}")
        elif name == "frozen":
            read = value.split(",")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: read})


OF_THE_COMMAND = ("json", "fail_on", "plot")
"""Options that the functions do not take."""


def _run_judged(words: list[str]) -> tuple[RehearsalReport, dict[str, Any]]:
    parser = _parser("a training run before it starts")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"For a script, by its path, which stands behind these options:\n\n{_script_parser().format_help()}"
    parser.add_argument("make_run", metavar="package.module:make_run", help="returns (trainer, model, data)")
    parser.add_argument("--deep", action="store_true", help="make the checks that take longer as well")
    parser.add_argument("--seconds", type=float, default=20.0, help="what each trial may take (20)")
    options = vars(parser.parse_args(words))
    of_run = {name: value for name, value in options.items() if name not in (*OF_THE_COMMAND, "make_run")}
    return judged(made(options["make_run"]), of_run), options


def _script_judged(words: list[str], script: str, arguments: list[str]) -> tuple[RehearsalReport, dict[str, Any]]:
    parser = _script_parser()
    options = vars(parser.parse_args(words))
    names = {f"--{name.replace('_', '-')}" for name in options}
    ours = [word for word in arguments if word.partition("=")[0] in names]
    if ours:
        print(
            f"{', '.join(ours)} stands behind {script}, so the script gets it: what rehearse is to take stands before "
            "the path.",
            file=sys.stderr,
        )
    of_script = {name: value for name, value in options.items() if name not in OF_THE_COMMAND}
    of_script["resume_with"] = shlex.split(options["resume_with"])
    return rehearse_script(script, arguments, picture=options["plot"], **of_script), options


def _script_parser() -> argparse.ArgumentParser:
    parser = _parser("a training script by rehearsing it to its end; its own arguments stand behind its path")
    parser.usage = "%(prog)s [options] train.py [its arguments]"
    parser.add_argument("--seconds", type=float, default=300.0, help="of CPU time that each rehearsal may take (300)")
    parser.add_argument("--ranks", type=int, default=1, help="processes that torchrun would start (1)")
    parser.add_argument(
        "--resume-with", default="", metavar="ARGUMENTS", help='the script gets more to go on: "--resume last.pt"'
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the night there, a PNG")
    return parser


def made(place: str) -> Any:
    """The run that ``package.module:make_run`` makes; modules are found from the working directory on."""
    module, _, function = place.partition(":")
    if not function:
        raise ValueError(
            f"say the function as well, as in package.module:make_run, or a script's path, train.py; got {place!r}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)()
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            raise
        code = end.code if isinstance(end.code, str) else f"exit code {end.code or 0}"
        raise NotRehearsed(f"{place} ends by itself ({code}) and makes no run") from end


def judged(run: Any, options: dict[str, Any]) -> RehearsalReport:
    if isinstance(run, dict):
        return rehearse_loop(**run, **options)
    if not isinstance(run, tuple | list) or not 2 <= len(run) <= 4:
        got = f"{len(run)} values" if isinstance(run, tuple | list) else type(run).__name__
        raise ValueError(
            "make_run must return (trainer, model), (trainer, model, data), (trainer, model, data, val_dataloaders), "
            f"or a dict of the arguments of rehearse_loop; it returned {got}"
        )
    return rehearse(*run, **options)


def command() -> NoReturn:
    """Run :func:`main`, and end without taking apart all that was imported, which would cost a second of the CPU."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("Interrupted: nothing was judged.", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            os._exit(128 + signal.SIGTERM)
        raise
    gc.freeze()  # what is put aside is left as it is
    raise SystemExit(code)


if __name__ == "__main__":
    command()
