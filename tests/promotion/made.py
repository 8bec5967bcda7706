# Small courses and findings, made by hand.

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.promotion.advance import advance, approve, begin
from servanda.promotion.state import CellResult, LegFinding, RuleAction

KEY = EvidenceKey(contract="c", corpus="p", train="t", infer="i", weights="w")
T0 = 1_000.0

OFFLINE = Leg("offline", first=2, last=4)
SHADOW = Leg("shadow", mirror=0.05, first=2, last=4)
ONE = Leg("canary", share=0.01, sample=0.5, first=2, last=4)
TEN = Leg("canary", step=1, share=0.1, sample=0.5, first=2, last=4)
FULL = Leg("full", share=1.0, sample=0.01, first=2, last=4)
WHOLE = (OFFLINE, SHADOW, ONE, TEN, FULL)


def cell(outcome="holds", clause="tv", slice="all", *, n=100, guard=False, high=0.02, limit=0.05):
    """What a clause shows on a slice."""
    return CellResult(clause, slice, outcome, 0.01, 0.0, high, limit, n, "tokens", guard=guard)


def asked(action, value="", *cells, rule="tv is violated"):
    return RuleAction(action, value, cells or (cell("violated"),), rule)


def finding(leg, *cells, groups=4, evidence=None, key=KEY, asked=(), error=""):
    """A look at a leg, given as such or by its name; each size is new evidence."""
    name = leg if isinstance(leg, str) else leg.name
    weighed = f"{name} {groups}" if evidence is None else evidence
    return LegFinding(name, key, groups, weighed, cells, tuple(asked), error)


def begun(course, *, now=T0):
    return begin("run", KEY, course, now=now)[0]


def brought(course, to, *, now=T0):
    """A run that held everywhere until it came to a leg, at one moment."""
    state = begun(course, now=now)
    while course[state.leg].name != to.name:
        before = state.leg
        state, _ = advance(course, state, finding(course[before], cell()), now=now)
        if state.status == "awaiting_approval":
            state, _ = approve(course, state, actor="ana", reason="seen", now=now)
        assert state.leg <= before + 1
    return state
