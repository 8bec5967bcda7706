# The legs of a course, as a contract writes them.

import math
from dataclasses import replace
from pathlib import Path

import pytest

from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of
from servanda.runner.load import load
from tests.judgement.lint.test_stages import CONTRACT
from tests.kit import parse

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.kernelcontract.yaml"))


def contract(promotion):
    """A contract with the given block; `{}` is the default: offline alone."""
    text = CONTRACT[: CONTRACT.index("promotion:")] + f"promotion: {promotion}\n"
    return parse(text, "x.yaml", engines=["table"])[0]


def spent(course, spans=2000):
    """All of alpha that a course can ever spend, with a span of full after another."""
    parts = [leg.part for leg in course]
    leg = course[-1]
    for _ in range(spans if leg.stage == "full" else 0):
        leg = leg.following
        parts.append(leg.part)
    return math.fsum(parts)


def test_without_a_block_there_is_the_offline_stage():
    assert course_of(contract("{}")) == (Leg("offline", first=200, last=4000, part=1.0),)


def test_every_step_of_a_canary_is_a_leg_of_its_own():
    course = course_of(
        contract(
            "{offline: {prompt_groups: [400, 6000], approval: required}, "
            "shadow: {prompt_groups: [15, 200], share: 0.2, sample: 0.5}, "
            "canary: {steps: [0.01, 0.25], prompt_groups: [15, 300], dwell: 10m, "
            "approval: required, if_inconclusive: wait}, "
            "full: {sample: 0.02, if_inconclusive: roll_back}, "
            "valid_for: 30d}"
        )
    )

    month = 30 * 86_400.0
    canary = Leg(
        "canary",
        share=0.01,
        sample=1.0,
        first=15,
        last=300,
        dwell_s=600.0,
        if_inconclusive="wait",
        valid_for_s=month,
        part=1 / 5,
    )
    assert course == (
        Leg("offline", first=400, last=6000, approval=True, valid_for_s=month, part=1 / 5),
        Leg("shadow", mirror=0.2, sample=0.5, first=15, last=200, valid_for_s=month, part=1 / 5),
        canary,
        # a person is asked before the stage after, not before each step
        replace(canary, step=1, share=0.25, approval=True),
        Leg(
            "full",
            share=1.0,
            sample=0.02,
            if_inconclusive="roll_back",
            valid_for_s=month,
            part=1 / 10,
        ),
    )


def test_what_a_stage_does_not_say_has_a_default():
    _, shadow, canary, full = course_of(contract("{shadow: {}, canary: {}, full: {}}"))

    assert (shadow.share, shadow.mirror, shadow.sample) == (0.0, 0.05, 1.0)
    assert (canary.share, canary.mirror, canary.sample) == (0.05, 0.0, 1.0)
    assert (full.share, full.mirror, full.sample) == (1.0, 0.0, 0.01)
    assert {(leg.first, leg.last, leg.dwell_s) for leg in (shadow, canary, full)} == {
        (200, 4000, 0.0)
    }


def test_a_leg_is_named_by_its_stage_and_by_its_step_or_span():
    course = course_of(contract("{shadow: {}, canary: {steps: [0.01, 0.1, 1]}, full: {}}"))

    assert [leg.name for leg in course] == [
        *("offline", "shadow", "canary-1", "canary-2", "canary-3", "full-1")
    ]
    assert [leg.live for leg in course] == [False, True, True, True, True, True]
    assert course[-1].following.following.name == "full-3"


@pytest.mark.parametrize(
    "block",
    [
        "{}",
        "{full: {}}",
        "{shadow: {}}",
        "{canary: {steps: [0.01, 0.1]}, full: {}}",
        "{shadow: {}, canary: {steps: [0.01, 0.1, 0.5]}, full: {}}",
    ],
)
def test_the_parts_of_all_legs_and_of_every_span_add_up_to_one(block):
    course = course_of(contract(block))

    # 2,001 spans leave 1/2002 of the part of full for those after them
    left = 1 / len(course) / 2002 if course[-1].stage == "full" else 0.0
    assert spent(course) == pytest.approx(1 - left, rel=1e-12)


def test_the_next_span_differs_in_its_number_and_its_price_alone():
    full = course_of(contract("{full: {sample: 0.2, dwell: 1h}}"))[-1]

    after = full.following

    assert replace(after, span=1, part=full.part) == full
    assert after.part == pytest.approx(full.part / 3)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_has_a_course(path):
    """Names are folders, shares only grow, and what is spent of alpha is one."""
    example: Contract = load(path)

    course = course_of(example)

    names = [leg.name for leg in course]
    assert len(set(names)) == len(names)
    assert names[0] == "offline"
    shares = [leg.share for leg in course]
    assert shares == sorted(shares)
    assert spent(course) == pytest.approx(1.0, abs=1e-3)
    assert all(0 < leg.first <= leg.last for leg in course)
