# A promotion is wrong no more often than it promises: seeded legs of kernels whose truth is known.

from dataclasses import replace

import pytest
from scipy.stats import binom

from servanda.contract.stages import course_of
from servanda.promotion.advance import advance, begin
from servanda.promotion.api import leg_finding
from servanda.promotion.run.promoter import evaluate_leg
from servanda.runner.run import in_process, load
from tests import kit, serving

LIMIT = 0.1
ALPHA = 0.2 / 2  # what a first attempt may spend: the other half is kept for later ones
ROWS = [0.3, 0.3, 0.2, 0.1, 0.1]
STAGES = """\
promotion:
  offline: {prompt_groups: [16, 400]}
  shadow: {prompt_groups: [16, 400], share: 0.25}
  canary: {steps: [0.1, 0.5], prompt_groups: [16, 400]}
  full: {prompt_groups: [16, 400], sample: 0.5}
stable: {engine: table, model: p.json}
"""
RARE = 1e-4  # chance of a count beyond the bound, were the promise just kept
RUNS, COURSES = 80, 20


def most(runs):
    """Wrong answers beyond which a promise of ALPHA is not kept."""
    return binom.isf(RARE, runs, ALPHA)


def contract_of(folder, tv, seed):
    """A contract of two kernels whose distance is exactly tv at every token."""
    rows = {"p": {"": ROWS}, "q": {"": kit.moved(ROWS, tv)}}
    path, _ = kit.write(
        folder, **rows, seed=seed, limit=LIMIT, confidence=0.8, claim="realised", round=16
    )
    text = path.read_text()
    path.write_text(text[: text.index("promotion:")] + STAGES)
    return path


def looked_at(folder, tv, seed, legs):
    """(leg, state before, state after) of a course that comes to each of these legs.

    A look judges after every round and ends when all is decided: anyone who looked more often
    would decide at the same round.
    """
    path = contract_of(folder, tv, seed)
    contract = load(path)
    course, served = course_of(contract), folder / "served.jsonl"
    served.touch()
    for i, leg in enumerate(course):
        if leg.name not in legs:
            continue
        if leg.live:
            draw = 100 * seed + i
            serving.log(folder, serving.rows(path, leg.name, leg.last, seed=draw))
        at = {"attempt": 1, "run": serving.RUN, "served": [served], "now": 1e4}
        looked = evaluate_leg(contract, leg, folder / "run", **at, open=in_process)
        state, _ = begin(serving.RUN, looked.key, course, now=1e4)
        state = replace(state, leg=i)
        finding = replace(leg_finding(contract, leg, looked.verdict), key=looked.key)
        after, _ = advance(course, state, finding, now=1e4)
        yield leg, state, after


@pytest.mark.slow
@pytest.mark.parametrize("beyond", [1.0, 1.05])
def test_a_build_at_its_limit_or_beyond_seldom_leaves_the_shadow(tmp_path, beyond):
    forward = 0
    for seed in range(RUNS):
        ((_, before, after),) = looked_at(
            tmp_path / str(seed), beyond * LIMIT, seed + 1, ("shadow",)
        )
        forward += after.leg > before.leg

    print(f"{forward} of {RUNS} went forward at {beyond:g} of the limit")
    assert forward <= most(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_build_that_conforms_is_seldom_rolled_back_on_its_whole_course(tmp_path, part):
    """Every leg spends a part of what all may; at its limit a build still keeps its promise."""
    names, back, through = ("offline", "shadow", "canary-1", "canary-2", "full-1"), 0, 0
    for seed in range(COURSES):
        legs = [*looked_at(tmp_path / str(seed), part * LIMIT, seed + 1, names)]
        back += any(after.status == "rolled_back" for _, _, after in legs)
        through += all(a.leg > b.leg or a.status == "completed" for _, b, a in legs)

    print(f"{back} of {COURSES} were rolled back, {through} went through, at {part:g} of the limit")
    assert back <= most(COURSES)
    # and it is of use: who is well within the limit goes through
    if part < 1:
        assert through > 0.8 * COURSES
