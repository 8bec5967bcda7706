# The truth table of the faults: what a check says of each, at which strength, and what the
# field's numbers say of the same tokens.
#
#     python -m benchmarks.truth_table                measures what is not on record, and prints it
#     python -m benchmarks.truth_table --fault int4   one fault only; --again measures it anew
#     python -m benchmarks.truth_table --write        writes docs/reference/faults.md from records
#     python -m benchmarks.truth_table --on real-model      the same on a real language model: two
#                                                     hours on a core, after `make real-model`
#
# A record is one `servanda check` of examples/tiny-faults with a fault in it, half a minute on
# two cores: at the fault's default, at the field's strength, and at those of its strengths that
# a bisection needs to find the smallest that each gate catches.  Records are kept in
# benchmarks/truth_table.jsonl; a fault that is new to the catalogue is measured by the first line.
# tests/engines/faults/test_catalogue.py holds the page to the records,
# tests/slow/test_truth_table.py the records to the code.

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servanda.engines.faults import FAULTS
from servanda.runner import run
from servanda.runner.fault_drill import Drill, drill

ROOT = Path(__file__).parents[1]
CONTRACT = ROOT / "examples" / "tiny-faults.kernelcontract.yaml"
RECORDS = Path(__file__).with_suffix(".jsonl")
REAL, REAL_CONTRACT = "real-model", Path(__file__).with_name("real_faults.kernelcontract.yaml")
REAL_RECORDS = Path(__file__).with_name("real_faults.jsonl")
REAL_MODEL = ROOT / ".venvs" / "real-model" / "float32"
REAL_PROMPTS = ROOT / "build" / "truth_table"
LONG_TOKENS, SHORT, GOLDEN = (260, 264, 268, 272), 24, 8  # prompts of the real model
NONE = "none"
NAMES = (NONE, *FAULTS)
CAUGHT = ("violated", "error", "refused")
# the field's gates, as servanda.judgement.token_profile names them without limit; the last
# fires for the healthy kernel too, and is left out of the smallest strengths
GATES = (
    *("perplexity, ±1 %", "mean KL (k3)", "mean |Δ logp|", "token_mult_prob_error"),
    *("mean |Δ probability|", "p99 |Δ logp|", "top-1 agreement"),
)
OURS = "servanda"
SHOWN = 2  # deciding cells


@dataclass(frozen=True)
class Record:
    """One check with one fault in it.

    Args:
        value: of the fault; None where there is none.
        deciding: the first of the cells that made the outcome, "clause on slice"; more: how many
            there are beside them.
        cause: the likely cause that the verdict names; "" if it names none.
        tokens: how many were judged; None where that was not kept.
        gates: of the field: name -> what it measured, and whether it passes; both None where
            there was no number.
    """

    fault: str
    value: Any
    outcome: str
    exit: int
    deciding: tuple[str, ...]
    tokens: int | None
    gates: dict[str, tuple[float | None, bool | None]]
    more: int = 0
    cause: str = ""

    @classmethod
    def of(cls, told: Drill) -> Record:
        gates = {
            gate.name.split(" ≤")[0].split(" ≥")[0]: (gate.value, gate.passes)
            for gate in told.gates
        }
        advice = told.verdict.advice if told.verdict is not None else None
        return cls(
            *(told.fault or NONE, told.value, told.outcome, told.exit_code),
            *(told.deciding[:SHOWN], told.tokens, gates, max(0, len(told.deciding) - SHOWN)),
            cause=advice.name if advice is not None else "",
        )

    @property
    def key(self) -> tuple[str, str]:
        return self.fault, json.dumps(self.value)

    @property
    def fired(self) -> tuple[str, ...]:
        """The field's gates that fire."""
        return tuple(name for name in GATES if self.gates.get(name, (None, None))[1] is False)

    def caught(self, gate: str) -> bool:
        """Whether servanda, or a gate of the field, calls this kernel wrong."""
        return self.outcome in CAUGHT if gate == OURS else gate in self.fired


Records = dict[tuple[str, str], Record]


def read(path: Path = RECORDS) -> Records:
    """The records of a file, by fault and value."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: Records = {}
    for line in lines:
        one = json.loads(line)
        one["deciding"] = tuple(one["deciding"])
        one["gates"] = {name: tuple(told) for name, told in one["gates"].items()}
        record = Record(**one)
        found[record.key] = record
    return found


def write(records: Records, path: Path = RECORDS) -> None:
    """The file, in the order of the catalogue; of each fault the default first."""
    order = sorted(records.values(), key=lambda r: (NAMES.index(r.fault), *_place(r)))
    text = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in order)
    path.write_text(text, encoding="utf-8")


def _place(record: Record) -> tuple[int, str]:
    fault = FAULTS.get(record.fault)
    if fault is None or record.value == fault.default:
        return -1, ""
    known = record.value in fault.strengths
    return (fault.strengths.index(record.value) if known else 99), json.dumps(record.value)


def measured(name: str, value: Any = None, contract: Path = CONTRACT) -> Record:
    """Check the contract with one fault of the catalogue, or with none."""
    return Record.of(
        drill(run.load(contract), None if name == NONE else name, value, open=run.in_process)
    )


def write_real_prompts() -> None:
    """Prompts of the real model: short ones of its example, and long ones, the longest last."""
    example = runpy.run_path(str(ROOT / "examples" / "real-model" / "run.py"))
    write_prompts = example["write_prompts"]
    write_prompts.__globals__["LONG_TOKENS"] = LONG_TOKENS
    REAL_PROMPTS.mkdir(parents=True, exist_ok=True)
    write_prompts(str(REAL_MODEL), REAL_PROMPTS / "prompts.jsonl")
    lines = sorted((REAL_PROMPTS / "prompts.jsonl").read_text().splitlines(), key=len)
    short, long = lines[: -len(LONG_TOKENS)], lines[-len(LONG_TOKENS) :]
    random.Random(1).shuffle(short)
    for name, kept in (
        ("prompts", [*sorted(short[:SHORT], key=len), *long]),
        ("golden", short[SHORT : SHORT + GOLDEN]),
    ):
        text = "".join(f"{line}\n" for line in kept)
        (REAL_PROMPTS / f"{name}.jsonl").write_text(text, encoding="utf-8")


def smallest(strengths: Sequence[Any], caught: Callable[[Any], bool], known: int | None) -> int:
    """The place of the weakest strength that is caught, where all stronger ones are too.

    Args:
        strengths: weakest first; known: a place that is caught, where one is.

    Returns:
        len(strengths) where the strongest is not caught.

    >>> smallest([1, 2, 3, 4], lambda value: value >= 3, None)
    2
    """
    missed, seen = -1, len(strengths)
    if known is not None:
        seen = known
    elif strengths:  # most gates of the field see no strength at all
        seen -= 1
        if not caught(strengths[seen]):
            return len(strengths)
    while seen - missed > 1:
        at = (missed + seen) // 2
        if caught(strengths[at]):
            seen = at
        else:
            missed = at
    return seen


def sweep(name: str, look: Callable[[str, Any], Record], gates: Sequence[str]) -> None:
    """Look at a fault's default, at the field's value, and at what the bisections ask for."""
    if name == NONE:
        look(NONE, None)
        return
    fault = FAULTS[name]
    for value in (fault.default, fault.field):
        if value is not None:
            look(name, value)
    for gate in gates:
        at = fault.strengths.index(fault.default) if fault.default in fault.strengths else None
        known = at if at is not None and look(name, fault.default).caught(gate) else None
        smallest(fault.strengths, lambda value, gate=gate: look(name, value).caught(gate), known)


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--fault", action="append", choices=NAMES, help="default: all of them")
    cli.add_argument("--again", action="store_true", help="measure what is on record, too")
    cli.add_argument("--write", action="store_true", help="write the page from the records")
    cli.add_argument("--on", choices=(CONTRACT.name.partition(".")[0], REAL))
    given = cli.parse_args()
    real = given.on == REAL
    contract, path = (REAL_CONTRACT, REAL_RECORDS) if real else (CONTRACT, RECORDS)
    if real:
        write_real_prompts()
    records = read(path)
    if given.again:
        names = given.fault or NAMES
        records = {key: record for key, record in records.items() if key[0] not in names}

    def look(name: str, value: Any) -> Record:
        key = name, json.dumps(value)
        if key not in records:
            records[key] = measured(name, value, contract)
            write({**read(path), key: records[key]}, path)
            told = records[key]
            print(name, key[1], told.outcome, told.tokens, told.cause, *told.fired, flush=True)
        return records[key]

    for gates in ((OURS,),) if real else ((OURS,), GATES[:-1]):
        for name in given.fault or (() if given.write else NAMES):
            sweep(name, look, gates)
    if given.write:
        from benchmarks.faults_page import DOCS, page  # which reads records, as this does

        DOCS.write_text(page(read(), read(REAL_RECORDS)), encoding="utf-8")


if __name__ == "__main__":
    main()
