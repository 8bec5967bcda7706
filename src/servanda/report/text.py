# The verdict as text: who is compared, what breaks where (worst first), the answer, small print.

from __future__ import annotations

from functools import partial

from servanda.judgement.clauses.base import ORDER, CellVerdict
from servanda.judgement.clauses.chain_certificate import ChainCertificate
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.clauses.statistical import ALWAYS
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report.cell_text import GIVEN_UP, GLYPH, UNITS, assumed, certified, interval, of_cell
from servanda.report.format import line, percent
from servanda.report.table import table
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.divergence.base import DIVERGENCES

_SAYS = {
    "population": "of tokens that this workload's prompts bring forth",
    "realised": "of the tokens that were measured",
}
_WIDEST = 36  # of a column; a longer name is cut


@FORMATS.register("text")
def render(verdict: Verdict) -> str:
    rank = {outcome: i for i, outcome in enumerate(ORDER)}
    cells = sorted(verdict.cells, key=lambda c: rank.get(c.outcome, len(ORDER)))
    rows = [["clause", "slice", "measured", "interval", "limit", "floor", "n"]]
    rows += [_row(cell) for cell in cells]
    head, *row_texts = table(rows, right=range(2, len(rows[0])), widest=_WIDEST)
    lines = [
        f"{line(verdict.contract)}: {line(verdict.infer)}  against  {line(verdict.train)}",
        _measured(verdict),
        *(line(text) for text in verdict.circumstances.differences),
        "",
        f"  {head}",
    ]
    for cell, row in zip(cells, row_texts, strict=True):
        lines += [f"{GLYPH[cell.outcome]} {row}"]
        lines += [f"    {note}" for note in _notes(cell)]
    lines += ["", sentence(verdict), *not_examined(verdict), *_small_print(verdict)]
    return "\n".join(line.rstrip() for line in lines)


def sentence(verdict: Verdict) -> str:
    """The answer in one sentence: what breaks where, or what is missing."""
    word = verdict.outcome.upper()
    cells = [c for c in verdict.cells if c.enforced and c.outcome != "not applicable"]
    bad = [c for c in cells if c.outcome == verdict.outcome]
    beyond = [c for c in verdict.cells if not c.enforced and c.outcome == "violated"]
    watched = f" Monitored and beyond its limit: {_named(beyond)}." if beyond else ""
    if verdict.outcome == "holds":
        return f"{word}: every enforced cell, {len(bad)} of {len(bad)}.{watched}"
    if not any(c.section != "observability" for c in cells):
        return f"{word}: no enforced clause is judged at stage {verdict.stage!r}.{watched}"
    rest = sum(c.outcome == "holds" for c in cells)
    text = f"{word}: {_named(bad)}. {rest} of {len(cells)} enforced cells hold."
    if verdict.outcome == "inconclusive" and verdict.more:
        text += f" About {verdict.more:,} more prompt groups would decide"
        text += " (raise the limit of promotion.offline.prompt_groups)."
    return text + watched


def not_examined(verdict: Verdict) -> list[str]:
    """What the verdict could not see, one line each, under a heading; [] where nothing is known."""
    spots = [f"  - {line(spot.text)}" for spot in verdict.blind_spots]
    return ["Not examined by this run:", *spots] if spots else []


def _named(cells: list[CellVerdict]) -> str:
    names = ", ".join(f"{line(c.clause)} on {line(c.slice)}" for c in cells[:4])
    return names + (f" and {len(cells) - 4} more" if len(cells) > 4 else "")


def _measured(verdict: Verdict) -> str:
    parts = [f"weights {verdict.key.grade} {verdict.key.weights[:8]}"]
    if verdict.sequences:
        parts.append(f"{verdict.sequences:,} sequences of {verdict.groups:,} prompt groups")
        parts.append(f"{verdict.tokens:,} tokens")
    if verdict.golden_tokens:
        parts.append(f"{verdict.golden_tokens:,} golden positions")
    if verdict.lost:
        parts.append(f"{verdict.lost:,} sequences lost")
    if verdict.circumstances.stopped == "broken":
        parts.append(GIVEN_UP)
    return " · ".join(parts)


def _row(cell: CellVerdict) -> list[str]:
    show = partial(of_cell, cell)
    absent = "not measured" if certified(cell) or cell.kind == "fact" else ""
    return [
        _clause(cell),
        cell.slice,
        absent if cell.value is None else show(cell.value),
        interval(cell),
        show(cell.limit),
        show(cell.floor),
        f"{cell.n:,} {UNITS.get(cell.units, cell.units)}" if cell.units else "",
    ]


def _clause(cell: CellVerdict) -> str:
    what = f"{cell.aggregate} {cell.metric}".strip()
    return what if what == cell.clause else f"{cell.clause}: {what}"


def _notes(cell: CellVerdict) -> list[str]:
    notes = [cell.note] if cell.note else []
    if cell.threshold is not None:
        notes.append(
            f"share of tokens beyond {cell.threshold:g}{_nats(cell.metric)}; "
            f"{cell.aggregate} promises at most {percent(cell.limit)}"
        )
    if cell.outcome == "inconclusive" and cell.more:
        notes.append(f"about {cell.more:,} more prompt groups would decide")
    if cell.unit.startswith("per "):
        notes.append(f"counted {cell.unit}")
    if cell.value is not None and cell.value < 0 and _never_negative(cell):
        notes.append("below 0 by sampling noise: the mean is never negative")
    if cell.missing:
        notes.append(f"{cell.missing:,} {_units(cell)} missing, counted against both answers")
    if not cell.enforced and cell.outcome != "not applicable":
        notes.append("monitored, not enforced")
    return notes


def _units(cell: CellVerdict) -> str:
    """What has a value of its own, and so can be missing; n may count their groups."""
    if cell.units == "golden positions":
        return "positions"
    metric = CHAIN.get(cell.metric)
    whole = cell.unit == "per answer" or getattr(metric, "each", "token") == "sequence"
    return "answers" if whole else "tokens"


def _never_negative(cell: CellVerdict) -> bool:
    """Whether a mean below 0 can only be of samples: the estimate of one token may be there."""
    if not certified(cell):
        return False
    if cell.metric in CHAIN:
        return issubclass(CHAIN[cell.metric], ChainCertificate)
    metric = DIVERGENCES.get(cell.metric)
    return metric is not None and "logits" in metric.forms and metric.span_of("logits")[0] == 0


def _nats(metric: str) -> str:
    """The unit of a threshold: a metric's name ends in it."""
    return " nats" if metric.endswith("_nats") else ""


def _spent(verdict: Verdict) -> str:
    """What each cell of a run may spend on a violation that is none, and who shares it."""
    cells, alpha = verdict.price_cells, verdict.alpha * verdict.part
    leg = f", of which this leg has {verdict.part:.3g} for violations" if verdict.part < 1 else ""
    if not cells:
        return leg
    share = f"is called so wrongly with probability at most {alpha / cells:.2g}"
    return f"{leg}; each of {cells} enforced cells that chance can call violated {share}"


def _small_print(verdict: Verdict) -> list[str]:
    certificates = [c for c in verdict.cells if certified(c)]
    lines = [f"claim {c}: {_SAYS[c]}" for c in sorted({c.claim for c in certificates})]
    if certificates:
        lines += [
            f"alpha {verdict.alpha:.3g} is what attempt {verdict.key.attempt} may spend of "
            f"1 - confidence = {1 - verdict.confidence:.3g}{_spent(verdict)}",
            f"intervals: each cell alone, each end at {1 - verdict.alpha:.4g}, valid at every "
            "look and so about twice as wide as one for a single look; measured: at the look that "
            f"ended the run; floor: {_floors(verdict)}",
            f"certified numbers assume that {'; that '.join(assumed(certificates))}",
        ]
    lines += [*dict.fromkeys(filter(None, map(_rests, certificates)))]
    lines.append(
        f"stage {verdict.stage} · contract {verdict.key.contract[:8]} · evidence "
        f"{verdict.evidence[:8]} · exit {verdict.exit_code}"
    )
    return lines


def _rests(cell: CellVerdict) -> str:
    """What a number rests on besides what all of them do; "" where nothing.

    Only of a decided cell: where a guard was rejected, nothing is certified.
    """
    if cell.outcome not in ("holds", "violated"):
        return ""
    own = [ASSUMPTIONS[name].text for name in cell.assumptions if name not in ALWAYS]
    if not own:
        return ""
    what = "a conditional bound" if cell.kind == "conditional bound" else "certified"
    return f"{line(cell.clause)}: {what}, if {'; '.join(own)}"


def _floors(verdict: Verdict) -> str:
    """Whose noise the floors are."""
    whose = "a side against itself in other batches, on the tokens that infer drew"
    unknown = [side for side in ("train", "infer") if f"self_{side}" not in verdict.portraits]
    if len(unknown) != 1:
        return whose
    return f"{whose}; that of {unknown[0]} is not known: it cannot score what was drawn"
