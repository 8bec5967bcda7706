# The verdict: evidence -> holds, violated, inconclusive, or error, cell by cell.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from servanda.contract.clause import WHOLE
from servanda.contract.identity import EvidenceKey
from servanda.contract.model import EXTERNAL, Contract, Kernels
from servanda.errors import EvidenceError, MeasurementError
from servanda.judgement.breakdown import Advice, Breakdown, EValuePath, Rung
from servanda.judgement.clauses.base import Cell, CellVerdict, Interim, Outcome, worst
from servanda.judgement.clauses.fidelity import weak_guards
from servanda.judgement.evidence import Evidence, Weighed, cut_answers
from servanda.judgement.token_profile import Portrait, added
from servanda.judgement.workload_coverage import OF_A_TRAINER, uncovered
from servanda.registry import Registry
from servanda.theory.stats.agreement import ENOUGH, INFORMATIVE, Agreement
from servanda.theory.stats.alpha import shared
from servanda.traces.serialization import from_plain, to_plain

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

EXIT_CODES: Mapping[Outcome, int] = {"holds": 0, "violated": 1, "inconclusive": 3, "error": 4}
_PRECONDITION = "a precondition failed"


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of a verdict, which were not judged.

    Args:
        fingerprints: of each side's kernel, by key.
        seconds: from loading the kernels to the last round; None for a resumed run; stopped:
            "decided", "size", "time"; "traffic": waits for more traffic; or "broken": ended early,
            because open slices cannot repair a violated whole.
        contract_text: the judged YAML text.
        differences: differences between the sides' files, one sentence each.
        e_values: of the cells that matter most; empty if only the end was evaluated.
        rungs: the precision ladder, if it was measured; the candidate among them.
    """

    fingerprints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seconds: float | None = None
    stopped: str = ""
    contract_text: str = ""
    differences: tuple[str, ...] = ()
    e_values: tuple[EValuePath, ...] = ()
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True)
class Caught:
    """Whether a gate of this plan and size would have caught a fault of the catalogue.

    Args:
        by: names of the cells that would be violated, worst first; may be empty.
        grounds: the source, such as "measured on the bundled 2.6 M-parameter model".
        strength: the fault's value, as JSON; "" if unknown.
        met: whether the value is one reported from the field that differs from the catalogue's.
    """

    fault: str
    summary: str
    by: tuple[str, ...] = ()
    grounds: str = ""
    strength: str = ""
    met: bool = False


Subject = Literal["data", "slice", "guard", "rows", "sample"]


@dataclass(frozen=True)
class BlindSpot:
    """An effect that this verdict did not examine, or could not detect at its sample size.

    Args:
        subject: "data": columns that could not disagree; "slice": a slice without evidence;
            "guard": the smallest fault that a check would have rejected; "rows": sequences or
            tokens that were removed before the judgement; "sample": limits of its size or order.
        text: one sentence with its numbers.
    """

    subject: Subject
    text: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on a contract, with the verdict on every cell.

    Args:
        key: the evidence key; alpha: error probability of this attempt, of which each cell's
            violation test has part/cells.
        groups, sequences, tokens, lost: counts over the closed rounds.
        train, infer, stable: names of the kernels in reports.
        portraits: token profiles: "infer", "golden", and each peer.
        part: share of alpha for the violations of one step of a promotion; leg: name of the step,
            "" for a single check.
        power: the faults of the catalogue that would have been caught at this sample size.
        blind_spots: effects that a pass does not exclude.
        breakdown: breakdown of a trainer's dump by step and by sequence.
        advice: likely cause, slices, next command and corrections; None: not examined.
    """

    outcome: Outcome
    cells: tuple[CellVerdict, ...]
    contract: str
    stage: str
    key: EvidenceKey
    evidence: str
    confidence: float
    alpha: float
    price_cells: int
    groups: int
    sequences: int
    tokens: int
    lost: int
    golden_tokens: int = 0
    train: str = ""
    infer: str = ""
    stable: str = ""
    portraits: Mapping[str, Portrait] = field(default_factory=dict, compare=False)
    part: float = 1.0
    leg: str = ""
    power: tuple[Caught, ...] = field(default=(), compare=False)
    blind_spots: tuple[BlindSpot, ...] = field(default=(), compare=False)
    breakdown: Breakdown | None = field(default=None, compare=False)
    advice: Advice | None = field(default=None, compare=False)
    circumstances: Circumstances = field(default=Circumstances(), compare=False)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def alpha_violated(self) -> float:
        """The error probability of a false violation of one cell here."""
        return shared(self.alpha * self.part, self.price_cells)

    def decided_on(self, workload: str) -> bool:
        """Whether more rounds of a workload could not change any counting outcome."""
        return not any(c.open and c.enforced and c.workload == workload for c in self.cells)

    def broken_on(self, workload: str) -> bool:
        """Whether the whole workload is violated, whatever the outcome on its slices."""
        return any(
            c.outcome == "violated" and c.enforced and c.place == WHOLE and c.workload == workload
            for c in self.cells
        )

    def more_of(self, workload: str) -> int | None:
        """Projected number of prompt groups of a workload to decide the open cells."""
        needs = [c.more for c in self.cells if c.open and c.enforced and c.workload == workload]
        return max((n for n in needs if n is not None), default=None)

    @property
    def decided(self) -> bool:
        """Whether more rounds could not change any counting outcome."""
        return not any(c.open and c.enforced for c in self.cells)

    @property
    def more(self) -> int | None:
        """Projected number of prompt groups of one workload to decide the open cells."""
        return max((self.more_of(c.workload) or 0 for c in self.cells), default=0) or None

    @property
    def needs_tokens(self) -> int | None:
        """Approximate total number of tokens to decide every cell with such data.

        A projection for prompt groups of the observed length; None if no cell is open.
        """
        if not self.more or not self.groups or not self.tokens:
            return None
        return math.ceil(self.tokens * (1 + self.more / self.groups))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a missing number is null, never 0; infinity is a string."""
        return to_plain({**asdict(self), "exit_code": self.exit_code, "more": self.more})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """The verdict from the data of `to_dict`.

        Raises:
            EvidenceError: the data is not a verdict; the message names the first wrong part.
        """
        return from_plain(cls, data)

    def __str__(self) -> str:
        return FORMATS["text"](self)

    def to_arrow(self) -> Any:
        """A pyarrow.Table: one row per cell, with its e-values; a missing number is null.

        Metadata of the table: outcome, contract and evidence digest of the verdict.
        """
        pa = import_module("pyarrow")  # a heavy import, needed only for a table
        rows = [
            {
                **{f.name: getattr(cell, f.name) for f in fields(cell) if f.name not in _LEFT_OUT},
                "low": cell.interval[0] if cell.interval else None,
                "high": cell.interval[1] if cell.interval else None,
            }
            for cell in self.cells
        ]
        about = {"outcome": self.outcome, "contract": self.contract, "evidence": self.evidence}
        return pa.Table.from_pylist(rows).replace_schema_metadata(about)

    def to_pandas(self) -> Any:
        """The table of `to_arrow` as a pandas.DataFrame.

        Raises:
            MeasurementError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise MeasurementError(
                "a DataFrame needs pandas, which is not installed",
                hint="pip install 'servanda[pandas]', or use to_arrow()",
            )
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        return html_of(self)


def html_of(result: object) -> str:
    """The HTML of a result's text, for a notebook."""
    return f"<pre>{escape(str(result))}</pre>"


_LEFT_OUT = ("interval", "where", "assumptions")  # of a table of cells
# the report formats; filled by the package `report`
FORMATS: Registry[Callable[[Verdict], str]] = Registry("format", home="servanda.report.base")


def judge(
    plan: Plan, evidence: Evidence, *, intervals: bool = True, part: float | None = None
) -> Verdict:
    """Judge every cell of a plan on the closed prefix of its evidence; pure.

    Args:
        intervals: False omits the intervals, for an evaluation that only decides.
        part: share of alpha for violations here; None: the plan's.

    Raises:
        EvidenceError: the evidence belongs to another plan.
    """
    if evidence.plan != plan.digest:
        raise EvidenceError(
            f"the evidence was weighed for plan {evidence.plan[:8]}, this is {plan.digest[:8]}",
            hint="weigh it again with this plan",
        )
    part = plan.part if part is None else part
    closed = {s.name: evidence.closed(s.name) for s in plan.schedules}
    launched = {name: sum(r.groups for r in rounds) for name, rounds in closed.items()}
    first = {s.name: s.first for s in plan.schedules}
    cells, judgements = [], []
    for i, cell in enumerate(plan.cells):
        once = evidence.once.get(cell.kind.source)
        parts = closed.get(cell.workload) or ((once,) if once else ())
        sizes = first.get(cell.workload, 0), launched.get(cell.workload, 0)
        look = Interim(plan.alpha, plan.price_cells, *sizes, intervals, part)
        floor = cell.kind.floor(cell, [part.noise[i] for part in parts])
        statistics = [part.statistics[i] for part in parts]
        judged = cell.kind.judge(cell, statistics, floor, look)
        judgements.append((cell, statistics, look, judged.outcome))
        if intervals and cell.workload:
            stable = [part.stable[i] for part in parts if part.stable]
            judged = judged.but(
                share=_share(cell, evidence.portraits.get((cell.workload, "infer"))),
                stable=cell.kind.level(stable) if stable else None,
            )
        cells.append(judged.but(where=plan.contract.where(*cell.place)))
    cells = _after_preconditions(plan.cells, cells)
    kernels = plan.contract.kernels
    every = [part for rounds in closed.values() for part in rounds]
    golden = evidence.once.get("golden")
    portraits: dict[str, Portrait] = {}
    for (_, name), portrait in evidence.portraits.items():
        portraits = added(portraits, {name: portrait})
    verdict = Verdict(
        outcome=outcome_of(cells),
        cells=tuple(cells),
        contract=plan.contract.metadata.name,
        stage=plan.stage,
        key=evidence.key,
        evidence=evidence.digest if intervals else "",
        confidence=plan.contract.confidence,
        alpha=plan.alpha,
        price_cells=plan.price_cells,
        groups=sum(launched.values()),
        sequences=sum(r.sequences for r in every),
        tokens=sum(r.tokens for r in every),
        lost=sum(r.lost for r in every),
        golden_tokens=golden.tokens if golden else 0,
        part=part,
        leg=plan.leg.name if plan.leg else "",
        train=str(kernels.train),
        infer=str(kernels.infer),
        stable=str(plan.stable) if plan.stable else "",
        portraits=portraits if intervals else {},
        blind_spots=_blind_spots(plan, cells, judgements, every) if intervals else (),
    )
    measured = [*every, golden] if golden else every
    agreement = sum((part.agreement for part in measured), Agreement())
    return agreed(verdict, plan.contract, agreement) if intervals else verdict


def outcome_of(cells: Sequence[CellVerdict]) -> Outcome:
    """The outcome of a verdict: validity checks can only worsen that of its promises."""
    enforced = [cell for cell in cells if cell.enforced]
    promises = [c for c in enforced if c.section != "observability"]
    nothing = all(c.outcome == "not applicable" for c in promises)
    return worst([*(c.outcome for c in enforced), *(("inconclusive",) if nothing else ())])


def agreed(verdict: Verdict, contract: Contract, agreement: Agreement) -> Verdict:
    """The verdict if both sides could not disagree; violated cells stay violated."""
    why = objection(contract, agreement)
    texts = [why] if why else remarks(contract, agreement)
    spots = tuple(BlindSpot("data", text) for text in texts)
    verdict = replace(verdict, blind_spots=(*verdict.blind_spots, *spots))
    return unsound(verdict, SAME) if why and verdict.outcome != "violated" else verdict


def _blind_spots(
    plan: Plan, cells: Sequence[CellVerdict], judgements: Any, rounds: Sequence[Weighed]
) -> tuple[BlindSpot, ...]:
    """The blind spots from the plan, the tokens of each slice and check, and the responses."""
    spots = [BlindSpot("slice", text) for text in uncovered(plan, cells)]
    spots += [BlindSpot("guard", text) for text in weak_guards(judgements)]
    workload = plan.contract.workload
    if workload is not None and workload.source == "trainer":
        spots.append(BlindSpot("sample", OF_A_TRAINER))
    if cut := cut_answers(rounds):
        spots.append(BlindSpot("rows", cut))
    return tuple(spots)


def unsound(verdict: Verdict, why: str) -> Verdict:
    """The verdict on invalid data: an error without decided cells."""
    note = f"the data is not sound: {why}"
    void = {"outcome": "inconclusive", "open": False, "note": note, "rounding": ""}
    cells = tuple(c if c.outcome == "not applicable" else c.but(**void) for c in verdict.cells)
    return replace(verdict, outcome="error", cells=cells)


def _share(cell: Cell, portrait: Portrait | None) -> float | None:
    """The share of the workload's tokens in the slice."""
    if portrait is None or not portrait.total.n or cell.cut.name not in portrait.slices:
        return None
    return portrait.slices[cell.cut.name].n / portrait.total.n


def _after_preconditions(cells: tuple[Cell, ...], verdicts: list[CellVerdict]) -> list[CellVerdict]:
    """Make certificates inconclusive if a validity check fails.

    A check applies to its own workload; one of the split to all.  While it is open, so are they.
    """
    failed: dict[str, list[tuple[Cell, CellVerdict]]] = {}
    split: list[tuple[Cell, CellVerdict]] = []
    for cell, v in zip(cells, verdicts, strict=True):
        if v.section == "observability" and v.enforced and v.outcome in ("violated", "error"):
            of = split if cell.kind.source == "split" else failed.setdefault(v.workload, [])
            of.append((cell, v))
    judged = []
    for cell, v in zip(cells, verdicts, strict=True):
        of = [*failed.get(cell.workload, []), *split]
        if guards := [g for check, g in of if check.kind.invalidates(cell.kind)]:
            note = f"{_PRECONDITION}: {', '.join(dict.fromkeys(g.clause for g in guards))}"
            v = v.but(outcome="inconclusive", open=False, more=None, note=note, rounding="")
        judged.append(v)
    return judged


# Bitwise: compares bit-equal columns with the contract's declarations about the kernels.


# of one kernel under other settings
_BESIDE = {"title", "path", "batch_size", "python", "timeout_s", "key_env"}
_COARSE = (
    *("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_per_token_head", "int8_per_token_head", "q8_0", "q4_0"),
)
SAME = "both sides' logprobs are equal in every bit"
DECLARE = "declare `bitwise: true` in the contract"
BITWISE = "bitwise"  # the cell of the declaration


def objection(contract: Contract, counts: Agreement) -> str:
    """The reason why the two columns cannot be evidence; "" if they can.

    If the kernels run here, some sequences may be equal and others not, for example with a fault
    beyond some length.  A trainer's columns have no such reason.
    """
    if contract.bitwise or counts.tokens < ENOUGH:
        return ""
    if counts.everywhere:
        return (
            f"{SAME}, on all {counts.tokens:,} tokens that could differ (probability below "
            f"{INFORMATIVE:g}): one column was copied (a bypass mode, an engine that is the "
            "trainer, or one that reports its logprobs), or the kernels really are bitwise equal; "
            f"if they are, {DECLARE}"
        )
    if contract.kernels.infer.engine == EXTERNAL and counts.mixed:
        return (
            f"{SAME} in {counts.copies:,} of {counts.sequences:,} sequences, and differ in the "
            "others: those were copied from one side to the other, or only a part of the kernels "
            f"is bitwise equal; if that is so, {DECLARE}"
        )
    if contract.kernels.infer.engine == EXTERNAL and counts.mostly:
        return (
            f"{SAME} on {counts.equal:,} of {counts.tokens:,} tokens that could differ, and "
            f"{counts.close:,} of {counts.sequences:,} sequences differ at a few tokens alone, by "
            "more than rounding: most of a column was copied from one side to the other, or only a "
            f"part of the kernels is bitwise equal; if that is so, {DECLARE}"
        )
    return ""


def refuted(contract: Contract, counts: Agreement) -> tuple[CellVerdict, ...]:
    """The violated cell of a trainer's record that is declared bitwise, and is not; or none.

    Kernels that run here may differ in the last bits by their batches.
    """
    unequal = counts.tokens - counts.equal
    if not (contract.bitwise and contract.kernels.infer.engine == EXTERNAL and unequal):
        return ()
    whole = counts.sequences - sum(counts.identical)
    note = (
        f"`bitwise: true` is declared, and {unequal:,} of {counts.tokens:,} tokens that could "
        f"differ do, in {whole:,} of {counts.sequences:,} sequences"
    )
    cell = CellVerdict(
        *(BITWISE, "numerical", "unequal_ratio", "", WHOLE, "violated", "fact"),
        claim="realised",
        value=unequal / counts.tokens,
        limit=0.0,
        n=counts.tokens,
        units="tokens",
        note=note,
    )
    return (cell,)


def remarks(contract: Contract, counts: Agreement) -> tuple[str, ...]:
    """The open questions about equal or nearly equal columns, one sentence each."""
    sentences = []
    if counts.everywhere and contract.bitwise:
        sentences.append(
            f"{SAME}, on all {counts.tokens:,} tokens that could differ, as `bitwise: true` "
            "declares: this run could not have shown a disagreement"
        )
    elif counts.everywhere:
        sentences.append(
            f"{SAME}, and only {counts.tokens:,} of the tokens have a probability below "
            f"{INFORMATIVE:g}: too few to say whether a column was copied"
        )
    elif counts.tokens and contract.bitwise and contract.kernels.infer.engine != EXTERNAL:
        sentences.append(
            f"`bitwise: true` is declared, and {counts.tokens - counts.equal:,} of "
            f"{counts.tokens:,} tokens that could differ do, by {counts.mean_distance:.1e} nats on "
            "average"
        )
    elif counts.tokens >= ENOUGH and counts.copies > 1:
        sentences.append(
            f"{SAME} in {counts.copies:,} of {counts.sequences:,} sequences: on them the two sides "
            "are one program, or one column was copied"
        )
    elif counts.tokens >= ENOUGH and counts.mostly:
        sentences.append(
            f"{SAME} on {counts.equal:,} of {counts.tokens:,} tokens that could differ, though the "
            "others differ by more than rounding: in part the two sides are one program, or a "
            "column was copied"
        )
    coarse = "" if contract.bitwise or not counts.one_program else _coarse(contract.kernels)
    if coarse:
        sentences.append(
            f"where the two sides differ, it is by float32 rounding ({counts.mean_distance:.1e} "
            f"nats on average), and {coarse}: both sides look like one program"
        )
    return tuple(sentences)


def _coarse(kernels: Kernels) -> str:
    """The side that should differ by more than float32 rounding, with the reason."""
    train, infer = (k.model_dump(exclude=_BESIDE) for k in (kernels.train, kernels.infer))
    if train == infer and kernels.infer.engine != EXTERNAL:
        return ""  # one kernel compared with itself
    for side in ("infer", "train"):
        kernel = getattr(kernels, side)
        if kernel.engine == EXTERNAL or kernel.url is not None:
            return f"{side} would differ a thousand times more were it bfloat16 or quantised"
        coarse = (kernel.dtype, kernel.head_dtype, kernel.kv_cache)
        rounded = kernel.quantization or next((c for c in coarse if c in _COARSE), "")
        if rounded:
            return f"{side} is declared {rounded}"
    return ""
