# The verdict as one page: no script, nothing fetched, light and dark, on a phone and on paper.

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import ValidationError

from servanda.contract import yaml_reader
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.judgement.bound_chain.chain import chain
from servanda.judgement.field_thresholds import gates
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.breakdown import removed_line, tables
from servanda.report.chain_text import chain_text
from servanda.report.html_cards import cards, chance, described
from servanda.report.html_details import NUMBER_HEADS, curves, fingerprints, matrix, numbers, tails
from servanda.report.html_ladder import deciding, ladder
from servanda.report.summary import counted, headline, impact

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STOPPED = {
    "decided": "stopped: decided",
    "traffic": "so far: what has arrived",
    "broken": cell_text.GIVEN_UP,
    "size": "full size",
    "time": "out of time",
}
_GLOSSARY = (
    ("train, infer", "the kernel that is measured against, and the kernel under test"),
    ("tv", "share of next-token probability that moved (total variation), from 0 to 1"),
    ("cell", "one clause of the contract on one slice of the traffic"),
    ("certificate", "a number whose interval stays valid at every look, at the stated alpha"),
    ("conditional bound", "a certificate times what the contract declares: true if that is"),
    ("fact", "exact for the recorded positions, and for nothing else"),
    ("bound", "two ends that hold the exact number of the recorded positions"),
    ("estimate", "a number without a promise"),
    ("guard", "a precondition; where it fails, certificates say nothing"),
    (
        "floor",
        "what a kernel shows against itself in other batches, on infer's tokens; red only beyond "
        "twice it",
    ),
    ("claim: population", "speaks of all tokens that this workload's prompts bring forth"),
    ("claim: realised", "speaks of the tokens that were measured, and of no others"),
    ("alpha", "how often such a verdict may be wrong, over all its looks together"),
    ("log ratio", "log probability under train minus log probability under infer, in nats"),
    ("prompt group", "what was drawn at random: a prompt, or prompts that belong together"),
    ("inconclusive", "neither shown to hold nor shown to be violated; never a pass"),
)


class GateRow(NamedTuple):
    name: str
    text: str
    says: str
    tone: str


@FORMATS.register("html")
def render(verdict: Verdict) -> str:
    """One self-contained page of HTML."""
    page = environment("servanda.report").get_template("page.html")
    return page.render(**view(verdict))


def environment(package: str) -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: Any) -> Any:
    """Texts without control characters, which HTML has no way to hold; markup as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _CONTROL.sub("\ufffd", value)


def view(verdict: Verdict) -> dict[str, Any]:
    """Everything that the page shows, by the names that its template uses."""
    what, portrait = described(verdict)
    known = [g.passes for g in gates(verdict.portraits)]
    breakdown = verdict.breakdown
    return {
        "v": verdict,
        "head": headline(verdict),
        "impact": impact(verdict),
        "names": _names(verdict),
        "size": _size(verdict),
        "ladder": ladder(verdict),
        "gates_title": _gates_title(verdict, known),
        "gates": _gates(verdict),
        "cards": cards(verdict),
        "matrix": matrix(verdict),
        "curves": curves(verdict),
        "tails": tails(verdict),
        "what": what,
        "worst": portrait.worst,
        "prints": fingerprints(verdict),
        "implied": implied(verdict),
        "assumed": cell_text.assumed(c for c in verdict.cells if cell_text.certified(c)),
        "heads": NUMBER_HEADS,
        "tables": tables(verdict),
        "removed": removed_line(breakdown.removed) if breakdown and breakdown.removed else "",
        "numbers": numbers(verdict),
        "glossary": _GLOSSARY,
        "line": format.line,
        "number": format.number,
        "chance": chance,
    }


def _names(verdict: Verdict) -> tuple[str, list[tuple[str, str]]]:
    """What all kernels are called, and what each is called besides."""
    sides = [("infer", verdict.infer), ("train", verdict.train), ("stable", verdict.stable)]
    split = {side: format.line(name).split() for side, name in sides if name}
    same = 0
    while len({tuple(w[: same + 1]) for w in split.values()}) == 1 and all(
        len(w) > same + 1 for w in split.values()
    ):
        same += 1
    shared = next(iter(split.values()), [])[:same]
    return " ".join(shared), [(side, " ".join(w[same:])) for side, w in split.items()]


def _size(verdict: Verdict) -> str:
    parts = []
    if verdict.sequences:
        parts += [f"{verdict.tokens:,} tokens", f"{verdict.groups:,} groups"]
    elif verdict.golden_tokens:
        parts.append(f"{verdict.golden_tokens:,} golden positions")
    seconds = verdict.circumstances.seconds
    if seconds is not None:
        parts.append(format.duration(seconds))
    if reason := _STOPPED.get(verdict.circumstances.stopped):
        parts.append(reason)
    if verdict.key.attempt > 1:
        parts.append(f"attempt {verdict.key.attempt}")
    return " · ".join([*parts, f"contract {verdict.key.contract[:8]}"])


def _gates_title(verdict: Verdict, passes: list[bool | None]) -> str:
    if verdict.outcome == "holds":
        return "What else was checked"
    judged = [p for p in passes if p is not None]
    if verdict.outcome == "violated" and 2 * len(judged) > len(passes) and all(judged):
        return "Why nobody would have noticed"
    if not judged:
        return "What the usual gates would say"
    return f"What the usual gates say: {sum(judged)} of {len(judged)} would pass"


def _gates(verdict: Verdict) -> list[GateRow]:
    says = {True: ("would pass", "plain"), False: ("would fail", "fails"), None: ("–", "plain")}
    rows = [GateRow(g.name, g.text, *says[g.passes]) for g in gates(verdict.portraits)]
    answer = f"{cell_text.GLYPH[verdict.outcome]} {verdict.outcome}"
    return [*rows, GateRow("this contract", _ours(verdict), answer, verdict.outcome)]


def _ours(verdict: Verdict) -> str:
    cells = counted(verdict.cells)
    if verdict.outcome == "holds":
        return f"{len(cells)} of {len(cells)} cells"
    bad = cell_text.worst_first(c for c in cells if c.outcome == verdict.outcome)
    cell = deciding(verdict)
    if cell is None or cell not in bad:
        cell = next(iter(bad), None)
    if cell is None:
        return "no enforced clause"
    if cell.value is None or cell.limit is None:
        return f"{format.line(cell.clause, 24)} on {cell_text.where(cell, 20)}"
    value = cell_text.of_cell(cell, cell.value)
    return f"{cell_text.where(cell, 20)}: {value}, limit {cell_text.limit(cell)}"


class Implied(NamedTuple):
    """The chain in one line, and as text."""

    summary: str
    text: str


def implied(verdict: Verdict) -> Implied | None:
    """The chain of a verdict; None where the text of its contract was not kept."""
    contract = _contract(verdict.circumstances.contract_text)
    bounds = chain(contract, verdict) if contract else None
    if bounds is None or not bounds.steps:
        return None
    summary = f"{len(bounds.steps)} numbers follow"
    if bounds.vacuous:
        summary += f", {len(bounds.vacuous)} of them vacuous"
    return Implied(summary, chain_text(bounds))


def _contract(text: str) -> Contract | None:
    """As it was judged: lint had its say when it was run."""
    if not text:
        return None
    try:
        data, _, problems = yaml_reader.read(text, "the contract of the verdict")
        return None if problems else Contract.model_validate(data)
    except (ContractError, ValidationError):
        return None
