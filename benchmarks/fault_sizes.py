"""How large each fault of the catalogue is, on models/tiny-lm, and what could see it.

One row a fault: a float32 eager kernel that prefills against a bfloat16 sdpa kernel that
decodes, on the same seeded prompts, the fault injected at its default on its own side.

    python -m benchmarks.fault_sizes [--fault NAME [--value V]] [--prompts 256]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servanda.contract import Kernel
from servanda.divergence import LogitRows, exact, sampled
from servanda.engines import open_engine
from servanda.engines.base import Engine
from servanda.errors import IdentityError
from servanda.faults import FAULTS
from servanda.identity import same_policy
from servanda.sampling import Floats, Sampling, uniforms
from servanda.stats import Fidelity
from servanda.trace import Batch, Trace, TracePair, align

ROOT = Path(__file__).parents[1]
WIDTH, SEED, LONG, EXTRA = 24, 7, 257, 64
PLAIN = Sampling()
KERNELS = {
    "train": {"dtype": "float32", "attention": "eager", "batch_size": 16},
    "infer": {"dtype": "bfloat16", "attention": "sdpa", "batch_size": 32},
}
COLUMNS = (
    *("tv", "|d|", "k3", "tme", "p99|d|", "flips", "dNLL", "fidelity", "pit", "usable"),
    *("osc", "long tv", "long |d|", "self tv"),
)


def opened(name: str | None, value: object) -> dict[str, Engine]:
    """Both engines, one of them with the fault."""
    engines = {}
    for side, kernel in KERNELS.items():
        faulty = name is not None and FAULTS[name].side == side
        engines[side] = open_engine(
            Kernel(
                engine="transformers",
                model=str(ROOT / "models" / "tiny-lm"),
                fault={name: value} if faulty else None,  # type: ignore[dict-item]
                **kernel,  # type: ignore[arg-type]
            )
        )
    return engines


@dataclass(frozen=True)
class Sizes:
    """Means over tokens; fidelity and pit in nats of evidence."""

    name: str
    value: object
    refused: str
    row: dict[str, float]


def measure(name: str | None, value: object, prompts: int) -> Sizes:
    engines = opened(name, value)
    row: dict[str, float] = {}
    try:
        same_policy(engines["train"].describe(), engines["infer"].describe())
        refused = ""
    except IdentityError as error:
        refused = str(error).splitlines()[0].split(":")[0]
    rows = texts(engines["train"], prompts)
    whole, long = rows[:prompts], [r for r in rows if len(r[1]) >= LONG]
    pair = pairs(engines, rows)
    row |= averages(pair, np.isin(pair.infer.sequence_S, [i for i, _ in whole]))
    of_long = averages(pair, np.isin(pair.infer.sequence_S, [i for i, _ in long]))
    row |= {"long tv": of_long["tv"], "long |d|": of_long["|d|"]}
    row["osc"] = drift(engines)
    row["self tv"] = self_noise(engines, pair, dict(rows))
    return Sizes(name or "healthy", value, refused, row)


def lengths(pair: TracePair) -> np.ndarray:
    return pair.infer.length_S


def texts(engine: Engine, prompts: int) -> list[tuple[int, tuple[int, ...]]]:
    """Seeded prompts, by index, and some that are long besides."""
    lines = (ROOT / "data" / "prompts.jsonl").read_text().splitlines()
    encoded = [tuple(ids) for ids in engine.encode([json.loads(line)["prompt"] for line in lines])]
    order = random.Random(SEED).sample(range(len(encoded)), len(encoded))
    more = [i for i in order[prompts:] if len(encoded[i]) >= LONG][:EXTRA]
    return [(i, encoded[i]) for i in (*order[:prompts], *more)]


def pairs(engines: dict[str, Engine], rows: list[tuple[int, tuple[int, ...]]]) -> TracePair:
    """In order of length, as a run batches them."""
    rows = sorted(rows, key=lambda r: (len(r[1]), r[0]))
    batch = Batch(tuple(i for i, _ in rows), tuple(p for _, p in rows), WIDTH)
    infer = engines["infer"].generate(batch, PLAIN, SEED)
    given = Batch(batch.sequence_S, batch.prompts, WIDTH, infer.continuations)
    return align(engines["train"].score(given, PLAIN, "prefill"), infer)


def averages(pair: TracePair, inside_S: np.ndarray) -> dict[str, float]:
    """Over the tokens of some sequences; a lost one counts with all it had room for."""
    inside_N = np.repeat(inside_S, lengths(pair))
    known_N = inside_N & pair.usable_N
    infer = {c: v[known_N] for c, v in pair.infer.columns.items()}
    train = {c: v[known_N] for c, v in pair.train.columns.items()}
    given = {"logp_train": train["logp"], "logp_infer": infer["logp"]}
    given |= {"top1_train": train["top1"], "top1_infer": infer["top1"]}
    distance_N = np.abs(train["logp"] - infer["logp"])
    luck_N = np.concatenate(
        [
            uniforms(SEED, "pit", int(s), int(n))
            for s, n in zip(pair.infer.sequence_S, lengths(pair), strict=True)
        ]
    )[known_N]
    lost = int((inside_S & pair.infer.lost_S).sum()) * WIDTH
    return {
        "tv": float(sampled("tv", given).mean()),
        "|d|": float(distance_N.mean()),
        "k3": float(sampled("k3_nats", given).mean()),
        "tme": float(np.exp(distance_N).mean()),
        "p99|d|": float(np.quantile(distance_N, 0.99)),
        "flips": float(sampled("top1_flip", given).mean()),
        "dNLL": float((infer["logp"] - train["logp"]).mean()),
        "fidelity": evidence(infer, luck_N),
        "pit": evidence(train, luck_N),
        "usable": float(known_N.sum() / (inside_N.sum() + lost)),
    }


def evidence(columns: dict[str, Floats], luck_N: Floats) -> float:
    """Against the tokens having been drawn as this record says."""
    u_N = columns["mass_before"] + luck_N * np.exp(columns["logp"])
    return Fidelity.of(np.minimum(u_N, 1.0)).log_e


def golden() -> list[str]:
    lines = (ROOT / "data" / "golden.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def drift(engines: dict[str, Engine]) -> float:
    """Largest oscillation of the logits on the golden texts, nats."""
    ids = sorted(engines["train"].encode(golden()), key=len)
    batch = Batch(
        tuple(range(len(ids))),
        tuple((t[0],) for t in ids),
        max(map(len, ids)) - 1,
        tuple(tuple(t[1:]) for t in ids),
    )
    worst = 0.0
    for chunk in batch.chunks(32):
        train, infer = (
            np.concatenate(list(engines[side].logits(chunk, path)))
            for side, path in (("train", "prefill"), ("infer", "decode"))
        )
        worst = max(worst, float(exact("logit_osc_nats", LogitRows(train, infer)).max()))
    return worst


def self_noise(
    engines: dict[str, Engine], pair: TracePair, prompts: dict[int, tuple[int, ...]]
) -> float:
    """The larger side's mean TV against itself, a tenth of the sequences in another batch."""
    kept = [r for r in range(0, len(pair.infer.sequence_S), 10) if not pair.infer.lost_S[r]]
    batch = Batch(
        tuple(int(pair.infer.sequence_S[r]) for r in kept),
        tuple(prompts[int(pair.infer.sequence_S[r])] for r in kept),
        WIDTH,
        tuple(pair.infer.continuations[r] for r in kept),
    )
    noise = []
    for side, path, trace in (
        ("train", "prefill", pair.train),
        ("infer", "decode", pair.infer),
    ):
        again = engines[side].score(batch, PLAIN, path)  # type: ignore[arg-type]
        once = np.concatenate([part for r, part in enumerate(_parts(trace)) if r in set(kept)])
        given = {"logp_train": again.columns["logp"], "logp_infer": once}
        noise.append(float(sampled("tv", given).mean()))
    return max(noise)


def _parts(trace: Trace) -> list[Floats]:
    return np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])


def line(sizes: Sizes) -> str:
    """A row of a Markdown table."""
    cells = [sizes.name, json.dumps(sizes.value), *(f"{sizes.row[c]:.4g}" for c in COLUMNS)]
    return f"| {' | '.join([*cells, sizes.refused or '-'])} |"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--fault", action="append", help="one of the catalogue; default: all")
    cli.add_argument("--value", type=json.loads, help="JSON; default: the fault's own")
    cli.add_argument("--prompts", type=int, default=256)
    given = cli.parse_args()
    names = given.fault or [None, *FAULTS]
    print(f"| {' | '.join(('fault', 'value', *COLUMNS, 'identity'))} |")
    print("|---" * (len(COLUMNS) + 3) + "|", flush=True)
    for name in names:
        default = FAULTS[name].default if name else None
        value = default if given.value is None else given.value
        started = time.monotonic()
        print(line(measure(name, value, given.prompts)), flush=True)
        print(f"  {name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
