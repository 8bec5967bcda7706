"""Are the assumptions of the bounds satisfiable?  Support and score norm on the shipped kernels.

    python -m benchmarks.assumptions [--groups 256] [--write]

Support: the mass that infer cannot draw, or hardly, bounded above from sampled tokens by
U_C = 1 - E_infer min(w, C) with C = 10.  Score norm: of grad log p, in the space of logits, for
the output matrix alone, and for all weights, at golden positions of the float32 model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import committed
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.judgement.clauses.chain_metrics import between
from servanda.runner import run
from servanda.runner.load import compile, load
from servanda.theory.bounds.importance_weights import PSI, weight_gap
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment
from servanda.traces.corpus import Corpus

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "explanation" / "assumptions.md"
CAP = 10.0
ALPHA = 0.05
PROBED = 400  # golden positions whose gradient is taken
KERNELS = {
    "bfloat16": "dtype: bfloat16, attention: sdpa",
    "int8": "dtype: bfloat16, attention: sdpa, quantization: int8_weight_only",
    "int4": "dtype: bfloat16, attention: sdpa, quantization: int4_g32",
}
FILTERS = {
    "none": "temperature: 1.0",
    "top_p .999": "temperature: 1.0, top_p: 0.999",
    "top_p .95": "temperature: 1.0, top_p: 0.95",
    "top_k 50": "temperature: 1.0, top_k: 50",
}
CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: support}}
kernels:
  train: {{engine: transformers, model: {root}/models/tiny-lm, batch_size: 16{own}}}
  infer: {{engine: transformers, model: {root}/models/tiny-lm, {infer}}}
workload:
  prompts: {root}/data/prompts.jsonl
  sampling: {{{sampling}, max_new_tokens: 24, seed: 7}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.5, slices: all}}
promotion: {{offline: {{prompt_groups: [{groups}, {groups}]}}}}
"""
Rows = list[tuple[str, ...]]


def support(groups: int) -> Iterator[tuple[str, ...]]:
    """Kernel by filter: what infer cannot draw, and the smallest mean of w."""
    yield ("infer", "its filter", "train's", "1 − E min(w, 10)", "at most, 95 %", "E w", "tokens")
    for name, infer in KERNELS.items():
        for what, sampling in FILTERS.items():
            same = [True, False] if name == "bfloat16" and what != "none" else [what == "none"]
            for shared in same:
                own = "" if shared else ", sampling: {temperature: 1.0}"
                log_ratio_N = _log_ratios(infer, sampling, own, groups)
                gap_N = weight_gap(log_ratio_N, PSI["tis"](CAP))
                feed = between(1.0, (1.0 - CAP, 1.0))
                _, high = interval(LogMoment.of(feed.x(gap_N)), ALPHA)
                yield (
                    name,
                    what,
                    "the same" if shared else "none",
                    f"{gap_N.mean():.4f}",
                    f"{feed.value(high):.4f}",
                    f"{np.exp(log_ratio_N).mean():.4f}",
                    f"{len(log_ratio_N):,}",
                )


def _log_ratios(infer: str, sampling: str, own: str, groups: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "support.kernelcontract.yaml"
        text = CONTRACT.format(root=ROOT, infer=infer, sampling=sampling, own=own, groups=groups)
        path.write_text(text)
        measured = run.measure(compile(load(path)), Path(folder) / "run", open=run.in_process)
        rounds = [
            r.pair.train.columns["logp"][r.pair.usable_N]
            - r.pair.infer.columns["logp"][r.pair.usable_N]
            for r in measured.rounds()
        ]
    return np.concatenate(rounds)


def score_norms() -> Iterator[tuple[str, ...]]:
    """Norms of grad log p of drawn tokens, at golden positions."""
    import torch

    yield ("of grad log p", "mean", "99 %", "largest", "bound")
    kernel = Kernel(engine="transformers", model=str(ROOT / "models/tiny-lm"))  # type: ignore[call-arg]
    engine: Any = open_engine(kernel)
    golden = Corpus.parse((ROOT / "data/golden.jsonl").read_text(encoding="utf-8"), "golden.jsonl")
    ids = engine.encode([prompt.text for prompt in golden.prompts])
    rng = np.random.default_rng(7)
    found: dict[str, list[float]] = {"logits": [], "head": [], "all": []}
    model = engine.model
    each = math.ceil(PROBED / len(ids))
    for text in ids:
        for at in rng.choice(len(text) - 1, size=min(each, len(text) - 1), replace=False):
            with torch.enable_grad():
                model.zero_grad(set_to_none=True)
                out = model(torch.tensor([text[: at + 1]]), output_hidden_states=True)
                logp_V = torch.log_softmax(out.logits[0, -1].double(), dim=-1)
                p_V = logp_V.detach().exp().numpy()
                token = int(rng.choice(len(p_V), p=p_V / p_V.sum()))
                logp_V[token].backward()
            residual = math.sqrt(max(1 - 2 * p_V[token] + float((p_V**2).sum()), 0.0))
            hidden = float(out.hidden_states[-1][0, -1].detach().double().norm())
            squares = [
                float((p.grad.double() ** 2).sum())
                for p in model.parameters()
                if p.grad is not None
            ]
            found["logits"].append(residual)
            found["head"].append(hidden * residual)
            found["all"].append(math.sqrt(math.fsum(squares)))
    names = {
        "logits": ("the logits", "√2 = 1.41"),
        "head": ("the output matrix", "√2 × norm of the hidden state"),
        "all": ("all weights", "none known before"),
    }
    for key, (name, bound) in names.items():
        norm_N = np.array(found[key])
        shown = (norm_N.mean(), np.quantile(norm_N, 0.99), norm_N.max())
        yield (name, *(f"{value:.2f}" for value in shown), bound)


def table(rows: Rows) -> str:
    head, *rest = rows
    lines = [head, tuple("---" for _ in head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--write", action="store_true", help="into docs/explanation/assumptions.md")
    options = parser.parse_args()
    text = f"{table([*support(options.groups)])}\n\n{table([*score_norms()])}"
    print(text)
    if options.write:
        committed.write(DOCS, text, "python -m benchmarks.assumptions --write")


if __name__ == "__main__":
    main()
