"""What grows from step to step until a run is out of memory, and who holds it.

`watch` has `watch_growth`. It lets `census` count what is alive after each step, and `processes` what this process and
its children hold; `culprits` turns the numbers that grow into names, for which `naming` asks Python who holds an
object, and `graphs` what a tensor's graph keeps.
"""

from course_lib.leaks.watch import watch_growth

__all__ = ["watch_growth"]
