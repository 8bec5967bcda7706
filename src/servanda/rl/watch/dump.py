# A growing dump of a trainer: each new step is judged as a separate realised claim.
#
# A step is complete once the next has begun, or once none of its files has changed between two
# polls, so that in-place writers and writers of one file per rank are not cut off.  Steps are read
# once; only the first ones are read twice, because they define the slices.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Any

from servanda.contract.model import WHOLE, Contract
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.escalation import actions_of
from servanda.report.cell_text import REALISED
from servanda.rl.dumps.checks import Soundness, of_step
from servanda.rl.dumps.formats import FORMATS, Dump, Refused, open_dump
from servanda.rl.dumps.statistics import (
    DumpStatistics,
    Measures,
    StepPart,
    StepSummation,
    alike,
    data_lines,
    sides,
)
from servanda.rl.dumps.storage import answering, place
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.blocks import blocks, paired
from servanda.rl.steps.causes import FirstSequences, RunCauses
from servanda.rl.steps.contract import HEAD_TOKENS, Counts, Labels
from servanda.rl.steps.drift import ENDS, RunEnds
from servanda.rl.steps.judge import StepJudge, StepSums
from servanda.rl.trend.changes import TREND, chart_for
from servanda.rl.watch.step import WatchedStep
from servanda.runner.load import read


@dataclass(frozen=True)
class WatchOptions:
    """The options for following a path; None: detected.

    Args:
        reference: of good runs, which the steps are compared with.
    """

    path: Path
    format: str | None = None
    preset: str | None = None
    contract: Path | None = None
    unsafe_pickles: bool = False
    reference: Path | None = None


@dataclass(frozen=True)
class StepContract:
    """The contract of each step, fixed at the first.

    Args:
        text: text of the contract.
        why: the reason for the preset.
        labels: labels of sequences, so that every step has the same cells.
        left_out: the reasons for omitted slices.
        window: number of steps that an undecided slice is judged on together.
    """

    text: str
    contract: Contract
    preset: str
    why: str
    labels: tuple[Labels, ...]
    window: int = 1
    left_out: tuple[str, ...] = ()

    def measures(self, path: Path) -> Measures:
        """The measures of every step, with all labels of the head and so the same cells."""
        rows = {labels: row for row, labels in enumerate(self.labels)}
        return DumpStatistics(self.contract, str(path), rows).measures


def fixed(
    options: WatchOptions, own: tuple[str, Contract] | None, dump: Dump, steps: Sequence[int]
) -> StepContract | None:
    """Preset, slices and labels, from counts of the first readable steps.

    Args:
        own: the user's contract and its text, if any.

    Returns:
        None if no step can be read.
    """
    counts, counted, tokens = Counts(), 0, 0
    left: tuple[str, ...] = ()
    rows: dict[Labels, None] = {}
    for step in steps[:ENDS]:
        if tokens >= HEAD_TOKENS:
            break
        try:
            for block in blocks(dump.of([step]).read()):
                pair = paired(block, 0)
                counts.add(pair)
                named = [[(name, v) for v in pair.labels[name]] for name in sorted(pair.labels)]
                rows.update(dict.fromkeys(zip(*named, strict=True)))
                tokens += len(block.token_N)
            counted += 1
        except (EvidenceError, MeasurementError, OSError):
            continue  # reported at its judgement
    if not counted:
        return None
    if own is not None:
        window = of_run.MOST_STEPS  # the sizes of user-defined slices are unknown
        text, contract = own
        preset, why = contract.metadata.name, "as asked"
    else:
        preset, why = of_run.chosen(options.preset, dump.about, counts)
        window, rules, left = of_run.run_slices(counts, of_run.needed(preset), counted)
        name = of_run.contract_name(options.path)
        text, contract = of_run.contract_of(preset, name, rules, filtered=True)
    values = DumpStatistics(contract, str(options.path)).values
    known = (tuple((n, v) for n, v in row if v in values.get(n, ())) for row in rows)
    return StepContract(text, contract, preset, why, tuple(dict.fromkeys(known)), window, left)


class _NotWhole(Exception):  # noqa: N818 - a step that is being written
    pass


class DumpSource:
    """The steps of a dump, each judged once it is complete.

    Raises:
        ContractError: no such format, preset or contract.
    """

    kind = "dump"

    def __init__(self, options: WatchOptions) -> None:
        if options.preset is not None:
            of_run.preset_of(options.preset)
        self.options = options
        self.missing = self.left = ""
        self._own = None if options.contract is None else of_run.of_a_trainer(options.contract)
        self._chart = chart_for(options.reference, self._own and self._own[1])
        self._values: dict[int, dict[str, float]] = {}  # step -> its numbers, for a restart
        self._contract: StepContract | None = None
        self._measures: Measures | None = None
        self._judge: StepJudge | None = None
        self._causes: RunCauses | None = None
        self._format = ""
        # step -> stamp of its files
        self._judged: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._cut: dict[int, str] = {}
        self._ends = RunEnds()
        self._sound = Soundness()  # of all steps
        self._odd: dict[str, tuple[int, int]] = {}  # check -> (odd, total) over all steps

    def poll(self, *, final: bool) -> Iterator[WatchedStep]:
        dump = self._opened()
        if dump is None:
            return
        self.missing, self._format = "", dump.format
        try:
            stamps = {step: _stamp(dump, step) for step in dump.steps}
        except OSError:
            return  # a file was moved during the poll
        before, self._before = self._before, stamps
        newest = max(stamps)
        due = [
            step
            for step, stamp in sorted(stamps.items())
            if stamp != self._judged.get(step)
            and (final or stamp == before.get(step) or (step < newest and step not in self._judged))
            and (step < newest or stamp != self._cut.get(step))
        ]
        if self._contract is None:
            self._fix(fixed(self.options, self._own, dump, due))
        for step in due:
            try:
                judged = self._step(dump, step, last=step == newest)
            except _NotWhole as cut:
                self._cut[step] = stamps[step]
                self.left = f"step {step} is not whole and is left alone: {cut}"
                continue
            self._judged[step] = stamps[step]
            if self.left.startswith(f"step {step} "):
                self.left = ""
            yield judged

    def _opened(self) -> Dump | None:
        try:
            with answering(self.options.path):
                return self._found()
        except MeasurementError as error:
            self.missing = error.problems[0].message
        except OSError:
            pass  # a file was moved while the folder was listed: the next poll will see it
        return None

    def _found(self) -> Dump | None:
        path, format_ = place(self.options.path), self.options.format
        try:
            return open_dump(path, format_, unsafe_pickles=self.options.unsafe_pickles)
        except ContractError as error:
            names = FORMATS if format_ is None else [format_]
            if format_ is not None and format_ not in FORMATS:
                raise
            # there is a dump, not an empty folder
            folder = path if path.is_dir() else path.parent
            found = [FORMATS[name].sniff(folder) for name in names] if path.exists() else []
            if any(dump is not None and dump.sure for dump in found):
                raise
            self.missing = error.problems[0].message
        return None

    def _step(self, dump: Dump, step: int, *, last: bool) -> WatchedStep:
        """Judge one step.

        Raises:
            _NotWhole: the last step of a dump, which may still be being written.
        """
        again, own, path = step in self._judged, dump.of([step]), self.options.path
        command = f"servanda check {quote(str(path))} --steps "
        sound, aged, sums, sample = Soundness(), False, None, FirstSequences()
        if self._measures is not None:
            sums = StepSummation(self._measures, step, len(self._judged) + 1)
        try:
            for block in blocks(own.read()):
                aged = aged or "staleness" in block.per_token
                if sums is not None:
                    sound.add(block)
                    sums.add(block)
                    sample.add(block)
        except (EvidenceError, MeasurementError, OSError) as error:
            why = str(error).split("\n")[0]
            if last and (own.refused.truncated or not isinstance(error, EvidenceError)):
                raise _NotWhole(why) from None
            return WatchedStep(step, "error", why=why, command=f"{command}{step}", again=again)
        # fixed at the first readable step
        assert self._judge is not None and self._causes is not None and sums is not None
        plan, part = self._judge.plan, sums.close()
        errors = self._errors(part, sound, own.refused, again=again)
        judged = self._judge.add(StepSums(step, part.weighed, part.drawn), errors)
        if self._chart is not None:
            self._values[step] = {} if judged.errors else part.scalars.values
            judged = judged.compared(self._chart.add(step, self._values[step]))
        if not judged.errors:
            self._ends.add(part.sums)
        cells = judged.verdict.cells
        broken = [c for c in cells if c.enforced and c.outcome == "violated"]
        red = [cell.slice for cell in broken if cell.section != TREND]
        since = judged.first(red)
        command += f"{step}" if since == step else f"{since}:{step}"
        command += " --mask masks" if any(name != WHOLE for name in red) else ""
        advice = None
        if not judged.errors:
            self._causes.begin(sample.parts)
            advice = self._causes.of(cells, step, sample.parts, part.trained)
        return WatchedStep(
            step,
            judged.quick.outcome,
            cells,
            part.trained,
            part.sequences,
            why=judged.errors[0] if judged.errors else "",
            advice=advice,
            trend=None if self._chart is not None else self._ends.trend(),
            staleness=part.staleness if aged else None,
            actions=actions_of(plan.contract, cells),
            command=command,
            again=again,
            needs_tokens=judged.quick.needs_tokens,
            judged=judged.quick.tokens,
        )

    def _fix(self, contract: StepContract | None, number: int = 0) -> None:
        """Fix the cells of the run."""
        self._contract = contract
        if contract is not None:
            self._measures = contract.measures(self.options.path)
            self._judge = StepJudge(self._measures.plan, contract.window, number=number)
            self._causes = RunCauses(
                self._measures.plan, self._measures.limit, str(self.options.path)
            )

    def _errors(
        self, part: StepPart, sound: Soundness, refused: Refused, *, again: bool
    ) -> list[str]:
        """Why the data of a step is no evidence."""
        assert self._judge is not None
        agreement = part.weighed.agreement
        found = sound.findings_after(self._sound)
        alone = (*found, *sides(self._judge.plan.contract, agreement))
        if not again:
            self._sound.join(sound)  # content that a later step may not repeat
            counts = {
                finding.check: finding.odd[:2] for finding in alone if finding.odd is not None
            }
            for name, (odd, whole) in {**counts, "sides": alike(agreement)}.items():
                before = self._odd.get(name, (0, 0))
                self._odd[name] = before[0] + odd, before[1] + whole
        findings = tuple(of_step(f, self._odd.get(f.check, (0, 0))) for f in alone)
        lines = data_lines(findings, refused, part.sequences)
        return [line.text for line in lines if line.level == "error"]

    def head(self) -> tuple[str, ...]:
        if self._contract is None:
            return ()
        of, contract = self._contract, self._contract.contract
        named = [rule.name for rule in contract.slices]
        show = f"servanda contract presets --show {of.preset}"
        limits = f"preset   {of.preset}, {of.why}   (its limits: {show})"
        if self._own is not None:
            limits = f"contract {self.options.contract}"
        each = f"steps    each judged alone at confidence {contract.confidence:g}"
        if of.window > 1:
            each += f"; a slice that one step does not decide, with the last {of.window}"
        against = [] if self._chart is None else [f"change   {self._chart.promise}"]
        return (
            f"found    {FORMATS[self._format].framework} in {self.options.path}",
            limits,
            f"slices   {', '.join(named) or 'none: too few tokens per step, or all alike'}",
            *(f"         {note}" for note in of.left_out),
            each,
            f"         {REALISED}",
            *against,
        )

    def to_plain(self) -> dict[str, Any]:
        of = self._contract
        terms = of and {
            "text": of.text,
            "preset": of.preset,
            "why": of.why,
            "window": of.window,
            "left_out": of.left_out,
            "kinds": of.labels,
        }
        return {
            "format": self._format,
            "asked": self._wanted(),
            "terms": terms,
            "judged": [*self._judged.items()],
            "odd": self._odd,
            "digests": [*self._sound.steps.items()],
            "values": [*self._values.items()],
            "number": 0 if self._judge is None else self._judge.number,
            **self._ends.to_plain(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        if state["asked"] != self._wanted():
            raise ContractError(
                "the state was kept with another --as, --preset, --contract or --reference",
                hint="repeat the options of that watch, or name another --state-file",
            )
        self._format = state["format"]
        if (terms := state["terms"]) is not None:
            contract = StepContract(
                terms["text"],
                read(terms["text"].encode(), "the kept contract", self.options.path),
                terms["preset"],
                terms["why"],
                tuple(tuple((n, v) for n, v in labels) for labels in terms["kinds"]),
                terms["window"],
                tuple(terms["left_out"]),
            )
            self._fix(contract, state["number"])
        self._judged = dict(state["judged"])
        self._before = dict(self._judged)
        self._odd = {name: (odd, whole) for name, (odd, whole) in state["odd"].items()}
        self._sound = Soundness()
        self._sound.steps.update(state["digests"])
        self._ends = RunEnds.from_plain(state)
        self._values = dict(state["values"])
        for step, values in self._values.items():
            if self._chart is not None:
                self._chart.add(step, values)

    def _wanted(self) -> list[str | None]:
        """The options that a state depends on."""
        of = self.options
        wanted = [of.format, of.preset, of.contract and str(of.contract)]
        return [*wanted, self._chart.reference.digest] if self._chart is not None else wanted


def _stamp(dump: Dump, step: int) -> str:
    """A stamp of a step's files, which changes if any of them does."""
    digest = blake2b(digest_size=8)
    for file in dump.detection.files:
        if file.step == step:
            about = file.path.stat()
            digest.update(repr((file.name, about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()
