# What a promotion may do, from its history alone: slow, obvious, and without a state.
#
# A history is a list of steps: what happened, and where the run stood after it.  Each question
# is answered by reading the history again from the beginning.

from dataclasses import dataclass

from servanda.contract.identity import EvidenceKey
from servanda.promotion.state import Effect, LegFinding, Override, State

PATIENCE = 3


@dataclass(frozen=True)
class Step:
    """One thing that happened: begin, look, approve, override or roll_back; and what came of it."""

    kind: str
    now: float
    state: State
    effects: tuple[Effect, ...] = ()
    finding: LegFinding | None = None
    override: Override | None = None


def leg_at(course, state):
    """The leg of a state, with its name."""
    leg = course[state.leg]
    for _ in range(state.span - 1):
        leg = leg.following
    return leg


def entered(history):
    """Index of the step that brought the run to the leg and span where it is."""
    here = history[-1].state
    i = len(history) - 1
    while i and (history[i - 1].state.leg, history[i - 1].state.span) == (here.leg, here.span):
        i -= 1
    return i


def waived(history, now, cell):
    """Whether somebody's word covers a cell: the latest for each clause and slice, unexpired."""
    words = {(s.override.clause, s.override.slice): s.override for s in history if s.override}
    return any(
        word.expires > now and word.clause in ("*", cell.clause) and word.slice in ("*", cell.slice)
        for word in words.values()
    )


def changed(key, finding):
    return finding.key is not None and any(
        getattr(key, part) != getattr(finding.key, part)
        for part in EvidenceKey.__dataclass_fields__
        if part != "grade"
    )


def counting(history, now, finding):
    return [c for c in finding.cells if not waived(history, now, c)]


def asked(history, now, finding):
    """Rules that at least one counting cell meets: (action, value, rule)."""
    if finding.error or changed(history[0].state.key, finding):
        return []
    return [
        (a.action, a.value, a.rule)
        for a in finding.asked
        if not all(waived(history, now, c) for c in a.cells)
    ]


def everything_holds(cells):
    """With samples behind all of it, and a promise among it."""
    return all(c.outcome == "holds" and c.n > 0 for c in cells) and any(not c.guard for c in cells)


def failed(history, now, finding):
    """Whether measuring failed at a look: as a whole, or a cell is an error and none is worse."""
    outcomes = {c.outcome for c in counting(history, now, finding)}
    return bool(finding.error) or ("error" in outcomes and "violated" not in outcomes)


def failures(history):
    """Looks in a row, up to the latest, at which measuring failed."""
    count = 0
    for i, step in enumerate(history):
        if step.kind != "look" or history[i - 1].state.ended:
            continue
        before = history[:i]
        if not failed(before, step.now, step.finding):
            count = 0
        elif step.finding.error or not halted_by_rule(before, step.now, step.finding):
            count += 1
    return count


def halted_by_rule(history, now, finding):
    return "halt" in [action for action, _, _ in asked(history, now, finding)]


def seen_first(history, now, finding):
    """When the evidence of a look was weighed first, without other evidence in between."""
    since = now
    for step in reversed(history):
        if step.kind == "look" and not step.finding.error:
            if step.finding.evidence != finding.evidence:
                break
            since = step.now
    return since


def shows(course, history, now, finding):
    """Whether a look shows that everything holds, at the size that the leg asks for."""
    leg = leg_at(course, history[-1].state)
    actions = [action for action, _, _ in asked(history, now, finding)]
    return (
        not finding.error
        and not changed(history[0].state.key, finding)
        and everything_holds(counting(history, now, finding))
        and not {"hold", "halt", "roll_back"} & set(actions)
        and (leg.stage == "offline" or finding.groups >= leg.first)
    )


def valid_until(course, history):
    """When what was shown last expires; None where nothing was, or it does not."""
    for i in range(len(history) - 1, 0, -1):
        step, before = history[i], history[:i]
        if (
            step.kind == "look"
            and not before[-1].state.ended
            and shows(course, before, step.now, step.finding)
        ):
            lasts = leg_at(course, before[-1].state).valid_for_s
            if lasts is None:
                return None
            return seen_first(before, step.now, step.finding) + lasts
    return None


def expected(course, history, now, finding):
    """Status and how many legs and spans further a look leaves a run that has not ended."""
    state = history[-1].state
    leg = leg_at(course, state)
    last = state.leg == len(course) - 1
    cells = counting(history, now, finding)
    outcomes = {c.outcome for c in cells}
    actions = [action for action, _, _ in asked(history, now, finding)]
    until = valid_until(course, history)
    stay = (0, 0)

    if changed(state.key, finding):
        return "superseded", stay
    if "violated" in outcomes or "roll_back" in actions:
        return "rolled_back", stay
    if until is not None and now >= until:
        return "superseded", stay
    if not finding.error and "halt" in actions:
        return "halted", stay
    if failed(history, now, finding):
        many = failures([*history, Step("look", now, state, finding=finding)])
        return ("halted" if many >= PATIENCE else "awaiting_evidence"), stay
    if not everything_holds(cells):
        if finding.groups < leg.last or leg.if_inconclusive == "wait":
            return "awaiting_evidence", stay
        return ("rolled_back" if leg.if_inconclusive == "roll_back" else "halted"), stay
    if "hold" in actions:
        return "halted", stay
    if not shows(course, history, now, finding):
        return "awaiting_evidence", stay
    lasts = leg.valid_for_s
    if lasts is not None and now >= seen_first(history, now, finding) + lasts:
        return "superseded", stay
    since = entered(history)
    if now - history[since].now < leg.dwell_s:
        return ("completed" if last and state.span > 1 else "running"), stay
    if last:
        return "completed", (0, int(leg.stage == "full" and finding.groups >= leg.last))
    ask = leg.approval and course[state.leg + 1].stage != leg.stage
    if ask and not any(step.kind == "approve" for step in history[since:]):
        return "awaiting_approval", stay
    return "running", (1, 0)


def pages(history, now, finding):
    """Whom rules page that begin to be met at a look."""
    met = []
    for i, step in enumerate(history):
        if step.kind == "look" and not history[i - 1].state.ended and not step.finding.error:
            met = asked(history[:i], step.now, step.finding)
    begun = [a for a in asked(history, now, finding) if a not in met]
    return {value for action, value, _ in begun if action == "page"}
