"""Is there a run whose ratio drift is bounded, and whose gradient bias is not?

    python -m benchmarks.escapes [--cases 100000] [--write]

Inside the assumptions: the search for a case beyond its bound (falsification), random and climbed.
Outside: each escape at growing scales, enumerated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import committed
from benchmarks.assumptions import table
from benchmarks.theory import falsify
from benchmarks.theory.counterexamples import ESCAPES
from servanda.theory.bounds.assumptions import ASSUMPTIONS

DOCS = Path(__file__).parents[1] / "docs" / "explanation" / "ratio_and_gradient.md"
DRIFT = 0.1  # largest |log w| of a drawn token, nats, or a hair more
SCALES = (10, 100, 1000, 10_000)
INSIDE = (
    "weight_gap",
    "policy_gradient_bias",
    "loss_weights",
    "ppo_clip_bias",
    "sequence_naive_bias",
    "sequence_tis_bias",
    "token_is_trajectory_bias",
    "grpo_bias",
    "rloo_bias",
)


def inside(cases: int) -> Iterator[tuple[str, ...]]:
    """Theorem by theorem: how near the search came to its bound, and how often beyond."""
    yield ("theorem", "cases", "beyond the bound", "nearest to it")
    for name in INSIDE:
        found = falsify(name, np.random.default_rng([0, *name.encode()]), cases)
        yield (f"`{name}`", f"{found.cases:,}", f"{found.violations:,}", f"{found.tightest:.4f}")


def outside() -> Iterator[tuple[str, ...]]:
    """Escape by escape: bias over what ratios say of it, as the scale grows."""
    scales = [f"{scale:,}" for scale in SCALES]
    yield ("run", "what grows", *scales, "what breaks")
    for name, escape in ESCAPES.items():
        points = [escape.at(DRIFT, scale) for scale in SCALES]
        cells = [
            f"{short(p.exact)} of 0" if math.isinf(p.ratio) else f"{short(p.ratio)} times"
            for p in points
        ]
        yield (name, escape.scale, *cells, escape.assumption or "nothing: it is read wrongly")


def short(value: float) -> str:
    """Three digits, without an exponent.

    >>> short(2500.01), short(0.12345), short(25.2073)
    ('2,500', '0.123', '25.2')
    """
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def told() -> Iterator[str]:
    """What each run is, and what bounds its bias all the same."""
    for name, escape in ESCAPES.items():
        yield f"- **{name}**: {escape.about}. Instead: {escape.instead}."
    yield ""
    yield "What breaks, in full:"
    yield ""
    broken = {escape.assumption for escape in ESCAPES.values()} - {""}
    for key in (key for key in ASSUMPTIONS if key in broken):
        yield f"- **{key}**: {ASSUMPTIONS[key].text}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    parts = ["### Inside", table([*inside(options.cases)])]
    parts += ["### Outside", table([*outside()]), "\n".join(told())]
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        committed.write(DOCS, text, "python -m benchmarks.escapes --write")


if __name__ == "__main__":
    main()
