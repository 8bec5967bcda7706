# One evaluation of a step of a promotion: its measurements so far, and their verdict.
#
# The offline step is `check`.  On a live step the tokens were sampled already by the candidate's
# servers for users: the traffic log takes the place of the infer kernel, and the train kernel
# scores its requests in rounds.  The rest of the pipeline is shared.

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
from servanda.judgement.clauses.sample_ratio import Split
from servanda.judgement.clauses.scope import known_by_name
from servanda.judgement.evidence import Evidence, Once, weigh_once
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Arrivals
from servanda.judgement.slices.rules import cuts_of
from servanda.judgement.traffic import Traffic, traffic_of
from servanda.judgement.verdict import Verdict
from servanda.promotion.run.request_log_files import read_log, read_split, refuse_rewritten
from servanda.runner.load import compile
from servanda.runner.measurement import ExpiredError, Open, Watch, key_of
from servanda.runner.run_directory import RunDirectory, opened
from servanda.runner.sequential import Gathered, concluded, gather
from servanda.traces.assignments import first_of_each_user


@dataclass(frozen=True)
class LegEvaluation:
    """The result of one evaluation of a step.

    Args:
        key: evidence key of the current kernels, as on the offline step.  If it has changed, no
            evidence was evaluated: the verdict has no unit, and the caller must report the change.
        groups: prompt groups of the closed rounds, of the workload with the fewest.
        waiting: the missing condition for a decision, as a sentence; "" for none.
        outside: reason -> number of requests of the step that are no evidence.
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
    """Measure the new evidence of a step, and judge all of its evidence.

    Args:
        root: the run directory; each live step has a folder in it.
        run: name of the promotion in the traffic log.
        served: files of that log, or folders of them, read in the order of their names.
        now: unix seconds; end of the windows of `over`.
        deadline: returns whether the time is over; then no round starts.
        text: text of the contract, stored with the verdict.

    Raises:
        ContractError, MeasurementError, Interrupted: as in `check`.
        EvidenceError: the log lacks a request, or has a repeated one, one of another kernel, or one
            that was changed after its evaluation.
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
        once: Once = {"coverage": _coverage(plan, measured.evidence, now)}
        if any(cell.kind.source == "split" for cell in plan.cells):
            once = {**once, "split": _split(plan, leg, run, served)}
        evidence = measured.evidence + weigh_once(plan, measured.key, once)
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
    """The description of a kernel, from an engine that is closed again."""
    with closing(open_(kernel, side)) as engine:
        return engine.describe()


def _unmeasured(
    plan: Plan, infer: Description, known: EvidenceKey | None, open_: Open
) -> EvidenceKey:
    """The key of a step without requests to score yet.

    The description of train comes from earlier evidence, without loading it.  That of infer was
    just requested, because another build may serve now.
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
    """The key that all steps share, without stable and rewards, which only some compare with.

    A change of the stable kernel since the begin of this step is still reported.
    """
    stable = own.stable
    if offline is not None and (before is None or before.stable == own.stable):
        stable = offline.stable
    return replace(own, stable=stable, reward=reward)


def _coverage(plan: Plan, evidence: Evidence, now: float) -> dict[float | None, Coverage]:
    """The served and scored requests of each window (`over`) of a clause.

    For a step with all its prompt groups, the window ends at the last of them: later requests
    belong to another step.
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
        # rows with a timestamp in the future are in no window
        end = math.inf if over is None else until
        inside = [request for request in launched if since < request.at <= end]
        earlier = max((r.served for r in launched if r.at <= since), default=0)
        served = inside[-1].served - earlier if inside else 0
        again = sum(since < request.at <= end for request in scored)
        coverage[over] = Coverage(again, served)
    return coverage


def _split(plan: Plan, leg: Leg, run: str, served: Sequence[Path]) -> Split:
    """The users of a step, and the slices in which their shares are compared."""
    users = first_of_each_user(read_split(served), run, leg.name)
    corpus = next(iter(plan.corpora.values()))
    moments = known_by_name(plan.contract)
    by_name = cuts_of(plan.contract.slices, corpus)
    cuts = (c for name, own in by_name.items() if moments[name] == "request" for c in own)
    return Split(leg.share, users, tuple(cut for cut in cuts if cut.terms))


def _groups(plan: Plan, evidence: Evidence) -> int:
    launched = [sum(r.groups for r in evidence.closed(s.name)) for s in plan.schedules]
    return min(launched, default=0)


def _waiting(plan: Plan, evidence: Evidence) -> str:
    """The missing condition of a live step."""
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
