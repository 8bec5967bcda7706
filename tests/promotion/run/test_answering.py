# May this build be at this stage?  As the ledger has it, in either store.

from dataclasses import replace

import pytest

from servanda.errors import ContractError, EvidenceError
from servanda.promotion.ledger.entry import LedgerError, Record
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run.can_promote import can_promote, named
from servanda.promotion.run.history import advance_run, roll_back_run
from tests.promotion.run.histories import (
    ACTOR,
    LEGS,
    TEXT,
    cell,
    contract,
    finding,
    key,
    opened,
    reaching,
)

STAGES = ("offline", "shadow", "canary", "full")


@pytest.fixture
def ledger(where):
    with open_ledger(where) as found:
        yield found


def answer(ledger, to, now=10_000.0, of=None, **which):
    return can_promote(ledger, of or contract(), to, now=now, **which)


@pytest.mark.parametrize("leg", LEGS)
def test_a_build_may_be_where_it_has_come_and_no_further(ledger, leg):
    reaching(ledger, leg)
    stage = leg.split("-")[0]

    codes = [answer(ledger, to).exit_code for to in STAGES]

    reached = STAGES.index(stage) + 1
    assert codes == [0] * reached + [3] * (len(STAGES) - reached)


def test_yes_says_what_decided_and_how_long_it_is_valid(ledger):
    story = reaching(ledger, "canary-1")

    said = str(answer(ledger, "canary"))

    assert said == (
        f"YES: promotion {story.run} has reached canary-1 (tv on all 0.01 [0, 0.02], limit "
        "0.05, "
        "n 900 tokens), valid until 1970-01-08 00:03:20Z"
    )


def test_no_says_why_with_the_interval_and_the_n(ledger):
    story = reaching(ledger, "shadow")
    advance_run(ledger, story, finding("shadow", "violated"), actor=ACTOR, now=900.0)

    found = answer(ledger, "shadow")

    assert found.exit_code == 1
    assert str(found) == (
        f"NO: promotion {story.run} is rolled back: tv on all is violated (tv on all 0.09 "
        "[0.07, "
        "0.11], limit 0.05, n 900 tokens)"
    )


def test_what_was_shown_expires(ledger):
    story = reaching(ledger, "canary-1")
    valid_until = story.state.valid_until

    assert answer(ledger, "canary", now=valid_until - 1).yes
    found = answer(ledger, "canary", now=valid_until)
    assert found.exit_code == 3
    assert "has evidence that expired 1970-01-08" in found.why


def test_a_ledger_without_the_contract_shows_nothing(ledger):
    found = answer(ledger, "shadow")

    assert str(found) == "NO: the ledger has no promotion of toy"
    assert found.exit_code == 3


def test_evidence_of_another_version_of_the_contract_does_not_count(ledger):
    story = reaching(ledger, "full-1")
    changed = contract(TEXT.replace("at_most: 0.05", "at_most: 0.04"))

    found = answer(ledger, "shadow", of=changed)

    assert found.exit_code == 3
    assert f"for another version of toy: digest {story.state.key.contract[:8]}" in found.why
    assert found.why.endswith(f"this one is {changed.digest[:8]}")


def test_another_course_of_the_same_promises_does_not_make_evidence_expire(ledger):
    reaching(ledger, "shadow")

    assert answer(ledger, "shadow", of=contract(TEXT.replace("dwell: 60s", "dwell: 90s"))).yes


def test_evidence_of_another_kernel_does_not_count(ledger):
    reaching(ledger, "full-1")

    found = answer(ledger, "shadow", infer="77ab")

    assert found.exit_code == 3
    assert found.why == "the evidence is for another build: infer infer-1, not 77ab"
    assert answer(ledger, "full", infer="infer-1", train="train").yes


def test_of_two_builds_the_one_that_is_meant_has_to_be_named(ledger):
    reaching(ledger, "full-1")
    opened(ledger, now=5e3, kernels=key(infer="infer-2"))

    with pytest.raises(EvidenceError) as error:
        answer(ledger, "shadow")

    assert "promotions of 2 builds of toy: infer infer-1, infer-2" in str(error.value)
    assert "hint: name one: --infer-digest DIGEST" in str(error.value)
    assert answer(ledger, "shadow", infer="infer-1").yes
    assert answer(ledger, "shadow", infer="infer-2").exit_code == 3


def test_of_two_attempts_the_later_one_counts(ledger):
    first = reaching(ledger, "full-1")
    roll_back_run(ledger, first, actor=ACTOR, reason="anew", now=5e3)
    opened(ledger, now=6e3, kernels=replace(key(), attempt=2))

    assert answer(ledger, "shadow").exit_code == 3
    assert answer(ledger, "offline").yes


def test_a_halted_run_may_be_nowhere(ledger):
    story = reaching(ledger, "shadow")
    at_the_limit = finding("shadow", "inconclusive", groups=400)
    story = advance_run(ledger, story, at_the_limit, actor=ACTOR, now=900.0)

    found = answer(ledger, "shadow")

    assert story.state.status == "halted"
    assert (found.exit_code, found.yes) == (3, False)
    assert "is halted on shadow: tv on all is inconclusive at the limit of 400" in found.why


def test_a_stage_that_the_promotion_lacks_is_refused(ledger):
    with pytest.raises(ContractError) as error:
        answer(ledger, "shadov")

    assert "the promotion of toy has no stage 'shadov'" in str(error.value)
    assert "hint: it has offline, shadow, canary, full" in str(error.value)
    assert error.value.exit_code == 2


def test_a_clock_before_the_latest_look_gives_no_answer(ledger):
    reaching(ledger, "canary-1", now=1e6)

    with pytest.raises(EvidenceError, match="the clock went back"):
        answer(ledger, "canary", now=1e5)


def test_runs_are_named_by_a_beginning_that_only_one_has(ledger):
    story = reaching(ledger, "shadow")

    assert named(ledger, story.run) == named(ledger, "toy") == story

    other = opened(ledger, now=5e3, kernels=key(infer="infer-2"))
    with pytest.raises(EvidenceError, match="several promotions are named 'toy'"):
        named(ledger, "toy")
    roll_back_run(ledger, story, actor=ACTOR, reason="enough", now=6e3)
    assert named(ledger, "toy").run == other.run
    with pytest.raises(EvidenceError, match="no promotion is named 'tiny'") as error:
        named(ledger, "tiny")
    assert f"the ledger has: {story.run}, {other.run}" in str(error.value)


def test_a_run_that_cannot_be_told_again_stands_in_no_other_run_s_way(ledger):
    story = reaching(ledger, "shadow")
    other = opened(ledger, of=contract(TEXT.replace("name: toy", "name: toy-b")))
    ledger.append(other.run, [Record("dreamt", ACTOR, 9.0, {})], after=other.last)

    with pytest.raises(LedgerError, match="has an unknown kind, 'dreamt'"):
        named(ledger, other.run)
    assert named(ledger, story.run) == story


def test_a_contract_whose_name_begins_with_another_s_is_another(ledger):
    longer = contract(TEXT.replace("name: toy", "name: toy-b"))
    reaching(ledger, "full-1", of=longer)

    assert answer(ledger, "full", of=longer).yes
    assert "has no promotion of toy" in answer(ledger, "full").why


def test_a_cell_that_was_overridden_is_not_the_one_that_decided(ledger):
    story = reaching(ledger, "shadow")
    two = (cell("holds"), replace(cell("inconclusive"), clause="tail", value=0.04))
    look = replace(finding("shadow"), cells=two)
    advance_run(ledger, story, look, actor=ACTOR, now=900.0)

    assert "tail on all" in answer(ledger, "canary").why


@pytest.mark.parametrize(("leg", "stages"), [("offline", 1), ("canary-2", 3), ("full-1", 4)])
def test_a_run_has_reached_the_stages_up_to_its_own(ledger, leg, stages):
    story = reaching(ledger, leg)

    assert [story.reached(stage) for stage in STAGES] == [True] * stages + [False] * (4 - stages)


def test_a_halted_or_ended_run_has_reached_nothing(ledger):
    story = reaching(ledger, "shadow")
    undecided = finding("shadow", "inconclusive", groups=400)
    halted = advance_run(ledger, story, undecided, actor=ACTOR, now=900.0)
    ended = roll_back_run(ledger, halted, actor=ACTOR, reason="enough", now=901.0)

    assert not any(one.reached(stage) for one in (halted, ended) for stage in STAGES)
