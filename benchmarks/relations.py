"""Healthy kernels compared with themselves: what `servanda relations` says, and how far they move.

python -m benchmarks.relations --runs 20           writes benchmarks/measured/relations.jsonl
python -m benchmarks.relations --servers           writes benchmarks/measured/relations_unseen.jsonl
python -m benchmarks.relations --show              prints the tables

A healthy kernel differs by rounding alone.  The constants LEAST and MOST of
`servanda.runner.relations.judge` are from these records.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.field.unseen_servers import SERVERS, serve

from benchmarks.experiment.tables import markdown
from benchmarks.rules import share
from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names
from servanda.runner.compare.contract import SHIPPED, read_corpus, shipped
from servanda.runner.probe import encoded
from servanda.runner.relations.relation import Cases
from servanda.runner.relations.run import NAMES, Options, relations
from servanda.runner.relations.subject import Subject

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured" / "relations.jsonl"
UNSEEN = ROOT / "benchmarks" / "measured" / "relations_unseen.jsonl"
FORMATS = (
    "float32",
    "float32,prefix_cache=16",
    "bfloat16",
    "bfloat16+fp8_tensor",
    "bfloat16+w8a8",
)
REAL = ".venvs/real-model/bfloat16"
MODELS = ("models/tiny-lm", "models/tiny-qwen3", REAL)
# seeds of each model and format; the real model takes minutes a run
SEEDS = {REAL: 8}


def kernels() -> Iterator[tuple[str, str]]:
    for model in MODELS:
        path = ".venvs/real-model/float32" if model == REAL else model
        for form in FORMATS:
            where = model if "bfloat16" in form else path
            if (ROOT / where).exists():
                yield model, f"transformers:{ROOT / where}@{form},attention=sdpa,batch_size=16"


def answered(kernel: str, seed: int, small: bool) -> dict[str, Any]:
    """The outcome of each relation, and how far it moved."""
    subject = Subject.open(parse_kernel(kernel, engines=engine_names()))
    try:
        corpus = read_corpus(shipped(SHIPPED))
        corpus = replace(corpus, prompts=corpus.prompts[:64])
        texts = [ids for ids in encoded(corpus, subject.engine) if ids]
        largest = 4 if small else 16
        cases = Cases(texts, 65 if small else 129, 8, 4, largest, seed)
        # draws take most of the time, and do not depend on how a kernel rounds
        names = [name for name in NAMES if name != "sampling" or (seed % 4 == 0 and not small)]
        found = [*relations(subject, cases, Options(tuple(names)))]
    finally:
        subject.close()
    return {
        one.relation: {
            "outcome": one.outcome,
            "noise": one.noise_nats,
            "limit": one.limit_nats,
            "largest": one.largest_nats,
            "answer": one.answer,
        }
        for one in found
        if one.outcome != "untestable"
    }


def table(rows: list[dict[str, Any]]) -> str:
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["model"], row["format"]].append(row["relations"])
    lines = []
    for (model, form), runs in by.items():
        outcomes = [{one["outcome"] for one in run.values()} for run in runs]
        most: dict[str, float] = defaultdict(float)
        for run in runs:
            for name, one in run.items():
                most[name] = max(most[name], one["noise"] or 0.0)
        moved = ", ".join(f"{name} {value:.1g}" for name, value in most.items() if value)
        red, unsure = ("violated" in o for o in outcomes), ("inconclusive" in o for o in outcomes)
        counts = (share(sum(red), len(runs)), share(sum(unsure), len(runs)))
        lines.append((Path(model).name, form, str(len(runs)), *counts, moved or "bits"))
    head = ("model", "format", "runs", "violated", "inconclusive", "largest logit noise, nats")
    return markdown(head, lines)


def asked() -> Iterator[dict[str, Any]]:
    """The servers that were written before the first run, each with what the command says."""
    for case in SERVERS:
        with serve(case) as url:
            words = [sys.executable, "-m", "servanda", "relations", url, "--quiet"]
            done = subprocess.run([*words, "--format", "json"], capture_output=True, text=True)
        outcomes = {r["relation"]: r["outcome"] for r in json.loads(done.stdout)["relations"]}
        print(case.name, done.returncode, outcomes, flush=True)
        yield {"name": case.name, "exit": done.returncode, "outcomes": outcomes}


def servers(found: list[dict[str, Any]]) -> str:
    """The unseen servers at the first run and now."""
    answers = {(row["when"], row["name"]): row for row in found}
    lines, rates = [], []
    for case in SERVERS:
        cells = []
        for when in ("first", "now"):
            row = answers[when, case.name]
            red = [name for name, outcome in row["outcomes"].items() if outcome == "violated"]
            cells.append(", ".join(red) or ("holds" if row["exit"] == 0 else "inconclusive"))
        lines.append((case.name, ", ".join(sorted(case.relations)) or "healthy", *cells))
    for when in ("first", "now"):
        right = {"fault": 0, "healthy": 0}
        for case in SERVERS:
            row = answers[when, case.name]
            red = {name for name, outcome in row["outcomes"].items() if outcome == "violated"}
            named = {"client" if name == "like" else name for name in case.relations}
            right[case.kind] += bool(red & named) if case.kind == "fault" else row["exit"] == 0
        rates += [(when, share(right["fault"], 20), share(right["healthy"], 20))]
    head = ("server", "right relations", "first run", "now")
    rate = markdown(("", "faults found by a right relation", "healthy servers that hold"), rates)
    return rate + "\n\n" + markdown(head, lines)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="seeds of each model and format")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--servers", action="store_true")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    rows = _lines(MEASURED)
    if args.show:
        print(table(rows), servers(_lines(UNSEEN)), sep="\n\n")
        return
    if args.servers:
        kept = [row for row in _lines(UNSEEN) if row["when"] == "first"]
        now = [{"when": "now", **row} for row in asked()]
        UNSEEN.write_text("".join(json.dumps(row) + "\n" for row in (*kept, *now)))
        return
    done = {(row["kernel"], row["seed"]) for row in rows}
    for seed in range(args.runs):
        for model, kernel in kernels():
            form = kernel.partition("@")[2].removesuffix(",attention=sdpa,batch_size=16")
            name = kernel.replace(f"{ROOT}/", "")
            if args.model not in (None, model) or seed >= SEEDS.get(model, args.runs):
                continue
            if (name, seed) in done:
                continue
            found = answered(kernel, seed, small=model == REAL)
            row = {"model": model, "format": form, "kernel": name, "seed": seed}
            with MEASURED.open("a") as out:
                out.write(json.dumps(row | {"relations": found}) + "\n")
            print(name, seed, {k: (v["outcome"], v["noise"]) for k, v in found.items()}, flush=True)


if __name__ == "__main__":
    main()
