"""Each fault that the hunt is tried with has its place in the library as it is now."""

import pytest

from tests.hunt.planted import PLANTED, plant


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_has_its_place(name, tmp_path):
    plant(name, tmp_path)
