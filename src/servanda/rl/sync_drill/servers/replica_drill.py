# The preflight sync test over several replicas: each is judged by its own scores.
#
# One replica leads a test, and all others are scored at each of its steps.  Those that score as it
# does at every step share its result; the others get a test that one of them leads.
#
# Axes: N scored tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from servanda.rl.sync_drill.diagnosis import CAUSES
from servanda.rl.sync_drill.report import Preflight, ReplicaResult
from servanda.rl.sync_drill.response_slope import RESOLUTION, distance
from servanda.rl.sync_drill.result import POISON_FLOORS
from servanda.rl.sync_drill.servers.replica_facts import RANDOMISED, ReplicaFacts
from servanda.rl.sync_drill.servers.replicas import Replica, Replicas
from servanda.rl.sync_drill.trainee import Rows, Trainee, flat, probes, train_scores
from servanda.theory.sampling import Floats

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
