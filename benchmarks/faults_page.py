# docs/reference/faults.md, from the records of benchmarks/truth_table.jsonl alone.

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.causes_dumps import FAULTS as KNOWN
from benchmarks.truth_table import GATES, NAMES, NONE, OURS, ROOT, Record, Records
from servanda.engines.faults import FAULTS
from servanda.judgement.causes.catalogue import UNEXPLAINED

DOCS = ROOT / "docs" / "reference" / "faults.md"
ABSENT = "-"

_PAGE = """\
# The catalogue of faults, and their detection

The catalogue contains bugs that were reported in the field. You can inject each into a kernel:

```sh
$ servanda demo --fault list             # all of them, with their sources
$ servanda demo --fault bf16_positions   # check the bundled kernels with one of them
$ servanda demo --fault undisclosed_top_p --value 0.95 --contract my.kernelcontract.yaml
```

`demo --fault` has the exit codes of `servanda check`. In a contract, write
`fault: {{bf16_positions: true}}` in a kernel. An engine to which a fault cannot apply refuses it by
name.

All tables below are of the kernels of `examples/tiny-faults.kernelcontract.yaml`, whose limits are
close to the drift of a healthy bfloat16 kernel. Without a fault the contract holds. It catches
**{defaults} of {count} faults at their defaults**, and **{caught} of {met} at the strength reported
in the field**; missed there: {missed}.
The defaults are strengths that are visible on a model of 2.6 M parameters.

The page is written by `python -m benchmarks.truth_table --write` from the records in
`benchmarks/truth_table.jsonl`; without `--write` the command measures the missing records.
`make test-slow` measures every default and every value of the field again.

## At the default strengths

{at_defaults}

- *side*, *takes*, *value*: the kernel with the fault, the accepted values, and the measured value,
  which is the default.
- *verdict*, *exit*: as of `servanda check`. *Refused* (exit 4): the identity of weights or
  vocabulary reveals the fault before anything is measured. *Error* (exit 4): too much of the
  evidence is missing.
- *decided by*: the clauses and slices that determined the outcome. Where a validity check fails
  (`fidelity`, `finite`, `steady`), the certificates are inconclusive, because their assumptions are
  wrong.
- *perplexity*: of the infer kernel relative to the train kernel, on the golden texts. *k3* and
  *|d|*: means over the sampled tokens, d being the difference of log-probabilities.
- *thresholds exceeded*: the thresholds of other projects that the same tokens exceed. All of them
  are averages; [names of the metrics](metric_names.md). A run stops as soon as it is decided, so
  the number of tokens differs between rows. Top-1 agreement is below its threshold for the healthy
  kernel too: rounding alone flips more than 2 % of the near ties.

## At the strengths reported in the field

{at_field}

*The same*: the field's value is the default; see the first table. No report gives a value for
{unknown}. Not measured yet at the
field's value: {open}.

## The smallest strength that each gate catches

{smallest}

**`b`**, not `a`: the gate catches the fault at b and misses it at a, the next weaker measured
value. At most **`b`**: no weaker value was measured, or not all values of the catalogue between a
and b. Not `a`: the gate misses every measured value; a is the strongest. Each is one run with fixed
seeds, and values stronger than b are assumed to be caught as well. Servanda catches a fault if the
result is violated, refused or an error; *inconclusive* counts as missed. Top-1 agreement is left
out. These are on or off, without a smallest strength: {switches}.

## On a real language model

The same faults in float32 kernels of SmolLM2-135M, a model of 135 million parameters, on prompts of
chat, code, arithmetic and JSON and on long texts (`python -m benchmarks.truth_table --on
real-model`, after `make real-model`; the contract is `benchmarks/real_faults.kernelcontract.yaml`,
with the limits of the preset `vllm-upgrade`). Without a fault it holds. Of {real} faults
{real_caught} are caught at their defaults; missed there: {real_missed}. The limits are wider than
those of the bundled model above, for real kernels differ by more.

{real_table}

*Cause*: what the verdict names at the default; *unexplained* where no cause explains enough, and
a dash where the verdict is no violation.
{real_right}

All magnitudes are those of one machine. The size of the same bug in another model cannot be known
in advance. The report of each run lists which of these faults *your* gate would have caught at its
size.
"""


def described(name: str) -> tuple[str, str, str, str, str]:
    """What the catalogue says of a fault: name, side, what it takes, default, summary."""
    if name == NONE:
        return f"`{NONE}`", ABSENT, ABSENT, ABSENT, "Nothing: the kernels as they are."
    fault = FAULTS[name]
    return f"`{name}`", fault.side, str(fault.takes), _code(fault.default), fault.summary


def at_default(records: Records, name: str) -> Record | None:
    value = None if name == NONE else FAULTS[name].default
    return records.get((name, json.dumps(value)))


def at_field(records: Records, name: str) -> Record | None:
    """The record at the strength that the field met; None where no report gives one."""
    met = FAULTS[name].field
    return None if met is None else records.get((name, json.dumps(met)))


def bracket(records: Records, name: str, gate: str) -> tuple[Any, Any]:
    """The strongest strength that a gate misses, and the weakest that it catches.

    Only strengths that were measured; None where there is none.
    """
    found = [records.get((name, json.dumps(value))) for value in FAULTS[name].strengths]
    told = [r for r in found if r and (gate == OURS or gate in r.gates)]
    caught = next((i for i, record in enumerate(told) if record.caught(gate)), len(told))
    missed = told[caught - 1].value if caught else None
    return missed, told[caught].value if caught < len(told) else None


def _code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def _size(told: tuple[float | None, bool | None] | None) -> str:
    return f"{told[0]:.2g}" if told and told[0] is not None else ABSENT


def _change(told: tuple[float | None, bool | None] | None) -> str:
    if told is None or told[0] is None:
        return ABSENT
    return f"{round(100 * told[0], 2) + 0.0:+.2f} %"  # never -0.00


def _decided(record: Record) -> str:
    cells = ", ".join(record.deciding) + (f", {record.more} more" if record.more else "")
    return cells or ("identity" if record.outcome == "refused" else ABSENT)


def _fired(record: Record) -> str:
    return (", ".join(record.fired) or "none") if record.gates else ABSENT


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _defaults(records: Records) -> str:
    rows = []
    for name in NAMES:
        if record := at_default(records, name):
            sizes = (record.gates.get(gate) for gate in GATES[1:3])
            rows.append(
                (
                    *(*described(name), record.outcome, str(record.exit), _decided(record)),
                    _change(record.gates.get(GATES[0])),
                    *(*map(_size, sizes), _fired(record)),
                )
            )
    head = (
        *("fault", "side", "takes", "value", "what goes wrong", "verdict", "exit", "decided by"),
        *("perplexity", "mean k3, nats", "mean |d|, nats", "thresholds exceeded"),
    )
    return _table(head, rows)


def _in_the_field(records: Records) -> str:
    rows = []
    for name, fault in FAULTS.items():
        if record := at_field(records, name):
            same = "the same" if fault.field == fault.default else _code(fault.default)
            rows.append(
                (
                    *(f"`{name}`", _code(fault.field), fault.field_source, same),
                    *(record.outcome, _decided(record), _fired(record)),
                )
            )
    head = (
        *("fault", "the field's value", "which is", "default", "verdict", "decided by"),
        "thresholds exceeded",
    )
    return _table(head, rows)


def _told(strengths: Sequence[Any], missed: Any, caught: Any) -> str:
    """Between which strengths a gate begins to catch, as far as that was measured."""
    less = f"not {_code(missed)}" if missed is not None else ""
    if caught is None:
        return less or ABSENT
    below = strengths.index(missed) if missed is not None else -1
    most = "" if strengths.index(caught) - below == 1 else "at most "
    return f"{most}**{_code(caught)}**" + (f", {less}" if less else "")


def _smallest(records: Records) -> str:
    rows = []
    for name, fault in FAULTS.items():
        if not fault.strengths:
            continue
        cells = []
        for gate in (OURS, *GATES[:-1]):
            missed, caught = bracket(records, name, gate)
            cells.append(_told(fault.strengths, missed, caught))
        rows.append((f"`{name}`", *cells))
    return _table(("fault", OURS, *GATES[:-1]), rows)


def _real(records: Records, real: Records) -> dict[str, Any]:
    """The values of the section on a real model."""
    own = [name for name in FAULTS if at_default(real, name)]
    rows, right, named = [], 0, 0
    for name in own:
        record, fault = at_default(real, name), FAULTS[name]
        assert record is not None
        cells = [
            _told(fault.strengths, *bracket(of, name, OURS)) if fault.strengths else ABSENT
            for of in (records, real)
        ]
        causes = KNOWN[name].causes if name in KNOWN else ()
        told = record.cause if record.cause and record.outcome == "violated" else ABSENT
        if causes and told not in (ABSENT, UNEXPLAINED):
            named += 1
            right += told in causes
        decided = _decided(record)
        rows.append((f"`{name}`", *cells, _code(record.value), record.outcome, decided, told))
    head = ("fault", "smallest caught, bundled model", "smallest caught, real model", "default")
    missed = [n for n in own if (r := at_default(real, n)) and not r.caught(OURS)]
    return {
        "real": len(own),
        "real_caught": len(own) - len(missed),
        "real_missed": _names(missed),
        "real_table": _table((*head, "verdict", "decided by", "cause"), rows),
        "real_right": f"Of {named} causes of faults whose right names are known from "
        f"[causes](../explanation/causes.md), {right} are right.",
    }


def _names(found: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in found) or "none"


def page(records: Records, real: Records) -> str:
    """docs/reference/faults.md, from the records alone.

    Args:
        real: those of the real language model.
    """
    own = [name for name in FAULTS if at_default(records, name)]
    met = [name for name in own if at_field(records, name)]
    defaults = [name for name in own if (r := at_default(records, name)) and r.caught(OURS)]
    missed = [
        f"{name} at {json.dumps(FAULTS[name].field)}"
        for name in met
        if (r := at_field(records, name)) and not r.caught(OURS)
    ]
    return _PAGE.format(
        count=len(own),
        defaults=len(defaults),
        met=len(met),
        caught=len(met) - len(missed),
        missed=_names(missed),
        open=_names([n for n in FAULTS if FAULTS[n].field is not None and n not in met]),
        unknown=_names([name for name in own if FAULTS[name].field is None]),
        switches=_names([name for name in own if not FAULTS[name].strengths]),
        at_defaults=_defaults(records),
        at_field=_in_the_field(records),
        smallest=_smallest(records),
        **_real(records, real),
    )
