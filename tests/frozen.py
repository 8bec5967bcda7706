# The frozen list: what Servanda answers to fixed inputs, as names and digests.
#
#     python -m tests.frozen          prints what differs from tests/frozen.json, old and new
#     python -m tests.frozen --write  keeps the new answers
#
# A change of an entry is a change of an answer.  The commit that makes it names the entry, the old
# and the new value, and the answer of an oracle that says why the new one is right.
# tests/test_frozen.py holds the quick entries, tests/field/test_rows.py those of the field's bugs.

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks import truth_table
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.promotion.ledger.entry import Record
from servanda.promotion.ledger.ledger import open_ledger

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
_OF_A_CELL = ("clause", "limit", "value", "interval", "log_evidence", "log_price", "n", "missing")
PRESETS = ("nemo-grpo", "prime-rl", "slime", "trl", "verl-async", "verl-sync")


def read() -> dict:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def rounded(value):
    """Plain data with its numbers to six digits: processors differ in the last ones."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case list() | tuple():
            return [rounded(part) for part in value]
        case dict():
            return {key: rounded(part) for key, part in value.items()}
    return value


def digest(value) -> str:
    text = json.dumps(rounded(value), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_UNNAMED = ("rounding", "where", "note", "reason", "steps")


def place(cell: dict) -> str:
    """The slice of a cell, and the steps that it is about."""
    first, last = cell["steps"] or (0, 0)
    steps = f"step-{last}" if first == last else f"step-{first}-to-{last}"
    own = "" if last and cell["slice"] == "all" else cell["slice"]
    return " ".join(filter(None, (steps if last else "", own)))


def of_verdict(verdict: dict) -> dict:
    """What a verdict concludes: in words where there are few, else as a digest of the numbers.

    The evidence digest of the verdict is not kept: it is over every bit, and processors differ.
    """
    cells = [
        {
            name: value
            for name, value in {**cell, "slice": place(cell)}.items()
            if name not in _UNNAMED
        }
        for cell in verdict["cells"]
    ]
    red = [f"{c['clause']} on {place(c)}" for c in verdict["cells"] if c["outcome"] == "violated"]
    return {
        "outcome": verdict["outcome"],
        "exit": verdict["exit_code"],
        "violated": red,
        "cause": (verdict["advice"] or {}).get("cause", ""),
        "contract": verdict["key"]["contract"],
        "cells": digest(cells),
    }


def servanda(*words, input: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*map(str, words)], prog_name="servanda", input=input)
    return done.exit_code, done.stdout


def of_row(answer) -> dict:
    """What a case of a bug of the field is answered: exit code, and the cause without numbers."""
    cause = re.search(r"^Likely cause +(.*)$", answer.text, re.MULTILINE)
    words = "" if cause is None else re.split(r"[;(]|\d", cause[1], maxsplit=1)[0].strip()
    return {"exit": answer.exit, "cause": words}


def dumps() -> dict:
    found = {}
    for preset in (None, *PRESETS):
        asked = [] if preset is None else ["--preset", preset]
        _, text = servanda(
            "check", ROOT / "examples/tiny-dump", *asked, "--format", "json", "--quiet"
        )
        found[f"examples/tiny-dump {preset or ''}".strip()] = of_verdict(json.loads(text))
    return found


def contracts(folder: Path) -> dict:
    """The toy contract on exact tables: measured anew, and audited from its log of traffic."""
    toy = ROOT / "examples/audit/toy.kernelcontract.yaml"
    _, text = servanda("check", toy, "--run-dir", folder / "run", "--format", "json", "--quiet")
    log, state = toy.parent / "served.jsonl", folder / "state"
    code, told = servanda(
        "gateway", "audit", toy, "--log", log, "--state", state, "--format", "json"
    )
    slices = json.loads(told)["standing"]["slices"]
    states = {one["name"]: one["status"] for one in slices}
    cells = [{name: cell[name] for name in _OF_A_CELL} for one in slices for cell in one["cells"]]
    return {
        "examples/audit check": of_verdict(json.loads(text)),
        "examples/audit audit": {
            "exit": code,
            "slices": states,
            "cells": digest(cells),
        },
    }


def ledgers(folder: Path) -> dict:
    """A ledger written by this version, and one that was exported: hashes, and how it is kept."""
    place = folder / "ledger.db"
    with open_ledger(str(place), witness=folder / "head") as ledger:
        body = {"why": "it holds", "n": 3, "rows": [1, 2.5, None, True, {"é": "ü"}], "e": 1e-17}
        kept = ledger.append(
            "a", [Record("begun", "ci", 1.25, {}), Record("advanced", "ci", 2.5, body)], after=0
        )
    with closing(sqlite3.connect(place)) as db:
        form = db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
    exported = (ROOT / "examples/tiny-ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "a new ledger": {
            "head": kept[-1].hash,
            "schema": [schema, digest(form)],
        },
        "examples/tiny-ledger": {"head": json.loads(exported[-1])["hash"], "n": len(exported)},
    }


def truth() -> dict:
    """The records of the truth table: what a check says of each fault at each strength."""
    found: dict[str, list] = {}
    for line in truth_table.RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        told = [record["value"], record["outcome"], record["exit"], record["deciding"]]
        found.setdefault(record["fault"], []).append(told)
    key = lambda row: json.dumps(row[0])  # noqa: E731
    return {fault: digest(sorted(rows, key=key)) for fault, rows in found.items()}


def quick(folder: Path) -> dict:
    from tests.slow.test_examples import EXPECTED

    return {
        "dumps": dumps(),
        "contracts": contracts(folder),
        "ledgers": ledgers(folder),
        "truth table": truth(),
        "examples on real kernels": {name: list(told) for name, told in EXPECTED.items()},
    }


def field(folder: Path) -> dict:
    from tests.field import ROWS

    return {
        row.name: of_row(row.case(Path(tempfile.mkdtemp(dir=folder)), True))
        for row in ROWS
        if row.case
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        now = quick(Path(made)) | {"field": field(Path(made))}
    before = read() if KEPT.exists() else {}
    for part in {**before, **now}:
        olds, news = before.get(part, {}), now.get(part, {})
        for name in {**olds, **news}:
            if olds.get(name) != news.get(name):
                print(f"{part}: {name}\n  old {olds.get(name)}\n  new {news.get(name)}")
    if "--write" in sys.argv:
        KEPT.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
