"""The house from outside: imports point one way, without a circle, and public names are where they are documented."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import course_lib
from tests.notebook_rules import ROOT

PUBLIC = {
    "accumulation": "accumulate windows Accumulated",
    "callbacks": "ExactAccumulation ExactResume SizeScheduleDataModule SkipBadSteps StepAudit StepCountError "
    "CheckpointError run_so_far",
    "conformance": "assert_batch_sampler check_batch_sampler RULES",
    "datasets": "load_digits load_words Integers IntegerStream",
    "devices": "usable_device explain_device",
    "launch": "run_ranks warm_up rank_device RankError RankTimeout",
    "leaks": "watch_growth",
    "loader": "MiniDataLoader",
    "memory": "measure_peak predict_peak find_batch_size find_batch_sizes peak_report saved_bytes",
    "pipeline": "trace predict_throughput simulate_pipeline",
    "resume": "ResumableDataLoader epoch_of_this_batch",
    "samplers": "TwoStreamBatchSampler ShardedBatchSampler ShuffledBatchSampler IndexPermutation "
    "count_batches_everywhere EpochBatchSampler",
    "schedules": "SizeSchedule ScheduledBatchSampler SizedDataset",
    "skipping": "StepGuard vote TooManySkips read_journal summarize",
    "steps": "plan_steps max_steps_for StepPlan",
}
"""What README.md and the chapters document, by module of the library."""
OF_REHEARSE = (
    "assert_ready rehearse rehearse_loop rehearse_script CHECKS Finding NotReady NotRehearsed Rehearsal RehearsalReport"
)


def modules(root: Path) -> dict[str, Path]:
    """The modules of the library, of what rehearses runs, and of the workbook, by their names."""
    found = {}
    for folder, package in ((root, "course_lib"), (root, "rehearse"), (root / "notebooks", "workbook")):
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(module: str, path: Path) -> set[str]:
    """What a file imports anywhere in it, TYPE_CHECKING included: modules, and names in them."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def arrows(root: Path) -> dict[str, set[str]]:
    """From each module to those that it imports itself."""
    known = modules(root)
    found = {}
    for module, path in known.items():
        names = imported(module, path)
        # A name is a module, or it is taken from the module before its last dot.
        found[module] = {name if name in known else name.rpartition(".")[0] for name in names} & set(known) - {module}
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Some circle of the graph, from a node back to it; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for other in sorted(graph[node]):
                if found := visit(other, [*trail, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between topics: a folder is one node."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2]) if module.startswith(("course_lib.", "rehearse.")) else module

    together: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, others in graph.items():
        together[room(module)] |= {room(other) for other in others} - {room(module)}
    return together


@functools.cache
def house() -> dict[str, set[str]]:
    return arrows(ROOT)


def test_no_module_imports_itself_in_a_circle():
    assert circle_in(house()) == []


def test_no_topic_imports_itself_in_a_circle():
    assert circle_in(rooms(house())) == []


LAYERS = {"workbook": 3, "rehearse": 2, "course_lib.callbacks": 1}
"""What stands above the topics, which have 0; each imports its own layer and those below it."""
ABOVE_TOPICS = {"lightning", "pytorch_lightning", "matplotlib", "ipywidgets", "IPython"}
WITHIN_FUNCTIONS = {"course_lib._lightning": {"lightning"}, "rehearse.scripts.picture": {"matplotlib"}}
"""The modules that import such a thing, where it is needed; importing them loads nothing of it."""
OF_LIGHTNING = "rehearse.callback"
"""It is loaded where its class is asked for."""


def layer(module: str) -> int:
    return max((height for name, height in LAYERS.items() if f"{module}.".startswith(f"{name}.")), default=0)


@pytest.mark.parametrize("module", sorted(modules(ROOT)))
def test_a_module_imports_nothing_from_above(module: str):
    assert {other for other in house()[module] if layer(other) > layer(module)} == set()
    if layer(module) < LAYERS["workbook"]:
        foreign = {name.partition(".")[0] for name in imported(module, modules(ROOT)[module])}
        of_lightning = layer(module) == LAYERS["course_lib.callbacks"] or module == OF_LIGHTNING
        allowed = {"lightning"} if of_lightning else WITHIN_FUNCTIONS.get(module, set())
        assert foreign & ABOVE_TOPICS <= allowed


def test_the_library_never_imports_what_rehearses_runs():
    of_the_library = [others for module, others in house().items() if module.startswith("course_lib")]
    assert [other for others in of_the_library for other in others if other.startswith("rehearse")] == []


def test_nothing_is_imported_by_a_name_that_a_users_folder_may_have():
    """A script's folder comes first where Python looks for modules."""
    files = {name: path for name, path in modules(ROOT).items() if not name.startswith("workbook")}
    roots = {other.partition(".")[0] for name, path in files.items() for other in imported(name, path)}
    named = {"course_lib", "rehearse", "torch", "numpy", "psutil", "cloudpickle", "typing_extensions"}
    assert roots - sys.stdlib_module_names <= named | {"lightning", "matplotlib"}


FLOORS = ("rehearse.scripts", "rehearse.runs", "rehearse.checks", "rehearse.judge")
"""From the ground up: what a run is knows of no check, and no check of the judge."""
GROUND = "report _own_files _held_out _fingerprints _lightning _processes _checkpoints".split()
"""They import none of these."""


def floor(module: str) -> int:
    """Of a module of rehearse: 0 is what the rooms stand on, and the way in stands above them all."""
    for number, name in enumerate(FLOORS, 1):
        if f"{module}.".startswith(f"{name}."):
            return number
    return 0 if module.removeprefix("rehearse.") in GROUND else len(FLOORS) + 1


def upward(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows of rehearse that point to a higher floor."""
    inside = {module: others for module, others in graph.items() if module.startswith("rehearse")}
    return [
        (module, other) for module in inside for other in inside[module] & set(inside) if floor(other) > floor(module)
    ]


def test_arrows_of_rehearse_go_from_the_judge_by_its_checks_to_the_runs():
    assert upward(house()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("runs__run", "from rehearse.checks.window import x"),
        ("runs__run", "from rehearse import judge"),
        ("runs__run", "from rehearse import rehearse"),
        ("runs__run", "from ..checks import window"),
        (
            "checks__length",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rehearse.judge import x",
        ),
        ("report", "def f():\n    import rehearse.runs.run"),
    ],
)
def test_an_arrow_to_a_higher_floor_is_found(module: str, line: str, tmp_path: Path):
    files = dict.fromkeys(("judge", "report", "runs__run", "checks__window", "checks__length"), "")
    (tmp_path / "rehearse").mkdir()
    (tmp_path / "rehearse" / "__init__.py").write_text("")
    [(source, _)] = upward(planted(tmp_path, "rehearse", **(files | {module: line})))
    assert source == f"rehearse.{module.replace('__', '.')}"


def planted(root: Path, package: str = "course_lib", **files: str) -> dict[str, set[str]]:
    for name, text in files.items():
        path = root / package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return arrows(root)


@pytest.mark.parametrize(
    "line",
    [
        "import course_lib.b",
        "from course_lib import b",
        "from course_lib.b import thing",
        "from . import b as other",
        "from .b import thing",
        "def f():\n    from course_lib.b import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from course_lib.b import Thing",
    ],
)
def test_a_circle_is_found_and_named_however_it_is_written(line: str, tmp_path: Path):
    graph = planted(tmp_path, a=line, b="from course_lib.c import x", c="import course_lib.a", c_of_torch="")
    assert circle_in(graph) == ["course_lib.a", "course_lib.b", "course_lib.c", "course_lib.a"]
    assert circle_in(planted(tmp_path, c="import course_lib.c_of_torch")) == []


def test_a_circle_of_topics_is_found_where_no_module_is_in_one(tmp_path: Path):
    graph = planted(tmp_path, a__one="import course_lib.b.one", b__two="import course_lib.a.two", a__two="", b__one="")
    assert circle_in(graph) == []
    assert circle_in(rooms(graph)) == ["course_lib.a", "course_lib.b", "course_lib.a"]


def test_importing_every_topic_loads_no_lightning_and_no_plots():
    names = [name for name in modules(ROOT) if layer(name) in (0, LAYERS["rehearse"]) and name != OF_LIGHTNING]
    topics = ", ".join(name for name in names if not name.endswith("__main__"))
    code = f"import sys, {topics}\nprint(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "torch" in loaded
    assert not loaded & ABOVE_TOPICS


def test_the_library_names_its_public_modules():
    text = course_lib.__doc__ or ""
    assert {name for name in PUBLIC if f"``course_lib.{name}``" not in text} == set()
    beside = {"CheckpointError", "StepCountError", "run_so_far"}
    assert {name for name in PUBLIC["callbacks"].split() if f"``{name}``" not in text} <= beside


def public() -> Iterator[tuple[str, str]]:
    of_the_library = {f"course_lib.{name}": names for name, names in PUBLIC.items()}
    for module, names in (of_the_library | {"rehearse": OF_REHEARSE}).items():
        for name in names.split():
            yield module, name


@pytest.mark.parametrize(("module", "name"), list(public()))
def test_a_public_name_is_where_it_is_documented(module: str, name: str):
    assert hasattr(importlib.import_module(module), name)


def test_the_public_names_are_those_that_a_module_says():
    for module, names in PUBLIC.items():
        assert set(importlib.import_module(f"course_lib.{module}").__all__) == set(names.split()), module


def test_no_public_name_hides_a_file_of_its_package():
    """`import a.b.name` would give the function; and the site's reference leaves such a function out."""
    files = {(path.parent.name, path.stem) for path in modules(ROOT).values()}
    assert {(module.split(".")[-1], name) for module, name in public()} & files == set()


def test_no_file_is_longer_than_a_sitting():
    long = {name: lines for name, path in modules(ROOT).items() if (lines := len(path.read_text().splitlines())) > 450}
    assert long == {}
