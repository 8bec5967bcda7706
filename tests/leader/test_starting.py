# A leader as a child process: what it says is heard, whatever it is.

import pytest

from servanda.leader.leads import Settings
from servanda.leader.starting import Supervised


@pytest.mark.parametrize("line", ["3", "null", "[1]", '"at"', "a library that prints"])
def test_what_a_library_prints_is_passed_on_and_ends_nothing(line):
    said = []
    supervised = Supervised(Settings("c.yaml", "state", "", "127.0.0.1", 0), said.append)
    assert not supervised._heard(line + "\n")
    assert said == [line]
