"""A second refresh changes no byte, and what it stores is compared, from wherever pytest is started."""

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from workbook.refresh import RefreshError, main, refresh

from tests import effort
from tests.notebook_rules import ROOT, free_of_the_machine, no_trace_of_the_run

CELLS = [
    new_markdown_cell("# A small notebook"),
    new_code_cell("sum(range(40))", id="sum"),
    # The pause is longer than the kernel's buffer waits: each stream comes in two pieces.
    new_code_cell(
        "import sys, time, warnings\n"
        "print('a')\n"
        "warnings.warn('short window')\n"
        "time.sleep(0.5)\n"
        "print('b')\n"
        "print('c', file=sys.stderr)",
        id="streams",
    ),
    new_code_cell(
        "import matplotlib.pyplot as plt\n"
        "_ = plt.figure(figsize=(1, 1)).subplots().plot([1, 2])\n"
        "plt.show()",
        id="figure",
        metadata={"picture": "small.png"},
    ),
    new_code_cell(
        "import ipywidgets\n"
        "from IPython.display import display\n"
        "slider = ipywidgets.IntSlider(3)\n"
        "display({**slider._repr_mimebundle_(), 'text/plain': '[interactive]'}, raw=True)",
        id="widget",
    ),
    new_code_cell("import json\njson.loads('x')", id="error", metadata={"tags": ["raises-exception"]}),
    new_code_cell("print('at 0x7f00' + 'deadbeef')", id="address"),
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with our settings and one refreshed notebook."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "conftest.py", "tests/nbval_sanitize.cfg"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "notebooks").mkdir()
    nbformat.write(new_notebook(cells=CELLS), folder / "notebooks" / "small.ipynb")
    assert refresh(folder / "notebooks" / "small.ipynb")
    return folder


@pytest.fixture
def small(project: Path) -> Path:
    return project / "notebooks" / "small.ipynb"


def outputs(path: Path, cell_id: str) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(path, as_version=4)
    return next(cell.outputs for cell in notebook.cells if cell["id"] == cell_id)


def run_pytest(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.thorough
def test_a_second_refresh_changes_no_byte(small: Path):
    first = small.read_bytes()
    assert refresh(small) is False
    assert small.read_bytes() == first
    assert first.endswith(b"}\n")


@pytest.mark.thorough
def test_outputs_hold_nothing_of_the_machine_and_nothing_of_the_run(small: Path):
    notebook = nbformat.read(small, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell["id"] != "address"]
    assert [*free_of_the_machine("small", notebook), *no_trace_of_the_run("small", notebook)] == []
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info


@pytest.mark.thorough
def test_streams_are_joined_and_warnings_lose_their_path(small: Path):
    stdout, stderr = outputs(small, "streams")
    assert (stdout.name, stdout.text) == ("stdout", "a\nb\n")
    assert stderr.text == "cell.py:3: UserWarning: short window\n  warnings.warn('short window')\nc\n"


@pytest.mark.thorough
def test_what_a_reader_sees_stays(small: Path):
    stored = nbformat.read(small, as_version=4)
    assert [cell["id"] for cell in stored.cells] == [cell["id"] for cell in CELLS]
    assert base64.b64decode(outputs(small, "figure")[0].data["image/png"]) == small.with_name("small.png").read_bytes()
    assert outputs(small, "widget")[0].data == {"text/plain": "[interactive]"}
    assert outputs(small, "error")[0].ename == "JSONDecodeError"
    assert "json/__init__.py" in "".join(outputs(small, "error")[0].traceback)


@pytest.mark.thorough
def test_a_failing_notebook_is_named_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "failing.ipynb"
    cells = [new_code_cell("1 + 1", id="good"), new_code_cell("raise OSError('no batch')", id="bad")]
    nbformat.write(new_notebook(cells=cells), path)
    before = path.read_bytes()
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "failing.ipynb, cell 1 (id bad)" in said
    assert "no batch" in said
    assert path.read_bytes() == before


@pytest.mark.thorough
def test_a_cell_that_takes_too_long_is_named(tmp_path: Path):
    path = tmp_path / "slow.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("import time\ntime.sleep(60)", id="slow")]), path)
    with pytest.raises(RefreshError, match=r"slow.ipynb, cell 0 \(id slow\): A cell timed out"):
        refresh(path, timeout=1)


def test_an_unknown_notebook_is_named():
    with pytest.raises(SystemExit, match=r"no notebook '77\* in notebooks'"):
        main(["77"])


@pytest.mark.thorough
@pytest.mark.parametrize(("folder", "arguments"), [(".", ["notebooks"]), ("notebooks", [])][: effort.cases(1, 2)])
def test_another_address_passes_and_another_number_fails_from_wherever_pytest_is_started(
    folder: str, arguments: list[str], project: Path, small: Path
):
    stored, changed = small.read_text(), small.with_name("changed.ipynb")
    try:
        small.write_text(stored.replace("0x7f00deadbeef", "0x7f00deadbee0"))
        changed.write_text(stored.replace('"780"', '"781"'))
        code, said = run_pytest(project / folder, "-rfp", *arguments)
        assert (code, "1 failed, 11 passed" in said) == (1, True), said
        assert re.findall(r"^FAILED .*(changed|small).ipynb::Cell (\d)", said, re.MULTILINE) == [("changed", "0")]
        assert len(re.findall(r"^PASSED .*small.ipynb::Cell", said, re.MULTILINE)) == 6
        assert "781" in said
    finally:
        small.write_text(stored)
        changed.unlink(missing_ok=True)


@pytest.mark.thorough
def test_a_gpu_test_is_left_out_unless_asked_for_and_then_fails_without_a_gpu(project: Path):
    (project / "tests" / "test_device.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_device(): pass\n")
    code, said = run_pytest(project, "tests")
    assert (code, "1 deselected" in said) == (5, True), said
    code, said = run_pytest(project, "tests", "-m", "gpu", CUDA_VISIBLE_DEVICES="")
    assert (code, "this test needs a CUDA device, and torch sees none" in said) == (1, True), said
