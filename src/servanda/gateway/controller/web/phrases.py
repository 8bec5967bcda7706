# The words for how things stand, shared by the page and by `servanda gateway status --gateway`.

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from servanda.contract.model import WHOLE
from servanda.gateway.controller.status import CellStanding, SliceStanding, Standing
from servanda.gateway.controller.web import format
from servanda.gateway.proxy.counters import numbers
from servanda.report.format import duration, line, percent

GLYPH = {"active": "✓", "suspect": "?", "quarantined": "✗", "probation": "✗", "recovering": "↗"}
TONE = {"active": "good", "suspect": "open", "recovering": "open"}
_THE_WHOLE, _THE_OTHER = "the whole traffic", "the other slice"
_MANY, _ONE = ("keep", "are"), ("keeps", "is")
_OURS = (_THE_WHOLE, "the other ", "all ", "none of ")  # beginnings that are no names
_SHOWN = 3  # names in a sentence
_LONGEST = 40  # characters of one
_EXCERPT = re.compile(r"\n *(?:\d+ \|.*|\^)$", re.M)  # of a contract, below a message


@dataclass(frozen=True)
class Headline:
    """How things stand in one sentence, and what belongs to it.

    Args:
        tone: good, open, bad or plain.
    """

    glyph: str
    tone: str
    text: str
    more: str


def headline(standing: Standing) -> Headline:
    """What is diverted or would be; else whether the contract is kept, as far as is known."""
    away = [s for s in standing.slices if gone(s)]
    real = [s for s in away if moved(s)]
    would = [s for s in away if not moved(s)]
    held = [s for s in standing.slices if breaks(s)]
    more = _more(standing)
    if away or held:
        parts = []
        if real:
            parts.append(f"{_named(real)} {_be(real)} served by stable.")
        if would:
            parts.append(f"{_named(would)} would be served by stable.")
        if held:
            verbs = (
                "breaks its limit and stays" if len(held) == 1 else "break their limits and stay"
            )
            parts.append(f"{_named(held)} {verbs} on infer.")
        parts.append(_rest(standing, [*away, *held]))
        return Headline("✗", "bad", " ".join(map(_begun, filter(None, parts))), more)
    unknown = [s for s in standing.slices if s.cells and not s.scored]
    watched = [s for s in standing.slices if s.cells]
    if not watched:
        return Headline("?", "open", "No slice of this contract is watched here.", more)
    if len(unknown) == len(watched):
        return Headline("?", "open", "No slice has evidence yet; infer serves.", more)
    doubted = [s for s in standing.slices if s.status != "active"]
    if doubted:
        states = {s.status for s in doubted}
        state = states.pop() if len(states) == 1 else "suspect or recovering"
        return Headline("?", "open", _begun(f"{_named(doubted)} {_be(doubted)} {state}."), more)
    known = [s for s in watched if s.scored]
    if unknown:
        has = "has" if len(unknown) == 1 else "have"
        text = _sound(known, f"{len(known)} of {len(watched)} slices")
        return Headline("?", "open", f"{text}; {_named(unknown)} {has} no evidence yet.", more)
    if len(watched) == 1:
        text = _sound(watched, _named(watched), _ONE)
    elif all(map(kept, watched)):
        text = f"all {len(watched)} slices keep the contract"
    else:
        text = f"none of {len(watched)} slices is suspect"
    return Headline("✓", "good", f"{_begun(text)}.", more)


def _sound(slices: list[SliceStanding], called: str, verbs: tuple[str, str] = _MANY) -> str:
    """What is known of slices that nobody doubts: that they keep the contract only once their
    evidence says so.

    Args:
        verbs: "keep" and "are", as the name asks for them.
    """
    keep, are = verbs
    if not all(map(kept, slices)):
        return f"{called} {are} not suspect"
    return f"{called} {keep} the contract"


def kept(one: SliceStanding) -> bool:
    """Whether the evidence is there that every limit of a slice is kept."""
    return all(map(met, one.cells))


def met(cell: CellStanding) -> bool:
    """Whether a cell passes the return test: the e-value for its limit is at the threshold.

    How tokens are drawn has no limit: nothing is to be shown there.
    """
    return cell.refutes or cell.log_below >= cell.log_leave_price


def gone(one: SliceStanding) -> bool:
    """Whether it was decided that stable serves a slice, acted on or not."""
    if one.pin is not None and one.pin.to in ("stable", "infer"):
        return one.pin.to == "stable"
    return one.status in ("quarantined", "probation")


def moved(one: SliceStanding) -> bool:
    """Whether what was decided of a slice is done."""
    return one.acts or (one.pin is not None and one.pin.to == "stable")


def returns(one: SliceStanding) -> bool:
    """Whether a slice has left, so that evidence may bring it back."""
    return one.status not in ("active", "suspect")


def breaks(one: SliceStanding) -> bool:
    """Whether a price is paid and the slice stays nevertheless."""
    paid = any(cell.nearness >= 1 for cell in one.cells)
    return paid and one.status == "suspect" and not gone(one)


def _begun(sentence: str) -> str:
    """A name begins a sentence as it is written; our own words with a capital."""
    return sentence[0].upper() + sentence[1:] if sentence.startswith(_OURS) else sentence


def _be(slices: list[SliceStanding]) -> str:
    return "is" if len(slices) == 1 else "are"


def _rest(standing: Standing, away: list[SliceStanding]) -> str:
    rest = [s for s in standing.slices if s not in away and s.cells]
    calm = [s for s in rest if s.status == "active" and s.scored]
    if not rest:
        return ""
    if len(calm) == len(rest) == 1:
        return f"{_sound(calm, _THE_OTHER, _ONE)}."
    if len(calm) == len(rest):
        return f"{_sound(calm, f'the other {len(calm)} slices')}."
    if not calm:
        return f"{len(rest)} other{'s' * (len(rest) > 1)} {_be(rest)} not decided."
    return f"{_sound(calm, f'{len(calm)} of {len(rest)} other slices')}."


def _named(slices: list[SliceStanding]) -> str:
    names = [_THE_WHOLE if s.name == WHOLE else place(s.name) for s in slices[:_SHOWN]]
    more = len(slices) - len(names)
    if more:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _more(standing: Standing) -> str:
    """The line under the sentence: how much was scored, and what it costs."""
    scoring = standing.scoring
    launched = sum(_total(g.counts.get("launched"), WHOLE) for g in standing.gateways)
    of = f" of {launched:,}" if launched else ""
    parts = [f"scored {scoring.scored:,}{of} requests"]
    if standing.diverted:
        parts.append(f"{percent(standing.diverted)} of all traffic diverted")
    if standing.base != 1:
        parts.append(f"infer has {percent(standing.base)} of the rest")
    return " · ".join(parts)


def _total(told: object, key: str) -> int:
    found = told.get(key) if isinstance(told, dict) else None
    return found if isinstance(found, int) else 0


def place(name: str, longest: int = _LONGEST) -> str:
    """A slice as people call it."""
    return "whole traffic" if name == WHOLE else line(name, longest)


def problem(text: str, longest: int) -> str:
    """What somebody should look at, on one line: a caret points at nothing there."""
    return line(_EXCERPT.sub("", text), longest)


def failovers(standing: Standing) -> str:
    """How many requests stable answered in place of infer, and why; "" of none."""
    found: Counter[str] = Counter()
    for gateway in standing.gateways:
        found.update(dict(numbers(gateway.counts.get("failovers"))))
    if not found:
        return ""
    why = ", ".join(f"{line(reason, 20)} {n:,}" for reason, n in found.most_common())
    return f"{found.total():,} in place of infer ({why})"


def state(one: SliceStanding) -> tuple[str, str, str]:
    """Glyph, words and tone of where a slice stands."""
    if one.pin is not None and one.pin.to in ("stable", "infer"):
        return "●", f"pinned to {one.pin.to}", "bad" if one.pin.to == "stable" else "open"
    if not one.cells:
        return "–", "not watched", "plain"
    if one.status == "active" and not one.scored:
        return "?", "no evidence yet", "open"
    if breaks(one):
        return "✗", "breaks its limit", "bad"
    would = "" if one.acts or one.status in ("active", "suspect") else "would be "
    return GLYPH[one.status], f"{would}{one.status}", TONE.get(one.status, "bad")


def why(one: SliceStanding, now: float) -> list[str]:
    """What is to be said of a slice's state, each as a sentence without its full stop."""
    found = []
    if one.pin is not None:
        until = duration(max(0.0, one.pin.expires - now))
        who, reason = line(one.pin.actor, _LONGEST), line(one.pin.reason, 200)
        verb = f"{one.pin.to} by {who}" if one.pin.to in ("enforce", "observe") else f"by {who}"
        found.append(f"{verb}, for {until} more: {reason}")
    if one.held:
        found.append(line(one.held, 200))
    if one.relapses:
        found.append(f"{one.relapses} relapse{'s' * (one.relapses > 1)}")
    return found


def worst(one: SliceStanding) -> CellStanding | None:
    """The cell of a slice whose e-value is nearest to its alarm threshold."""
    return max(one.cells, key=lambda cell: (cell.nearness, excess(cell)), default=None)


def excess(cell: CellStanding) -> float:
    if cell.value is None or math.isnan(cell.value) or not cell.limit:
        return 0.0
    return abs(cell.value / cell.limit)


def nearest(cell: CellStanding) -> tuple[float, float]:
    """Log evidence against the limit and its log price, of the bet that is nearer to it."""
    bets = ((cell.log_evidence, cell.log_price), (cell.log_alarm, cell.log_alarm_price))
    return max(bets, key=lambda bet: bet[0] / bet[1] if 0 < bet[1] < math.inf else -math.inf)


def now(one: SliceStanding, standing: Standing) -> str:
    """Who serves a slice now."""
    return _who(one, standing, acting=False)


def meant(one: SliceStanding, standing: Standing) -> str:
    """Who would serve it if all that was decided were done."""
    return _who(one, standing, acting=True)


def _who(one: SliceStanding, standing: Standing, *, acting: bool) -> str:
    """As a gateway chooses: every slice lies in the whole traffic, and goes where that goes.

    Args:
        acting: as if every slice acted.
    """
    whole = [s for s in standing.slices if s.name == WHOLE != one.name]
    pins = {s.pin.to for s in (one, *whole) if s.pin is not None}
    share = min([standing.base, *(s.route for s in (one, *whole) if s.acts or acting)])
    if "stable" in pins or (share <= 0 and "infer" not in pins):
        return "stable"
    return "infer" if "infer" in pins or share >= 1 else f"infer {percent(share)}"


def value(cell: CellStanding) -> str:
    """The value of a cell, before `versus`."""
    return format.measured(abs(cell.value) if cell.refutes and cell.value else cell.value)


def limit(cell: CellStanding) -> str:
    """The limit as people write it; "" where there is none."""
    return "" if cell.refutes else format.figure(cell.limit)


def versus(cell: CellStanding) -> str:
    """What follows the value of a cell in a sentence."""
    unit = line(cell.unit, 20)
    if cell.refutes:
        likelier = "likelier" if (cell.value or 0.0) >= 0 else "less likely"
        return f" {unit} a token {likelier} than reported"
    return f", limit {limit(cell)} {unit}".rstrip()
