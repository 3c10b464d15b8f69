"""Play an unchanged training script through to its end in seconds. The way in is :func:`play`, in ``play.py``."""

from course_lib.timelapse.journal import Journal
from course_lib.timelapse.play import play

__all__ = ["Journal", "play"]
