"""Is a run right, before it costs a night? The way in is :func:`preflight`, in ``judge.py``."""

from course_lib.preflight.judge import CHECKS, assert_ready, preflight, preflight_loop
from course_lib.preflight.report import Finding, NotReady, PreflightReport
from course_lib.preflight.script import NotPlayed, preflight_script

__all__ = [
    "CHECKS",
    "Finding",
    "NotPlayed",
    "NotReady",
    "PreflightReport",
    "assert_ready",
    "preflight",
    "preflight_loop",
    "preflight_script",
]
