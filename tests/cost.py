"""What a run of the tests costs, in imports of torch: `make cost`, on an idle machine.

Seconds differ between machines, and the seconds of children leave out the processes that nobody waits for. So all that
the machine does while the tests run is counted, from /proc/stat (Linux), and divided by what one `import torch` costs
there.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORTS = 7


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started, in user and system mode."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_of_an_import() -> float:
    """User and system seconds of `python -c "import torch"`: the median of seven, after one that warms the disk."""
    seconds = []
    for _ in range(1 + IMPORTS):
        before = seconds_of_children()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        seconds.append(seconds_of_children() - before)
    return statistics.median(seconds[1:])


def main() -> int:
    one_import = seconds_of_an_import()
    busy, start = busy_seconds(), time.monotonic()
    result = subprocess.run(sys.argv[1:])
    busy, wall = busy_seconds() - busy, time.monotonic() - start
    print(
        f"cost: {busy / one_import:.0f} imports of torch ({busy:.0f} busy seconds of all cores, of which one import is "
        f"{one_import:.2f}); {wall:.0f} s by the clock"
    )
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
