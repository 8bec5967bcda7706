# The first screen: what the ladder draws, and what the cards say.

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.judgement.breakdown import Advice, Estimate, SliceAdvice
from servanda.judgement.token_profile import EDGES, Portrait
from servanda.report.html import bin_label, curves, fingerprints, matrix, view
from servanda.report.html_cards import cards, least_seen
from servanda.report.html_pictures import Scale, ladder, ratios
from tests.report import made

RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
positive = st.floats(1e-12, 1e6)


def number_of(label):
    match = re.fullmatch("(?:([0-9.]+)×)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", label)
    if match is None:
        return float(label.replace(",", ""))
    return float(match[1] or 1) * 10.0 ** int(match[2].translate(RAISED))


def lines(verdict, card):
    return " ".join(line.text for line in cards(verdict)[card].lines)


@given(st.lists(positive, min_size=1, max_size=8))
def test_an_axis_keeps_the_order_and_shows_the_largest(values):
    scale = Scale.of(values)
    places = [scale.at(v) for v in sorted(values)]
    assert places == sorted(places) and all(0 <= p < 100 for p in places)
    assert scale.at(0) == 0 and scale.at(math.inf) == 100
    assert all(abs(scale.at(number_of(t.label)) - t.at) < 1 for t in scale.ticks())


def test_an_axis_is_logarithmic():
    scale = Scale(0.01, 1.0)
    assert (scale.at(0.1), scale.at(0.01), scale.at(2.0)) == (50.0, 0.0, 100.0)


@pytest.mark.parametrize("values", [[], [None], [0.0], [math.inf], [-1.0]])
def test_an_axis_of_nothing_is_still_one(values):
    scale = Scale.of(values)
    assert 0 < scale.low < scale.high < math.inf


def test_the_ladder_is_worst_first_and_the_whole_last():
    drawn = ladder(made.VERDICTS["violated"])
    assert [row.name for row in drawn.rows] == ["long", "domain=json", "whole traffic"]
    assert [row.glyph for row in drawn.rows] == ["✗", "✓", "✓"]
    assert drawn.what == "mean tv"
    bad = drawn.rows[0].track
    assert bad.floor < bad.limit < bad.low < bad.dot < bad.high


def test_every_row_has_its_own_limit():
    assert [row.limit for row in ladder(made.VERDICTS["violated"]).rows] == [
        *("≤ 0.1", "≤ 0.03", "≤ 0.03")
    ]


def test_slices_are_grouped_by_their_split_for_only_then_shares_add_up():
    """Three partitions in one list have three times as many tokens as there are."""
    names = ("long", "depth<8", "domain=a", "depth>=8", "domain=b", "all")
    cells = [made.cell(slice=name, value=0.02 - 0.001 * i) for i, name in enumerate(names)]
    rules = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: x, version: 1.0.0}
kernels:
  train: {engine: external}
  infer: {engine: external}
workload: {source: trainer, sampling: {max_new_tokens: 8}}
slices:
  - {name: long, match: {request.prompt_tokens: {gte: 257}}}
  - {name: depth, split: context.position, at: [8]}
  - {name: domain, split: labels.domain}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.03, slices: all}
"""
    circumstances = replace(made.BARE.circumstances, contract_text=rules)
    found = view(made.verdict(cells=cells, circumstances=circumstances))["ladder"]
    assert [(s.name, [r.name for r in s.rows]) for s in found.splits] == [
        ("", ["long"]),
        ("depth", ["depth<8", "depth>=8"]),
        ("domain", ["domain=a", "domain=b"]),
        ("", ["whole traffic"]),
    ]
    assert found.rows[0].definition == "prompt ≥ 257 tokens"


def test_a_limit_that_is_only_monitored_is_not_drawn_where_one_is_enforced():
    strict = made.cell("violated", clause="warn", limit=0.001, enforced=False)
    (row,) = ladder(made.verdict(cells=[strict, made.cell()])).rows
    assert (row.limit, row.outcome) == ("≤ 0.03", "holds")


def test_the_ladder_draws_the_metric_that_decides():
    tail = {"metric": "abs_log_ratio_nats", "aggregate": "p90", "threshold": 0.03, "limit": 0.1}
    cells = [made.cell(), made.cell("violated", clause="tail", value=0.2, **tail)]
    drawn = ladder(made.verdict("violated", cells))
    assert drawn.what == "share of tokens with abs_log_ratio_nats > 0.03"
    assert drawn.rows[0].value == "20.0 %" and drawn.rows[0].limit == "≤ 10 %"
    assert (
        ladder(made.verdict(cells=[replace(c, outcome="holds") for c in cells])).what == "mean tv"
    )


def test_two_clauses_on_one_slice_are_one_row_and_the_worse_speaks():
    cells = [made.cell(), made.cell("violated", clause="strict", limit=0.005)]
    (row,) = ladder(made.verdict("violated", cells)).rows
    assert row.outcome == "violated"


def test_a_ring_is_there_only_where_stable_was_measured():
    assert not ladder(made.VERDICTS["violated"]).has_ring
    drawn = ladder(made.verdict(cells=[made.cell(stable=0.009), made.cell(slice="b")]))
    assert drawn.has_ring
    assert [row.track.ring is None for row in drawn.rows] == [True, False]


@pytest.mark.parametrize("name", ["no cell", "not judged"])
def test_without_a_number_there_is_no_ladder(name):
    assert ladder(made.VERDICTS[name]) is None


def test_an_interval_around_zero_starts_at_the_left():
    (row,) = ladder(made.VERDICTS["negative"]).rows
    assert row.track.low == 0 < row.track.dot < row.track.high


def test_the_gates_are_titled_by_what_they_say():
    def title(verdict):
        return view(verdict)["gates_title"]

    assert title(made.VERDICTS["violated"]) == "Other projects' thresholds: none would fail"
    assert title(made.VERDICTS["holds"]) == "Other projects' thresholds, on the same tokens"
    loud = made.broken(portraits={"infer": made.portrait(0.5)})
    assert title(loud).startswith("Other projects' thresholds: ")
    assert title(made.VERDICTS["nothing measured"]) == "Other projects' thresholds"
    last = view(made.VERDICTS["violated"])["gates"][-1]
    assert (last.name, last.text) == ("this contract", "long: 0.17, limit 0.1")


def test_the_fairness_of_a_comparison():
    assert "sampled as reported, n 832 tokens" in lines(made.VERDICTS["holds"], 0)
    assert "infer kernel 0.001 (n 10,000 tokens)" in lines(made.VERDICTS["holds"], 0)
    assert "not sampled as reported" in lines(made.VERDICTS["unfaithful"], 0)
    assert "12 sequences lost" in lines(made.VERDICTS["error"], 0)
    declared = replace(made.VERDICTS["holds"], key=replace(made.KEY, grade="declared"))
    assert cards(declared)[0].lines[0].glyph == "!"


def test_the_drift_sits_where_the_search_found_it_or_a_slice_is_red():
    entry = "{name: found-1, match: {request.prompt_tokens: {gte: 256}}}"
    part = SliceAdvice(entry, 0.97, 0.05, Estimate(0.002, 0.001, 0.003))
    found = replace(made.broken("tools"), advice=Advice("positions", "x", (part,)))
    assert lines(found, 1) == (
        f"{entry} 97.0 % of the excess in 5.0 % of the tokens; "
        "mean tv of the others 0.002 [0.001, 0.003]."
    )
    assert lines(made.broken("tools"), 1) == "On tools."
    assert lines(made.verdict("violated"), 1).startswith("Nowhere in particular.")
    assert "no slice was searched for" in lines(made.VERDICTS["holds"], 1)


def test_the_worst_token_has_its_text_only_where_that_is_kept():
    assert "(text is not stored: numbers only)" in lines(made.VERDICTS["violated"], 2)
    worst = replace(made.portrait().worst[0], text=" cat", context_text="the\nblack")
    told = made.verdict(portraits={"infer": replace(made.portrait(), worst=(worst,))})
    assert "“…the black” → “cat”" in lines(told, 2)


def test_what_a_run_would_have_seen_is_its_limit_and_its_width():
    verdict = made.verdict(price_cells=1)
    seen = least_seen(made.cell(), verdict)
    assert seen == pytest.approx(0.03 + 0.01)  # the wider side, at the price of one cell
    # a leg with half of alpha, and 20 cells: log thresholds grow with the square of the width
    wider = math.sqrt(math.log(40 / 0.025) / math.log(1 / 0.025))
    of_leg = least_seen(made.cell(), replace(verdict, price_cells=20, part=0.5))
    assert of_leg == pytest.approx(0.03 + 0.01 * wider)
    assert least_seen(made.cell(floor=0.02), verdict) == pytest.approx(0.04 + 0.01)
    assert least_seen(made.cell(interval=None), verdict) is None


def test_the_matrix_has_every_cell_once():
    verdict = made.VERDICTS["violated"]
    found = matrix(verdict)
    assert found.columns == (("mean tv", "tv-long, tv"),)  # one metric, whatever its clauses
    assert [clause for clause, _, _ in found.single] == [
        "usable_ratio (finite)",
        "sampler_fidelity (fidelity)",
    ]
    boxes = [*(box for _, row in found.rows for box in row), *(e for _, _, e in found.single)]
    anchors = [entry.anchor for box in boxes for entry in box]
    assert len({*anchors}) == len(anchors) == len(verdict.cells)
    assert next(e for box in boxes for e in box if e.outcome == "violated").times == "1.7×"


def test_curves_show_bins_that_were_met_with_their_n_and_noise():
    by_length, by_position = curves(made.VERDICTS["holds"])
    assert [(b.label, b.n, b.value, b.noise) for b in by_length.bins] == [
        ("128–255", "9,000", "0.002", "0.0002"),
        ("256–511", "1,000", "0.1", "0.01"),
    ]
    assert [b.label for b in by_position.bins] == ["2–3"]
    assert curves(made.VERDICTS["nothing measured"]) == ()


def test_a_bin_that_met_no_token_leaves_a_gap_and_not_a_neighbour():
    by = {**made.portrait().by}
    by["prompt_tokens"] = tuple(
        made.sums() if i in (2, 4) else Portrait().total for i in range(len(by["prompt_tokens"]))
    )
    (curve, *_) = curves(made.verdict(portraits={"infer": replace(made.portrait(), by=by)}))
    assert [(b.label, b.n, b.track is None) for b in curve.bins] == [
        *(("32–63", "1,000", False), ("64–127", "0", True), ("128–255", "1,000", False))
    ]


def test_every_bin_of_a_field_has_a_name_of_its_own():
    for name, edges in EDGES.items():
        labels = [bin_label(name, i) for i in range(len(edges) + 1)]
        assert len({*labels}) == len(labels)


def test_log_ratios_are_counted_on_both_sides_and_their_shares_fall():
    found = ratios(made.VERDICTS["holds"])
    assert (found.below, found.above) == ("30", "30")
    for row in found.rows:
        shares = [float(share.split()[0]) for share in row.shares]
        assert shares == sorted(shares, reverse=True)
    assert ratios(made.verdict(portraits={"infer": Portrait()})) is None


def test_fingerprints_differ_row_by_row():
    found = fingerprints(made.VERDICTS["holds"])
    assert found.other == (("dtype", ("float32", "bfloat16")),)
    assert found.same == (("os", ("x", "x")),)
    assert fingerprints(made.BARE) is None


def test_the_small_print_says_what_a_cell_may_spend_and_who_shares_it():
    plain = str(made.VERDICTS["holds"])
    leg = str(replace(made.VERDICTS["holds"], part=0.1, price_cells=11, leg="canary"))
    dump = str(replace(made.VERDICTS["holds"], part=0.5))

    assert (
        "error budget: α = 0.025 for attempt 1, of 1 - confidence = 0.05 for all attempts "
        "together, divided by 2 cells: if the kernels keep a limit, it is called violated with "
        "probability at most 0.013"
    ) in plain
    assert (
        "together; violations at this step may spend 0.1 of it, divided by 11 cells: if the "
        "kernels keep a limit, it is called violated with probability at most 0.00023"
    ) in leg
    guard = made.cell(metric="sampler_fidelity", kind="guard", e_violated=3.0, interval=None)
    tested = replace(made.VERDICTS["holds"], part=0.1, price_cells=11, cells=(guard,))
    assert "(log e-value 3, rejected at 8.39)" in str(tested)  # log(11 / 0.0025)
    assert "together; violations of the whole may spend 0.5 of it, divided by 2 cells" in dump


def test_what_all_kernels_are_called_is_said_once():
    same = replace(made.VERDICTS["holds"], train="hf lm fp32", infer="hf lm bf16 [fault: x]")
    shared, names = view(same)["names"]
    assert shared == "hf lm" and names == [("infer", "bf16 [fault: x]"), ("train", "fp32")]
    alike = replace(same, infer="hf lm fp32")
    assert view(alike)["names"] == ("hf lm", [("infer", "fp32"), ("train", "fp32")])
