"""What is true of each public script, read by hand: records.toml, and where a report says something else."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records.toml")
BY_SCRIPT = {"workers", "bad_step", "growth", "resume"}
"""What no rehearsal of a script sees."""


@dataclass(frozen=True)
class Finding:
    """A finding that is true of the script."""

    check: str
    what: str
    why: str
    costs: str


@dataclass(frozen=True)
class Script:
    """One script, as it is started."""

    file: str
    arguments: list[str] = field(default_factory=list)
    folder: str = ""
    """Of the repository, in which it is started; by default the script's own."""
    data: str = ""
    """The function of data.py that generates what it reads, before it starts."""
    by: str = "script"
    """``"fit"``: its first ``Trainer.fit`` is judged by ``rehearse(trainer, model, data)``, and no rehearsal of it."""
    ranks: int = 1
    seconds: float = 300.0
    """Of CPU time that a rehearsal may take."""
    steps: int | None = None
    """The optimizer steps that it makes, reckoned by hand; None where values decide, or where they are not counted."""
    reckoned: str = ""
    """How."""
    fails: str = ""
    """What it says where it fails by itself; nothing is judged then."""
    because: str = ""
    """Why it does, as the gallery says it."""
    not_judged: dict[str, str] = field(default_factory=dict)
    """Check, and a part of the reason."""
    findings: list[Finding] = field(default_factory=list)
    missed: list[Finding] = field(default_factory=list)
    """What is true and is not found."""

    @property
    def unjudged(self) -> set[str]:
        """All checks that are not judged."""
        if self.by == "fit":
            return set(self.not_judged)
        return BY_SCRIPT | ({"no_sync"} if self.ranks == 1 else set()) | set(self.not_judged)


@dataclass(frozen=True)
class Repository:
    """A public repository at one commit."""

    name: str
    commit: str
    scripts: list[Script]

    @property
    def address(self) -> str:
        return f"https://github.com/{self.name}"


def read_records(path: Path = RECORDS) -> list[Repository]:
    """All records, in their order."""
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Repository(one["name"], one["commit"], [_script(script) for script in one["scripts"]])
        for one in written["repository"]
    ]


def _script(written: dict[str, Any]) -> Script:
    findings, missed = ([Finding(**one) for one in written.pop(name, [])] for name in ("findings", "missed"))
    return Script(findings=findings, missed=missed, **written)


def differences(script: Script, report: Mapping[str, Any] | None, says: str = "") -> list[str]:
    """Where a report on the script says something else than its record; ``says``: why there is no report."""
    if report is None:
        if script.fails and script.fails in says:
            return []
        return [f"it could not be judged: {says.strip()}"]
    if script.fails:
        return [f"it should fail by itself ({script.fails}), and was judged"]
    found = {finding["check"]: finding["says"] for finding in report["findings"]}
    wanted = {finding.check for finding in script.findings}
    said = [f"{check} finds what is not true: {text}" for check, text in found.items() if check not in wanted]
    said += [f"{check} finds nothing" for check in sorted(wanted - set(found))]
    for check, why in report["not_judged"].items():
        if check not in script.unjudged:
            said.append(f"{check} is not judged: {why}")
        elif script.not_judged.get(check, "") not in why:
            said.append(f"{check} is not judged for another reason: {why}")
    missing = script.unjudged - set(report["not_judged"]) - set(report["skipped"])
    said += [f"{check} is judged" for check in sorted(missing)]
    steps = report["facts"].get("optimizer steps")
    if script.steps is not None and steps != script.steps:
        said.append(f"it makes {script.steps:,} optimizer steps, and {steps:,} are counted")
    return said
