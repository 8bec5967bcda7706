# All relations of one kernel, one after another.

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from servanda.engines.http.transport import StatusError
from servanda.errors import MeasurementError
from servanda.judgement.clauses.fidelity import positions_of
from servanda.runner.relations.judge import Finding, Judge, Pair
from servanda.runner.relations.observation import Observation
from servanda.runner.relations.relation import RELATIONS, Cases
from servanda.runner.relations.subject import Subject
from servanda.theory.sampling import uniforms
from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import Refutation
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio
from servanda.theory.stats.pit import log_densities

# The relation draws: tokens against the logprobs that are reported with them.
#
# An e-value rejects it at any time.  That it was not rejected says little by itself: it holds once
# so many tokens were drawn that a temperature off by a fifth would have been rejected.


DRAWS = "draws"
_AT_ONCE, _WIDTH = 16, 32  # requests of a round, and their new tokens at least
_MOST = 8192  # tokens that are drawn in all
_OFF = 0.2  # of a temperature: a smaller error may go unnoticed


def draws(judge: Judge, cases: Cases) -> Finding:
    """Whether drawn tokens follow their logprobs."""
    seen: list[Observation] = []
    drawn, known, off = 0, Finding(DRAWS, "inconclusive", "", alpha=judge.alpha), None
    requests = [*cases.some(_AT_ONCE)] if cases.given is None else [cases.given]
    while drawn < _MOST:
        judge.watch(drawn, _MOST)
        seen += judge.subject.each(requests, cases.seed + len(seen), max(cases.width, _WIDTH))
        drawn = sum(len(one.tokens) for one in seen)
        evidence = _evidence(seen, cases.seed)
        if evidence is None or not evidence.n:
            why = "the kernel reports no likeliest tokens, and no ranks, beside those that it draws"
            return Finding(DRAWS, "untestable", why)
        known = replace(known, requests=len(seen), positions=evidence.n)
        e = f"e-value {math.exp(min(evidence.log_e, 700.0)):.2g} over {evidence.n:,} tokens"
        if evidence.log_e >= log_price(judge.alpha):
            why = f"the tokens do not follow the logprobs reported with them ({e})"
            return replace(known, outcome="violated", answer=why)
        off = _seen(seen, judge.alpha)
        if off is not None and off <= _OFF + 1e-9:
            why = f"as reported, with a temperature within {100 * off:.3g} % ({e})"
            return replace(known, outcome="holds", answer=why)
        e += f", rejected from {1 / judge.alpha:.0f}"
        shown = "no temperature, or their logprobs do not tell"
        if off is not None:
            shown = f"only a temperature that is off by {100 * off:.3g} % or more"
        known = replace(known, answer=f"not rejected ({e}), and so few tokens show {shown}")
    return known


def _seen(seen: Sequence[Observation], alpha: float) -> float | None:
    """The smallest error of a temperature that these tokens would have shown, with probability 0.9;
    None where they would have shown none.
    """
    rows = [logp for one in seen for logp in one.logp]
    k = min((len(logp) for logp in rows), default=0)
    if k < 2:
        return None
    best_NK = np.array([[logp[i] for i in _best(logp)[:k]] for logp in rows])
    by_rank = any(one.mass_before for one in seen)
    reached = positions_of(np.exp(best_NK), {}, by_rank=by_rank).reached(log_price(alpha))
    colder, hotter = reached["colder"], reached["hotter"]
    return None if colder is None or hotter is None else max(1 - colder, hotter - 1)


def _evidence(seen: Sequence[Observation], seed: int) -> Refutation | None:
    """By the likeliest tokens of each step, or by the mass before the token."""
    rows = [(token, logp) for one in seen for token, logp in zip(one.tokens, one.logp, strict=True)]
    by_mass = [
        (before, logp[token])
        for one in seen
        if one.mass_before
        for before, token, logp in zip(one.mass_before, one.tokens, one.logp, strict=True)
    ]
    if by_mass:
        before_N, logp_N = np.array(by_mass).T
        u_N = before_N + uniforms(seed, "pit", 0, len(before_N)) * np.exp(logp_N)
        growth_J = log_densities(np.minimum(u_N, 1.0)).sum(axis=1)
        return Refutation(len(u_N), tuple(growth_J.tolist()))
    k = min((len(logp) - 1 for _, logp in rows), default=0)
    if k < 1:
        return None
    ids_NK = np.array([[*_best(logp)][:k] for _, logp in rows])
    logp_NK = np.array(
        [[logp[i] for i in ids] for ids, (_, logp) in zip(ids_NK, rows, strict=True)]
    )
    return LikelihoodRatio.of(ids_NK, logp_NK, np.array([token for token, _ in rows]))


def _best(logp: Mapping[int, float]) -> list[int]:
    return sorted(logp, key=lambda i: (-logp[i], i))


REPLAY = "replay"
UPDATE = "update"
NAMES = (*RELATIONS, DRAWS, UPDATE)
_REPLAYS = 3


@dataclass(frozen=True)
class Options:
    """What is tested, and how.

    Args:
        only: names of relations; () for all.
        limit: nats; None compares bits, and a difference that may be rounding is undecided.
        alpha: the probability that any test rejects a relation that holds.
        update: a command that lets the server take over its own weights again.
    """

    only: tuple[str, ...] = ()
    limit: float | None = None
    alpha: float = 0.05
    update: str | None = None


def relations(
    subject: Subject,
    cases: Cases,
    options: Options,
    watch: Callable[[str, int, int], None] | None = None,
) -> Iterator[Finding]:
    """The findings, each as soon as it is known; replays come first, for all others need them."""
    wanted = [name for name in NAMES if name in options.only or not options.only]
    limit, each = options.limit or 0.0, shared(options.alpha, len(wanted))
    judge = Judge(subject, limit, each, assumed=options.limit is None)

    def watched(name: str) -> Judge:
        return replace(judge, watch=partial(watch, name)) if watch else judge

    try:
        replayed, judge = _replays(watched(REPLAY), cases)
    except MeasurementError as error:
        yield _of_error(subject, REPLAY, error)
        return
    if REPLAY in wanted:
        yield replayed
    for name in wanted:
        if name == REPLAY:
            continue
        try:
            found, judge = _found(name, watched(name), judge, cases, options)
        except MeasurementError as error:
            found = _of_error(subject, name, error)
            if subject.stopped():
                yield found
                return
        yield found


def _found(
    name: str, now: Judge, judge: Judge, cases: Cases, options: Options
) -> tuple[Finding, Judge]:
    """A relation's answer, and the judge of those after it."""
    if name == DRAWS:
        return draws(now, cases), judge
    if name == UPDATE:
        return _update(now, cases, options.update), judge
    relation = RELATIONS[name]
    found = now.judge(relation, relation.requests(cases))
    if found.example is None or now.noisy or _repeats(now.subject, found):
        return found, judge
    # the replays before were equal by chance
    noisy = replace(now, noisy=True)
    return noisy.judge(relation, relation.requests(cases)), replace(judge, noisy=True)


def _of_error(subject: Subject, name: str, error: MeasurementError) -> Finding:
    """The answer where a request ended the server, or was answered with an error of the server.

    Raises:
        MeasurementError: the error, where it is another one.
    """
    request, failed = subject.last, isinstance(error, StatusError) and error.status >= 500
    stopped = request is not None and subject.stopped()
    if request is None or not (stopped or (failed and subject.longest)):
        raise error
    others = f" and {len(request.others)} others at once" if request.others else ""
    answer = f"a request of {len(request.prompt)} tokens with a seed{others}; prompts of up to "
    answer += f"{subject.longest} tokens were answered before"
    what = "the server stopped at" if stopped else f"{error.problems[0].message}, at"
    return Finding(name, "violated", f"{what} {answer}", requests=1, example=request)


def _replays(judge: Judge, cases: Cases) -> tuple[Finding, Judge]:
    """The relation replay, and the judge of all others, which knows whether replays differ."""
    relation = RELATIONS[REPLAY]
    requests = relation.requests(cases) * (1 if cases.given is None else _REPLAYS)
    pairs = judge.measured(relation, requests)
    found = judge.compared(relation, pairs, small=False)
    noisy = any(pair.difference.at is not None for pair in pairs)
    alike = all(pair.difference.other_token is None for pair in pairs)
    return found, replace(judge, noisy=noisy, draws=alike)


def _repeats(subject: Subject, found: Finding) -> bool:
    """Whether the answer to a counterexample is the same three times."""
    request = found.example
    if request is None:
        return True
    first, *more = (subject.answer(request) for _ in range(_REPLAYS))
    return all(Pair(request, first, again).difference.at is None for again in more)


def _update(judge: Judge, cases: Cases, command: str | None) -> Finding:
    """Before and after the command, with an empty cache and with the cache of before."""
    if command is None:
        why = "name the command that updates the server with its own weights: --update COMMAND"
        return Finding(UPDATE, "untestable", why)
    if judge.noisy:
        why = "replays differ, and before and after cannot be run in random order"
        return Finding(UPDATE, "untestable", why)
    relation, subject = RELATIONS["cache"], judge.subject
    requests = relation.requests(cases)
    cached = not relation.refusal(subject)
    before = [subject.answer(request) for request in requests]
    salts = [subject.fill(request) if cached else None for request in requests]
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(
            f"the command of --update ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-300:]}",
            hint="run it by itself; it has to end with 0 once the weights are in place",
        )
    pairs = []
    for request, plain, salt in zip(requests, before, salts, strict=True):
        pairs.append(Pair(request, plain, subject.answer(request)))
        if salt is not None:
            # an update may empty the cache: that nothing was read is no gap of the test
            pairs.append(Pair(request, plain, subject.warm(request, salt)))
    found = judge.compared(RELATIONS[REPLAY], pairs, small=False)
    return replace(found, relation=UPDATE)
