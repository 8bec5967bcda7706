# The history of a leader in a ledger: what cannot have happened is named, entry by entry.

from dataclasses import replace

import pytest

from servanda.cli.main import main
from servanda.gateway.controller.ledger_history import disagreements, run_problems
from servanda.promotion.ledger.entry import Record
from servanda.promotion.ledger.open import open_ledger
from servanda.promotion.run.history import disagreements as promotions
from servanda.promotion.run.history import stories, stories_of, story_of
from tests.gateway.controller import controllers


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Entries of a leader that quarantined a slice, and of another one beside it."""
    folder = tmp_path_factory.mktemp("story")
    path, clock = (
        controllers.contract(folder, q=controllers.FAULTY, routing=controllers.ACTING),
        controllers.Clock(),
    )
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, controllers.rows(path, 240))
    leader.pin("first=b", "stable", 60, actor="ann", reason="a look")
    leader.step()
    leader.close()
    with open_ledger(str(folder / "ledger.db"), reading=True, key=b"") as ledger:
        return [*ledger.entries()]


def at(story, **wanted):
    return next(
        i for i, e in enumerate(story) if all(e.body.get(k) == v for k, v in wanted.items())
    )


def changed(story, i, **body):
    entry = replace(story[i], body={**story[i].body, **body})
    return [*story[:i], entry, *story[i + 1 :]]


def said(entries):
    return [p.message.partition(") ")[2] for p in run_problems(entries)]


def test_what_a_leader_wrote_can_have_happened(story):
    assert said(story) == []


def test_two_leaders_in_one_run_do_not_get_in_each_others_way(story):
    other = [replace(e, body={**e.body, "leader": "other"}) for e in story]
    mixed = [e for pair in zip(story, other, strict=True) for e in pair]
    assert said(mixed) == []


def test_an_entry_that_is_left_out_is_named(story):
    del_at = at(story, after="quarantined")
    found = said([*story[:del_at], *story[del_at + 1 :]])
    assert found[0].startswith(f"is number {del_at + 2} of its leader, and follows {del_at}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"log_evidence": 1.0}, "on evidence of 1 nats, and the price was 6.68"),
        ({"n": 0}, "says first=a went to quarantined on no request"),
        ({"keys": 4}, "says first=a left infer on 4 users, and 5 were asked for"),
        ({"cell": None}, "says first=a left infer, and no cell decided it"),
        ({"before": "active"}, "says first=a was active, and it was suspect"),
        ({"after": "gone"}, "went from suspect to gone, and there is no such status"),
        ({"after": "recovering"}, "went from suspect to recovering in one step"),
        ({"slice": "first=z"}, "moves first=z, which is no slice"),
        ({"number": 99}, "is transition 99, and follows"),
        ({"log_price": "x"}, "cannot be told again"),
    ],
)
def test_a_claim_that_cannot_be_is_named(story, body, message):
    found = said(changed(story, at(story, after="quarantined"), **body))
    assert any(message in one for one in found), found


def test_an_opening_that_says_otherwise_is_named(story):
    again = replace(story[0], body={**story[0].body, "o": len(story) + 1})
    found = said([*story, again])
    assert any("transitions came before" in one for one in found)
    assert any("says first=a was active, and it was quarantined" in one for one in found)


def test_an_entry_of_another_kind_is_named(story):
    kind = replace(story[-1], kind="forgot")
    assert said([*story[:-1], kind]) == ["is of a kind that nobody knows, 'forgot'"]


def test_a_ledger_with_runs_of_both_is_read_by_both(story, tmp_path):
    with open_ledger(str(tmp_path / "l.db"), key=b"") as ledger:
        records = [Record(e.kind, e.actor, e.at, e.body) for e in story]
        ledger.append("toy-gateway", records, after=0)
        assert story_of(ledger, "toy-gateway") is None
        assert [*stories(ledger)] == []
        assert stories_of(ledger, "toy") == ()
        assert promotions(ledger) == ()
        assert disagreements(ledger) == ()


def test_the_verb_names_an_edited_history(story, tmp_path, capsys):
    where = str(tmp_path / "l.db")
    edited = changed(story, at(story, after="quarantined"), log_evidence=0.5)
    with open_ledger(where, key=b"") as ledger:
        records = [Record(e.kind, e.actor, e.at, e.body) for e in edited]
        ledger.append("toy-gateway", records, after=0)
    with pytest.raises(SystemExit) as stopped:
        main(["ledger", "verify", "--ledger", where], standalone_mode=False)
    assert stopped.value.code == 1
    assert "of run toy-gateway) says first=a went to quarantined on evidence of 0.5" in (
        capsys.readouterr().out
    )
