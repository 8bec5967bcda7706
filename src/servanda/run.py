# The chain, from files to a verdict: contract -> plan -> pairs -> evidence -> verdict.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from servanda import language
from servanda import plan as planning
from servanda.contract import Contract, Golden, Kernel, NamedWorkload, Workload
from servanda.corpus import Corpus
from servanda.engines import engine_names, open_engine
from servanda.engines.base import Engine
from servanda.engines.worker import spawn
from servanda.errors import ContractError, Interrupted, Problem
from servanda.evidence import Evidence, GoldenRun, Round, weigh_golden
from servanda.evidence import weigh as weigh_rounds
from servanda.faults import FAULTS, signatures
from servanda.identity import EvidenceKey
from servanda.measurement import Measurement, Open, Progress, Watch, unwatched
from servanda.once import Once, weigh_once
from servanda.plan import Plan
from servanda.power import power
from servanda.rounds import read_rounds
from servanda.rundir import RunDirectory, opened
from servanda.schedule import Schedule
from servanda.verdict import Circumstances, Verdict, judge, out_of_time, why_stopped

RUNS = Path("runs")
T = TypeVar("T", Workload, NamedWorkload, Golden)


def in_process(kernel: Kernel, _: str) -> Engine:
    """Open an engine without a worker; for engines that are pure Python, and for tests."""
    return open_engine(kernel)


def load(path: str | Path) -> Contract:
    """Read a contract; the files it names are found beside it.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ContractError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="give the path of a .kernelcontract.yaml file",
        ) from None
    return read(data, str(path), path.parent)


def read(data: bytes, name: str, folder: Path) -> Contract:
    """A contract from its bytes; the files it names are found in the folder.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ContractError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}",
            hint="save it as UTF-8",
        ) from None
    contract, _ = language.parse(text, name, engines=engine_names(), faults=[*FAULTS])
    contract = beside(contract, folder)
    missing = [
        Problem(
            f"there is no {name}",
            contract.where(*place),
            "paths of a contract start from the contract's own folder",
        )
        for place, name in [*_corpora(contract), *_models(contract)]
        if not Path(name).exists()
    ]
    missing += _fault_values(contract)
    if missing:
        raise ContractError.all(missing)
    return contract


def _fault_values(contract: Contract) -> Iterator[Problem]:
    """A fault's value is checked here: lint knows the names of faults, and no more."""
    kernels = {("kernels", side): getattr(contract.kernels, side) for side in ("train", "infer")}
    for place, kernel in (*kernels.items(), (("stable",), contract.stable)):
        for name, value in ((kernel and kernel.fault) or {}).items():
            problem = FAULTS[name].problem(value)
            if problem is not None:
                yield replace(problem, where=contract.where(*place, "fault", name))


def _corpora(contract: Contract) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Place and name of every file of texts; a trainer's workload has none."""
    given = contract.workloads or {}
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    parts: list[tuple[tuple[str | int, ...], Workload | Golden | None]] = [
        (("workload",), contract.workload),
        *((("workloads", name), workload) for name, workload in named),
        (("golden",), contract.golden),
    ]
    yield from (
        ((*place, "prompts"), part.prompts) for place, part in parts if part and part.prompts
    )


def _models(contract: Contract) -> Iterator[tuple[tuple[str, ...], str]]:
    for side in ("train", "infer"):
        kernel: Kernel = getattr(contract.kernels, side)
        # an engine without a model is for the engine to refuse
        if kernel.model is not None:
            yield ("kernels", side, "model"), kernel.model


def beside(contract: Contract, folder: Path) -> Contract:
    """The contract with its paths resolved against its own folder."""

    def kernel(k: Kernel) -> Kernel:
        return k.model_copy(update={"model": str(folder / k.model)}) if k.model else k

    changes: dict[str, object] = {
        "kernels": contract.kernels.model_copy(
            update={s: kernel(getattr(contract.kernels, s)) for s in ("train", "infer")}
        )
    }
    if contract.stable:
        changes["stable"] = kernel(contract.stable)

    def texts(part: T) -> T:
        prompts = str(folder / part.prompts) if part.prompts else ""
        return part.model_copy(update={"prompts": prompts})

    if contract.workload:
        changes["workload"] = texts(contract.workload)
    if contract.golden:
        changes["golden"] = texts(contract.golden)
    if isinstance(contract.workloads, Mapping):
        changes["workloads"] = {name: texts(w) for name, w in contract.workloads.items()}
    elif contract.workloads:
        changes["workloads"] = tuple(map(texts, contract.workloads))
    return contract.model_copy(update=changes)


def compile(contract: Contract, *, attempt: int = 1) -> Plan:  # noqa: A001 - the field's word
    """Fix everything that is decided before the first token: cells, prompts, seeds, alpha.

    Raises:
        ContractError: an empty slice, a limit out of reach, a corpus that is none, or tokens
            that only a trainer has.
    """
    return planning.make_plan(contract, *corpora(contract), attempt=attempt)


def corpora(contract: Contract) -> tuple[dict[str, Corpus], Corpus | None]:
    """The texts of each workload, and the golden ones.

    Raises:
        ContractError: a corpus that is none, or tokens that only a trainer has.
    """
    if problem := not_measured_here(contract):
        raise ContractError.all([problem])
    found = {name: _corpus(w.prompts) for name, w in contract.all_workloads.items() if w.prompts}
    return found, _corpus(contract.golden.prompts) if contract.golden else None


def not_measured_here(contract: Contract) -> Problem | None:
    """Why a contract that reads well cannot be measured offline."""
    for name, workload in contract.all_workloads.items():
        if workload.source == "trainer":
            place = ("workload",) if contract.workload is not None else ("workloads", name)
            return Problem(
                "the tokens of this contract come from a trainer as it runs: there is nothing "
                "to measure offline",
                contract.where(*place),
                "name engines and prompts to measure the kernels here",
            )
    return None


def _corpus(name: str) -> Corpus:
    try:
        return Corpus.parse(Path(name).read_bytes().decode("utf-8-sig"), name)
    except OSError as error:
        raise ContractError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ContractError(f"{name} is not UTF-8 text: {error.reason}") from None


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
) -> Verdict:
    """Measure and judge a contract at the offline stage.

    Args:
        run_dir: where to measure; default runs/NAME.  An attempt there is continued.
        fresh: open a new attempt instead, judged at a smaller alpha; an attempt that was
            interrupted is finished first.
        watch: called with Progress.
        deadline: whether the time is over; no round starts after that.

    Raises:
        ContractError, MeasurementError, Interrupted: as load, compile and measure do.
    """
    text = ""
    if not isinstance(contract, Contract):
        path, contract = Path(contract), load(contract)
        text = path.read_text(encoding="utf-8-sig")
    root = Path(run_dir) if run_dir is not None else RUNS / contract.metadata.name
    plan = compile(contract)  # what is wrong with the text is said before anything is touched
    with opened(root, fresh=fresh) as run:
        plan = replace(plan, attempt=run.attempt)
        resumed, began = run.begun is not None, time.monotonic()
        *_, evidence, fingerprints = _measured(plan, run, open, watch, deadline)
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
