# Small contracts on table kernels, written to a folder: the kernels whose truth is known.

import json
from functools import partial
from pathlib import Path

from click.testing import CliRunner

from servanda.cli.main import main
from servanda.contract import parser
from servanda.engines.table import Table
from servanda.judgement.lint import linter
from tests.table_pair import TablePair

TOKENS = ["a", "b", "c", "d", "<eos>"]
BASE = [0.35, 0.25, 0.2, 0.1, 0.1]


def servanda(*words, **options):
    """What a command prints, and its exit code; as a user calls it."""
    options = {"prog_name": "servanda", "catch_exceptions": False, **options}
    return CliRunner().invoke(main, [*map(str, words)], **options)


def table(folder, name, rows, *, weights="toy", tokens=TOKENS):
    """Write a table file; rows: context -> probabilities."""
    data = {"tokens": tokens, "eos": tokens[-1], "order": 1, "rows": rows, "weights": weights}
    path = Path(folder) / name
    path.write_text(json.dumps(data))
    return Table.parse(json.dumps(data), name)


def moved(row, tv, a=0, b=1):
    """The row with mass `tv` moved from token a to token b: at TV exactly `tv`."""
    row = list(row)
    row[a] -= tv
    row[b] += tv
    return row


CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: toy}}
kernels:
  train: {{engine: table, model: p.json{train}}}
  infer: {{engine: table, model: q.json{infer}}}
workload:
  prompts: prompts.jsonl
  round: {round}
  samples: {samples}
  sampling: {{max_new_tokens: {width}, seed: {seed}}}
claim: {claim}
confidence: {confidence}
{slices}
{golden}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: {limit}}}
{more}
{bitwise}
promotion: {{offline: {{prompt_groups: [{first}, {last}]}}{canary}}}
{stable}
"""


def write(
    folder,
    *,
    p=None,
    q=None,
    prompts=("a", "b", "c"),
    labels=None,
    train="",
    infer="",
    stable="p.json",
    round=32,
    samples=1,
    width=6,
    seed=1,
    claim="population",
    confidence=0.95,
    slices="",
    golden="",
    limit=0.05,
    more="",
    first=32,
    last=2000,
    bitwise=None,
):
    """A contract of two tables in a folder; returns its path and the exact pair.

    Without a stable kernel it has no canary either.  Two equal tables are declared to be bitwise
    equal, unless `bitwise` says otherwise.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bitwise = (q is not None and q == (p or {"": BASE})) if bitwise is None else bitwise
    train_table = table(folder, "p.json", p or {"": BASE})
    infer_table = table(folder, "q.json", q or {"": moved(BASE, 0.01)})
    lines = [
        json.dumps({"prompt": text, "labels": (labels or {}).get(text, {"first": text[0]})})
        for text in prompts
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "toy.kernelcontract.yaml"
    path.write_text(
        CONTRACT.format(
            train=train,
            infer=infer,
            canary=", canary: {}" if stable else "",
            stable=f"stable: {{engine: table, model: {stable}}}" if stable else "",
            round=round,
            samples=samples,
            width=width,
            seed=seed,
            claim=claim,
            confidence=confidence,
            slices=slices,
            golden=golden,
            limit=limit,
            more=more,
            first=first,
            last=last,
            bitwise="bitwise: true" if bitwise else "",
        )
    )
    return path, TablePair(train_table, infer_table)


def golden(folder, texts=("a b c d a b", "b b a d c a")):
    """Write golden texts; returns the YAML that names them."""
    lines = [json.dumps({"prompt": t, "labels": {"first": t[0]}}) for t in texts]
    (Path(folder) / "golden.jsonl").write_text("\n".join(lines) + "\n")
    return "golden: {prompts: golden.jsonl}"


def parse(text, file, *, engines, faults=()):
    """A contract and its places, where these engines and faults are known."""
    rules = partial(linter.check, engines=engines, faults=faults)
    return parser.parse(text, file, rules=rules)
