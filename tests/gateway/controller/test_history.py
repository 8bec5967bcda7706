# The history of a leader in a ledger: what cannot have happened is named, entry by entry.

from dataclasses import replace

import pytest

from servanda.cli.main import main
from servanda.gateway.controller.ledger_history import disagreements, run_problems
from servanda.promotion.ledger.entry import Record
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run.history import disagreements as promotions
from servanda.promotion.run.history import histories, histories_of, history_of
from tests.gateway.controller import controllers


@pytest.fixture(scope="module")
def history(tmp_path_factory):
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


def at(history, **wanted):
    return next(
        i for i, e in enumerate(history) if all(e.body.get(k) == v for k, v in wanted.items())
    )


def changed(history, i, **body):
    entry = replace(history[i], body={**history[i].body, **body})
    return [*history[:i], entry, *history[i + 1 :]]


def said(entries):
    return [p.message.partition(") ")[2] for p in run_problems(entries)]


def test_what_a_leader_wrote_can_have_happened(history):
    assert said(history) == []


def test_two_leaders_in_one_run_do_not_get_in_each_others_way(history):
    other = [replace(e, body={**e.body, "leader": "other"}) for e in history]
    mixed = [e for pair in zip(history, other, strict=True) for e in pair]
    assert said(mixed) == []


def test_an_entry_that_is_left_out_is_named(history):
    del_at = at(history, after="quarantined")
    found = said([*history[:del_at], *history[del_at + 1 :]])
    assert found[0].startswith(f"is number {del_at + 2} of its leader, and follows {del_at}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"log_evidence": 1.0}, "at a log e-value of 1, and the threshold was 6.68"),
        ({"n": 0}, "says first=a went to quarantined on no request"),
        ({"keys": 4}, "says first=a was diverted on 4 users, and 5 are needed"),
        ({"cell": None}, "says first=a was diverted, and no cell decided it"),
        ({"before": "active"}, "says first=a was active, and it was suspect"),
        ({"after": "gone"}, "went from suspect to gone, and there is no such status"),
        ({"after": "recovering"}, "went from suspect to recovering in one step"),
        ({"slice": "first=z"}, "moves first=z, which is no slice"),
        ({"number": 99}, "is transition 99, and follows"),
        ({"log_price": "x"}, "cannot be replayed"),
    ],
)
def test_a_claim_that_cannot_be_is_named(history, body, message):
    found = said(changed(history, at(history, after="quarantined"), **body))
    assert any(message in one for one in found), found


def test_an_opening_that_says_otherwise_is_named(history):
    again = replace(history[0], body={**history[0].body, "o": len(history) + 1})
    found = said([*history, again])
    assert any("transitions came before" in one for one in found)
    assert any("says first=a was active, and it was quarantined" in one for one in found)


def test_an_entry_of_another_kind_is_named(history):
    kind = replace(history[-1], kind="forgot")
    assert said([*history[:-1], kind]) == ["is of an unknown kind, 'forgot'"]


def test_a_ledger_with_runs_of_both_is_read_by_both(history, tmp_path):
    with open_ledger(str(tmp_path / "l.db"), key=b"") as ledger:
        records = [Record(e.kind, e.actor, e.at, e.body) for e in history]
        ledger.append("toy-gateway", records, after=0)
        assert history_of(ledger, "toy-gateway") is None
        assert [*histories(ledger)] == []
        assert histories_of(ledger, "toy") == ()
        assert promotions(ledger) == ()
        assert disagreements(ledger) == ()


def test_the_verb_names_an_edited_history(history, tmp_path, capsys):
    where = str(tmp_path / "l.db")
    edited = changed(history, at(history, after="quarantined"), log_evidence=0.5)
    with open_ledger(where, key=b"") as ledger:
        records = [Record(e.kind, e.actor, e.at, e.body) for e in edited]
        ledger.append("toy-gateway", records, after=0)
    with pytest.raises(SystemExit) as stopped:
        main(["promotion", "ledger", "verify", "--ledger", where], standalone_mode=False)
    assert stopped.value.code == 1
    assert "of run toy-gateway) says first=a went to quarantined at a log e-value of 0.5" in (
        capsys.readouterr().out
    )
