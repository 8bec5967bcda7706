# A ledger holds what was appended, in order, and nothing else: the same in both stores.

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servanda.promotion.ledger import entry as chain
from servanda.promotion.ledger.entry import Damaged, LedgerError, Outrun, Record
from servanda.promotion.ledger.ledger import open_ledger, verify
from tests.drawn import examples

AT = 1_700_000_000.25


def record(kind="advanced", actor="ci", at=AT, **body):
    return Record(kind, actor, at, body)


@pytest.fixture
def ledger(where, swift_path):
    with open_ledger(where, witness=swift_path / "head") as found:
        yield found


@pytest.mark.slow
def test_what_was_appended_is_what_is_read(ledger, where, swift_path):
    body = {"why": "it holds", "n": 3, "rows": [1, 2.5, None, True, {"é": "ü"}], "e": 1e-17}

    kept = ledger.append("a", [record("begun"), record("advanced", **body)], after=0)

    assert kept == tuple(ledger.entries())
    assert [(e.seq, e.run, e.n, e.kind, e.actor, e.at) for e in kept] == [
        (1, "a", 1, "begun", "ci", AT),
        (2, "a", 2, "advanced", "ci", AT),
    ]
    assert kept[1].body == body
    with open_ledger(where, witness=swift_path / "head") as again:
        assert tuple(again.entries()) == kept


def test_each_hash_is_of_the_entry_and_of_the_one_before(ledger):
    kept = ledger.append("a", [record(), record(x=1)], after=0)

    assert [e.prev for e in kept] == [chain.FIRST, kept[0].hash]
    for entry in kept:
        data = {k: v for k, v in vars(entry).items() if k != "hash"}
        assert entry.hash == chain.digest(chain.canonical(data))


def test_runs_share_one_chain_and_count_for_themselves(ledger):
    for run, after in [("b", 0), ("a", 0), ("b", 1), ("a", 1), ("b", 2)]:
        ledger.append(run, [record()], after=after)

    assert ledger.runs() == ("b", "a")
    assert [(e.seq, e.run, e.n) for e in ledger.entries()] == [
        (1, "b", 1),
        (2, "a", 1),
        (3, "b", 2),
        (4, "a", 2),
        (5, "b", 3),
    ]
    assert [e.seq for e in ledger.entries("b")] == [1, 3, 5]
    assert [e.seq for e in ledger.entries("b", since=1)] == [3, 5]
    assert [e.seq for e in ledger.entries(since=3)] == [4, 5]
    assert [*ledger.entries("c")] == []


def test_a_long_ledger_is_read_whole(ledger):
    for i in range(4):
        ledger.append("a", [record(i=i)] * 400, after=400 * i)

    assert [e.n for e in ledger.entries("a")] == [*range(1, 1601)]
    assert verify(ledger).entries == 1600


def test_reading_ends_though_the_reader_appends(ledger):
    """Anyone who tells the world of an entry writes another."""
    ledger.append("a", [record(), record()], after=0)

    for i, _ in enumerate(ledger.entries("a")):
        ledger.append("a", [record("told")], after=2 + i)

    assert [e.kind for e in ledger.entries("a")] == ["advanced", "advanced", "told", "told"]


def test_nothing_appended_is_nothing_written(ledger):
    assert ledger.append("a", [], after=0) == ()
    assert verify(ledger) == verify(ledger)
    assert verify(ledger).entries == 0
    assert verify(ledger).head == chain.FIRST


def test_who_was_outrun_is_told_by_whom(ledger):
    ledger.append("a", [record("begun")], after=0)
    ledger.append("a", [record("approved", "ana"), record("advanced", "ci")], after=1)

    with pytest.raises(Outrun) as error:
        ledger.append("a", [record("rolled_back", "bob")], after=1)

    assert str(error.value) == (
        "run 'a' went on meanwhile: 2 'approved' by ana, 3 'advanced' by ci; 1 was the last one "
        "seen\n  hint: read the run again, and decide again"
    )
    assert [e.n for e in ledger.entries("a")] == [1, 2, 3]


def test_a_long_lead_is_told_in_short(ledger):
    ledger.append("a", [record("looked")] * 6, after=0)

    with pytest.raises(Outrun, match=r"3 'looked' by ci and 3 more; 0 was the last one seen"):
        ledger.append("a", [record()], after=0)


def test_a_run_that_lost_entries_is_not_gone_on_with(ledger):
    ledger.append("a", [record()], after=0)

    with pytest.raises(LedgerError) as error:
        ledger.append("a", [record()], after=4)

    assert str(error.value) == (
        f"{ledger.store.name}: run 'a' ends at 1, and its entry 4 was read before\n"
        "  hint: is it the same ledger? Read the run again"
    )


def test_of_several_records_all_are_kept_or_none(ledger):
    with pytest.raises(LedgerError):
        ledger.append("a", [record(), record(x=math.nan)], after=0)

    assert [*ledger.entries()] == []
    assert [e.seq for e in ledger.append("a", [record()], after=0)] == [1]


@pytest.mark.parametrize(
    ("unfit", "why"),
    [
        (record(x=math.nan), "Out of range float values are not JSON compliant"),
        (record(x=math.inf), "Out of range float values are not JSON compliant"),
        (record(x={1: 2}), "the key 1 is not text"),
        (record(x=[{"y": {None: 1}}]), "the key None is not text"),
        (record(x={1, 2}), "Object of type set is not JSON serializable"),
        (record(at=math.nan), "its time is nan"),
        (record(actor=""), "its actor is ''"),
        (record(actor="a\nb"), r"its actor 'a\nb' has a character that cannot be printed"),
        (record(actor="\ud800"), r"its actor '\ud800' has a character that cannot be printed"),
    ],
)
def test_what_json_cannot_hold_is_refused(ledger, unfit, why):
    with pytest.raises(LedgerError) as error:
        ledger.append("a", [unfit], after=0)

    first, hint = str(error.value).split("\n")
    assert first.startswith(f"a record of kind 'advanced' for run 'a' cannot be kept: {why}")
    assert hint == (
        "  hint: a ledger keeps what JSON can hold: texts, finite numbers, lists, mappings"
    )
    assert [*ledger.entries()] == []


def test_a_run_has_a_name(ledger):
    with pytest.raises(LedgerError, match="its run is ''"):
        ledger.append("", [record()], after=0)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # every text that Python has, also half of a surrogate pair and NUL
    | st.text(st.characters(exclude_categories=())),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(st.text(max_size=5), plain, max_size=4),
    at=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_plain_data_comes_back_as_it_was(ledger, body, at):
    actor = "ünïcode → ☃"
    after = sum(1 for _ in ledger.entries("any"))

    (kept,) = ledger.append("any", [Record("k", actor, at, body)], after=after)

    (read,) = ledger.entries("any", since=kept.seq - 1)
    assert read == kept
    assert (read.body, read.at, read.actor) == (body, at, actor)


def test_a_closed_ledger_says_so(where):
    ledger = open_ledger(where)
    ledger.close()

    with pytest.raises(LedgerError) as error:
        ledger.append("a", [record()], after=0)

    assert "closed\n  hint: open the ledger again" in str(error.value)
    with pytest.raises(LedgerError, match="closed"):
        [*ledger.entries()]


def test_reading_begins_no_ledger(where):
    with pytest.raises(LedgerError) as error:
        open_ledger(where, reading=True)

    assert str(error.value).startswith("no ledger at ")
    assert str(error.value).endswith(
        "\n  hint: pass --ledger, or start one with `servanda promote`"
    )


def test_who_reads_sees_what_is_written_meanwhile(where):
    with open_ledger(where) as writer, open_ledger(where, reading=True) as reader:
        for after in range(3):
            writer.append("a", [record()], after=after)
            assert [e.n for e in reader.entries()] == [*range(1, after + 2)]


@pytest.mark.parametrize("key", [b"k", b"k" * 100])
def test_with_a_key_the_chain_cannot_be_made_without_it(where, key):
    with open_ledger(where, key=key) as ledger:
        (kept,) = ledger.append("a", [record()], after=0)
        assert verify(ledger).problems == ()
    data = {k: v for k, v in vars(kept).items() if k != "hash"}

    assert kept.hash != chain.digest(chain.canonical(data))
    assert kept.hash == chain.digest(chain.canonical(data), key)


@pytest.mark.parametrize(
    ("begun", "given", "said"),
    [
        (b"k", b"l", "was created with a key, and another one is given"),
        (b"k", b"", "was created with a key, and none is given"),
        (b"", b"l", "was created without a key, and one is given"),
    ],
)
def test_another_key_is_noticed_before_anything_is_read(where, begun, given, said):
    with open_ledger(where, key=begun) as ledger:
        name = ledger.store.name

    with pytest.raises(LedgerError) as error:
        open_ledger(where, key=given)

    assert (
        str(error.value) == f"{name} {said}\n  hint: open it with the key that it was created with"
    )


def test_an_entry_changed_under_a_running_reader_is_refused(ledger, tamper):
    ledger.append("a", [record(x=1), record(x=2), record(x=3)], after=0)
    tamper("UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 2")

    for read in (lambda: [*ledger.entries()], lambda: [*ledger.entries("a")]):
        with pytest.raises(Damaged, match=r"entry 2 of run 'a': its content has the hash"):
            read()


def test_nothing_is_chained_to_an_entry_that_was_changed(ledger, tamper):
    ledger.append("a", [record(x=1), record(x=2)], after=0)
    tamper("UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 2")

    with pytest.raises(Damaged, match="entry 2 of run 'a'"):
        ledger.append("b", [record()], after=0)

    assert verify(ledger).entries == 2
