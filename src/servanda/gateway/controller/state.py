# The core of a leader: the state, and the one way in which it changes.
#
# A change is worked out first, kept second, and only then what everybody sees.  Where it cannot
# be kept nothing has happened: no row was taken, and the snapshot that gateways have stands.

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from servanda.contract.identity import digest_of
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller import ledger_history
from servanda.gateway.controller.intake import Start
from servanda.gateway.controller.lag_histogram import Lags
from servanda.gateway.controller.rescoring import Scored
from servanda.gateway.controller.store import STARTS, Commit, Sample, Store
from servanda.gateway.controller.watched_cells import Watching
from servanda.gateway.routing import state_machine as machine
from servanda.gateway.routing.model import Snapshot
from servanda.gateway.routing.sampling_budget import samples
from servanda.gateway.routing.snapshot import differ
from servanda.gateway.routing.state import Facts, RoutingState, Rules, Score, Transition, named
from servanda.promotion.ledger.entry import Record
from servanda.promotion.run.history import GATEWAY
from servanda.traces.request_log import OTHER_PROMPT
from servanda.traces.serialization import from_plain, to_plain

_SHOWN = 50  # transitions that are shown
_SAID = 256  # records for the ledger that are remembered
_RENEWED = 0.5  # of its life that a snapshot has left when it is renewed
_VERSIONS = 2**40  # more snapshots than any leader makes: one a second for 30,000 years


@dataclass(frozen=True)
class Kept:
    """What is durable beside the state.

    Args:
        leader: the name of the store in the ledger; salt: key of the split, hex.
        version: of the last snapshot; o: number of the last record for the ledger.
        since: version of the first snapshot whose rows are evidence.
        name: of the contract; contract: its digest.
        kernels: digest of each, as far as they said who they are.
        opened: digest of what the ledger was told is followed.
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
    """What is to become of the state.

    Args:
        state: after it, before anybody looked at the slices.
        transitions: that made it.
        scored: rows whose evidence is in it, or that are none.
        rules, kept: where they are others from now on; why: as the middle of a sentence.
        fresh: whether evidence begins anew.
    """

    state: RoutingState
    transitions: tuple[Transition, ...] = ()
    scored: Sequence[Scored] = ()
    samples: tuple[Sample, ...] = ()
    rules: Rules | None = None
    kept: Kept | None = None
    why: str = ""
    fresh: bool = False


class Core:
    """Not for several threads at once; `state` and `snapshot` may be read by any.

    Args:
        now: unix seconds.
        actor: in the ledger, of what nobody asked for.
        waits: whether time stands still where the state is later than `now`, until that is
            reached, as in an audit that reads its log again; else its times are set back.

    Raises:
        ContractError: the folder is another contract's.
        MeasurementError: it cannot be used.
    """

    def __init__(
        self, folder: Path, watching: Watching, *, now: float, actor: str, waits: bool = False
    ) -> None:
        self.store, self._actor = Store(folder), actor
        self.rules: Rules = machine.rules_of(watching.contract, watching.watched)
        self.problem, self.epoch = "", 0
        self.fingerprints: Mapping[str, Mapping[str, str]] = {}
        self.absorbed = 0
        self.lag_s: float | None = None
        self.lags = Lags()
        name = watching.contract.metadata.name
        try:
            kept = self.store.meta("kept")
            if kept is None:
                self.kept = Kept(secrets.token_hex(8), secrets.token_hex(16), name)
                self.state = machine.begin(self.rules, now=now)
                shown: Any = []
            else:
                self.kept = from_plain(Kept, kept)
                if self.kept.name != name:
                    raise ContractError(
                        f"{self.store.path} is the state of {self.kept.name}, and this is {name}",
                        hint="a history belongs to one contract: name another --state",
                    )
                same = self.kept.contract == watching.contract.digest
                state = from_plain(RoutingState, self.store.meta("state"))
                state = state if waits else machine.set_back(state, now=now)
                self.state = machine.rebase(self.rules, state, now=now, keep=same)
                shown = self.store.meta("shown") or []
                if not same:
                    self.kept = replace(self.kept, since=self.kept.version + 1)
            self.shown = from_plain(tuple[Transition, ...], shown)
            self.taken: dict[Start, int] = self.store.taken()
            self._lost = False
            # the latest for the ledger, which takes each once, should the file be lost
            self._said: deque[tuple[int, Any]] = deque(self.store.outbox().items(), maxlen=_SAID)
            # what gateways have may be younger than what was kept here last
            version = self.kept.version + 1
            self.kept = replace(self.kept, version=version, contract=watching.contract.digest)
            self.snapshot = self._made(self.rules, self.state, {}, version=version, now=now)
            self.store.commit(Commit(meta=_meta(self.kept, self.state, self.shown)))
        except EvidenceError as error:
            self.store.close()
            raise MeasurementError(
                f"{self.store.path} cannot be read: {error}", hint="name another --state"
            ) from None
        except BaseException:
            self.store.close()
            raise

    def follow(self, watching: Watching, *, keep: bool, now: float) -> Change:
        """The change to other rules."""
        rules = machine.rules_of(watching.contract, watching.watched)
        kept = replace(self.kept, contract=watching.contract.digest)
        said = "its evidence stays" if keep else "evidence begins anew"
        return Change(
            machine.rebase(rules, self.state, now=now, keep=keep),
            rules=rules,
            kept=kept if keep else replace(kept, since=kept.version + 1),
            why=f"the contract was read again, and {said}",
            fresh=not keep,
        )

    def known(self, digests: Mapping[str, str], *, now: float) -> Change | None:
        """The change, where kernels are others than the evidence speaks of; None: they are not."""
        before = self.kept.kernels
        others = {side: digest for side, digest in digests.items() if before.get(side) != digest}
        if not others:
            return None
        kept = replace(self.kept, kernels={**before, **others})
        changed = [side for side in others if side in before]
        if not changed:
            return Change(self.state, kept=kept, why=f"{' and '.join(others)} said who they are")
        return Change(
            machine.rebase(self.rules, self.state, now=now, keep=False),
            kept=replace(kept, since=kept.version + 1),
            why=f"{' and '.join(changed)} changed, and evidence begins anew",
            fresh=True,
        )

    def outrun(self, version: int) -> None:
        """A gateway has a later snapshot than was ever made here: go on behind it.

        Not to the end of all numbers: no later one could be made, and nobody would follow.
        """
        if version >= _VERSIONS:
            return
        self.kept = replace(self.kept, version=max(self.kept.version, version))

    def with_evidence(self, scored: Sequence[Scored]) -> Change:
        """The change by rows, in their order."""
        state, kept = self.state, []
        for one in scored:
            if one.statistics is None or one.row.outside:
                continue
            row, request = one.row, one.row.request
            key = request.key if request else ""
            misread = request is not None and request.lost == OTHER_PROMPT
            score = Score(row.at, key, row.chance, one.statistics, row.drawn, misread)
            state = machine.absorb(self.rules, state, score)
            for (clause, slice_), statistic in one.statistics.items():
                numbers = (statistic.total, statistic.known, statistic.missing)
                kept.append(Sample(row.at, slice_, clause, *numbers, row.chance, key))
        return Change(state, scored=scored, samples=tuple(kept))

    def commit(
        self,
        change: Change,
        facts: Facts | None,
        *,
        now: float,
        rates: Mapping[str, float],
        cost_s: float,
    ) -> bool:
        """Look at the slices, and keep all that changed; whether it could be kept.

        Args:
            facts: None: nobody was heard yet, and nobody looks.
        """
        rules, kept = change.rules or self.rules, change.kept or self.kept
        state, moved = change.state, change.transitions
        if facts is not None:
            state, more = machine.look(rules, state, facts)
            moved = (*moved, *more)
        shares = samples(rules, state, rates=rates, cost_s=cost_s)
        made = self._made(rules, state, shares, version=kept.version + 1, now=now)
        new = self._newer(made, kept, now)
        opened = _followed(rules, kept)
        records = []
        if opened != kept.opened:
            records.append(
                self._opened(rules, change, state, moved, max(now, state.clock), kept.o + 1)
            )
            kept = replace(kept, opened=opened)
        run = ledger_history.run_of(rules.contract.metadata.name)
        for o, one in enumerate(moved, start=kept.o + len(records) + 1):
            before = change.state.slices.get(one.slice)
            body = ledger_history.routed(one, before, leader=kept.leader, o=o, run=run)
            records.append(Record(ledger_history.ROUTED, one.actor, one.at, body))
        quiet = replace(state, clock=0.0) == replace(self.state, clock=0.0)
        same = quiet and not new and not records and kept == self.kept
        if same and not change.scored and not self._lost:
            self.state, self.rules = state, rules  # whom rules page may be all that changed
            return True
        outbox = {kept.o + i: to_plain(record) for i, record in enumerate(records, start=1)}
        kept = replace(kept, o=kept.o + len(records), version=kept.version + new)
        shown = (*self.shown, *moved)[-_SHOWN:]
        taken = {one.row.start: one.row.number + 1 for one in change.scored}
        commit = Commit(
            meta=_meta(kept, state, shown),
            taken=taken,
            outbox=outbox,
            samples=change.samples,
            seeds=[one.seed for one in change.scored if one.seed is not None],
        )
        if not self._keep(commit):
            return False
        self.state, self.kept, self.rules, self.shown = state, kept, rules, shown
        self._said.extend(outbox.items())
        others = {start: n for start, n in self.taken.items() if start not in taken}
        self.taken = dict([*others.items(), *taken.items()][-STARTS:])  # the latest last
        self.epoch += change.fresh
        if new:
            self.snapshot = made
        self._count(change, now)
        return True

    def _count(self, change: Change, now: float) -> None:
        rows = [one.row for one in change.scored if one.statistics is not None]
        self.absorbed += len(rows)
        for row in rows:
            self.lags.add(now - row.at)
        if rows:
            self.lag_s = max(0.0, now - rows[-1].at)

    def _opened(
        self,
        rules: Rules,
        change: Change,
        state: RoutingState,
        moved: Sequence[Transition],
        now: float,
        o: int,
    ) -> Record:
        """What the ledger is told before the transitions of a change."""
        stands = {name: named(one) for name, one in change.state.slices.items()}
        stands |= {one.slice: one.before for one in reversed(moved)}
        body = ledger_history.opened(
            rules,
            stands,
            transitions=state.transitions - len(moved),
            leader=self.kept.leader,
            o=o,
            why=change.why or "it begins",
            fingerprints=self.fingerprints,
        )
        return Record(GATEWAY, self._actor, now, body)

    def _keep(self, commit: Commit) -> bool:
        try:
            self.store.refuse_gone()
        except MeasurementError:
            self._lost = True
        try:
            if self._lost:
                # everything that is known here, for the file has nothing
                taken, said = {**self.taken, **commit.taken}, {**dict(self._said), **commit.outbox}
                self.store.renew(replace(commit, taken=taken, outbox=said))
                self._lost = False
            else:
                self.store.commit(commit)
        except MeasurementError as error:
            self.problem = str(error).split("\n", 1)[0]
            return False
        self.problem = ""
        return True

    def _made(
        self,
        rules: Rules,
        state: RoutingState,
        shares: Mapping[str, float],
        *,
        version: int,
        now: float,
    ) -> Snapshot:
        salt = self.kept.salt
        return machine.snapshot(rules, state, version=version, salt=salt, now=now, samples=shares)

    def _newer(self, made: Snapshot, kept: Kept, now: float) -> bool:
        """Whether a snapshot says something else than the one that gateways have, or it ends."""
        old = self.snapshot
        life = made.valid_until - now
        if old.valid_until - now <= _RENEWED * life or kept.version > old.version:
            return True
        if kept.since > old.version:
            return True  # rows that are launched under the old one are no evidence any more
        return differ(old, made)

    def close(self) -> None:
        self.store.close()


def _followed(rules: Rules, kept: Kept) -> str:
    """Digest of what routing follows: a change of it is told."""
    cells = [(cell.name, cell.limit, cell.diverts) for cell in rules.watched]
    policy = rules.policy.model_dump(mode="json")
    return digest_of([rules.digest, policy, cells, dict(kept.kernels)])


def _meta(kept: Kept, state: RoutingState, shown: Sequence[Transition]) -> dict[str, Any]:
    return {"kept": to_plain(kept), "state": to_plain(state), "shown": to_plain([*shown])}
