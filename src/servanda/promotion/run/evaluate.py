# One look at a leg of a promotion: what was measured for it so far, and what that says.
#
# Offline is what `check` does.  On a live leg the tokens were drawn already, by the servers of
# the candidate and for users: the log of served requests stands where infer stands, and train
# scores what arrived, in rounds that close as they fill.  Everything else is one pipeline.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from servanda.contract.identity import Description, EvidenceKey
from servanda.contract.model import Contract, Kernel
from servanda.contract.stages import Leg
from servanda.engines.base import Engine
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.engines.worker import spawn
from servanda.judgement.clauses.guards import Coverage
from servanda.judgement.evidence import Evidence, weigh_once
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Arrivals
from servanda.judgement.traffic import Traffic, traffic_of
from servanda.judgement.verdict import Verdict
from servanda.promotion.run.request_log_files import read_log, refuse_rewritten
from servanda.runner.load import compile
from servanda.runner.measurement import ExpiredError, Open, Watch, key_of
from servanda.runner.run_directory import RunDirectory, opened
from servanda.runner.sequential import Gathered, concluded, gather


@dataclass(frozen=True)
class LegEvaluation:
    """What one look at a leg found.

    Args:
        key: of evidence from the kernels that answered now, as the offline leg
            has it.  Where it is another than before, nothing was weighed: the verdict knows no
            unit, and anyone who promotes has to say so.
        groups: prompt groups of the closed rounds, of the workload that has fewest.
        waiting: what is missing before this leg can be decided, as a sentence; "" where
            nothing is.
        outside: why requests of the leg are no evidence -> how many.
    """

    verdict: Verdict
    plan: Plan
    key: EvidenceKey
    groups: int
    waiting: str = ""
    outside: Mapping[str, int] = field(default_factory=dict)


def evaluate_leg(
    contract: Contract,
    leg: Leg,
    root: Path,
    *,
    attempt: int,
    run: str,
    served: Sequence[Path],
    now: float,
    open: Open = spawn,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    text: str = "",
) -> LegEvaluation:
    """Measure what there is of a leg and was not measured yet, and judge all of it.

    Args:
        root: the run directory; a live leg has a folder of its own in it.
        run: name of the promotion, as the log of served requests has it.
        served: files of that log, or folders of them, in the order of their names.
        now: unix seconds; what `over` of a clause counts back from.
        deadline: whether the time is over; no round starts after that.
        text: of the contract, which the verdict on disk keeps.

    Raises:
        ContractError, MeasurementError, Interrupted: as `check` does.
        EvidenceError: the log lacks a request, or has one twice, of another kernel, or
            otherwise than it was weighed.
    """
    if not leg.live:
        plan = compile(contract, attempt=attempt, leg=leg)
        with opened(root, attempt=attempt) as directory:
            measured = _gathered(plan, directory, open, watch, deadline)
            verdict = concluded(plan, measured, text, deadline)
            if measured.evidence.rounds or measured.evidence.once:
                directory.finish(verdict.to_dict())
        return LegEvaluation(verdict, plan, measured.key, _groups(plan, measured.evidence))
    described = _described(open, contract.kernels.infer, "infer")
    requests = read_log(served)
    traffic = traffic_of(
        requests,
        contract,
        run=run,
        leg=leg.name,
        context=described.context,
        fingerprint=described.fingerprint.get("system_fingerprint", ""),
    )
    plan = compile(contract, attempt=attempt, leg=leg, traffic=traffic)
    infer = TrafficReplayEngine(contract.kernels.infer, described, traffic.requests)

    def opening(kernel: Kernel, side: str) -> Engine:
        return infer if side == "infer" else open(kernel, side)

    begun = RunDirectory(root, attempt).begun
    offline = begun[0] if begun else None
    with opened(root / leg.name, attempt=attempt) as directory:
        resumed = directory.begun
        before = resumed[0] if resumed else None
        arrivals = [s for s in plan.schedules if isinstance(s, Arrivals)]
        if before is not None and before.infer == described.digest:
            for schedule in arrivals:
                refuse_rewritten(schedule, directory, infer)
        if any(schedule.rounds for schedule in arrivals):
            measured = _gathered(plan, directory, opening, watch, deadline)
        else:
            measured = _nothing(plan, _unmeasured(plan, described, before or offline, open))
        coverage = _coverage(plan, measured.evidence, now)
        evidence = measured.evidence + weigh_once(plan, measured.key, {"coverage": coverage})
        verdict = concluded(plan, replace(measured, evidence=evidence), text, deadline)
        if evidence.rounds:
            directory.finish(verdict.to_dict())
    key = _as_offline(measured.key, offline, before, compile(contract, attempt=attempt).reward)
    waiting = _waiting(plan, evidence)
    if requests and not traffic.launched:
        waiting += f"; its last request is for run {requests[-1].run!r} on {requests[-1].leg}"
    return LegEvaluation(verdict, plan, key, _groups(plan, evidence), waiting, traffic.outside)


def _gathered(
    plan: Plan,
    directory: RunDirectory,
    open_: Open,
    watch: Watch | None,
    deadline: Callable[[], bool] | None,
) -> Gathered:
    try:
        return gather(plan, directory, open_, watch, deadline)
    except ExpiredError as expired:
        return _nothing(plan, expired.key)


def _nothing(plan: Plan, key: EvidenceKey) -> Gathered:
    return Gathered(key, None, {}, Evidence(key, plan.digest), {})


def _described(open_: Open, kernel: Kernel, side: str) -> Description:
    """What a kernel says of itself; it is closed again."""
    with closing(open_(kernel, side)) as engine:
        return engine.describe()


def _unmeasured(
    plan: Plan, infer: Description, known: EvidenceKey | None, open_: Open
) -> EvidenceKey:
    """The key of a leg of which nothing can be scored yet.

    What train is, earlier evidence knows: it is not loaded for that.  What infer is, was just
    asked, for another build may serve by now.
    """
    same = known is not None and infer.weights in ("", known.weights)
    if known is not None and same:
        return replace(
            known,
            contract=plan.contract.digest,
            corpus=plan.texts,
            infer=infer.digest,
            attempt=plan.attempt,
        )
    kernels = {"train": plan.contract.kernels.train}
    if plan.stable is not None:
        kernels["stable"] = plan.stable
    others = {side: _described(open_, kernel, side) for side, kernel in kernels.items()}
    return key_of(plan, {**others, "infer": infer})


def _as_offline(
    own: EvidenceKey, offline: EvidenceKey | None, before: EvidenceKey | None, reward: str
) -> EvidenceKey:
    """A key that all legs share: one leg compares with stable, or with rewards, another does not.

    A stable kernel that changed since this leg began is told all the same.
    """
    stable = own.stable
    if offline is not None and (before is None or before.stable == own.stable):
        stable = offline.stable
    return replace(own, stable=stable, reward=reward)


def _coverage(plan: Plan, evidence: Evidence, now: float) -> dict[float | None, Coverage]:
    """Of each window that a clause asks for, what was served in it, and scored again.

    A leg that has all the groups it asked for is covered up to the last of them: what is
    served later is another leg's to look at.
    """
    overs = {cell.clause.over for cell in plan.cells if cell.kind.source == "coverage"}
    traffic = plan.traffic or Traffic("", "")
    closed = sum(len(evidence.closed(s.name)) * s.workload.round for s in plan.schedules)
    scored = [request for group in traffic.groups[:closed] for request in group]
    full = any(
        isinstance(s, Arrivals) and not s.endless and closed >= s.last for s in plan.schedules
    )
    launched, until = traffic.launched, now
    if full and scored:
        launched, until = launched[: scored[-1].index + 1], scored[-1].at
    coverage = {}
    for over in overs:
        since = -1.0 if over is None else until - over
        # what says to be sent later than now is of no window
        end = math.inf if over is None else until
        inside = [request for request in launched if since < request.at <= end]
        earlier = max((r.served for r in launched if r.at <= since), default=0)
        served = inside[-1].served - earlier if inside else 0
        again = sum(since < request.at <= end for request in scored)
        coverage[over] = Coverage(again, served)
    return coverage


def _groups(plan: Plan, evidence: Evidence) -> int:
    launched = [sum(r.groups for r in evidence.closed(s.name)) for s in plan.schedules]
    return min(launched, default=0)


def _waiting(plan: Plan, evidence: Evidence) -> str:
    """What a live leg still has to see."""
    reasons = []
    for schedule in plan.schedules:
        if not isinstance(schedule, Arrivals):
            continue
        traffic, size = schedule.traffic, schedule.workload.round
        closed = sum(r.groups for r in evidence.closed(schedule.name))
        if not traffic.launched:
            return f"the log has no request for run {traffic.run!r} on {traffic.leg} yet"
        if closed < schedule.first:
            reasons.append(f"no pass before {schedule.first:,} prompt groups, {closed:,} complete")
        if closed < schedule.last or schedule.endless:
            arrived = len(traffic.groups) - closed
            reasons.append(f"{arrived:,} of the {size:,} of the next round have arrived")
    return "; ".join(reasons)
