# The chain in one call, on kernels whose truth is known.

import json
import math

import pytest

import servanda as sv
from servanda import run
from servanda.errors import EvidenceError
from tests import kit


def check(path, folder, **options):
    return run.check(path, run_dir=folder / "run", open=run.in_process, **options)


def cell(verdict, clause, slice_="all"):
    return next(c for c in verdict.cells if (c.clause, c.slice) == (clause, slice_))


@pytest.mark.parametrize(
    ("claim", "tv", "outcome", "code"),
    [
        ("population", 0.01, "holds", 0),
        ("population", 0.15, "violated", 1),
        ("realised", 0.01, "holds", 0),
        ("realised", 0.15, "violated", 1),
    ],
)
def test_a_verdict_is_true_and_carries_its_numbers(tmp_path, claim, tv, outcome, code):
    path, pair = kit.write(tmp_path, q={"": kit.moved(kit.BASE, tv)}, claim=claim)
    verdict = check(path, tmp_path)
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    tv_cell = cell(verdict, "tv")
    low, high = tv_cell.interval
    assert low <= pair.mean_tv([(0,), (1,), (2,)], 6) <= high
    assert tv_cell.kind == "certificate" and tv_cell.claim == claim
    assert tv_cell.n > 0 and tv_cell.alpha == pytest.approx(0.025)
    assert verdict.tokens > 0 and verdict.lost == 0


def test_the_estimate_is_token_weighted(tmp_path):
    """Long sequences carry the divergence: a mean of per-sequence means would hide it."""
    p = {"": [0.0, 0.0, 0.0, 0.0, 1.0], "a": [0.95, 0.0, 0.05, 0.0, 0.0], "b": [0, 0, 0, 0, 1.0]}
    q = {**p, "a": [1.0, 0.0, 0.0, 0.0, 0.0]}
    path, pair = kit.write(tmp_path, p=p, q=q, prompts=("a", "b", "c"), width=20, limit=0.2)
    verdict = check(path, tmp_path)
    truth = pair.mean_tv([(0,), (1,), (2,)], 20)
    assert truth == pytest.approx(0.05 * 20 / 22)
    assert cell(verdict, "tv").value == pytest.approx(truth, rel=0.15)


def test_a_slice_breaks_that_the_whole_hides(tmp_path):
    p = {"": kit.BASE, "a": kit.BASE}
    q = {"": kit.BASE, "a": kit.moved(kit.BASE, 0.2)}
    path, _ = kit.write(
        tmp_path,
        p=p,
        q=q,
        prompts=("a",) + ("b",) * 30,
        width=1,
        limit=0.05,
        slices="slices: [{name: first, split: labels.first}]",
        last=6000,
    )
    verdict = check(path, tmp_path)
    assert cell(verdict, "tv").outcome == "holds"
    assert cell(verdict, "tv", "first=b").outcome == "holds"
    assert cell(verdict, "tv", "first=a").outcome == "violated"
    assert verdict.outcome == "violated"


def test_a_verdict_replays_from_its_pieces(tmp_path):
    path, _ = kit.write(tmp_path, golden=kit.golden(tmp_path))
    contract = sv.load(path)
    plan = sv.compile(contract)
    pairs = sv.measure(plan, tmp_path / "run", open=run.in_process)
    evidence = sv.weigh(plan, pairs)
    assert sv.judge(plan, evidence) == check(path, tmp_path)


def test_evidence_merges_disjoint_shards_and_refuses_overlap(tmp_path):
    path, _ = kit.write(tmp_path)
    plan = sv.compile(sv.load(path))
    pairs = sv.measure(plan, tmp_path / "run", open=run.in_process)
    from servanda.evidence import weigh

    rounds = list(pairs.rounds())
    assert len(rounds) >= 3
    whole = weigh(plan, pairs.key, rounds)
    even, odd = (weigh(plan, pairs.key, rounds[i::2]) for i in (0, 1))
    assert (odd + even).digest == (even + odd).digest == whole.digest
    assert sv.judge(plan, odd + even) == sv.judge(plan, whole)
    assert len(odd.closed) == 0 and len(even.closed) == 1  # only a closed prefix counts
    with pytest.raises(EvidenceError, match="in both shards"):
        whole + even


def test_check_again_continues_and_fresh_pays(tmp_path):
    path, _ = kit.write(tmp_path, last=96, limit=0.08)
    first = check(path, tmp_path)
    again = check(path, tmp_path)
    assert again == first and first.key.attempt == 1
    fresh = check(path, tmp_path, fresh=True)
    assert fresh.key.attempt == 2
    assert fresh.alpha == pytest.approx(0.05 / 6)
    assert fresh.evidence != first.evidence  # other noise


def test_undecided_says_how_much_more_would_decide(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.03)}, last=200, limit=0.06)
    verdict = check(path, tmp_path)
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 3)
    assert verdict.more and verdict.more > 0
    assert f"About {verdict.more:,} more prompt groups would decide" in str(verdict)


def test_the_projection_is_near_what_it_takes(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.03)}, last=160, limit=0.06)
    early = check(path, tmp_path)
    path, _ = kit.write(
        tmp_path / "b", q={"": kit.moved(kit.BASE, 0.03)}, last=20000, limit=0.06, round=32
    )
    late = check(path, tmp_path / "b")
    assert late.outcome == "holds"
    assert (early.groups + early.more) / late.groups == pytest.approx(1, abs=0.6)


def test_a_clause_of_a_later_version_is_inconclusive_by_name(tmp_path):
    path, _ = kit.write(
        tmp_path, more="  - {id: drift, metric: reward_drift, at_most: 0.25, slices: all}"
    )
    verdict = check(path, tmp_path)
    assert verdict.exit_code == 3
    assert "cannot judge 'reward_drift'" in cell(verdict, "drift").note
    assert "drift on all" in str(verdict)


def test_a_clause_of_another_stage_is_shown_and_not_counted(tmp_path):
    path, _ = kit.write(
        tmp_path,
        more="  - {id: later, metric: tv, aggregate: mean, at_most: 0.001, stages: [canary]}",
    )
    verdict = check(path, tmp_path)
    assert verdict.outcome == "holds"
    assert cell(verdict, "later").outcome == "not applicable"
    assert "canary" in cell(verdict, "later").note


def test_a_monitored_clause_never_fails_a_contract(tmp_path):
    path, _ = kit.write(
        tmp_path,
        more="  - {id: tight, metric: tv, aggregate: mean, at_most: 0.001, mode: monitor}",
    )
    verdict = check(path, tmp_path)
    assert verdict.outcome == "holds" and not cell(verdict, "tight").enforced
    assert verdict.price_cells == 2  # tv and fidelity: what is monitored costs nothing


def test_percentile_clip_and_flip_clauses(tmp_path):
    path, _ = kit.write(
        tmp_path,
        limit=0.08,
        more="""\
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.2}
  - {id: k3, metric: k3_nats, aggregate: mean, clip: 0.5, at_most: 0.05}
  - {id: flips, metric: top1_flip, aggregate: mean, at_most: 0.1}""",
    )
    verdict = check(path, tmp_path)
    assert verdict.outcome == "holds", str(verdict)
    assert cell(verdict, "tail").limit == 0.1 and cell(verdict, "tail").value == 0.0
    assert cell(verdict, "k3").limit == pytest.approx(0.05)


def test_a_token_train_cannot_draw_is_evidence_not_a_gap(tmp_path):
    p = {"": [0.5, 0.5, 0.0, 0.0, 0.0]}
    q = {"": [0.45, 0.45, 0.1, 0.0, 0.0]}
    path, _ = kit.write(tmp_path, p=p, q=q, limit=0.3)
    verdict = check(path, tmp_path)
    assert cell(verdict, "usable").value == 1.0
    assert cell(verdict, "tv").value == pytest.approx(0.1, rel=0.3)


def test_lost_sequences_count_against_both_answers_and_end_in_an_error(tmp_path):
    path, _ = kit.write(tmp_path, infer=", fault: {lost_sequences: 0.5}", last=400)
    verdict = check(path, tmp_path)
    assert (verdict.outcome, verdict.exit_code) == ("error", 4)
    assert verdict.lost > 0 and cell(verdict, "tv").missing > 0
    assert cell(verdict, "tv").outcome == "inconclusive"
    assert "precondition failed: usable" in cell(verdict, "tv").note


def test_an_undisclosed_top_p_is_violated_by_fidelity_though_the_ratios_are_clean(tmp_path):
    path, _ = kit.write(
        tmp_path,
        p={"": kit.BASE},
        q={"": kit.BASE},
        infer=", fault: {undisclosed_top_p: 0.7}",
    )
    verdict = check(path, tmp_path)
    assert verdict.outcome == "violated"
    assert cell(verdict, "fidelity").outcome == "violated"
    assert cell(verdict, "tv").value == 0.0
    assert cell(verdict, "tv").outcome == "inconclusive"


def test_golden_facts(tmp_path):
    numerical = "numerical:\n  - {{id: osc, metric: logit_osc_nats, at_most: {}}}\n"
    p, q = {"": kit.BASE}, {"": kit.moved(kit.BASE, 0.05)}
    osc = math.log(0.35 / 0.30) + math.log(0.30 / 0.25)
    for limit, outcome in ((osc * 1.001, "holds"), (osc * 0.999, "violated")):
        folder = tmp_path / outcome
        folder.mkdir()
        golden = kit.golden(folder) + "\n" + numerical.format(limit)
        path, _ = kit.write(folder, p=p, q=q, golden=golden, limit=0.2)
        fact = cell(check(path, folder), "osc")
        assert fact.outcome == outcome
        assert fact.value == pytest.approx(osc) and fact.n == 10 and fact.kind == "fact"


def test_json_has_every_number_and_no_invented_one(tmp_path):
    path, _ = kit.write(tmp_path)
    from servanda.report import FORMATS

    data = json.loads(FORMATS["json"](check(path, tmp_path)))
    assert data["outcome"] == "holds" and data["exit_code"] == 0
    for entry in data["cells"]:
        for name in ("clause", "slice", "outcome", "kind", "claim", "n", "missing", "alpha"):
            assert name in entry
    fidelity = next(c for c in data["cells"] if c["clause"] == "fidelity")
    assert fidelity["value"] is None and fidelity["interval"] is None
