"""Whether ranks are forked from a server, as on Linux; elsewhere, and where that is pretended, they are spawned."""

import pytest

from course_lib.launch.server import forks_ranks

with_forked_ranks = pytest.mark.skipif(not forks_ranks(), reason="ranks are spawned here: there is no server")
