# Rules about the shape of a gap, wherever it is.

from __future__ import annotations

import math

from servanda.judgement.causes.case import FEW_ZEROS, MOST_OF_IT, SURE_Z, Case, grows, rule

_AT_START = 0.35  # a first step below this share of the last: nothing was wrong before an update
_CURVE = 0.35  # share of the variance that a function of the logprob has
_TAIL = 0.35  # share of the gap in a hundredth of the tokens
_IDS = 0.35
_PENALTY_Z, _PENALTY_SHARE = 3.0, 0.03
_LENGTH, _LATER = 1.5, 1.2  # of the rate over context lengths; the second with a slice
_LINEAR = 0.4  # share of the variance that a temperature explains
_UNEVEN = 2.0  # largest over smallest rate of steps that are alike
_SPREAD = 0.62  # concentration of sequences that are alike, as real texts have it


@rule("top_p")
def _(case: Case) -> str:
    s = case.signatures
    if s.cut_share < MOST_OF_IT or s.zeros > FEW_ZEROS or (case.placed and not case.of_most_ids):
        return ""
    return (
        f"the engine cannot sample {100 * s.cut:.2g} % of the trainer's mass and renormalises "
        f"the rest: a top-p of at most {_rest(s.cut)}, a top-k or a min-p that the trainer does "
        f"not apply; it explains {100 * s.cut_share:.0f} % of the difference"
    )


@rule("temperature")
def _(case: Case) -> str:
    s = case.signatures
    if s.temperature_share < _LINEAR or case.placed:
        return ""
    return (
        f"the engine sampled at about {s.temperature:.2f} times the trainer's; the log ratio "
        f"follows log p, which explains at least {100 * s.temperature_share:.0f} % of its variance"
    )


@rule("penalty")
def _(case: Case) -> str:
    s = case.signatures
    if s.repeated is None or abs(s.repeated) < _PENALTY_Z:
        return ""
    if (s.repeated_share or 0.0) < _PENALTY_SHARE:
        return ""
    way = "less" if s.repeated > 0 else "more"
    return f"tokens that a response repeats are {way} likely to the engine, {s.repeated:+.0f} σ"


@rule("positions")
def _(case: Case) -> str:
    s, found = case.signatures, case.sliced("context.length", "context.position")
    later = found is not None and "gte" in found.first[1]
    grown = s.length is not None and s.length >= _LENGTH and (s.length_z or 0.0) >= SURE_Z
    if s.length is None or not (grown or (later and s.length >= _LATER)):
        return ""
    return f"the rate grows x{s.length:.2g} from the shortest contexts to the longest"


@rule("precision_drift")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.first is None or s.first < _AT_START:
        return ""
    if not (s.first_step <= 1 and (s.first_gap or 0.0) > 0):
        return ""  # a lost update can explain every step
    return (
        f"drift that grows, x{s.growth:.2g}, in all sequences alike; step {s.first_step}, before "
        f"most updates, has {100 * s.first:.0f} % of the gap already"
    )


@rule("stale_weights")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.first is None or s.first >= _AT_START:
        return ""
    return (
        f"drift that grows, x{s.growth:.2g}, in all sequences alike, from "
        f"{100 * s.first:.0f} % of it at step {s.first_step}"
    )


@rule("routing")
def _(case: Case) -> str:
    s = case.signatures
    if s.tail < _TAIL or case.main is not None or s.ids is None or s.ids >= _IDS:
        return ""
    return f"{100 * s.tail:.0f} % of the gap lies in 1 % of the tokens, in all sequences and places"


@rule("head")
def _(case: Case) -> str:
    s = case.signatures
    if s.ids is None or s.ids < _IDS or grows(s):
        return ""
    return f"the id of a token explains {100 * s.ids:.0f} % of the variance of the log ratio"


@rule("softcap")
def _(case: Case) -> str:
    s = case.signatures
    if s.curve < _CURVE or grows(s):
        return ""
    return f"{100 * s.curve:.0f} % of the variance of the log ratio is a function of log p"


@rule("numerics")
def _(case: Case) -> str:
    s = case.signatures
    if grows(s) or case.main is not None or case.sequences is not None or s.tail > _TAIL:
        return ""
    if s.concentration > _SPREAD or (s.uneven or 1.0) > _UNEVEN:
        return ""
    return (
        f"all sequences, positions and steps alike, {s.rms:.2g} nats a token, as of "
        f"{_ladder(s.rms)}"
    )


def _ladder(rms: float) -> str:
    """The usual size of a format's noise; an order of magnitude, not a measurement."""
    for most, name in ((1e-4, "float32"), (0.04, "bfloat16"), (0.12, "8 bits")):
        if rms <= most:
            return name
    return "4 bits, or of other weights"


def _rest(mass: float) -> str:
    """1 - x, with enough digits to differ from 1.

    >>> _rest(0.1), _rest(0.003), _rest(3e-6)
    ('0.9', '0.997', '0.999997')
    """
    digits = max(1, 1 - math.floor(math.log10(mass)))
    return f"{1 - mass:.{digits}f}".rstrip("0")
