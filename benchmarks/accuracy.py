# How many digits each exact divergence keeps, measured against 50-digit arithmetic.
#
#     python -m benchmarks.accuracy            prints the table
#     python -m benchmarks.accuracy --write    writes docs/reference/accuracy.md
#
# Two kernels of the same weights differ by little, and there the textbook lines lose their
# digits.  Each metric is computed from the same float32 logits three times: by the package,
# by its textbook line in float32 (the peer), and by its definition in Decimals (the truth).

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests import oracles

from servanda.theory.divergence.base import LogitRows, exact

BOUND = 1e-9  # relative error that every exact form keeps, at every noise
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


# what one writes first; x, y: float32 logprobs of train and infer
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
    """Train and infer logits in float32, as engines give them."""
    rng = np.random.default_rng(SEED)
    infer = (rng.normal(size=vocabulary) * 3).astype(np.float32)
    return (infer + noise * rng.normal(size=vocabulary)).astype(np.float32), infer


def measure(name: str, noise: float, vocabulary: int = VOCABULARY) -> Errors:
    """Both errors of a metric."""
    train, infer = logits(noise, vocabulary)
    truth = float(oracles.exactly(name, train, infer))
    ours = float(exact(name, LogitRows(train[None], infer[None]))[0])
    peer = float(TEXTBOOK[name](_log_softmax(train), _log_softmax(infer)))
    return Errors(name, noise, abs(ours / truth - 1), abs(peer / truth - 1))


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
# How many digits the exact metrics keep

Two good kernels differ in the fourth digit of a logit and beyond, and there the textbook lines
have no digit left. This page is written by `python -m benchmarks.accuracy --write`.

One row of {vocabulary} float32 logits, normal with standard deviation 3; the other kernel's are
the same plus normal noise of the size at the head of the column. Each entry is the relative error
against the definition, worked in 50-digit arithmetic. `servanda` is the exact form of the
package, from the float32 logits; `float32 textbook` is the line one writes first, as a peer. An
error of 1 means that no digit is right.

**Promised: at every noise of the table, every exact form is within {bound:g} of the truth.** A
test holds that, and this page with it.

{table}

The forms that keep their digits subtract nothing large: `Σ q (expm1(d) - d)` for `Σ q (lq - lp)`,
`Σ (√p - √q)² / 2` for `1 - Σ √(pq)`, and the difference of logits is taken before either is
normalised. `top1_flip` is a count and has no error.
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
