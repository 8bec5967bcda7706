# The preflight sync test over several replicas: each is judged by its own scores.
#
# One replica leads a test, and all others are scored at each of its steps.  Those that score as it
# does at every step share its result; the others get a test that one of them leads.
#
# Axes: N scored tokens.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain, cycle, islice, pairwise

import torch
from torch import Tensor, nn

from servanda.report.format import count
from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.rl.sync_drill.report import Preflight, ReplicaResult
from servanda.rl.sync_drill.response_slope import RESOLUTION, distance
from servanda.rl.sync_drill.result import POISON_FLOORS, POISON_NATS
from servanda.rl.sync_drill.servers.checkpoint_sync import CheckpointSync
from servanda.rl.sync_drill.servers.replicas import Replica, Replicas
from servanda.rl.sync_drill.trainee import Rows, Trainee, flat, probes, train_scores
from servanda.rl.sync_drill.weight_groups import weight_groups
from servanda.rl.sync_drill.weight_snapshot import Weights
from servanda.theory.sampling import Floats

# Digests that a server reports of its tensors, joined with the trainer's.
#
# Whether a digest changes needs no knowledge of layouts.  Equality with the trainer's bytes is
# claimed only where a tensor, or a known fusion of several, has them in some dtype.


Digests = Mapping[str, str]

# fused tensors of vLLM and SGLang -> their parts in a checkpoint, rows one after another
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHORT = 16  # hexadecimal digits of a digest of SGLang: the first half of 8 bytes of SHA-256
# of no bytes: vLLM on a CPU keeps the packed form of a matrix elsewhere, and empties the parameter
_EMPTY = hashlib.sha256().hexdigest()
_FEW = 4  # names in a line


@dataclass(frozen=True)
class DigestTrail:
    """Digests of one server at four times of a test.

    Args:
        found: before the first sync; idle: after a sync of unchanged weights.
        randomised: after a sync of random weights; returned: after the last sync.
    """

    found: Digests
    idle: Digests
    randomised: Digests
    returned: Digests


def digest_line(module: nn.Module, trail: DigestTrail) -> str:
    """What the digests of one server show, as text."""
    groups = weight_groups(Weights(module, copy=False).aliases)
    number = len(trail.returned)
    trail = DigestTrail(
        *({name: d for name, d in each.items() if d != _EMPTY} for each in astuple(trail))
    )
    equal = equal_tensors(module, trail.returned)
    still = sorted(name for name, d in trail.idle.items() if trail.randomised.get(name) == d)
    covered = {source for sources in equal.values() for source in sources}
    rest = [group.name for group in groups if not covered.issuperset(group.tensors)]
    parts = [
        f"{len(equal)} of {count(number, 'tensor')} have the trainer's bytes after the last sync",
        f"by behaviour only: {_few(rest)}" if rest else "each group is compared bit for bit",
    ]
    if empty := number - len(trail.returned):
        parts.append(f"{count(empty, 'digest')} of empty tensors, which show nothing")
    parts += [
        f"{label}: {_few(names)}"
        for label, names in (
            ("changed by a sync of unchanged weights", unequal(trail.found, trail.idle)),
            ("not changed by a sync of random weights", still),
            ("not as before after the last sync", unequal(trail.idle, trail.returned)),
        )
        if names
    ]
    return "; ".join(parts)


def unequal(before: Digests, after: Digests) -> list[str]:
    """Names of tensors that do not have the same digest at both times."""
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))


def equal_tensors(module: nn.Module, digests: Digests) -> dict[str, tuple[str, ...]]:
    """Tensors of a server with the trainer's bytes, and the trainer's tensors they consist of."""
    own = dict(module.named_parameters())
    joined = {name: sources for name in digests if (sources := _sources(name, own))}
    size = {name: sum(own[source].numel() for source in joined[name]) for name in joined}
    dtypes = [*dict.fromkeys([*(p.dtype for p in own.values()), *_DTYPES])]
    equal: dict[str, tuple[str, ...]] = {}
    # the smallest first: one that is equal tells the server's dtype
    for name in sorted(joined, key=lambda name: size[name]):
        for dtype in dtypes:
            if _is_digest(digests[name], [own[source].detach() for source in joined[name]], dtype):
                equal[name], dtypes = joined[name], [dtype]
                break
    return equal


def _sources(name: str, own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The trainer's tensors of which a server's tensor may consist; () where unknown."""
    name = name.rpartition(":")[2]
    if name in own:
        return (name,)
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            sources = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
            return sources if all(source in own for source in sources) else ()
    return ()


def _is_digest(digest: str, tensors: list[Tensor], dtype: torch.dtype) -> bool:
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.to("cpu", dtype).contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return digest in (sha.hexdigest(), sha.hexdigest()[:_SHORT])


def _few(names: list[str]) -> str:
    def shown() -> Iterator[str]:
        yield from (name.rpartition(":")[2] for name in names[:_FEW])
        if len(names) > _FEW:
            yield f"and {len(names) - _FEW} more"

    return ", ".join(shown())


# What replicas say and do besides scoring: the version they claim, the digests of their weights,
# and whether generation still reads prefixes that were computed with old weights.


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


_TESTS = 4  # most tests: replicas that score alike share one
# two replicas score alike if they differ by no more than this multiple of their difference at
# equal weights; a tensor that is missing on one of them adds more, and a wrong "no" costs a test
_ALIKE = 2.0
_WORST = ("violated", "inconclusive", "holds")


def preflight_of_replicas(
    trainee: Trainee, replicas: Replicas, drill: Callable[[Trainee], Preflight], seed: int
) -> Preflight:
    """Test each replica of a trainee by its own scores.

    Args:
        drill: the test of an engine that is scored as a whole.
        seed: of the probe tokens.
    """
    rows = probes(trainee, seed)
    train_N = flat(train_scores(trainee, rows), rows, "the trainer", "as found")
    facts = ReplicaFacts(trainee, replicas, rows, seed)
    results: dict[str, Preflight] = {}
    left = [*replicas.all]
    tests: list[Preflight] = []
    found: dict[str, list[list[Floats]]] = {}
    began: set[str] = set()  # replicas that a sync of another one's test has reached
    while left and len(tests) < _TESTS:
        led = _LedTest(trainee, replicas, left, None if tests else facts, found)
        result = drill(replace(trainee, sync=led.sync, score=led.score, replicas=None))
        tests.append(result)
        if result.cause == "never_synced" and left[0].url in began:
            cause = "stopped"
            sentence = result.sentence.replace(CAUSES[result.cause], CAUSES[cause])
            result = replace(result, cause=cause, sentence=sentence)
        began |= {replica.url for k, replica in enumerate(left) if k and led.moved(k)}
        alike = [replica for k, replica in enumerate(left) if not k or led.alike(k, train_N)]
        results |= {replica.url: result for replica in alike}
        left = [replica for replica in left if replica not in alike]
    facts.finish()
    judged = {url: facts.judged(url, result) for url, result in results.items()}
    return _together(replicas, judged, tests, facts)


@dataclass(frozen=True)
class _Call:
    """One scoring of all replicas: after how many syncs, and their scores."""

    syncs: int
    scores: tuple[Floats, ...]


class _LedTest:
    """One test by the scores of the first of some replicas; those of the others are kept.

    Args:
        found: scores before the first sync of all, by URL; the first test fills it.  A later test
            begins with them: what a sync of unchanged weights does, it does only once.
    """

    def __init__(
        self,
        trainee: Trainee,
        replicas: Replicas,
        asked: Sequence[Replica],
        facts: ReplicaFacts | None,
        found: dict[str, list[list[Floats]]],
    ) -> None:
        self.trainee, self.replicas, self.asked, self.facts = trainee, replicas, [*asked], facts
        self.found, self.left = found, [*found.get(asked[0].url, ())]
        self.calls: list[_Call] = []
        self.syncs, self.tried = 0, 0

    def sync(self) -> None:
        # after an error the servers get the weights, and no further questions
        facts = self.facts if self.tried == self.syncs else None
        self.tried += 1
        if facts:
            facts.before_sync(self.syncs)
        self.trainee.sync()
        self.replicas.each(lambda replica: replica.engine.accept_changes())
        self.syncs += 1
        if facts:
            facts.after_sync(self.syncs)

    def score(self, rows: Rows) -> Sequence[Floats]:
        if self.left and not self.syncs:
            return self.left.pop(0)
        answers = self.replicas.each(lambda replica: replica.score(rows), self.asked)
        flattened = [
            flat(answer, rows, replica.url, "score")
            for replica, answer in zip(self.asked, answers, strict=True)
        ]
        self.calls.append(_Call(self.syncs, tuple(flattened)))
        if not self.syncs:
            for replica, answer in zip(self.asked, answers, strict=True):
                self.found.setdefault(replica.url, []).append(answer)
        return answers[0]

    @property
    def _idle(self) -> _Call:
        """The scores after a sync of unchanged weights."""
        return next(call for call in self.calls if call.syncs == 1)

    def moved(self, k: int) -> bool:
        """Whether random weights reached replica k: its scores went over to the first one's."""
        before_N = self._idle.scores[k]
        random = (call.scores for call in self.calls if call.syncs == RANDOMISED)
        return any(
            distance(scores[k], scores[0]) < distance(before_N, scores[0]) / 2 for scores in random
        )

    def alike(self, k: int, train_N: Floats) -> bool:
        """Whether replica k scores as the first does, after each sync.

        Args:
            train_N: the trainer's scores at equal weights.
        """
        idle = self._idle
        own = [max(distance(scores, train_N), RESOLUTION) for scores in idle.scores]
        if max(own[k], own[0]) > _ALIKE * min(own[k], own[0]):
            return False
        apart = max(distance(idle.scores[k], idle.scores[0]), RESOLUTION)
        return all(
            distance(call.scores[k], call.scores[0])
            <= apart * (POISON_FLOORS if call.syncs == RANDOMISED else _ALIKE)
            for call in self.calls
            if call.syncs
        )


def _together(
    replicas: Replicas,
    judged: dict[str, Preflight],
    tests: Sequence[Preflight],
    facts: ReplicaFacts,
) -> Preflight:
    """One result: the worst replica's, with a line for each."""
    unknown = "its scores differ from those of each tested replica: test it alone"
    lines = tuple(
        ReplicaResult(r.url, judged[r.url].outcome, judged[r.url].cause, judged[r.url].sentence)
        if r.url in judged
        else ReplicaResult(r.url, "inconclusive", "", unknown)
        for r in replicas.all
    )
    worst = min(lines, key=lambda line: _WORST.index(line.outcome))
    base = judged.get(worst.url, tests[0])
    return replace(
        base,
        outcome=worst.outcome,
        cause=worst.cause,
        sentence=_sentence(lines),
        syncs=sum(test.syncs for test in tests),
        seconds=sum(test.seconds for test in tests),
        back=all(test.back for test in tests),
        returned=max(test.returned for test in tests),
        warnings=tuple(dict.fromkeys(chain(base.warnings, facts.warnings(judged)))),
        replicas=lines if len(lines) > 1 else (),
        digests=facts.digest_lines(),
    )


def _sentence(lines: Sequence[ReplicaResult]) -> str:
    """The outcome of all replicas: those that are not synced by name, the others by number."""
    sentences = list(dict.fromkeys(line.sentence for line in lines))
    if len(lines) == 1:
        return sentences[0]
    if len(sentences) == 1:
        return f"{sentences[0]}, on each of {len(lines)} replicas"
    wrong = [line for line in lines if line.outcome != "holds"]
    right = len(lines) - len(wrong)
    parts: list[str] = []
    for sentence in dict.fromkeys(line.sentence for line in wrong):
        urls = [line.url for line in wrong if line.sentence == sentence]
        parts.append(f"replica{'s' * (len(urls) > 1)} {', '.join(urls)}: {sentence}")
    follow = f"{right} other{'s' * (right > 1)} follow{'s' * (right == 1)}"
    return "; ".join([*parts, follow] if right else parts)
