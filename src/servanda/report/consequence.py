# Under a red verdict: what it means for the tokens, and what to do.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import Advice, Estimate, SliceAdvice
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import worst_first
from servanda.report.format import count, line, number, percent
from servanda.report.summary import flips


def consequence(verdict: Verdict) -> list[str]:
    """One line on the tokens that are hit; [] where nothing is known."""
    affected = _affected(verdict) if verdict.outcome == "violated" else ""
    return [affected] if affected else []


def _affected(verdict: Verdict) -> str:
    """How many tokens, and how many of them have another most likely one."""
    red = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    red = [c for c in worst_first(red) if c.section == "statistical" and c.workload]
    shares = {c.place: c.share for c in red if c.share is not None}
    if not shares:
        return ""
    share = 1.0 if WHOLE in shares else max(shares.values())
    least = "at least " if len(shares) > 1 and WHOLE not in shares else ""
    text = f"{least}{percent(share)} of the tokens" if share < 1 else "all traffic"
    text = f"impact: this hits {text}"
    name = WHOLE if WHOLE in shares else next(iter(shares))
    found = flips(verdict, name)
    if found is None:
        return f"{text}."
    text += f"; the most likely token differs at {percent(found.there)} of the positions"
    return f"{text}." if name == WHOLE else f"{text} there ({percent(found.whole)} overall)."


_HEAD = 15  # width
_SURE = 0.95  # share of resamples in which a correction has the smallest bound
_POSSIBLE = 0.05
_WORTH = 1.05  # a correction that lowers the bound by less is not named


class AdviceRow(NamedTuple):
    """One line of advice.

    Args:
        note: what stands behind it in brackets; code: whether the text is to be copied.
    """

    head: str
    text: str
    note: str = ""
    code: bool = False


def advice_lines(advice: Advice | None) -> Iterator[str]:
    """Cause, slices and the next command, a line each; then what to change, and corrections."""
    before = ""
    for row in advice_rows(advice):
        note = f"   ({row.note})" if row.note else ""
        yield f"{('' if row.head == before else row.head).ljust(_HEAD)}{row.text}{note}"
        before = row.head


def advice_sentences(advice: Advice | None) -> list[str]:
    """The same as sentences, where columns do not align."""
    rows = advice_rows(advice)
    return [f"{row.head}: {row.text}{f' ({row.note})' if row.note else ''}" for row in rows]


def advice_rows(advice: Advice | None) -> Iterator[AdviceRow]:
    """The same for a page."""
    if advice is None:
        return
    if advice.cause:
        yield AdviceRow("Likely cause", line(advice.cause))
    for part in advice.slices:
        yield AdviceRow("Slice", line(part.entry), slice_numbers(part), code=True)
    if advice.command:
        yield AdviceRow("Next command", advice.command, advice.experiment, code=True)
    if advice.switch:
        yield AdviceRow("Change", advice.switch)
    for text in correction_lines(advice):
        yield AdviceRow("Correction", text)


def slice_numbers(part: SliceAdvice) -> str:
    return (
        f"{percent(part.share)} of the excess in {percent(part.tokens)} of the tokens; "
        f"mean tv of the others {estimated(part.rest)}"
    )


def correction_lines(advice: Advice) -> Iterator[str]:
    """The correction with the smallest bound of its error, or several that may have it.

    None is recommended: a bound ranks bounds, and the error is usually far below it.
    """
    if not advice.corrections:
        return
    first, *others = advice.corrections
    none = next(c for c in advice.corrections if c.name == "none")
    rivals = [c for c in others if c.best > _POSSIBLE] if first.best < _SURE else []
    if none is first or none in rivals or none.error.value <= _WORTH * first.error.value:
        best = next(c for c in advice.corrections if c is not none)
        yield (
            f"none lowers the bound of the error by 5 %: {estimated(none.error)} without one, "
            f"{estimated(best.error)} with {best.text}"
        )
    else:
        names = " or ".join(c.text for c in (first, *rivals))
        masked = first.masked.value
        masks = f"masks {percent(masked)} of the tokens" if masked else "masks no token"
        yield (
            f"smallest bound of the error: {names}, {estimated(first.error)}; without a correction "
            f"{estimated(none.error)}; it {masks}"
        )
        yield (
            "these tokens do not tell whether a correction lowers the error itself; it adds noise "
            f"to each token ({number(first.noise.value)} times)"
        )
    yield (
        f"error: bias, and noise of an update of {_updates(advice)}, in units of "
        "advantage × score norm"
    )
    whole = min(advice.corrections, key=lambda c: c.response_bias.value)
    if whole is not first and whole.response_bias.value < first.response_bias.value:
        yield (
            f"gradient of whole responses: bias at most {estimated(whole.response_bias)} with "
            f"{whole.text}; {estimated(first.response_bias)} with {first.text}"
        )


def _updates(advice: Advice) -> str:
    return count(advice.update_tokens, "token")


def estimated(of: Estimate) -> str:
    """A number with its interval.

    >>> estimated(Estimate(0.0123, 0.01, 0.015)), estimated(Estimate(0.5))
    ('0.0123 [0.01, 0.015]', '0.5')
    """
    if of.low is None or of.high is None:
        return number(of.value)
    return f"{number(of.value)} [{number(of.low)}, {number(of.high)}]"


def corrections_table(advice: Advice) -> tuple[str, list[str], list[list[str]]]:
    """(title, heads, rows): what each correction leaves at most, smallest bound first."""
    heads = [
        "correction",
        "bound of the error",
        "bias, token by token",
        "bias, whole responses",
        "noise of a token",
        "tokens masked",
        "smallest bound in",
    ]
    rows = [
        [
            one.text,
            estimated(one.error),
            estimated(one.bias),
            estimated(one.response_bias),
            estimated(one.noise),
            percent(one.masked.value),
            f"{percent(one.best)} of resamples",
        ]
        for one in advice.corrections
    ]
    title = f"What each correction leaves at most, for an update of {_updates(advice)}"
    return title, heads, rows
