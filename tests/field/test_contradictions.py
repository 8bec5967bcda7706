# The law that no two statements about a dump exclude each other: it can fail, and dumps keep it.

from dataclasses import replace

import pytest
from benchmarks.contradictions import LAW, contradictions

from servanda.judgement.breakdown import Advice, Estimate, SliceAdvice
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from tests.field.more_unseen_causes import FOUND as MORE
from tests.field.unseen_causes import FOUND
from tests.report import made

IN_STEP = (SliceAdvice("step 3", 0.9, 0.1, Estimate(0.002)),)
BESIDE = (SliceAdvice("{name: found-1}", 0.9, 0.1, Estimate(0.2, 0.1, 0.3)),)
THERE = "a place; 90 % of the gap above noise is there"
WRONG = {  # a verdict that states both, in the order of the pairs
    "alike": made.broken(advice=Advice("numerics", "x; alike at equal probability: y")),
    "grows": made.broken(advice=Advice("stale_weights", "it grows", IN_STEP)),
    "check": made.verdict("error", advice=Advice("one_engine", "replica r1: its weights")),
    "sides": made.broken(advice=Advice("one_engine", "rank 3: its weights")),
    "nothing": made.verdict("holds", advice=Advice("numerics", "x")),
    "outside": made.broken(advice=Advice("beginning", THERE, BESIDE)),
}
CASES = {case.name: case for case in (*FOUND, *MORE)}


@pytest.mark.parametrize(("pair", "name"), [*zip(LAW, WRONG, strict=True)])
def test_each_pair_can_be_found(pair, name):
    assert contradictions(WRONG[name]) == [pair]
    assert contradictions(replace(WRONG[name], advice=None)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["replica_on_other_cards", "restarted_with_another_cache", "far_off_policy", "calm_game"],
)
def test_an_answer_states_nothing_that_excludes_it(name, tmp_path):
    CASES[name].make(tmp_path, 1)
    verdict = judge_dump(DumpOptions(tmp_path)).verdict
    assert contradictions(verdict) == []
    assert (verdict.advice.name if verdict.advice else "") in (CASES[name].causes or {""})
