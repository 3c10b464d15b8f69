"""What the docstrings show: their examples print what they say, and the names that they refer to exist."""

import contextlib
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("course_lib", "rehearse", "notebooks/workbook") for path in (ROOT / name).rglob("*.py")]
WITH_EXAMPLES = sorted(path for path in FILES if ">>> " in path.read_text())
WITH_ROLES = sorted(path for path in FILES if re.search(r":\w+:`", path.read_text()))


def module_of(path: Path) -> ModuleType:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(".".join(parts).removeprefix("notebooks.").removesuffix(".__init__"))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_print_what_they_say(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examined = doctest.testmod(module_of(path), optionflags=doctest.ELLIPSIS)
    assert examined.attempted > 0
    assert examined.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", WITH_ROLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_references_name_something(path: Path) -> None:
    module = module_of(path)
    names = re.findall(r":\w+:`~?([\w.]+)`", path.read_text())
    assert names
    assert [name for name in names if not any(found(name, place) for place in places(module))] == []


def places(module: ModuleType) -> Iterator[object]:
    """Where the docstrings of a module look a name up: the module, its classes, and everything by its full name."""
    yield module
    yield from (value for _, value in inspect.getmembers(module, inspect.isclass))
    yield None


def found(name: str, place: object) -> bool:
    if place is None:
        module, _, name = name.rpartition(".")
        try:
            place = importlib.import_module(module)
        except (ImportError, ValueError):
            return False
        with contextlib.suppress(ImportError):  # a module, which may not have been imported yet
            importlib.import_module(f"{module}.{name}")
    for part in name.split("."):
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True
