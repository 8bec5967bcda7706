# The promoter: evaluates a build, lets the finding move the promotion, and repeats while it moves.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from servanda.contract.model import Contract
from servanda.contract.stages import course_of, refuse_absent
from servanda.engines.worker import spawn
from servanda.errors import ContractError, EvidenceError, Interrupted, ServandaError
from servanda.promotion.api import leg_finding, run_name
from servanda.promotion.ledger.entry import LedgerError
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run.evaluate import LegEvaluation, evaluate_leg
from servanda.promotion.run.history import History, histories_of, history_of, refreshed
from servanda.promotion.run.record import advance_run, open_run, roll_back_run
from servanda.promotion.state import LegFinding, leg_of
from servanda.runner.load import compile, load
from servanda.runner.measurement import Open, Watch
from servanda.runner.run import RUNS
from servanda.runner.run_directory import Occupied, RunDirectory, latest


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
