"""Train healthy runs of the experiment, shorter, and keep the numbers of each step.

python -m benchmarks.change.healthy [--runs N]     continues; about ten CPU seconds a run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.experiment.settings import Settings

HEALTHY = Path(__file__).with_name("healthy.json")
RUNS, STEPS, FIRST_SEED = 42, 12, 100  # no seed of the experiment
KEPT = ("k3", "abs_d_p99", "abs_d_mean", "tokens")


def settings(seed: int) -> Settings:
    return Settings(
        "healthy",
        "bfloat16",
        "none",
        seed,
        steps=STEPS,
        evaluated=8,
        held_out=8,
        evaluate_every=STEPS,
        checkpoints=(),
    )


def kept(path: Path = HEALTHY) -> list[dict[str, Any]]:
    """One entry per run: its seed, and of each step the numbers of KEPT."""
    return json.loads(path.read_text()) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    wanted = range(FIRST_SEED, FIRST_SEED + parser.parse_args().runs)
    from benchmarks.experiment.training import train  # imports torch

    runs = kept()
    for seed in wanted:
        if any(run["seed"] == seed for run in runs):
            continue
        steps = train(settings(seed)).steps
        numbers = {name: [float(f"{x:.4g}") for x in steps[name]] for name in KEPT}
        runs.append({"seed": seed, **numbers})
        lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
        HEALTHY.write_text(f"[\n{lines}\n]\n")
        print(f"seed {seed}: {len(runs)} runs", flush=True)


if __name__ == "__main__":
    main()
