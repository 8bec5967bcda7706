# The pipeline from files to a verdict: contract -> plan -> pairs -> evidence -> verdict.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Contract, Kernel
from servanda.engines import open_engine
from servanda.engines.base import Engine
from servanda.errors import MeasurementError
from servanda.judgement.evidence import Evidence, GoldenRun, Once, Round, weigh_golden, weigh_once
from servanda.judgement.evidence import weigh as weigh_rounds
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.runner.load import compile, load

# Arrow, workers and run directories are imported when something is measured: a program that takes
# these names to judge what it has starts in half the time
if TYPE_CHECKING:
    from servanda.runner.measurement import Open, Watch

RUNS = Path("runs")


def spawn(kernel: Kernel, side: str) -> Engine:
    """Begin to open a kernel in a child process: `worker.spawn`."""
    from servanda.engines import worker

    return worker.spawn(kernel, side)


def in_process(kernel: Kernel, _: str) -> Engine:
    """Open an engine without a worker; for engines that are pure Python, and for tests."""
    return open_engine(kernel)


@dataclass(frozen=True)
class Pairs:
    """The measurements: the golden texts, and rounds that are read from disk one by one.

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
    """Measure a plan until all is decided or its size is reached; continues existing data.

    Raises:
        MeasurementError: an engine, a worker or the disk failed, or identity was refused.
        Interrupted: Ctrl-C; measurements are kept.
    """
    from servanda.runner.round_files import read_rounds
    from servanda.runner.run_directory import opened
    from servanda.runner.sequential import gather

    with opened(Path(run_dir), attempt=plan.attempt) as run:
        measured = gather(plan, run, open, watch)
    return Pairs(measured.key, measured.golden, lambda: read_rounds(plan, run), measured.once)


def weigh(plan: Plan, pairs: Pairs) -> Evidence:
    """Compute the evidence from all measurements."""
    evidence = weigh_rounds(plan, pairs.key, pairs.rounds())
    evidence += weigh_once(plan, pairs.key, pairs.once)
    return evidence + weigh_golden(plan, pairs.key, pairs.golden) if pairs.golden else evidence


def check(
    contract: str | Path | Contract,
    *,
    text: str = "",
    run_dir: str | Path | None = None,
    fresh: bool = False,
    open: Open = spawn,
    watch: Watch | None = None,
    deadline: Callable[[], bool] | None = None,
    record: str | Path | None = None,
    record_side: str = "infer",
    ladder: bool = False,
) -> Verdict:
    """Measure and judge a contract at the offline stage.

    Args:
        text: text of a contract that is given as a Contract, for reports; that of a file is read.
        run_dir: directory of the measurements; default runs/NAME.  An attempt there is continued.
        fresh: open a new attempt instead, judged at a smaller alpha; an interrupted attempt is
            finished first.
        watch: callback with Progress.
        deadline: whether the time is over; no round starts after that.
        record: a file for all results of one kernel, which the engine `recorded` replays; it is
            written with the verdict, and needs an attempt without measurements.
        record_side: the recorded kernel: infer, train or stable.
        ladder: measure standard formats of the reference model beside the candidate.

    Raises:
        ContractError, MeasurementError, Interrupted: as in load, compile and measure.
    """
    from servanda.engines import worker
    from servanda.runner.host_memory import refuse_oversize
    from servanda.runner.measurement import unwatched
    from servanda.runner.round_advice import advised
    from servanda.runner.round_files import read_rounds
    from servanda.runner.run_directory import opened
    from servanda.runner.sequential import concluded, gather, named

    if not isinstance(contract, Contract):
        path, contract = Path(contract), load(contract)
        text = path.read_text(encoding="utf-8-sig")
    root = Path(run_dir) if run_dir is not None else RUNS / contract.metadata.name
    plan = compile(contract)  # errors of the text are raised before any change on disk
    if record is not None and record_side == "stable" and plan.stable is None:
        raise MeasurementError(
            "the contract measures no stable kernel, so there is nothing to record of it",
            hint="record infer or train",
        )
    if ladder:
        from servanda.runner.precision_ladder import refuse_ladder

        refuse_ladder(contract)
    if open in (spawn, worker.spawn):  # other kernels run elsewhere, or are open already
        refuse_oversize(plan.kernels)
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
        if watch is not None and run.attempt > 1:
            watch = named(watch, f"attempt {run.attempt}")
        measured = gather(plan, run, opening, watch, deadline)
        verdict = concluded(plan, measured, text, deadline)
        verdict = advised(plan, read_rounds(plan, run), verdict)
        if ladder:
            from servanda.runner.precision_ladder import measured_ladder

            rungs = measured_ladder(plan, open, watch or unwatched)
            around = replace(verdict.circumstances, rungs=rungs)
            verdict = replace(verdict, circumstances=around)
        run.finish(verdict.to_dict())
    return verdict


@contextmanager
def _recording(path: Path, side: str, open_: Open) -> Iterator[Open]:
    """Open kernels, and record one side; the file is written on success."""
    from servanda.engines.recorded import Recorder, Recording

    recording = Recording(path)

    def opened_(kernel: Kernel, named: str) -> Engine:
        engine = open_(kernel, named)
        return Recorder(engine, recording) if named == side else engine

    try:
        yield opened_
        recording.finish()
    finally:
        recording.discard()
