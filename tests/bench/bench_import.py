"""What importing the library costs beyond importing torch."""

import statistics
import subprocess
import sys

TOPICS = "import course_lib, course_lib.steps, course_lib.launch, course_lib.datasets"


def seconds_to_import(statement: str) -> float:
    code = f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_importing_the_library_costs_at_most_a_fifth_of_a_second_more_than_torch():
    statements = {"torch": "import torch", "course_lib": "import course_lib", "every topic": TOPICS}
    seconds = {name: [] for name in statements}
    for _ in range(7):
        for name, statement in statements.items():
            seconds[name].append(seconds_to_import(statement))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("\nimport, median of 7: " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()))
    assert medians["course_lib"] <= medians["torch"] + 0.2
    assert medians["every topic"] <= medians["torch"] + 0.2
