# The chain, from files to a verdict: contract -> plan -> pairs -> evidence -> verdict.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from servanda.contract import Contract, Kernel
from servanda.engines import open_engine
from servanda.engines.base import Engine
from servanda.engines.recorded import Recorder
from servanda.engines.recorded_file import Recording
from servanda.engines.worker import spawn
from servanda.errors import Interrupted, MeasurementError
from servanda.evidence import Evidence, GoldenRun, Round, weigh_golden
from servanda.evidence import weigh as weigh_rounds
from servanda.faults import signatures
from servanda.identity import EvidenceKey
from servanda.loading import compile, load
from servanda.measurement import Measurement, Open, Progress, Watch, unwatched
from servanda.once import Once, weigh_once
from servanda.plan import Plan
from servanda.power import power
from servanda.rounds import read_rounds
from servanda.rundir import RunDirectory, opened
from servanda.schedule import Schedule
from servanda.verdict import Circumstances, Verdict, judge, out_of_time, why_stopped

RUNS = Path("runs")


def in_process(kernel: Kernel, _: str) -> Engine:
    """Open an engine without a worker; for engines that are pure Python, and for tests."""
    return open_engine(kernel)


@dataclass(frozen=True)
class Pairs:
    """What was measured: the golden texts, and rounds that are read from disk one by one.

    Args:
        once: timed requests, batches, corners of the envelope, by their source.
    """

    key: EvidenceKey
    golden: GoldenRun | None
    rounds: Callable[[], Iterator[Round]]
    once: Once = field(default_factory=dict)


def measure(
    plan: Plan, run_dir: str | Path, *, open: Open = spawn, watch: Watch | None = None
) -> Pairs:
    """Measure a plan until all is decided or its size is reached; resumes what is there.

    Raises:
        MeasurementError: an engine, a worker or the disk failed, or identity was refused.
        Interrupted: Ctrl-C; what was measured is kept.
    """
    with opened(Path(run_dir), attempt=plan.attempt) as run:
        key, golden, once, _, _ = _measured(plan, run, open, watch)
    return Pairs(key, golden, lambda: read_rounds(plan, run), once)


def weigh(plan: Plan, pairs: Pairs) -> Evidence:
    """Everything that was measured, as evidence."""
    evidence = weigh_rounds(plan, pairs.key, pairs.rounds())
    evidence += weigh_once(plan, pairs.key, pairs.once)
    return evidence + weigh_golden(plan, pairs.key, pairs.golden) if pairs.golden else evidence


def check(
    contract: str | Path | Contract,
    *,
    run_dir: str | Path | None = None,
    fresh: bool = False,
    open: Open = spawn,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    record: str | Path | None = None,
    record_side: str = "infer",
) -> Verdict:
    """Measure and judge a contract at the offline stage.

    Args:
        run_dir: where to measure; default runs/NAME.  An attempt there is continued.
        fresh: open a new attempt instead, judged at a smaller alpha; an attempt that was
            interrupted is finished first.
        watch: called with Progress.
        deadline: whether the time is over; no round starts after that.
        record: a file for all that one kernel answers, which engine `recorded` replays; it is
            there once the verdict is, and needs an attempt that nothing was measured in yet.
        record_side: which kernel: infer, train or stable.

    Raises:
        ContractError, MeasurementError, Interrupted: as load, compile and measure do.
    """
    text = ""
    if not isinstance(contract, Contract):
        path, contract = Path(contract), load(contract)
        text = path.read_text(encoding="utf-8-sig")
    root = Path(run_dir) if run_dir is not None else RUNS / contract.metadata.name
    plan = compile(contract)  # what is wrong with the text is said before anything is touched
    if record is not None and record_side == "stable" and plan.stable is None:
        raise MeasurementError(
            "the contract measures no stable kernel, so there is nothing to record of it",
            hint="record infer or train",
        )
    opening = open
    with opened(root, fresh=fresh) as run, ExitStack() as stack:
        plan = replace(plan, attempt=run.attempt)
        if record is not None:
            if run.begun is not None:
                raise MeasurementError(
                    f"{run.path} was begun before: a recording of the rest would lack its rounds",
                    hint="record in another --run-dir, or in a new attempt: --fresh",
                )
            opening = stack.enter_context(_recording(Path(record), record_side, open))
        resumed, began = run.begun is not None, time.monotonic()
        *_, evidence, fingerprints = _measured(plan, run, opening, watch, deadline)
        verdict = judge(plan, evidence)
        circumstances = Circumstances(
            fingerprints,
            # what an earlier process took is not known
            seconds=None if resumed else time.monotonic() - began,
            stopped=why_stopped(plan, evidence, verdict),
            contract_text=text,
        )
        verdict = replace(
            verdict,
            circumstances=circumstances,
            power=power(plan, evidence, signatures.catalogue()),
        )
        if deadline is not None and deadline():
            verdict = out_of_time(verdict)
        run.finish(json.dumps(verdict.to_dict(), indent=1))
    return verdict


@contextmanager
def _recording(path: Path, side: str, open_: Open) -> Iterator[Open]:
    """Open kernels, and keep what one side answers; the file is there if all went well."""
    recording = Recording(path)

    def opened_(kernel: Kernel, named: str) -> Engine:
        engine = open_(kernel, named)
        return Recorder(engine, recording) if named == side else engine

    try:
        yield opened_
        recording.finish()
    finally:
        recording.discard()


def _measured(
    plan: Plan,
    run: RunDirectory,
    open_: Open,
    watch: Watch | None,
    deadline: Callable[[], bool] | None = None,
) -> tuple[EvidenceKey, GoldenRun | None, Once, Evidence, Mapping[str, Mapping[str, str]]]:
    """Measure round by round, and stop when no more rounds could change what counts."""
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
            return measurement.key, golden, once, evidence, fingerprints
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; what was measured is kept in {run.path}",
            hint="the same command goes on from there",
        ) from None


def _until_decided(
    plan: Plan,
    measurement: Measurement,
    before: Evidence,
    schedule: Schedule,
    watch: Watch,
    deadline: Callable[[], bool] | None,
) -> Evidence:
    """A workload's rounds, as many as it takes, and as the time allows."""
    name = schedule.name
    what = "prompt groups" if len(plan.schedules) == 1 else f"prompt groups of {name}"
    watch(Progress(what, 0, schedule.first))
    found = Evidence(before.key, before.plan)
    if deadline is not None and deadline():
        return found
    for measured in measurement.rounds(schedule):
        found += weigh_rounds(plan, before.key, [measured])
        look = judge(plan, before + found, intervals=False)
        launched = sum(r.groups for r in found.closed(name))
        watch(Progress(what, launched, min(launched + (look.more_of(name) or 0), schedule.last)))
        if launched >= schedule.first and look.decided_on(name):
            break
        if launched >= max(schedule.first, schedule.last // 10) and look.broken_on(name):
            break  # slices that are near their limits cannot mend it
        if deadline is not None and deadline():
            break
    return found


__all__ = [
    "Pairs",
    "check",
    "compile",
    "in_process",
    "judge",
    "load",
    "measure",
    "weigh",
]
