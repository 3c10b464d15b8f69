"""The notebooks keep the rules of notebook_rules.py, and each rule is shown to fail where it should."""

import base64
import copy
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebook_rules import (
    ANATOMY,
    ANATOMY_ANEW,
    ANEW,
    ENDING,
    ENDING_ANEW,
    ROOT,
    SECOND_HALF,
    Notebook,
    broken_claims,
    broken_rules,
    minutes_of_sittings,
    untrue_minutes,
)

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert PATHS


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_keeps_the_rules(path: Path):
    assert broken_rules(path.stem, read(path)) == []
    assert path.stat().st_size < 1_000_000


def test_the_minutes_of_the_readme_and_of_the_first_chapter_are_those_of_the_formula():
    notebooks = {path.stem: read(path) for path in PATHS}
    assert list(untrue_minutes((ROOT / "README.md").read_text(encoding="utf-8"), notebooks)) == []
    first = notebooks.pop("00_start_here")
    (table,) = ("".join(cell["source"]) for cell in first["cells"] if cell["id"] == "chapters")
    assert list(untrue_minutes(table, notebooks)) == []


def test_every_claim_has_its_cell():
    claims = json.loads((ROOT / "data" / "claims.json").read_text(encoding="utf-8"))
    assert list(broken_claims(claims, {path.stem: read(path) for path in PATHS})) == []


def test_the_report_of_the_readme_is_that_of_chapter_10():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ python -m rehearse train.py\n")[2].partition("\n```")[0]
    (path,) = (path for path in PATHS if path.stem.startswith("10"))
    (cell,) = (cell for cell in read(path)["cells"] if cell.get("id") == "played-report")
    printed = "".join(cell["outputs"][0]["text"])
    assert len(shown.splitlines()) > 20 and printed.strip() == shown


def test_the_pictures_of_the_readme_are_those_of_the_notebooks():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    drawn = {}
    for path in PATHS:
        for cell in read(path)["cells"]:
            if name := cell["metadata"].get("picture"):
                pngs = [o["data"]["image/png"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
                drawn[f"notebooks/{name}"] = [base64.b64decode(png) for png in pngs]
    assert set(shown) & set(drawn) and set(shown) - set(drawn) == {"docs/pages/prices.png"}
    for name, pictures in drawn.items():
        assert pictures == [(ROOT / name).read_bytes()], f"{name}: run `make refresh`"


def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def code(cell_id: str, source: str = "x = 1", count: int = 1, outputs: Any = (), **metadata: Any) -> dict:
    return {
        "cell_type": "code", "id": cell_id, "source": source, "execution_count": count,
        "outputs": list(outputs), "metadata": metadata,
    }  # fmt: skip


def prose(cell_id: str, source: str) -> dict:
    return {"cell_type": "markdown", "id": cell_id, "source": source, "metadata": {}}


def stream(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def display(**data: str) -> dict:
    return {"output_type": "display_data", "data": {k.replace("_", "/"): text for k, text in data.items()}}


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
FIGURE = display(image_png="iVBO", text_plain="<Figure>")
SENTENCE = display(text_markdown="Four short windows of 39 micro-batches each end in a step.")
CHAPTER = {
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
    "cells": [
        prose("title", "# Why did it stop?\nAbout 11 minutes, and 5 more for the exercise."),
        prose("long", "word " * 1800),
        *(prose(f"h{i}", f"## {heading}\ntext") for i, heading in enumerate(ANATOMY[:-1])),
        *(code(f"c{i}", count=i) for i in range(1, 5)),
        prose("half", f"## {SECOND_HALF}"),
        *(prose(f"e{i}", f"### {heading}\ntext") for i, heading in enumerate(ENDING)),
        code("c5", 'claims.settle("C1", True)', 5),
        code("c6", "1 / 0", 6, [ERROR], tags=["raises-exception"]),
        code("c7", "_ = draw()\nfor _ in range(3):\n    print()", 7, [FIGURE, SENTENCE]),
        code("c8", "import time", 8, [stream("0.3 s")], tags=["nbval-ignore-output"], reason="a time"),
    ],
}


def cell(notebook: Notebook, cell_id: str) -> dict:
    return next(cell for cell in notebook["cells"] if cell["id"] == cell_id)


def put(cell_id: str, **fields: Any) -> Callable[[Notebook], None]:
    return lambda notebook: cell(notebook, cell_id).update(fields)


def drop(cell_id: str) -> Callable[[Notebook], None]:
    return lambda notebook: notebook["cells"].remove(cell(notebook, cell_id))


BROKEN = {
    "not executed": (
        put("c2", execution_count=None),
        "05_x: cell c2 (x = 1) has execution count None, expected 2",
    ),
    "out of order": (put("c2", execution_count=9), "cell c2 (x = 1) has execution count 9, expected 2"),
    "ignored, no reason": (
        put("c8", metadata={"tags": ["nbval-skip"]}),
        "cell c8 (import time) is not compared",
    ),
    "ignored, blank reason": (
        put("c8", metadata={"tags": ["nbval-skip"], "reason": " "}),
        "cell c8 (import time) is not compared, and its metadata has no `reason`",
    ),
    "ignored by a comment": (put("c1", source="x\n# NBVAL_SKIP"), "cell c1 (x) speaks to nbval by a comment"),
    "too many ignored": (
        put("c1", metadata={"tags": ["nbval-skip"], "reason": "why"}),
        "2 of 8 code cells are not compared, at most one in seven: cell c1 (x = 1), cell c8",
    ),
    "home in source": (put("c1", source="p = '/" + "home/me'"), "has an absolute path in its source"),
    "tmp in prose": (
        put("h2", source="## Mechanism\nsee /" + "tmp/x"),
        "cell h2 (## Mechanism) has an absolute path",
    ),
    "root in output": (
        put("c1", outputs=[stream("/" + "root/x")]),
        "cell c1 (x = 1) has an absolute path in its output",
    ),
    "Windows path": (
        put("c1", outputs=[stream("C:" + r"\Users\x")]),
        r"an absolute path in its output: C:\Users\x",
    ),
    "path in an error": (
        put("c6", outputs=[ERROR | {"traceback": ["File ~/x/site-" + "packages/torch/a.py:3"]}]),
        "cell c6 (1 / 0) has the path of a package in its output: ~/x/site-packages",
    ),
    "own path": (
        put("c1", outputs=[display(text_html=f"<b>{ROOT}</b>")]),
        "the repository's own path in its output",
    ),
    "address": (
        put("c1", outputs=[stream("<object at 0x7f00deadbeef>")]),
        "an address in memory in its output",
    ),
    "host": (
        put("c1", outputs=[stream(f"on {socket.gethostname()}!")]),
        "cell c1 (x = 1) has the name of this",
    ),
    "semicolon": (
        put("c1", source="x = 1;\ny = 2"),
        "cell c1 (x = 1;) has a line that ends with a semicolon",
    ),
    "pip": (put("c1", source="!pip install torch"), "cell c1 (!pip install torch) has an installation"),
    "sys.path": (put("c1", source="import sys\nsys.path.append('..')"), "cell c1 (import sys) has sys.path"),
    "cuda:0": (put("c1", source="x.to('cuda:0')"), "cell c1 (x.to('cuda:0')) has a fixed device"),
    "underscore": (put("c1", source="print(_ + 1)"), "cell c1 (print(_ + 1)) reads IPython's history: _"),
    "Out": (put("c1", source="y = Out[3]"), "cell c1 (y = Out[3]) reads IPython's history: Out"),
    "In": (put("c1", source="exec(In[1])"), "cell c1 (exec(In[1])) reads IPython's history: In"),
    "no Python": (put("c1", source="x = = 1"), "cell c1 (x = = 1) is no Python"),
    "stray error": (
        put("c1", outputs=[ERROR]),
        "cell c1 (x = 1) shows an error without the tag raises-exception",
    ),
    "no error": (put("c6", outputs=[]), "cell c6 (1 / 0) has the tag raises-exception and shows no error"),
    "widget state": (lambda n: n["metadata"].update(widgets={}), "05_x: metadata.widgets holds the state"),
    "timing": (put("c1", metadata={"execution": {}}), "cell c1 (x = 1) holds the times of its run"),
    "figure alone": (put("c7", outputs=[FIGURE]), "cell c7 (_ = draw()) has a figure without its sentence"),
    "figure, late sentence": (
        put("c7", outputs=[FIGURE, stream("x"), SENTENCE]),
        "has a figure without its sentence",
    ),
    "figure, few words": (
        put("c7", outputs=[FIGURE, display(text_markdown="A plot.")]),
        "without its sentence",
    ),
    "title no question": (
        put("title", source="# Steps"),
        "the title is one level-1 heading, a question: found",
    ),
    "title late": (
        lambda n: n["cells"].insert(0, prose("pre", "Hello")),
        "cell pre (Hello) does not begin with",
    ),
    "two titles": (
        put("h0", source="# Why?\n## Symptom"),
        "the title is one level-1 heading, a question: found",
    ),
    "heading missing": (drop("h1"), "05_x: the level-2 headings are ['Symptom', 'Mechanism'"),
    "headings swapped": (
        put("h1", source="## Fix\n## Predict"),
        "the level-2 headings are ['Symptom', 'Fix'",
    ),
    "no recap": (drop("e2"), "the level-3 headings under For those who doubt are ['Proof', 'Claims'], expected"),
    "claims before proof": (
        put("e0", source="### Claims\n### Proof"),
        "the level-3 headings under For those who doubt are ['Claims', 'Proof', 'Claims', 'Recap'], expected",
    ),
    "long cell": (
        put("c1", source="x = 1\n" * 16),
        "cell c1 (x = 1) has 16 lines, at most 15 in the first half",
    ),
    "long half": (
        lambda n: n["cells"].__setitem__(slice(1, 1), [code(f"d{i}") for i in range(22)]),
        "the first half has 26 code cells beside the exercises, at most 25",
    ),
    "booleans": (
        put("c1", outputs=[stream("they agree: True\nloss 3.1: True")]),
        "1 of 3 printed lines are a bare True or False, at most one in eight: ['they agree: True']",
    ),
    "boolean value": (
        put("c1", outputs=[{"output_type": "execute_result", "data": {"text/plain": "False"}}]),
        "1 of 2 printed lines are a bare True or False",
    ),
    "nested comprehension": (
        put("c1", source="[x for row in a for x in [y for y in row]]"),
        "has a comprehension in a comprehension: [x for row in a",
    ),
    "chained conditional": (
        put("c1", source="x = 1 if a else 2 if b else 3"),
        "has a conditional in a conditional: 1 if a else",
    ),
    "golf": (put("c1", source="a or print(1)"), "has a chain of `and` or `or` for its side effect: a or print(1)"),
    "wide code": (
        put("c3", source="x = 1\ny = [" + "1, " * 30 + "]"),
        "cell c3 (x = 1) has 1 lines of code of more than 88 columns, the longest 96: y = [1, 1",
    ),
    "wide code in prose": (
        put("e2", source="### Recap\n```python\ny = [" + "1, " * 30 + "]\n```"),
        "cell e2 (### Recap) has 1 lines of code of more than 88 columns",
    ),
    "wide print": (
        put("c3", outputs=[stream("short\n" + "o" * 89 + "\n" + "o" * 90)]),
        "cell c3 (x = 1) has 2 printed lines of more than 88 columns, the longest 90: ooo",
    ),
    "wide value": (
        put("c3", outputs=[{"output_type": "execute_result", "data": {"text/plain": "o" * 89}}]),
        "cell c3 (x = 1) has 1 printed lines of more than 88 columns, the longest 89",
    ),
    "wide source": (
        put("c3", outputs=[{"output_type": "display_data", "data": {"text/markdown": f"```python\n{'o' * 107}\n```"}}]),
        "cell c3 (x = 1) has 1 lines of a shown source of more than 106 columns, the longest 107",
    ),
    "no minutes": (put("title", source="# Why did it stop?"), "states [] minutes, expected are 1 numbers"),
    "too many minutes stated": (
        put("title", source="# Why did it stop?\nAbout 13 minutes."),
        "cell title (# Why did it stop?) states 13 minutes, and the formula says 10.9",
    ),
    "too few minutes stated": (
        put("title", source="# Why did it stop?\nAbout 9 minutes."),
        "cell title (# Why did it stop?) states 9 minutes, and the formula says 10.9",
    ),
    "too long": (put("long", source="word " * 12_600), "the first half takes 71.0 minutes at a sitting, at most 60"),
    "a stop in a chapter of one sitting": (
        put("h2", source="**A place to stop.** Go for a walk."),
        "the first half has 2 sittings, expected 1: '**A place to stop.**' stands between two",
    ),
    "no id": (put("c1", id=""), "cell  (x = 1) has no id of its own"),
    "id twice": (put("c1", id="c2"), "cell c2 (x = 1) has no id of its own"),
}


def test_a_good_chapter_breaks_no_rule():
    assert broken_rules("05_x", CHAPTER) == []


def test_a_heading_in_a_code_block_is_none():
    notebook = copy.deepcopy(CHAPTER)
    put("h2", source="## Mechanism\n```bash\n## no heading\n# nor a title\n```")(notebook)
    assert broken_rules("05_x", notebook) == []


def test_the_first_notebook_has_its_own_headings():
    notebook = copy.deepcopy(CHAPTER)
    drop("h1")(notebook)
    assert broken_rules("00_start_here", notebook) == []


def written_anew(name: str = f"{ANEW[0]}_x") -> tuple[str, Notebook]:
    notebook = copy.deepcopy(CHAPTER)
    first_half = [prose(f"h{i}", f"## {heading}\ntext") for i, heading in enumerate(ANATOMY_ANEW[:-1])]
    endings = [prose(f"e{i}", f"### {heading}\ntext") for i, heading in enumerate(ENDING_ANEW)]
    rest = [cell for cell in notebook["cells"][2:] if cell["id"][0] not in "he"]
    half = [cell for cell in notebook["cells"] if cell["id"] == "half"]
    notebook["cells"] = [*notebook["cells"][:2], *first_half, *rest[:4], *half, *endings, *rest[4:]]
    return name, notebook


def test_a_chapter_that_is_written_anew_ends_its_first_half_with_price_limits_and_recap():
    name, notebook = written_anew()
    assert broken_rules(name, notebook) == []
    assert any("expected ['Symptom'" in problem for problem in broken_rules("05_x", notebook))
    put("h4", source="## Exercises")(notebook)
    assert any("'What does it cost?', 'Exercises', 'In your project'" in p for p in broken_rules(name, notebook))
    name, notebook = written_anew()
    put("long", source="word " * 7200)(notebook)
    assert not any("at a sitting" in problem for problem in broken_rules(name, notebook))
    put("long", source="word " * 7500)(notebook)
    assert any("at a sitting, at most 42" in problem for problem in broken_rules(name, notebook))
    name, notebook = written_anew()
    drop("e1")(notebook)
    assert any("are ['Proof'], expected ['Proof', 'Claims']" in problem for problem in broken_rules(name, notebook))


def test_a_folded_cell_takes_half_the_time_and_may_be_long():
    folded = code("a", "x = 1\n" * 20)
    assert minutes_of_sittings({"cells": [folded]}) == [4.0]
    folded["metadata"]["jupyter"] = {"source_hidden": True}
    assert minutes_of_sittings({"cells": [folded]}) == [2.0]
    notebook = copy.deepcopy(CHAPTER)
    put("c1", source="x = 1\n" * 16, metadata=folded["metadata"])(notebook)
    assert not any("at most 15" in problem for problem in broken_rules("05_x", notebook))


def test_the_sixth_chapter_has_two_sittings_and_a_place_to_stop_between_them():
    notebook = copy.deepcopy(CHAPTER)
    assert any("has 1 sittings, expected 2" in problem for problem in broken_rules("06_x", notebook))
    put("title", source="# Why did it stop?\nTwo sittings of about 40 and 45 minutes.")(notebook)
    put("long", source="word " * 7100)(notebook)
    put("h1", source="## Predict\n" + "word " * 8000)(notebook)
    notebook["cells"].insert(3, prose("stop", "**A place to stop.** Go for a walk."))
    assert [round(minutes) for minutes in minutes_of_sittings(notebook)] == [40, 45]
    assert broken_rules("06_x", notebook) == []
    assert list(untrue_minutes("| [06 Ranks](06_x.ipynb) | who? | 80 + 5 |", {"06_x": notebook})) == []
    put("h1", source="## Predict\n" + "word " * 9100)(notebook)
    assert [problem for problem in broken_rules("06_x", notebook) if "at a sitting" in problem] == [
        "06_x: the first half takes 51.4 minutes at a sitting, at most 50"
    ]


def test_the_minutes_are_those_of_the_formula():
    counted = [
        prose("a", "# Why?\n" + "word " * 178 + "<details><summary>Hint</summary>\n" + "word " * 900 + "</details>"),
        code(
            "b",
            "import x\nfrom y import (\n    z,\n)\n\na = 1\nb = 2\nc = 3\nd = 4\npredictions.commit('q', 3)",
            outputs=[FIGURE],
        ),
        code(
            "c", "    # a comment\n" * 5, outputs=[stream("word " * 270), display(text_markdown="word " * 270), ERROR]
        ),
        prose("d", "## Exercises\n" + "word " * 900),
        code("e", "x\n" * 50),
        prose("f", "## In your project\n" + "word " * 176),
        prose("g", f"## {SECOND_HALF}\n" + "word " * 900),
        code("h", "x\n" * 50),
    ]
    # Words 1, lines 1, a prediction 1, a figure 1/3; lines 1, printed words 1; words 1.
    assert minutes_of_sittings({"cells": counted}) == [pytest.approx(6 + 1 / 3)]


def test_untrue_minutes_of_a_table_are_named():
    row = "| [05 Counting steps](notebooks/05_x.ipynb) | why? | {} | CPU | `course_lib.steps` |"
    says = f"the formula says {sum(minutes_of_sittings(CHAPTER)):.1f}"
    for minutes, told in {
        "11 + 5": [],
        "9": [f"the row of 05_x says 9 minutes, and {says}"],
        "13 + 11": [f"the row of 05_x says 13 minutes, and {says}"],
    }.items():
        assert list(untrue_minutes("| chapter |\n" + row.format(minutes), {"05_x": CHAPTER})) == told
    assert list(untrue_minutes(row.replace("05", "04"), {"05_x": CHAPTER})) == ["05_x has no row with its minutes"]


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_named(break_it: Callable[[Notebook], None], message: str):
    notebook = copy.deepcopy(CHAPTER)
    break_it(notebook)
    problems = broken_rules("05_x", notebook)
    assert any(message in problem for problem in problems), problems
    assert all(problem.startswith("05_x: ") for problem in problems)


CLAIM = {
    "id": "C1",
    "chapter": "05_x",
    "claim": "k=8 halves it",
    "verdict": "F",
    "reason": "no",
    "cell": "c5",
}
BROKEN_CLAIMS = {
    "no such cell": (
        [CLAIM | {"cell": "c99"}],
        "claim C1 is proved by cell c99 of 05_x, which is no code cell there",
    ),
    "another cell": ([CLAIM | {"cell": "c1"}], "cell c1 of 05_x, which does not settle it"),
    "a prose cell": ([CLAIM | {"cell": "title"}], "cell title of 05_x, which is no code cell there"),
    "an ignored cell": ([CLAIM | {"cell": "c8"}], "cell c8 of 05_x, which is not compared"),
    "id twice": ([CLAIM, CLAIM], "claim C1 is there 2 times"),
    "verdict": (
        [CLAIM | {"verdict": "maybe"}],
        "claim C1 has the verdict 'maybe', allowed are ['F', 'I', 'T', 'V']",
    ),
    "field missing": ([{"id": "C1", "chapter": "05_x"}], "claim C1 must have"),
    "field blank": ([CLAIM | {"reason": ""}], "claim C1 must have"),
    "bold by mistake": ([CLAIM | {"reason": "it is in __iter__"}], "claim C1 has __ or * outside of `code`"),
    "chapter without": ([CLAIM | {"chapter": "06_y"}], "05_x proves no claim"),
}


def test_good_claims_pass_also_those_of_chapters_to_come():
    claims = [CLAIM, CLAIM | {"id": "C2", "chapter": "06_y"}]
    assert list(broken_claims(claims, {"05_x": CHAPTER, "00_a": CHAPTER})) == []


@pytest.mark.parametrize(("claims", "message"), BROKEN_CLAIMS.values(), ids=BROKEN_CLAIMS)
def test_a_broken_claim_is_named(claims: list[dict[str, str]], message: str):
    problems = list(broken_claims(claims, {"05_x": CHAPTER}))
    assert any(message in problem for problem in problems), problems


def test_a_claim_on_a_cell_that_was_not_executed_is_named():
    notebook = copy.deepcopy(CHAPTER)
    put("c5", execution_count=None)(notebook)
    assert "05_x, which was not executed" in next(broken_claims([CLAIM], {"05_x": notebook}))
