# The statistics of a step from counts of bins, held against those of its tokens one by one.

import dataclasses
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.contract.clause import SliceRule
from servanda.contract.identity import EvidenceKey
from servanda.judgement import plan as planning
from servanda.judgement.clauses import token_counts
from servanda.judgement.clauses.guards import Coherent
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.evidence import Round, weigh
from servanda.judgement.schedule import Unit
from servanda.rl.dumps.statistics import DumpStatistics, Measures, StepSummation
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.blocks import paired, taken
from servanda.rl.steps.contract import corpus_of
from servanda.theory.stats.histogram import bin_of
from tests.drawn import examples
from tests.rl.dumps import made

ENVS = ("a", "b")
RULES = (
    SliceRule(name="late", match={"context.position": {"gte": 3}}),
    SliceRule(name="turns", split="context.turn", at=(2,)),
    SliceRule(name="after", match={"context.length": {"gt": 20}, "labels.env": {"in": ["a"]}}),
    SliceRule(name="none", match={"labels.env": {"exists": False}}),
    SliceRule(name="stale", match={"outcome.staleness": {"gte": 1}}),
    SliceRule(
        name="fresh-late", match={"outcome.staleness": {"lt": 1}, "context.position": {"gte": 3}}
    ),
)


def plan():
    _, contract = of_run.contract_of("verl-async", "made", RULES, filtered=True)
    labels = [*((("env", env),) for env in ENVS), ()]
    return planning.make_plan(contract, {of_run.WORKLOAD: corpus_of("made", labels)}, None)


PLAN = plan()
MEASURES = Measures(PLAN)


def rollouts(seed, noise, broken):
    """Sequences of two turns with labels and partly unknown ages, and some odd logprobs."""
    rng = np.random.default_rng(seed)
    r = made.rollouts(
        rng, 1, 6, turns=2, turn_tokens=5, labels={"env": lambda s: ("a", "b", "")[s % 3]}
    )
    n = len(r.token_N)
    train_N = np.minimum(r.logp_infer_N + rng.normal(0, noise, n), 0.0)
    infer_N = r.logp_infer_N.copy()
    for column_N in (train_N, infer_N):
        column_N[rng.random(n) < broken] = rng.choice([np.nan, -np.inf, np.inf])
    stale_N = rng.choice([0.0, 1.0, 2.0, np.nan], n)
    per_token = MappingProxyType({"staleness": stale_N})
    return dataclasses.replace(r, logp_train_N=train_N, logp_infer_N=infer_N, per_token=per_token)


def token_by_token(r):
    pair = paired(r, 0)
    rows = {env: i for i, env in enumerate(("a", "b", ""))}
    corpus = corpus_of("made", [(("env", "a"),), (("env", "b"),), ()])
    plan = dataclasses.replace(PLAN, corpora={of_run.WORKLOAD: corpus})
    groups = {g: i for i, g in enumerate(dict.fromkeys(pair.group_S))}
    each = zip(pair.infer.sequence_S.tolist(), pair.labels["env"], pair.group_S, strict=True)
    units = tuple(Unit(s, rows[env], groups[g]) for s, env, g in each)
    key = EvidenceKey("", "", "external", "external", "", grade="declared")
    return weigh(plan, key, [Round(of_run.WORKLOAD, 0, units, pair)]).rounds[of_run.WORKLOAD, 0]


def half_of_the_bins(cell, r):
    """The largest error of a sum that takes each token in the middle of its bin."""
    pair = paired(r, 0)
    usable_N = pair.usable_N
    train_K, infer_K = (s.columns["logp"][usable_N] for s in (pair.train, pair.infer))
    bin_K = bin_of(train_K - infer_K)
    least_K, most_K = token_counts._ends(cell)
    return float((np.clip(most_K, 0, 1) - np.clip(least_K, 0, 1))[bin_K].sum()) / 2


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-7, 0.01, 1.0]), st.sampled_from([0.0, 0.1]))
def test_counts_say_nothing_that_the_tokens_deny(seed, noise, broken):
    r = rollouts(seed, noise, broken)
    summation = StepSummation(MEASURES, 1, 1)
    for first, end in ((0, 2), (2, 6)):  # in two blocks
        summation.add(taken(r, first, end))
    part, exact = summation.close().weighed, token_by_token(r)

    assert (part.tokens, part.sequences, part.groups) == (
        exact.tokens,
        exact.sequences,
        exact.groups,
    )
    for cell, own, other in zip(PLAN.cells, part.statistics, exact.statistics, strict=True):
        if cell.kind.reads == "responses":
            mine, theirs = own.process, other.process  # of the same tokens, not of bins
            assert (mine.n, mine.total, mine.missing) == (theirs.n, theirs.total, theirs.missing)
        elif cell.kind.reads == "tails":
            told = [
                [(f.size, f.token, f.at, f.train, f.infer) for f in t.worst] for t in (own, other)
            ]
            assert told[0] == told[1]  # their places are those of a dump, or of a round
            assert replace(own, worst=()) == replace(other, worst=())
        elif isinstance(cell.kind, Certificate):
            mine, theirs = own.process, other.process
            assert (mine.n, mine.missing) == (theirs.n, theirs.missing), cell.name
            nearly = 1e-9 * (1 + mine.n)
            assert (own.below <= other.below + nearly).all(), cell.name
            assert (own.above <= other.above + nearly).all(), cell.name
            assert abs(mine.total - theirs.total) <= half_of_the_bins(cell, r) + nearly
        elif isinstance(cell.kind, Coherent):
            assert (own.n, own.missing) == (other.n, other.missing)
            assert own.log_e <= other.log_e + 1e-9
        else:
            assert own == other, cell.name


def test_every_cell_of_a_preset_is_answered_by_counts():
    assert MEASURES.others == []
    names = {cell.cut.name for cell in PLAN.cells}
    assert {"late", "turns<2", "turns>=2", "after", "none", "stale", "fresh-late"} <= names


def test_a_filter_that_begins_late_is_undone_on_all_tokens_of_the_dump():
    """As if nothing had been removed; of three steps the second has removed tokens in one block."""
    blocks, unfiltered, groups = [], [], set()
    for number, cut in ((1, 2), (2, 3), (3, 2)):
        r = dataclasses.replace(rollouts(number, 0.01, 0.1), step=number)
        groups |= {(number, group) for group in r.group_S}
        removed_N = r.mask_N & (number == 2) & (r.sequence_N >= 4)
        per_token = {**r.per_token, "removed": removed_N.astype(float)}
        kept = dataclasses.replace(r, mask_N=r.mask_N & ~removed_N, per_token=per_token)
        for of, whole in ((blocks, kept), (unfiltered, r)):
            of += [taken(whole, 0, cut), taken(whole, cut, 6)]
    found = []
    for of in (blocks, unfiltered):
        statistics = DumpStatistics(PLAN.contract, "made")
        for block in of:
            statistics.add_labels(paired(block, 0))
        for block in of:
            statistics.add(block)
        own, evidence = statistics.evidence()
        found.append((statistics.before_filter(evidence) or evidence).rounds[of_run.WORKLOAD, 0])
    before, plain = found
    assert before.groups == len(groups) and plain.sequences == 18
    for name in ("sequences", "tokens", "groups", "agreement"):
        assert getattr(before, name) == getattr(plain, name)
    for cell, mine, other in zip(own.cells, before.statistics, plain.statistics, strict=True):
        assert cell.kind.reads == "removed" or repr(mine) == repr(other), cell.name
