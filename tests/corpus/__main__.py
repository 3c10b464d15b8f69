"""``python -m tests.corpus --clones FOLDER [part of a name …]``: judge public scripts, and compare with the records.

The exit code is 1 where a report differs from its record, and 2 where a repository is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from docs.gallery import PAGE
from tests.corpus import data
from tests.corpus.clones import NotHere, work_tree
from tests.corpus.records import Script, differences, read_records

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).with_name("stand_ins")
SHORTEST_QUOTE = 25


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description="Judge public scripts.")
    parser.add_argument("--clones", type=Path, required=True, help="a folder of clones, by owner and name")
    parser.add_argument("--show", action="store_true", help="print the whole reports")
    parser.add_argument("parts", nargs="*", help="of the names of scripts; all where none is given")
    options = parser.parse_args(argv)
    clones = options.clones.resolve()
    judged, wrong, missing = 0, 0, []
    print("script | seconds | findings | not judged")
    for repository in read_records():
        scripts = [one for one in repository.scripts if _is_asked_for(f"{repository.name}/{one.file}", options.parts)]
        if not scripts:
            continue
        try:
            tree = work_tree(repository, clones)
        except NotHere as error:
            missing.append(str(error))
            continue
        for script in scripts:
            report, says, seconds = judge(script, tree)
            said = differences(script, report, says) + quoted((tree / script.file).read_text(encoding="utf-8"))
            judged, wrong = judged + 1, wrong + bool(said)
            print(f"{repository.name}/{script.file} | {seconds:.1f} | {_told(script, report)}", flush=True)
            for line in said:
                print(f"  DIFFERS: {line}", flush=True)
            if options.show:
                print(json.dumps(report, indent=1) if report else says)
    print(f"{judged} scripts judged, {wrong} of them differ from their records.")
    for line in missing:
        print(f"Missing: {line}")
    return 1 if wrong else 2 if missing else 0


def quoted(text: str) -> list[str]:
    """The lines of a script that stand in the gallery as they are, from a certain length on."""
    page = PAGE.read_text(encoding="utf-8")
    lines = {line.strip() for line in text.splitlines()}
    return [f"the gallery quotes it: {line}" for line in lines if len(line) >= SHORTEST_QUOTE and line in page]


def _is_asked_for(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _told(script: Script, report: dict[str, Any] | None) -> str:
    if report is None:
        return "fails by itself | all"
    found = ", ".join(finding["check"] for finding in report["findings"])
    return f"{found or 'none'} | {', '.join(report['not_judged'])}"


def judge(script: Script, tree: Path) -> tuple[dict[str, Any] | None, str, float]:
    """The report on a script as a dict, or why there is none, and the seconds that it took."""
    path = tree / script.file
    folder = tree / script.folder if script.folder else path.parent
    if script.data:
        getattr(data, script.data)(folder)
    with tempfile.TemporaryDirectory() as kept:
        written = Path(kept, "report.json")
        if script.by == "fit":
            words = ["tests.corpus.fits", str(written)]
        else:
            words = ["rehearse", "--json", str(written), "--seconds", str(script.seconds)]
            words += ["--ranks", str(script.ranks)]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *words, str(path), *script.arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (STAND_INS, ROOT, tree)))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - began
        report = json.loads(written.read_text(encoding="utf-8")) if written.exists() else None
    return report, done.stderr, seconds


if __name__ == "__main__":
    raise SystemExit(main())
