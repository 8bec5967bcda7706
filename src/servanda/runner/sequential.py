# Sequential measurement: until more data could not change the outcome; and the verdict.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from servanda.contract.identity import EvidenceKey, differences
from servanda.engines.faults import signatures
from servanda.errors import Interrupted
from servanda.judgement.breakdown import EValuePath
from servanda.judgement.evidence import Evidence, GoldenRun, Once, weigh, weigh_golden, weigh_once
from servanda.judgement.plan import Plan
from servanda.judgement.power import power
from servanda.judgement.schedule import Schedule
from servanda.judgement.verdict import Circumstances, Verdict, judge
from servanda.runner.measurement import Measurement, Open, Progress, Watch, unwatched
from servanda.runner.run_directory import RunDirectory

Deadline = Callable[[], bool]
# an evaluation: workload, its prompt groups so far, and each cell's log e-values for and against
EValues = Sequence[tuple[float | None, float | None]]
Looks = Sequence[tuple[str, int, EValues]]

_PATHS = 4  # cells whose e-values are kept


@dataclass(frozen=True)
class Gathered:
    """The measurements of a plan with their evidence.

    Args:
        once: timed requests, batches, corners of the envelope, by their source.
        fingerprints: of each side's kernel, by key.
        differences: differences between the sides' files, one sentence each.
        seconds: duration; None if an earlier process measured a part, or without measurements.
        looks: the evaluations on the way, in order.
    """

    key: EvidenceKey
    golden: GoldenRun | None
    once: Once
    evidence: Evidence
    fingerprints: Mapping[str, Mapping[str, str]]
    differences: tuple[str, ...] = ()
    seconds: float | None = None
    looks: Looks = ()


def named(watch: Watch, run: str) -> Watch:
    """The same, of one of several runs."""
    return lambda p: watch(replace(p, run=f"{run}, {p.run}" if p.run else run))


def gather(
    plan: Plan,
    run: RunDirectory,
    open_: Open,
    watch: Watch | None,
    deadline: Deadline | None = None,
) -> Gathered:
    """Measure round by round, until more rounds could not change a counting outcome.

    On a live step every closed round is evaluated, because user requests have happened, and a
    validity check can fail at every evaluation.

    Args:
        deadline: whether the time is over; no round starts after that.

    Raises:
        MeasurementError: an engine, a worker or the disk failed, or identity was refused.
        Interrupted: Ctrl-C; what was measured is kept.
    """
    watch = watch or unwatched
    resumed, began = run.begun is not None, time.monotonic()
    try:
        with Measurement(plan, run, open_, watch) as measurement:
            golden = measurement.golden()
            once = measurement.once()
            evidence = weigh_once(plan, measurement.key, once)
            if golden:
                evidence += weigh_golden(plan, measurement.key, golden)
            looks: list[tuple[str, int, EValues]] = []
            for schedule in plan.schedules:
                evidence += _until_decided(
                    plan, measurement, evidence, schedule, watch, deadline, looks
                )
            descriptions = measurement.descriptions
            fingerprints = {side: d.fingerprint for side, d in descriptions.items()}
            odd = differences(descriptions["train"], descriptions["infer"])
            seconds = None if resumed else time.monotonic() - began
            key = measurement.key
            return Gathered(key, golden, once, evidence, fingerprints, odd, seconds, looks)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; what was measured is kept in {run.path}",
            hint="the same command goes on from there",
        ) from None


def concluded(
    plan: Plan, gathered: Gathered, contract_text: str, deadline: Deadline | None
) -> Verdict:
    """The verdict on evidence, with the reason of its end and its power."""
    evidence = gathered.evidence
    verdict = judge(plan, evidence)
    circumstances = Circumstances(
        gathered.fingerprints,
        gathered.seconds,
        contract_text=contract_text,
        differences=gathered.differences,
        stopped=_why_stopped(plan, evidence, verdict),
        e_values=_e_values(verdict, gathered.looks),
    )
    faults = power(plan, evidence, signatures.catalogue(), verdict.cells)
    verdict = replace(verdict, circumstances=circumstances, power=faults)
    return _out_of_time(verdict) if deadline is not None and deadline() else verdict


def _e_values(verdict: Verdict, looks: Looks) -> tuple[EValuePath, ...]:
    """The paths of the cells that decide: what is violated, farthest from its limit first; then
    what is open, and what holds."""
    order = ("violated", "error", "inconclusive", "holds")

    def rank(i: int) -> tuple[int, float]:
        cell = verdict.cells[i]
        far = abs(cell.value or 0.0) / abs(cell.limit or 1.0)
        return order.index(cell.outcome), -far if cell.outcome == "violated" else 0.0

    counted = [
        i
        for i, cell in enumerate(verdict.cells)
        if cell.enforced and cell.outcome in order and None not in (cell.e_holds, cell.e_violated)
    ]
    paths = []
    for i in sorted(counted, key=rank)[:_PATHS]:
        cell = verdict.cells[i]
        known = [
            (n, *look[i])
            for name, n, look in looks
            if name == cell.workload and None not in look[i]  # not evaluated, which is not 0
        ]
        if known:
            groups, holds, violated = zip(*known, strict=True)
            paths.append(EValuePath(cell.clause, cell.slice, groups, holds, violated))
    return tuple(paths)


def _why_stopped(plan: Plan, evidence: Evidence, verdict: Verdict) -> str:
    """The reason for the end of a run within its time: see `Circumstances.stopped`."""
    if verdict.decided:
        return "decided"
    short = [
        schedule.name
        for schedule in plan.schedules
        if sum(part.groups for part in evidence.closed(schedule.name)) < schedule.last
    ]
    if plan.live:
        return "traffic" if short else "size"
    return "broken" if any(verdict.broken_on(name) for name in short) else "size"


def _out_of_time(verdict: Verdict) -> Verdict:
    """The verdict of a run that its time ended: open cells say so; stopping is valid (law 5)."""
    if verdict.decided:
        return verdict
    over = "the time was over before this was decided"
    cells = [
        # without measurements, the cell's note about its workload is not the reason
        c.but(note=f"{over}; {c.note}" if c.note and c.n else over) if c.open else c
        for c in verdict.cells
    ]
    circumstances = replace(verdict.circumstances, stopped="time")
    return replace(verdict, cells=tuple(cells), circumstances=circumstances)


def _until_decided(
    plan: Plan,
    measurement: Measurement,
    before: Evidence,
    schedule: Schedule,
    watch: Watch,
    deadline: Deadline | None,
    looks: list[tuple[str, int, EValues]],
) -> Evidence:
    """A workload's rounds, as many as needed within the time."""
    name = schedule.name
    what = "prompt groups"
    if (n := len(plan.schedules)) > 1:
        what = f"prompt groups of {name}"
        watch = named(watch, f"workload {plan.schedules.index(schedule) + 1} of {n}")
    evidence = Evidence(before.key, before.plan)
    arrived = schedule.rounds * schedule.workload.round
    watch(Progress(what, 0, arrived if plan.live else schedule.first))
    if deadline is not None and deadline():
        return evidence
    for closed in measurement.rounds(schedule):
        evidence += weigh(plan, before.key, [closed])
        launched = sum(r.groups for r in evidence.closed(name))
        if plan.live:
            watch(Progress(what, launched, arrived))
        else:
            look = judge(plan, before + evidence, intervals=False)
            looks.append((name, launched, [(c.e_holds, c.e_violated) for c in look.cells]))
            total = min(launched + (look.more_of(name) or 0), schedule.last)
            watch(Progress(what, launched, total))
            if launched >= schedule.first and look.decided_on(name):
                break
            if launched >= max(schedule.first, schedule.last // 10) and look.broken_on(name):
                break  # open slices cannot repair it
        if deadline is not None and deadline():
            break
    return evidence
