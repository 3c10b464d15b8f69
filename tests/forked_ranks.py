"""Whether ranks are forked from a server, as on Linux; elsewhere, and where that is pretended, they are spawned."""

import multiprocessing
import sys

import pytest

RANKS_ARE_FORKED = (
    sys.platform == "linux" and multiprocessing.get_context("forkserver").get_start_method() == "forkserver"
)
with_forked_ranks = pytest.mark.skipif(not RANKS_ARE_FORKED, reason="ranks are spawned here: there is no server")
