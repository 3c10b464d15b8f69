"""A script with a Trainer of Lightning is judged by its rehearsal and by the fit's own checks."""

from pathlib import Path

import pytest

from rehearse.report import Judgement, Kind, Unjudged, report_of
from rehearse.script import SCRIPT_CHECKS, add_fit, rehearse_script
from tests.rehearse.scripts.playing import play
from tests.rehearse.scripts.test_counts import assert_equal, really_run
from tests.rehearse.scripts.test_faults import planted

SCRIPT = Path(__file__).with_name("examples") / "lightning_fit.py"


@pytest.mark.thorough
def test_counts_equal_those_of_the_real_run(tmp_path: Path):
    journal = play(SCRIPT, folder=tmp_path / "played")
    assert journal.trainer == "lightning.pytorch"
    assert_equal(journal, really_run(SCRIPT, [], tmp_path / "real"))


@pytest.mark.thorough
def test_both_judge_and_a_fault_that_both_find_is_told_once(tmp_path: Path):
    report = rehearse_script(planted("lightning_fit", tmp_path, ("T_max=4 * EPOCHS", "T_max=8 * EPOCHS")))
    assert [finding.check for finding in report.findings] == ["horizon"]
    assert {"window", "workers", "bad_step", "validation"} <= set(report.passed)
    assert report.facts["optimizer steps"] == report.facts["scheduler steps"] == 12
    assert report.facts["accumulate_grad_batches"] == 2


def judgement_of(check: str | None, **not_judged: Unjudged) -> Judgement:
    judgement = Judgement(not_judged=dict(not_judged))
    return judgement if check is None else judgement.find(check, "says", "means", "cure", chapter="05_counting_steps")


@pytest.mark.parametrize(
    ("played", "of_the_fit", "told"),
    [
        ("horizon", "horizon", ["horizon"]),
        ("validation", "dealing", ["dealing"]),
        ("window", "setup", ["setup", "window"]),
        (None, "setup", ["setup"]),
        ("order", None, ["order"]),
    ],
)
def test_findings_of_both_are_told_once(played: str | None, of_the_fit: str | None, told: list[str]):
    judgement = judgement_of(played)
    add_fit(judgement, report_of(SCRIPT_CHECKS, judgement_of(of_the_fit), (), (), 0.0))
    assert [finding.check for finding in judgement.findings] == told


def test_a_check_is_not_judged_where_neither_judged_it_or_the_fits_failed():
    judgement = judgement_of(
        None,
        bad_step=Unjudged("a rehearsal computes no gradients", Kind.NOT_APPLICABLE),
        growth=Unjudged("a rehearsal holds no graphs", Kind.NOT_APPLICABLE),
        workers=Unjudged("a rehearsal starts no workers", Kind.NOT_APPLICABLE),
        no_sync=Unjudged("one rank", Kind.NOT_APPLICABLE),
    )
    fit = judgement_of(None, growth=Unjudged("no time"), workers=Unjudged("deep", Kind.LEFT_OUT), order=Unjudged("no"))
    add_fit(judgement, report_of(SCRIPT_CHECKS, fit, (), (), 0.0))
    assert {name: (one.why, one.kind) for name, one in judgement.not_judged.items()} == {
        "growth": ("no time", Kind.FAILED),
        "workers": ("deep", Kind.LEFT_OUT),
    }
