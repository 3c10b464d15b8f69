"""What somebody has who installs the wheel: readers' snippets run, types are known, what lacks is named."""

import json
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import course_lib
from tests.notebook_rules import ROOT

TEXTS = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/pages/*.md")))]
SNIPPETS = [snippet for text in TEXTS for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def user_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and sees torch and the tools of this one."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder, symlinks=sys.platform != "win32")
    (python,) = (path for path in folder.glob("*/python*") if path.name in ("python", "python.exe"))
    pip("install", "--no-deps", "--no-index", "--quiet", wheel, python=python)
    (packages,) = folder.glob("**/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "tools.pth").write_text("\n".join(lines))
    return python


def pip(*arguments: object, python: Path | None = None) -> None:
    which = ["--python", str(python)] if python else []
    run(sys.executable, "-m", "pip", *which, *map(str, arguments))


def run(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_library_its_types_and_its_data(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"course_lib/py.typed", "course_lib/_data/digits.npz", "course_lib/_data/claims.json"} <= set(names)
    assert {"rehearse/py.typed", "rehearse/__main__.py", "rehearse/scripts/player.py"} <= set(names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"course_lib", "rehearse"}
    assert wheel.name.startswith(f"every_batch_counts-{course_lib.__version__}-")


@pytest.mark.thorough
def test_the_installed_library_is_that_of_the_wheel(user_python: Path, tmp_path: Path):
    code = "import course_lib; print(course_lib.__version__, course_lib.__file__)"
    version, file = run(user_python, "-c", code, cwd=tmp_path).split()
    assert version == course_lib.__version__ and Path(file).is_relative_to(user_python.parents[1])


@pytest.mark.thorough
def test_the_wheel_brings_the_command_that_rehearses_a_script(user_python: Path, tmp_path: Path):
    code = "import rehearse; print(rehearse.__file__)"
    assert Path(run(user_python, "-c", code, cwd=tmp_path).strip()).is_relative_to(user_python.parents[1])
    assert "train.py [its arguments]" in run(user_python, "-m", "rehearse", "--help", cwd=tmp_path)


RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback
told = []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(path, run_name="__main__")
        except Exception:
            traceback.print_exc(file=sys.stdout)
    told.append(printed.getvalue())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def printed(user_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each snippet prints: one process runs them all, as most of their time goes into imports."""
    folder, paths = tmp_path_factory.mktemp("snippets"), []
    for number, snippet in enumerate(SNIPPETS):
        paths.append(folder / f"readme_{number}.py")
        paths[-1].write_text(snippet, encoding="utf-8")
    return json.loads(run(user_python, "-c", RUN_ALL, *paths, cwd=folder).splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_for_readers_prints_what_its_comments_say(number: int, printed: list[str]):
    promised = re.findall(r"print\(.*#\s*([^:\n]+)", SNIPPETS[number])
    assert promised and printed[number].splitlines() == [line.strip() for line in promised]


# What `mypy --strict` asks of a module. Said in the files themselves, the options of every other module are those of
# `make lint`, and what that has found out of torch and Lightning need not be found out again.
STRICTLY = """# mypy: check-untyped-defs, disallow-any-generics, disallow-incomplete-defs, disallow-subclassing-any
# mypy: disallow-untyped-calls, disallow-untyped-decorators, disallow-untyped-defs, extra-checks, no-implicit-reexport
# mypy: strict-equality, warn-return-any, warn-unused-ignores
"""


@pytest.mark.thorough
def test_the_snippets_pass_strict_mypy(user_python: Path, tmp_path: Path):
    snippets, known = tmp_path / "snippets", tmp_path / "known"
    snippets.mkdir()
    for number, snippet in enumerate(SNIPPETS):
        (snippets / f"readme_{number}.py").write_text(STRICTLY + snippet, encoding="utf-8")
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", known)
    mypy = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", known]
    told = run(*mypy, "--python-executable", user_python, ".", cwd=snippets)
    assert f"no issues found in {len(SNIPPETS)} source files" in told
    # A reader's own fault is seen: what is strict, and what the types of the installed library say.
    faulty = "from course_lib.steps import plan_steps\ndef own(x): return x\nprint(own(1), plan_steps('3', 1))\n"
    (snippets / "readme_0.py").write_text(STRICTLY + faulty, encoding="utf-8")
    done = subprocess.run([*map(str, mypy), "--python-executable", user_python, "readme_0.py"], cwd=snippets,
                          capture_output=True, text=True)  # fmt: skip
    assert re.findall(r"\[([\w-]+)\]$", done.stdout, re.MULTILINE) == ["no-untyped-def", "no-untyped-call", "arg-type"]


def test_the_changes_and_the_citation_are_of_this_version():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changes, re.MULTILINE)[0] == course_lib.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [course_lib.__version__]


@pytest.mark.thorough
def test_without_lightning_the_callbacks_say_what_to_install_and_the_topics_work(tmp_path: Path):
    code = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import course_lib.steps, course_lib.skipping, course_lib.memory
import rehearse.script
for statement in ("import course_lib.callbacks", "from rehearse import Rehearsal"):
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error.name, str(error))
"""
    first, second = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert first.startswith("lightning course_lib.callbacks needs Lightning") and 'pip install ".[lightning]"' in first
    assert second.startswith("lightning rehearse.Rehearsal needs Lightning") and 'pip install ".[lightning]"' in second
