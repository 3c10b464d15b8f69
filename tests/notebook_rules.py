"""What every notebook of the workbook keeps to: a rule takes a notebook and yields what breaks it.

``python -m tests.notebook_rules`` prints each chapter's minutes by the formula, and how many lines are too wide.
"""

import ast
import json
import re
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[1]
SECOND_HALF = "For those who doubt"
ANATOMY = ["Symptom", "Predict", "Mechanism", "Fix", "Exercises", "In your project", SECOND_HALF]
ENDING = ["Proof", "Claims", "Recap"]
ANEW = ("04", "07")
"""Chapters that are written anew: their first half ends with what it costs, where it ends, and its recap."""
ANATOMY_ANEW = [
    *("Symptom", "Predict", "Mechanism", "Fix", "What does it cost?", "Exercises", "In your project"),
    *("Where this ends", "Recap", SECOND_HALF),
]
ENDING_ANEW = ["Proof", "Claims"]
SITTING_ANEW = 42
"""Minutes that their first half may take."""
WITHOUT_ANATOMY = ("00",)
IGNORING = {"nbval-ignore-output", "nbval-skip"}
VERDICTS = {"T", "I", "F", "V"}

COLUMNS = 88
WIDEST = {"lines of code": COLUMNS, "printed lines": COLUMNS, "lines of a shown source": 106}  # in columns
"""Of a line of code or of what is printed: more are not on the page."""
SITTING, SITTINGS_OF_TWO, SITTING_ANEW = 60, 50, 42
"""Minutes that a first half may take, and each part of one that has a place to stop."""
IN_TWO_SITTINGS = ("06",)
PLACE_TO_STOP = "**A place to stop.**"

Notebook = dict[str, Any]
Cell = dict[str, Any]
Rule = Callable[[str, Notebook], Iterator[str]]


def broken_rules(name: str, notebook: Notebook) -> list[str]:
    """Every problem of the notebook `name` (its stem), each naming the notebook and the cell."""
    return [f"{name}: {problem}" for rule in RULES for problem in rule(name, notebook)]


def executed_in_order(name: str, notebook: Notebook) -> Iterator[str]:
    # nbval never compares a cell without a count.
    for position, cell in enumerate(code_cells(notebook), start=1):
        if cell["execution_count"] != position:
            yield f"{label(cell)} has execution count {cell['execution_count']}, expected {position}"


def ignored_for_a_reason(name: str, notebook: Notebook) -> Iterator[str]:
    cells = code_cells(notebook)
    ignored = [cell for cell in cells if is_ignored(cell)]
    for cell in ignored:
        reason = cell["metadata"].get("reason")
        if not (isinstance(reason, str) and reason.strip()):
            yield f"{label(cell)} is not compared, and its metadata has no `reason`"
    for cell in cells:
        if re.search(r"^\s*#\s*(NBVAL|PYTEST_VALIDATE)_", source(cell), re.MULTILINE):
            yield f"{label(cell)} speaks to nbval by a comment: use a tag, and a reason"
    if len(ignored) * 7 > len(cells):
        which = ", ".join(label(cell) for cell in ignored)
        yield f"{len(ignored)} of {len(cells)} code cells are not compared, at most one in seven: {which}"


def free_of_the_machine(name: str, notebook: Notebook) -> Iterator[str]:
    host = socket.gethostname()
    patterns = {
        "an absolute path": r"(?<![\w.])(?:/(?:home|tmp|root|Users|private|opt|usr|var)/|[A-Z]:\\)\S*",
        "the path of a package": r"[^\s\"']*[/\\]site-packages\b",
        "the repository's own path": re.escape(str(ROOT)),
        "an address in memory": r"\b0x[0-9a-fA-F]{6,}",
    }
    for cell in notebook["cells"]:
        for where, text in {"source": source(cell), "output": "\n".join(output_texts(cell))}.items():
            for what, pattern in patterns.items():
                if found := re.search(pattern, text):
                    yield f"{label(cell)} has {what} in its {where}: {found[0]}"
            if where == "output" and host != "localhost" and re.search(rf"\b{re.escape(host)}\b", text):
                yield f"{label(cell)} has the name of this machine in its output: {host}"


def code_as_readers_may_copy_it(name: str, notebook: Notebook) -> Iterator[str]:
    unwanted = {
        # A semicolon hides no output from nbval, and readers of plain Python wonder.
        "a line that ends with a semicolon": r";[ \t]*$",
        "an installation": r"^\s*[!%]\s*(pip|conda|uv)\b",
        "sys.path": r"\bsys\.path\b",
        "a fixed device": r"\bcuda:0\b",
    }
    for cell in code_cells(notebook):
        for what, pattern in unwanted.items():
            if re.search(pattern, source(cell), re.MULTILINE):
                yield f"{label(cell)} has {what}"


def no_history(name: str, notebook: Notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        tree = syntax_tree(cell)
        if tree is None:
            if "raises-exception" not in tags(cell):
                yield f"{label(cell)} is no Python"
            continue
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for used in sorted(n for n in read if re.fullmatch(r"_|__|___|_i*\d+|_i+|In|Out", n)):
            yield f"{label(cell)} reads IPython's history: {used}"


def errors_are_announced(name: str, notebook: Notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        announced = "raises-exception" in tags(cell)
        if failed and not announced:
            yield f"{label(cell)} shows an error without the tag raises-exception"
        if announced and not failed:
            yield f"{label(cell)} has the tag raises-exception and shows no error"


def no_trace_of_the_run(name: str, notebook: Notebook) -> Iterator[str]:
    if "widgets" in notebook["metadata"]:
        yield "metadata.widgets holds the state of widgets: run `make refresh`"
    for cell in code_cells(notebook):
        if "execution" in cell["metadata"]:
            yield f"{label(cell)} holds the times of its run: run `make refresh`"


def figures_have_their_sentence(name: str, notebook: Notebook) -> Iterator[str]:
    # JupyterLab shows no alternative text of an image: whoever cannot see it reads the sentence under it.
    for cell in code_cells(notebook):
        for output, following in pairwise([*cell["outputs"], {}]):
            if any(mime.startswith("image/") for mime in output.get("data", {})):
                sentence = joined(following.get("data", {}).get("text/markdown", ""))
                if len(sentence.strip()) < 30:
                    yield f"{label(cell)} has a figure without its sentence (text/markdown of 30 characters)"


def headings_follow_the_anatomy(name: str, notebook: Notebook) -> Iterator[str]:
    if name.startswith(WITHOUT_ANATOMY):
        return
    prose = "\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^# +(.+?) *$", prose, re.MULTILINE)
    if len(titles) != 1 or not titles[0].endswith("?"):
        yield f"the title is one level-1 heading, a question: found {titles}"
    elif not source(notebook["cells"][0]).startswith("# "):
        yield f"{label(notebook['cells'][0])} does not begin with the title"
    anatomy, ending = (ANATOMY_ANEW, ENDING_ANEW) if name.startswith(ANEW) else (ANATOMY, ENDING)
    headings = re.findall(r"^## +(.+?) *$", prose, re.MULTILINE)
    if headings != anatomy:
        yield f"the level-2 headings are {headings}, expected {anatomy}"
    else:
        second_half = re.findall(r"^### +(.+?) *$", prose.partition(f"\n## {SECOND_HALF}")[2], re.MULTILINE)
        if [heading for heading in second_half if heading in ending] != ending:
            yield f"the level-3 headings under {SECOND_HALF} are {second_half}, expected {ending} among them, in order"


def the_first_half_is_short(name: str, notebook: Notebook) -> Iterator[str]:
    if not is_cut(notebook):
        return
    part, cells = "", 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            part = (re.findall(r"^## +(.+?) *$", source(cell), re.MULTILINE) or [part])[-1]
            continue
        if part == SECOND_HALF:
            break
        lines = [line for line in source(cell).splitlines() if line.strip()]
        if len(lines) > 15 and not is_folded(cell):
            yield f"{label(cell)} has {len(lines)} lines, at most 15 in the first half"
        if part != "Exercises" and not is_folded(cell):
            cells += 1
    if cells > 25:
        yield f"the first half has {cells} code cells beside the exercises, at most 25"


def numbers_rather_than_booleans(name: str, notebook: Notebook) -> Iterator[str]:
    if not is_cut(notebook):
        return
    lines = [line for cell in code_cells(notebook) for line in printed_lines(cell)]
    bare = [line for line in lines if re.search(r"\b(True|False)\b", line) and not re.search(r"\d", line)]
    if len(bare) * 8 > len(lines):
        yield f"{len(bare)} of {len(lines)} printed lines are a bare True or False, at most one in eight: {bare}"


def code_is_read_once(name: str, notebook: Notebook) -> Iterator[str]:
    if not is_cut(notebook):
        return
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for cell in code_cells(notebook):
        for node in ast.walk(syntax_tree(cell) or ast.Module()):
            inside = [child for child in ast.walk(node) if child is not node]
            if isinstance(node, comprehensions) and any(isinstance(child, comprehensions) for child in inside):
                yield f"{label(cell)} has a comprehension in a comprehension: {ast.unparse(node)[:60]}"
            if isinstance(node, ast.IfExp) and any(isinstance(child, ast.IfExp) for child in inside):
                yield f"{label(cell)} has a conditional in a conditional: {ast.unparse(node)[:60]}"
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp):
                yield f"{label(cell)} has a chain of `and` or `or` for its side effect: {ast.unparse(node)[:60]}"


def nothing_runs_out_of_the_page(name: str, notebook: Notebook) -> Iterator[str]:
    for cell in notebook["cells"]:
        for what, lines in wide_lines(cell).items():
            if lines:
                longest = max(lines, key=len)
                yield (
                    f"{label(cell)} has {len(lines)} {what} of more than {WIDEST[what]} columns, "
                    f"the longest {len(longest)}: {longest.strip()[:40]}"
                )


def wide_lines(cell: Cell) -> dict[str, list[str]]:
    """Lines of code, in a code cell, in a fence or as a shown source, and printed ones, that are wider than a page."""
    if cell["cell_type"] == "code":
        shown = "\n".join(joined(output.get("data", {}).get("text/markdown", "")) for output in cell["outputs"])
        code, printed, shown = source(cell), printed_lines(cell), fenced(shown)
    else:
        code, printed, shown = fenced(source(cell)), [], ""
    lines = dict(zip(WIDEST, (code.splitlines(), printed, shown.splitlines()), strict=True))
    return {what: [line for line in of_it if len(line) > WIDEST[what]] for what, of_it in lines.items()}


def fenced(markdown: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL))


def the_minutes_are_true(name: str, notebook: Notebook) -> Iterator[str]:
    sittings = minutes_of_sittings(notebook)
    wanted = 2 if name.startswith(IN_TWO_SITTINGS) else 1
    if len(sittings) != wanted:
        yield f"the first half has {len(sittings)} sittings, expected {wanted}: {PLACE_TO_STOP!r} stands between two"
    longest = SITTINGS_OF_TWO if wanted == 2 else SITTING
    if name.startswith(ANEW):
        longest = SITTING_ANEW
    for minutes in sittings:
        if minutes > longest:
            yield f"the first half takes {minutes:.1f} minutes at a sitting, at most {longest}"
    found = re.search(r"\babout (\d+)(?: and (\d+))? minutes", source(notebook["cells"][0]), re.IGNORECASE)
    stated = [int(number) for number in found.groups() if number] if found else []
    if len(stated) != len(sittings):
        yield f"{label(notebook['cells'][0])} states {stated} minutes, expected are {len(sittings)} numbers"
    for said, minutes in zip(stated, sittings, strict=False):
        if not is_near(said, minutes):
            yield f"{label(notebook['cells'][0])} states {said} minutes, and the formula says {minutes:.1f}"


def is_near(stated: float, minutes: float) -> bool:
    return abs(stated - minutes) <= 0.1 * minutes


def minutes_of_sittings(notebook: Notebook) -> list[float]:
    """What the first half takes without its exercises, before and after its place to stop, where it has one.

    The formula was compared with readers' own clocks: 180 words and five lines of code a minute (ten of a folded cell),
    a third of the words that cells print, 20 seconds a figure, and a minute a prediction.
    """
    part, sittings = "", [0.0]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            part = (re.findall(r"^## +(.+?) *$", source(cell), re.MULTILINE) or [part])[-1]
        if part == SECOND_HALF:
            break
        if part != "Exercises":
            sittings[-1] += minutes_of_cell(cell)
        if cell["cell_type"] == "markdown" and source(cell).lstrip().startswith(PLACE_TO_STOP):
            sittings.append(0.0)
    return sittings


def minutes_of_cell(cell: Cell) -> float:
    if cell["cell_type"] == "markdown":
        return len(re.sub(r"<details>.*?</details>", "", source(cell), flags=re.DOTALL).split()) / 180
    lines = dict(enumerate(source(cell).splitlines(), start=1))
    for node in ast.walk(syntax_tree(cell) or ast.Module()):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines.pop(number, None)
    code = [line for line in lines.values() if line.strip()]
    words = figures = 0
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if any(mime.startswith("image/") for mime in shown):
            figures += 1
        elif output["output_type"] != "error":
            words += len(joined(output.get("text", shown.get("text/markdown", shown.get("text/plain", "")))).split())
    lines_a_minute = 10 if is_folded(cell) else 5
    return len(code) / lines_a_minute + words / 3 / 180 + figures / 3 + source(cell).count("predictions.commit(")


def untrue_minutes(table: str, notebooks: dict[str, Notebook]) -> Iterator[str]:
    """Every row of a table of the chapters whose minutes, before the plus sign, are not those of its first half."""
    rows = {name[:2]: row for row in table.splitlines() for name in re.findall(r"^\| \[(\d\d )", row)}
    for name, notebook in notebooks.items():
        found = re.search(r"\| (\d+)(?: \+ \d+)? \|", rows.get(name[:2], ""))
        minutes = sum(minutes_of_sittings(notebook))
        if not found:
            yield f"{name} has no row with its minutes"
        elif not is_near(int(found[1]), minutes):
            yield f"the row of {name} says {found[1]} minutes, and the formula says {minutes:.1f}"


def cells_have_ids(name: str, notebook: Notebook) -> Iterator[str]:
    # Claims name them, and reviews follow them.
    ids = [cell.get("id") for cell in notebook["cells"]]
    for cell in notebook["cells"]:
        if not cell.get("id") or ids.count(cell["id"]) > 1:
            yield f"{label(cell)} has no id of its own"


RULES: list[Rule] = [
    executed_in_order,
    ignored_for_a_reason,
    free_of_the_machine,
    code_as_readers_may_copy_it,
    no_history,
    errors_are_announced,
    no_trace_of_the_run,
    figures_have_their_sentence,
    headings_follow_the_anatomy,
    the_first_half_is_short,
    numbers_rather_than_booleans,
    code_is_read_once,
    nothing_runs_out_of_the_page,
    the_minutes_are_true,
    cells_have_ids,
]


def broken_claims(claims: list[dict[str, str]], notebooks: dict[str, Notebook]) -> Iterator[str]:
    """Every problem of the rows of claims.json, beside the notebooks that exist."""
    fields = {"id", "chapter", "claim", "verdict", "reason", "cell"}
    ids = [row.get("id") for row in claims]
    for row in claims:
        row_name = f"claim {row.get('id')}"
        if set(row) != fields or not all(isinstance(row[f], str) and row[f].strip() for f in fields):
            yield f"{row_name} must have {sorted(fields)}, each with a text: got {row}"
            continue
        if ids.count(row["id"]) > 1:
            yield f"{row_name} is there {ids.count(row['id'])} times"
        if row["verdict"] not in VERDICTS:
            yield f"{row_name} has the verdict {row['verdict']!r}, allowed are {sorted(VERDICTS)}"
        if re.search(r"__|\*", re.sub(r"`[^`]*`", "", row["claim"] + row["reason"])):
            yield f"{row_name} has __ or * outside of `code`, which its table shows as bold"
        if row["chapter"] in notebooks:
            cells = {cell.get("id"): cell for cell in code_cells(notebooks[row["chapter"]])}
            where = f"{row_name} is proved by cell {row['cell']} of {row['chapter']}, which"
            if row["cell"] not in cells:
                yield f"{where} is no code cell there"
            elif cells[row["cell"]]["execution_count"] is None:
                yield f"{where} was not executed"
            elif is_ignored(cells[row["cell"]]):
                yield f"{where} is not compared"
            elif not re.search(rf'settle\(\s*"{row["id"]}"', source(cells[row["cell"]])):
                yield f"{where} does not settle it"
    for chapter in notebooks:
        if not chapter.startswith(WITHOUT_ANATOMY) and chapter not in {row.get("chapter") for row in claims}:
            yield f"{chapter} proves no claim"


def code_cells(notebook: Notebook) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def is_cut(notebook: Notebook) -> bool:
    """Whether the chapter has its two halves."""
    return any(f"## {SECOND_HALF}" in source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def printed_lines(cell: Cell) -> list[str]:
    """What the cell prints, and the value of its last line; no picture's sentence."""
    texts = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            texts.append(joined(output["text"]))
        elif output["output_type"] == "execute_result":
            texts.append(joined(output["data"].get("text/plain", "")))
    return [line for text in texts for line in text.splitlines() if line.strip()]


def is_ignored(cell: Cell) -> bool:
    return bool(tags(cell) & IGNORING)


def is_folded(cell: Cell) -> bool:
    """Whether JupyterLab and the site show a code cell's source only when asked."""
    return bool(cell["metadata"].get("jupyter", {}).get("source_hidden"))


def tags(cell: Cell) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def syntax_tree(cell: Cell) -> ast.Module | None:
    """None: the cell is no Python."""
    try:
        return ast.parse(TransformerManager().transform_cell(source(cell)))
    except SyntaxError:
        return None


def label(cell: Cell) -> str:
    first_line = source(cell).strip().partition("\n")[0]
    return f"cell {cell.get('id')} ({first_line[:40] or 'empty'})"


def source(cell: Cell) -> str:
    return joined(cell["source"])


def output_texts(cell: Cell) -> Iterator[str]:
    for output in cell.get("outputs", []):
        yield joined(output.get("text", ""))
        yield from (output.get("ename", ""), output.get("evalue", ""), "\n".join(output.get("traceback", [])))
        yield from (joined(text) for mime, text in output.get("data", {}).items() if mime.startswith("text/"))


def joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def main() -> None:
    print(f"chapter  minutes      lines of more than {COLUMNS} columns")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        sittings = " + ".join(f"{minutes:.1f}" for minutes in minutes_of_sittings(notebook))
        wide = [wide_lines(cell) for cell in notebook["cells"]]
        code, printed = (sum(len(lines[what]) for lines in wide) for what in ("lines of code", "printed lines"))
        print(f"{path.stem[:2]:8} {sittings:12} {code:5} lines of code {printed:5} printed")


if __name__ == "__main__":
    main()
