"""Every ordered pair of the shipped kernels: how far apart they are, and how near to themselves.

The first kernel of a row scores again what the second draws; tokens are realised, golden texts
exact.  Means over the same seeded prompts, with the floor of the same run beside them.

    python -m benchmarks.pairs [--groups 128]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from servanda.engines import open_engine
from servanda.runner import run

ROOT = Path(__file__).parents[1]
KERNELS = {
    "float32": "dtype: float32, attention: eager",
    "bfloat16": "dtype: bfloat16, attention: sdpa",
    "int8": "dtype: bfloat16, attention: sdpa, quantization: int8_weight_only",
    "int4": "dtype: bfloat16, attention: sdpa, quantization: int4_g32",
}
CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: pair}}
kernels:
  train: {{engine: transformers, model: {root}/models/tiny-lm, {train}, batch_size: 16}}
  infer: {{engine: transformers, model: {root}/models/tiny-lm, {infer}}}
workload:
  prompts: {root}/data/prompts.jsonl
  sampling: {{temperature: 1.0, max_new_tokens: 24, seed: 7}}
golden: {{prompts: {root}/data/golden.jsonl}}
claim: realised
numerical:
  - {{id: osc, metric: logit_osc_nats, at_most: 100, slices: all}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.5, slices: all}}
promotion: {{offline: {{prompt_groups: [{groups}, {groups}]}}}}
"""
HEAD = ("train", "infer", "mean TV", "interval", "floor", "k3", "p99 |d|", "flips", "golden osc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=128)
    options = parser.parse_args()
    engines: dict[str, Any] = {}

    def open_(kernel: Any, side: str) -> Any:
        """Loaded once for each side: the two sides run side by side."""
        key = f"{side} {kernel.model_dump_json()}"
        if key not in engines:
            engines[key] = open_engine(kernel)
            engines[key].close = lambda: None
        return engines[key]

    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for train, first in KERNELS.items():
        for infer, second in KERNELS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "pair.kernelcontract.yaml"
                path.write_text(
                    CONTRACT.format(root=ROOT, train=first, infer=second, groups=options.groups)
                )
                verdict = run.check(path, run_dir=Path(folder) / "run", open=open_)
            cells = {c.clause: c for c in verdict.cells}
            tv, portrait = cells["tv"], verdict.portraits["infer"]
            low, high = tv.interval or (0.0, 1.0)
            print(
                f"| {train} | {infer} | {tv.value:.4f} | [{low:.4f}, {high:.4f}] | {tv.floor:.4f} "
                f"| {portrait.total.mean('k3'):.1e} | {portrait.quantile(0.99):.3f} "
                f"| {100 * (portrait.total.mean('flips') or 0.0):.1f} % "
                f"| {cells['osc'].value:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
