# Gathering: a plan measured until more could change nothing, and the verdict on what there is.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from servanda.errors import Interrupted
from servanda.evidence import Evidence, GoldenRun, weigh, weigh_golden
from servanda.faults import signatures
from servanda.identity import EvidenceKey
from servanda.measurement import Measurement, Open, Progress, Watch, unwatched
from servanda.once import Once, weigh_once
from servanda.plan import Plan
from servanda.power import power
from servanda.rundir import RunDirectory
from servanda.schedule import Schedule
from servanda.verdict import Circumstances, Verdict, judge, out_of_time, why_stopped

Deadline = Callable[[], bool]


@dataclass(frozen=True)
class Gathered:
    """What was measured of a plan, and what it weighs.

    Args:
        once: timed requests, batches, corners of the envelope, by their source.
        fingerprints: of each kernel by its side, key by key.
    """

    key: EvidenceKey
    golden: GoldenRun | None
    once: Once
    evidence: Evidence
    fingerprints: Mapping[str, Mapping[str, str]]


def gather(
    plan: Plan,
    run: RunDirectory,
    open_: Open,
    watch: Watch | None,
    deadline: Deadline | None = None,
) -> Gathered:
    """Measure round by round, and stop when no more rounds could change what counts.

    Of a live leg every round that has closed is weighed: what users were answered happened,
    and a guard speaks at every look.

    Args:
        deadline: whether the time is over; no round starts after that.

    Raises:
        MeasurementError: an engine, a worker or the disk failed, or identity was refused.
        Interrupted: Ctrl-C; what was measured is kept.
    """
    watch = watch or unwatched
    try:
        with Measurement(plan, run, open_, watch) as measurement:
            golden = measurement.golden()
            once = measurement.once()
            evidence = weigh_once(plan, measurement.key, once)
            if golden:
                evidence += weigh_golden(plan, measurement.key, golden)
            for schedule in plan.schedules:
                evidence += _until_decided(plan, measurement, evidence, schedule, watch, deadline)
            fingerprints = {s: d.fingerprint for s, d in measurement.descriptions.items()}
            return Gathered(measurement.key, golden, once, evidence, fingerprints)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; what was measured is kept in {run.path}",
            hint="the same command goes on from there",
        ) from None


def concluded(
    plan: Plan,
    evidence: Evidence,
    circumstances: Circumstances = Circumstances(),  # noqa: B008 - frozen
    deadline: Deadline | None = None,
) -> Verdict:
    """The verdict on evidence, with why it ended and which faults it would have caught."""
    verdict = judge(plan, evidence)
    verdict = replace(
        verdict,
        circumstances=replace(circumstances, stopped=why_stopped(plan, evidence, verdict)),
        power=power(plan, evidence, signatures.catalogue()),
    )
    return out_of_time(verdict) if deadline is not None and deadline() else verdict


def _until_decided(
    plan: Plan,
    measurement: Measurement,
    before: Evidence,
    schedule: Schedule,
    watch: Watch,
    deadline: Deadline | None,
) -> Evidence:
    """A workload's rounds, as many as it takes, and as the time allows."""
    name = schedule.name
    what = "prompt groups" if len(plan.schedules) == 1 else f"prompt groups of {name}"
    found = Evidence(before.key, before.plan)
    arrived = schedule.rounds * schedule.workload.round
    watch(Progress(what, 0, arrived if plan.live else schedule.first))
    if deadline is not None and deadline():
        return found
    for measured in measurement.rounds(schedule):
        found += weigh(plan, before.key, [measured])
        launched = sum(r.groups for r in found.closed(name))
        if plan.live:
            watch(Progress(what, launched, arrived))
        else:
            look = judge(plan, before + found, intervals=False)
            total = min(launched + (look.more_of(name) or 0), schedule.last)
            watch(Progress(what, launched, total))
            if launched >= schedule.first and look.decided_on(name):
                break
            if launched >= max(schedule.first, schedule.last // 10) and look.broken_on(name):
                break  # slices that are near their limits cannot mend it
        if deadline is not None and deadline():
            break
    return found
