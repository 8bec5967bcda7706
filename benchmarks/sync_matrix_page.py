# The page of the matrix of sync faults, from its kept rows: benchmarks/sync_matrix.py --write.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks import committed
from benchmarks.sync_matrix import DELTAS, SETTINGS, Row

DOCS = committed.ROOT / "docs" / "explanation" / "sync_matrix.md"
_TOY = "a toy in float64 that FSDP2 shards over {} gloo processes; its engine is on rank 0"
_DELTAS = "a Llama or a mixture of experts of two layers, and an engine in bfloat16 that is sent {}"
ABOUT = {
    "FSDP2, 2 processes": _TOY.format(2),
    "FSDP2, 4 processes": _TOY.format(4),
    "ZeRO-3, 2 processes": "the same toy in float32, which DeepSpeed's ZeRO-3 shards over 2 gloo "
    "processes; a step of training before and after each test",
    "vLLM's endpoints": "a Llama of two layers behind a stand-in with the endpoints of vLLM 0.32",
    "SGLang's endpoints": "the same behind a stand-in with the endpoints of SGLang 0.5.23",
    "one replica of three": "three stand-ins for vLLM, of which the second one has the fault",
    "TRL": "TRL's GRPOTrainer on models/tiny-lm, with an engine in bfloat16 for its rollouts",
    **{f"differences: {kind}": _DELTAS.format(how) for kind, how in DELTAS.items()},
    "unseen": "ten faults and ten working syncs of small models, which were written without a look "
    "at the source and committed, with the right names, before the first run, whose "
    "answers these are",
    "follow, differences": "twelve updates of models/tiny-lm at a learning rate of 3e-5, of its "
    "adapters or of the small mixture at 3e-4; the engine is in bfloat16, and each fault in the "
    "kind of message that shows it first",
    "follow": "a training run of models/tiny-qwen3 with six syncs, and an engine in bfloat16",
    "follow, one replica of eight": "the same run with eight engines, of which one has the fault",
}
# whose code the syncs of a setting run
EXERCISED = {
    **dict.fromkeys(
        ("FSDP2, 2 processes", "FSDP2, 4 processes", "ZeRO-3, 2 processes"), "real code"
    ),
    **dict.fromkeys(
        ("vLLM's endpoints", "SGLang's endpoints", "one replica of three"), "emulation"
    ),
    **{f"differences: {kind}": "emulation" for kind in DELTAS},
    "TRL": "real code",
    "follow": "mapping code",
    "follow, one replica of eight": "mapping code",
    "unseen": "emulation",
    "follow, differences": "emulation",
}
NAMED = ("right", "unexplained", "undecided", "wrong", "passed")
HEALTHY = ("working syncs", "held", "alarms")
PAGE = """\
<!-- written by benchmarks/sync_matrix.py -->
# Which sync faults are found, and where

Each row of the second table is a fault of a weight sync, each column a setting. A cell has the
name that the detector gave to the fault, and the phase or the sync at which it was found. In
an empty cell the setting has no such fault, or it was not run.

{faults} faults, {drills} runs with a fault: {right} have the right name ({share}), {unexplained}
are violated without a name, {undecided} are inconclusive, {wrong} have another name, {passed}
passed. {healthy} runs of working syncs gave {alarms} alarms. After {bits} of {of_bits} preflight
tests every bit of the trainer's weights was as before.

{counts}

{matrix}

## Syncs that send differences

{differences}

## How it was run

{about}

*Right* is the name that the tables of faults give: those under `tests/rl`, and for TRL that of
`servanda.engines.faults.sync`. *Unexplained* is a violation or an error without a name. *Undecided*
is an inconclusive result: no pass, but no detection either. An error is right if the fault has to
cause it, such as a server that answers with status 500. *Held* counts working syncs whose outcome
is *holds*. Exercised is the framework's own *real code*; *mapping code*, by which Servanda loads
the weights of a module into its engines; or an *emulation* in the tests. In TRL a number after the
name of a fault is its value.

Every run is a line of `benchmarks/measured/sync_matrix.json`. `python -m benchmarks.sync_matrix`
runs those that are missing, `--setting NAME` and `--faults A,B` restrict it, and `--write` writes
this page.

## Limits

- The servers are stand-ins with the endpoints of vLLM and SGLang, and a small Llama behind them.
  The real vLLM is tested by `tests/real/test_preflight_vllm_server.py`, and is no column here.
- The sharded trainers are toys in float64, whose engine is an exact copy: their noise floor is 0.
  [The preflight page](../how-to/preflight.md) has the same for engines in bfloat16, int8 and
  int4.
- TRL is tested with 150 probe tokens instead of 640, and with an engine of Servanda instead of
  vLLM.
- Follow decides within six syncs here. A fault that changes the scores little is still undecided
  then, and so is a working sync.
- Three of the ten unseen syncs that work were alarms: two engines that begin with the trainer's
  exact weights and round them, to int8 or to 16 bits, from the first sync on, and one that adds
  int8 differences in float32.
- Settings without a run on the machine of this page: {absent}.
"""


def table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rest))


def counts(found: Sequence[Row]) -> list[list[str]]:
    """A row for each setting."""
    lines = [["setting", "exercised by", "detector", "faults", *NAMED, *HEALTHY]]
    for name in _settings(found):
        mine = [row for row in found if row["setting"] == name]
        broken, healthy = _apart(mine)
        named = Counter(row["named"] for row in broken)
        clean = Counter(row["named"] for row in healthy)
        numbers = [len(broken), *(named[word] for word in NAMED)]
        numbers += [len(healthy), clean["right"], clean["alarm"]]
        lines.append([name, EXERCISED[name], mine[0]["detector"], *map(str, numbers)])
    return lines


def matrix(found: Sequence[Row]) -> list[list[str]]:
    """A row for each fault, a column for each setting: the name that was given."""
    settings = _settings(found)
    at = {(row["fault"], row["setting"]): row for row in _apart(found)[0]}
    lines = [["fault", *settings]]
    faults = sorted({fault for fault, _ in at})
    return lines + [[f"`{f}`", *(_cell(at.get((f, one))) for one in settings)] for f in faults]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    said = f"`{row['cause']}`" if row["cause"] else row["outcome"]
    mark = "" if row["named"] == "right" else f" ({row['named']})"
    return f"{said}{mark}" + (f": {row['where']}" if row["where"] else "")


def _settings(found: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys(row["setting"] for row in found)]


def _apart(found: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of faults, and of syncs that work."""
    broken = [row for row in found if "" not in row["expected"]]
    return broken, [row for row in found if "" in row["expected"]]


def page(found: Sequence[Row]) -> str:
    broken, healthy = _apart(found)
    named = Counter(row["named"] for row in broken)
    bits = [row["bits"] for row in found if "bits" in row]
    return PAGE.format(
        faults=len({row["fault"] for row in broken}),
        drills=len(broken),
        **{word: named[word] for word in NAMED},
        share=f"{named['right'] / len(broken):.1%}",
        healthy=len(healthy),
        alarms=sum(row["named"] == "alarm" for row in healthy),
        bits=sum(bits),
        of_bits=len(bits),
        about="\n".join(f"- **{name}**: {ABOUT[name]}." for name in _settings(found)),
        counts=table(counts(found)),
        matrix=table(matrix([row for row in found if "differences" not in row["setting"]])),
        differences=table(matrix([row for row in found if "differences" in row["setting"]])),
        absent=", ".join(name for name in SETTINGS if name not in _settings(found)) or "none",
    )
