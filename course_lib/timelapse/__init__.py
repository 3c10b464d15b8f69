"""Play an unchanged training script through to its end in seconds. The way in is :func:`play`, in ``player.py``."""

from course_lib.timelapse.journal import Journal
from course_lib.timelapse.player import play

__all__ = ["Journal", "play"]
