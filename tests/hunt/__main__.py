"""``python -m tests.hunt``: see ``searching.py``, a module of its own as its processes import it by name."""

import sys

from tests.hunt.searching import main

if __name__ == "__main__":
    sys.exit(main())
