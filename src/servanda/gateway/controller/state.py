# The state of a controller, and the only way in which it changes.
#
# A change is computed first, then stored, and only then visible.  If it cannot be stored, nothing
# has changed: no row was accepted, and the current snapshot remains valid.

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.contract.identity import Description, digest_of
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller import ledger_history
from servanda.gateway.controller.intake import Start
from servanda.gateway.controller.rescoring import ScoredRow
from servanda.gateway.controller.store import STARTS, Commit, Sample, Store
from servanda.gateway.controller.watched_cells import WatchedCells
from servanda.gateway.proxy.counters import LAG_S, Histogram
from servanda.gateway.routing import state_machine as machine
from servanda.gateway.routing.model import Snapshot
from servanda.gateway.routing.snapshot import build_snapshot, differ, samples
from servanda.gateway.routing.state import (
    RoutingState,
    Rules,
    Score,
    TrafficFacts,
    Transition,
    status_text,
)
from servanda.gateway.routing.state_machine import advance
from servanda.promotion.ledger.entry import Record
from servanda.promotion.run.history import GATEWAY
from servanda.traces.request_log import OTHER_PROMPT
from servanda.traces.serialization import from_plain, to_plain

_SHOWN = 50  # transitions in the status
_RECORDS = 256  # records for the ledger, kept
_RENEWED = 0.5  # fraction of its lifetime left when a snapshot is renewed
_VERSIONS = 2**40  # more snapshots than any controller makes: one per second for 30,000 years


@dataclass(frozen=True)
class StoredMeta:
    """The durable metadata of the state.

    Args:
        leader: name of the store in the ledger; salt: key of the traffic split, hex.
        version: of the last snapshot; o: number of the last record for the ledger.
        since: version of the first snapshot whose rows are evidence.
        name: of the contract; contract: its digest.
        kernels: digest of each kernel, as far as known.
        opened: digest of the contract and slices last recorded in the ledger.
    """

    leader: str
    salt: str
    name: str
    version: int = 0
    o: int = 0
    since: int = 0
    contract: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    opened: str = ""


@dataclass(frozen=True)
class Change:
    """A change of the state.

    Args:
        state: the new state, before the slices are evaluated.
        transitions: the transitions that led to it.
        scored: rows that it covers, evidence or not.
        rules, meta: new values, if they change; why: a clause for the middle of a sentence.
        fresh: whether the evidence restarts.
    """

    state: RoutingState
    transitions: tuple[Transition, ...] = ()
    scored: Sequence[ScoredRow] = ()
    samples: tuple[Sample, ...] = ()
    rules: Rules | None = None
    meta: StoredMeta | None = None
    why: str = ""
    fresh: bool = False


class ControllerState:
    """Not thread-safe, but any thread may read `routing` and `snapshot`.

    Args:
        now: unix seconds.
        actor: name in the ledger for automatic decisions.
        waits: whether the clock stands still until `now` reaches the time of the state, as in an
            audit that reads its log again; otherwise the times of the state are set back.

    Raises:
        ContractError: the store belongs to another contract.
        MeasurementError: it cannot be used.
    """

    def __init__(
        self, store: Store, cells: WatchedCells, *, now: float, actor: str, waits: bool = False
    ) -> None:
        self.store, self._actor = store, actor
        self.rules = cells.rules
        self.problem, self.epoch = "", 0
        self.fingerprints: Mapping[str, Mapping[str, str]] = {}
        self.lag_s: float | None = None
        self.lags = Histogram(LAG_S)
        name = cells.contract.metadata.name
        try:
            stored = self.store.meta("kept")
            if stored is None:
                self.meta = StoredMeta(secrets.token_hex(8), secrets.token_hex(16), name)
                self.routing = machine.begin(self.rules, now=now)
                shown: Any = []
            else:
                self.meta = from_plain(StoredMeta, stored)
                if self.meta.name != name:
                    raise ContractError(
                        f"{self.store.name} is the state of {self.meta.name}, and this is {name}",
                        hint="a state folder belongs to one contract: name another --state",
                    )
                same = self.meta.contract == cells.contract.digest
                state = from_plain(RoutingState, self.store.meta("state"))
                state = state if waits else machine.set_back(state, now=now)
                self.routing = machine.rebase(self.rules, state, now=now, keep=same)
                shown = self.store.meta("shown") or []
                if not same:
                    self.meta = replace(self.meta, since=self.meta.version + 1)
            self.shown = from_plain(tuple[Transition, ...], shown)
            self.taken: dict[Start, int] = self.store.taken()
            self._lost = False
            # the latest records: the ledger accepts each once, in case the file is lost
            self._records: deque[tuple[int, Any]] = deque(
                self.store.outbox().items(), maxlen=_RECORDS
            )
            # gateways may have a later snapshot than the last stored one
            version = self.meta.version + 1
            self.meta = replace(self.meta, version=version, contract=cells.contract.digest)
            salt = self.meta.salt
            self.snapshot = build_snapshot(
                self.rules, self.routing, version=version, salt=salt, now=now, samples={}
            )
            self.store.commit(Commit(meta=_meta(self.meta, self.routing, self.shown)))
        except EvidenceError as error:
            raise MeasurementError(
                f"{self.store.name} cannot be read: {error}", hint="name another --state"
            ) from None

    def follow(self, cells: WatchedCells, *, keep: bool, now: float) -> Change:
        """The change to a new version of the contract."""
        rules = cells.rules
        meta = replace(self.meta, contract=cells.contract.digest)
        effect = "its evidence stays" if keep else "evidence begins anew"
        return Change(
            machine.rebase(rules, self.routing, now=now, keep=keep),
            rules=rules,
            meta=meta if keep else replace(meta, since=meta.version + 1),
            why=f"the contract was read again, and {effect}",
            fresh=not keep,
        )

    def identify(self, described: Mapping[str, Description], *, now: float) -> Change | None:
        """The change if the kernels differ from those of the evidence; None if not."""
        before = self.meta.kernels
        digests = {side: kernel.digest for side, kernel in described.items()}
        others = {side: digest for side, digest in digests.items() if before.get(side) != digest}
        if not others:
            return None
        self.fingerprints = {side: dict(k.fingerprint) for side, k in described.items()}
        meta = replace(self.meta, kernels={**before, **others})
        changed = [side for side in others if side in before]
        if not changed:
            return Change(
                self.routing, meta=meta, why=f"{' and '.join(others)} reported their identity"
            )
        return Change(
            machine.rebase(self.rules, self.routing, now=now, keep=False),
            meta=replace(meta, since=meta.version + 1),
            why=f"{' and '.join(changed)} changed, and evidence begins anew",
            fresh=True,
        )

    def outrun(self, version: int) -> None:
        """Continue after the version of a gateway's snapshot that is later than any made here.

        Not beyond the largest version: no later snapshot could be made after it.
        """
        if version < _VERSIONS:
            self.meta = replace(self.meta, version=max(self.meta.version, version))

    def with_evidence(self, scored: Sequence[ScoredRow]) -> Change:
        """The change by scored rows, in order."""
        state, stored = self.routing, []
        for scored_row in scored:
            if scored_row.statistics is None or scored_row.row.outside:
                continue
            row, request = scored_row.row, scored_row.row.request
            key = request.key if request else ""
            misread = request is not None and request.lost == OTHER_PROMPT
            score = Score(row.at, key, row.chance, scored_row.statistics, row.drawn, misread)
            state = machine.absorb(self.rules, state, score)
            for (clause, slice_), statistic in scored_row.statistics.items():
                numbers = (statistic.total, statistic.known, statistic.missing)
                stored.append(Sample(row.at, slice_, clause, *numbers, row.chance, key))
        return Change(state, scored=scored, samples=tuple(stored))

    def commit(
        self,
        change: Change,
        facts: TrafficFacts | None,
        *,
        now: float,
        rates: Mapping[str, float],
        cost_s: float,
    ) -> bool:
        """Evaluate the slices and store all changes; returns whether they were stored.

        Args:
            facts: None: no gateway has reported yet, so slices are not evaluated.
        """
        rules, meta = change.rules or self.rules, change.meta or self.meta
        state, transitions = change.state, change.transitions
        if facts is not None:
            state, more = advance(rules, state, facts)
            transitions = (*transitions, *more)
        shares = samples(rules, state, rates=rates, cost_s=cost_s)
        snapshot = build_snapshot(
            rules, state, version=meta.version + 1, salt=meta.salt, now=now, samples=shares
        )
        new = self._newer(snapshot, meta, now)
        # digest of the routing rules: a change is recorded
        cells = [(cell.name, cell.limit, cell.diverts) for cell in rules.watched]
        policy = rules.policy.model_dump(mode="json")
        opened = digest_of([rules.digest, policy, cells, dict(meta.kernels)])
        records = []
        if opened != meta.opened:
            records.append(self._opened(rules, change, transitions, max(now, state.clock)))
            meta = replace(meta, opened=opened)
        run = ledger_history.run_of(rules.contract.metadata.name)
        for o, transition in enumerate(transitions, start=meta.o + len(records) + 1):
            before = change.state.slices.get(transition.slice)
            body = ledger_history.routed_entry(transition, before, leader=meta.leader, o=o, run=run)
            records.append(Record(ledger_history.ROUTED, transition.actor, transition.at, body))
        quiet = replace(state, clock=0.0) == replace(self.routing, clock=0.0)
        same = quiet and not new and not records and meta == self.meta
        if same and not change.scored and not self._lost:
            self.routing, self.rules = state, rules  # perhaps only the people to page changed
            return True
        outbox = {meta.o + i: to_plain(record) for i, record in enumerate(records, start=1)}
        meta = replace(meta, o=meta.o + len(records), version=meta.version + new)
        shown = (*self.shown, *transitions)[-_SHOWN:]
        taken = {s.row.start: s.row.number + 1 for s in change.scored}
        commit = Commit(
            meta=_meta(meta, state, shown),
            taken=taken,
            outbox=outbox,
            samples=change.samples,
            seeds=[s.seed for s in change.scored if s.seed is not None],
        )
        if not self._keep(commit):
            return False
        self.routing, self.meta, self.rules, self.shown = state, meta, rules, shown
        self._records.extend(outbox.items())
        others = {start: n for start, n in self.taken.items() if start not in taken}
        self.taken = dict([*others.items(), *taken.items()][-STARTS:])  # newest last
        self.epoch += change.fresh
        if new:
            self.snapshot = snapshot
        for row in (s.row for s in change.scored if s.statistics is not None):
            self.lag_s = max(0.0, now - row.at)  # a gateway's clock may be ahead
            self.lags.add(self.lag_s)
        return True

    def _opened(
        self, rules: Rules, change: Change, transitions: Sequence[Transition], now: float
    ) -> Record:
        """The record that precedes the transitions of a change."""
        statuses = {name: status_text(s) for name, s in change.state.slices.items()}
        statuses |= {t.slice: t.before for t in reversed(transitions)}
        meta = change.meta or self.meta
        body = ledger_history.gateway_entry(
            rules,
            statuses,
            transitions=change.state.transitions - len(change.transitions),
            leader=meta.leader,
            o=meta.o + 1,
            why=change.why or "it begins",
            fingerprints=self.fingerprints,
        )
        return Record(GATEWAY, self._actor, now, body)

    def _keep(self, commit: Commit) -> bool:
        try:
            self.store.check_present()
        except MeasurementError:
            self._lost = True
        try:
            if self._lost:
                # everything known here: the file is empty
                taken = {**self.taken, **commit.taken}
                outbox = {**dict(self._records), **commit.outbox}
                self.store.renew(replace(commit, taken=taken, outbox=outbox))
                self._lost = False
            else:
                self.store.commit(commit)
        except MeasurementError as error:
            self.problem = str(error).split("\n", 1)[0]
            return False
        self.problem = ""
        return True

    def _newer(self, snapshot: Snapshot, meta: StoredMeta, now: float) -> bool:
        """Whether a snapshot differs from the current one, or the current one expires."""
        old = self.snapshot
        life = snapshot.valid_until - now
        if old.valid_until - now <= _RENEWED * life or meta.version > old.version:
            return True
        # rows dispatched under an old contract are no evidence any more
        return meta.since > old.version or differ(old, snapshot)


def _meta(meta: StoredMeta, state: RoutingState, shown: Sequence[Transition]) -> dict[str, Any]:
    return {"kept": to_plain(meta), "state": to_plain(state), "shown": to_plain([*shown])}
