"""Run notebooks and store their outputs, so that a second run changes no byte.

`jupyter execute` and papermill write timings, process ids and random widget ids into the file. Here every
output is stored as it came, less what differs between two runs or two machines:

    python -m workbook.refresh          # all of them
    python -m workbook.refresh 05 06    # those whose names start so
    python -m workbook.refresh my.ipynb
"""

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).parents[2]
os.environ.setdefault("REHEARSE_PROGRESS", "0")  # what a slow machine writes to stderr is no output of a notebook
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class RefreshError(Exception):
    """A cell failed; the message names the notebook, the cell and the error."""


def refresh(path: Path, timeout: int = 600) -> bool:
    """Run one notebook in its own folder and store its outputs; True where that changed the file.

    The kernel is the interpreter that runs this. Where a cell fails without the tag `raises-exception`, or
    takes longer than `timeout` seconds, RefreshError is raised and the file stays as it was.
    """
    old = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(old, as_version=4)
    _execute(notebook, path, timeout)
    _settle(notebook)
    _write_pictures(notebook, path.parent)
    new = nbformat.writes(notebook).rstrip("\n") + "\n"
    if new != old:
        path.write_text(new, encoding="utf-8", newline="\n")
    return new != old


def main(arguments: Sequence[str]) -> int:
    """Refresh the notebooks named by path or by the start of their name (none: all); 1 if one failed."""
    failed = 0
    for path in _find(arguments):
        start = time.perf_counter()
        try:
            verdict = "changed" if refresh(path) else "unchanged"
        except RefreshError as error:
            verdict, failed = f"FAILED, left as it was\n{error}", 1
        print(f"{path.name}: {time.perf_counter() - start:.1f} s, {verdict}", flush=True)
    return failed


def _find(arguments: Sequence[str]) -> Iterator[Path]:
    for argument in arguments or [""]:
        named = argument.endswith(".ipynb")
        found = [Path(argument)] if named else sorted((ROOT / "notebooks").glob(f"{argument}*.ipynb"))
        if not all(path.is_file() for path in found) or not found:
            sys.exit(f"no notebook {argument if named else f'{argument}* in notebooks'!r}")
        yield from found


class _ThisInterpreter(AsyncKernelManager):
    """Starts the Python that runs this, whatever a kernel named python3 is on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


def _execute(notebook: nbformat.NotebookNode, path: Path, timeout: int) -> None:
    place = "before its first cell"

    def note(cell: nbformat.NotebookNode, cell_index: int) -> None:
        nonlocal place
        place = f"cell {cell_index} (id {cell.get('id')})"

    client = NotebookClient(
        notebook,
        kernel_manager_class=_ThisInterpreter,
        resources={"metadata": {"path": str(path.resolve().parent)}},
        timeout=timeout,
        record_timing=False,
        store_widget_state=False,
        on_cell_start=note,
    )
    try:
        # Its stderr holds only notices on how it was started; what a cell writes there comes as an output.
        client.execute(stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RefreshError(f"{path.name}, {place}: {error}") from error


def _settle(notebook: nbformat.NotebookNode) -> None:
    """Remove what differs between runs: ids of widgets, timings, versions, paths, how streams were cut."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.metadata["kernelspec"] = KERNEL
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = list(_join_streams(cell.outputs))
        for output in cell.outputs:
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            if output.output_type == "error":
                output.traceback = [_without_paths(line) for line in output.traceback]
            if output.get("name") == "stderr":
                output.text = _without_paths(output.text)


def _write_pictures(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Write the figure of a cell that has `"picture": "name.png"` in its metadata to a file, for the README."""
    for cell in notebook.cells:
        if name := cell.metadata.get("picture"):
            (png,) = (output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
            (folder / name).write_bytes(base64.b64decode(png))


def _join_streams(outputs: list[Any]) -> Iterator[Any]:
    """One stdout and one stderr between two displays: where the kernel cuts them depends on its timer."""
    for is_stream, group in groupby(outputs, lambda output: output.output_type == "stream"):
        run = list(group)
        if not is_stream:
            yield from run
            continue
        for name in ("stdout", "stderr"):
            if text := "".join(output.text for output in run if output.name == name):
                yield nbformat.v4.new_output("stream", name=name, text=text)


# Tracebacks and warnings hold the paths of the machine. (IPython writes ~ for the home folder.)
_FOLDER = r"""(?:~|/|[A-Za-z]:[/\\])[^\s"'\x1b]*"""
_ROOTS = "|".join(re.escape(str(ROOT).replace(home, "~")) for home in (str(Path.home()), "~"))
_PATHS = {
    re.compile(_FOLDER + r"ipykernel_\d+[/\\]\d+\.py"): "cell.py",
    re.compile(_FOLDER + r"(?:(?:site|dist)-packages|lib[/\\]python3\.\d+)[/\\]"): "",
    re.compile(rf"(?:{_ROOTS})[/\\]"): "",
}


def _without_paths(text: str) -> str:
    for pattern, short in _PATHS.items():
        text = pattern.sub(short, text)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
