# The truth table of the faults: what a check says of each, and what the field's numbers say.
#
#     python -m benchmarks.truth_table                  runs every row and prints it
#     python -m benchmarks.truth_table --fault int4     runs one row
#     python -m benchmarks.truth_table --write          also puts it into docs/reference/faults.md
#
# A row is one `servanda check` of examples/tiny-faults with the fault in it, half a minute on
# two cores.  tests/slow/test_truth_table.py runs every row again and holds the page to it.

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from servanda import run
from servanda.drill import Drill, drill
from servanda.faults import FAULTS
from servanda.gates import Gate

ROOT = Path(__file__).parents[1]
CONTRACT = ROOT / "examples" / "tiny-faults.kernelcontract.yaml"
DOCS = ROOT / "docs" / "reference" / "faults.md"
NONE = "none"
NAMES = (NONE, *FAULTS)
SHOWN = 2  # deciding cells
ABSENT = "-"
HEAD = (
    *("fault", "side", "takes", "value", "what goes wrong", "verdict", "exit", "decided by"),
    *("perplexity", "mean k3, nats", "mean &#124;d&#124;, nats", "thresholds that ring"),
)


@dataclass(frozen=True)
class Row:
    """One row of the page, as its texts."""

    fault: str
    side: str
    takes: str
    value: str
    summary: str
    verdict: str
    exit: str
    deciding: str
    perplexity: str
    k3: str
    distance: str
    ringing: str

    @classmethod
    def of(cls, told: Drill) -> Row:
        gates = {gate.name.split(" ≤")[0]: gate for gate in told.gates}
        ringing = [_plain(name) for name, gate in gates.items() if gate.passes is False]
        more = len(told.deciding) - SHOWN
        return cls(
            *described(told.fault or NONE),
            verdict=told.outcome,
            exit=str(told.exit_code),
            deciding=", ".join(told.deciding[:SHOWN]) + (f", {more} more" if more > 0 else "")
            or ("identity" if told.refused else ABSENT),
            perplexity=_change(gates.get("perplexity, ±1 %")),
            k3=_size(gates.get("mean KL (k3)")),
            distance=_size(gates.get("mean |Δ logp|")),
            ringing=(", ".join(ringing) or "none") if told.gates else ABSENT,
        )

    @property
    def first(self) -> str:
        """The first deciding cell."""
        return self.deciding.split(", ")[0]

    def __str__(self) -> str:
        fault, side, takes, value, *rest = asdict(self).values()
        return f"| `{fault}` | {side} | {takes} | {_code(value)} | {' | '.join(rest)} |"


def described(name: str) -> tuple[str, str, str, str, str]:
    """What the catalogue says of a fault: name, side, what it takes, default, summary."""
    if name == NONE:
        return NONE, ABSENT, ABSENT, ABSENT, "Nothing: the kernels as they are."
    fault = FAULTS[name]
    return name, fault.side, str(fault.takes), json.dumps(fault.default), fault.summary


def _code(value: str) -> str:
    return value if value == ABSENT else f"`{value}`"


def _plain(gate: str) -> str:
    return gate.split(" ≥")[0].replace("|", "&#124;")


def _size(gate: Gate | None) -> str:
    return f"{gate.value:.2g}" if gate and gate.value is not None else ABSENT


def _change(gate: Gate | None) -> str:
    if gate is None or gate.value is None:
        return ABSENT
    return f"{round(100 * gate.value, 2) + 0.0:+.2f} %"  # never -0.00


def measured(name: str) -> Row:
    """Check the contract with one fault of the catalogue, or with none."""
    return Row.of(drill(run.load(CONTRACT), None if name == NONE else name))


def read(page: str) -> dict[str, Row]:
    """The rows of a page by their fault."""
    lines = re.findall(r"^\| (`.*) \|$", page, re.M)
    rows = [Row(*(cell.strip("`") for cell in line.split(" | "))) for line in lines]
    return {row.fault: row for row in rows}


_PAGE = """\
# The faults, and what says so

The catalogue holds bugs that were met in the field, to be put into a kernel on purpose:

```sh
$ servanda demo --fault list             # all of them, and where each was met
$ servanda demo --fault bf16_positions   # check the shipped kernels with one of them
$ servanda demo --fault undisclosed_top_p --value 0.95 --contract my.kernelcontract.yaml
```

`demo --fault` exits as `servanda check` does. In a contract the same is said by a kernel's
`fault: {{bf16_positions: true}}`. An engine that has nothing to break in the way of a fault refuses
it by name.

Below, every fault at its default in the kernels of `examples/tiny-faults.kernelcontract.yaml`,
whose limits lie near what a healthy bfloat16 kernel needs. **Every fault is caught; without one,
the contract holds.** Measured by `python -m benchmarks.truth_table --write`; `make test-slow`
runs every row again.

{table}

- *side*, *takes*, *value*: the kernel that has the fault, the values that it may be given, and the
  one that was measured, which is its default.
- *verdict*, *exit*: as of `servanda check`. *Refused* (exit 4): the identity of weights or
  vocabulary gives it away before anything is measured. *Error* (exit 4): so much of the evidence is
  missing that the rest says nothing.
- *decided by*: the clauses of the contract, and the slices, that made the outcome. Where a guard
  fails (`fidelity`, `finite`, `steady`), the certificates say nothing: the numbers are not what
  they claim.
- *perplexity*: of infer against train, on the golden texts. *k3* and *|d|*: means over the sampled
  tokens, d being the difference of log-probabilities.
- *thresholds that ring*: of the field's usual ones, all of them averages, on the same tokens;
  `servanda explain` and the [glossary](glossary.md) have their names. A run stops as soon as it is
  decided, so how many tokens that are differs between rows. Top-1 agreement rings for the healthy
  kernel too: of near ties, rounding alone turns more than 2 %.

The magnitudes are those of the shipped model of 2.6 M parameters, on one machine: how large the
same bug is in another model, nobody knows before it is there. Which of these faults *your* gate
would have caught at its size is in the report of each run.
"""


def page(rows: Iterable[Row]) -> str:
    """The page, in the order of the catalogue."""
    by_name = {row.fault: row for row in rows}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [str(by_name[name]) for name in NAMES if name in by_name]
    return _PAGE.format(table="\n".join(lines))


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--fault", action="append", choices=NAMES, help="default: every row")
    cli.add_argument("--write", action="store_true", help="put what was run into the page")
    given = cli.parse_args()
    for name in given.fault or NAMES:
        row = measured(name)
        print(row, flush=True)
        if given.write:
            kept = read(DOCS.read_text(encoding="utf-8")) if DOCS.exists() else {}
            DOCS.write_text(page([*(kept | {name: row}).values()]), encoding="utf-8")


if __name__ == "__main__":
    main()
