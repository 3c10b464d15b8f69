"""The records of public scripts: what differs from one is told, and the gallery follows from them."""

import re

import pytest

from docs.gallery import PAGE, RECORDS, gallery_page
from tests.corpus.records import BY_SCRIPT, Finding, Script, differences, read_records

SCRIPT = Script("train.py", steps=10, not_judged={"order": "a stream"})
FOUND = Script("train.py", findings=[Finding("horizon", "It ends early.", "It is so.", "A part of the run.")])


def report(found=(), unjudged=None, steps=10):
    reasons = dict.fromkeys([*BY_SCRIPT, "no_sync"], "")
    reasons |= {"order": "the loader is a stream"} if unjudged is None else unjudged
    findings = [{"check": check, "says": "something"} for check in found]
    return {"findings": findings, "not_judged": reasons, "skipped": [], "facts": {"optimizer steps": steps}}


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        (SCRIPT, report(), []),
        (SCRIPT, report(found=["window"]), ["window finds what is not true: something"]),
        (SCRIPT, report(unjudged={}), ["order is judged"]),
        (SCRIPT, report(unjudged={"order": "an error"}), ["order is not judged for another reason: an error"]),
        (SCRIPT, report(steps=9), ["it makes 10 optimizer steps, and 9 are counted"]),
        (FOUND, report(found=["horizon"], unjudged={}), []),
        (FOUND, report(unjudged={}), ["horizon finds nothing"]),
        (FOUND, report(["horizon"], {"order": "an error"}), ["order is not judged: an error"]),
        (SCRIPT, None, ["it could not be judged: it fails"]),
        (Script("train.py", fails="no GPU"), report(), ["it should fail by itself (no GPU), and was judged"]),
    ],
)
def test_what_differs_from_a_record_is_told(script, given, said):
    assert differences(script, given, "it fails") == said


def test_a_script_that_fails_as_recorded_is_no_difference():
    assert differences(Script("train.py", fails="no GPU"), None, "train.py fails: no GPU here") == []


def test_the_gallery_follows_from_the_records():
    assert PAGE.read_text(encoding="utf-8") == gallery_page(RECORDS.read_text(encoding="utf-8")), (
        "run: python docs/gallery.py"
    )


def test_the_records_name_thirty_scripts_and_quote_no_code():
    scripts = [script for repository in read_records() for script in repository.scripts]
    assert len(scripts) >= 30
    for finding in (finding for script in scripts for finding in (*script.findings, *script.missed)):
        for text in (finding.what, finding.why, finding.costs):
            assert text[0].isupper() and text.endswith(".")
            assert not re.search(r"[`={}\[\]]|\w\(", text), text
