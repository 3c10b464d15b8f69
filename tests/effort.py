"""How many random cases a test tries: the first few by default, all of them with `pytest --thorough`."""

import os


def cases(quick: int, thorough: int) -> int:
    """The number of cases. A test draws them from the same seeds, so the quick ones are the first of the thorough."""
    return thorough if os.environ.get("THOROUGH") else quick
