# Promises of the bound chain, judged from sampled tokens, against enumeration of the tables.

import math

import numpy as np
import pytest

from servanda.contract.model import Clause
from servanda.judgement.clauses.base import Cell, View
from servanda.judgement.clauses.chain_metrics import CHAIN, between
from servanda.judgement.clauses.gradient import SupportMass, WeightGap
from servanda.judgement.clauses.statistical import ALWAYS
from servanda.judgement.slices.rules import Cut
from servanda.report.explain.contract import explain_contract
from servanda.runner import run
from servanda.runner.load import compile, load
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.bounds.theorem import THEOREMS
from servanda.theory.stats.interval import units_at_best
from servanda.traces.trace import Trace, TracePair
from tests import kit

Q = {"": kit.moved(kit.BASE, 0.06)}
# drift that grows along an answer, so that the losses weigh it otherwise
LATE = {"": kit.BASE, "b": kit.moved(kit.BASE, 0.1), "c": kit.moved(kit.BASE, 0.1)}
DECLARED = "reward: {range: [-1, 1]}\ngradient: {weighting: {tis: 1.1}}"
PROMPTS = ((0,), (1,), (2,))
WIDTH = 4
LOSSES = ("token_mean", "sequence_sum", "sequence_mean")


def judged(tmp_path, metric, limit, claim, *, keys="", declared=DECLARED, q=Q, **more):
    clause = f"  - {{id: c, metric: {metric}, at_most: {limit}, slices: all{keys}}}"
    path, pair = kit.write(
        tmp_path, q=q, limit=0.3, more=clause, slices=declared, width=WIDTH, claim=claim, **more
    )
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (cell,) = (c for c in verdict.cells if c.clause == "c")
    return cell, pair


def gradient(loss, weighting="naive", more=""):
    return f"gradient: {{loss: {loss}, weighting: {weighting}{more}}}"


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_reward_drift_is_the_range_times_the_variation_of_whole_answers(tmp_path, claim):
    cell, pair = judged(tmp_path, "reward_drift", 0.5, claim)
    truth = 2 * np.mean([pair.sequence_tv(prompt, WIDTH) for prompt in PROMPTS])
    assert cell.outcome == "holds"
    assert cell.kind == "certificate"
    assert cell.interval[0] < truth < cell.interval[1]
    assert "reward_range" in cell.assumptions
    assert ("independent" in cell.assumptions) == (claim == "population")
    assert cell.units == ("prompt groups" if claim == "population" else "sequences")


def test_reward_drift_beyond_its_limit_is_violated(tmp_path):
    cell, pair = judged(tmp_path, "reward_drift", 0.1, "population")
    assert 2 * pair.sequence_tv(PROMPTS[0], WIDTH) > 0.1
    assert cell.outcome == "violated"


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_the_weight_gap_is_what_the_declared_weighting_leaves(tmp_path, claim):
    cell, pair = judged(tmp_path, "weight_gap", 0.3, claim)
    truth = np.mean([pair.weight_gap(p, WIDTH, PSI["tis"](1.1).weight) for p in PROMPTS])
    assert truth > 0
    assert cell.outcome == "holds"
    assert cell.interval[0] < truth < cell.interval[1]


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weighting", ["naive", "{tis: 1.2}"])
def test_the_gap_is_added_up_as_the_loss_adds_up_tokens(tmp_path, claim, loss, weighting):
    psi = PSI["naive"]() if weighting == "naive" else PSI["tis"](1.2)
    cell, pair = judged(
        tmp_path, "weight_gap", 0.9, claim, declared=gradient(loss, weighting), q=LATE, first=600
    )
    truth = pair.by_loss(PROMPTS, WIDTH, lambda c: pair.token_gap(c, psi.weight), loss)
    assert truth > 0.02
    assert cell.kind == "certificate"
    assert cell.interval[0] < truth < cell.interval[1]
    assert cell.value == pytest.approx(truth, rel=0.2)
    by_answer = loss != "token_mean"
    assert cell.unit == ("per answer" if by_answer else "")
    if claim == "realised":
        assert cell.units == ("sequences" if by_answer else "tokens")


def test_the_three_losses_read_three_numbers():
    """Else the test above could not tell them apart."""
    from servanda.engines.table import Table
    from tests.table_pair import TablePair

    rows = ({"": kit.BASE}, LATE)
    pair = TablePair(*(Table(tuple(kit.TOKENS), 4, 1, r) for r in rows))
    weigh = PSI["naive"]().weight
    mean, total, harmonic = (
        pair.by_loss(PROMPTS, WIDTH, lambda c: pair.token_gap(c, weigh), loss) for loss in LOSSES
    )
    assert mean < 0.7 * harmonic < 0.5 * total


@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_bias_is_the_gap_times_what_is_declared(tmp_path, claim, loss):
    declared = gradient(loss, more=", advantage: {group_size: 8}, score_norm: logit_space")
    cell, pair = judged(tmp_path, "policy_gradient_bias", 3.0, claim, declared=declared, q=LATE)
    weigh = PSI["naive"]().weight
    gap = pair.by_loss(PROMPTS, WIDTH, lambda c: pair.token_gap(c, weigh), loss)
    truth = 7 / math.sqrt(8) * math.sqrt(2) * gap
    assert cell.outcome == "holds"
    assert cell.kind == "conditional bound"
    assert cell.interval[0] < truth < cell.interval[1]
    assert {"advantage", "score_norm", "token_level"} <= {*cell.assumptions}
    assert ("constant_divisor" in cell.assumptions) == (loss != "sequence_mean")


def test_a_bias_beyond_its_limit_is_violated(tmp_path):
    declared = gradient("sequence_mean", more=", advantage: 2.0, score_norm: 1.0")
    cell, _ = judged(tmp_path, "policy_gradient_bias", 0.1, "population", declared=declared)
    assert cell.outcome == "violated"


@pytest.mark.parametrize("loss", LOSSES)
def test_the_sentence_says_of_which_loss_and_that_it_is_of_the_token_level(tmp_path, loss):
    declared = gradient(loss, more=", advantage: 2.0, score_norm: 1.0")
    clause = "  - {id: c, metric: policy_gradient_bias, at_most: 0.5, slices: all}"
    path, _ = kit.write(tmp_path, more=clause, slices=declared, width=WIDTH)
    text = " ".join(explain_contract(compile(load(path))).split())
    assert f"(loss: {loss})" in text
    assert "The largest bias of the token-level policy gradient" in text
    assert "it does not bound the gradient of the expected reward" in text
    assert ("over the answers that" in text) == (loss != "token_mean")


def test_the_report_says_what_a_conditional_bound_rests_on(tmp_path):
    declared = gradient("token_mean", more=", advantage: 2.0, score_norm: 1.0")
    clause = "  - {id: c, metric: policy_gradient_bias, at_most: 0.5, slices: all}"
    path, _ = kit.write(tmp_path, more=clause, slices=declared, width=WIDTH)
    text = str(run.check(path, run_dir=tmp_path / "run", open=run.in_process))
    assert (
        "c: a conditional bound, if the advantage of a token is at most the declared one; " in text
    )
    assert "a bias of the token-level surrogate, not of the gradient of the expected reward" in text


@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean"])
def test_tokens_that_are_missing_count_against_both_answers(tmp_path, claim, loss):
    lost = ", fault: {lost_sequences: 0.3}"
    cell, pair = judged(
        tmp_path, "weight_gap", 0.6, claim, declared=gradient(loss), infer=lost, last=400
    )
    weigh = PSI["naive"]().weight
    truth = pair.by_loss(PROMPTS, WIDTH, lambda c: pair.token_gap(c, weigh), loss)
    assert cell.missing > 0
    assert cell.outcome == "inconclusive"
    assert cell.interval[0] < truth < cell.interval[1]


def used(pair, clip_range, beyond):
    """The share of tokens whose ratio uses more than so much of the clip range."""
    low, high = clip_range

    def share(context):
        p_V, q_V = pair.rows(context)
        log_V = np.log(p_V) - np.log(q_V)
        used_V = np.where(log_V > 0, log_V / math.log1p(high), log_V / math.log1p(-low))
        return math.fsum(q_V[used_V > beyond])

    return pair.by_loss(PROMPTS, WIDTH, share)


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_the_ratio_budget_is_the_share_of_the_clip_range_that_the_gap_uses(tmp_path, claim):
    declared = "gradient: {clip_range: [0.2, 0.28], ratio: bypass}"
    cell, pair = judged(
        tmp_path, "ratio_budget", 0.8, claim, keys=", aggregate: p50", declared=declared
    )
    # 0.35 -> 0.29 of token a uses 0.76 of the upper side, 0.25 -> 0.31 of b 0.96 of the lower
    truth = used(pair, (0.2, 0.28), 0.8)
    assert truth == pytest.approx(0.31)
    assert cell.kind == "certificate"
    assert "one_ratio" in cell.assumptions
    assert cell.outcome == "holds"
    assert cell.interval[0] < truth < cell.interval[1]


def test_the_sides_of_a_clip_range_are_two(tmp_path):
    """Of the same ratios, more is used where the range is narrower on their side."""
    declared = "gradient: {clip_range: [0.28, 0.1], ratio: bypass}"
    cell, pair = judged(
        tmp_path, "ratio_budget", 0.9, "realised", keys=", aggregate: p75", declared=declared
    )
    assert used(pair, (0.28, 0.1), 0.9) == pytest.approx(0.29)  # now it is token a
    assert cell.outcome == "violated"


def test_the_mean_of_a_ratio_budget_is_certified_where_it_is_clipped(tmp_path):
    declared = "gradient: {clip_range: [0.2, 0.28], ratio: bypass}"
    keys = ", aggregate: mean, clip: 1"
    cell, pair = judged(tmp_path, "ratio_budget", 0.7, "population", keys=keys, declared=declared)
    p_V, q_V = pair.rows((0,))
    log_V = np.log(p_V / q_V)
    used_V = np.where(log_V > 0, log_V / math.log(1.28), log_V / math.log(0.8))
    truth = math.fsum(q_V * np.minimum(used_V, 1))
    assert cell.outcome == "holds"
    assert cell.interval[0] < truth < cell.interval[1]


# infer never draws d, and draws c ten times too rarely
HOLE = {"": [0.45, 0.43, 0.02, 0.0, 0.1]}


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("clip", [None, 2.0, 1.0])
def test_support_mass_holds_the_mass_that_infer_cannot_draw(tmp_path, claim, clip):
    keys = "" if clip is None else f", clip: {clip:g}"
    cell, pair = judged(tmp_path, "support_mass", 0.5, claim, keys=keys, q=HOLE, declared="")

    def missing(context):
        p_V, q_V = pair.rows(context)
        return math.fsum(np.maximum(p_V - (clip or 10.0) * q_V, 0.0))

    truth = pair.by_loss(PROMPTS, WIDTH, missing)
    assert truth >= kit.BASE[3]
    assert cell.outcome == "holds"
    assert cell.kind == "certificate"
    assert cell.interval[0] < truth < cell.interval[1]
    if clip == 1.0:
        assert truth == pytest.approx(pair.mean_tv(PROMPTS, WIDTH))


@pytest.mark.slow
def test_missing_support_beyond_its_limit_is_violated(tmp_path):
    cell, _ = judged(tmp_path, "support_mass", 0.05, "population", q=HOLE, declared="")
    assert cell.outcome == "violated"


def test_on_slices_of_contexts_the_gap_of_tokens_is_judged_too(tmp_path):
    slices = "slices: [{name: depth, split: context.position, at: [1]}]\n" + gradient("token_mean")
    clause = "  - {id: c, metric: weight_gap, at_most: 0.5}"
    path, _ = kit.write(tmp_path, q=Q, more=clause, slices=slices, width=WIDTH, limit=0.3)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    assert len({c.slice for c in verdict.cells if c.clause == "c"}) == 3


def test_a_loss_by_answers_speaks_of_slices_of_requests_unless_told_otherwise(tmp_path):
    slices = "slices: [{name: depth, split: context.position, at: [1]}]\n"
    clause = "  - {id: c, metric: weight_gap, at_most: 0.5}"
    path, _ = kit.write(
        tmp_path, more=clause, slices=slices + gradient("sequence_mean"), width=WIDTH
    )
    cells = compile(load(path)).cells
    assert {cell.cut.name for cell in cells if cell.clause.id == "c"} == {"all"}


@pytest.mark.parametrize("metric", ["weight_gap", "policy_gradient_bias", "support_mass"])
def test_a_clause_is_what_its_theorem_is(metric):
    theorem, clause = THEOREMS.get(metric) or THEOREMS["missing_mass"], CHAIN[metric]
    assert clause.standing == theorem.standing
    assert {*theorem.assumes} - {*ALWAYS} <= {*clause.assumes}


def test_the_needs_that_are_explained_are_those_of_a_metric_below_0(tmp_path):
    """A weight cut at 10 is 0.9 of the way up where the kernels agree, and not at the bottom."""
    clause = "  - {id: c, metric: support_mass, at_most: 0.05, slices: all}"
    path, _ = kit.write(tmp_path, more=clause, width=WIDTH)
    plan = compile(load(path))
    (cell,) = (cell for cell in plan.cells if cell.clause.id == "c")
    feed = cell.kind.feed
    needed = units_at_best(feed.limit, plan.alpha, feed.best)
    assert f" {needed:,} " in explain_contract(plan)


@pytest.mark.parametrize(
    "kind",
    [
        WeightGap(between(0.02, PSI["tis"](2.0).span), PSI["tis"](2.0)),
        SupportMass(between(0.02, (-9.0, 1.0))),
    ],
)
def test_the_floor_of_a_signed_gap_is_not_made_of_its_scatter(kind):
    """Log ratios that scatter within the cap leave nothing uncorrected, in any sample."""
    log_ratio_N = np.random.default_rng(5).normal(0.0, 0.1, 500)
    kernel = {"sequence_S": np.arange(1), "length_S": np.array([500]), "lost_S": np.zeros(1, bool)}
    kernel |= {"prompt_tokens_S": np.ones(1), "token_N": np.zeros(500)}
    infer, train = (Trace(**kernel, columns={"logp": x}) for x in (np.zeros(500), log_ratio_N))
    groups = {"group_N": np.zeros(500, int), "group_S": np.zeros(1, int), "launched": 1}
    view = View(TracePair(infer, train), {}, **groups, width=500, itself=True)
    cut = Cut("all")
    clause = Clause.model_validate({"id": "c", "metric": "weight_gap", "at_most": 0.02})
    cell = Cell(clause, "statistical", (), cut, "realised", 500, kind)
    assert kind.level([kind.noise(cell, view)]) == pytest.approx(0.0, abs=1e-12)
    assert kind.feed.red_line(kind.floor(cell, [(kind.noise(cell, view),)])) == kind.feed.limit
