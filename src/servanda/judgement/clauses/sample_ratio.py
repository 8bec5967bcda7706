# The sample ratio: whether infer served the share of the users that the step plans for it.
#
# In A/B tests this is the test for a sample ratio mismatch.  If the split differs from the declared
# one, or some users never reach infer, the evidence of a step is about other traffic than the step
# was meant for.  The unit is a user, by the first request on the step: the split is a keyed hash of
# the user, so later requests of a user repeat the first.  Each step is tested by itself, with its
# share of alpha: the places of users do not change, so evidence of two steps is not independent,
# and may not be multiplied.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from servanda.contract.clause import SAMPLE_RATIO, Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import (
    GUARDS,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    blank,
    limit_of,
)
from servanda.judgement.clauses.chain_metrics import Lack
from servanda.judgement.clauses.scope import known_by_name
from servanda.judgement.slices.rules import Cut
from servanda.theory.planned_share import PlannedShare
from servanda.traces.corpus import Prompt
from servanda.traces.request_log import BREAKER, FAILOVER, Assignment

STAGES_WITH_SPLIT = ("canary", "full")
_TOKENS = "request.prompt_tokens"
_DETECTED = 0.5  # part of the planned share that a step must be able to reject before it passes
_EXAMPLE = "{id: split, metric: sample_ratio, stages: [canary, full]}"


@dataclass(frozen=True)
class Split:
    """The split of one step.

    Args:
        planned: share of the users that infer was to serve.
        users: first assignment of each user on the step, in the order of the log.
        cuts: the contract's slices that are known before a request, without the whole.
    """

    planned: float
    users: tuple[Assignment, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class SliceShare:
    """How many users of a slice infer served."""

    slice: str
    hits: int
    users: int


@dataclass(frozen=True)
class Shares:
    """The users of a cell.

    Args:
        hits: users that infer served; failover, breaker: users that the split gave to infer and
            stable served; apart: (reason, users that are not counted).
        log_e: largest evidence against the planned share, nats.
        farthest: the slice with the most evidence against it; None: none.
    """

    planned: float
    users: int = 0
    hits: int = 0
    failover: int = 0
    breaker: int = 0
    apart: tuple[tuple[str, int], ...] = ()
    log_e: float = 0.0
    farthest: SliceShare | None = None


@GUARDS.register(SAMPLE_RATIO)
@dataclass(frozen=True)
class SampleRatio(Kind):
    """Tests whether infer served the share of the users that it was to serve."""

    counts = True
    source: ClassVar = "split"
    live_only: ClassVar[str] = "nothing is served offline: it concerns the split of traffic"

    def weigh(self, cell: Cell, split: Split) -> Shares:
        inside = _inside(cell.cut, split.users)
        counted = [user for user in inside if not user.apart]
        causes = Counter(user.because for user in counted)
        test = PlannedShare(split.planned, limit_of(cell.clause))
        return Shares(
            split.planned,
            len(counted),
            sum(user.hit for user in counted),
            causes[FAILOVER],
            causes[BREAKER],
            tuple(sorted(Counter(user.apart for user in inside if user.apart).items())),
            test.peak([user.hit for user in counted]),
            None if cell.cut.terms else _farthest(test, split.cuts, counted),
        )

    def judge(self, cell: Cell, rounds: list[Shares], floor: object, look: Interim) -> CellVerdict:
        shares = rounds[0] if rounds else Shares(0.0)
        verdict = blank(
            cell,
            "inconclusive",
            kind="guard",
            n=shares.users,
            units="users",
            alpha=look.alpha,
            open=True,
        )
        if not shares.users:
            return verdict.but(note=_nobody(cell, shares))
        price = look.log_price_violated
        verdict = verdict.but(value=shares.hits / shares.users, e_violated=shares.log_e)
        test = PlannedShare(shares.planned, limit_of(cell.clause))
        if shares.log_e >= price:
            return verdict.but(outcome="violated", open=False, note=_mismatch(shares, test, price))
        needed = test.units_needed(_DETECTED * shares.planned, price)
        if shares.users < needed:
            note = f"{_served(shares)}; half of that share is rejected by {needed:,} users at least"
            return verdict.but(note=note + _apart(shares))
        note = f"{_served(shares)}: not rejected{_apart(shares)}"
        return verdict.but(outcome="holds", open=False, note=note)

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:
        judged = [s for s in STAGES_WITH_SPLIT if s in clause.stages and contract.promotion.has(s)]
        if not judged:
            yield Lack(
                f"{SAMPLE_RATIO} is judged where traffic is split between stable and infer, at "
                "canary and full, and this clause is judged at neither",
                f"add promotion.canary, and write {_EXAMPLE}",
                "stages" if "stages" in clause.model_fields_set else "metric",
            )
        moments = known_by_name(contract)
        for name in clause.slices or ():
            if moments.get(name, "request") != "request":
                yield Lack(
                    f"slice {name!r} is not known before a request, so it has no share of users",
                    "name slices of labels or of request.prompt_tokens, or remove slices",
                    "slices",
                )


def _inside(cut: Cut, users: tuple[Assignment, ...] | list[Assignment]) -> list[Assignment]:
    """The users whose first request is in a slice; a prompt of unknown length is in none."""
    if not cut.terms:
        return [*users]
    known: dict[tuple[tuple[tuple[str, str], ...], int | None], bool] = {}
    inside = []
    for user in users:
        facts = tuple(sorted(user.labels.items())), user.prompt_tokens
        if facts not in known:
            unknown = user.prompt_tokens is None and _TOKENS in cut.fields
            prompt = Prompt(line=0, labels=dict(user.labels))
            known[facts] = not unknown and cut.may_meet(prompt, user.prompt_tokens)
        if known[facts]:
            inside.append(user)
    return inside


def _farthest(
    test: PlannedShare, cuts: tuple[Cut, ...], users: list[Assignment]
) -> SliceShare | None:
    slices = []
    for cut in cuts:
        inside = _inside(cut, users)
        if inside:
            slices.append(SliceShare(cut.name, sum(u.hit for u in inside), len(inside)))
    by_evidence = {s: float(test.log_e(s.hits, s.users)) for s in slices}
    worst = max(slices, key=by_evidence.__getitem__, default=None)
    return worst if worst is not None and by_evidence[worst] > 0 else None


def _nobody(cell: Cell, shares: Shares) -> str:
    where = "" if not cell.cut.terms else f" of {cell.cut.name}"
    if shares.apart:
        return f"no user{where} is counted{_apart(shares)}"
    return (
        f'the log has no assignment{where}: write a line with "pool" for the first request of '
        "each user on the step, by either pool (docs/how-to/traffic.md)"
    )


def _served(shares: Shares) -> str:
    planned = _percent(shares.planned)
    return f"infer served {_share(shares.hits, shares.users)}, and the step plans {planned}"


def _mismatch(shares: Shares, test: PlannedShare, price: float) -> str:
    """What differs, where, and whether failures of infer explain it."""
    parts = [_served(shares)]
    moved = [
        *([f"{shares.failover:,} failed over to stable"] if shares.failover else []),
        *([f"{shares.breaker:,} came while its circuit breaker was open"] * bool(shares.breaker)),
    ]
    if moved:
        intended = shares.hits + shares.failover + shares.breaker
        right = float(test.log_e(intended, shares.users)) < price
        parts.append(
            f"of the others {' and '.join(moved)}; without them "
            f"{_percent(intended / shares.users)}, so "
            + ("the split is right and infer fails" if right else "the split is wrong as well")
        )
    if shares.farthest is not None:
        farthest = shares.farthest
        parts.append(
            f"it differs most in {farthest.slice}: {_share(farthest.hits, farthest.users)}"
        )
    return "; ".join(parts) + _apart(shares)


def _apart(shares: Shares) -> str:
    if not shares.apart:
        return ""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in shares.apart)
    return f"; not counted, because the step does not decide their share: {reasons}"


def _share(hits: int, users: int) -> str:
    return f"{_percent(hits / users)} of {users:,} users"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
