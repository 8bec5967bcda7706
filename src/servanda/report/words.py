# The words that reports share: glyphs, numbers, names, and the verdict in one sentence.

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from servanda.clauses import CellVerdict
from servanda.clauses.base import ORDER
from servanda.clauses.certificate import WITHIN_NOISE
from servanda.contract import WHOLE
from servanda.verdict import Verdict

GLYPH = {"violated": "✗", "error": "!", "inconclusive": "?", "holds": "✓", "not applicable": "–"}
UNITS = {"prompt groups": "groups", "golden positions": "positions"}
_ANSWERS = {
    "violated": ("✗", "Do not promote."),
    "holds": ("✓", "May promote."),
    "inconclusive": ("…", "Not decided."),
    "error": ("!", "Measuring failed."),
}


@dataclass(frozen=True)
class Headline:
    """The verdict in one sentence: glyph and answer, then what breaks where, and the rest."""

    glyph: str
    answer: str
    text: str

    def __str__(self) -> str:
        return f"{self.glyph} {self.answer} {self.text}"


def line(text: str, longest: int = 0) -> str:
    """A name on one line, without control characters, cut to `longest` characters."""
    kept = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text)
    text = " ".join(kept.split())
    return text if not longest or len(text) <= longest else text[: longest - 1] + "…"


def columns(text: str) -> int:
    """Columns of a terminal: two for a wide character, none for one that combines."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def number(value: float | None) -> str:
    """Four decimals, or two digits where they would not show it."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2g}"


def percent(value: float | None) -> str:
    """A share as percent; more digits where it is small."""
    if value is None or math.isnan(value):
        return ""
    shown = f"{100 * value:.1f}"
    if shown == "0.0" and value:
        shown = f"{100 * value:.2g}"
    if shown == "100.0" and value != 1:
        return "> 99.9 %" if value < 1 else "> 100 %"
    return "100 %" if value == 1 else f"{shown} %"


def limit(cell: CellVerdict) -> str:
    """The limit as it was written."""
    if cell.limit is None:
        return ""
    return f"{100 * cell.limit:.4g} %" if cell.threshold is not None else f"{cell.limit:.4g}"


def of_cell(cell: CellVerdict, value: float | None) -> str:
    """A number of a cell in the clause's own terms: a percentile speaks of a share."""
    return percent(value) if cell.threshold is not None else number(value)


def quantity(cell: CellVerdict) -> str:
    """What is measured, such as "mean tv" or "tokens with abs_log_ratio_nats > 0.2"."""
    if cell.threshold is not None:
        return f"tokens with {cell.metric} > {cell.threshold:g}"
    return f"{cell.aggregate} {cell.metric}".strip()


def place(name: str, longest: int = 0) -> str:
    """A slice as people call it."""
    return "whole traffic" if name == WHOLE else line(name, longest)


def where(cell: CellVerdict, longest: int = 0) -> str:
    """Where a cell was judged: a slice of the traffic, or of the golden texts."""
    if cell.section != "numerical":
        return place(cell.slice, longest)
    return "golden texts" if cell.slice == WHOLE else f"{line(cell.slice, longest)} (golden texts)"


def limit_sign(cell: CellVerdict) -> str:
    return "≥" if cell.metric.endswith("_ratio") and cell.section == "observability" else "≤"


def worst_first(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """By outcome, then by how far beyond the limit; the order of the contract breaks ties."""
    rank = {outcome: i for i, outcome in enumerate(ORDER)}
    return sorted(cells, key=lambda c: (rank.get(c.outcome, len(ORDER)), -excess(c)))


def excess(cell: CellVerdict) -> float:
    """The value in units of its limit; 0 where there is none, and for guards."""
    if cell.section == "observability":
        return 0.0
    if cell.value is None or not cell.limit or math.isnan(cell.value):
        return 0.0
    return abs(cell.value) / abs(cell.limit)


def counted(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """Cells that carry the verdict."""
    return [c for c in cells if c.enforced and c.outcome != "not applicable"]


def reason(cell: CellVerdict) -> str:
    """Why a cell is not decided, in two or three words; "" where it is."""
    if cell.outcome != "inconclusive":
        return ""
    if cell.note == WITHIN_NOISE or (cell.floor and cell.limit and cell.floor >= cell.limit):
        return "unreliable baseline"
    if cell.open and cell.more:
        return "too few data"
    return "not decided"


def meaning(cell: CellVerdict) -> str:
    """What a number says and of what: kind, claim, interval, limit, n, alpha (law 3)."""
    parts = [f"{quantity(cell)} on {where(cell)}", cell.outcome]
    if cell.kind:
        parts.append(f"{cell.kind}, {cell.claim} claim" if cell.kind != "fact" else "fact")
    if cell.interval:
        low, high = (of_cell(cell, end) for end in cell.interval)
        parts.append(f"interval [{low}, {high}]")
    if cell.limit is not None:
        parts.append(f"limit {limit_sign(cell)} {limit(cell)}")
    if cell.floor is not None:
        parts.append(f"self-noise floor {of_cell(cell, cell.floor)}")
    if cell.n:
        parts.append(f"n {cell.n:,} {cell.units}")
    if cell.missing:
        parts.append(f"{cell.missing:,} missing")
    if cell.alpha is not None:
        parts.append(f"alpha {cell.alpha:.3g}")
    return "; ".join(parts)


def told(cell: CellVerdict) -> str:
    """A cell in a sentence: what was found, against what, and why it is not decided."""
    answer = reason(cell) or cell.outcome
    text = f"{answer if cell.enforced else f'{answer} (monitored)'}: {quantity(cell)}"
    if cell.value is not None:
        text += f" is {of_cell(cell, cell.value)}"
    text += f" on {where(cell)}"
    if cell.limit is not None:
        text += f", limit {limit_sign(cell)} {limit(cell)}"
    if cell.interval:
        text += f", interval [{', '.join(of_cell(cell, end) for end in cell.interval)}]"
    if cell.n:
        text += f", n {cell.n:,} {cell.units}"
    if cell.note:
        text += f"; {line(cell.note)}"
    if cell.outcome == "inconclusive" and cell.more:
        text += f"; about {cell.more:,} more prompt groups would decide"
    return f"{text}."


def headline(verdict: Verdict) -> Headline:
    """The sentence of every report."""
    glyph, answer = _ANSWERS[verdict.outcome]
    cells = counted(verdict.cells)
    bad = worst_first(c for c in cells if c.outcome == verdict.outcome)
    promises = [c for c in cells if c.section != "observability"]
    if not promises:
        text = f"No enforced clause is judged at stage {line(verdict.stage)}."
    elif verdict.outcome == "holds":
        text = f"Every promise holds, {_extent(promises)}."
    elif verdict.outcome == "violated":
        text = _broken(bad) if _untrusted(bad) else f"{_broken(bad)} {_rest(cells)}"
    elif verdict.outcome == "error":
        text = f"{_names(bad)}: {line(bad[0].note, 120) or 'no usable number'}."
    else:
        text = _open(bad, verdict.more)
    return Headline(glyph, answer, text.strip())


def _extent(cells: Sequence[CellVerdict]) -> str:
    slices = {c.slice for c in cells}
    parts = ["the whole traffic"] if WHOLE in slices else []
    if len(slices - {WHOLE}):
        parts.append(_count(len(slices - {WHOLE}), "slice"))
    return f"on {' and '.join(parts)}"


def _untrusted(bad: Sequence[CellVerdict]) -> bool:
    return any(c.metric == "sampler_fidelity" for c in bad)


def _broken(bad: Sequence[CellVerdict]) -> str:
    if _untrusted(bad):
        return "What it serves does not follow the distribution that it reports."
    if all(c.section == "numerical" for c in bad):
        return f"The infer kernel breaks {_names(bad)}."
    slices = list(dict.fromkeys(c.slice for c in bad))
    if WHOLE in slices:
        others = len(slices) - 1
        more = f" and {_count(others, 'slice')}" if others else ""
        return f"The infer kernel breaks the whole traffic{more}."
    names = [line(s, 40) for s in slices[:2]]
    if len(slices) > 2:
        return f"The infer kernel breaks {len(slices)} slices: {', '.join(names)} and others."
    noun = "slices" if len(names) > 1 else "slice"
    return f"The infer kernel breaks {noun} {' and '.join(names)}."


def _rest(cells: Sequence[CellVerdict]) -> str:
    """What holds beside it: the whole, and how many slices."""
    sampled = [c for c in cells if c.section == "statistical"]
    if not sampled:
        return ""
    broken = {c.slice for c in sampled if c.outcome != "holds"}
    fine = {c.slice for c in sampled} - broken
    undecided = len({c.slice for c in sampled if c.outcome == "inconclusive"})
    parts = ["the whole traffic"] if WHOLE in fine else []
    if others := len(fine - {WHOLE}):
        more = "other " if broken else ""
        parts.append(_count(others, f"{more}slice"))
    if not parts:
        return f"{_count(undecided, 'slice')} not decided." if undecided else "No slice holds."
    verb = "hold" if len(parts) > 1 or others > 1 else "holds"
    text = f"{' and '.join(parts)} {verb}."
    return text[0].upper() + text[1:]


def _open(bad: Sequence[CellVerdict], more: int | None) -> str:
    first = bad[0]
    why = {
        "unreliable baseline": "beyond its limit, yet within the kernels' own noise",
        "too few data": "too few data",
    }.get(reason(first), line(first.note, 90) or "neither shown to hold nor to be violated")
    text = f"{_names(bad[:1])}: {why}"
    if len(bad) > 1:
        text += f"; {_count(len(bad) - 1, 'more cell')} open"
    return text + (f". About {more:,} more prompt groups would decide." if more else ".")


def _names(cells: Sequence[CellVerdict]) -> str:
    names = ", ".join(f"{line(c.clause, 40)} on {where(c, 40)}" for c in cells[:2])
    return names + (f" and {len(cells) - 2} more" if len(cells) > 2 else "")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def impact(verdict: Verdict) -> str:
    """Under the sentence: the worst number, the traffic hit, what people would see there."""
    cells = counted(verdict.cells)
    bad = worst_first(c for c in cells if c.outcome == verdict.outcome)
    parts = []
    if _untrusted(bad) and verdict.outcome == "violated":
        parts.append("Logprobs say nothing about such tokens, so no other promise is judged.")
    if verdict.outcome in ("violated", "inconclusive"):
        parts += _worst_number(bad)
    if verdict.outcome == "violated":
        parts += _traffic(bad) + _flips(verdict, bad)
    elif verdict.outcome == "holds":
        parts += _nearest(cells)
    parts.append(f"Exit code {verdict.exit_code}.")
    return " ".join(parts)


def _worst_number(bad: Sequence[CellVerdict]) -> list[str]:
    cell = next((c for c in bad if c.value is not None and c.limit is not None), None)
    if cell is None:
        return []
    return [f"{measured(cell)} on {where(cell, 40)}, limit {limit(cell)}."]


def measured(cell: CellVerdict) -> str:
    """The number with its name: "Mean tv 0.0125", or "4.7 % of tokens with ... > 0.03"."""
    value = of_cell(cell, cell.value)
    if cell.threshold is not None:
        return f"{value} of {quantity(cell)}"
    text = f"{quantity(cell)} {value}"
    return text[0].upper() + text[1:] if cell.aggregate else text


def _nearest(cells: Sequence[CellVerdict]) -> list[str]:
    judged = [c for c in cells if c.section != "observability"]
    cell = max((c for c in judged if c.value is not None), key=excess, default=None)
    if cell is None or not excess(cell):
        return []
    found = f"{measured(cell)} on {where(cell, 40)}"
    return [f"{found} comes nearest to its limit, {limit(cell)}."]


def _traffic(bad: Sequence[CellVerdict]) -> list[str]:
    shares = {c.slice: c.share for c in bad if c.share is not None and c.workload}
    if not shares or any(c.section == "observability" for c in bad):
        return []
    if WHOLE in shares:
        return ["All traffic is affected."]
    least = "At least " if len(shares) > 1 else ""
    return [f"{least}{percent(max(shares.values()))} of the tokens are affected."]


def _flips(verdict: Verdict, bad: Sequence[CellVerdict]) -> list[str]:
    infer = verdict.portraits.get("infer")
    name = next((c.slice for c in bad if c.section == "statistical"), None)
    if infer is None or name is None or name not in infer.slices:
        return []
    there, whole = infer.slices[name].mean("flips"), infer.total.mean("flips")
    if there is None or whole is None:
        return []
    text = f"There {percent(there)} of the most likely tokens change"
    stable = verdict.portraits.get("stable")
    today = stable.slices[name].mean("flips") if stable and name in stable.slices else None
    if today is not None:
        return [f"{text} (stable kernel {percent(today)})."]
    return [f"{text}." if name == WHOLE else f"{text} (whole traffic {percent(whole)})."]
