"""What kernels cost on a real language model, and what `times_format` answers there.

    make real-model-trained
    python -m benchmarks.real_formats [--write] [--only NAME ...]      an hour on a core, 8 GB

Each kernel scores the same texts with full logits, so the tables of kernels have exact values at
every position.  The tables of answers draw one token from the kernel under test at each position,
as often as is stated, and judge the clause of preset vllm-upgrade on them: at most 0.010, or at
most 1.25 times what the format costs.  A fault's strength is bisected until the fault alone, in
float32, is as far from float32 as bfloat16 is.  Seeds and texts were fixed before the first run.

What was measured is kept in --keep FOLDER (7 GB), so that a run that was ended goes on: delete the
folder after a change to an engine.  Kernels of llama.cpp and of vLLM run in the environments that
`make test-engines` makes; a row says why its kernel was not measured.
"""

# Axes: R positions, V vocabulary.

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from servanda.contract.identity import digest_of
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Clause
from servanda.engines import engine_names, open_engine
from servanda.engines.checkpoint import read_tokenizer
from servanda.engines.worker import spawn
from servanda.judgement.clauses.base import Cell, Interim
from servanda.judgement.clauses.format_cost import FormatCertificate, FormatGrown
from servanda.judgement.clauses.statistical import Feed
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.alpha import attempt_alpha
from servanda.theory.stats.block_bootstrap import block_interval
from servanda.theory.stats.log_moment import LogMoment
from servanda.theory.stats.mean_ratio import MeanRatio, ratios
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[1]
VENVS = Path(os.environ.get("SERVANDA_VENVS", ROOT / ".venvs")).absolute()
MODELS = VENVS / "real-model"
MODEL, TRAINED = MODELS / "float32", MODELS / "trained"
GGUF = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
PAGE = ROOT / "docs/results/real_model.md"
TEXTS, TOKENS, ROWS = 24, 160, 8  # a domain's texts are joined and cut; texts of a batch
ENDS = 32  # positions at the beginning and at the end of a text that have columns of their own
PADDING = 63  # columns
LIMIT, TIMES, CELLS, DRAWS, FIRST_SEED = 0.010, 1.25, 12, 6, 100
ALPHA = attempt_alpha(0.05, 1)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Run:
    """How the texts are scored.

    Args:
        kernel: a kernel string.
        path: prefill or decode.
        rows: texts that run together; 0: all of a batch, and where they are decoded, all.
        padded: with one more text, which is longer by PADDING: all others have so many columns of
            padding, on the left where they are decoded, else on the right.
        compiled: by torch.compile, which no kernel has a key for.
    """

    kernel: str
    path: Any = "prefill"
    rows: int = 0
    padded: bool = False
    compiled: bool = False


def _sdpa(dtype: str, model: Path = MODEL, more: str = "", **how: Any) -> Run:
    return Run(f"transformers:{model}@{dtype},attention=sdpa{more}", **how)


def _llama(cache: str, **how: Any) -> Run:
    kernel = f"llamacpp:{GGUF}@float16+q4_1,attention=sdpa,kv_cache={cache}"
    return Run(f"{kernel},python={VENVS / 'llamacpp'}", **how)


def _vllm(dtype: str) -> Run:
    # decoded: its logits of a prompt are one Python object an entry
    kernel = f"vllm:{MODEL}@{dtype},option.enforce_eager=true,python={VENVS / 'vllm'}"
    return Run(kernel, path="decode")


CACHES = ("fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
FORMATS = {
    "int8 weights": "+int8_weight_only",
    "int8 weights and activations (W8A8)": "+w8a8",
    "int4 weights, groups of 32": "+int4_g32",
    "fp8, a scale per channel (emulated)": "+fp8_channel",
    "fp8, a scale per block (emulated)": "+fp8_block",
    "MXFP8 (emulated)": "+mxfp8",
    "NVFP4 (emulated)": "+nvfp4",
}
KERNELS = {
    **{
        f"{d} {a}": Run(f"transformers:{MODEL}@{d},attention={a}")
        for d in DTYPES
        for a in ("eager", "sdpa")
    },
    **{
        f"{d} sdpa, {name}": _sdpa(d, **how)
        for d in DTYPES[:2]
        for name, how in {
            "one by one": {"rows": 1},
            "batches of 3": {"rows": 3},
            "padded": {"padded": True},
            "by decode": {"path": "decode"},
            "compiled, one by one": {"rows": 1, "compiled": True},
        }.items()
    },
    "bfloat16 sdpa, by decode, batches of 3": _sdpa("bfloat16", path="decode", rows=3),
    "bfloat16 sdpa, by decode, padded": _sdpa("bfloat16", path="decode", padded=True),
    **{
        f"bfloat16 sdpa, by decode, KV cache {kind} (emulated)": _sdpa(
            "bfloat16", more=f",kv_cache={kind}", path="decode"
        )
        for kind in CACHES
    },
    **{n: _sdpa(f"bfloat16{q}") for n, q in FORMATS.items() if "int4" in q or "nvfp4" in q},
    "ONNX Runtime float32": Run("onnxruntime:{keep}/onnx/model.onnx@float32"),
    "llama.cpp Q4_1, KV cache float16": _llama("float16"),
    "llama.cpp Q4_1, KV cache q8_0": _llama("q8_0"),
    "llama.cpp Q4_1, KV cache float16, by decode": _llama("float16", path="decode"),
    "vLLM float32, by decode": _vllm("float32"),
    "vLLM bfloat16, by decode": _vllm("bfloat16"),
}
# of the copy that was trained on
OFF_GRID = {
    "trained on: float32 eager": Run(f"transformers:{TRAINED}@float32,attention=eager"),
    "trained on: bfloat16 sdpa": _sdpa("bfloat16", TRAINED),
    "trained on: float16 sdpa": _sdpa("float16", TRAINED),
    **{f"trained on: {n}": _sdpa(f"bfloat16{q}", TRAINED) for n, q in FORMATS.items()},
}
DECODED = "bfloat16 sdpa, by decode"
ALONE = "bfloat16 sdpa, one by one"  # one text a batch: other shapes, other orders of sums
# kernel -> another than float32 eager that it is compared with as well
BESIDE = {
    **{
        k: k.split(", ")[0] + (", one by one" if "compiled" in k else "")
        for k in KERNELS
        if " sdpa, " in k
    },
    **dict.fromkeys((k for k in KERNELS if k.startswith(DECODED + ", ")), DECODED),
    "vLLM bfloat16, by decode": DECODED,
    "llama.cpp Q4_1, KV cache q8_0": "llama.cpp Q4_1, KV cache float16",
    "llama.cpp Q4_1, KV cache float16, by decode": "llama.cpp Q4_1, KV cache float16",
}
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
TRAINED_A = "trained on: float32 eager"
_HALVINGS = 7

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    domain: str
    ids: tuple[int, ...]


def texts() -> list[Text]:
    """Texts of our own, in the order of batches: the prompts by domain, joined and cut to TOKENS
    ids."""
    lines = (ROOT / "examples/real-model/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    by_domain: dict[str, list[str]] = {}
    for line in map(json.loads, lines):
        by_domain.setdefault(line["labels"]["domain"], []).append(line["prompt"])
    pages = sorted((ROOT / "docs/concepts").glob("*.md"))
    by_domain["prose"] = [page.read_text(encoding="utf-8") for page in pages]
    encode = read_tokenizer(MODEL)
    found = []
    for domain, parts in by_domain.items():
        ids = encode("\n".join(parts), add_special_tokens=False, verbose=False)["input_ids"]
        pieces = [ids[i : i + TOKENS] for i in range(0, len(ids), TOKENS)]
        whole = [p for p in pieces if len(p) == TOKENS][: -(-TEXTS // len(by_domain))]
        found += [Text(domain, tuple(piece)) for piece in whole]
    return [text for batch in batches(found) for text in batch]


def batches(of: list[Text]) -> Iterator[list[Text]]:
    # every batch has all domains
    rows = -(-len(of) // ROWS)
    for i in range(rows):
        yield of[i::rows]


def opened(text: str, fault: tuple[str, float] | None = None) -> Any:
    text += f",fault={fault[0]}:{fault[1]!r}" if fault else ""
    kernel = parse_kernel(text, engines=engine_names(), name="kernel")
    return spawn(kernel, "infer") if kernel.python else open_engine(kernel)


def log_laws(engine: Any, run: Run, of: list[Text], extra: Text) -> Iterator[Logits]:
    """The log probabilities before each token but the first, [R, V], in pieces.

    Args:
        of: a batch.
        extra: the text that pads the others.
    """
    for i in range(0, len(of), run.rows or len(of)):
        some = [(t.ids[:1], t.ids[1:]) for t in of[i : i + (run.rows or len(of))]]
        left = len(some) * (TOKENS - 1)
        if run.padded:
            some.append((extra.ids[: PADDING + 1], extra.ids[PADDING + 1 : PADDING + 2]))
        prompts, given = zip(*some, strict=True)
        batch = Batch(tuple(range(len(some))), prompts, TOKENS - 1, given)
        for logits in engine.logits(batch, run.path):
            piece = torch.from_numpy(np.array(logits[:left])).float()
            left -= len(piece)
            yield torch.log_softmax(piece, dim=-1).numpy()


def sizes(of: list[Text]) -> list[int]:
    """How many texts each batch has."""
    return [len(batch) for batch in batches(of)]


def written(run: Run, of: list[Text], file: Path) -> None:
    """Write the log probabilities of all texts, [R, V]."""
    engine = opened(run.kernel.replace("{keep}", str(file.parent)))
    vocab_size = engine.describe().vocab_size
    if run.compiled:
        engine.model.compile()
    part, rows = file.with_suffix(".part"), len(of) * (TOKENS - 1)
    law = np.lib.format.open_memmap(part, "w+", np.float32, (rows, vocab_size))
    first = at = 0
    # a step of decoding takes as long for all texts as for some
    for size in [len(of)] if run.path == "decode" else sizes(of):
        for piece in log_laws(engine, run, of[first : first + size], of[0]):
            law[at : at + len(piece)] = piece
            at += len(piece)
        first += size
    engine.close()
    assert at == rows, f"{run.kernel} gave {at} positions of {rows}"
    part.replace(file)


def tv(p: Logits, q: Logits) -> NDArray[np.float64]:
    return np.abs(np.exp(p) - np.exp(q)).sum(axis=1, dtype=np.float64) / 2


def exact(p: Logits, q: Logits, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Distances at each position, [R]; |log ratio| of the text's own token."""
    # Bregman: sum q (p - q) alone would be rounding where kernels are near
    d = p.astype(np.float64) - q
    kl = (np.exp(q) * (np.expm1(d) - d)).sum(axis=1)
    at = np.arange(len(ids))
    return {"tv": tv(p, q), "kl": kl, "delta": abs(d[at, ids]), "same": p.argmax(1) == q.argmax(1)}


def drawn(total: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A token of each position's law, [R], from its cumulated probabilities [R, V]."""
    mark = rng.random(len(total)) * total[:, -1]
    return np.array([np.searchsorted(t, m) for t, m in zip(total, mark, strict=True)])


def terms(
    train: Logits, infer: Logits, other: Logits, whole: bool, seed: Sequence[int]
) -> Iterator[dict[str, NDArray[np.float64]]]:
    """x of the number, and x and y of the ratio, at tokens that infer draws, DRAWS times.

    Args:
        seed: of the draws, and the number of each is added.
    """
    at, total = np.arange(len(infer)), np.cumsum(np.exp(infer.astype(np.float64)), axis=1)
    for draw in range(DRAWS):
        ids = drawn(total, np.random.default_rng([*seed, draw]))
        w, v = (np.exp((p[at, ids] - infer[at, ids]).astype(np.float64)) for p in (train, other))
        nearer, usual = (v, w) if whole else (w, v)
        yield {
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
    return kind.judge(cell, [FormatGrown(process, *growth, pairs)], None, look)


class Kept:
    """What was measured, in a folder; what is not there is measured.

    Laws are kept of the kernels that others are compared with.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.of = folder, texts()
        self.ids = np.array([i for text in self.of for i in text.ids[1:]])
        self.texts = [text.ids for text in self.of]
        self.wanted = {A, TRAINED_A, *BESIDE.values(), *(k for p in PAIRS for k in p), B, USUAL}

    def file(self, kind: str, about: object) -> Path:
        return self.folder / f"{kind}-{digest_of([about, self.texts])}"

    def law(self, name: str) -> Logits:
        """The log probabilities of a kernel, [R, V]."""
        run = {**KERNELS, **OFF_GRID}[name]
        file = self.file("law", asdict(run)).with_suffix(".npy")
        onnx = self.folder / "onnx" / "model.onnx"
        if not file.is_file():
            if run.kernel.startswith("onnxruntime") and not onnx.is_file():
                command = [sys.executable, "scripts/export_onnx.py", str(MODEL), str(onnx)]
                subprocess.run(command, cwd=ROOT, check=True)
            begun = time.monotonic()
            written(run, self.of, file)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        return np.load(file, mmap_mode="r")

    def numbers(self, name: str, against: str) -> dict[str, Any] | str:
        """`exact` of two kernels; a sentence where one could not be measured."""
        about = [asdict({**KERNELS, **OFF_GRID}[n]) for n in (name, against)]
        file = self.file("numbers", about).with_suffix(".npz")
        if not file.is_file():
            try:
                p, q = self.law(against), self.law(name)
            except Exception as error:  # engines, compilers and installers raise anything
                why = str(error).strip() or type(error).__name__
                print(f"{name}: {why}", flush=True)
                return why.splitlines()[0]
            step = TOKENS - 1
            parts = [
                exact(p[at : at + step], q[at : at + step], self.ids[at : at + step])
                for at in range(0, len(self.ids), step)
            ]
            np.savez(file, **joined(parts))
        with np.load(file) as held:
            return dict(held)

    def compared(self, name: str, *against: str) -> list[dict[str, Any] | str]:
        """A row for each; a law that nobody wants again is deleted."""
        found = [self.numbers(name, other) for other in against]
        if name not in self.wanted:
            run = {**KERNELS, **OFF_GRID}[name]
            self.file("law", asdict(run)).with_suffix(".npy").unlink(missing_ok=True)
        return [f if isinstance(f, str) else _row(f, self.of) for f in found]

    def remembered(self, about: object, measure: Any) -> Any:
        """What `measure` gives, as JSON."""
        file = self.file("told", about).with_suffix(".json")
        if not file.is_file():
            file.write_text(json.dumps(measure(), default=float))
        return json.loads(file.read_text())

    def parts(self, *laws: Logits) -> Iterator[list[Logits]]:
        """The laws batch by batch."""
        first = 0
        for size in sizes(self.of):
            stop = first + size * (TOKENS - 1)
            yield [np.asarray(law[first:stop]) for law in laws]
            first = stop


def matched(kept: Kept, name: str, goal: float) -> tuple[float, float]:
    """The strength at which the fault alone is as far from float32 as the goal, and how far."""
    ((law,), *_) = kept.parts(kept.law(A))
    some = kept.of[: sizes(kept.of)[0]]
    low, high = FAULTS[name]
    far = 0.0
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        far = float(tv(law, _faulty(A, (name, middle), some)).mean())
        low, high = (middle, high) if far < goal else (low, middle)
    return middle, far


def _faulty(kernel: str, fault: tuple[str, float], some: list[Text]) -> Logits:
    engine = opened(KERNELS[kernel].kernel, fault)
    law = np.concatenate([*log_laws(engine, KERNELS[kernel], some, some[0])])
    engine.close()
    return law


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def measure(kept: Kept, only: Sequence[str]) -> dict[str, Any]:
    """All of the page; `only` rows whose names have one of these parts, and no answers."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"positions": len(kept.ids), "texts": len(kept.of)}
    found |= {"kernels": {}, "beside": {}, "trained": {}, "pairs": [], "faults": []}
    for name in (*KERNELS, *OFF_GRID):
        if only and not any(part in name for part in only):
            continue
        if name in OFF_GRID:
            (found["trained"][name],) = kept.compared(name, TRAINED_A)
        elif name in BESIDE:
            rows = kept.compared(name, A, BESIDE[name])
            found["kernels"][name], found["beside"][name] = rows
        else:
            (found["kernels"][name],) = kept.compared(name, A)
    if only:
        return found
    for pair in PAIRS:
        found["pairs"].append(kept.remembered(["pair", *pair], partial(_pair, kept, *pair)))
    for name in FAULTS:
        about = partial(_faulted, kept, name, found["kernels"][B]["tv"])
        found["faults"].append(kept.remembered(["fault", name], about))
    return found


def _pair(kept: Kept, a: str, b: str) -> list[Any]:
    other, whole = PAIRS[a, b]
    parts: list[dict[str, Any]] = []
    for number, laws in enumerate(kept.parts(*map(kept.law, (a, b, other)))):
        train, infer, further = laws
        parts += terms(train, infer, further, whole, [FIRST_SEED, number])
    verdict = answer(joined(parts), whole, "bfloat16" if "bfloat16" in a + b else "float16")
    print(a, b, verdict.outcome, flush=True)
    return [a, b, verdict.value, verdict.rounding, verdict.outcome, verdict.reason]


def _row(found: Mapping[str, NDArray[Any]], of: list[Text]) -> dict[str, Any]:
    by_text = found["tv"].reshape(len(of), TOKENS - 1)
    domains = [text.domain for text in of]
    blocks = tuple(map(tuple, by_text.tolist()))
    return {
        "tv": found["tv"].mean(),
        "between": block_interval(blocks, None, 0.025, FIRST_SEED),
        "kl": found["kl"].mean(),
        "delta": [*np.percentile(found["delta"], [50, 99]), found["delta"].max()],
        "same": found["same"].mean(),
        "domains": [by_text[[d == n for n in domains]].mean() for d in dict.fromkeys(domains)],
        "ends": [by_text[:, :ENDS].mean(), by_text[:, -ENDS:].mean()],
    }


def _faulted(kept: Kept, name: str, goal: float) -> dict[str, Any]:
    """Five draws of bfloat16 with the fault: how many are violated."""
    strength, alone = matched(kept, name, goal)
    parts: list[list[dict[str, Any]]] = [[] for _ in range(5)]
    far, first = [], 0
    for number, (law, usual) in enumerate(kept.parts(kept.law(A), kept.law(USUAL))):
        some = kept.of[first : first + sizes(kept.of)[number]]
        first += len(some)
        with_it = _faulty(B, (name, strength), some)
        far.append(tv(law, with_it))
        for seed, part in enumerate(parts):
            part += terms(law, with_it, usual, False, [FIRST_SEED + 1 + seed, number])
    outcomes = [answer(joined(part), False).outcome for part in parts]
    print(name, strength, alone, outcomes, flush=True)
    return {
        "fault": name,
        "strength": strength,
        "alone": alone,
        "with": float(np.concatenate(far).mean()),
        "violated": outcomes.count("violated"),
        "draws": len(outcomes),
    }


def shown(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if value >= 0.0005 else f"{value:.1e}"


def kernel_table(rows: Mapping[str, Any], domains: list[str], against: Mapping[str, str]) -> str:
    heads = ["kernel", *(["against"] if against else []), "mean TV [95 %]", "mean KL"]
    heads += ["p50, p99, max |Δ logp|", "same best token", *(f"TV, {d}" for d in domains)]
    heads += [f"TV, first {ENDS}", f"TV, last {ENDS}"]
    cells = []
    for name, row in rows.items():
        begin = [name.removeprefix("trained on: "), *([against[name]] if against else [])]
        if isinstance(row, str):
            begin.append(f"not measured: {row}")
            cells.append([*begin, *[""] * (len(heads) - len(begin))])
            continue
        low, high = map(shown, row["between"])
        numbers = [f"{shown(row['tv'])} [{low}, {high}]", f"{row['kl']:.2g}"]
        numbers += [", ".join(f"{v:.3g}" for v in row["delta"]), f"{row['same']:.2%}"]
        cells.append([*begin, *numbers, *map(shown, (*row["domains"], *row["ends"]))])
    return markdown(heads, cells)


def page_text(found: Mapping[str, Any], domains: list[str]) -> str:
    kernels, beside, trained = (
        kernel_table(found[kind], domains, BESIDE if kind == "beside" else {})
        for kind in ("kernels", "beside", "trained")
    )
    answers = [
        [a, b, f"{value:.4f}", outcome + (f" ({reason})" if reason else ""), words]
        for a, b, value, words, outcome, reason in found["pairs"]
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
    count = (
        f"{found['positions']:,} positions of {found['texts']} texts; {DRAWS} tokens drawn at each "
        "for the answers."
    )
    parts = [count, "Against float32 eager:", kernels, "Against another kernel:", beside]
    parts += ["The copy that was trained on, against itself in float32 eager:", trained]
    return "\n\n".join([*parts, "Answers:", pairs, "Faults:", faults])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "real-formats")
    parser.add_argument("--only", nargs="*", default=(), help="parts of names of kernels")
    asked = parser.parse_args()
    if asked.write and asked.only:
        parser.error("--write writes the whole page: leave out --only")
    kept = Kept(asked.keep.absolute())
    domains = [*dict.fromkeys(text.domain for text in kept.of)]
    text = page_text(measure(kept, asked.only), domains)
    print(text)
    if asked.write:
        committed.write(PAGE, text, "python -m benchmarks.real_formats --write")


if __name__ == "__main__":
    main()
