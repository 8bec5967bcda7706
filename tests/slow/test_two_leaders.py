# Two leaders of one state, killed and stopped in turn; and a gateway that follows whichever leads.

import pytest

from tests import cluster as clusters
from tests.gateway import two_leaders
from tests.gateway.controller.test_kills import expected
from tests.gateway.running import Serving, Users, kernels, until

pytestmark = pytest.mark.slow


def test_nothing_acknowledged_is_lost_and_at_most_one_leads(tmp_path):
    if clusters.binaries() is None:
        pytest.skip("PostgreSQL is not installed: no initdb in /usr/lib/postgresql/*/bin")
    with clusters.running() as own:  # it is restarted
        told, rows, samples, entries, wrong = two_leaders.survived(
            tmp_path, own, 10, seed=3, restarts=0.2
        )
    assert told.overlaps == 0 and told.fell == 0
    assert told.taken == len(rows)
    assert [(s.at, s.slice, s.clause) for s in samples] == expected(rows)
    assert wrong == []
    kept = [entry.body.get("reason") for entry in entries]
    assert told.pins and all(kept.count(pin) == 1 for pin in told.pins)
    terms = [term for term, _ in told.terms]
    assert len({*terms}) > 5  # the lead changed


def test_a_gateway_follows_the_leader_that_takes_over(tmp_path, cluster):
    with kernels(tmp_path / "kernels") as urls:
        folder = tmp_path / "gateway"
        with Serving(folder, urls, "--leader-only") as alone:  # writes the contract
            alone.line("the leader is running")
            assert alone.end() == 0
        leaders = two_leaders.Leaders(alone.contract, cluster.place(), cluster.place())
        words = [word for at in leaders.at for word in ("--leader", f"http://{at}")]
        environ = {"SERVANDA_GATEWAY_KEY": two_leaders.GATEWAY}

        def scored(more_than):
            """Who leads, once so many requests were scored."""
            found = leaders.status()
            total = sum(one["scored"] for one in found[1]["slices"]) if found else 0
            return found if total > more_than else None

        try:
            with (
                Serving(folder, urls, *words, **environ) as serving,
                Users(serving.begun(), teams="ab", pause_s=0.05) as users,
            ):
                for _ in range(3):
                    leading, before = until(lambda: scored(20), "evidence comes")
                    total = sum(one["scored"] for one in before["slices"])
                    # the other leads, or the same one again if it is started before that one looks
                    with leaders.killed(leading):
                        until(lambda: scored(total + 20), "evidence goes on")  # noqa: B023
                users.__exit__()
                assert {status for _, status, _ in users.probe} == {200}
                gateways = until(
                    lambda: (leaders.status() or (0, {}))[1].get("gateways"), "a report"
                )
                assert gateways[0]["counts"]["dropped"] == 0
                assert serving.end() == 0
        finally:
            leaders.close()
