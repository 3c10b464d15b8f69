"""What goes wrong at the installation is said in a sentence: an old Python, no pip, no network, a full disk."""

import ast
import sys

import pytest

import install
from tests.notebook_rules import ROOT

REFUSED = """WARNING: Retrying (Retry(total=0, connect=None, read=None)) after connection broken by 'NewConnectionError(
'<pip._vendor.urllib3.connection.HTTPConnection>: Failed to establish a new connection: [Errno 111] Connection refused')
ERROR: Could not find a version that satisfies the requirement torch (from versions: none)
ERROR: No matching distribution found for torch"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
NO_WHEEL = "ERROR: No matching distribution found for torch<3,>=2.11"


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (REFUSED, "There is no network, or the package index does not answer."),
        (FULL, "The disk is full: "),
        (NO_WHEEL, "The package index has no torch<3,>=2.11 for this Python and this machine."),
        ("ERROR: [Errno 13] Permission denied: '.venv'", f"{ROOT} may not be written to."),
        ("a\nAn unknown fault\n", "This command failed, and its last line is 'An unknown fault': pip install"),
        ("", "This command failed, and its last line is 'it printed nothing'"),
    ],
)
def test_what_pip_printed_becomes_a_sentence(output: str, told: str):
    assert install.explain(output, "pip install").startswith(told)


@pytest.mark.parametrize("version", [(2, 7), (3, 8), (3, 10)])
def test_an_old_python_is_told_which_it_needs(version: tuple[int, int]):
    with pytest.raises(install.CannotInstall, match=rf"Python {version[0]}.{version[1]} is too old .* Python 3.11 or"):
        install.require_python(version)


def test_an_old_python_can_read_the_file_that_says_so():
    ast.parse((ROOT / "install.py").read_text(encoding="utf-8"), feature_version=(3, 4))


def test_a_python_without_pip_is_told_where_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(install.CannotInstall, match=r"no pip to put into an environment .*apt-get"):
        install.require_python((3, 11))


def test_a_disk_without_room_is_told_ahead_of_the_download(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(install, "LEAST_FREE_BYTES", 10**18)
    assert install.main([]) == 1
    assert capsys.readouterr().err.startswith("The disk is full: ") and not list(tmp_path.iterdir())


def test_half_an_environment_is_not_left_behind(tmp_path, monkeypatch, capsys):
    # A file in the way of a folder: the environment's own programs cannot be made.
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "lib").write_text("")
    monkeypatch.setattr(install, "VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(install, "LEAST_FREE_BYTES", 0)
    assert install.main(["--only-venv"]) == 1
    assert capsys.readouterr().err.startswith("This command failed, and its last line is ")
    assert not list(tmp_path.iterdir())
