"""``python -m tests.rehearse.scripts.night_search CASES SEED``: search for a script that is rehearsed wrongly.

Each drawn script is really run and counted, and rehearsed. What is counted has to be equal; a right script has
no finding, and one with a fault planted in it has findings of the check that is for it alone. The first that is wrong
is shrunk to the fewest pieces and printed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch._dynamo  # noqa: F401 - what a script imports is loaded once, and not in each of them

from rehearse.report import RehearsalReport
from rehearse.script import NotRehearsed, rehearse_script
from tests.rehearse.scripts.counter import really_counted
from tests.rehearse.scripts.night_pieces import FOUND_BY
from tests.rehearse.scripts.night_scripts import script_of
from tests.rehearse.scripts.nights import Night, drawn, simpler

FOUND = (
    Night(loss="by hand", accumulate=2, fault="loss not divided"),
    Night(loss="criterion", accumulate=3, fault="loss not divided"),
    Night(loss="teacher", accumulate=2, fault="loss not divided"),
    Night(loss="decay", accumulate=3, fault="loss not divided"),
    Night(loss="sum", accumulate=2, fault="loss not divided"),
    Night(loss="twice", accumulate=2, fault="loss not divided"),
    Night(schedule="one cycle", epochs=1, fault="stepped by epoch"),
    Night(windows=2, epochs=1, fault="no zero_grad"),
    Night(validation="within an epoch", over="loader"),
    Night(walk="by length", fault="seeded in each epoch"),
    Night(model="wrapped", loader="distributed", walk="by length", ranks=2, fault="dealt to each rank"),
    Night(walk="indices", validation="within an epoch", accumulate=3, fault="loss not divided"),
    Night(fresh=True, fault="seeded in each epoch"),
    Night(model="wrapped", loader="distributed", ranks=2, windows=1, fault="dealt to each rank"),
    Night(schedule="cosine of epochs", epochs=2, save="each epoch", resumed=True),
)
"""What such a search found to be wrong, once."""


def really_run(script: Path, folder: Path, ranks: int, until: str = "") -> dict | None:
    """What rank 0 does, in a fork of this process, which has imported torch; None where a script fails by itself.

    ``until``: the epochs after which it ends; all of them by default.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    running = {}
    for rank in range(ranks):
        out = folder / f"counted{rank}.json"
        pid = os.fork()
        if pid == 0:
            if until:
                os.environ["UNTIL"] = until
            _be_rank(rank, script, out)
        running[pid] = out
    failed = False
    while running:
        pid, status = os.wait()
        out = running.pop(pid)
        failed |= status != 0
        for other in running if status else ():
            os.kill(other, signal.SIGKILL)
    return None if failed else json.loads((folder / "counted0.json").read_text())


def _be_rank(rank: int, script: Path, out: Path) -> NoReturn:
    code = 1
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.chdir(script.parent)
        with open(f"printed{rank}.txt", "w") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        really_counted(out, script, [])
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def wrong_about(night: Night) -> str:
    """In what the rehearsal of it is wrong; empty where it is right."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("real", "played"):
            Path(folder, name).mkdir()
            Path(folder, name, "train.py").write_text(script_of(night))
        if night.resumed:
            really_run(Path(folder, "real", "train.py"), Path(folder), night.ranks, until="1")
            shutil.copy(Path(folder, "real", "last.pt"), Path(folder, "played"))
        real = really_run(Path(folder, "real", "train.py"), Path(folder), night.ranks)
        if real is None:
            return "it fails by itself"
        os.chdir(Path(folder, "played"))
        try:
            report = rehearse_script("train.py", ranks=night.ranks)
        except NotRehearsed as error:
            return f"not rehearsed: {error}"
        finally:
            os.chdir(here)
        return "\n".join([*_counted_otherwise(report, real, night), *_judged_otherwise(report, night)])


def _counted_otherwise(report: RehearsalReport, real: dict, night: Night) -> list[str]:
    names = ("optimizer steps", "scheduler steps", "backward passes", "validations", "saves")
    facts = {name: report.facts.get(name, 0) for name in names}
    counts = {name: real["counts"].get(name, 0) for name in names}
    if night.optimizer == "LBFGS":
        del counts["backward passes"]  # its closure is called as often as values ask for, and a note says so
    differ = [name for name in counts if facts[name] != counts[name]]
    wrong = [f"{name}: {facts[name]} played, {counts[name]} in the real run" for name in differ]
    rates = [rates[0] for rates in real["rates"]]
    if report.facts.get("rate of the first, the last step") != [rates[0], rates[-1]]:
        wrong.append(f"rates: {report.facts.get('rate of the first, the last step')} played, {rates} in the real run")
    return wrong


def _judged_otherwise(report: RehearsalReport, night: Night) -> list[str]:
    found = {finding.check for finding in report.findings}
    expected = {FOUND_BY[night.fault]} if night.fault else set()
    follow = {"horizon"} if night.fault == "tail lost" else set()  # there are fewer steps
    odd = [finding for finding in report.findings if finding.check not in expected | follow]
    wrong = [f"found: {finding.check}: {finding.says}" for finding in odd]
    if night.fault == "loss not divided" and any("is not judged" in note for note in report.notes):
        expected &= found  # the loss has two means, which may stand for anything, and the report says so
    wrong += [f"not found: {night.fault}, which is for {check}" for check in expected - found]
    return wrong + [f"not judged: {name}: {report.not_judged[name]}" for name in report.failed]


def shrunk(night: Night) -> tuple[Night, str]:
    """The night with the fewest pieces that is still wrong, and in what."""
    why = wrong_about(night)
    for one in simpler(night):
        if wrong_about(one):
            return shrunk(one)
    return night, why


def main(cases: int, seed: int) -> int:
    drawn_ones = (drawn(random.Random(f"{seed}/{case}"), with_fault=case % 2 == 1) for case in range(cases))
    wrong = 0
    for night in (*FOUND, *drawn_ones):
        if wrong_about(night):
            wrong += 1
            smallest, why = shrunk(night)
            print(f"{smallest}\n{why}\n", flush=True)
    print(f"seed {seed}: {len(FOUND) + cases} scripts, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
