# The verdict as text: who is compared, what breaks where (worst first), the answer, small print.

from __future__ import annotations

from functools import partial

from servanda.judgement.clauses.base import ORDER, CellVerdict
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.clauses.statistical import ALWAYS
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import rungs
from servanda.report.cell_text import (
    GIVEN_UP,
    REALISED,
    assumed,
    certified,
    each_of,
    glyph_of,
    interval,
    log_e_value,
    of_cell,
    quantity,
    short_size,
    signed_limit,
)
from servanda.report.consequence import advice_lines, consequence
from servanda.report.format import count, line, number, percent, wrapped
from servanda.report.summary import remarks
from servanda.report.table import table, width
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.stats.alpha import log_price

_SCOPE = {
    "population": "all tokens that this prompt distribution would generate, not only this sample",
    "realised": f"the tokens that were measured, and no others; {REALISED}",
}
_HEADS = ("clause", "slice", "measured", "interval", "limit", "noise floor", "n")
_DROPPED = ("noise floor", "n", "interval")  # in this order, where a terminal is too narrow
_WIDEST, _NARROW, _LEAST = 46, 24, 12  # of a column; a longer name is cut
_CELL = "cells (a cell is one clause on one slice)"
# a validity check prints no number; the distribution that it tests
_TESTED = {
    "sampler_fidelity": "test that infer samples from the distribution that it reports",
    "served_fidelity": "test that the tokens follow what infer reports, as train ranks them",
    "coherence": "test that the mean importance weight is at most 1",
}


@FORMATS.register("text")
def render(verdict: Verdict) -> str:
    return "\n".join(lines(verdict))


def lines(verdict: Verdict, columns: int = 0) -> list[str]:
    """The lines of a verdict.

    Args:
        columns: of the terminal that they have to fit: the table leaves columns out, and long
            lines are wrapped; 0: any width, as for a pipe.
    """
    rank = {outcome: i for i, outcome in enumerate(ORDER)}
    cells = sorted(verdict.cells, key=lambda c: rank.get(c.outcome, len(ORDER)))
    (head, *rows), dropped = _table(cells, columns)
    top = [
        f"{line(verdict.contract)}: {line(verdict.infer)}  against  {line(verdict.train)}",
        _measured(verdict),
        *remarks(verdict),
        "",
        f"  {head}",
    ]
    for cell, row in zip(cells, rows, strict=True):
        top += [f"{glyph_of(cell)} {row}"]
        top += [f"    {note}" for note in _notes(cell, verdict)]
    if dropped:
        top += [f"  (left out at {columns} columns: {', '.join(dropped)})"]
    text = [*top, "", sentence(verdict), *consequence(verdict)]
    text += [*rungs.lines(verdict)]
    text += [*advice_lines(verdict.advice), *not_examined(verdict)]
    text += _small_print(verdict, cells)
    return [part.rstrip() for one in text for part in _fitted(one, columns)]


def _table(cells: list[CellVerdict], columns: int) -> tuple[list[str], list[str]]:
    """The rows, heading first, and the columns that had no room."""
    widest, dropped, waiting = _WIDEST, list[str](), list(_DROPPED)
    full = [list(_HEADS), *map(_row, cells)]
    while True:
        keep = [i for i, head in enumerate(_HEADS) if head not in dropped]
        rows = [[row[i] for i in keep] for row in full]
        printed = table(rows, right=range(2, len(keep)), widest=widest)
        if not columns or max(map(width, printed)) + 2 <= columns:
            return printed, dropped
        if waiting and (widest <= _NARROW or len(waiting) == len(_DROPPED)):
            dropped.append(waiting.pop(0))
        elif widest > _LEAST:
            widest -= 1
        else:
            return printed, dropped


def _fitted(text: str, columns: int) -> list[str]:
    """A line in several, the later ones indented, where a terminal is narrower."""
    if not columns or width(text) <= columns:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return wrapped(text.strip(), columns, indent, indent + "  ") or [text]


def sentence(verdict: Verdict) -> str:
    """The answer in one sentence: what breaks where, or what is missing."""
    word = verdict.outcome.upper()
    cells = [c for c in verdict.cells if c.enforced and c.outcome != "not applicable"]
    bad = [c for c in cells if c.outcome == verdict.outcome]
    beyond = [c for c in verdict.cells if not c.enforced and c.outcome == "violated"]
    watched = f" Not enforced, and beyond its limit: {_named(beyond)}." if beyond else ""
    if verdict.outcome == "holds":
        return f"{word}: {len(bad)} of {len(bad)} enforced {_CELL} hold.{watched}"
    if not any(c.section != "observability" for c in cells):
        return f"{word}: no enforced clause is judged at stage {verdict.stage!r}.{watched}"
    rest = sum(c.outcome == "holds" for c in cells)
    text = f"{word}: {_named(bad)}. {rest} of {len(cells)} enforced {_CELL} hold."
    if verdict.outcome == "inconclusive" and verdict.more:
        text += f" About {count(verdict.more, 'more prompt group')} would decide"
        text += " (raise the limit of promotion.offline.prompt_groups)."
    return text + watched


def not_examined(verdict: Verdict) -> list[str]:
    """What the verdict could not see, one line each, under a heading; [] where nothing is known."""
    spots = [f"  - {line(spot.text)}" for spot in verdict.blind_spots]
    return ["Not examined by this run:", *spots] if spots else []


def _named(cells: list[CellVerdict]) -> str:
    names = ", ".join(f"{line(c.clause)} on {line(c.place)}" for c in cells[:4])
    return names + (f" and {len(cells) - 4} more" if len(cells) > 4 else "")


def _measured(verdict: Verdict) -> str:
    parts = [f"weights {verdict.key.grade} {verdict.key.weights[:8]}"]
    if verdict.sequences:
        parts.append(_sequences(verdict))
        parts.append(count(verdict.tokens, "token"))
    if verdict.golden_tokens:
        parts.append(
            f"{count(verdict.golden_tokens, 'position')} of golden texts (fixed, not sampled)"
        )
    if verdict.lost:
        parts.append(f"{count(verdict.lost, 'sequence')} lost")
    if verdict.circumstances.stopped == "broken":
        parts.append(GIVEN_UP)
    return " · ".join(parts)


def _sequences(verdict: Verdict) -> str:
    """How many prompts, and how many responses each of them had: its group."""
    each, rest = divmod(verdict.sequences, max(verdict.groups, 1))
    if rest or not each:
        return f"{count(verdict.sequences, 'sequence')} in {count(verdict.groups, 'prompt group')}"
    return f"{count(verdict.groups, 'prompt group')} of {count(each, 'sequence')} each"


def _row(cell: CellVerdict) -> list[str]:
    show, what = partial(of_cell, cell), quantity(cell)
    absent = "not measured" if certified(cell) or cell.kind == "fact" else ""
    return [
        cell.clause if what == cell.clause else f"{cell.clause}: {what}",
        cell.place,
        absent if cell.value is None else show(cell.value),
        interval(cell),
        signed_limit(cell),
        show(cell.floor),
        short_size(cell),
    ]


def _notes(cell: CellVerdict, verdict: Verdict) -> list[str]:
    notes = [cell.note] if cell.note else []
    if found := log_e_value(cell):
        # the price of a violation, as for any other cell, unless it has an error rate of its own
        own = cell.alpha is not None and cell.alpha < verdict.alpha_violated
        at = log_price(cell.alpha if own and cell.alpha else verdict.alpha_violated)
        tested = f"{_TESTED[cell.metric]}: " if cell.metric in _TESTED else ""
        notes = [f"{tested}{cell.note or 'not decided'} ({found}, rejected at {number(at)})"]
    if cell.threshold is not None:
        nats = " nats" if cell.metric.endswith("_nats") else ""  # a metric's name ends in its unit
        notes.append(
            f"a share of {each_of(cell)}: {cell.aggregate} stays within {cell.threshold:g}{nats} "
            f"if at most {percent(cell.limit)} exceed it"
        )
    if cell.outcome == "inconclusive" and cell.more:
        notes.append(f"about {count(cell.more, 'more prompt group')} would decide")
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
    of_chain = cell.metric in CHAIN and CHAIN[cell.metric].each == "sequence"
    return "answers" if of_chain or cell.unit == "per answer" else "tokens"


def _never_negative(cell: CellVerdict) -> bool:
    """Whether a mean below 0 can only be of samples: the estimate of one token may be there."""
    if not certified(cell):
        return False
    if cell.metric in CHAIN:
        return CHAIN[cell.metric].nonnegative
    metric = DIVERGENCES.get(cell.metric)
    return metric is not None and "logits" in metric.forms and metric.span_of("logits")[0] == 0


def _spent(verdict: Verdict) -> str:
    """The error budget: of the attempt, of this step of a promotion, and of each cell."""
    text = (
        f"error budget: α = {verdict.alpha:.3g} for attempt {verdict.key.attempt}, of "
        f"1 - confidence = {1 - verdict.confidence:.3g} for all attempts together"
    )
    if verdict.part < 1:
        where = "at this step" if verdict.leg else "of the whole"
        text += f"; violations {where} may spend {verdict.part:.3g} of it"
    if cells := verdict.price_cells:
        text += (
            f", divided by {count(cells, 'cell')}: if the kernels keep a limit, it is called "
            f"violated with probability at most {verdict.alpha_violated:.2g}"
        )
    return text


def _small_print(verdict: Verdict, cells: list[CellVerdict]) -> list[str]:
    certificates = [c for c in verdict.cells if certified(c)]
    text = [f"scope ({c}): {_SCOPE[c]}" for c in sorted({c.claim for c in certificates})]
    if certificates:
        text += [
            _spent(verdict),
            f"intervals: {percent(1 - verdict.alpha)} at each end, for each row by itself; they "
            "stay valid although the run is evaluated after every round, so they are about twice "
            "as wide as for one evaluation, and the measured value can be near one end",
            f"noise floor: {_floors(verdict)}",
            f"assumed: {'; '.join(assumed(certificates))}",
        ]
    text += [*dict.fromkeys(filter(None, map(_rests, certificates)))]
    if metrics := [c.metric for c in cells if c.outcome != "not applicable"]:
        text.append(f"metrics: servanda contract explain {metrics[0]}   (or any other name above)")
    text.append(
        f"stage {verdict.stage} · contract {verdict.key.contract[:8]} · evidence "
        f"{verdict.evidence[:8]} · exit {verdict.exit_code}"
    )
    return text


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
    whose = "a kernel compared with itself in other batches, on the tokens that infer sampled"
    unknown = [side for side in ("train", "infer") if f"self_{side}" not in verdict.portraits]
    if len(unknown) != 1:
        return f"{whose}; the larger of the two kernels"
    return f"{whose}; unknown for {unknown[0]}, which cannot score given tokens"
