# The public advance: the last link of the chain, after judge.

from dataclasses import replace
from itertools import pairwise

import pytest

import servanda as sv
from servanda.contract.stages import course_of
from servanda.errors import EvidenceError
from servanda.runner.run import in_process
from tests import kit

STAGES = """\
promotion:
  offline: {prompt_groups: [32, 2000]}
  shadow: {share: 0.25}
  canary: {steps: [0.1, 0.5], approval: required}
  full: {}
stable: {engine: table, model: p.json}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chain")


def judged(folder, **kernels):
    """(contract, plan, verdict) of the offline leg of a build, measured."""
    path, _ = kit.write(folder, **kernels)
    text = path.read_text()
    path.write_text(text[: text.index("promotion:")] + STAGES)
    contract = sv.load(path)
    plan = sv.compile(contract, leg=course_of(contract)[0])
    pairs = sv.measure(plan, folder / "run", open=in_process)
    return contract, plan, sv.judge(plan, sv.weigh(plan, pairs))


@pytest.fixture(scope="module")
def offline(folder):
    return judged(folder / "good")


def on(leg, contract, verdict):
    """A plan of a leg, and what was judged as if it had been judged there."""
    return sv.compile(contract, leg=leg), replace(
        verdict, stage=leg.stage, leg=leg.name, part=leg.part, groups=leg.first, evidence=leg.name
    )


def test_a_promotion_begins_with_its_first_verdict_and_goes_on_with_each(offline):
    contract, plan, verdict = offline

    state, effects = sv.advance(plan, None, verdict, now=1.0)

    assert (state.leg, state.status, state.key) == (1, "running", verdict.key)
    assert state.run.startswith("toy-")
    routes = [e.body["mirror"] for e in effects if e.kind == "route"]
    assert routes == [0.0, 0.25]
    assert len({e.key for e in effects}) == len(effects)
    for leg, following in pairwise(course_of(contract)[1:]):
        assert state.leg == course_of(contract).index(leg)
        plan, found = on(leg, contract, verdict)
        state, _ = sv.advance(plan, state, found, now=2.0)
        if following.stage == "full":
            assert state.status == "awaiting_approval"


def test_it_is_pure(offline):
    _, plan, verdict = offline

    assert sv.advance(plan, None, verdict, now=1.0) == sv.advance(plan, None, verdict, now=1.0)


def test_one_verdict_carries_one_leg(offline):
    """What held offline says nothing of traffic, however often it is handed in."""
    contract, plan, verdict = offline
    state, _ = sv.advance(plan, None, verdict, now=1.0)
    shadow, canary = course_of(contract)[1:3]

    with pytest.raises(EvidenceError) as error:
        sv.advance(plan, state, verdict, now=2.0)
    assert error.value.problems[0].message == (
        f"the plan is for offline, and promotion {state.run} is at shadow"
    )
    with pytest.raises(
        EvidenceError, match=f"the verdict is for offline, and promotion {state.run} is"
    ):
        sv.advance(sv.compile(contract, leg=shadow), state, verdict, now=2.0)
    with pytest.raises(
        EvidenceError, match=f"the plan is for canary-1, and promotion {state.run} is at"
    ):
        sv.advance(sv.compile(contract, leg=canary), state, verdict, now=2.0)


def test_a_check_by_itself_begins_no_promotion(offline):
    """It may spend all of alpha on one violation, and a leg only its part."""
    contract, _, verdict = offline

    with pytest.raises(EvidenceError) as error:
        sv.advance(sv.compile(contract), None, replace(verdict, leg=""), now=1.0)

    assert "the plan is for no step, and promotion toy-" in str(error.value)
    assert "compile(contract, leg=...) plans it" in str(error.value)


def test_a_build_that_breaks_its_contract_is_rolled_back(tmp_path):
    _, plan, verdict = judged(tmp_path, q={"": kit.moved(kit.BASE, 0.2)})

    state, effects = sv.advance(plan, None, verdict, now=1.0)

    assert (state.status, state.why) == ("rolled_back", "tv on all is violated")
    assert effects[-1].body["decided"]["n"] > 0
    assert sv.advance(plan, state, verdict, now=2.0) == (state, ())


def test_a_clock_that_goes_back_is_refused(offline):
    contract, plan, verdict = offline
    state, _ = sv.advance(plan, None, verdict, now=5.0)

    with pytest.raises(
        EvidenceError, match=r"the clock went back by 1\.000 s since promotion toy-"
    ):
        plan, verdict = on(course_of(contract)[1], contract, verdict)
        sv.advance(plan, state, verdict, now=4.0)


def test_another_build_ends_the_run(offline):
    contract, plan, verdict = offline
    state, _ = sv.advance(plan, None, verdict, now=1.0)
    plan, verdict = on(course_of(contract)[1], contract, verdict)

    state, _ = sv.advance(
        plan, state, replace(verdict, key=replace(verdict.key, infer="another")), now=2.0
    )

    assert (state.status, state.why) == (
        "superseded",
        "the infer kernel changed since the promotion started",
    )


def test_a_verdict_that_was_kept_says_of_which_leg_it_is(offline):
    _, plan, verdict = offline

    kept = sv.Verdict.from_dict(verdict.to_dict())

    assert kept.leg == verdict.leg == "offline"
    assert sv.advance(plan, None, kept, now=1.0) == sv.advance(plan, None, verdict, now=1.0)
