# What replicas say and do besides scoring: the version they claim, the digests of their weights,
# and whether generation still reads prefixes that were computed with old weights.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, cycle, islice, pairwise

from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.response_slope import RESOLUTION
from servanda.rl.sync_drill.result import POISON_FLOORS, POISON_NATS
from servanda.rl.sync_drill.servers.checkpoint_sync import CheckpointSync
from servanda.rl.sync_drill.servers.replicas import Replica, Replicas
from servanda.rl.sync_drill.servers.server_digests import Digests, DigestTrail, digest_line
from servanda.rl.sync_drill.trainee import Rows, Trainee

_PROMPTS = 8  # of which one token each is generated
_IDLE, RANDOMISED = 1, 2  # syncs after which all weights are as found, and random
_FOUND, _RETURNED = 0, -1


class ReplicaFacts:
    """Facts of all replicas, gathered during the first test."""

    def __init__(self, trainee: Trainee, replicas: Replicas, rows: Rows, seed: int) -> None:
        self.trainee, self.replicas, self.seed = trainee, replicas, seed
        self.tokens = [*chain(*rows)]
        self.versions: dict[str, list[str | None]] = {r.url: [] for r in replicas.all}
        self.digests: dict[str, dict[int, Digests]] = {r.url: {} for r in replicas.all}
        self.gaps: dict[str, list[float]] = {r.url: [] for r in replicas.all}

    def before_sync(self, syncs: int) -> None:
        if syncs == _FOUND:
            self._told()
            self._digested(_FOUND)
        if syncs == _IDLE:
            self._generated()
            # once more: a server whose cache is flushed before it scores has lost them
            self.replicas.each(lambda r: r.draw(self._prompts(r), self.seed))

    def after_sync(self, syncs: int) -> None:
        self._told()
        if syncs in (_IDLE, RANDOMISED):
            self._digested(syncs)
        if syncs == RANDOMISED:
            self._generated()

    def finish(self) -> None:
        """Ask for digests after the last sync."""
        self._digested(_RETURNED)

    def judged(self, url: str, result: Preflight) -> Preflight:
        """A replica's result with what its scores alone cannot show."""
        versions = self.versions[url]
        pairs = list(pairwise(versions))
        if result.cause == "never_synced" and all(a != b for a, b in pairs):
            return _violated(result, "version_only", f"{versions[0]} to {versions[-1]}")
        if result.cause or not self._is_stale(url):
            return result
        return _violated(result, "stale_cache", f"it {self._gap(url)}")

    def warnings(self, judged: Mapping[str, Preflight]) -> Iterator[str]:
        for url, versions in self.versions.items():
            told = [version for version in versions if version is not None]
            own = isinstance(self.trainee.sync, CheckpointSync)  # it names no version
            if told and len({*told}) == 1 and not own:
                yield (
                    f"{url} claims the weight version {told[0]!r} before and after every sync: "
                    "its version does not tell new weights from old ones"
                )
            if url in judged and judged[url].cause != "stale_cache" and self._is_stale(url):
                yield f"{url} also {self._gap(url)}: its prefix cache outlives a sync"
            if url in judged and judged[url].cause == "late" and len({*told}) > 1:
                yield f"{url} claims a new weight version before the weights arrive"

    def digest_lines(self) -> tuple[str, ...]:
        """For each replica that reports digests: which tensors were compared bit for bit."""
        times = (_FOUND, _IDLE, RANDOMISED, _RETURNED)
        trails = {
            url: DigestTrail(*(of[time] for time in times))
            for url, of in self.digests.items()
            if {*times} <= of.keys()
        }
        return tuple(f"{u}: {digest_line(self.trainee.module, t)}" for u, t in trails.items())

    def _told(self) -> None:
        for replica, version in zip(
            self.replicas.all, self.replicas.each(Replica.version), strict=True
        ):
            self.versions[replica.url].append(version)

    def _digested(self, time: int) -> None:
        for replica, digests in zip(
            self.replicas.all, self.replicas.each(Replica.digests), strict=True
        ):
            if digests is not None:
                self.digests[replica.url][time] = digests

    def _generated(self) -> None:
        gaps = self.replicas.each(lambda r: r.decode_gap(self._prompts(r), self.seed))
        for replica, gap in zip(self.replicas.all, gaps, strict=True):
            self.gaps[replica.url].append(gap)

    def _prompts(self, replica: Replica) -> Rows:
        """Prompts that are long enough for a prefix cache, always the same ones."""
        tokens, length = self.tokens, replica.cached_tokens
        starts = range(0, len(tokens), -(-len(tokens) // _PROMPTS))
        return [[*islice(cycle(tokens), start, start + length)] for start in starts]

    def _gap(self, url: str) -> str:
        gap = self.gaps[url][-1]
        return f"generates tokens whose logprobs differ from their scores by {gap:.2g} nats"

    def _is_stale(self, url: str) -> bool:
        """Whether random weights moved generation away from scoring, on prompts known before."""
        if len(self.gaps[url]) < RANDOMISED:
            return False
        before, after = self.gaps[url][:RANDOMISED]
        return after > max(POISON_FLOORS * max(before, RESOLUTION), POISON_NATS)


def _violated(result: Preflight, cause: str, detail: str) -> Preflight:
    sentence = f"{CAUSES[cause]} ({detail})"
    return replace(result, outcome="violated", cause=cause, sentence=sentence)
