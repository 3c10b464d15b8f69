"""The repository as a whole: versions agree, no file names a machine."""

import re
import subprocess
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.notebook_rules import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BAD_LIGHTNING = ("2.6.2", "2.6.3")


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith(("#", "-e"))]


def locked() -> Iterator[tuple[str, Version]]:
    for line in lines("requirements.lock"):
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        yield requirement.name, Version(pin.version)


def test_requirements_are_those_of_the_package_and_its_extras():
    extras = PYPROJECT["optional-dependencies"].values()
    declared = [*PYPROJECT["dependencies"], *(line for extra in extras for line in extra)]
    assert sorted(lines("requirements.txt")) == sorted(declared)
    assert "-e ." in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()


def test_the_lock_holds_a_version_within_each_range():
    versions = list(locked())
    for requirement in map(Requirement, lines("requirements.txt")):
        found = [version for name, version in versions if name == requirement.name]
        assert found, f"{requirement.name} is not locked: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in found), requirement


def test_the_build_backend_is_locked_for_machines_without_a_network():
    assert {"hatchling", "editables"} <= {name for name, _ in locked()}


def test_the_malicious_releases_of_lightning_are_excluded():
    (lightning,) = (r for r in map(Requirement, lines("requirements.txt")) if r.name == "lightning")
    assert not any(lightning.specifier.contains(bad) for bad in BAD_LIGHTNING)
    assert not any("lightning" in name and str(version) in BAD_LIGHTNING for name, version in locked())


def test_the_lock_names_no_place():
    assert not re.search(r"://|^-|(?<!\w)/", "\n".join(lines("requirements.lock")), re.MULTILINE)


def test_no_file_names_a_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: git knows the files of the repository")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    place = re.compile(r"(?<![\w.>)}])/(?:home|root|Users|work|opt)/\w|" + re.escape(str(ROOT)))
    found = []
    for path in (ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()):
        content = path.read_bytes()
        if b"\0" not in content:
            text = content.decode("utf-8")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in place.finditer(text)]
    assert found == []
