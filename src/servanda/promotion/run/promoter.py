# The promoter: looks at a build, lets what it finds move the run, and looks again while it moves.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract
from servanda.contract.stages import Leg, course_of, refuse_absent
from servanda.engines.worker import spawn
from servanda.errors import ContractError, EvidenceError, Interrupted, ServandaError
from servanda.promotion.api import run_name
from servanda.promotion.finding import found
from servanda.promotion.ledger.entry import Ledger, LedgerError
from servanda.promotion.run.evaluate import Looked, look
from servanda.promotion.run.history import Story, refreshed, stories_of, story_of
from servanda.promotion.run.record import look_at, open_run, take_back
from servanda.promotion.state import Finding, leg_of
from servanda.runner.load import compile, load
from servanda.runner.measurement import Open, Watch
from servanda.runner.run import RUNS
from servanda.runner.run_directory import Occupied, RunDirectory, latest


@dataclass(frozen=True)
class Build:
    """What is promoted, and from where it is measured.

    Args:
        contract: its file.
        run_dir: where to measure; None: runs/NAME.
        served: files of the log of served requests, or folders of them.
        fresh: begin another attempt; a run of this contract that has not ended is rolled back.
    """

    contract: Path
    run_dir: Path | None = None
    served: tuple[Path, ...] = ()
    fresh: bool = False


@dataclass(frozen=True)
class Step:
    """What became of a run, and the look that did it; None where measuring failed, or a person
    took the run back.
    """

    story: Story
    looked: Looked | None = None
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
) -> Story:
    """Take a build as far as its evidence goes now.

    Args:
        clock: unix seconds.
        until: stop at the first leg of this stage.
        stepped: called after each look.

    Raises:
        ContractError: the text is wrong, or its promotion has no such stage.
        EvidenceError: the run directory holds evidence of another text, the clock went back, or
            another run of this contract is under way.
        Occupied: another promoter measures in the run directory, which is no failed measurement.
        LedgerError, MeasurementError, Interrupted: as the ledger and measuring do.
    """
    contract = load(build.contract)
    text = build.contract.read_text(encoding="utf-8-sig")
    course = course_of(contract)
    for leg in course:  # a leg too short for its limits is said before any of them begins
        compile(contract, leg=leg)
    if until is not None:
        refuse_absent(contract, until)
    root = build.run_dir or RUNS / contract.metadata.name
    attempt = latest(root, fresh=build.fresh)
    story = _begun(contract, root, attempt, ledger)

    def seen(leg: Leg, run: str) -> Looked:
        return look(
            contract,
            leg,
            root,
            attempt=attempt,
            run=run,
            served=build.served,
            now=clock(),
            open=open,
            watch=watch,
            deadline=deadline,
            text=text,
        )

    if story is None:
        others = _under_way(ledger, contract)
        if others and not build.fresh:
            other = others[0]
            raise EvidenceError(
                f"run {other.run} of this contract is {other.state.status.replace('_', ' ')} on "
                f"{other.leg.name}: two builds cannot be promoted at once",
                hint=f"go on with it, roll it back (servanda promotion rollback {other.run}), "
                f"or begin anew "
                "with --fresh, which rolls it back",
            )
        first = seen(course[0], "")
        _refuse_known(ledger, run_name(contract, first.key), root)
        for other in others:
            reason = f"run {run_name(contract, first.key)} begins"
            taken = take_back(ledger, other, actor=actor, reason=reason, now=clock())
            stepped(Step(taken))  # told before the new run is: its route is the older one
        prints = first.verdict.circumstances.fingerprints
        story = open_run(ledger, contract, first.key, course, prints, actor=actor, now=clock())
        _refuse_later(ledger, contract, story)
        finding = found(contract, course[0], first.verdict)
        story = look_at(ledger, story, finding, actor=actor, now=clock())
        stepped(Step(story, first))
        if story.state.leg == 0:
            return story
    elif not story.looks:
        _refuse_later(ledger, contract, story)
    while not story.state.ended and not (until is not None and story.reached(until)):
        before = story.state.leg, story.state.span
        step = _step(contract, ledger, story, seen, actor, clock)
        story = step.story
        stepped(step)
        if (story.state.leg, story.state.span) == before or (deadline and deadline()):
            break
    return story


def _step(
    contract: Contract,
    ledger: Ledger,
    story: Story,
    seen: Callable[[Leg, str], Looked],
    actor: str,
    clock: Callable[[], float],
) -> Step:
    """One look at the leg where a run stands; a measurement that fails is a finding as well."""
    leg = story.leg
    looked, error = None, ""
    try:
        looked = seen(leg, story.run)
        finding = found(contract, leg, looked.verdict)
        finding = replace(finding, key=looked.key)
    except (ContractError, Interrupted, LedgerError, Occupied):
        raise  # none of them is a measurement that failed
    except ServandaError as failed:
        error = str(failed)
        first = failed.problems[0]
        at = f"{first.where}: " if first.where else ""
        finding = Finding(leg.name, error=f"{at}{first.message}")
    story = refreshed(ledger, story)
    if story.state.ended or leg_of(story.course, story.state).name != leg.name:
        return Step(story, looked, error)  # a person moved it meanwhile
    return Step(look_at(ledger, story, finding, actor=actor, now=clock()), looked, error)


def _begun(contract: Contract, root: Path, attempt: int, ledger: Ledger) -> Story | None:
    """The run of what a run directory was begun with, if it is in the ledger.

    Raises:
        EvidenceError: it was begun with another text of the contract.
    """
    begun = RunDirectory(root, attempt).begun
    if begun is None:
        return None
    key: EvidenceKey = begun[0]
    if key.contract != contract.digest:
        raise EvidenceError(
            f"{root} holds evidence of another version of this contract: its digest was "
            f"{key.contract[:8]}, and now it is {contract.digest[:8]}",
            hint="evidence expires with its contract: restore the text, or begin anew with "
            "--fresh; servanda contract diff OLD NEW says what changed",
        )
    return story_of(ledger, run_name(contract, key))


def _under_way(ledger: Ledger, contract: Contract) -> list[Story]:
    """Runs of a contract that are neither ended nor through."""
    return [
        story
        for story in stories_of(ledger, contract.metadata.name)
        if not story.state.ended and story.state.status != "completed"
    ]


def _refuse_known(ledger: Ledger, run: str, root: Path) -> None:
    """Evidence of a run that was begun from another run directory, before anything is taken back.

    Raises:
        EvidenceError: it is.
    """
    known = story_of(ledger, run)
    if known is not None:
        raise EvidenceError(
            f"run {run} of this build is in the ledger already, and was not begun from {root}: it "
            f"is {known.state.status.replace('_', ' ')} on {known.leg.name}",
            hint="go on with its own --run-dir, or without --fresh from this one",
        )


def _refuse_later(ledger: Ledger, contract: Contract, story: Story) -> None:
    """Of two builds that were begun at the same time, the one that the ledger has later.

    Whoever begins looks for others first, and then measures for a while; the ledger has an order
    for the two that did so at once.

    Raises:
        EvidenceError: it is the later one: it waits, and nothing was decided of it.
    """
    runs = [other.run for other in _under_way(ledger, contract)]
    if story.run in runs and runs[0] != story.run:
        raise EvidenceError(
            f"run {runs[0]} of this contract began before run {story.run}: two builds cannot be "
            "promoted at once",
            hint=f"wait until it has ended, or roll it back: servanda promotion rollback {runs[0]}",
        )
