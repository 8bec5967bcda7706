# Data quality checks of a dump, as reports print them.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from servanda.contract.model import Contract
from servanda.judgement.bitwise import objection
from servanda.judgement.breakdown import Removed
from servanda.report.breakdown import removed_line
from servanda.report.format import count, number
from servanda.rl.dumps.checks import Finding, State
from servanda.rl.dumps.formats import Refused
from servanda.rl.dumps.statistics import DumpStatistics, Outliers
from servanda.theory.stats.agreement import MIXED, Agreement

_SHARE = 0.001  # accepted share of rejected sequences; with more, the rest is no sample of the run
_ZERO = "all zero"
_SHOWN = 6  # most steps in a line
_ENOUGH, _WORSE = 200, 1.5  # least removed tokens, and ratio of their mean to that of others
_ORDER = ("error", "warning", "fine")
Level = Literal["error", "warning", "fine"]
_LEVELS: Mapping[State, Level] = {"unsound": "error", "warning": "warning", "ok": "fine"}


@dataclass(frozen=True)
class DataLine:
    """One finding about the data; an error prevents a verdict."""

    level: Level
    text: str


def data_lines(
    findings: Sequence[Finding],
    refused: Refused,
    taken: int,
    empty: Mapping[int, str] | None = None,
    statistics: DumpStatistics | None = None,
) -> tuple[DataLine, ...]:
    """All findings about the data, worst first.

    Args:
        taken: number of accepted sequences.
        empty: steps without a sequence -> their first file.
        statistics: statistics of the whole dump.
    """
    lines = [*of_refused(refused, taken), *of_empty(empty or {})]
    lines += [DataLine(_LEVELS[f.state], f.placed) for f in findings]
    if statistics is not None:
        lines += [*of_outliers(statistics.outliers), *of_filter(statistics.removed)]
    return tuple(sorted(lines, key=lambda line: _ORDER.index(line.level)))


def sides(contract: Contract, agreement: Agreement) -> tuple[Finding, ...]:
    """The reason why the two columns could not have disagreed; empty if they could."""
    if not (copied := objection(contract, agreement)):
        return ()
    numbers = {"tokens": float(agreement.tokens), "equal": float(agreement.equal)}
    odd = None if agreement.everywhere else (*alike(agreement), MIXED)
    return (Finding("sides", "unsound", copied, numbers, odd=odd),)


def alike(agreement: Agreement) -> tuple[int, int]:
    """The number of possibly copied sequences, and of all."""
    return max(agreement.copies, agreement.close), agreement.sequences


def of_refused(refused: Refused, taken: int) -> list[DataLine]:
    """Rejected sequences: a few are skipped, more make the data unsound."""
    if not refused.rows:
        return [DataLine("fine", "no sequence was rejected")]
    lines = []
    for refusal in refused.values():
        share = refusal.count / (taken + refused.rows)
        bad = share > _SHARE or _ZERO in refusal.reason
        rows = count(refusal.count, "sequence")
        text = f"{rows} rejected: {refusal.reason} (first: {refusal.first})"
        lines.append(DataLine("error" if bad else "warning", text))
    return lines


def of_empty(empty: Mapping[int, str]) -> list[DataLine]:
    """Steps with a file but without a usable sequence, which were not judged."""
    if not empty:
        return []
    steps = ", ".join(map(str, [*empty][:_SHOWN])) + (" …" if len(empty) > _SHOWN else "")
    subject = f"step {steps} has" if len(empty) == 1 else f"steps {steps} have"
    text = f"{subject} no sequence that can be "
    return [DataLine("warning", f"{text}used (first: {next(iter(empty.values()))})")]


def of_outliers(outliers: Outliers) -> list[DataLine]:
    """Single sequences that exceed the limit, which an average over the dump does not show."""
    if not outliers.beyond:
        return []
    worst = outliers.rows()[0]
    count = f"{outliers.beyond:,} of {outliers.sequences:,} sequences"
    text = (
        f"{count} {'is' if outliers.beyond == 1 else 'are'} above the limit on their own tokens "
        f"(worst: {worst.source}, tv {number(worst.tv)})"
    )
    return [DataLine("warning", text)]


def of_filter(removed: Removed | None) -> list[DataLine]:
    """Removals by a filter of the trainer: a warning if it removed mismatching tokens."""
    if removed is None:
        return []
    enough = removed.tokens >= _ENOUGH and removed.tv is not None and removed.kept is not None
    worse = enough and (removed.tv or 0.0) > _WORSE * (removed.kept or 0.0)
    return [DataLine("warning" if worse else "fine", removed_line(removed))]
