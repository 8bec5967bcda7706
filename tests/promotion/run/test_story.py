# The story of a run: told again from a ledger's entries, in either store.

from dataclasses import replace

import pytest

from servanda import __version__
from servanda.errors import EvidenceError
from servanda.promotion.advance import advance
from servanda.promotion.ledger.entry import LedgerError, Outrun, Record
from servanda.promotion.ledger.ledger import open_ledger, verify
from servanda.promotion.run.history import (
    DELIVERED,
    advance_run,
    disagreements,
    histories,
    history_of,
    outcome_body,
    override_cell,
    refreshed,
    roll_back_run,
)
from servanda.promotion.state import Override
from servanda.traces.serialization import to_plain
from tests.promotion.run.histories import ACTOR, LEGS, finding, key, opened, reaching


@pytest.fixture
def ledger(where):
    with open_ledger(where) as found:
        yield found


@pytest.mark.parametrize("leg", LEGS)
def test_a_run_is_told_again_as_it_was_written(ledger, leg):
    written = reaching(ledger, leg)

    assert history_of(ledger, written.run) == written
    assert [*histories(ledger)] == [written]
    assert disagreements(ledger) == ()


def test_every_act_of_a_person_is_told_again(ledger):
    history = reaching(ledger, "canary-1", now=1e9)
    now = 1e9 + 1e4
    history = advance_run(
        ledger, history, finding("canary-1", "inconclusive"), actor=ACTOR, now=now
    )
    given = Override("tv", "all", "Grace", "the slice is gone", now + 60)
    history = override_cell(ledger, history, given, now=now + 1)
    history = roll_back_run(ledger, history, actor="Grace", reason="enough", now=now + 2)

    again = history_of(ledger, history.run)

    assert again == history
    assert again.state.status == "rolled_back"
    assert again.state.overrides == (given,)
    assert again.state.why == "Grace rolled back: enough"


def test_a_look_that_finds_nothing_new_leaves_no_entry(ledger):
    history = reaching(ledger, "canary-1")
    look = finding("canary-1", "inconclusive")
    history = advance_run(ledger, history, look, actor=ACTOR, now=1000.0)
    before = len([*ledger.entries()])

    again = advance_run(ledger, history, look, actor=ACTOR, now=2000.0)

    assert again == history
    assert len([*ledger.entries()]) == before


def test_told_effects_are_no_part_of_where_a_run_stands(ledger):
    history = reaching(ledger, "shadow")
    record = Record(DELIVERED, ACTOR, 500.0, {"key": "k", "sink": "s"})

    ledger.append(history.run, [record], after=history.last)

    later = refreshed(ledger, history)
    assert replace(later, last=history.last, seq=history.seq) == history
    assert later.last == history.last + 1


def test_one_key_has_one_run(ledger):
    opened(ledger)

    with pytest.raises(Outrun):
        opened(ledger, now=5.0)

    assert len(ledger.runs()) == 1


@pytest.mark.parametrize("part", ["contract", "corpus", "train", "infer", "weights", "stable"])
def test_another_key_is_another_run(ledger, part):
    first = opened(ledger)
    other = opened(ledger, kernels=key(**{part: "other"}))

    assert other.run != first.run
    assert ledger.runs() == (first.run, other.run)


def test_of_two_promoters_that_saw_the_same_only_one_moves_the_run(ledger):
    history = reaching(ledger, "shadow")
    advance_run(ledger, history, finding("shadow"), actor="first", now=1000.0)

    with pytest.raises(Outrun):
        advance_run(ledger, history, finding("shadow", "violated"), actor="second", now=1001.0)

    assert history_of(ledger, history.run).leg.name == "canary-1"


def test_a_clock_that_goes_back_is_refused_and_nothing_is_lost(ledger):
    history = reaching(ledger, "canary-1", now=1e6)

    with pytest.raises(
        EvidenceError, match=r"the clock went back by 50.000 s since promotion toy-\w+"
    ):
        advance_run(ledger, history, finding("canary-1"), actor=ACTOR, now=history.state.seen - 50)

    assert history_of(ledger, history.run) == history


def test_evidence_of_another_leg_is_refused(ledger):
    history = reaching(ledger, "canary-1")

    with pytest.raises(EvidenceError, match="the finding is for step shadow, and promotion toy-"):
        advance_run(ledger, history, finding("shadow"), actor=ACTOR, now=1000.0)


def test_another_kernel_on_the_way_ends_the_run(ledger):
    history = reaching(ledger, "canary-1")
    other = finding("canary-1", of=key(infer="infer-2"))

    history = advance_run(ledger, history, other, actor=ACTOR, now=1000.0)

    assert history.state.status == "superseded"
    assert history.state.why == "the infer kernel changed since the promotion started"


def test_an_override_of_a_cell_that_nobody_judged_is_refused(ledger):
    history = reaching(ledger, "canary-1")
    given = Override("tvv", "all", ACTOR, "typo", 1e9)

    with pytest.raises(EvidenceError) as error:
        override_cell(ledger, history, given, now=1000.0)

    assert "has no cell tvv on all to override" in str(error.value)
    assert "hint: the latest evaluation judged tv on all" in str(error.value)


def test_an_entry_that_does_not_follow_is_found_though_its_hash_is_right(ledger):
    """Anyone who owns the hash can write what never happened; what follows cannot be made up."""
    history = reaching(ledger, "shadow")
    real = [*ledger.entries(history.run)][-1].body
    forged = {**real, "state": {**real["state"], "leg": 4, "status": "completed"}}
    ledger.append(history.run, [Record("looked", "Eve", 900.0, forged)], after=history.last)

    (problem,) = disagreements(ledger)

    assert f"of run {history.run})" in problem.message
    assert verify(ledger).problems == ()  # its chain is whole
    with pytest.raises(LedgerError):
        history_of(ledger, history.run)


def written_by(ledger, history, version, **state):
    """A look that another version has written down, in words of its own."""
    look = finding(history.leg.name)
    moved = advance(history.course, history.state, look, now=900.0)
    body = {
        "finding": to_plain(look),
        **outcome_body(moved),
        "servanda": version,
        "why": "in other words",
    }
    body["state"] = {**body["state"], "why": "in other words", **state}
    body["effects"][-1]["body"]["why"] = "in other words"
    ledger.append(history.run, [Record("looked", "ci", 900.0, body)], after=history.last)


def test_a_run_outlives_the_words_of_the_version_that_wrote_it(ledger):
    history = reaching(ledger, "shadow")
    written_by(ledger, history, "0.0.1", fields_of_old=1)

    assert history_of(ledger, history.run).leg.name == "canary-1"


def test_a_reason_is_a_sentence_whose_words_may_change(ledger):
    history = reaching(ledger, "shadow")
    written_by(ledger, history, __version__)

    assert history_of(ledger, history.run).state.leg == 2


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_what_a_version_decided_has_to_follow(ledger, version):
    history = reaching(ledger, "shadow")
    written_by(ledger, history, version, leg=4)

    with pytest.raises(LedgerError) as error:
        history_of(ledger, history.run)

    assert "has a state that the entries before it do not lead to" in str(error.value)
    assert f"is by servanda {version}, and this is {__version__}" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("danced", {}, "has an unknown kind, 'danced'"),
        ("looked", {}, "cannot be replayed: 'finding'"),
        ("approved", {"reason": "x"}, "cannot be replayed: promotion toy-"),
    ],
)
def test_what_cannot_be_told_again_is_named(ledger, kind, body, said):
    history = reaching(ledger, "shadow")
    entry = ledger.append(history.run, [Record(kind, "Eve", 900.0, body)], after=history.last)[0]

    with pytest.raises(LedgerError) as error:
        history_of(ledger, history.run)

    assert f"entry {entry.seq} (number {entry.n} of run {history.run})" in str(error.value)
    assert said in str(error.value)


def test_a_run_that_does_not_begin_is_named(ledger):
    ledger.append("odd", [Record("looked", ACTOR, 0.0, {})], after=0)

    with pytest.raises(LedgerError, match="is the first of its run and of kind 'looked'"):
        history_of(ledger, "odd")


def test_a_run_that_is_not_there_has_no_story(ledger):
    assert history_of(ledger, "nobody") is None
