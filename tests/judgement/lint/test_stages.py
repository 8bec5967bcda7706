# What is said of the stages of a promotion, with its place and its next move.

import pytest

from tests.judgement.lint.test_routing import SMALL, parse, said

CONTRACT = f"""\
{SMALL}promotion:
  offline: {{prompt_groups: [200, 4000]}}
  shadow: {{share: 0.05}}
  canary: {{steps: [0.01, 0.1]}}
  full: {{}}
"""


def test_four_stages_with_a_stable_kernel_are_sound():
    contract, _ = parse(CONTRACT, "x.yaml", engines=["table"])

    assert all(map(contract.promotion.has, ("offline", "shadow", "canary", "full")))


def test_traffic_needs_a_kernel_that_answers_or_takes_over():
    """Without stable: no one answers what is mirrored, and a rollback would lead nowhere."""
    hint = "  hint: declare stable: with the kernel that serves today, or end the promotion offline"

    assert said(CONTRACT.replace("stable: {engine: table}\n", "")) == [
        "x.yaml:10:3: there is no stable: kernel, which answers what shadow mirrors",
        "   10 |   shadow: {share: 0.05}",
        "          ^",
        hint,
        "x.yaml:11:3: there is no stable: kernel, which takes over if canary fails",
        "   11 |   canary: {steps: [0.01, 0.1]}",
        "          ^",
        hint,
        "x.yaml:12:3: there is no stable: kernel, which takes over if full fails",
        "   12 |   full: {}",
        "          ^",
        hint,
    ]


@pytest.mark.parametrize(
    ("wrong", "right"), [("shadov", "shadow"), ("canari", "canary"), ("ful", "full")]
)
def test_a_stage_that_does_not_exist_is_named_with_the_nearest_one(wrong, right):
    text = CONTRACT.replace(f"  {right}:", f"  {wrong}:")
    line = text.splitlines().index(next(x for x in text.splitlines() if f"  {wrong}:" in x)) + 1

    found = said(text)

    assert found[0].startswith(f"x.yaml:{line}:3: ")
    assert repr(wrong) in found[0]
    assert found[-1] == f"  hint: did you mean {right!r}?"


def test_an_approval_that_nobody_is_asked_for_is_refused():
    """A person says yes to the stage after; a promotion would be completed without a word."""
    ends = CONTRACT.replace("  full: {}\n", "")

    assert said(ends.replace("0.1]}", "0.1], approval: required}")) == [
        "x.yaml:12:32: canary is the last stage: no stage after it needs an approval",
        "   12 |   canary: {steps: [0.01, 0.1], approval: required}",
        "                                       ^",
        "  hint: add promotion.full, or remove it",
    ]
    assert said(CONTRACT.replace("full: {}", "full: {approval: required}"))[-1] == (
        "  hint: remove it"
    )
