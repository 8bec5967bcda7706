# A gateway that is told to end, one that is killed, and one that cannot write its log.

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from benchmarks.gateway.chaos.asking import counted, full, gaps, settled
from benchmarks.gateway.chaos.finding import Finding, during, scenario, well
from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.traffic import Outcome, Spell

_SLOW_S = 0.5  # of every answer, so that there is always somebody under way
_MOMENT_S = 0.15  # between an event here and what a client made of it, on a busy machine


@dataclass
class _Restart:
    """Ends a deployment, and starts it a second later.

    Args:
        told: just before the signal; gone: just after it; ended: when there was no process left;
            back: when all is there again.
    """

    d: Deployment
    how: int
    codes: list[int | None] = field(default_factory=list)
    told: float = 0.0
    gone: float = 0.0
    ended: float = 0.0
    back: float = 0.0

    def __call__(self) -> None:
        self.told = time.monotonic()
        self.codes.append(self.d.stop(self.how))
        self.gone, self.ended = self.d.signalled, time.monotonic()
        time.sleep(1.0)
        self.d.start()
        self.back = time.monotonic()


async def _under(found: Finding, d: Deployment, how: int) -> tuple[Outcome, _Restart]:
    again = _Restart(d, how)
    for pool in ("infer", "stable"):
        d.behave(pool, "slow", seconds=_SLOW_S)
    own = await during(found, d, 10.0, (1.5, again))
    for pool in ("infer", "stable"):
        d.behave(pool)
    # whoever met nobody came while nothing listened, and nobody else had to
    out = [one for one in own.spells if one.fate == "nobody" and not _while_down(one, again)]
    found.check(not out, f"{len(out)} met nobody although something listened")
    return own, again


def _while_down(one: Spell, again: _Restart) -> bool:
    return again.told - _MOMENT_S <= one.began <= again.back


def _silence(own: Outcome) -> str:
    met_nobody = [one.began for one in own.spells if one.fate == "nobody"]
    if not met_nobody:
        return "something listened all the time"
    return f"nothing listened for {max(met_nobody) - min(met_nobody):.1f} s"


async def _sound(found: Finding, d: Deployment) -> None:
    """All is well again, and the log of sampled requests lacks none."""
    await settled(d)
    await well(found, d)
    await settled(d)
    odd = gaps(d)
    found.check(not odd, f"the log of requests: {'; '.join(odd[:3])}")


@scenario("SIGTERM under traffic, and a start 1 s later")
async def restarted(d: Deployment, found: Finding) -> None:
    own, again = await _under(found, d, signal.SIGTERM)
    found.check(again.codes == [0], f"it ended with {again.codes}")
    under_way = [one for one in own.under_way(again.told) if one.began < again.told - _MOMENT_S]
    answered = [one for one in under_way if one.fate == "answered"]
    found.check(bool(under_way), "nobody was under way")
    found.check(len(answered) == len(under_way), "not all that were under way were answered")
    cut = [one for one in own.spells if one.fate == "broken" and not _while_down(one, again)]
    found.check(not cut, f"{len(cut)} were cut off before or afterwards")
    found.notes.append(f"all {len(under_way)} that were under way were answered")
    found.notes.append(_silence(own))
    await _sound(found, d)


@scenario("the gateway was killed under traffic, and started again 1 s later")
async def gateway_killed(d: Deployment, found: Finding) -> None:
    own, again = await _under(found, d, signal.SIGKILL)
    under_way = own.under_way(again.told)
    cut = [one for one in own.spells if one.fate == "broken"]
    # a process that was killed takes a moment to vanish, and somebody may still reach it then
    others = [one for one in cut if one.began > again.gone + _MOMENT_S or one.ended < again.told]
    found.check(not others, f"{len(others)} were cut off that were not under way")
    found.notes.append(f"{len(under_way)} were under way, and {len(cut)} were cut off")
    found.notes.append(_silence(own))
    await _sound(found, d)


@scenario("SIGTERM with --drain 3s, and a start 1 s later")
async def drained(d: Deployment, found: Finding) -> None:
    options, unready = d.options, list[int]()
    d.options = (*options, "--drain", "3s")
    again = _Restart(d, signal.SIGTERM)
    try:
        d.stop()
        d.start()
        act, looks = (1.5, again), [(at, lambda: unready.append(d.readyz())) for at in (1.0, 3.0)]
        own = await during(found, d, 10.0, act, *looks)
    finally:
        d.options = options
    found.check(again.codes == [0], f"it ended with {again.codes}")
    found.check(unready == [200, 503], f"/readyz had {unready}, before and after the signal")
    own_s = again.ended - again.told
    found.check(own_s >= 3.0, f"it ended after {own_s:.1f} s")
    lost = [one for one in own.spells if one.fate != "answered" and one.began < again.told + 3.0]
    found.check(not lost, f"{len(lost)} were not answered that came while it drained")
    found.notes.append(f"it answered on for {own_s:.1f} s; {_silence(own)}")
    d.stop()
    d.start()
    await _sound(found, d)


@scenario("the log of sampled requests took no byte for 3 s, as where a disk is full")
async def log_full(d: Deployment, found: Finding) -> None:
    problems: list[str] = []
    before = counted(d, "sampled")
    acts = full(d.gateway_pid, 1.0, 4.0)
    own = await during(found, d, 6.0, *acts, (3.5, lambda: problems.append(counted(d, "log"))))
    found.all_answered(own)
    found.check(any(problems), "the leader was not told that the log takes no rows")
    await _sound(found, d)
    found.check(not counted(d, "log"), f"the log: {counted(d, 'log')}")
    rows = counted(d, "sampled") - before
    found.notes.append(f"of {rows} sampled requests the log has every number")
