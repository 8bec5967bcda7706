# Whatever was changed in a ledger is found, and named by its place.

import contextlib
import json
import random
import shutil
import sqlite3

import pytest

from servanda.promotion.ledger import entry as chain
from servanda.promotion.ledger.entry import Damaged, LedgerError, Record, Row
from servanda.promotion.ledger.export import export
from servanda.promotion.ledger.ledger import Problem, mark_of, open_ledger, verify, verify_at

FLIPS = 500


def filled(ledger, count=6, size=0):
    """Entries of two runs in turn."""
    for i in range(count):
        body = {"i": i, "why": f"look {i}", "pad": "x" * size}
        ledger.append("ab"[i % 2], [Record("advanced", "ci", 100.0 + i, body)], after=i // 2)
    return ledger


@pytest.fixture
def ledger(where):
    with open_ledger(where) as found:
        yield filled(found)


def said(found):
    return [str(problem) for problem in found.problems]


def test_what_nobody_touched_is_sound(ledger):
    found = verify(ledger)

    assert (found.entries, found.problems, found.sound) == (6, (), True)
    assert found.head == [*ledger.entries()][-1].hash


CHANGES = {
    "actor = 'eve'": "its content has the hash ",
    "at = 101.5": "its content has the hash ",
    "body = '{\"i\":7}'": "its content has the hash ",
    "hash = '00'": "its content has the hash ",
    "prev = '00'": "it follows hash 00, and the entry before it has ",
    "run = 'c'": "it is number 2 of its run, and the one before was 0",
    "n = 9": "it is number 9 of its run, and the one before was 1",
    "seq = 40": "entries 7 to 39 are missing before it",
    'body = \'{"i":2, "pad":"","why":"look 2"}\'': "its body is not canonical JSON",
    "body = '{'": "it is no JSON: Expecting property name enclosed in double quotes",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_entry_is_named_with_what_differs(ledger, tamper, change):
    tamper(f"UPDATE servanda_ledger SET {change} WHERE seq = 3")

    found = verify(ledger)

    seq, run = (40 if "seq" in change else 3), ("c" if "run" in change else "a")
    assert any(
        (p.seq, p.run) == (seq, run) and p.what.startswith(CHANGES[change]) for p in found.problems
    ), found.problems
    assert not found.sound


def test_an_entry_of_another_kind_of_value_is_named(where, tamper):
    if where.startswith("postgresql"):
        pytest.skip("its columns hold nothing else")
    with open_ledger(where) as ledger:
        filled(ledger)
        tamper("UPDATE servanda_ledger SET n = 'two', body = x'00' WHERE seq = 3")

        assert "entry 3 of run 'a': its n cannot be read: it is 'two'" in said(verify(ledger))


def test_an_edit_alone_is_one_problem(ledger, tamper):
    before = [*ledger.entries()]
    tamper("UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 3")

    (problem,) = verify(ledger).problems

    changed = Row(
        **{name: getattr(before[2], name) for name in chain.COLUMNS}
        | {"actor": "eve", "body": chain.canonical(before[2].body)}
    )
    assert str(problem) == (
        f"entry 3 of run 'a': its content has the hash {chain.hash_of(changed, b'')}, and the "
        f"recorded hash is {before[2].hash}"
    )


def test_an_entry_in_the_middle_that_is_gone_is_missed(ledger, tamper):
    tamper("DELETE FROM servanda_ledger WHERE seq = 3")

    assert said(verify(ledger)) == [
        "entry 4 of run 'b': entry 3 is missing before it",
        "entry 5 of run 'a': it is number 3 of its run, and the one before was 1",
    ]


def test_several_problems_are_all_named(ledger, tamper):
    tamper(
        "UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 2",
        "UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 5",
    )

    assert [p.seq for p in verify(ledger).problems] == [2, 5]


def resealed(ledger, tamper, key=b""):
    """Somebody edits entry 4 and computes the chain anew from there on."""
    prev = None
    for entry in [*ledger.entries()][3:]:
        values = {name: getattr(entry, name) for name in chain.COLUMNS}
        values |= {"body": chain.canonical(entry.body), "actor": "eve", "prev": prev or entry.prev}
        prev = chain.hash_of(Row(**values), key)
        tamper(
            f"UPDATE servanda_ledger SET actor = 'eve', prev = '{values['prev']}', "
            f"hash = '{prev}' WHERE seq = {entry.seq}"
        )


def test_a_chain_made_anew_is_found_by_the_witness_alone(where, tamper, swift_path):
    """The limit of an unkeyed chain, as the documents say it."""
    with open_ledger(where, witness=swift_path / "head") as ledger:
        head = [*filled(ledger).entries()][-1].hash
        resealed(ledger, tamper)
        anew = [e.hash for e in ledger.entries()][-1]

        assert said(verify(ledger)) == [
            f"entry 6 was acknowledged here with hash {head}, and has {anew}"
        ]
    (swift_path / "head").unlink()
    with open_ledger(where, witness=swift_path / "head") as ledger:
        assert verify(ledger).sound


def test_without_the_key_no_chain_can_be_made_anew(where, tamper, swift_path):
    with open_ledger(where, witness=swift_path / "head", key=b"secret") as ledger:
        filled(ledger)
        resealed(ledger, tamper, key=b"a guess")
    (swift_path / "head").unlink()

    found = verify_at(where, witness=swift_path / "head", key=b"secret")

    assert [p.seq for p in found.problems] == [4, 5, 6]


def test_another_key_is_one_problem_and_not_one_for_each_entry(where):
    with open_ledger(where, key=b"one") as ledger:
        name = filled(ledger).store.name

    assert said(verify_at(where, key=b"two")) == [
        f"{name} was created with a key, and another one is given",
        "none of the 6 entries has its hash under this key: the key is wrong",
    ]


META = "servanda_ledger_meta"
MARKS = {
    f"UPDATE {META} SET value = '3' WHERE name = 'schema'": "'schema' of {} is changed",
    f"UPDATE {META} SET value = '02' WHERE name = 'schema'": "'schema' of {} is changed",
    f"DELETE FROM {META} WHERE name = 'schema'": "'schema' of {} is gone",
    f"UPDATE {META} SET value = 'x' WHERE name = 'mark'": "'mark' of {} is changed",
    f"UPDATE {META} SET value = '{mark_of(b'')}' WHERE name = 'mark'": "'mark' of {} is changed",
    f"DELETE FROM {META} WHERE name = 'mark'": "'mark' of {} is gone",
    f"INSERT INTO {META} VALUES ('by', 'eve')": "'by' of {} is not of servanda",
}


@pytest.mark.parametrize("change", MARKS)
def test_a_changed_row_of_the_creation_is_named(where, tamper, change):
    """And no such ledger is opened, whether it has entries or not."""
    with open_ledger(where, key=b"secret") as ledger:
        filled(ledger)
    tamper(change)

    found = verify_at(where, key=b"secret")

    assert (found.entries, said(found)) == (6, [f"the row {MARKS[change].format(META)}"])
    for reading in (True, False):
        with pytest.raises(LedgerError):
            open_ledger(where, key=b"secret", reading=reading)


@pytest.mark.parametrize("name", ["schema", "mark"])
def test_a_row_that_is_gone_from_an_empty_ledger_is_missed(where, tamper, name):
    open_ledger(where).close()
    tamper(f"DELETE FROM {META} WHERE name = '{name}'")

    with contextlib.suppress(LedgerError):  # of another schema, for all that can be known
        assert not verify_at(where).sound


def test_a_trigger_that_is_gone_is_missed(where, direct):
    with open_ledger(where) as ledger:
        filled(ledger)
        if where.startswith("postgresql"):
            direct("ALTER TABLE servanda_ledger DISABLE TRIGGER servanda_ledger_kept")
            told = "the trigger that keeps servanda_ledger from being changed is gone or disabled"
        else:
            direct("DROP TRIGGER servanda_ledger_update")
            told = "the file is not laid out as servanda does: servanda_ledger_update"

        assert said(verify(ledger)) == [told]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE servanda_ledger SET actor = 'eve'",
        "DELETE FROM servanda_ledger",
        "DELETE FROM servanda_ledger WHERE seq = 6",
        "UPDATE servanda_ledger_meta SET value = '7'",
        "DELETE FROM servanda_ledger_meta",
    ],
)
def test_the_stores_themselves_refuse_to_change_anything(ledger, direct, statement):
    before = [*ledger.entries()]

    with pytest.raises(Exception, match="a ledger is append-only"):
        direct(statement)

    assert [*ledger.entries()] == before


def test_a_whole_table_cannot_be_emptied(ledger, where, direct):
    if not where.startswith("postgresql"):
        pytest.skip("SQLite has no TRUNCATE")
    for statement in ("TRUNCATE servanda_ledger", "TRUNCATE servanda_ledger_meta"):
        with pytest.raises(Exception, match="a ledger is append-only"):
            direct(statement)
    with pytest.raises(Exception, match="a ledger is append-only"):
        direct("SET session_replication_role = replica; DELETE FROM servanda_ledger")


@pytest.mark.parametrize("seq", [3, 6, 8])
def test_an_entry_cannot_be_replaced_or_put_out_of_line(ledger, where, direct, seq):
    values = f"({seq}, 'a', {seq}, 1.0, 'eve', 'k', '{{}}', '0', '0')"
    replace = (
        f"INSERT INTO servanda_ledger VALUES {values} ON CONFLICT DO NOTHING"
        if where.startswith("postgresql")
        else f"INSERT OR REPLACE INTO servanda_ledger VALUES {values}"
    )
    if where.startswith("postgresql") and seq == 8:
        pytest.skip("a gap is found by verify")
    before = [*ledger.entries()]

    try:
        direct(replace)
    except sqlite3.IntegrityError as error:
        assert str(error) == "a ledger is append-only"

    assert [*ledger.entries()] == before


# Truncation


def truncate(where, tamper, behind):
    tamper(f"DELETE FROM servanda_ledger WHERE seq > {behind}")


def test_a_tail_that_was_cut_off_is_missed(where, tamper, swift_path):
    witness = swift_path / "head"
    with open_ledger(where, witness=witness) as ledger:
        name = filled(ledger).store.name
    truncate(where, tamper, 4)

    found = verify_at(where, witness=witness)

    told = "truncated: the ledger ends at 4, and entry 6 was acknowledged here"
    assert (found.entries, said(found)) == (4, [told])
    with pytest.raises(Damaged) as error:
        open_ledger(where, witness=witness)
    assert str(error.value) == (
        f"{name} was {told}\n"
        f"  hint: restore a copy; if you started a new ledger on purpose, remove {witness}"
    )


def test_a_tail_that_is_cut_off_under_a_writer_is_missed(where, tamper, swift_path):
    with open_ledger(where, witness=swift_path / "head") as ledger:
        filled(ledger)
        truncate(where, tamper, 0)

        with pytest.raises(Damaged, match="the ledger is empty, and entry 6 was acknowledged"):
            ledger.append("c", [Record("k", "ci", 1.0, {})], after=0)
        assert verify(ledger).entries == 0


def test_a_witness_that_lags_is_no_problem(where, swift_path):
    """As after a crash between the commit and the witness."""
    witness = swift_path / "head"
    with open_ledger(where, witness=witness) as ledger:
        filled(ledger, 2)
        behind = witness.read_bytes()
        ledger.append("a", [Record("k", "ci", 1.0, {})], after=1)
    witness.write_bytes(behind)

    with open_ledger(where, witness=witness) as ledger:
        assert verify(ledger).sound
        ledger.append("a", [Record("k", "ci", 1.0, {})], after=2)
    assert json.loads(witness.read_bytes())["seq"] == 4


def test_a_witness_never_goes_back(where, swift_path):
    """Of two processes the slower one may come to it later."""
    witness = swift_path / "head"
    with open_ledger(where, witness=witness) as ledger:
        filled(ledger, 2)
        first = ledger.store.at(1)

        ledger.witness.keep(first)

    assert json.loads(witness.read_bytes())["seq"] == 2


def test_a_file_that_is_gone_is_not_begun_anew(swift_path):
    path = swift_path / "ledger.db"
    with open_ledger(str(path)) as ledger:
        filled(ledger)
    assert (swift_path / "ledger.db.head").exists()
    path.unlink()

    for call in (open_ledger, lambda where: open_ledger(where, reading=True)):
        with pytest.raises(Damaged) as error:
            call(str(path))
        assert str(error.value) == (
            f"no ledger at {path}, and entry 6 was acknowledged here\n"
            f"  hint: restore a copy; to start a new ledger on purpose, remove {path}.head"
        )
    assert not path.exists()
    assert said(verify_at(str(path))) == [f"no ledger at {path}, and entry 6 was acknowledged here"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"seq": 4}', '{"seq": "4", "hash": "x"}'])
def test_a_witness_that_cannot_be_read_is_said(where, swift_path, text):
    witness = swift_path / "head"
    witness.write_text(text)

    with pytest.raises(LedgerError) as error:
        open_ledger(where, witness=witness)

    assert str(error.value) == (
        f"{witness} does not name the last entry\n  hint: `servanda promotion ledger "
        "verify` the ledger against a copy of it, then remove this file"
    )


# One byte


def whole(path):
    """Every entry of the file, by SQLite alone: what the flips are held against."""
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        db.text_factory = bytes
        runs = db.execute("SELECT DISTINCT run FROM servanda_ledger ORDER BY 1").fetchall()
        each = [
            db.execute("SELECT * FROM servanda_ledger WHERE run = ? ORDER BY n", run).fetchall()
            for run in runs
        ]
        return db.execute("SELECT * FROM servanda_ledger ORDER BY seq").fetchall(), each
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return str(error)
    finally:
        db.close()


def flipped(path, at, bit, into):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    into.write_bytes(bytes(data))
    return into


def found_in(path, **how):
    try:
        return verify_at(str(path), **how)
    except LedgerError as error:
        return error


@pytest.mark.slow
def test_one_byte_anywhere_that_changes_an_entry_is_found(swift_path):
    """Places drawn over the whole file, metadata and free space included."""
    path, other = swift_path / "ledger.db", swift_path / "other" / "ledger.db"
    other.parent.mkdir()
    with open_ledger(str(path)) as ledger:
        filled(ledger, 40, size=200)
        before = [*ledger.entries()]
    shutil.copy(f"{path}.head", f"{other}.head")
    right, size = whole(path), path.stat().st_size
    assert size > 3 * 4096
    rng = random.Random(20240607)
    places = [*range(100), *(rng.randrange(size) for _ in range(FLIPS))]
    changed = 0
    for at in places:
        flipped(path, at, rng.randrange(8), other)
        found = found_in(other)
        if whole(other) != right:
            changed += 1
            assert not isinstance(found, LedgerError), at  # the witness knows that it is one
            assert found.problems, at
        elif found.sound:
            with open_ledger(str(other), reading=True) as ledger:
                assert [*ledger.entries()] == before
    assert changed > FLIPS / 3


@pytest.mark.parametrize("page", [2, 3, 4, 5, 6])
def test_what_a_broken_page_left_can_be_read(swift_path, page):
    """A page of entries whose head is overwritten: the others are told apart from its own."""
    path = swift_path / "ledger.db"
    with open_ledger(str(path)) as ledger:
        filled(ledger, 60, size=400)
    data = bytearray(path.read_bytes())
    data[page * 4096 : page * 4096 + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))

    found = verify_at(str(path))

    broken = [p.seq for p in found.problems if "cannot be read" in p.what]
    assert found.problems
    assert any("malformed" in p.what or "SQLite finds" in p.what for p in found.problems)
    assert found.entries + len(broken) == 60


def test_a_flip_in_an_exported_file_is_found_at_its_line(where, swift_path):
    with open_ledger(where) as ledger, (swift_path / "kept.jsonl").open("w") as file:
        export(filled(ledger).entries(), file)
    path, other = swift_path / "kept.jsonl", swift_path / "other.jsonl"
    lines = path.read_bytes().split(b"\n")
    ends = [sum(len(line) + 1 for line in lines[: i + 1]) for i in range(len(lines) - 1)]
    rng = random.Random(5)
    for at in range(0, path.stat().st_size - 1, 2):
        found = verify_at(str(flipped(path, at, rng.randrange(8), other)))
        line = 1 + next(i for i, end in enumerate(ends) if at < end)
        # the line itself, the one behind it, or where another number put it
        assert any(str(line) in str(p) or p.seq == line + 1 for p in found.problems), at


# Exports


@pytest.mark.parametrize("key", [b"", b"secret"])
def test_an_export_is_verified_by_itself(where, swift_path, key):
    path = swift_path / "kept.jsonl"
    with open_ledger(where, key=key) as ledger, path.open("w") as file:
        assert export(filled(ledger).entries(), file) == 6
        entries, runs, found = [*ledger.entries()], ledger.runs(), verify(ledger)

    with open_ledger(str(path), key=key, reading=True) as kept:
        assert [*kept.entries()] == entries
        assert [*kept.entries("b")] == [e for e in entries if e.run == "b"]
        assert kept.runs() == runs
        assert verify(kept) == found
    assert verify_at(str(path), key=key) == found
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["hash"] for line in lines] == [e.hash for e in entries]


def test_lines_of_an_export_that_were_cut_out_or_moved_are_missed(swift_path):
    path = swift_path / "kept.jsonl"
    with open_ledger(str(swift_path / "ledger.db")) as ledger, path.open("w") as file:
        export(filled(ledger).entries(), file)
    lines = path.read_text().splitlines(keepends=True)
    other = swift_path / "other.jsonl"

    def problems(*kept):
        other.write_text("".join(kept))
        return said(verify_at(str(other)))

    assert problems(*lines[:3], *lines[4:])[0] == "entry 5 of run 'a': entry 4 is missing before it"
    assert problems(*lines[:2], lines[3], lines[2], *lines[4:])[0] == (
        "entry 4 of run 'b': entry 3 is missing before it"
    )
    assert problems(*lines, lines[2])[0] == "entry 3 of run 'a': it comes after entry 6"
    assert problems(*lines[:5], lines[5][:40]) == [
        f"line 6 of {other} is no JSON: Unterminated string starting at: line 1 column 40 (char 39)"
    ]
    assert problems(*lines[:5], "[]\n") == [f"line 6 of {other} is no entry"]
    assert problems(*lines[:5], lines[5].replace(":", ": ", 1)) == [
        f"line 6 of {other} is not canonical JSON"
    ]
    assert problems(*lines[:3], "\n", *lines[4:])[::2] == [
        "entry 5 of run 'a': entry 4 is missing before it",
        f"line 4 of {other} is no JSON: Expecting value: line 1 column 1 (char 0)",
    ]
    with pytest.raises(Damaged) as error:
        open_ledger(str(other), reading=True)
    assert str(error.value).endswith("column 1 (char 0)\n  hint: export the ledger again")
    assert problems() == []
    assert verify_at(str(other)).head == chain.FIRST


def test_a_damaged_ledger_is_not_exported(where, tamper, swift_path):
    with open_ledger(where) as ledger, (swift_path / "kept.jsonl").open("w") as file:
        filled(ledger)
        tamper("UPDATE servanda_ledger SET actor = 'eve' WHERE seq = 3")

        with pytest.raises(Damaged, match="entry 3 of run 'a'"):
            export(ledger.entries(), file)


def test_nothing_is_appended_to_an_export(swift_path):
    path = swift_path / "kept.jsonl"
    path.write_text("")
    with open_ledger(str(path), reading=True) as ledger, pytest.raises(LedgerError) as error:
        ledger.append("a", [Record("k", "ci", 1.0, {})], after=0)

    assert str(error.value) == (
        f"{path} is an exported ledger, which is read-only\n"
        "  hint: give the ledger that it was exported from"
    )


def test_a_problem_says_its_place():
    assert str(Problem(3, "a", "x")) == "entry 3 of run 'a': x"
    assert str(Problem(3, "", "x")) == "entry 3: x"
    assert str(Problem(None, "", "x")) == "x"


def test_a_folder_where_nothing_may_be_written_can_be_read(swift_path, monkeypatch):
    """SQLite wants files of its own beside a ledger; without them it is read as it stands."""
    path, connect = swift_path / "ledger.db", sqlite3.connect
    with open_ledger(str(path)) as ledger:
        filled(ledger)

    class Refusing:
        def execute(self, query):
            raise sqlite3.OperationalError("unable to open database file")

        def close(self):
            pass

    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda place, **how: connect(place, **how) if "immutable" in place else Refusing(),
    )

    assert verify_at(str(path)).entries == 6
