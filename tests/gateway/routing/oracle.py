"""The machine of one slice with one cell, slow and obvious: it keeps every request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.oracles import NEG, POS, mixed, weights

RAMP = (0.01, 0.05, 0.25, 1.0)


def sum_of(terms: list[float]) -> float:
    top = max(terms)
    return top + math.log(math.fsum(math.exp(t - top) for t in terms))


def growth(bet: float, xs: list[float], limit: float) -> list[float]:
    return [math.log1p(bet * x) - math.log1p(bet * limit) for x in xs]


def above(xs: list[float], limit: float) -> float:
    """log of the weighted mean over bets of the product over requests, by the definition."""
    return mixed([math.fsum(growth(t, xs, limit)) for t in POS], weights(POS, limit))


def below(xs: list[float], limit: float) -> float:
    return mixed([math.fsum(growth(t, xs, limit)) for t in NEG], weights(NEG, limit))


def alarm(xs: list[float], limit: float) -> float:
    """log of the weighted mean over bets of the sum over beginnings k of the product from k on."""
    found = []
    for t in POS:
        steps = growth(t, xs, limit)
        found.append(sum_of([math.fsum(steps[k:]) for k in range(len(xs))]))
    return mixed(found, weights(POS, limit))


@dataclass
class Slice:
    """What there is to know of it, with the requests since its state began."""

    limit: float
    enter: float
    leave: float
    horizon: int
    keys: int
    dwell: float
    longest: float
    status: str = "active"
    since: float = 0.0
    away_s: float = 0.0
    step: int = 0
    step_since: float = 0.0
    step_at: int = 0
    calm: float | None = None
    last_move: float = -math.inf
    got: list[tuple[str, float]] = field(default_factory=list)

    @property
    def xs(self) -> list[float]:
        return [x for _, x in self.got]

    def request(self, key: str, x: float) -> None:
        latest = [k for k, _ in self.got[-128:]]
        if latest.count(key) <= max(2, len(latest) / min(4, self.keys)):
            self.got.append((key, x))

    def near(self) -> tuple[bool, float]:
        """Whether a price is paid, and the larger part of one."""
        if not self.got:
            return False, 0.0
        n, price = len(self.got), math.log(self.enter)
        dear = math.log(self.enter * self.horizon)
        first, second = above(self.xs, self.limit), alarm(self.xs, self.limit)
        parts = (
            first / price,
            (second - math.log(n)) / (dear - math.log(min(n, self.horizon))),
        )
        return first >= price or second >= dear, min(1.0, max(0.0, *parts))

    def look(self, now: float, room: bool) -> None:
        paid, near = self.near()
        if self.status == "quarantined":
            if now >= self.since + self.away_s:
                self.become("probation", now)
        elif self.status == "probation":
            if paid:
                self.away(now)
            elif self.got and below(self.xs, self.limit) >= math.log(self.leave):
                self.become("recovering", now)
                self.step, self.step_since, self.step_at, self.last_move = 0, now, 0, now
        elif paid:
            if room and len({k for k, _ in self.got[-128:]}) >= self.keys:
                self.away(now)
            elif self.status == "active":
                self.status, self.since, self.calm = "suspect", now, None
            else:
                self.calm = None
        elif self.status == "active" and near >= 1 / 4:
            self.status, self.since, self.calm = "suspect", now, None
        elif self.status == "suspect":
            self.calm = (now if self.calm is None else self.calm) if near < 1 / 16 else None
            if self.calm is not None and now >= self.calm + self.dwell:
                self.status, self.since, self.calm = "active", now, None
        elif self.status == "recovering":
            rested = now >= self.step_since + self.away_s / 4
            if rested and len(self.got) >= self.step_at + 20 and near < 1 / 4:
                if self.step == 3:
                    self.become("active", now)
                    self.step = 0
                else:
                    self.step += 1
                    self.step_since, self.step_at = now, len(self.got)

    def become(self, status: str, now: float) -> None:
        self.status, self.since, self.got, self.calm = status, now, [], None

    def away(self, now: float) -> None:
        again = self.status in ("probation", "recovering")
        again = again or now < self.last_move + 2 * self.away_s
        self.away_s = min(self.longest, 2 * self.away_s) if again else self.dwell
        if self.status != "probation":
            self.last_move = now
        self.become("quarantined", now)
        self.step = 0

    @property
    def share(self) -> float:
        if self.status == "recovering":
            return RAMP[self.step]
        return 0.0 if self.status in ("quarantined", "probation") else 1.0
