"""What the library uses of Lightning's privates is where it was read; where it has moved, the test says which it is."""

import ast
import re
from pathlib import Path

import lightning
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader

import rehearse._lightning
from course_lib import _lightning
from course_lib._lightning import LightningMoved, Private, count_limited, loaded_checkpoint
from tests.notebook_rules import ROOT
from tests.trainer_oracle import CountingModule, quiet_trainer

TABLES = (_lightning, rehearse._lightning)
PRIVATES = {name: value for table in TABLES for name, value in vars(table).items() if isinstance(value, Private)}


@pytest.fixture(scope="module")
def holders():
    """An object of each of Lightning's classes that has something private that is used, from a real run."""
    averaging = StochasticWeightAveraging(0.1)
    trainer = quiet_trainer(max_epochs=1, callbacks=[averaging])
    trainer.fit(CountingModule(), DataLoader(range(4), 2))
    epoch_loop = trainer.fit_loop.epoch_loop
    found = [
        trainer,
        trainer.fit_loop,
        epoch_loop,
        epoch_loop.val_loop,
        averaging,
        WeightAveraging(),
        EarlyStopping("loss"),
    ]
    found += [trainer.fit_loop._combined_loader, trainer._checkpoint_connector, trainer._data_connector]
    found += [DDPStrategy(), ModelCheckpoint()]
    modules = {module.__name__: module for module in (call, data_connector, fit_loop)}
    return {type(one).__name__: one for one in found} | modules


def missing(holders):
    """What is said of each private that is not where it was."""
    said = []
    for private in PRIVATES.values():
        try:
            private.of(holders[private.owner])
        except LightningMoved as error:
            said.append(str(error))
    return said


def test_what_is_private_to_lightning_is_where_it_was_read(holders):
    assert missing(holders) == []


def test_what_lightning_moves_is_named_with_what_it_is_used_for(holders, monkeypatch):
    monkeypatch.delattr(type(holders["_TrainingEpochLoop"]), "_should_accumulate")
    assert missing(holders) == [
        "Lightning has moved _TrainingEpochLoop._should_accumulate, which course_lib uses for whether a micro-batch is "
        "the last one of its window; it was read in Lightning 2.6.6. Install that version, or tell "
        "course_lib/_lightning.py where it is now"
    ]


def test_what_rehearsals_use_is_told_of_them(holders, monkeypatch):
    monkeypatch.delattr(holders["Trainer"], "_data_connector")
    [said] = missing(holders)
    assert "_data_connector, which rehearse uses for" in said and "tell rehearse/_lightning.py where" in said


def test_what_has_moved_is_not_set_where_nobody_reads_it(holders, monkeypatch):
    loop = holders["_FitLoop"]
    monkeypatch.delattr(loop, "_restarting")
    with pytest.raises(LightningMoved, match=r"_FitLoop\._restarting, which course_lib uses for a run that goes on"):
        _lightning.RESTARTING.put(loop, False)
    assert "_restarting" not in vars(loop)


def test_an_error_within_a_private_is_not_taken_for_its_absence():
    class Fails:
        @property
        def _should_accumulate(self):
            raise AttributeError("of its own")

    with pytest.raises(AttributeError, match=r"^of its own$"):
        _lightning.SHOULD_ACCUMULATE.of(Fails())


def test_what_a_run_sets_later_has_another_value_before_that():
    averaging = WeightAveraging()
    assert _lightning.AVERAGE.of_set(object(), 7) == 7
    quiet_trainer(max_epochs=2, callbacks=[averaging]).fit(CountingModule(), DataLoader(range(4), 2))
    assert _lightning.AVERAGE.of_set(averaging, 7) not in (7, None)


def test_how_many_batches_a_limit_leaves():
    assert [count_limited(10, limit) for limit in (1.0, 0.5, 3)] == [10, 5, 3]


def test_there_is_no_checkpoint_without_one(holders):
    assert loaded_checkpoint(holders["Trainer"]) == {}


TORCHS = {"_iterator", "_version"}
"""Of a DataLoader and of a tensor: Lightning has attributes of these names as well."""


@pytest.fixture(scope="module")
def names():
    """Every private name that some file of Lightning's defines or sets."""
    files = Path(lightning.__file__).parent.rglob("*.py")
    pattern = re.compile(r"(?:\b(?:self|cls|trainer)\.|\bdef |^ *)(_[a-z]\w*)", re.MULTILINE)
    found = {name for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))} - TORCHS
    assert {private.name for private in PRIVATES.values()} <= found
    return found


def reaches_into(source, names):
    """Where a text uses one of the names on anything but ``self``, writes it as a string, or imports it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        of_another = isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self" and node.attr in names
        as_string = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        imports = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning")
        if of_another or as_string or (imports and any(alias.name.startswith("_") for alias in node.names)):
            found.append(ast.unparse(node))
    return found


def test_nothing_but_the_table_reaches_into_lightning(names):
    files = {path for name in ("course_lib", "rehearse") for path in (ROOT / name).rglob("*.py")}
    paths = files - {Path(table.__file__) for table in TABLES}
    found = {str(path): reaches_into(path.read_text(encoding="utf-8"), names) for path in paths}
    assert len(found) > 100 and {path: uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "use",
    [
        "loop._should_accumulate()",
        "self.trainer.fit_loop._restarting = True",
        "getattr(trainer, '_data_connector', None)",
        "vars(model)['_trainer'] = None",
        "from lightning.pytorch.trainer.call import _call_setup_hook",
    ],
)
def test_a_use_of_a_private_is_found(use, names):
    assert len(reaches_into(use, names)) == 1
