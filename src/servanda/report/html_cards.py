# The four cards: is it fair, where does it sit, the worst token, could it have been missed.

from __future__ import annotations

import math
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import Portrait, Worst
from servanda.judgement.verdict import Caught, Verdict
from servanda.report import cell_text, format
from servanda.report.consequence import slice_numbers
from servanda.report.format import count, line, number
from servanda.report.summary import counted, dumped
from servanda.theory.stats.alpha import log_price

_GRADES = {
    "verified": "same weights, tensor by tensor",
    "derived": "same weights, by derivation",
    "declared": "same weights, as declared only",
}


class Line(NamedTuple):
    """One line of a card; glyph and tone are empty where nothing is judged."""

    text: str
    glyph: str = ""
    tone: str = ""
    strong: bool = False


class Card(NamedTuple):
    title: str
    lines: tuple[Line, ...]


def cards(verdict: Verdict) -> tuple[Card, ...]:
    return (
        Card("Is the comparison fair?", tuple(_fair(verdict))),
        Card("Where is the drift?", tuple(_sits(verdict))),
        Card("Which token is worst?", tuple(_worst(verdict))),
        Card("Could this gate have missed it?", tuple(_missed(verdict))),
    )


def described(verdict: Verdict) -> tuple[str, Portrait]:
    """What the tokens look like: of the workload, or of the golden texts, or nothing."""
    for name, what in (("infer", "workload"), ("golden", "golden texts")):
        portrait = verdict.portraits.get(name)
        if portrait is not None and portrait.total.n:
            return what, portrait
    return "nothing", Portrait()


def _fair(verdict: Verdict) -> list[Line]:
    grade = verdict.key.grade
    sure = grade != "declared"
    lines = [Line(_GRADES[grade], "✓" if sure else "!", "holds" if sure else "inconclusive")]
    for metric, says in (("usable_ratio", _coverage), ("sampler_fidelity", _sampler)):
        cell = next((c for c in verdict.cells if c.metric == metric and c.place == WHOLE), None)
        if cell is not None:
            tone = cell.outcome.replace(" ", "-")
            lines.append(Line(says(cell), cell_text.glyph_of(cell), tone))
    peers = {side: verdict.portraits.get(f"self_{side}") for side in ("infer", "train")}
    selves = {side: peer for side, peer in peers.items() if peer is not None}
    known = {side: p.total.mean("tv") for side, p in selves.items() if p.total.n}
    if known:
        noise = ", ".join(f"{side} kernel {number(v)}" for side, v in known.items())
        n = max(p.total.n for p in selves.values())
        text = (
            f"noise floor (each kernel in other batches), mean TV: {noise} (n {count(n, 'token')})"
        )
        lines.append(Line(text, "✓", "holds"))
    else:
        lines.append(Line("the noise floor was not measured", "?", "inconclusive"))
    if verdict.lost:
        lines.append(Line(f"{count(verdict.lost, 'sequence')} lost", "!", "error"))
    return lines


def _coverage(cell: CellVerdict) -> str:
    if cell.value is None:
        return "logprobs: nothing measured"
    return f"logprobs on {format.percent(cell.value)} of {count(cell.n, 'token')}"


def _sampler(cell: CellVerdict) -> str:
    answer = {
        "holds": "sampled as reported",
        "violated": "not sampled as reported",
    }.get(cell.outcome, "sampler not judged")
    return f"{answer}, n {count(cell.n, 'token')}" if cell.n else answer


def _sits(verdict: Verdict) -> list[Line]:
    """The slices that the search found; else those that are violated."""
    advice = verdict.advice
    if advice is not None and advice.slices:
        texts = ((line(part.entry), f"{slice_numbers(part)}.") for part in advice.slices)
        return [one for entry, text in texts for one in (Line(entry, strong=True), Line(text))]
    red = (c for c in verdict.cells if c.outcome == "violated" and c.section == "statistical")
    names = {c.place: c.place.replace("-", " ", 1) if c.steps else c.place for c in red}
    broken = [name for place, name in names.items() if place != WHOLE]
    if broken:
        others = [Line(f"And on {', '.join(broken[1:])}.")] if broken[1:] else []
        return [Line(f"On {broken[0]}.", strong=True), *others]
    if names:
        return [
            Line("Nowhere in particular.", strong=True),
            Line("Of the whole, and of no slice."),
        ]
    return [Line("No statistical clause is violated, so no slice was searched for.")]


def _worst(verdict: Verdict) -> list[Line]:
    what, portrait = described(verdict)
    if not portrait.worst:
        return [Line("No token was compared.")]
    worst = portrait.worst[0]
    if worst.text is None:
        lines = [Line("(text is not stored: numbers only)")]
    else:
        context = format.line(worst.context_text or "")[-60:]
        lines = [Line(f"“…{context}” → “{format.line(worst.text, 30)}”", strong=True)]
    lines += numbers_of(worst, prompts=not dumped(verdict))
    return lines if what == "workload" else [*lines, Line(f"From the {what}.")]


def numbers_of(worst: Worst, *, prompts: bool = True) -> list[Line]:
    """What a worst token shows without its text.

    Args:
        prompts: whether its prompt is a line of a file: that of a dump is not.
    """
    of = f" (line {worst.row + 1} of the prompts)" if prompts else ""
    rank = "" if worst.rank is None else f", rank {worst.rank + 1:.0f}"
    entropy = "" if worst.entropy_nats is None else f", entropy {number(worst.entropy_nats)} nats"
    return [
        Line(
            f"p {number(worst.p_train)} (train kernel), {number(worst.p_infer)} (infer kernel)"
            f"{rank}",
            strong=True,
        ),
        Line(f"|log ratio| {number(worst.abs_log_ratio)} nats{entropy}"),
        Line(
            f"token id {worst.token} at position {worst.position}, after a prompt of "
            f"{count(worst.prompt_tokens, 'token')}{of}"
        ),
    ]


def _missed(verdict: Verdict) -> list[Line]:
    if verdict.power:
        return _power(verdict)
    cells = [c for c in counted(verdict.cells) if cell_text.certified(c)]
    reach = [(c, r) for c in cells if (r := least_seen(c, verdict)) is not None]
    if not reach:
        return [Line("No interval was computed, so nothing is known about what it would miss.")]
    blind = max(reach, key=lambda pair: pair[1] / abs(pair[0].limit or 1.0))
    lines = [Line("By the widths of this run's intervals, violated from about:")]
    whole = next((pair for pair in reach if pair[0].place == WHOLE), None)
    for cell, least_mean in dict.fromkeys(filter(None, (whole, blind))):
        least = format.rough(least_mean, share=cell.threshold is not None)
        text = f"{format.place(cell.place, 24)}: {least} (limit {cell_text.limit(cell)})"
        lines.append(Line(text, strong=True))
    least = "; the last is the least sensitive slice" if blind[0].place != WHOLE else ""
    lines.append(Line(f"{cell_text.quantity(blind[0])}{least}"))
    unseen = [c.place for c in cells if not c.n]
    if unseen:
        lines.append(
            Line(f"No token at all: {count(len(unseen), 'cell')} (a cell is a clause on a slice).")
        )
    return lines


def _power(verdict: Verdict) -> list[Line]:
    lines = []
    for of_field, at in (
        (False, "their default size"),
        (True, "the size reported in public bugs"),
    ):
        faults = [c for c in verdict.power if c.met == of_field]
        missed = [c for c in faults if not c.by]
        if faults:
            caught = f"{len(faults) - len(missed)} of {len(faults)}"
            text = f"A run of this size catches {caught} known faults at {at}."
            lines.append(Line(text, strong=not of_field))
        if missed:
            names = ", ".join(format.line(_strong(c), 48) for c in missed[:4])
            more = f", {len(missed) - 4} more" if len(missed) > 4 else ""
            lines.append(Line(f"Missed: {names}{more}."))
    lines.append(Line("Their sizes are those on the bundled model; on yours they may be others."))
    return lines


def _strong(caught: Caught) -> str:
    """A fault with its strength, where it has one."""
    with_value = caught.strength not in ("", "true")
    return f"{caught.fault} at {caught.strength}" if with_value else caught.fault


def least_seen(cell: CellVerdict, verdict: Verdict) -> float | None:
    """About the smallest mean that a run like this one would have called violated.

    The interval's wider side, widened from alpha to the threshold of a violation, above the
    limit (or above twice the floor).  An estimate: widths change with the mean.
    """
    if not cell.interval or cell.value is None or cell.limit is None or not cell.alpha:
        return None
    side = max(cell.value - cell.interval[0], cell.interval[1] - cell.value)
    price = log_price(verdict.alpha_violated) / log_price(cell.alpha)
    red_line = max(cell.limit, 2 * (cell.floor or 0.0))
    return red_line + side * math.sqrt(price) if math.isfinite(side) else None
