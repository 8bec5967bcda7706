# Writes the tables of docs/reference/ that come from the registries: python scripts/reference.py
#
# A test holds the pages in step with the code.

from __future__ import annotations

from pathlib import Path

from servanda.clauses import GUARDS
from servanda.divergence import DIVERGENCES
from servanda.explain.words import of_guard, of_metric
from servanda.lint import KNOWN_LATER, RUNTIME_METRICS
from servanda.lint.escalation import BARE, WITH_VALUE
from servanda.scope import OUTCOME_METRICS
from servanda.slices import FIELDS, LABEL, OPERATORS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_HEAD = "<!-- written by scripts/reference.py -->\n"
_KNOWN = {
    "request": "before the request",
    "context": "before the token",
    "outcome": "after the token",
}


def _table(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    lines = [head, tuple("---" for _ in head), *rest]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )


def metrics() -> str:
    """The page of metrics and guards."""
    rows = [("metric", "unit", "largest", "numerical", "statistical", "what it is")]
    for name, metric in DIVERGENCES.items():
        sampled = bool({"logprob", "top1"} & set(metric.forms))
        mean = "mean, pN" if metric.bounded else "pN; mean with `clip`"
        rows.append(
            (
                f"`{name}`",
                metric.unit,
                f"{metric.span[1]:g}" if metric.bounded else "",
                "✓" if "logits" in metric.forms else "",
                mean if sampled else "",
                of_metric(name),
            )
        )
    runtime = [("metric", "unit", "limit", "takes", "what it is")]
    for name, metric in RUNTIME_METRICS.items():
        takes = ["`aggregate`"] * metric.aggregate + ["`load`"] * metric.load
        limit = f"`{metric.limit}: {metric.example}`"
        runtime.append((f"`{name}`", metric.unit, limit, ", ".join(takes), metric.meaning))
    guards = [("guard", "what it asks"), *((f"`{name}`", of_guard(name)) for name in GUARDS)]
    later = [name for name in (*OUTCOME_METRICS, *KNOWN_LATER) if name not in DIVERGENCES]
    names = ", ".join(f"`{name}`" for name in later)
    return (
        f"{_HEAD}# Metrics and guards\n\n"
        "`servanda explain NAME` says more of each.\n\n"
        "## Of the two kernels' tokens\n\n"
        f"{_table(*rows)}\n\n"
        "pN at `at_most: L` is the promise that at most (100 − N) % of such tokens exceed L.\n\n"
        "## Of time, speed and batching\n\nUnder `runtime.clauses`.\n\n"
        f"{_table(*runtime)}\n\n"
        "## Guards\n\nUnder `observability.clauses`.\n\n"
        f"{_table(*guards)}\n\n"
        "## Read, and not judged by this version\n\n"
        f"A clause on one of these ends *inconclusive*, never in a pass: {names}.\n"
    )


def fields() -> str:
    """The page of slice fields, operators and actions."""
    rows = [("field", "known", "values", "what it is")]
    rows.append((f"`{LABEL}<name>`", _KNOWN["request"], "texts", "a label of the prompt"))
    for name, field in FIELDS.items():
        values = ", ".join(field.values) if field.values else "numbers"
        rows.append((f"`{name}`", _KNOWN[field.known], values, field.meaning))
    actions = [("action", "takes"), *((f"`{name}`", "") for name in BARE)]
    actions += [(f"`{name}`", f"`{{{name}: {value}}}`") for name, value in WITH_VALUE.items()]
    operators = ", ".join(f"`{name}`" for name in OPERATORS)
    return (
        f"{_HEAD}# Slice fields and actions\n\n"
        f"{_table(*rows)}\n\n"
        "What is known before the request can route it. On a slice that is known only after the "
        "token, only\n`mass_gap` and `tv_contribution` are defined.\n\n"
        f"Operators of `match`: {operators}. Texts take `in` and `exists`.\n\n"
        "## Actions of an escalation\n\n"
        f"{_table(*actions)}\n"
    )


PAGES = {"metrics.md": metrics, "fields.md": fields}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
