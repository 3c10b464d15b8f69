"""Is a run right, before it costs a night? It is rehearsed: by :func:`rehearse` in ``judge.py``, or as a script.

report = rehearse_script("train.py", ["--epochs", "90"])  # a script as it stands: script.py
report = rehearse(trainer, model, data)  # the fit of a Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rehearse.judge import CHECKS, assert_ready, rehearse
from rehearse.loop import rehearse_loop
from rehearse.report import Finding, NotReady, RehearsalReport
from rehearse.script import NotRehearsed, rehearse_script

if TYPE_CHECKING:
    from rehearse.callback import Rehearsal

__all__ = [
    "CHECKS",
    "Finding",
    "NotReady",
    "NotRehearsed",
    "Rehearsal",
    "RehearsalReport",
    "assert_ready",
    "rehearse",
    "rehearse_loop",
    "rehearse_script",
]


def __getattr__(name: str) -> Any:
    """The callback, which needs Lightning; a script or a loop is rehearsed without."""
    if name != "Rehearsal":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from rehearse.callback import Rehearsal
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        raise ModuleNotFoundError(
            "rehearse.Rehearsal needs Lightning, which is an extra: from the project's folder, "
            'pip install ".[lightning]"; scripts and loops are rehearsed without',
            name="lightning",
        ) from error
    return Rehearsal
