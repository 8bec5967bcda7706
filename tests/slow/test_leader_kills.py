# A leader killed at many moments: no row is lost, none counts twice, and the ledger verifies.

import pytest

from tests.gateway.controller import controllers, killed
from tests.gateway.controller.test_kills import expected

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(12))
def test_a_leader_that_is_killed_counts_every_row_once(tmp_path, seed):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    rows = controllers.rows(path, 240, seed=seed)
    said = killed.survived(path, rows, kills=12, seed=seed)
    assert said[-1] == "done"
    assert killed.samples(path) == expected(rows)
    kinds, wrong = killed.ledger(path)
    assert wrong == []
    assert kinds.count("routed") > 0
