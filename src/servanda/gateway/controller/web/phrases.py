# The status in words, shared by the page and by `servanda gateway status --gateway`.

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from servanda.contract.model import WHOLE
from servanda.gateway.controller.status import (
    CellStatus,
    ControllerStatus,
    PoolStatus,
    SliceStatus,
)
from servanda.gateway.controller.web import format
from servanda.gateway.proxy.counters import numbers
from servanda.report.consequence import advice_sentences
from servanda.report.format import count, duration, line, part_of, percent

GLYPH = {"active": "✓", "suspect": "?", "quarantined": "✗", "probation": "✗", "recovering": "↗"}
TONE = {"active": "good", "suspect": "open", "recovering": "open"}
_THE_WHOLE, _THE_OTHER = "the whole traffic", "the other slice"
_MANY, _ONE = ("are within their limits", "show"), ("is within its limits", "shows")
_OURS = (_THE_WHOLE, "the other ", "all ")  # beginnings that are no names
_SHOWN = 3  # names in a sentence
_LONGEST = 40  # characters of one
_EXCERPT = re.compile(r"\n *(?:\d+ \|.*|\^)$", re.M)  # of a contract, below a message


@dataclass(frozen=True)
class Headline:
    """The status in one sentence, with its glyph and tone.

    Args:
        tone: good, open, bad or plain.
    """

    glyph: str
    tone: str
    text: str
    more: str


def headline(status: ControllerStatus) -> Headline:
    """The slices that are or would be diverted; otherwise whether all are within their limits."""
    away = [s for s in status.slices if is_diverted(s)]
    real = [s for s in away if is_acted_on(s)]
    would = [s for s in away if not is_acted_on(s)]
    held = [s for s in status.slices if breaks_limit(s)]
    more = _more(status)
    if away or held:
        parts = []
        if real:
            parts.append(f"{_named(real)} {_be(real)} served by stable.")
        if would:
            parts.append(f"{_named(would)} would be served by stable.")
        if held:
            verbs = (
                "exceeds its limit and stays" if len(held) == 1 else "exceed their limits and stay"
            )
            parts.append(f"{_named(held)} {verbs} on the infer kernel.")
        parts.append(_rest(status, [*away, *held]))
        return Headline("✗", "bad", " ".join(map(_begun, filter(None, parts))), more)
    unknown = [s for s in status.slices if s.cells and not s.scored]
    watched = [s for s in status.slices if s.cells]
    if not watched:
        return Headline("?", "open", "No slice of this contract is watched here.", more)
    if len(unknown) == len(watched):
        return Headline("?", "open", "No slice has evidence yet; the infer kernel serves.", more)
    doubted = [s for s in status.slices if s.status != "active"]
    if doubted:
        states = {s.status for s in doubted}
        state = states.pop() if len(states) == 1 else "suspect or recovering"
        return Headline("?", "open", _begun(f"{_named(doubted)} {_be(doubted)} {state}."), more)
    known = [s for s in watched if s.scored]
    if unknown:
        has = "has" if len(unknown) == 1 else "have"
        verbs = _ONE if len(known) == 1 else _MANY
        text = _sound(known, f"{len(known)} of {count(len(watched), 'slice')}", verbs)
        return Headline("?", "open", f"{text}; {_named(unknown)} {has} no evidence yet.", more)
    if len(watched) == 1:
        text = _sound(watched, _named(watched), _ONE)
    else:
        text = _sound(watched, f"all {count(len(watched), 'slice')}")
    return Headline("✓", "good", f"{_begun(text)}.", more)


def _sound(slices: list[SliceStatus], called: str, verbs: tuple[str, str] = _MANY) -> str:
    """The sentence about slices that are active: "within limits" only after the return test.

    Args:
        verbs: the two verb phrases in the number of `called`.
    """
    within, show = verbs
    if not all(map(keeps_limits, slices)):
        return f"{called} {show} no evidence of a violation"
    return f"{called} {within}"


def keeps_limits(slice_: SliceStatus) -> bool:
    """Whether every cell of a slice passes the return test."""
    return all(map(within_limit, slice_.cells))


def within_limit(cell: CellStatus) -> bool:
    """Whether a cell passes the return test: the e-value for its limit is at the threshold.

    How tokens are drawn has no limit: nothing is to be shown there.
    """
    return cell.refutes or cell.log_below >= cell.log_leave_price


def is_diverted(slice_: SliceStatus) -> bool:
    """Whether it was decided that stable serves a slice, acted on or not."""
    if slice_.pin is not None and slice_.pin.to in ("stable", "infer"):
        return slice_.pin.to == "stable"
    return slice_.status in ("quarantined", "probation")


def is_acted_on(slice_: SliceStatus) -> bool:
    """Whether the decision about a slice is acted on."""
    return slice_.acts or (slice_.pin is not None and slice_.pin.to == "stable")


def returns(slice_: SliceStatus) -> bool:
    """Whether a slice is or was diverted, so that the return test applies to it."""
    return slice_.status not in ("active", "suspect")


def breaks_limit(slice_: SliceStatus) -> bool:
    """Whether an e-value is at its alarm threshold and the slice is not diverted."""
    paid = any(cell.nearness >= 1 for cell in slice_.cells)
    return paid and slice_.status == "suspect" and not is_diverted(slice_)


def _begun(sentence: str) -> str:
    """A name begins a sentence as it is written; our own words with a capital."""
    return sentence[0].upper() + sentence[1:] if sentence.startswith(_OURS) else sentence


def _be(slices: list[SliceStatus]) -> str:
    return "is" if len(slices) == 1 else "are"


def _rest(status: ControllerStatus, away: list[SliceStatus]) -> str:
    rest = [s for s in status.slices if s not in away and s.cells]
    calm = [s for s in rest if s.status == "active" and s.scored]
    if not rest:
        return ""
    if len(calm) == len(rest) == 1:
        return f"{_sound(calm, _THE_OTHER, _ONE)}."
    if len(calm) == len(rest):
        return _sound(calm, f"the other {count(len(calm), 'slice')}") + "."
    if not calm:
        return f"{count(len(rest), 'other slice')} {_be(rest)} not decided yet."
    verbs = _ONE if len(calm) == 1 else _MANY
    return _sound(calm, f"{len(calm)} of {count(len(rest), 'other slice')}", verbs) + "."


def _named(slices: list[SliceStatus]) -> str:
    names = [_THE_WHOLE if s.name == WHOLE else place(s.name) for s in slices[:_SHOWN]]
    more = len(slices) - len(names)
    if more:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _more(status: ControllerStatus) -> str:
    """The line under the sentence: how much was scored, diverted and routed to infer."""
    scoring = status.scoring
    launched = counted(status, "launched")[WHOLE]
    of = f" of {launched:,}" if launched else ""
    parts = [f"scored {scoring.scored:,}{of} requests"]
    slices, base = status.slices, status.base
    real, would = (diverted_share(slices, base, if_acted=act) for act in (False, True))
    if real:
        parts.append(f"{percent(real)} of all traffic diverted")
    if would and would != real:
        parts.append(f"{percent(would)} would be diverted")
    if status.base != 1:
        parts.append(f"infer share {percent(status.base)}")
    return " · ".join(parts)


def place(name: str, longest: int = _LONGEST) -> str:
    """The display name of a slice."""
    return "whole traffic" if name == WHOLE else line(name, longest)


def diverted_share(
    slices: Iterable[SliceStatus], base: float = 1.0, *, if_acted: bool = False
) -> float:
    """The share of all traffic that slices keep from infer; slices that overlap are added.

    Args:
        base: the share that infer serves of an active slice.
        if_acted: as if every decision were acted on.
    """
    total = 0.0
    for one in slices:
        pinned = one.pin.to if one.pin is not None else ""
        if pinned == "stable":
            total += one.share or 0.0
        elif pinned != "infer" and returns(one) and (one.acts or if_acted):
            kept = one.route / base if base > 0 else 0.0
            total += (one.share or 0.0) * max(0.0, 1.0 - kept)
    return min(1.0, total)


def problem(text: str, longest: int) -> str:
    """A problem on one line, without the excerpt of the contract."""
    return line(_EXCERPT.sub("", text), longest)


def counted(status: ControllerStatus, name: str) -> Counter[str]:
    """One count, of all gateways together."""
    total: Counter[str] = Counter()
    for gateway in status.gateways:
        total.update(dict(numbers(gateway.counts.get(name))))
    return total


def replicas(pool: PoolStatus) -> str:
    """How many servers of a pool are used by every gateway."""
    used = sum(replica.used_at > 0 and not replica.out_at for replica in pool.replicas)
    return f"{used} of {count(len(pool.replicas), 'replica')} used"


def failovers(status: ControllerStatus) -> str:
    """How many requests failed over from infer to stable, by reason; "" if none."""
    counts = counted(status, "failovers")
    if not counts:
        return ""
    why = ", ".join(f"{line(reason, 20)} {n:,}" for reason, n in counts.most_common())
    return f"{counts.total():,} failed over from infer ({why})"


def state(slice_: SliceStatus) -> tuple[str, str, str]:
    """Glyph, words and tone of where a slice stands."""
    if slice_.pin is not None and slice_.pin.to in ("stable", "infer"):
        return "●", f"pinned to {slice_.pin.to}", "bad" if slice_.pin.to == "stable" else "open"
    if not slice_.cells:
        return "–", "not watched", "plain"
    if slice_.status == "active" and not slice_.scored:
        return "?", "no evidence yet", "open"
    if breaks_limit(slice_):
        return "✗", "exceeds its limit", "bad"
    would = "" if slice_.acts or slice_.status in ("active", "suspect") else "would be "
    return GLYPH[slice_.status], f"{would}{slice_.status}", TONE.get(slice_.status, "bad")


def why(slice_: SliceStatus, now: float) -> list[str]:
    """The reasons for a slice's state, each a sentence without its full stop."""
    sentences = []
    if slice_.pin is not None:
        until = duration(max(0.0, slice_.pin.expires - now))
        who, reason = line(slice_.pin.actor, _LONGEST), line(slice_.pin.reason, 200)
        mode = f"{slice_.pin.to} " if slice_.pin.to in ("enforce", "observe") else ""
        sentences.append(f"{mode}by {who}, for {until} more: {reason}")
    if slice_.held:
        sentences.append(line(slice_.held, 200))
    if slice_.relapses:
        sentences.append(count(slice_.relapses, "relapse"))
    return [*sentences, *advice_sentences(slice_.advice)]


def worst(slice_: SliceStatus) -> CellStatus | None:
    """The cell of a slice whose e-value is nearest to its alarm threshold."""
    return max(slice_.cells, key=lambda cell: (cell.nearness, excess(cell)), default=None)


def excess(cell: CellStatus) -> float:
    if cell.value is None or math.isnan(cell.value) or not cell.limit:
        return 0.0
    return abs(cell.value / cell.limit)


def of_threshold(fraction: float, threshold: str) -> str:
    """A log e-value as per cent of its log threshold; a ratio where it is beyond.

    >>> [of_threshold(x, "return threshold") for x in (0.496, 0.002, -1.0)]
    ['50 % of return threshold', '< 1 % of return threshold', '0 % of return threshold']
    >>> of_threshold(1.5, "alarm threshold")
    '1.5 times the alarm threshold'
    """
    if fraction > 1:
        return part_of(min(fraction, 99.9), f"the {threshold}")
    share = f"{100 * fraction:.0f} %" if fraction >= 0.01 else "< 1 %" if fraction > 0 else "0 %"
    return f"{share} of {threshold}"


def return_fraction(cell: CellStatus) -> float:
    """The log e-value of the return test as a fraction of its log threshold."""
    return cell.log_below / cell.log_leave_price if 0 < cell.log_leave_price < math.inf else 0.0


def nearest(cell: CellStatus) -> tuple[float, float]:
    """Log e-value against the limit and its log threshold, of the process nearer to it."""
    bets = ((cell.log_evidence, cell.log_price), (cell.log_alarm, cell.log_alarm_price))
    return max(bets, key=lambda bet: bet[0] / bet[1] if 0 < bet[1] < math.inf else -math.inf)


def served_by(slice_: SliceStatus, status: ControllerStatus, *, if_acted: bool = False) -> str:
    """The pool that serves a slice, as a gateway chooses; the whole traffic contains every slice.

    Args:
        if_acted: as if every decision were acted on.
    """
    whole = [s for s in status.slices if s.name == WHOLE != slice_.name]
    pins = {s.pin.to for s in (slice_, *whole) if s.pin is not None}
    share = min([status.base, *(s.route for s in (slice_, *whole) if s.acts or if_acted)])
    if "stable" in pins or (share <= 0 and "infer" not in pins):
        return "stable"
    pool = "infer" if "infer" in pins or share >= 1 else f"infer {percent(share)}"
    parts = [s for s in status.slices if slice_.name == WHOLE != s.name]
    gone = diverted_share(parts, status.base, if_acted=if_acted)
    return f"{pool}, {percent(gone)} diverted" if gone else pool


def instead_of(now: str, meant: str) -> str:
    """The pool that would serve a slice, without the words that the pool of now has already.

    >>> instead_of("infer", "infer, 6.0 % diverted"), instead_of("infer", "stable")
    ('6.0 % diverted', 'stable')
    """
    pool, _, rest = meant.partition(", ")
    return rest if rest and now.partition(", ")[0] == pool and now != meant else meant


def value(cell: CellStatus) -> str:
    """The value of a cell, before `versus`."""
    return format.measured(abs(cell.value) if cell.refutes and cell.value else cell.value)


def limit(cell: CellStatus) -> str:
    """The limit; "" where there is none."""
    return "" if cell.refutes else format.figure(cell.limit)


def versus(cell: CellStatus) -> str:
    """The words after the value of a cell."""
    unit = line(cell.unit, 20)
    if cell.refutes:
        likelier = "likelier" if (cell.value or 0.0) >= 0 else "less likely"
        return f" {unit} a token {likelier} than reported"
    return f", limit {limit(cell)} {unit}".rstrip()
