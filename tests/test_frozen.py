# The frozen answers: each is what tests/frozen.json says, until a commit names the change.

import pytest

from tests import frozen


@pytest.fixture(scope="module")
def now(tmp_path_factory):
    return frozen.quick(tmp_path_factory.mktemp("frozen"))


KEPT = frozen.read()


@pytest.mark.parametrize("part", [part for part in KEPT if part != "field"])
def test_the_answers_of_a_part_are_those_that_were_frozen(part, now):
    assert now[part] == KEPT[part], "python -m tests.frozen prints old and new"


def test_no_part_is_left_out(now):
    assert {*now, "field"} == {*KEPT}


def test_a_digest_follows_the_numbers_and_not_their_last_bits():
    assert frozen.digest([1.0]) == frozen.digest([1.0 + 1e-12]) != frozen.digest([1.001])
