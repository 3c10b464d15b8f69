"""The repository as a whole: versions agree, imports point one way, no file names a machine."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.notebook_rules import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CALLBACKS = ROOT / "course_lib" / "callbacks"
TOPICS = [
    path
    for path in sorted(ROOT.glob("course_lib/**/*.py"))
    if path.stem != "__init__" and not path.is_relative_to(CALLBACKS)
]
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


def test_importing_every_topic_loads_no_lightning_and_no_plots():
    modules = ", ".join(["course_lib", *(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in TOPICS)])
    code = f"import sys, {modules}\nprint(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "torch" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "matplotlib", "ipywidgets", "IPython"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, and the names that it takes from them."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def imports_any(path: Path, *modules: str) -> list[str]:
    return [name for name in imported(path) for module in modules if f"{name}.".startswith(f"{module}.")]


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_a_topic_imports_neither_callbacks_nor_the_workbook(path: Path):
    assert imports_any(path, "course_lib.callbacks", "workbook", "lightning", "matplotlib", "ipywidgets") == []


@pytest.mark.parametrize("path", sorted(CALLBACKS.glob("*.py")), ids=lambda path: path.stem)
def test_callbacks_import_nothing_of_the_notebooks(path: Path):
    assert imports_any(path, "workbook", "matplotlib", "ipywidgets") == []


def test_upward_imports_are_found_however_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "course_lib" / "steps.py"
    path.parent.mkdir()
    for line in (
        "import course_lib.callbacks",
        "from course_lib import callbacks",
        "from . import callbacks as c",
        "from .callbacks import StepAudit",
        "def f():\n    from course_lib.callbacks import StepAudit",
    ):
        path.write_text(line)
        assert imports_any(path, "course_lib.callbacks"), line
    path.write_text("import course_lib.callbacks_of_torch\nfrom .launch import run_ranks")
    assert imports_any(path, "course_lib.callbacks") == []


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
