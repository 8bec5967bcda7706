# How many digits each exact divergence keeps, measured against 50-digit arithmetic.
#
#     python -m benchmarks.accuracy            prints the table
#     python -m benchmarks.accuracy --write    writes docs/reference/accuracy.md
#
# Two kernels of the same weights differ by little, and textbook formulas then lose their digits.
# Each metric is computed from the same float32 logits three times: by the package, by its
# textbook formula in float32 (the baseline), and by its definition in Decimals (the exact value).

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests import oracles

from servanda.theory.divergence.base import LogitRows, exact

BOUND = 1e-9  # largest relative error of an exact form, at every noise
NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
VOCABULARY = 2000
SEED = 1
DOCS = Path(__file__).parents[1] / "docs" / "reference" / "accuracy.md"

Row = NDArray[np.float32]


def _log_softmax(z: Row) -> Row:
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def _entropy(logp: Row) -> np.float32:
    return -(np.exp(logp) * logp).sum()


def _js(x: Row, y: Row) -> np.float32:
    p, q = np.exp(x), np.exp(y)
    m = np.log((p + q) / 2)
    return ((p * (x - m)).sum() + (q * (y - m)).sum()) / 2


# x, y: float32 logprobs of the train and the infer kernel
TEXTBOOK: dict[str, Callable[[Row, Row], np.float32]] = {
    "tv": lambda x, y: np.abs(np.exp(x) - np.exp(y)).sum() / 2,
    "kl_nats": lambda x, y: (np.exp(y) * (y - x)).sum(),
    "kl_reverse_nats": lambda x, y: (np.exp(x) * (x - y)).sum(),
    "k3_nats": lambda x, y: (np.exp(y) * (np.exp(x - y) - (x - y) - 1)).sum(),
    "chi2": lambda x, y: ((np.exp(x) - np.exp(y)) ** 2 / np.exp(y)).sum(),
    "js_nats": _js,
    "hellinger2": lambda x, y: 1 - np.sqrt(np.exp(x) * np.exp(y)).sum(),
    "le_cam": lambda x, y: ((np.exp(x) - np.exp(y)) ** 2 / (np.exp(x) + np.exp(y))).sum() / 2,
    "entropy_nats": lambda x, y: np.abs(_entropy(x) - _entropy(y)),
    "abs_log_ratio_nats": lambda x, y: np.abs(x - y).max(),
    "logit_osc_nats": lambda x, y: (x - y).max() - (x - y).min(),
    "logit_linf_nats": lambda x, y: ((x - y).max() - (x - y).min()) / 2,
}


@dataclass(frozen=True)
class Errors:
    """Relative errors of one metric at one noise."""

    name: str
    noise: float
    ours: float
    textbook: float


def logits(noise: float, vocabulary: int = VOCABULARY) -> tuple[Row, Row]:
    """Logits of the train and the infer kernel in float32, as engines return them."""
    rng = np.random.default_rng(SEED)
    infer = (rng.normal(size=vocabulary) * 3).astype(np.float32)
    return (infer + noise * rng.normal(size=vocabulary)).astype(np.float32), infer


def measure(name: str, noise: float, vocabulary: int = VOCABULARY) -> Errors:
    """Both errors of a metric."""
    train, infer = logits(noise, vocabulary)
    truth = float(oracles.exactly(name, train, infer))
    ours = float(exact(name, LogitRows(train[None], infer[None]))[0])
    textbook = float(TEXTBOOK[name](_log_softmax(train), _log_softmax(infer)))
    return Errors(name, noise, abs(ours / truth - 1), abs(textbook / truth - 1))


def table(rows: list[Errors]) -> str:
    """The errors as Markdown."""
    by_name: dict[str, list[Errors]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    noises = [f"{row.noise:g}" for row in next(iter(by_name.values()))]
    lines = [
        f"| metric | form | {' | '.join(noises)} |",
        "|---" * (len(noises) + 2) + "|",
    ]
    for name, errors in by_name.items():
        for form, of in (("servanda", "ours"), ("float32 textbook", "textbook")):
            cells = " | ".join(f"{getattr(e, of):.0e}".replace("0e+00", "0") for e in errors)
            lines.append(f"| `{name}` | {form} | {cells} |")
    return "\n".join(lines)


_PAGE = """\
# Numerical accuracy of the exact metrics

Two good kernels agree in the first three digits of a logit. At differences this small, textbook
formulas in float32 can lose every digit. `python -m benchmarks.accuracy --write` writes this page.

One kernel has a row of {vocabulary} float32 logits, normal with standard deviation 3. The other
has the same row plus normal noise, whose standard deviation is the head of the column. Each entry
is the relative error against the definition in 50-digit arithmetic. `servanda` is the exact form
in the package, computed from the float32 logits. `float32 textbook` is the baseline: the usual
formula in float32. An error of 1 means that no digit is right.

**Guarantee: at every noise level of the table, the relative error of every exact form is at most
{bound:g}.** A test checks this bound.

{table}

The exact forms subtract no large numbers. They use `Σ q (expm1(d) - d)` instead of
`Σ q (lq - lp)`, and `Σ (√p - √q)² / 2` instead of `1 - Σ √(pq)`. They take the difference of the
logits before they normalise either side. `top1_flip` is a count and has no error.
[Torch tensors](python_api.md#exact-metrics-of-torch-tensors) have the same guarantee.
"""


def page(rows: list[Errors]) -> str:
    return _PAGE.format(vocabulary=VOCABULARY, bound=BOUND, table=table(rows))


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--write", action="store_true", help="write the page")
    given = cli.parse_args()
    rows = [measure(name, noise) for name in TEXTBOOK for noise in NOISES]
    if not given.write:
        print(table(rows))
        return
    if max(row.ours for row in rows) > BOUND:
        raise SystemExit(f"an exact form is off by more than {BOUND:g}: nothing written")
    DOCS.write_text(page(rows))
    print(f"wrote {DOCS}")


if __name__ == "__main__":
    main()
