# docs/explanation/field_bugs.md, written from the rows: python -m tests.field.page

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks import committed

from tests.field import ROWS
from tests.field.rows import Row, short

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "field_bugs.md"
SECTIONS = (
    "Weight sync and adapters",
    "Drafts and speculation",
    "Prefix cache, KV and state",
    "Kernels, batches, builds",
    "Meaning of the data",
    "Routing of experts",
    "Vendors",
)
HEAD = """\
<!-- written by python -m tests.field.page -->
# Field bugs, and which of them Servanda catches

This page lists bugs with training-inference mismatch as cause or effect that people reported in
public threads, and the answer that Servanda gives to data of the same shape: **{caught} of {all}
are caught, {part} in part, {no} not.** The threads were read up to September 2026.

*Caught* means that the command is red and its answer leads you to the bug. *In part*: it is red
without the cause, red only above a certain size, or needs code of your own. *Not*: no present
command detects it.

Each answer in the tables is the verbatim output of the command in `tests/field/`. A case there
reproduces the bug, a healthy twin of the same shape has to hold, and this page is generated from
the cases. The data is synthetic. Dumps are sampled from a softmax over 256 tokens, and kernels
are tables of probabilities or the bundled models of 2.6 M parameters. Servers that take over
weights are test servers of a model of two layers, which speak as vLLM and SGLang do. Error sizes
are those of the thread, if it states them. A case therefore shows that this kind of bug is
detected, not how large the bug was in the field. No case ran on a GPU or in the original
frameworks. The numbers of the threads are their reporters'.

{unseen}
Each of them, and the rules of other projects on known laws, is on
[the page of rules](rules.md#measured).
"""


def links(row: Row) -> str:
    """Every thread of a row as a link; GitHub leads from an issue's address to a pull request."""
    found = []
    for thread in row.threads:
        repository, number = thread.split("#")
        found.append(f"[{short(thread)}](https://github.com/{repository}/issues/{number})")
    return ", ".join(found)


def _unseen() -> str:
    """How many of the rare faults are caught that were written without a look at the source."""
    kept = json.loads((committed.KEPT / "rules_measured.json").read_text(encoding="utf-8"))
    lines = (block for block in kept["blocks"] if isinstance(block, str))
    found = next(line for line in "\n".join(lines).splitlines() if "without a look" in line)
    return found.strip()


def answer(row: Row) -> str:
    """Of the case that is run."""
    if row.exit is None:
        return "-"
    return f"`{row.says.replace('|', '&#124;')}` · exit {row.exit}"


def command(row: Row) -> str:
    """A call in code; words, and what stands in brackets behind a call, not."""
    if not row.command.startswith(("servanda", "Monitor")):
        return row.command
    call, bracket, rest = row.command.partition(" (")
    return f"`{call}`{bracket}{rest}"


def rows(state: str) -> Iterator[tuple[str, list[Row]]]:
    for section in SECTIONS:
        found = [row for row in ROWS if (row.section, row.state) == (section, state)]
        if found:
            yield section, found


def written() -> str:
    """The whole page."""
    count = {
        state: sum(row.state == state for row in ROWS) for state in ("caught", "in part", "not")
    }
    lines = [
        HEAD.format(
            all=len(ROWS),
            caught=count["caught"],
            part=count["in part"],
            no=count["not"],
            unseen=_unseen(),
        ),
        "## Caught",
        "",
    ]
    for section, found in rows("caught"):
        lines += [
            f"**{section}**",
            "",
            "| bug | description | command | answer |",
            "|---|---|---|---|",
        ]
        lines += [f"| {links(r)} | {r.what} | {command(r)} | {answer(r)} |" for r in found]
        lines.append("")
    for state, title in (("in part", "Caught in part"), ("not", "Not caught")):
        if not count[state]:
            continue
        lines += [f"## {title}", ""]
        lines += ["| bug | description | command | answer | missing |", "|---|---|---|---|---|"]
        for _, found in rows(state):
            lines += [
                f"| {links(r)} | {r.what} | {command(r)} | {answer(r)} | {r.missing} |"
                for r in found
            ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
