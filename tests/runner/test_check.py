# The chain in one call, on kernels whose truth is known.

import json
import math
import threading

import pytest

import servanda as sv
from servanda.engines.table import TableEngine
from servanda.errors import EvidenceError
from servanda.judgement.verdict import FORMATS
from servanda.report.format import count
from servanda.runner import run
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
    assert tv_cell.n > 0 and tv_cell.alpha == pytest.approx(0.045)
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
    from servanda.judgement.evidence import weigh

    rounds = list(pairs.rounds())
    assert len(rounds) >= 3
    whole = weigh(plan, pairs.key, rounds)
    even, odd = (weigh(plan, pairs.key, rounds[i::2]) for i in (0, 1))
    assert (odd + even).digest == (even + odd).digest == whole.digest
    assert sv.judge(plan, odd + even) == sv.judge(plan, whole)
    assert (len(odd.closed("workload")), len(even.closed("workload"))) == (
        0,
        1,
    )  # only a closed prefix counts
    with pytest.raises(EvidenceError, match="in both shards"):
        whole + even


def test_check_again_continues_even_without_the_verdict_and_fresh_pays(tmp_path):
    path, _ = kit.write(tmp_path, last=96, limit=0.08)
    first = check(path, tmp_path)
    (attempt,) = tmp_path.glob("**/attempt-1")
    (attempt / "verdict.json").unlink()
    written = {file: file.stat().st_mtime_ns for file in (attempt / "rounds").iterdir()}
    assert check(path, tmp_path) == first
    assert {file: file.stat().st_mtime_ns for file in (attempt / "rounds").iterdir()} == written
    again = check(path, tmp_path)
    assert again == first and first.key.attempt == 1
    fresh = check(path, tmp_path, fresh=True)
    assert fresh.key.attempt == 2
    assert fresh.alpha == pytest.approx(0.05 / 20)
    assert fresh.evidence != first.evidence  # other noise


def test_undecided_says_how_much_more_would_decide(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.03)}, last=120, limit=0.06)
    verdict = check(path, tmp_path)
    assert (verdict.outcome, verdict.exit_code) == ("inconclusive", 3)
    assert verdict.more and verdict.more > 0
    assert f"About {count(verdict.more, 'more prompt group')} would decide" in str(verdict)


def test_a_larger_limit_of_size_goes_on_with_the_same_evidence_and_the_projection_is_near(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.03)}, last=160, limit=0.06)
    early = check(path, tmp_path)
    path, _ = kit.write(
        tmp_path / "b", q={"": kit.moved(kit.BASE, 0.03)}, last=20000, limit=0.06, round=32
    )
    late = check(path, tmp_path / "b")
    assert late.outcome == "holds"
    assert (early.groups + early.more) / late.groups == pytest.approx(1, abs=0.6)
    assert early.outcome == "inconclusive"
    path.write_text(path.read_text().replace("[32, 160]", "[32, 4000]"))
    late = check(path, tmp_path)
    assert late.outcome == "holds" and late.groups > early.groups
    assert late.key == early.key


def test_a_clause_of_a_later_version_is_inconclusive_by_name(tmp_path):
    path, _ = kit.write(tmp_path)
    contract = run.load(path)
    tv = contract.statistical[0]
    drift = tv.model_copy(update={"id": "drift", "metric": "drift_nats"})
    verdict = run.check(
        contract.model_copy(update={"statistical": (tv, drift)}),
        run_dir=tmp_path / "run",
        open=run.in_process,
    )
    assert verdict.exit_code == 3
    assert "cannot judge 'drift_nats'" in cell(verdict, "drift").note
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
    assert cell(verdict, "usable_ratio").value == 1.0
    assert cell(verdict, "tv").value == pytest.approx(0.1, rel=0.3)


def test_lost_sequences_count_against_both_answers_and_end_in_an_error(tmp_path):
    path, _ = kit.write(tmp_path, infer=", fault: {lost_sequences: 0.5}", last=400)
    verdict = check(path, tmp_path)
    assert (verdict.outcome, verdict.exit_code) == ("error", 4)
    assert verdict.lost > 0 and cell(verdict, "tv").missing > 0
    assert cell(verdict, "tv").outcome == "inconclusive"
    assert "precondition failed: usable_ratio" in cell(verdict, "tv").note


def test_an_undisclosed_top_p_is_violated_by_fidelity_though_the_ratios_are_clean(tmp_path):
    path, _ = kit.write(
        tmp_path,
        p={"": kit.BASE},
        q={"": kit.BASE},
        infer=", fault: {undisclosed_top_p: 0.7}",
    )
    verdict = check(path, tmp_path)
    assert verdict.outcome == "violated"
    assert cell(verdict, "sampler_fidelity").outcome == "violated"
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
    data = json.loads(FORMATS["json"](check(path, tmp_path)))
    assert data["outcome"] == "holds" and data["exit_code"] == 0
    for entry in data["cells"]:
        for name in ("clause", "slice", "outcome", "kind", "claim", "n", "missing", "alpha"):
            assert name in entry
    fidelity = next(c for c in data["cells"] if c["clause"] == "sampler_fidelity")
    assert fidelity["value"] is None and fidelity["interval"] is None


def test_slices_that_print_alike_are_kept_apart(tmp_path):
    """A label spelt like our own word for "no label" must not hide the lines without one."""
    p = {"": kit.BASE}
    q = {"": kit.BASE, "b": [0.0, 0.0, 0.0, 0.5, 0.5]}
    path, _ = kit.write(
        tmp_path,
        p=p,
        q=q,
        prompts=("a", "b"),
        labels={"a": {"d": "(none)"}, "b": {}},
        width=1,
        limit=0.2,
        slices="slices: [{name: d, split: labels.d}]",
    )
    verdict = check(path, tmp_path)
    assert cell(verdict, "tv", "d='(none)'").outcome == "holds"
    assert cell(verdict, "tv", "d=(none)").outcome == "violated"


GUARD = "observability: {{clauses: [{{id: g, metric: sampler_fidelity, {}}}]}}"


@pytest.mark.parametrize(
    ("clause", "guard"),
    [
        ("id: fidelity, metric: tv", ""),
        ("id: sampler_fidelity, metric: tv", ""),
        ("id: usable, metric: tv", ""),
        ("id: tv, metric: tv", GUARD.format("mode: monitor")),
        ("id: tv, metric: tv", GUARD.format("severity: warning")),
        ("id: tv, metric: tv", GUARD.format("stages: [canary]")),
    ],
)
def test_no_name_of_a_clause_and_no_weaker_guard_takes_a_guard_away(tmp_path, clause, guard):
    path, _ = kit.write(
        tmp_path,
        p={"": kit.BASE},
        q={"": kit.BASE},
        limit=0.3,
        infer=", fault: {undisclosed_top_p: 0.7}",
        more=guard,
    )
    path.write_text(path.read_text().replace("id: tv, metric: tv", clause))
    assert check(path, tmp_path).outcome == "violated"


@pytest.mark.parametrize("weaker", ["mode: monitor", "severity: warning", "stages: [canary]"])
def test_without_a_promise_that_is_judged_nothing_holds(tmp_path, weaker):
    path, _ = kit.write(tmp_path)
    path.write_text(path.read_text().replace("aggregate: mean", f"aggregate: mean, {weaker}"))
    verdict = check(path, tmp_path)
    assert verdict.exit_code == 3
    assert "no enforced clause is judged at stage 'offline'" in str(verdict)


def test_lost_sequences_do_not_look_like_a_wrong_sampler(tmp_path):
    """The longer an answer, the likelier it is lost: what survives is not uniform."""
    path, _ = kit.write(
        tmp_path, infer=", fault: {lost_sequences: 1.0}", width=20, first=416, last=416
    )
    verdict = check(path, tmp_path)
    assert verdict.lost > 100
    assert cell(verdict, "sampler_fidelity").outcome != "violated"
    assert verdict.outcome == "error"


@pytest.mark.slow
def test_what_was_violated_stays_so_for_a_population(tmp_path):
    from dataclasses import replace

    from servanda.judgement.evidence import weigh

    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.3)}, first=128, last=128)
    plan = sv.compile(sv.load(path))
    pairs = sv.measure(plan, tmp_path / "bad", open=run.in_process)
    bad = weigh(plan, pairs.key, pairs.rounds())
    kit.table(tmp_path, "q.json", {"": kit.BASE})
    good_path, _ = kit.write(tmp_path / "good", q={"": kit.BASE}, first=1600, last=1600)
    good_plan = sv.compile(sv.load(good_path))
    good_pairs = sv.measure(good_plan, tmp_path / "good" / "run", open=run.in_process)
    good = weigh(good_plan, good_pairs.key, good_pairs.rounds())
    shift = len(bad.rounds)
    later = {(name, i + shift): w for (name, i), w in good.rounds.items()}
    mixed = replace(bad, rounds={**bad.rounds, **later})
    tv = cell(sv.judge(plan, mixed), "tv")
    assert tv.value < 0.05 and tv.outcome == "violated"


def stop(progress):
    if progress.what == "prompt groups" and progress.done:
        raise KeyboardInterrupt


def test_an_interrupted_fresh_attempt_is_finished_first(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.1)
    check(path, tmp_path)
    with pytest.raises(sv.ServandaError, match="stopped"):
        check(path, tmp_path, fresh=True, watch=stop)
    heard = []
    assert check(path, tmp_path, fresh=True, watch=heard.append).key.attempt == 2
    assert heard and all(progress.run == "attempt 2" for progress in heard)
    assert check(path, tmp_path, fresh=True).key.attempt == 3


def test_a_change_before_the_verdict_does_not_lock_the_directory(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.1)
    with pytest.raises(sv.ServandaError, match="stopped"):
        check(path, tmp_path, watch=stop)
    path.write_text(path.read_text().replace("at_most: 0.1", "at_most: 0.11"))
    with pytest.raises(sv.MeasurementError, match=r"statistical.tv.at_most: 0.1 -> 0.11"):
        check(path, tmp_path)
    assert check(path, tmp_path, fresh=True).key.attempt == 2


def test_a_stop_rule_that_changed_expires_the_evidence(tmp_path):
    path, _ = kit.write(tmp_path)
    check(path, tmp_path)
    for name in ("p.json", "q.json"):
        table = tmp_path / name
        table.write_text(table.read_text().replace('"eos": "<eos>"', '"eos": "d"'))
    with pytest.raises(sv.MeasurementError, match="the train kernel, the infer kernel changed"):
        check(path, tmp_path)


def test_room_that_no_answer_fills_is_named(tmp_path):
    path, _ = kit.write(tmp_path, width=200, limit=0.02, last=400)
    verdict = check(path, tmp_path)
    assert verdict.outcome == "inconclusive"
    assert "has room for 200 tokens here and fills" in cell(verdict, "tv").note


def test_an_infinite_fact_is_a_verdict_and_valid_json(tmp_path):
    numerical = "numerical: [{id: osc, metric: logit_osc_nats, at_most: 1}]"
    golden = kit.golden(tmp_path) + "\n" + numerical
    path, _ = kit.write(
        tmp_path,
        p={"": [0.5, 0.5, 0.0, 0.0, 0.0]},
        q={"": [0.5, 0.4, 0.1, 0.0, 0.0]},
        golden=golden,
        limit=0.3,
    )
    verdict = check(path, tmp_path)
    assert cell(verdict, "osc").outcome == "violated"
    assert '"value": "inf"' in json.dumps(verdict.to_dict(), allow_nan=False)


def test_both_kernels_score_a_golden_text_at_the_same_time(tmp_path):
    """Each waits for the other before its first logits: one after the other would never end."""
    met = threading.Barrier(2, timeout=60)

    class Meeting(TableEngine):
        alone = False  # later calls are for the noise floor of one kernel

        def logits(self, batch, path):
            if not self.alone:
                met.wait()
                self.alone = True
            yield from super().logits(batch, path)

    path, _ = kit.write(tmp_path, golden=kit.golden(tmp_path))

    verdict = run.check(path, run_dir=tmp_path / "run", open=lambda kernel, _: Meeting(kernel))

    assert verdict.outcome == "holds"


def test_few_golden_texts_have_a_floor_and_one_has_none(tmp_path):
    numerical = "numerical: [{id: osc, metric: logit_osc_nats, at_most: 1}]"
    for texts, floor in ((("a b c", "a b"), 0.0), (("a b c",), None)):
        folder = tmp_path / str(len(texts))
        folder.mkdir()
        path, _ = kit.write(folder, golden=kit.golden(folder, texts) + "\n" + numerical)
        assert cell(check(path, folder), "osc").floor == floor


def test_a_run_that_is_broken_as_a_whole_is_given_up_and_says_so(tmp_path):
    """Slice a lies exactly at its limit and is never decided; the whole is far beyond its own."""
    far, near = kit.moved(kit.BASE, 0.3), kit.moved(kit.BASE, 0.1)
    more = "  - {id: each, metric: tv, aggregate: mean, at_most: 0.1, slices: [early]}"
    slices = "slices: [{name: early, match: {context.position: {lt: 1}}}]"
    path, _ = kit.write(
        tmp_path,
        q={"": far, "a": near},
        prompts=("a",),
        slices=slices,
        more=more,
        limit=0.15,
        first=32,
        last=640,
    )

    verdict = check(path, tmp_path)

    assert verdict.outcome == "violated"
    assert any(c.open and c.enforced for c in verdict.cells)
    assert verdict.groups == 64  # a tenth of its budget
    assert verdict.circumstances.stopped == "broken"
    assert "stopped early: broken as a whole" in str(verdict)
    assert "stopped early: broken as a whole" in FORMATS["html"](verdict)


def test_a_run_directory_of_another_contract_is_told_in_a_few_words(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.5)
    sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    tail = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.5}"
    kit.write(tmp_path, limit=0.4, more=tail)
    with pytest.raises(sv.MeasurementError) as caught:
        sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    told = str(caught.value)
    assert "statistical.tv.at_most: 0.5 -> 0.4; statistical.tail: nothing -> {" in told
    assert len(told) < 600 and "…" in told


@pytest.mark.parametrize(
    ("schema", "found", "hint"),
    [
        (7, "schema 7", "upgrade it: pip install --upgrade servanda"),
        (None, "no schema", "move the run directory away and measure again"),
    ],
)
def test_a_run_directory_of_another_schema_is_refused(tmp_path, schema, found, hint):
    path, _ = kit.write(tmp_path)
    check(path, tmp_path)
    (plan,) = tmp_path.glob("**/attempt-1/plan.json")
    data = json.loads(plan.read_text())
    assert data["schema"] == 1
    plan.write_text(json.dumps({**data, "schema": schema}))
    with pytest.raises(sv.MeasurementError) as caught:
        check(path, tmp_path)
    assert str(caught.value) == (
        f"{plan} has {found}, and this version of Servanda reads schema 1\n  hint: {hint}"
    )
