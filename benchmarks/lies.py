"""What `servanda check` says of data that lies, written before the checks that find it were known.

    python -m benchmarks.lies [1|2]       runs a set of tests/field/, six minutes on a core, or both
    python -m benchmarks.lies --write     writes the page from the records alone

The answers of the first run of each set stay in benchmarks/lies_unseen.json, beside those of the
last; both are counted on docs/how-to/dumps.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.field import second_unseen_lies, unseen_lies
from tests.field.unseen_lies import Lie

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from benchmarks.rules import share

RECORDS = Path(__file__).parent / "lies_unseen.json"
SETS = {"1": unseen_lies.FOUND, "2": second_unseen_lies.FOUND}
DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "dumps.md"


def answered(case: Lie) -> dict[str, Any]:
    """The exit code and the lines that are not fine, and whether both are as expected."""
    with tempfile.TemporaryDirectory() as folder:
        case.make(Path(folder), 0)
        command = [sys.executable, "-m", "servanda", "check", folder]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [text.strip() for text in done.stdout.splitlines()]
    odd = [text for text in lines if text[:1] in ("✗", "!", "?") and text]
    reason = [*odd, *(text for text in lines if text.startswith("UNSOUND:")), done.stderr]
    named = any(word in text.lower() for word in case.words for text in reason)
    right = {
        "refused": done.returncode in (1, 2, 4) and named,
        "not green": done.returncode != 0,
        "noted": done.returncode != 0 or named,
        "holds": done.returncode == 0 and not any(text.startswith("✗") for text in odd),
    }[case.expect]
    row = {"case": case.name, "kind": case.kind, "expect": case.expect}
    return row | {"exit": done.returncode, "right": right, "line": (odd or [""])[0][:200]}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    lies = [row for row in rows if row["kind"] != "healthy"]
    healthy = [row for row in rows if row["kind"] == "healthy"]
    found, held = (sum(row["right"] for row in of) for of in (lies, healthy))
    return [share(found, len(lies)), share(held, len(healthy))]


def main() -> None:
    kept = json.loads(RECORDS.read_text(encoding="utf-8"))
    asked = [name for name in SETS if name in sys.argv[1:]] or [*SETS]
    for name in asked if "--write" not in sys.argv else ():
        rows: list[dict[str, Any]] = []
        for case in SETS[name]:
            rows.append(answered(case))
            row = rows[-1]
            word = "right" if row["right"] else "WRONG"
            print(word, case.kind, case.name, row["exit"], row["line"], flush=True)
        kept[name] = {"first": rows, **kept.get(name, {}), "now": rows}
        text = json.dumps(kept, indent=1, ensure_ascii=False)
        RECORDS.write_text(f"{text}\n", encoding="utf-8")
    heads = ["set", "run", "lies answered as expected", "healthy neighbours that hold"]
    lines = [[n, when, *summary(kept[n][when])] for n in kept for when in ("first", "now")]
    text = markdown(heads, lines)
    committed.write(
        DOCS, text, "python -m benchmarks.lies", "<!-- lies -->", "<!-- end of lies -->"
    )


if __name__ == "__main__":
    main()
