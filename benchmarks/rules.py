"""Is the answer ever "holds" beside a rule of another project that is rightly red?

    python -m benchmarks.rules [--write] [--part NAME] [--out FILE]      half an hour on two cores

Dumps are drawn from known laws and judged by `servanda check`; the rules of other projects are
those of its report, in their own formulas, step by step.  A rule is *rightly* red where the law has
a fault, another kernel on a part of the tokens, and the fault makes at least half of its number:
the same dump without it says how much.  Seeds, shapes and sizes below were fixed before
the first run.
Parts: law (shapes with a fault), healthy, rare (10,000 and 100,000 responses), unseen
(tests/field/unseen_rare.py, written before its first run).
"""

# Axes: S sequences, T columns, N trained tokens, K laws, J noise variants, V tokens of a support.

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from tests.field.unseen_rare import CASES

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from servanda.contract.presets import PRESETS
from servanda.errors import ServandaError
from servanda.judgement.field_rules import RULES
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PAGE = committed.ROOT / "docs" / "explanation" / "rules.md"
COMMAND = "python -m benchmarks.rules --write"
LAWS, VARIANTS, SUPPORT, VOCABULARY = 256, 16, 32, 150_000
TRAINERS = tuple(n for n in PRESETS.names() if PRESETS[n] == "reinforcement learning")
NOISES = ("normal", "laplace", "student-3", "by response", "experts")
SCALE = 0.045  # of the noise of a logit: a mean total variation of some .011, as bf16 rollouts have
HEALTHY, DRAWS = 500, 20


@dataclass(frozen=True)
class Shape:
    """A fault: which tokens, how many, and the law under which the trainer scores them.

    Args:
        where: responses, tail (from the middle on), last, single (tokens), long (the longest
            responses), label (of one environment), step (of the last one), first.
        share: of the responses, or of the tokens for single ones.
        law: other (another context), flat (temperature 2), foreign (another request's token, 12
            nats), impossible (-45).
    """

    where: str
    share: float
    law: str


WHERE = ("responses", "tail", "last", "single", "long", "label", "step", "first")
SHARES = (1 / 3, 1 / 30, 1 / 300, 0.0)  # 0: one response, or one token, of the whole dump
SHAPES = tuple(
    Shape(where, share, law)
    for where, share, law in itertools.product(
        WHERE, SHARES, ("other", "flat", "foreign", "impossible")
    )
    if not (where == "single" and share > 1 / 30)
)
SIZES = ((1, 256, 64), (8, 128, 64))  # steps, responses, mean tokens


def log_softmax(logits: Floats) -> Floats:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class World:
    """Laws of contexts, and of the trainer under noise.

    Args:
        infer_KV, cdf_KV: log law and distribution function of the engine; id_KV: token ids.
        train_RKJV: log laws of the trainer, by relative size of the noise, context and variant.
        flat_KV: of a trainer at temperature 2.
    """

    infer_KV: Floats
    cdf_KV: Floats
    id_KV: Ints
    train_RKJV: Floats
    flat_KV: Floats

    @classmethod
    def of(cls, noise: str, rng: np.random.Generator, scale: float = SCALE) -> World:
        logits_KV = rng.normal(0, 1, (LAWS, SUPPORT)) * rng.uniform(0.5, 5.0, (LAWS, 1))
        shape = (LAWS, VARIANTS, SUPPORT)
        if noise == "laplace":
            unit_KJV = rng.laplace(0, 0.7, shape)
        elif noise == "student-3":
            unit_KJV = rng.standard_t(3, shape) / 1.7
        else:
            unit_KJV = rng.normal(0, 1, shape)
        if noise == "experts":  # one token in 512 is routed elsewhere
            unit_KJV[:: LAWS // 8, 0] *= 12.0
        sizes = (0.5, 1.0, 2.0) if noise == "by response" else (1.0, 1.0, 1.0)
        train_RKJV = np.stack(
            [log_softmax(logits_KV[:, None] + scale * r * unit_KJV) for r in sizes]
        )
        infer_KV = log_softmax(logits_KV)
        ids_KV = rng.integers(0, VOCABULARY, (LAWS, SUPPORT))
        flat_KV = log_softmax(logits_KV / 2)
        return cls(infer_KV, np.exp(infer_KV).cumsum(axis=1), ids_KV, train_RKJV, flat_KV)


def drawn(
    world: World, size: tuple[int, int, int], shape: Shape | None, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """The steps of a dump."""
    steps, responses, mean = size
    one = int(rng.integers(steps * responses))
    for step in range(steps):
        length_S = np.minimum(1 + rng.geometric(1 / mean, responses), 4 * mean)
        width = int(length_S.max())
        mask_ST = np.arange(width) < length_S[:, None]
        law_ST = rng.integers(0, LAWS, mask_ST.shape)
        u_ST = rng.random(mask_ST.shape)
        at_ST = np.zeros(mask_ST.shape, dtype=np.int64)
        for v in range(SUPPORT - 1):
            at_ST += u_ST > world.cdf_KV[law_ST, v]
        size_S1 = rng.integers(0, 3, (responses, 1))
        variant_ST = rng.integers(0, VARIANTS, mask_ST.shape)
        infer_ST = world.infer_KV[law_ST, at_ST]
        train_ST = world.train_RKJV[size_S1, law_ST, variant_ST, at_ST]
        env_S = rng.integers(0, 6, responses)
        if shape is not None:
            first = one - step * responses
            bad_ST = hit(shape, mask_ST, env_S, step == steps - 1, first, rng)
            train_ST = np.where(bad_ST, scored(world, shape.law, law_ST, at_ST, rng), train_ST)
        yield {
            "step": step,
            "token_ids": world.id_KV[law_ST, at_ST].astype(np.int32),
            "mask": mask_ST,
            "logp_train": np.where(mask_ST, train_ST, 0.0).astype(np.float32),
            "logp_infer": np.where(mask_ST, infer_ST, 0.0).astype(np.float32),
            "groups": [f"{step}.{s // 4}" for s in range(responses)],
            "labels": {"env": [f"e{e}" for e in env_S]},
        }


def hit(
    shape: Shape,
    mask_ST: NDArray[np.bool_],
    env_S: Ints,
    last: bool,
    one: int,
    rng: np.random.Generator,
) -> NDArray[np.bool_]:
    """The tokens with the fault; `one`: the response of a fault of one, if it is in this step."""
    length_S = mask_ST.sum(axis=1)
    at_T = np.arange(mask_ST.shape[1])
    if shape.where == "single":
        if shape.share:
            return mask_ST & (rng.random(mask_ST.shape) < shape.share)
        single_ST = np.zeros(mask_ST.shape, dtype=bool)
        if 0 <= one < len(mask_ST):
            single_ST[one, int(rng.integers(length_S[one]))] = True
        return single_ST
    bad_S = rng.random(len(mask_ST)) < shape.share
    if not shape.share:
        bad_S = np.arange(len(mask_ST)) == one
    elif shape.where == "long":
        bad_S = length_S >= np.quantile(length_S, 1 - shape.share)
    elif shape.where == "label":
        bad_S = (env_S == 0) & (rng.random(len(env_S)) < min(3 * shape.share, 1.0))
    elif shape.where == "step":
        bad_S = bad_S & last
    within_ST = {
        "tail": at_T >= (length_S // 2)[:, None],
        "last": at_T == (length_S - 1)[:, None],
        "first": (at_T < 4)[None] | np.zeros_like(mask_ST),
    }.get(shape.where, mask_ST)
    return mask_ST & within_ST & bad_S[:, None]


def scored(world: World, law: str, law_ST: Ints, at_ST: Ints, rng: np.random.Generator) -> Floats:
    """The trainer's logprob of the drawn tokens under a fault."""
    if law == "flat":
        return world.flat_KV[law_ST, at_ST]
    if law == "other":
        return world.infer_KV[(law_ST + 1 + rng.integers(0, LAWS - 1)) % LAWS, at_ST]
    level = -45.0 if law == "impossible" else -12.0
    return np.full(law_ST.shape, level) - (law == "foreign") * rng.exponential(1.0, law_ST.shape)


@dataclass(frozen=True)
class Answer:
    outcome: str
    red: tuple[str, ...]  # rules above their limits at any step
    values: Mapping[str, float]  # of every rule, the largest over the steps
    why: bool  # whether the verdict explains why it holds beside them
    cells: tuple[str, ...]


def judged(steps: Iterator[dict[str, Any]], preset: str | None) -> Answer:
    from servanda.rl.dumps.report import render

    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder))
        try:
            for step in steps:
                writer.step(**step)
            answer = judge_dump(DumpOptions(Path(folder), preset=preset))
        except ServandaError as error:
            return Answer("error", (), {}, False, (str(error),))
        verdict = answer.verdict
        assert verdict.breakdown is not None
        red = tuple(f"{row.project} {row.name}" for row in verdict.breakdown.rules if row.red)
        values = {f"{row.project} {row.name}": row.value or 0.0 for row in verdict.breakdown.rules}
        cells = tuple(
            f"{c.clause} on {c.place}"
            for c in verdict.cells
            if c.enforced and c.outcome in ("violated", "error")
        )
        why = "it holds all the same" in render(answer)
        return Answer(verdict.outcome, red, values, why, cells)


def seeded(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def law() -> dict[str, Any]:
    """Every shape at every size, under verl-sync and a noise in turn."""
    found = []
    for i, (shape, size) in enumerate(itertools.product(SHAPES, SIZES)):
        rng = seeded("law", i)
        noise = NOISES[i % len(NOISES)]
        answer = judged(drawn(World.of(noise, rng), size, shape, rng), "verl-sync")
        rng = seeded("law", i)  # the same law, without the fault
        twin = judged(drawn(World.of(noise, rng), size, None, rng), "verl-sync")
        own = tuple(rule for rule in answer.red if _owed(rule, answer, twin))
        found.append([shape.where, shape.share, shape.law, size, answer.outcome, own])
    return {"rows": found}


def _owed(rule: str, answer: Answer, twin: Answer) -> bool:
    """Whether a rule is red because of the fault, which makes at least half of its number."""
    none = 1.0 if "mult_prob" in rule or "seq_logprob" in rule else 0.0
    own, healthy = (of.values.get(rule, none) - none for of in (answer, twin))
    return rule not in twin.red and own >= 2 * healthy


def healthy() -> dict[str, Any]:
    """Healthy dumps under the presets in turn, at 384 responses."""
    found = []
    for i in range(HEALTHY):
        rng = seeded("healthy", i)
        noise, preset = NOISES[i % len(NOISES)], TRAINERS[(i // len(NOISES)) % len(TRAINERS)]
        answer = judged(drawn(World.of(noise, rng), (2, 192, 48), None, rng), preset)
        found.append([noise, preset, answer.outcome, answer.red, answer.why, answer.cells])
    return {"rows": found}


RARE: Mapping[str, tuple[Shape, tuple[int, int, int]]] = {
    "1 in 1,000 of 10,000: whole answers": (Shape("responses", 1e-3, "other"), (4, 2500, 48)),
    "1 in 1,000 of 10,000: from the middle on": (Shape("tail", 1e-3, "other"), (4, 2500, 48)),
    "1 in 1,000 of 10,000: only long answers": (Shape("long", 1e-3, "other"), (4, 2500, 48)),
    "1 in 10,000 of 100,000: one impossible token": (
        Shape("last", 1e-4, "impossible"),
        (4, 25_000, 8),
    ),
}


def rare() -> dict[str, Any]:
    found = {}
    for name, (shape, size) in RARE.items():
        answers: Counter[str] = Counter()
        for i in range(DRAWS):
            rng = seeded("rare", name, i)
            noise = NOISES[i % len(NOISES)]
            answers[judged(drawn(World.of(noise, rng), size, shape, rng), "verl-sync").outcome] += 1
        found[name] = dict(answers)
    return {"found": found}


def unseen() -> dict[str, Any]:
    """The cases that were written without a look at the source."""
    found = []
    for case in CASES:
        pair = []
        for faulty in (True, False):
            steps = case.make(faulty, np.random.default_rng(zlib.crc32(case.name.encode())))
            pair.append(judged((_columns(step) for step in steps), None))
        found.append([case.name, case.thread, case.truth["answer"], *(a.outcome for a in pair),
                      *(a.cells for a in pair)])  # fmt: skip
    return {"rows": found}


def _columns(step: Mapping[str, Any]) -> dict[str, Any]:
    names = {"token_ST": "token_ids", "mask_ST": "mask", "logp_train_ST": "logp_train",
             "logp_infer_ST": "logp_infer", "staleness_ST": "staleness"}  # fmt: skip
    return {names.get(name, name): value for name, value in step.items()}


def share(k: int, n: int) -> str:
    """A share with its Clopper-Pearson interval."""
    low = beta.ppf(0.025, k, n - k + 1) if k else 0.0
    high = beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
    return f"{k} of {n} ({100 * low:.1f} to {100 * high:.1f} %)"


def text_of(measured: Mapping[str, Any]) -> str:
    """What was measured, as the page shows it."""
    parts = [_law(measured["law"]["rows"]), _healthy(measured["healthy"]["rows"])]
    rows = [[name, *(str(of.get(o, 0)) for o in ("violated", "inconclusive", "holds", "error"))]
            for name, of in measured["rare"]["found"].items()]  # fmt: skip
    heads = ["rare answers, 20 draws each", "violated", "inconclusive", "holds", "error"]
    parts.append(markdown(heads, rows))
    parts.append(_unseen(measured["unseen"]["rows"]))
    return "\n\n".join(parts)


def _law(rows: list[Any]) -> str:
    red = [row for row in rows if row[5]]
    beside = sum(row[4] == "holds" for row in red)
    quiet = [row for row in rows if not row[5]]
    lines = [
        f"Of {len(rows)} dumps with a fault, of {len(SHAPES)} shapes and {len(SIZES)} sizes, at "
        f"least one rule is rightly red on {len(red)}; the answer beside it is *holds* on "
        f"{beside}. On the {len(quiet)} others it is *holds* on "
        f"{sum(row[4] == 'holds' for row in quiet)}."
    ]
    table = []
    for where in WHERE:
        own = [row for row in rows if row[0] == where]
        counts = Counter(row[4] for row in own)
        names = ("violated", "error", "inconclusive", "holds")
        table.append([where, str(len(own)), str(sum(bool(r[5]) for r in own)),
                      *(str(counts[n]) for n in names)])  # fmt: skip
    heads = [
        "fault on",
        "dumps",
        "a rule is rightly red",
        "violated",
        "error",
        "inconclusive",
        "holds",
    ]
    table_of_rules = []
    for rule in RULES:
        name = f"{rule.project} {rule.name}"
        own = [row for row in rows if name in row[5]]
        table_of_rules.append([rule.project, rule.name, rule.what, f"{rule.limit:g}", rule.where,
                               str(len(own)), str(sum(r[4] == "holds" for r in own))])  # fmt: skip
    rules = ["project", "number", "what it is", "limit", "from", "rightly red on", "beside *holds*"]
    return "\n\n".join([*lines, markdown(heads, table), markdown(rules, table_of_rules)])


def _healthy(rows: list[Any]) -> str:
    table = []
    for noise in NOISES:
        own = [row for row in rows if row[0] == noise]
        counts = Counter(row[2] for row in own)
        red = [row for row in own if row[3] and row[2] == "holds"]
        table.append([noise, str(len(own)), share(counts["holds"], len(own)),
                      str(counts["violated"]), str(counts["inconclusive"]), str(len(red)),
                      str(sum(row[4] for row in red))])  # fmt: skip
    held = sum(row[2] == "holds" for row in rows)
    heads = ["noise of a healthy pair", "dumps", "holds", "violated", "inconclusive",
             "holds, a rule is red", "and the answer says why"]  # fmt: skip
    line = f"Of {len(rows)} healthy dumps of 384 responses, {share(held, len(rows))} hold."
    return f"{line}\n\n{markdown(heads, table)}"


def _unseen(rows: list[Any]) -> str:
    caught = [row for row in rows if row[3] != "holds"]
    twins = sum(row[4] == "holds" for row in rows)
    line = (
        f"Of {len(rows)} faults that were written without a look at the source, "
        f"{share(len(caught), len(rows))} are not answered *holds*; of their healthy twins "
        f"{share(twins, len(rows))} hold."
    )
    table = [[row[0].replace("_", " "), row[1], row[2], row[3], row[4]] for row in rows]
    heads = ["case", "thread", "right answer", "answer", "healthy twin"]
    return f"{line}\n\n{markdown(heads, table)}"


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "law": law, "healthy": healthy, "rare": rare, "unseen": unseen,
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--write", action="store_true", help="into docs/explanation/rules.md")
    options.add_argument("--part", choices=[*PARTS], action="append")
    options.add_argument("--out", type=Path, default=committed.ROOT / "runs" / "rules.json")
    given = options.parse_args()
    known = json.loads(given.out.read_text("utf-8")) if given.part and given.out.exists() else {}
    for name in given.part or PARTS:
        known[name] = PARTS[name]()
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(known), encoding="utf-8")
    if set(known) == set(PARTS):
        text = text_of(json.loads(json.dumps(known)))
        print(text)
        if given.write:
            committed.write(PAGE, text, COMMAND)


if __name__ == "__main__":
    main()
