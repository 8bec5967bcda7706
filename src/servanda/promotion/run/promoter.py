# The promoter: evaluates a build, lets the finding move the promotion, and repeats while it moves.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from servanda.contract.identity import Description, EvidenceKey
from servanda.contract.model import Contract, Kernel
from servanda.contract.stages import Leg, course_of, refuse_absent
from servanda.engines.base import Engine
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.engines.worker import spawn
from servanda.errors import ContractError, EvidenceError, Interrupted, ServandaError
from servanda.judgement.clauses.guards import Coverage
from servanda.judgement.clauses.sample_ratio import Split
from servanda.judgement.clauses.scope import known_by_name
from servanda.judgement.evidence import Evidence, Once, weigh_once
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Arrivals
from servanda.judgement.slices.rules import cuts_of
from servanda.judgement.traffic import Traffic, traffic_of
from servanda.judgement.verdict import Verdict
from servanda.promotion.api import leg_finding, run_name
from servanda.promotion.ledger.entry import LedgerError
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run.history import (
    History,
    advance_run,
    histories_of,
    history_of,
    open_run,
    refreshed,
    roll_back_run,
)
from servanda.promotion.run.request_log_files import read_log, read_split, refuse_rewritten
from servanda.promotion.state import LegFinding, leg_of
from servanda.runner.load import compile, load
from servanda.runner.measurement import ExpiredError, Open, Watch, key_of
from servanda.runner.run import RUNS
from servanda.runner.run_directory import Occupied, RunDirectory, latest, opened
from servanda.runner.sequential import Gathered, concluded, gather
from servanda.traces.request_log import first_of_each_user


@dataclass(frozen=True)
class Build:
    """A build to promote, and the place of its measurements.

    Args:
        contract: file of the contract.
        run_dir: directory of the measurements; None: runs/NAME.
        served: files of the traffic log, or folders of them.
        fresh: start another attempt; an active run of this contract is rolled back.
    """

    contract: Path
    run_dir: Path | None = None
    served: tuple[Path, ...] = ()
    fresh: bool = False


@dataclass(frozen=True)
class Step:
    """A change of a run and its evaluation; None if the measurement failed, or a person rolled the
    run back.
    """

    history: History
    looked: LegEvaluation | None = None
    error: str = ""


def promote(
    build: Build,
    ledger: Ledger,
    *,
    actor: str,
    clock: Callable[[], float],
    until: str | None = None,
    open: Open = spawn,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    stepped: Callable[[Step], None] = lambda _: None,
) -> History:
    """Promote a build as far as its evidence allows now.

    Args:
        clock: returns unix seconds.
        until: stop at the first step of this stage.
        stepped: called after each evaluation.

    Raises:
        ContractError: the contract is invalid, or its promotion has no such stage.
        EvidenceError: the run directory has evidence of another contract text, the clock went back,
            or another run of this contract is active.
        Occupied: another promoter uses the run directory; not a failed measurement.
        LedgerError, MeasurementError, Interrupted: from the ledger and the measurement.
    """
    contract = load(build.contract)
    text = build.contract.read_text(encoding="utf-8-sig")
    course = course_of(contract)
    for leg in course:  # a step too short for its limits is reported before the first begins
        compile(contract, leg=leg)
    if until is not None:
        refuse_absent(contract, until)
    root = build.run_dir or RUNS / contract.metadata.name
    attempt = latest(root, fresh=build.fresh)
    history = _begun(contract, root, attempt, ledger)

    kernels = {"open": open, "watch": watch, "deadline": deadline}
    where = {"root": root, "attempt": attempt, "served": build.served, "text": text}
    evaluate = partial(evaluate_leg, contract, **where, **kernels)
    if history is None:
        others = _under_way(ledger, contract)
        if others and not build.fresh:
            other = others[0]
            raise EvidenceError(
                f"promotion {other.run} of this contract is "
                f"{other.state.status.replace('_', ' ')} on "
                f"{other.leg.name}: two builds cannot be promoted at once",
                hint=f"continue it, roll it back (servanda promotion rollback {other.run}), "
                "or start another attempt with --fresh, which rolls it back",
            )
        first = evaluate(course[0], run="", now=clock())
        _refuse_known(ledger, run_name(contract, first.key), root)
        for other in others:
            reason = f"promotion {run_name(contract, first.key)} starts"
            taken = roll_back_run(ledger, other, actor=actor, reason=reason, now=clock())
            stepped(Step(taken))  # delivered before the new run: its route is older
        prints = first.verdict.circumstances.fingerprints
        history = open_run(ledger, contract, first.key, course, prints, actor=actor, now=clock())
        _refuse_later(ledger, contract, history)
        finding = leg_finding(contract, course[0], first.verdict)
        history = advance_run(ledger, history, finding, actor=actor, now=clock())
        stepped(Step(history, first))
        if history.state.leg == 0:
            return history
    elif not history.evaluations:
        _refuse_later(ledger, contract, history)
    while not history.state.ended and not (until is not None and history.reached(until)):
        before = history.state.leg, history.state.span
        step = _step(contract, ledger, history, evaluate, actor, clock)
        history = step.history
        stepped(step)
        if (history.state.leg, history.state.span) == before or (deadline and deadline()):
            break
    return history


def _step(
    contract: Contract,
    ledger: Ledger,
    history: History,
    evaluate: Callable[..., LegEvaluation],
    actor: str,
    clock: Callable[[], float],
) -> Step:
    """One evaluation of the current step; a failed measurement is a finding too."""
    leg = history.leg
    evaluation, error = None, ""
    try:
        evaluation = evaluate(leg, run=history.run, now=clock())
        finding = replace(leg_finding(contract, leg, evaluation.verdict), key=evaluation.key)
    except (ContractError, Interrupted, LedgerError, Occupied):
        raise  # these are not failed measurements
    except ServandaError as failed:
        error = str(failed)
        first = failed.problems[0]
        at = f"{first.where}: " if first.where else ""
        finding = LegFinding(leg.name, error=f"{at}{first.message}")
    history = refreshed(ledger, history)
    if history.state.ended or leg_of(history.course, history.state).name != leg.name:
        return Step(history, evaluation, error)  # a person changed the run meanwhile
    return Step(advance_run(ledger, history, finding, actor=actor, now=clock()), evaluation, error)


def _begun(contract: Contract, root: Path, attempt: int, ledger: Ledger) -> History | None:
    """The run of a run directory, if it is in the ledger.

    Raises:
        EvidenceError: it was created with another contract text.
    """
    begun = RunDirectory(root, attempt).begun
    if begun is None:
        return None
    key, _ = begun
    if key.contract != contract.digest:
        raise EvidenceError(
            f"{root} holds evidence of another version of this contract: its digest was "
            f"{key.contract[:8]}, and now it is {contract.digest[:8]}",
            hint="evidence is for one text of a contract: restore it, or start another attempt "
            "with "
            "--fresh; servanda contract diff OLD NEW lists the changes",
        )
    return history_of(ledger, run_name(contract, key))


def _under_way(ledger: Ledger, contract: Contract) -> list[History]:
    """The active runs of a contract."""
    return [
        history
        for history in histories_of(ledger, contract.metadata.name)
        if not history.state.ended and history.state.status != "completed"
    ]


def _refuse_known(ledger: Ledger, run: str, root: Path) -> None:
    """Refuse evidence of a run from another run directory, before any rollback.

    Raises:
        EvidenceError: it is.
    """
    known = history_of(ledger, run)
    if known is not None:
        raise EvidenceError(
            f"promotion {run} of this build is in the ledger already, and was not started from "
            f"{root}: "
            f"it is {known.state.status.replace('_', ' ')} on {known.leg.name}",
            hint="continue it with its own --run-dir, or leave out --fresh",
        )


def _refuse_later(ledger: Ledger, contract: Contract, history: History) -> None:
    """Refuse the later of two builds that were started at the same time.

    A promoter checks for other runs first and then measures for a while; the ledger orders two that
    did so at the same time.

    Raises:
        EvidenceError: it is the later one: it must wait, and nothing was decided.
    """
    runs = [other.run for other in _under_way(ledger, contract)]
    if history.run in runs and runs[0] != history.run:
        raise EvidenceError(
            f"promotion {runs[0]} of this contract started before {history.run}: two builds "
            "cannot be "
            "promoted at once",
            hint=f"wait until it has ended, or roll it back: servanda promotion rollback {runs[0]}",
        )


# One evaluation of a step of a promotion: its measurements so far, and their verdict.
#
# The offline step is `check`.  On a live step the tokens were sampled already by the candidate's
# servers for users: the traffic log takes the place of the infer kernel, and the train kernel
# scores its requests in rounds.  The rest of the pipeline is shared.


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
