"""What the library uses of Lightning's privates is where it was read; where it has moved, the test says which it is."""

import ast
import re

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader

from course_lib import _lightning
from course_lib._lightning import LightningMoved, Private, count_limited, loaded_checkpoint
from tests.notebook_rules import ROOT
from tests.trainer_oracle import CountingModule, quiet_trainer

PRIVATES = {name: value for name, value in vars(_lightning).items() if isinstance(value, Private)}


@pytest.fixture(scope="module")
def holders():
    """An object of each of Lightning's classes that has something private that is used, from a real run."""
    averaging = StochasticWeightAveraging(0.1)
    trainer = quiet_trainer(max_epochs=1, callbacks=[averaging])
    trainer.fit(CountingModule(), DataLoader(range(4), 2))
    found = [trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, averaging, WeightAveraging()]
    found += [trainer.fit_loop._combined_loader, trainer._checkpoint_connector]
    return {type(one).__name__: one for one in found} | {data_connector.__name__: data_connector}


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


def test_what_has_moved_is_not_set_where_nobody_reads_it(holders, monkeypatch):
    loop = holders["_FitLoop"]
    monkeypatch.delattr(loop, "_restarting")
    with pytest.raises(LightningMoved, match=r"_FitLoop\._restarting, which course_lib uses for a run that goes on"):
        _lightning.RESTARTING.put(loop, False)
    assert "_restarting" not in vars(loop)


def test_an_error_within_a_private_is_not_taken_for_its_absence():
    class Fails:
        @property
        def _skip_backward(self):
            raise AttributeError("of its own")

    with pytest.raises(AttributeError, match=r"^of its own$"):
        _lightning.SKIP_BACKWARD.of(Fails())


def test_how_many_batches_a_limit_leaves():
    assert [count_limited(10, limit) for limit in (1.0, 0.5, 3)] == [10, 5, 3]


def test_there_is_no_checkpoint_without_one(holders):
    assert loaded_checkpoint(holders["Trainer"]) == {}


NOT_LIGHTNINGS = {"_brought", "_asdict"}
"""A mark of ExactResume's own, and a method of named tuples."""


@pytest.mark.parametrize("path", sorted((ROOT / "course_lib" / "callbacks").glob("*.py")), ids=lambda path: path.stem)
def test_no_callback_reaches_into_lightning_itself(path):
    # A private name on anything but the callback itself, or imported from Lightning.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in NOT_LIGHTNINGS:
            assert isinstance(node.value, ast.Name) and node.value.id == "self", ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            assert not [alias.name for alias in node.names if alias.name.startswith("_")]
