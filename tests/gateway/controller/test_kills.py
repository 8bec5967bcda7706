# Killed in the middle of anything, a leader loses nothing that it took and counts nothing twice.
# tests/slow/test_leader_kills.py does it at many more moments.

import pytest

from tests.gateway.controller import controllers, killed


@pytest.mark.slow
def test_a_leader_that_is_killed_counts_every_row_once(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = controllers.rows(path, 120)
    said = killed.survived(path, rows, kills=2, seed=1)
    assert said[-1] == "done"
    assert killed.samples(path) == expected(rows)
    kinds, wrong = killed.ledger(path)
    assert wrong == []
    assert kinds.count("routed") > 0


def expected(rows):
    """Of each row, in launch order: both clauses on the whole, and on the slice of its label."""
    return [
        (row["at"], name, clause)
        for row in rows
        for clause in ("tv", "sampler_fidelity")
        for name in ("all", f"first={row['labels']['first']}")
    ]
