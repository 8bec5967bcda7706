# The verdict in one sentence, and the line under it: what breaks where, and whom it hits.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from servanda.contract.model import EXTERNAL, WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.whole_responses import OUTLIERS
from servanda.judgement.token_profile import Gate
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import (
    excess,
    measured,
    reason,
    signed_limit,
    where,
    worst_first,
)
from servanda.report.format import count, line, percent, rounded

_ANSWERS = {
    "violated": ("✗", "Do not promote."),
    "holds": ("✓", "May promote."),
    "inconclusive": ("…", "Not decided."),
    "error": ("!", "Measuring failed."),
}
_OF_A_TRAINER = {
    "violated": ("✗", "Do not go on as it is."),
    "holds": ("✓", "Go on."),
    "inconclusive": ("…", "Not decided."),
    "error": ("!", "The data cannot be trusted."),
}
_where = partial(where, longest=40)


@dataclass(frozen=True)
class Headline:
    """The verdict in one sentence: glyph and answer, then what breaks where, and the rest."""

    glyph: str
    answer: str
    text: str

    def __str__(self) -> str:
        return f"{self.glyph} {self.answer} {self.text}"


def counted(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """Cells that carry the verdict."""
    return [c for c in cells if c.enforced and c.outcome != "not applicable"]


def headline(verdict: Verdict) -> Headline:
    """The sentence of every report."""
    glyph, answer = (_OF_A_TRAINER if dumped(verdict) else _ANSWERS)[verdict.outcome]
    cells = counted(verdict.cells)
    bad = worst_first(c for c in cells if c.outcome == verdict.outcome)
    promises = [c for c in cells if c.section != "observability"]
    if not promises:
        text = f"No enforced clause is judged at stage {line(verdict.stage)}."
    elif verdict.outcome == "holds":
        text = f"Every promise holds, on {_places({c.slice for c in promises})}."
    elif verdict.outcome == "violated":
        text = _broken(bad) if _untrusted(bad) else f"{_broken(bad)} {_rest(cells)}"
    elif verdict.outcome == "error":
        text = _failed(bad, cells)
    else:
        text = _open(bad, verdict.more)
    return Headline(glyph, answer, text.strip())


def dumped(verdict: Verdict) -> bool:
    """Whether a trainer ran both kernels, and wrote down what they said."""
    return verdict.key.train == verdict.key.infer == EXTERNAL


def _failed(bad: Sequence[CellVerdict], cells: Sequence[CellVerdict]) -> str:
    """Why there is no answer: of the cells that failed, or else of the data under all of them."""
    if bad:
        return f"{_names(bad)}: {line(bad[0].note, 120) or 'no usable number'}."
    why = next((c.note for c in cells if c.note), "no usable number")
    return f"{line(why, 200).removeprefix('the data is not sound: ')}."


def _places(names: Collection[str], steps: Collection[str] = (), other: str = "") -> str:
    """How many slices and how many training steps, and whether the whole; "" of none.

    Args:
        steps: those names that are of training steps.
        other: before the nouns, such as "other ".
    """
    of_steps = sum(name in steps for name in names)
    counts = {"slice": len({*names} - {WHOLE}) - of_steps, "step": of_steps}
    parts = ["the whole traffic"] if WHOLE in names else []
    parts += [count(n, f"{other}{noun}") for noun, n in counts.items() if n]
    return " and ".join(", ".join(parts).rsplit(", ", 1))


def _untrusted(bad: Sequence[CellVerdict]) -> bool:
    return any(c.metric in ("sampler_fidelity", "served_fidelity") for c in bad)


def _broken(bad: Sequence[CellVerdict]) -> str:
    if any(c.reason == "train draws otherwise" for c in bad):
        return "What train draws does not follow the distribution that it reports."
    if _untrusted(bad):
        return "What it serves does not follow the distribution that it reports."
    if not any(c.section == "statistical" for c in bad):
        if bad[0].metric == OUTLIERS:
            found = line(bad[0].note.partition(":")[0], 120)
            return f"{found[0].upper()}{found[1:]}."
        return f"The infer kernel breaks {_names(bad)}."
    slices = list(dict.fromkeys(c.place for c in bad))
    steps = {c.place: range(c.steps[0], c.steps[1] + 1) for c in bad if c.steps}
    if WHOLE in slices:
        clauses = {c.clause for c in bad}
        what = "" if len(clauses) > 1 else f"{line(bad[0].clause, 40)} on "
        return f"The infer kernel breaks {what}{_places(slices, steps)}."
    listed = [
        _listed("slice", [name for name in slices if name not in steps]),
        _listed("step", [name.removeprefix("step-") for name in steps], {*chain(*steps.values())}),
    ]
    return f"The infer kernel breaks {' and '.join(filter(None, listed))}."


def _listed(noun: str, names: Sequence[str], all_: Collection[object] = ()) -> str:
    """Names of some things, and how many there are: `all_`, or as many as names.

    >>> _listed("slice", ["a"]), _listed("step", ["1", "2"]), _listed("step", ["1", "2", "3"])
    ('slice a', 'steps 1 and 2', '3 steps (1, 2 and others)')
    """
    shown = [line(name, 40) for name in names[:2]]
    if len(names) > 2:
        return f"{count(len(all_ or names), noun)} ({', '.join(shown)} and others)"
    return f"{noun}{'s' * (len(names) > 1)} {' and '.join(shown)}" if names else ""


def _rest(cells: Sequence[CellVerdict]) -> str:
    """What holds beside it: the whole, and how many slices."""
    sampled = [c for c in cells if c.section == "statistical"]
    if not sampled:
        return ""
    broken = {c.place for c in sampled if c.outcome != "holds"}
    fine = {c.place for c in sampled} - broken
    undecided = {c.place for c in sampled if c.outcome == "inconclusive"} - {WHOLE}
    steps = {c.place for c in sampled if c.steps}
    text = _places(fine, steps, "other " if broken else "")
    if not text:
        return f"{_places(undecided, steps)} not decided." if undecided else "No slice holds."
    return f"{text[0].upper()}{text[1:]} {'hold' if len(fine) > 1 else 'holds'}."


def _open(bad: Sequence[CellVerdict], more: int | None) -> str:
    first = bad[0]
    why = {
        "unreliable baseline": "beyond its limit, yet within the kernels' own noise",
        "too few data": "too few data",
    }.get(reason(first), line(first.note, 90) or "neither shown to hold nor to be violated")
    text = f"{_names(bad[:1])}: {why}"
    if len(bad) > 1:
        text += f"; {count(len(bad) - 1, 'more cell')} open"
    return text + (f". About {count(more, 'more prompt group')} would decide." if more else ".")


def _names(cells: Sequence[CellVerdict]) -> str:
    names = ", ".join(f"{line(c.clause, 40)} on {where(c, 40)}" for c in cells[:2])
    return names + (f" and {len(cells) - 2} more" if len(cells) > 2 else "")


def remarks(verdict: Verdict) -> list[str]:
    """Near the top: the difference beside the rounding of a number format, and unlike files."""
    cells = (c for c in worst_first(verdict.cells) if c.slice == WHOLE)
    classes = dict.fromkeys(c.rounding for c in cells if c.rounding)
    return [line(text) for text in (*classes, *verdict.circumstances.differences)]


def impact(verdict: Verdict) -> str:
    """Under the sentence: its effect, and what a shell reads."""
    return f"{effect(verdict)} Exit code {verdict.exit_code}.".lstrip()


def effect(verdict: Verdict, where: Callable[[CellVerdict], str] = _where) -> str:
    """The worst number, the traffic that it hits, and what people would see there.

    Args:
        where: the place of a cell, as the reader knows it.
    """
    cells = counted(verdict.cells)
    bad = worst_first(c for c in cells if c.outcome == verdict.outcome)
    parts = []
    if _untrusted(bad) and verdict.outcome == "violated":
        parts.append("Logprobs say nothing about such tokens, so no other promise is judged.")
    if verdict.outcome in ("violated", "inconclusive"):
        cell = next((c for c in bad if c.value is not None and c.limit is not None), None)
        if cell is not None:
            parts.append(f"{measured(cell)} on {where(cell)}, limit {signed_limit(cell)}.")
    if verdict.outcome == "violated":
        parts += _traffic(bad) + _flips(verdict, bad)
    elif verdict.outcome == "holds":
        parts += _nearest(cells, where)
    return " ".join(parts)


def _nearest(cells: Sequence[CellVerdict], where: Callable[[CellVerdict], str]) -> list[str]:
    judged = [c for c in cells if c.section != "observability"]
    cell = max((c for c in judged if c.value is not None), key=excess, default=None)
    if cell is None or not excess(cell):
        return []
    text = f"{measured(cell)} on {where(cell)}"
    return [f"{text} comes nearest to its limit, {signed_limit(cell)}."]


def _traffic(bad: Sequence[CellVerdict]) -> list[str]:
    shares = {c.place: c.share for c in bad if c.share is not None and c.workload}
    if not shares or any(c.section == "observability" for c in bad):
        return []
    if WHOLE in shares:
        return ["All traffic is affected."]
    least = "At least " if len(shares) > 1 else ""
    return [f"{least}{percent(max(shares.values()))} of the tokens are affected."]


def gate_text(gate: Gate) -> str:
    """Its number in three digits; an agreement that is not whole is never shown as whole."""
    if gate.value is not None and gate.name.startswith("top-1"):
        return percent(gate.value)
    return rounded(gate.text)


class Flips(NamedTuple):
    """Shares of positions with another most likely token; stable: of the stable kernel there."""

    there: float
    whole: float
    stable: float | None


def flips(verdict: Verdict, slice_: str) -> Flips | None:
    """On a slice and overall; None where it was not measured."""
    infer, stable = (verdict.portraits.get(side) for side in ("infer", "stable"))
    if infer is None or slice_ not in infer.slices:
        return None
    there, whole = infer.slices[slice_].mean("flips"), infer.total.mean("flips")
    if there is None or whole is None:
        return None
    today = stable.slices[slice_].mean("flips") if stable and slice_ in stable.slices else None
    return Flips(there, whole, today)


def _flips(verdict: Verdict, bad: Sequence[CellVerdict]) -> list[str]:
    name = next((c.place for c in bad if c.section == "statistical"), None)
    found = flips(verdict, name) if name is not None else None
    if name is None or found is None:
        return []
    text = f"The most likely token differs at {percent(found.there)} of the positions there"
    if found.stable is not None:
        return [f"{text} (stable kernel {percent(found.stable)})."]
    return [f"{text}." if name == WHOLE else f"{text} (whole traffic {percent(found.whole)})."]
