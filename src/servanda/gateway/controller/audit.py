# An audit: the loop of a controller on a log of served requests, outside the request path.
#
# The clock is that of the log: a slice is diverted, held and returned when it would have been.
# Nothing is diverted, whatever the contract says; decisions are only reported.

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from servanda.contract.model import WHOLE
from servanda.engines.worker import spawn
from servanda.errors import EvidenceError, MeasurementError, Where
from servanda.gateway.controller.controller import Controller
from servanda.gateway.controller.intake import inclusion_of
from servanda.gateway.controller.status import CellStatus, ControllerStatus, SliceStatus
from servanda.gateway.controller.store import open_store
from servanda.gateway.controller.web.format import evidence
from servanda.gateway.controller.web.summary import state, worst
from servanda.gateway.routing.state import Transition
from servanda.judgement.slices.rules import Cut
from servanda.promotion.run.request_log_files import files_of
from servanda.report.cell_text import together
from servanda.report.format import WRITTEN, count, number, percent
from servanda.report.table import table
from servanda.runner.measurement import Open
from servanda.traces.corpus import Prompt
from servanda.traces.json_fields import LineError, parse_line
from servanda.traces.request_log import Request, is_assignment, request_of

_CHUNK = 64  # rows between two evaluations
_GATEWAY, _START = "log", 0.0
_LEFT, _OPEN = 1, 3
_A_LINE = "see docs/how-to/traffic.md"


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Args:
        rows: number of rows in the log; keyless: rows without a key of the user.
        left: slice -> the last transition that would have diverted it.
        standing: the status at the end of the log.
    """

    rows: int
    standing: ControllerStatus
    left: dict[str, Transition] = field(default_factory=dict)
    keyless: int = 0

    @property
    def beyond(self) -> tuple[str, ...]:
        """Slices whose e-value passed the alarm threshold, whether stable has capacity or not."""
        paid = (s.name for s in self.standing.slices if s.tick.outcome == "violated")
        return tuple(dict.fromkeys((*self.left, *paid)))

    @property
    def known(self) -> bool:
        """Whether any request was scored, by this call or an earlier one on the same state."""
        cells = (c for slice_ in self.standing.slices for c in slice_.cells if not c.refutes)
        return bool(self.standing.scoring.scored) or any(number(cell.value) for cell in cells)

    @property
    def old(self) -> bool:
        """Whether all requests of the log were scored by earlier calls."""
        return self.known and not self.standing.scoring.scored

    @property
    def exit_code(self) -> int:
        """0: every slice of the log is within its limits; 1: at least one to divert; 3: neither."""
        if self.beyond:
            return _LEFT
        all_ = together(slice_.tick for slice_ in self.standing.slices if slice_.share)
        return 0 if self.known and all_.outcome == "holds" else _OPEN


class Audit:
    """Evaluates a log of served requests, which may grow between calls.

    Args:
        logs: files and folders of .jsonl files, read in the order of their names.
        state: folder that records how far the log was read.
        ledger: the ledger that records transitions; "": none.

    Raises:
        ContractError: the contract cannot be followed.
        MeasurementError: the state folder cannot be used.
    """

    def __init__(
        self,
        contract: Path,
        logs: Sequence[Path],
        *,
        state: Path,
        ledger: str = "",
        open: Open = spawn,
        key: bytes | None = None,
    ) -> None:
        self._logs, self._at, self._rows = logs, _began(logs), 0
        self._read: dict[Path, tuple[int, int]] = {}  # file -> bytes and lines that were read
        self._counts: Counter[str] = Counter()
        self._decided: Counter[str] = Counter()
        self._left: dict[str, Transition] = {}
        self._last_number = self._keyless = 0
        self._controller = Controller(
            contract,
            store=lambda: open_store(state, ""),
            ledger=ledger,
            clock=lambda: self._at,
            waits=True,
            open=open,
            key=key,
            threads=False,
        )
        made = self._controller.snapshot
        self._cuts: tuple[Cut, ...] = tuple(route.cut for route in made.slices)

    def read(self) -> tuple[Transition, ...]:
        """Evaluate the new rows of the log; returns the transitions.

        Raises:
            EvidenceError: a line is not a valid request.
            MeasurementError: the log cannot be read, or the train kernel does not respond.
        """
        transitions: list[Transition] = []
        chunk: list[Any] = []
        for data, request in self._new():
            chunk.append(data)
            self._count(request)
            self._at = max(self._at, request.at)
            if len(chunk) == _CHUNK:
                transitions += self._take(chunk)
                chunk = []
        return (*transitions, *self._take(chunk))

    @property
    def result(self) -> AuditResult:
        return AuditResult(self._rows, self._controller.status(), dict(self._left), self._keyless)

    def close(self) -> None:
        self._controller.close()

    def _take(self, chunk: Sequence[Any]) -> list[Transition]:
        if not chunk:
            return []
        first, self._rows = self._rows, self._rows + len(chunk)
        none = dict.fromkeys((cut.name for cut in self._cuts), 0.0)
        counts = {
            "launched": dict(self._counts),
            "decisions": dict(self._decided),
            "peak": {"stable": 0},
            "slice_in_flight": none,
        }
        message = {"gateway": _GATEWAY, "start": _START, "first": first, "version": 0}
        if not first:  # traffic is counted from the first message of a gateway
            self._controller.follow({**message, "rows": [], "counts": {}})
        self._controller.follow({**message, "rows": [*chunk], "counts": counts})
        while self._controller.step():
            pass
        status = self._controller.status()
        if status.scoring.queued:
            problem = status.scoring.problem or status.store
            raise MeasurementError(
                f"the log cannot be scored: {problem}",
                hint="with --state the scores so far are kept; run the command again",
            )
        new = [t for t in status.transitions if t.number > self._last_number]
        self._last_number = status.moves
        self._left |= {t.slice: t for t in new if t.after.startswith("quarantined")}
        return new

    def _count(self, request: Request) -> None:
        self._keyless += not request.key
        prompt = Prompt(line=0, token_ids=request.prompt, labels=dict(request.labels))
        names = [c.name for c in self._cuts if c.may_meet(prompt, len(request.prompt))]
        self._counts.update(names)
        specific = next((name for name in names if name != WHOLE), WHOLE)
        self._decided[f"{specific}\tinfer\tlog"] += 1

    def _new(self) -> Iterator[tuple[Any, Request]]:
        """Complete lines that were not read yet, file by file."""
        for path in files_of(self._logs):
            size, lines = self._read.get(path, (0, 0))
            unread = MeasurementError.of_system(f"the log {path} cannot be read")
            with unread, path.open("rb") as file:
                file.seek(size)
                data = file.read()
            whole, end, tail = data.rpartition(b"\n")
            if _whole(tail):  # the last line has no newline
                whole, end = whole + end + tail, b"\n"
            for raw in whole.split(b"\n") if end else ():
                lines += 1
                size += len(raw) + 1
                self._read[path] = (size, lines)
                if raw.strip() and (row := _row(raw, path, lines)) is not None:
                    yield row


def _began(logs: Sequence[Path]) -> float:
    """Dispatch time of the first row; 0 if no row can be read."""
    for path in files_of(logs)[:1]:
        with suppress(OSError, EvidenceError), path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if (row := _row(raw, path, number)) is not None:
                    return row[1].at
    return 0.0


def _whole(tail: bytes) -> bool:
    """Whether a line without a newline is a complete row, not one that is being written."""
    try:
        return isinstance(json.loads(tail), dict)
    except ValueError:
        return False


def _row(raw: bytes, path: Path, line: int) -> tuple[Any, Request] | None:
    """The request of a line; None if the line is an assignment."""
    where = Where(str(path), line, 1)
    try:
        data = parse_line(raw.decode("utf-8-sig"))
        if is_assignment(data):
            return None
        inclusion_of(data)
        return data, request_of(data)
    except LineError as wrong:
        raise EvidenceError(str(wrong), where=where, hint=wrong.hint or _A_LINE) from None
    except json.JSONDecodeError as error:
        where = replace(where, column=error.colno)
        raise EvidenceError(f"not JSON: {error.msg}", where=where, hint=_A_LINE) from None
    except UnicodeDecodeError as error:
        raise EvidenceError(f"not UTF-8: {error.reason}", where=where, hint=_A_LINE) from None


def render(result: AuditResult) -> str:
    """The report: the table with its summary lines."""
    status, scoring = result.standing, result.standing.scoring
    scored = "nothing new in" if result.old else f"scored {scoring.scored:,} of"
    head = f"{status.name} · {scored} {count(result.rows, 'request')}"
    parts = [f"{scoring.missing:,} missing"] if scoring.missing else []
    parts += [f"{n:,} outside: {why}" for why, n in scoring.outside.items()]
    lines = [" · ".join([head, *parts])]
    rows = [("slice", "share", "value", "limit", "state")]
    ordered = sorted(status.slices, key=lambda slice_: slice_.name != WHOLE)
    rows += [_cells(result, slice_) for slice_ in ordered]
    lines += table(rows, right=(1, 2, 3))
    lines += [f"not watched: {c.clause} on {c.slice}: {c.why}" for c in status.left_out]
    lines += [f"problem: {problem}" for problem in status.problems]
    if result.keyless:
        few = f"{result.keyless:,} of {result.rows:,} rows have no key"
        lines.append(f"{few}: they count as one user, and one user diverts nothing")
    if not result.known:
        why = "no row is evidence for this contract; is the log of another one?"
        if not result.rows:
            why = "the log has no rows; --log takes files of rows, or folders of .jsonl files"
        elif scoring.missing:
            why = "train has no logprob for these tokens; is the log of this contract's model?"
        lines.append(f"nothing was scored: {why}")
    return "\n".join(lines)


def _cells(result: AuditResult, slice_: SliceStatus) -> tuple[str, ...]:
    cell = worst(slice_)
    last = result.left.get(slice_.name)
    value, limit = (cell.value, cell.limit) if cell else (None, None)
    if last is not None and (cell is None or not cell.n):  # the evidence restarts at the diversion
        value, limit = last.value, last.limit
    state = _state(slice_, cell, last)
    return slice_.name, percent(slice_.share), number(value), number(limit, WRITTEN), state


def _state(slice_: SliceStatus, cell: CellStatus | None, last: Transition | None) -> str:
    if last is not None:
        now = "" if slice_.status == "quarantined" else f"; {slice_.status} by the end"
        who = f"{count(last.n, 'request')}, {count(last.keys, 'user')}"
        return f"✗ would divert (e-value {evidence(last.log_evidence)} from {who}){now}"
    if cell is not None and slice_.tick.outcome == "violated":
        why = slice_.held.partition(": ")[2] or "not evaluated yet"
        e = evidence(max(cell.log_evidence, cell.log_alarm))
        return (
            f"✗ exceeds its limit (e-value {e} from {count(cell.n, 'request')}); no divert: {why}"
        )
    if slice_.share is None:
        return "? no request of the log is in it"
    one = state(slice_)
    if cell is None:
        return f"{one.glyph} {one.text}"
    if not number(cell.value):
        return "? no request was scored"
    e, threshold = evidence(cell.log_evidence), evidence(cell.log_price)
    return f"{one.glyph} {one.text} (e-value {e}, threshold {threshold})"
