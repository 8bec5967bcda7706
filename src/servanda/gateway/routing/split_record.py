# The split of a promotion's step on live traffic: whether infer serves the planned share of users.
#
# The unit and the test are those of the clause `sample_ratio`: a user, by the first request on the
# step.  A user counts at its dispatch, for the pool that is asked first, because fast replies come
# earlier than slow ones; if infer gives no reply, the user is moved to stable.  So the count of
# infer lies between the number that it served in the end and the number that the split gave to it,
# for the same users.  The evidence for a smaller share falls with this count and the evidence for a
# larger one rises, so the mean of both is at most that of an e-process whose steps have both
# outcomes: an alarm at any time is as rare as the threshold promises.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from servanda.theory.planned_share import PlannedShare
from servanda.traces.assignments import FAILOVER, Assignment

_USERS = 200_000  # of a step that are remembered; later ones are not counted


@dataclass
class SplitRecord:
    """The users of one step, since its leader began.

    Args:
        run, leg: the promotion and its step.
        planned: share of the users that infer was to serve, in (0, 1].
        tolerance: relative difference that is permitted, in [0, 1).

    Attributes:
        users, infer: users that count, and those of them that infer served.
        causes: "failover" or "breaker" -> users whom stable served in infer's place.
        apart: reason -> users to whom the share does not apply.
        log_e: largest evidence against the planned share, nats.
    """

    run: str
    leg: str
    planned: float
    tolerance: float
    users: int = 0
    infer: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    log_e: float = 0.0
    _first: dict[str, Assignment] = field(default_factory=dict)

    def record(self, assignments: Iterable[Assignment]) -> None:
        """Add users; those of another step are skipped, and so is a user that was added before."""
        for one in assignments:
            if (one.run, one.leg) != (self.run, self.leg):
                continue
            first = self._first.get(one.key)
            if first is None and len(self._first) < _USERS:
                self._first[one.key] = one
                self._count(one)
            elif first is not None and first.hit and one.because == FAILOVER and one.at == first.at:
                self._first[one.key] = one
                if not one.apart:
                    self.infer -= 1
                    self.causes[FAILOVER] += 1
        if self.users:
            test = PlannedShare(self.planned, self.tolerance)
            self.log_e = max(self.log_e, float(test.log_e(self.infer, self.users)))

    def _count(self, one: Assignment) -> None:
        if one.apart:
            self.apart[one.apart] += 1
            return
        self.users += 1
        self.infer += one.hit
        if one.because:
            self.causes[one.because] += 1
