# A beat of `servanda tools heartbeat` as text and as JSON.

from __future__ import annotations

import math
from typing import Any

from servanda.cli.stdout import show, show_json
from servanda.runner.heartbeat.beat import REPLAYS, Beat
from servanda.runner.heartbeat.smallest_change import smallest_changes

_SEEN = {
    "border": "in the first token of each border prompt",
    "rank": "in the rank of an answer",
    "replay": "in the share of seeded answers that repeat",
}


def report(beat: Beat, format_: str) -> int:
    """Print what a beat found; its exit code."""
    state, held = beat.state, beat.baseline
    needed = 1 / state.settings.alpha
    idle = not state.changed and not beat.sent
    smallest = {} if state.changed else smallest_changes(held, state)
    code = 1 if state.changed else 3 if idle else 0
    if format_ == "json":
        show_json(_data(beat, smallest, code))
        return code
    at = f"{state.settings.url} ({state.settings.served})"
    show(f"heartbeat  {at} against {held.source}")
    show(
        f"beat {state.beats}: {beat.sent} requests; {beat.today} of {beat.budget} today, "
        f"{state.asked} in all"
    )
    for name in state.settings.tests:
        show(f"  {name:<7} {_line(beat, name, smallest)}")
    e = f"e {math.exp(min(beat.log_e, 700)):.3g} of {needed:g}"
    if state.changed:
        show(f"CHANGED: {state.changed} ({e})")
        show(f"claim: the answers of {at} do not have the distribution of the reference")
        show(_causes(beat))
    elif idle:
        show(f"nothing was sent: the {beat.budget} requests of this UTC day are used up")
    else:
        show(f"no evidence of a change so far ({e})")
        show(f"claim: {_claim(beat)}")
    return code


def _line(beat: Beat, name: str, smallest: dict[str, float]) -> str:
    record = beat.state.records[name]
    if name == "replay":
        replays = beat.state.replays
        if len(replays) < REPLAYS:
            return f"{len(replays)} of {REPLAYS} seeded requests recorded"
        if not beat.honours_seeds:
            return "not testable: equal seeds give other answers"
    if not record.evidence.n:
        return "no answer yet"
    e = math.exp(min(record.evidence.log_e, 700))
    lost = f", {record.evidence.missing} lost" if record.evidence.missing else ""
    seen = "no change, however large, would have been detected yet"
    if name in smallest:
        seen = f"a change of {smallest[name]:.2f} {_SEEN[name]} would have been detected"
    tail = "" if beat.state.changed else f"; {seen}"
    return f"{record.evidence.n} answers{lost}, e {e:.3g}{tail}"


def _claim(beat: Beat) -> str:
    held, state = beat.baseline, beat.state
    parts = {
        "border": f"first tokens after {len(held.borders)} prompts",
        "rank": f"ranks of answers to {len(held.prompts)} prompts",
        "replay": f"answers to {len(state.replays)} seeds",
    }
    seen = [parts[name] for name in state.settings.tests if state.records[name].evidence.n]
    if not seen:
        return "none yet"
    within = f", to within a total variation of {state.settings.tolerance:g}" if held.exact else ""
    return (
        f"{', '.join(seen)}: distributed as in the reference{within}, as far as these tests can "
        "tell; logprobs, token ids and other prompts are not examined"
    )


def _causes(beat: Beat) -> str:
    """What to look at first."""
    equal, asked = beat.state.greedy
    if not asked:
        return (
            "next: ask who runs it for changes of weights, precision, sampling defaults or the "
            "prompt; with the rank test, a reference from a kernel separates the sampler from "
            "the other causes"
        )
    if equal == asked:
        return (
            f"at temperature 0, all {asked} answers are those of the reference: likely the "
            "sampler (temperature, top-p, penalties), not the weights or the prompt"
        )
    return (
        f"at temperature 0, {asked - equal} of {asked} answers are not those of the reference: "
        "weights, precision or prompt (BOS, chat template, system prompt), whatever the sampler"
    )


def _data(beat: Beat, smallest: dict[str, float], code: int) -> dict[str, Any]:
    state = beat.state
    return {
        "url": state.settings.url,
        "served": state.settings.served,
        "reference": state.settings.reference,
        "changed": state.changed or None,
        "greedy": {"equal": state.greedy[0], "asked": state.greedy[1]},
        "exit_code": code,
        "e": math.exp(min(beat.log_e, 700)),
        "alpha": state.settings.alpha,
        "tolerance": state.settings.tolerance if beat.baseline.exact else None,
        "beat": state.beats,
        "sent": beat.sent,
        "today": beat.today,
        "budget": beat.budget,
        "asked": state.asked,
        "claim": None if state.changed else _claim(beat),
        "tests": {
            name: {
                "answers": state.records[name].evidence.n,
                "lost": state.records[name].evidence.missing,
                "e": math.exp(min(state.records[name].evidence.log_e, 700)),
                "smallest_change": smallest.get(name),
            }
            for name in state.settings.tests
        },
    }
