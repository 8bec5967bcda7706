"""What number formats cost on a real language model, and what `times_format` answers there.

    make real-model
    python -m benchmarks.real_formats [--write]      half an hour on a core, 8 GB

Each kernel scores the same texts with full logits, so the table of kernels has exact values at
every position.  The tables of answers draw one token from the kernel under test at each position,
as often as is stated, and judge the clause of preset vllm-upgrade on them: at most 0.010, or at
most 1.25 times what the format costs.  A fault's strength is bisected until the fault alone, in
float32, is as far from float32 as bfloat16 is.  Seeds and texts were fixed before the first run.
"""

# Axes: R positions, V vocabulary.

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Clause
from servanda.engines import engine_names, open_engine
from servanda.judgement.clauses.base import Cell, Interim
from servanda.judgement.clauses.format_cost import FormatCertificate, FormatGrown
from servanda.judgement.clauses.statistical import Feed
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.alpha import attempt_alpha
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.mean_ratio import MeanRatio, ratios
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".venvs/real-model/float32"
PAGE = ROOT / "docs/results/real_model.md"
TEXTS, TOKENS, ROWS = 24, 160, 8  # a domain's texts are joined and cut; texts of a batch
LIMIT, TIMES, CELLS, DRAWS, FIRST_SEED = 0.010, 1.25, 12, 6, 100
ALPHA = attempt_alpha(0.05, 1)
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = {
    **{f"{d} {a}": f"@{d},attention={a}" for d in DTYPES for a in ("eager", "sdpa")},
    "bfloat16 sdpa, one by one": "@bfloat16,attention=sdpa",
    "int8 weights": "@bfloat16+int8_weight_only,attention=sdpa",
    "int8 weights and activations (W8A8)": "@bfloat16+w8a8,attention=sdpa",
    "int4 weights, groups of 32": "@bfloat16+int4_g32,attention=sdpa",
    "fp8, a scale per channel (emulated)": "@bfloat16+fp8_channel,attention=sdpa",
    "fp8, a scale per block (emulated)": "@bfloat16+fp8_block,attention=sdpa",
    "MXFP8 (emulated)": "@bfloat16+mxfp8,attention=sdpa",
    "NVFP4 (emulated)": "@bfloat16+nvfp4,attention=sdpa",
}
ALONE = "bfloat16 sdpa, one by one"  # one text a batch: other shapes, other orders of sums
# train, infer, further kernel; whether it is in float32
PAIRS = {
    **{
        (a, b): (f"{b.split()[0]} {a.split()[1]}", False)
        for a, b in (
            ("float32 eager", "bfloat16 eager"),
            ("float32 eager", "bfloat16 sdpa"),
            ("float32 sdpa", "bfloat16 sdpa"),
            ("float32 eager", "float16 eager"),
            ("float32 eager", "float16 sdpa"),
            ("float16 eager", "bfloat16 sdpa"),
            ("bfloat16 eager", "float16 sdpa"),
            ("bfloat16 eager", "float32 sdpa"),
        )
    },
    ("float32 eager", ALONE): ("bfloat16 eager", False),
    ("bfloat16 eager", "bfloat16 sdpa"): ("float32 eager", True),
    ("bfloat16 sdpa", "bfloat16 eager"): ("float32 eager", True),
    ("bfloat16 sdpa", ALONE): ("float32 eager", True),
    ("float16 eager", "float16 sdpa"): ("float32 eager", True),
}
# fault -> the strengths between which it is bisected, in logs
FAULTS = {
    "wrong_rope_base": (1.001, 3.0),
    "norm_epsilon": (2.0, 3e5),
    "stale_tied_head": (1e-3, 10.0),
    "batch_dependent": (1e-4, 0.3),
}
A, B, USUAL = "float32 eager", "bfloat16 sdpa", "bfloat16 eager"
_HALVINGS = 7

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    domain: str
    ids: tuple[int, ...]


def texts() -> list[Text]:
    """Texts of our own: the prompts by domain, joined and cut to TOKENS ids."""
    lines = (ROOT / "examples/real-model/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    by_domain: dict[str, list[str]] = {}
    for line in map(json.loads, lines):
        by_domain.setdefault(line["labels"]["domain"], []).append(line["prompt"])
    pages = sorted((ROOT / "docs/concepts").glob("*.md"))
    by_domain["prose"] = [page.read_text(encoding="utf-8") for page in pages]
    engine = opened(KERNELS[A])
    found = []
    for domain, parts in by_domain.items():
        (ids,) = engine.encode(["\n".join(parts)])
        pieces = [ids[i : i + TOKENS] for i in range(0, len(ids), TOKENS)]
        whole = [p for p in pieces if len(p) == TOKENS][: -(-TEXTS // len(by_domain))]
        found += [Text(domain, tuple(piece)) for piece in whole]
    engine.close()
    return found


def opened(kernel: str, fault: tuple[str, float] | None = None) -> Any:
    text = f"transformers:{MODEL}{kernel}" + (f",fault={fault[0]}:{fault[1]!r}" if fault else "")
    return open_engine(parse_kernel(text, engines=engine_names(), name="kernel"))


def log_laws(engine: Any, batch: list[Text], rows: int) -> Logits:
    """The log probabilities before each token but the first, [R, V], `rows` texts at a time."""
    parts = []
    for i in range(0, len(batch), rows):
        some = [t.ids for t in batch[i : i + rows]]
        given = Batch(
            tuple(range(len(some))),
            tuple(ids[:1] for ids in some),
            TOKENS - 1,
            tuple(ids[1:] for ids in some),
        )
        pieces = (torch.from_numpy(np.array(logits)) for logits in engine.logits(given, "prefill"))
        parts += [torch.log_softmax(piece.float(), dim=-1).numpy() for piece in pieces]
    return np.concatenate(parts)


def tv(p: Logits, q: Logits) -> NDArray[np.float64]:
    return np.abs(np.exp(p) - np.exp(q)).sum(axis=1, dtype=np.float64) / 2


def exact(p: Logits, q: Logits, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Distances at each position, [R]; |log ratio| of the text's own token."""
    kl = (np.exp(q) * (q - p)).sum(axis=1, dtype=np.float64)
    at = np.arange(len(ids))
    delta = np.abs(p[at, ids] - q[at, ids]).astype(np.float64)
    return {"tv": tv(p, q), "kl": kl, "delta": delta, "same": p.argmax(1) == q.argmax(1)}


def drawn(q: Logits, rng: np.random.Generator) -> NDArray[np.int64]:
    """A token of each position's law, [R]."""
    total = np.cumsum(np.exp(q.astype(np.float64)), axis=1)
    return (total < (rng.random(len(q)) * total[:, -1])[:, None]).sum(axis=1)


def terms(
    train: Logits, infer: Logits, other: Logits, whole: bool, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """x of the number, and x and y of the ratio, at tokens that infer draws."""
    ids, at = drawn(infer, rng), np.arange(len(infer))
    w, v = (np.exp((p[at, ids] - infer[at, ids]).astype(np.float64)) for p in (train, other))
    nearer, usual = (v, w) if whole else (w, v)
    return {
        "own": np.clip(1 - w, 0, 1),
        "x": np.clip(1 - nearer, 0, 1),
        "y": np.clip(usual - nearer, 0, 1),
    }


def answer(found: Mapping[str, NDArray[np.float64]], whole: bool, format_: str = "bfloat16") -> Any:
    """The verdict of the clause on all tokens."""
    process = LogMoment.of(found["own"])
    pairs = MeanRatio.of_units(found["x"], found["y"], ratios(TIMES))
    growth = process.below_growth(LIMIT), process.above_growth(LIMIT)
    kind = FormatCertificate(Feed(LIMIT), TIMES, format_, whole)
    about = {"id": "whole", "metric": "tv", "aggregate": "mean", "at_most": LIMIT}
    cell = Cell(
        Clause.model_validate(about), "statistical", (), Cut("all"), "realised", TOKENS, kind, "w"
    )
    look = Interim(ALPHA, CELLS, 0, len(found["x"]))
    return kind.judge(cell, [FormatGrown(process, *growth, pairs)], None, look), pairs


def batches(of: list[Text]) -> Iterator[list[Text]]:
    # every batch has all domains
    rows = -(-len(of) // ROWS)
    for i in range(rows):
        yield of[i::rows]


def matched(of: list[Text], name: str, goal: float) -> tuple[float, float]:
    """The strength at which the fault alone is as far from float32 as the goal, and how far."""
    some = next(batches(of))
    engine = opened(KERNELS[A])
    law = log_laws(engine, some, ROWS)
    engine.close()
    low, high = FAULTS[name]
    far = 0.0
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        engine = opened(KERNELS[A], (name, middle))
        far = float(tv(law, log_laws(engine, some, ROWS)).mean())
        engine.close()
        low, high = (middle, high) if far < goal else (low, middle)
    return middle, far


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    of = texts()
    goal_parts, pair_parts, table_parts = [], {pair: [] for pair in PAIRS}, {}
    domains: list[str] = []
    for number, batch in enumerate(batches(of)):
        laws = {}
        for name, kernel in KERNELS.items():
            engine = opened(kernel)
            laws[name] = log_laws(engine, batch, 1 if name == ALONE else ROWS)
            engine.close()
        ids = np.array([i for text in batch for i in text.ids[1:]])
        domains += [text.domain for text in batch for _ in text.ids[1:]]
        for name, law in laws.items():
            table_parts.setdefault(name, []).append(exact(laws[A], law, ids))
        goal_parts.append(tv(laws[A], laws[B]))
        for (a, b), (other, whole) in PAIRS.items():
            for draw in range(DRAWS):
                rng = np.random.default_rng([FIRST_SEED, number, draw])
                pair_parts[a, b].append(terms(laws[a], laws[b], laws[other], whole, rng))
        print(f"batch {number + 1}", flush=True)
    goal = float(np.concatenate(goal_parts).mean())
    found: dict[str, Any] = {"goal": goal, "positions": len(domains)}
    found["kernels"] = {n: _row(joined(p), domains) for n, p in table_parts.items()}
    found["pairs"] = []
    for (a, b), (_, whole) in PAIRS.items():
        format_ = "bfloat16" if "bfloat16" in a + b else "float16"
        verdict, pairs = answer(joined(pair_parts[a, b]), whole, format_)
        found["pairs"].append([a, b, verdict.value, pairs.value, verdict.rounding, *_end(verdict)])
    found["faults"] = [_faulted(of, name, goal) for name in FAULTS]
    return found


def _end(verdict: Any) -> tuple[str, str]:
    return verdict.outcome, verdict.reason


def _row(found: Mapping[str, NDArray[Any]], domains: list[str]) -> dict[str, Any]:
    named = np.array(domains)
    return {
        "tv": found["tv"].mean(),
        "kl": found["kl"].mean(),
        "delta": [*np.percentile(found["delta"], [50, 99]), found["delta"].max()],
        "same": found["same"].mean(),
        "domains": {d: found["tv"][named == d].mean() for d in dict.fromkeys(domains)},
    }


def _faulted(of: list[Text], name: str, goal: float) -> dict[str, Any]:
    """Five draws of bfloat16 with the fault: how many are violated."""
    strength, alone = matched(of, name, goal)
    parts: list[list[dict[str, Any]]] = [[] for _ in range(5)]
    far = []
    for number, batch in enumerate(batches(of)):
        laws = []
        for kernel, fault in ((A, None), (B, (name, strength)), (USUAL, None)):
            engine = opened(KERNELS[kernel], fault)
            laws.append(log_laws(engine, batch, ROWS))
            engine.close()
        far.append(tv(laws[0], laws[1]))
        for seed, part in enumerate(parts):
            for draw in range(DRAWS):
                rng = np.random.default_rng([FIRST_SEED + 1 + seed, number, draw])
                part.append(terms(*laws, False, rng))
    outcomes = [answer(joined(part), False)[0].outcome for part in parts]
    print(name, strength, alone, outcomes, flush=True)
    return {
        "fault": name,
        "strength": strength,
        "alone": alone,
        "with": float(np.concatenate(far).mean()),
        "violated": outcomes.count("violated"),
        "draws": len(outcomes),
    }


def page_text(found: Mapping[str, Any]) -> str:
    domains = [*next(iter(found["kernels"].values()))["domains"]]
    heads = ["kernel, against float32 eager", "mean TV", "mean KL", "p50, p99, max |Δ logp|"]
    rows = []
    for name, row in found["kernels"].items():
        delta = ", ".join(f"{v:.3g}" for v in row["delta"])
        by_domain = [f"{row['domains'][d]:.4f}" for d in domains]
        numbers = [f"{row['tv']:.4f}", f"{row['kl']:.2g}", delta, f"{row['same']:.2%}"]
        rows.append([name, *numbers, *by_domain])
    kernels = markdown([*heads, "same best token", *(f"TV, {d}" for d in domains)], rows)
    answers = [
        [a, b, f"{value:.4f}", outcome + (f" ({reason})" if reason else ""), words]
        for a, b, value, _, words, outcome, reason in found["pairs"]
    ]
    pairs = markdown(["A (train)", "B (infer)", "mean TV", "answer", "class"], answers)
    faults = markdown(
        ["fault", "strength", "fault alone", "bfloat16 with it", "violated"],
        [
            [
                f"`{f['fault']}`",
                f"{f['strength']:.3g}",
                f"{f['alone']:.4f}",
                f"{f['with']:.4f}",
                f"{f['violated']} of {f['draws']}",
            ]
            for f in found["faults"]
        ],
    )
    count = f"{found['positions']:,} positions; {DRAWS} tokens drawn at each for the answers."
    return "\n\n".join([count, kernels, pairs, faults])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    text = page_text(measure())
    print(text)
    if asked.write:
        committed.write(PAGE, text, "python -m benchmarks.real_formats --write")


if __name__ == "__main__":
    main()
