# What a number format costs: distances against exact ones, the rule's answers, and real kernels.

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import servanda as sv
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Clause
from servanda.engines import engine_names
from servanda.judgement.clauses.base import FORMAT, Cell, Interim
from servanda.judgement.clauses.format_cost import (
    FormatCertificate,
    FormatGrown,
    FormatKernel,
    format_kernel,
)
from servanda.judgement.clauses.statistical import Feed
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import _after_preconditions, unsound
from servanda.runner import run
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.mean_ratio import MeanRatio, ratios
from tests import kit
from tests.report import made

LIMIT, TIMES = 0.01, 1.25
CLAUSE = Clause.model_validate(
    {"id": "whole", "metric": "tv", "aggregate": "mean", "at_most": LIMIT, "times_format": TIMES}
)


def certificate(whole=False):
    return FormatCertificate(Feed(LIMIT), TIMES, "bfloat16", whole)


def laws(rng, size=12):
    """A reference law, and three that rounding moved from it."""
    logits = rng.normal(0, 2, size)
    laws = [logits, *(logits + rng.normal(0, 0.05, size) for _ in range(3))]
    return [np.exp(law) / np.exp(law).sum() for law in laws]


def tv(p, q):
    return np.abs(p - q).sum() / 2


@pytest.mark.parametrize("whole", [False, True], ids=["two formats", "one format"])
def test_the_terms_have_the_total_variations_as_their_means(whole):
    """Enumerated over the vocabulary: each token at its probability under infer."""
    train, infer, other, _ = laws(np.random.default_rng(3))
    pair = SimpleNamespace(
        train=SimpleNamespace(columns={"logp": np.log(train)}),
        infer=SimpleNamespace(columns={"logp": np.log(infer)}),
    )
    scored = SimpleNamespace(train=SimpleNamespace(columns={"logp": np.log(other)}))
    usable_N = np.ones(len(train), dtype=bool)
    peer = SimpleNamespace(pair=scored, usable_N=usable_N)
    view = SimpleNamespace(pair=pair, usable_N=usable_N, peers={FORMAT: peer})
    x_N, y_N = certificate(whole)._distances(view)
    nearer, usual = (other, train) if whole else (train, other)
    assert infer @ x_N == pytest.approx(tv(nearer, infer), abs=1e-12)
    assert infer @ y_N == pytest.approx(tv(nearer, usual), abs=1e-12)
    lost = SimpleNamespace(pair=scored, usable_N=~usable_N)
    view.peers = {FORMAT: lost}
    assert all(np.isnan(v).all() for v in certificate(whole)._distances(view))


def rounds(mean, ratio, *, n=12, size=512, claim="realised", seed=1):
    """Closed rounds of tokens: y of this mean and x of `ratio` times it, as rounding makes them."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        y, x = (np.maximum(rng.normal(0, mean * k / 0.399, size), 0) for k in (1, ratio))
        if claim == "realised":
            process, pairs = LogMoment.of(x), MeanRatio.of_units(x, y, ratios(TIMES))
        else:
            x_G, y_G = x.reshape(-1, 8).sum(axis=1), y.reshape(-1, 8).sum(axis=1)
            full, none = np.full(len(x_G), 8), np.zeros(len(x_G), dtype=int)
            process = GroupRatio(8, len(x_G), x_G, full, none)
            pairs = MeanRatio.of_units(x_G / 8, y_G / 8, ratios(TIMES))
        growth = process.below_growth(LIMIT), process.above_growth(LIMIT)
        found.append(FormatGrown(process, *growth, pairs))
    return found


def judge(measured, claim="realised", floor=None, whole=False, alpha=0.05):
    kind = certificate(whole)
    cell = Cell(CLAUSE, "statistical", (), Cut("all"), claim, 8, kind, "workload")
    return kind.judge(cell, measured, floor, Interim(alpha, 4, 0, len(measured) * 64))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("claim, many", [("realised", 1), ("population", 80)])
@pytest.mark.parametrize(
    "mean, ratio, outcome, reason",
    [
        (0.018, 1.0, "holds", "format cost"),  # beyond the number, as far as the format
        (0.018, 1.6, "violated", ""),  # a fault beside the format
        (0.004, 1.0, "holds", ""),  # within the number
        (0.002, 3.0, "holds", ""),  # ... however small the format's cost
        (0.018, 1.25, "inconclusive", ""),
    ],
)
def test_a_cell_holds_within_the_number_or_within_the_cost(
    mean, ratio, outcome, reason, claim, many
):
    found = judge(rounds(mean, ratio, n=12 * many, claim=claim), claim)
    assert (found.outcome, found.reason) == (outcome, reason)
    if outcome != "inconclusive" and mean * ratio > LIMIT:
        assert found.limit == pytest.approx(TIMES * mean, rel=0.1)
        assert (found.value > found.limit) == (outcome == "violated")
        assert f"limit {TIMES}" in found.note
        assert ("this is what bfloat16 costs" in found.note) == (outcome == "holds")


def test_the_noise_floor_is_no_licence_where_the_cost_is_measured():
    """Twice the floor is beyond the mean; the fault is red all the same."""
    assert judge(rounds(0.018, 1.6), floor=0.02).outcome == "violated"
    plain = FormatCertificate(Feed(LIMIT), TIMES, "bfloat16")
    without = [
        FormatGrown(r.process, r.below, r.above, MeanRatio(ratios(TIMES)))
        for r in rounds(0.018, 1.6)
    ]
    found = judge(without, floor=0.02)  # a run whose further kernel scored nothing
    assert found.reason == "within noise" and plain.certificate is plain


def test_of_one_format_the_limit_allows_both_distances_from_float32():
    found = judge(rounds(0.018, 1.0), whole=True)
    assert found.limit == pytest.approx((1 + TIMES) * 0.018, rel=0.1)
    assert "infer is from float32 1.0" in found.note


@pytest.mark.parametrize(
    "mean, ratio, said", [(0.0018, 40.0, r"(39|4\d) \["), (0.0, 1.0, r"\? \[0.00, ∞\] times")]
)
def test_a_ratio_has_at_most_three_digits_and_may_be_unknown(mean, ratio, said):
    assert re.search(f": infer is from train {said}", judge(rounds(mean, ratio)).rounding)


def test_where_a_check_fails_no_cell_agrees_to_anything():
    found = judge(rounds(0.018, 1.0))
    assert found.rounding.startswith("agrees to bfloat16 rounding: ")
    kind = SimpleNamespace(source="", invalidates=lambda of: isinstance(of, FormatCertificate))
    check = SimpleNamespace(kind=kind, workload="workload")
    cell = SimpleNamespace(kind=certificate(False), workload="workload")
    failed = replace(found, section="observability", outcome="violated", rounding="")
    kept, _ = _after_preconditions((cell, check), [found, failed])
    assert (kept.outcome, kept.rounding) == ("inconclusive", "")
    assert unsound(made.FORMAT, "copied").cells[0].rounding == ""


@pytest.mark.slow
def test_a_run_at_the_limit_is_seldom_decided():
    """At the ratio 1.25 exactly, either answer is wrong with probability alpha."""
    answers = [judge(rounds(0.018, 1.25, seed=s), alpha=0.1).outcome for s in range(60)]
    assert answers.count("holds") <= 6 and answers.count("violated") <= 6


def kernels(train, infer):
    return (parse_kernel(text, engines=engine_names(), name="A") for text in (train, infer))


@pytest.mark.parametrize(
    "train, infer, found",
    [
        ("m@float32", "m@bfloat16,attention=sdpa", ("bfloat16", False, "bfloat16")),
        ("m@bfloat16", "m@float32", ("float32", False, "bfloat16")),
        ("m@float16", "m@bfloat16", ("bfloat16", False, "bfloat16")),
        ("m@bfloat16", "m@bfloat16,attention=sdpa", ("float32", True, "bfloat16")),
        ("m@float16", "m@float16", ("float32", True, "float16")),
        ("m@float32", "m@float32", "16-bit"),
        ("m@float32", "m@bfloat16+int8_weight_only", "quantised"),
    ],
)
def test_the_further_kernel_is_train_in_the_other_format(train, infer, found):
    other = format_kernel(*kernels(f"transformers:{train}", f"transformers:{infer}"))
    if isinstance(found, str):
        assert found in other
        return
    assert isinstance(other, FormatKernel)
    assert (other.kernel.dtype, other.whole, other.format) == found
    assert other.kernel.attention == "eager"


def test_a_server_declares_no_format():
    assert "not declared" in format_kernel(*kernels("transformers:m@float32", "http://h:1"))
    found = format_kernel(*kernels("http://h:1", "transformers:m@bfloat16"))
    assert "no kernel of engine" in found


REPO = Path(__file__).parents[3]
CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: cost}}
kernels:
  train: {{engine: transformers, model: {model}, dtype: {a}, path: decode}}
  infer: {{engine: transformers, model: {model}, dtype: {b}, attention: sdpa{fault}}}
workload: {{prompts: {prompts}, sampling: {{max_new_tokens: 32}}}}
claim: realised
statistical:
  - {{id: whole, metric: tv, aggregate: mean, at_most: 0.001, times_format: 2, slices: [all]}}
promotion: {{offline: {{prompt_groups: [64, 640]}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "a, b, fault, outcome",
    [
        ("float32", "bfloat16", "", "holds"),
        ("bfloat16", "bfloat16", "", "holds"),
        ("float32", "bfloat16", ", fault: {wrong_rope_base: 1.3}", "violated"),
    ],
)
def test_real_kernels(tmp_path, a, b, fault, outcome):
    model, prompts = REPO / "models/tiny-lm", REPO / "data/prompts.jsonl"
    path = tmp_path / "cost.kernelcontract.yaml"
    path.write_text(CONTRACT.format(model=model, prompts=prompts, a=a, b=b, fault=fault))
    verdict = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (cell,) = (c for c in verdict.cells if c.clause == "whole")
    assert cell.outcome == outcome, cell.note
    assert cell.value > 0.001 and "limit 2" in cell.note
    again = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)  # from its files
    assert again.cells == verdict.cells


@pytest.mark.parametrize(
    "clause",
    [
        "{id: a, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.1, times_format: 1.5}",
        "{id: a, metric: tv, aggregate: p99, at_most: 0.1, times_format: 1.5}",
        "{id: a, metric: tv, aggregate: mean, times_format: 1.5, "
        "at_most: {times: 3, of: self_noise}}",
    ],
)
def test_elsewhere_the_key_is_refused_with_the_place(clause):
    text = CONTRACT.format(model="m", prompts="p", a="float32", b="bfloat16", fault="")
    line = next(line for line in text.splitlines() if "id: whole" in line)
    with pytest.raises(sv.ContractError, match="times_format is for the mean of tv") as error:
        kit.parse(text.replace(line, f"  - {clause}"), "c.yaml", engines=engine_names())
    assert "c.yaml:10:" in str(error.value)
