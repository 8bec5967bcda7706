# Findings on the theorems and the procedures, for a terminal, a page or a program.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.theory.base import Tightness, falsify
from benchmarks.theory.procedures import Row, simulate
from benchmarks.theory.scenarios import SCENARIOS
from benchmarks.theory.simulation import ALPHA
from servanda.report.cell_text import KINDS
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.bounds.theorem import THEOREMS

Tell = Callable[[str, int, int], None]
_THEOREM_HEAD = (
    "theorem",
    "guarantee",
    "sharp",
    "assumes",
    "cases",
    "violations",
    "tightest",
    "typical",
)
_ROW_HEAD = ("scenario", "procedure", "", "wrong, %", "allowed, %", "wrong / alpha", "verdict")


@dataclass(frozen=True)
class Findings:
    """Every theorem under its challenge, and every procedure under every scenario."""

    theorems: tuple[Tightness, ...]
    procedures: tuple[Row, ...]
    cases: int
    runs: int
    seed: int

    @property
    def faults(self) -> tuple[str, ...]:
        """Violated theorems, and procedures of ours beyond their margin."""
        return (
            *(
                f"{t.theorem} is violated in {t.violations:,} of {t.cases:,} cases: {t.worst}"
                for t in self.theorems
                if t.violations
            ),
            *(
                f"{r.procedure} ({r.scenario}) is wrong in {100 * r.wrong:.1f} % of {r.runs:,} "
                f"runs, {100 * r.allowed:.1f} % are allowed"
                for r in self.procedures
                if r.ours and r.beyond
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "cases": self.cases,
            "runs": self.runs,
            "seed": self.seed,
            "alpha": ALPHA,
            "faults": list(self.faults),
            "theorems": [_theorem_of(t) for t in self.theorems],
            "procedures": [
                asdict(r) | {"allowed": r.allowed, "ratio": r.ratio, "beyond": r.beyond}
                for r in self.procedures
            ],
        }


def find(cases: int, runs: int, seed: int, tell: Tell = lambda *_: None) -> Findings:
    """Put every theorem and every procedure to the test.

    Args:
        cases: approximate number of exact values for each theorem.
        runs: of each scenario.
        tell: called with (kind, done, total) before each and at the end.
    """
    theorems: list[Tightness] = []
    for i, name in enumerate(THEOREMS):
        tell("theorems", i, len(THEOREMS))
        rng = np.random.default_rng([seed, *name.encode()])
        theorems.append(falsify(name, rng, cases))
    tell("theorems", len(THEOREMS), len(THEOREMS))
    rows: list[Row] = []
    for i, name in enumerate(SCENARIOS):
        tell("scenarios", i, len(SCENARIOS))
        rows += simulate(name, runs, seed)
    tell("scenarios", len(SCENARIOS), len(SCENARIOS))
    return Findings(tuple(theorems), tuple(rows), cases, runs, seed)


def text(found: Findings) -> str:
    """For a terminal."""
    return "\n\n".join(
        [
            _aligned([_THEOREM_HEAD, *map(_theorem_row, found.theorems)]),
            _aligned([_ROW_HEAD, *map(_row, found.procedures)]),
            *(f"fault: {fault}" for fault in found.faults),
        ]
    )


_PAGE = """\
# Attempts to falsify the theorems and the procedures

A verdict rests on theorems (from the difference of two kernels to rewards and gradients) and on
procedures (from tokens to a verdict under continuous monitoring). This page reports systematic
attempts to break both. It is written by `make theory`, which is

```sh
python -m benchmarks.theory --cases {cases} --runs {runs} --seed {seed} --format markdown
```

The command exits 1 if a theorem is violated, or if one of our procedures is wrong more often than
its error rate allows.

{faults}

## The theorems

Each theorem is compared with exact values. The kernels are small enough to enumerate: some are
random, others are constructed to approach the bound. Drifts are optimised towards the bounds in
osc; rewards and groups are optimised towards those of the gradient of whole responses. The others
are not optimised. Nothing is estimated, so one value that exceeds its bound by more than rounding
is a *violation*. *Tightest* is the largest exact value divided by its bound, 1 where a case attains
it; *typical* is the median. Trials of a lemma, or of a part of a theorem, are counted as cases, but
they enter neither ratio. *Sharp* means that some kernels attain the bound or come arbitrarily close
to it, at any drift or as the drift vanishes, for responses of any length. A bound that is not sharp
may be attained for short responses, as its tightest value shows. *Guarantee* is that of the result
if its inputs are anytime-valid bounds.

{theorems}

These are their assumptions. A test can only reject an assumption.

{assumptions}

## The procedures

Each row is {runs} seeded runs. The limit is exactly the true value, and a procedure is evaluated
after every round, so every decision is an error. *Wrong* is the share of runs with at least one
wrong decision, for `holds` or for `violated`; *verdict* is the worse of the two. Each may err in
{alpha:g} % of the runs. A simulated rate passes up to that plus the one-sided 99 % binomial margin
of its number of runs (*allowed*). For e-BH and the procedures it is compared with, the number is
the mean share of false discoveries when the first one is made. The gate `mean <= limit` gets an
advantage: its limits are 10 % away from the true value. "Once" is one evaluation, at the end.

Rows marked *ours* are the procedures of Servanda. The others are common shortcuts, on the same
streams.

{scenarios}

{procedures}

Our procedures stay far below the allowed rate. A mixture over many bets is conservative, and its
guarantee covers all later evaluations too. [Another page](truth.md) measures how often whole
verdicts are wrong.
"""


def markdown(found: Findings) -> str:
    """The page docs/explanation/falsification.md."""
    assumed = {key for t in found.theorems for key in THEOREMS[t.theorem].assumes}
    head = (*_THEOREM_HEAD, "statement")
    rows = [(*_theorem_row(t), THEOREMS[t.theorem].statement) for t in found.theorems]
    rows = [(f"`{name}`", *rest) for name, *rest in rows]
    broken = "\n".join(f"- **{fault}**" for fault in found.faults)
    return _PAGE.format(
        cases=found.cases,
        runs=found.runs,
        seed=found.seed,
        alpha=100 * ALPHA,
        faults=broken
        or "It found no violated theorem, and no procedure of Servanda beyond its margin.",
        theorems=_piped([head, *rows]),
        assumptions="\n".join(
            f"- **{key}**: {a.text}{_kept(a.tested_by, a.kept_by)}."
            for key, a in ASSUMPTIONS.items()
            if key in assumed
        ),
        scenarios="\n".join(f"- **{s.name}**: {s.about}." for s in SCENARIOS.values()),
        procedures=_piped([_ROW_HEAD, *map(_row, found.procedures)]),
    )


def _kept(tested_by: tuple[str, ...], kept_by: str) -> str:
    tested = f"; tested by {', '.join(f'`{name}`' for name in tested_by)}" if tested_by else ""
    return tested + (f"; {kept_by}" if kept_by else "")


def _theorem_of(t: Tightness) -> dict[str, Any]:
    theorem = THEOREMS[t.theorem]
    return asdict(t) | {
        "standing": theorem.standing,
        "sharp": theorem.sharp,
        "assumes": list(theorem.assumes),
        "source": theorem.source,
        "statement": theorem.statement,
    }


def _theorem_row(t: Tightness) -> tuple[str, ...]:
    theorem = THEOREMS[t.theorem]
    return (
        t.theorem,
        KINDS.get(theorem.standing, theorem.standing),
        "sharp" if theorem.sharp else "",
        ", ".join(theorem.assumes),
        f"{t.cases:,}",
        f"{t.violations:,}",
        f"{t.tightest:.4f}",
        f"{t.typical:.3f}",
    )


def _row(r: Row) -> tuple[str, ...]:
    ours = "ours" if r.ours else ""
    return (
        r.scenario,
        r.procedure,
        ours,
        f"{100 * r.wrong:.1f}",
        f"{100 * r.allowed:.1f}",
        f"{r.ratio:.2f}",
        r.answer,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _piped(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )
