"""Claims, predictions, widgets and tables: what they print, and when they refuse."""

import ipywidgets
import pytest
from workbook import claims as claims_module
from workbook.claims import Claims, load_claims
from workbook.display import new_figure, show_source, show_table, wrapped
from workbook.predictions import Predictions
from workbook.widgets import Explorer


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr("workbook.display.display", lambda x, **_: outputs.append(getattr(x, "data", x)))
    monkeypatch.setattr("workbook.widgets.display", lambda x, **_: outputs.append(x))
    return outputs


def test_a_claim_is_open_until_its_cell_settles_it(shown, capsys, monkeypatch):
    rows = [
        dict(id=i, chapter="c", claim=f"claim {i}", verdict=v, reason="why", cell="x")
        for i, v in (("A1", "F"), ("A2", "T"))
    ]
    monkeypatch.setattr(claims_module, "load_claims", lambda: rows)
    claims = Claims("c")
    claims.settle("A1", True)
    assert capsys.readouterr().out == "A1 “claim A1”\n   false: why\n"
    claims.show()
    assert "| A1 | claim A1 | false | why |" in shown[0] and "| A2 | claim A2 | open | why |" in shown[0]
    with pytest.raises(AssertionError, match="does not bear out"):
        claims.settle("A2", False)
    with pytest.raises(ValueError, match="no claim"):
        Claims("d")


def test_the_ledger_has_the_fields_of_a_claim():
    for row in load_claims():
        assert set(row) == {"id", "chapter", "claim", "verdict", "reason", "cell"}


def test_a_prediction_is_kept_and_shown_beside_the_result(shown, capsys):
    predictions = Predictions()
    predictions.commit("steps", 4)
    predictions.commit("steps", 6)
    predictions.commit("epochs", 10)
    predictions.reveal("steps", 5)
    predictions.commit("steps", 5)
    assert capsys.readouterr().out.splitlines() == [
        "steps: you say 4.",
        "steps: you say 6.",
        "epochs: you say 10.",
        "steps: you said 6, it is 5.",
        "steps: it has been revealed, so your 6 stays.",
    ]
    predictions.summary()
    assert "| steps | 6 | 5 | no |" in shown[0] and "| epochs | 10 | not yet seen | no |" in shown[0]
    predictions.reveal("epochs", 10)
    assert capsys.readouterr().out == "epochs: it is 10, as you said.\n"
    with pytest.raises(ValueError, match="has no prediction; committed are: steps, epochs"):
        predictions.reveal("loss", 1)
    with pytest.raises(ValueError, match="put a number"):
        predictions.commit("loss", ...)


def test_numbers_in_a_table_stand_right(shown):
    show_table(["name", "n"], [["a", 1], ["b", 22]])
    assert shown == ["| name | n |\n| --- | ---: |\n| a | 1 |\n| b | 22 |"]


def test_source_is_that_of_the_library(shown):
    show_source(Predictions.reveal)
    assert shown[0].startswith("```python\ndef reveal(self")


def test_an_explorer_shows_bad_values_as_text_and_a_fixed_line_without_kernel(shown):
    def render(n):
        if n == 3:
            raise ValueError("three is not allowed")
        return new_figure()[0], f"n is {n} <b>"

    explorer = Explorer({"n": ipywidgets.IntSlider(1, 1, 5)}, render, title="n")
    assert explorer.text == "n is 1 <b>"
    assert explorer._html.value == "<pre>n is 1 &lt;b&gt;</pre>"
    assert explorer.set(n=3) == "three is not allowed"
    explorer.show()
    assert shown[0]["text/plain"].startswith("[interactive: n.")
    assert "application/vnd.jupyter.widget-view+json" in shown[0]


def test_what_is_printed_fits_on_a_page():
    text = "a report:\n  - " + "word " * 40 + "\n" + "more " * 30
    lines = wrapped(text).splitlines()
    assert max(map(len, lines)) <= 88
    assert [line[: len(line) - len(line.lstrip())] for line in lines] == ["", "  ", "     ", "     ", "", "   "]
    assert " ".join(wrapped(text).split()) == " ".join(text.split())
    assert wrapped("short\n\n  lines") == "short\n\n  lines"


def test_a_long_claim_and_a_long_prediction_are_wrapped(capsys, monkeypatch):
    row = dict(id="A1", chapter="c", claim="claim " * 20, verdict="F", reason="why " * 40, cell="x")
    monkeypatch.setattr(claims_module, "load_claims", lambda: [row])
    Claims("c").settle("A1", True)
    predictions = Predictions()
    predictions.commit("question " * 20, 3)
    predictions.reveal("question " * 20, 4)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 88
