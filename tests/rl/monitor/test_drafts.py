# Drafts in a run: a target moves on, its draft does or does not, and the monitor says which.

import json

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError
from servanda.rl import DraftCounts, Monitor, read_state
from servanda.rl.monitor.statistics import FELL
from servanda.rl.monitor.step import BEFORE_AN_UPDATE
from tests.kit import parse
from tests.rl.monitor.made import step
from tests.rl.monitor.test_monitor import BARE, TV

CLAUSE = "{{id: drafts, metric: draft_acceptance, at_least: {}}}"
VOCABULARY, LONGEST = 32, 3


def contract(least=0.4, more=""):
    runtime = f"runtime: {{clauses: [{CLAUSE.format(least)}]}}"
    return parse(f"{BARE}{TV}\n{runtime}\n{more}", "run.kernelcontract.yaml", engines=[])[0]


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def speculated(rng, target, draft, drafts=400, longest=LONGEST):
    """Counts of drafts by exact rejection sampling; tokens do not depend on their context."""
    token = rng.choice(len(draft), size=(drafts, longest), p=draft)
    kept = rng.random((drafts, longest)) < (target / draft)[token]
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    by_depth = tuple(int((accepted >= d).sum()) for d in range(1, longest + 1))
    return DraftCounts(drafts, drafts * longest, sum(by_depth), by_depth)


def a_run(monitor, steps, *, synced, rng=None):
    """A run whose target moves by 0.6 nats a logit at each update, and its draft with it or not."""
    rng = rng or np.random.default_rng(0)
    target = rng.normal(0, 2, VOCABULARY)
    draft = target + rng.normal(0, 0.3, VOCABULARY)
    found = []
    for weights in range(steps):
        counts = speculated(rng, softmax(target), softmax(draft))
        columns = step(rng, size=32, width=64, tv=0.002)
        found.append((monitor.observe(*columns, weights=weights, drafts=counts), softmax(target)))
        moved = rng.normal(0, 0.6, VOCABULARY)
        target = target + moved
        draft = draft + moved if synced else draft
    return found


def test_acceptance_is_logged_by_depth_and_kept_in_the_state(tmp_path):
    ((found, _),) = a_run(Monitor(contract(), state=tmp_path / "run.jsonl"), 1, synced=True)
    metrics = {k: v for k, v in found.metrics.items() if "draft" in k}
    assert set(metrics) == {
        "servanda/draft_acceptance",
        *(f"servanda/draft_acceptance/depth_{d}" for d in (1, 2, 3)),
    }
    assert metrics["servanda/draft_acceptance"] == found.drafts.mean
    line = json.loads((tmp_path / "run.jsonl").read_text())
    assert line["drafts"]["by_depth"] == [*found.drafts.by_depth]
    (read,) = read_state(tmp_path / "run.jsonl")
    assert read.drafts == found.drafts.mean
    (cell,) = (c for c in read.cells if c.clause == "drafts")
    assert (cell.section, cell.limit, read.where(cell)) == ("runtime", 0.4, "all drafts")


def test_a_draft_that_is_synced_keeps_its_floor_and_one_that_is_not_breaks_it():
    healthy = a_run(Monitor(contract()), 12, synced=True)
    assert {found.outcome for found, _ in healthy} == {"holds"}
    assert not any(FELL in found.notes for found, _ in healthy)
    stale = a_run(Monitor(contract()), 12, synced=False)
    last, _ = stale[-1]
    assert last.outcome == "violated" and last.exit_code == 1
    assert "draft weights that are not synced" in last.cause
    assert BEFORE_AN_UPDATE not in last.cause
    assert FELL in last.notes and last.metrics["servanda/draft_acceptance/fell_at_least"] > 0.1


def test_the_fall_bounds_how_far_the_target_moved():
    """The bound is on the TV between the mean targets; they are known here."""
    stale = a_run(Monitor(contract(0.01)), 16, synced=False)
    first = np.mean([target for _, target in stale[:5]], axis=0)
    for found, target in stale[5:]:
        tv = 0.5 * np.abs(target - first).sum()
        assert found.metrics["servanda/draft_acceptance/target_tv_at_least"] <= tv
    assert found.metrics["servanda/draft_acceptance/target_tv_at_least"] > 0.05


@pytest.mark.parametrize(
    ("counts", "note"),
    [
        ({}, "no draft was counted: pass drafts= to the monitor"),
        ({"drafts": DraftCounts(10, 30, 14, (8, 4, 2))}, ""),
    ],
)
def test_no_count_and_few_drafts_are_no_agreement(counts, note):
    columns = step(np.random.default_rng(1), size=32, width=64, tv=0.002)
    found = Monitor(contract()).observe(*columns, weights=0, **counts)
    assert found.outcome == "inconclusive"
    assert any("draft" in name for name in found.metrics) is bool(counts)
    (cell,) = (c for c in found.verdict.cells if c.clause == "drafts")
    assert note in cell.note


def test_a_healthy_acceptance_at_the_floor_is_called_violated_less_often_than_alpha():
    """The truth is the limit itself; 200 steps of 100 drafts, alpha 0.045 of all cells."""
    rng, monitor = np.random.default_rng(5), Monitor(contract(0.7))
    columns = step(np.random.default_rng(1), size=32, width=64, tv=0.002)
    red = 0
    for weights in range(200):
        accepted = int(rng.binomial(100, 0.7))
        counts = DraftCounts(100, 100, accepted, (accepted,))
        red += monitor.observe(*columns, weights=weights, drafts=counts).outcome == "violated"
    assert red <= 9


def test_a_meter_is_read_once_a_step_and_its_problem_is_a_note():
    class Meter:
        problem, left = "drafts were not counted: a counter went back", [DraftCounts(9, 9, 9), None]

        def read(self):
            return self.left.pop(0)

    meter, monitor = Meter(), Monitor(contract())
    columns = step(np.random.default_rng(1), size=32, width=64, tv=0.002)
    first, second = (monitor.observe(*columns, weights=w, drafts=meter) for w in (0, 1))
    assert first.drafts.drafts == 9 and Meter.problem not in first.notes
    assert second.drafts.drafts == 0 and Meter.problem in second.notes


def test_a_restart_keeps_the_first_steps_as_reference(tmp_path):
    path = tmp_path / "run.jsonl"
    rng = np.random.default_rng(2)
    a_run(Monitor(contract(), state=path), 5, synced=True, rng=rng)
    monitor = Monitor(contract(), state=path)
    columns = step(rng, size=32, width=64, tv=0.002)
    found = monitor.observe(*columns, weights=5, drafts=DraftCounts(400, 1200, 0, (0, 0, 0)))
    assert found.metrics["servanda/draft_acceptance/fell_at_least"] > 0.3


def test_a_violation_before_the_first_update_is_not_the_syncs():
    columns = step(np.random.default_rng(1), size=64, width=128, tv=0.3)
    first, second = (
        Monitor(contract(more="")).observe(
            *columns, weights=weights, drafts=DraftCounts(400, 400, 390, (390,))
        )
        for weights in (0, 1)
    )
    assert first.outcome == second.outcome == "violated"
    assert first.cause.endswith(BEFORE_AN_UPDATE) and BEFORE_AN_UPDATE not in second.cause


def test_steps_are_numbered_as_the_trainers_log(tmp_path):
    path = tmp_path / "run.jsonl"
    monitor = Monitor(contract(), state=path)
    monitor.numbered_from(1)
    columns = step(np.random.default_rng(1), size=32, width=64, tv=0.002)
    found = [monitor.observe(*columns, weights=w) for w in (0, 1)]
    assert [(f.weights, f.step) for f in found] == [(0, 1), (1, 2)]
    assert [s.step for s in read_state(path)] == [1, 2]


def test_a_limit_of_a_share_lies_below_one():
    for least, said in (("1", "is a share, and found a limit of 1"), ("0", "can never fail")):
        with pytest.raises(ContractError, match=said):
            contract(least)
    with pytest.raises(EvidenceError, match="contradict"):
        DraftCounts(drafts=1, proposed=1, accepted=2)
