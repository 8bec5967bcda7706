# All relations of one kernel, one after another.

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from servanda.engines.http import HTTPEngine
from servanda.engines.http.transport import StatusError
from servanda.errors import MeasurementError
from servanda.judgement.clauses.fidelity import positions_of
from servanda.runner.relations.judge import Finding, Judge, Limit, Measured, Rounding, limit_of
from servanda.runner.relations.observation import Observation
from servanda.runner.relations.relation import RELATIONS, Cases, Pair
from servanda.runner.relations.subject import Request, Subject
from servanda.theory.sampling import uniforms
from servanda.theory.stats.alpha import log_price
from servanda.theory.stats.bets import Refutation
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio
from servanda.theory.stats.pit import log_densities

# The relation sampling: tokens against the logprobs that are reported with them.
#
# An e-value rejects it at any time.  That it was not rejected says little by itself: it holds once
# so many tokens were drawn that a temperature off by a fifth would have been rejected.


DRAWS = "sampling"
_AT_ONCE, WIDTH = 16, 32  # requests of a round, and their new tokens at least
_LEAST, _MOST = 4096, 8192  # tokens that are drawn in all
_OFF = 0.2  # of a temperature: a smaller error may go unnoticed


def draws(judge: Judge, cases: Cases) -> Finding:
    """Whether drawn tokens follow their logprobs: as requests that name the sampling ask for them,
    and as those that leave it to the server do.
    """
    found = _drawn(judge, cases)
    engine = judge.subject.engine
    if found.outcome != "holds" or not isinstance(engine, HTTPEngine):
        return found
    if told := engine.server.fills_in:
        words = ", ".join(f"{name} {value:g}" for name, value in told.items())
        note = f"; the server says that a request which names no parameters gets {words}"
        return replace(found, answer=f"{found.answer}{note}")
    bare = _drawn(judge, replace(cases, seed=cases.seed + 1), named=False)
    if bare.outcome == "holds":
        return replace(found, answer=f"{found.answer}; the same where a request names none")
    says = "no defaults" if engine.server.defaults is None else "neutral defaults"
    why = f"of requests that name no parameters, for which the server tells {says}: {bare.answer}"
    return replace(bare, answer=why)


def _drawn(judge: Judge, cases: Cases, named: bool = True) -> Finding:
    seen: list[Observation] = []
    drawn, known, off = 0, Finding(DRAWS, "inconclusive", "", alpha=judge.alpha), None
    some = [*cases.some(_AT_ONCE)] if cases.given is None else [cases.given]
    request = replace(some[0], others=tuple(one.prompt for one in some[1:]))
    request = replace(request, width=max(cases.width, WIDTH))
    while drawn < _MOST:
        judge.watch(drawn, _MOST)
        seen += judge.subject.drawn(replace(request, seed=cases.seed + len(seen)), named)
        drawn = sum(len(one.tokens) for one in seen)
        evidence = _evidence(seen, cases.seed)
        if evidence is None or not evidence.n:
            why = "the kernel reports no likeliest tokens, and no ranks, beside those that it draws"
            return Finding(DRAWS, "untestable", why)
        known = replace(known, answers=len(seen), positions=evidence.n)
        e = f"e-value {math.exp(min(evidence.log_e, 700.0)):.2g} over {evidence.n:,} tokens"
        if evidence.log_e >= log_price(judge.alpha):
            why = f"the tokens do not follow the logprobs that are reported with them ({e})"
            return replace(known, outcome="violated", answer=why)
        off = _seen(seen, judge.alpha)
        if off is not None and off <= _OFF + 1e-9 and drawn >= _LEAST:
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


REPLAY, ORDER, LENGTH, CACHE = "replay", "order", "prompt-length", "prefix-cache"
UPDATE = "update"
NAMES = (*(name for name in RELATIONS if name != ORDER), DRAWS, UPDATE, ORDER)
_REPLAYS = 3
_WEIGHTS_ALONE = "weight_only|a16|int4_g"
_FORMAT = ("dtype", "quantization", "kv_cache", "kv_cache_dtype")  # facts of a server


@dataclass(frozen=True)
class Options:
    """What is tested, and how.

    Args:
        only: names of relations; () for all.
        limit: logit noise, nats, in place of the kernel's own rounding.
        bitwise: whether every bit has to be equal.
        rounding: of the kernel's number format; None: as it says, or as its differences show.
        alpha: the probability that a test of draws rejects what holds.
        update: a command that lets the server take over its own weights again.
    """

    only: tuple[str, ...] = ()
    limit: float | None = None
    bitwise: bool = False
    rounding: Rounding | None = None
    alpha: float = 0.05
    update: str | None = None


def wanted(options: Options, given: bool) -> tuple[list[str], list[str]]:
    """Relations that are asked for, and those that are measured: the rounding of a kernel shows in
    the other relations.
    """
    asked = [name for name in NAMES if name in options.only or not options.only]
    kernel_relations = [name for name in RELATIONS if name in asked]
    needs = [REPLAY] if kernel_relations else []
    if len(kernel_relations) < 3 and options.limit is None and not (options.bitwise or given):
        needs += [LENGTH] if {*kernel_relations} - {REPLAY, ORDER} else []
    return asked, [name for name in RELATIONS if name in {*needs, *kernel_relations}]


def expected(subject: Subject, cases: Cases, options: Options) -> dict[str, int]:
    """About how many requests each relation sends."""
    asked, measured = wanted(options, cases.given is not None)
    counts = {}
    for name in dict.fromkeys([*measured, *asked]):
        if name == DRAWS:
            counts[name] = (2 if subject.remote else 1) * _LEAST // WIDTH
        elif name != UPDATE and not RELATIONS[name].refusal(subject):
            relation = RELATIONS[name]
            counts[name] = sum(relation.sends(one) for one in relation.requests(cases))
    return counts


def relations(
    subject: Subject,
    cases: Cases,
    options: Options,
    watch: Callable[[str, int, int], None] | None = None,
) -> Iterator[Finding]:
    """The findings.  A limit follows from what the other relations show, so most of them are known
    together; `order` is the last, after all other requests.
    """
    asked, measured = wanted(options, cases.given is not None)
    judge = Judge(subject, options.alpha / 2, options.bitwise)

    def watched(name: str) -> Judge:
        return replace(judge, watch=partial(watch, name)) if watch else judge

    pairs: dict[str, list[Pair]] = {}
    failed: dict[str, Finding] = {}

    def found(name: str) -> Finding:
        return failed.get(name) or _judged(name, judge, pairs, cases, options)

    for name in (name for name in measured if name != ORDER):
        relation = RELATIONS[name]
        if relation.refusal(subject):
            continue
        requests = relation.requests(cases)
        if name == REPLAY and cases.given is not None:
            requests *= _REPLAYS
        try:
            pairs[name] = watched(name).measured(relation, requests)
        except MeasurementError as error:
            failed[name] = _of_error(subject, name, error)
            if name == REPLAY or subject.stopped():
                yield failed[name]
                return
        if name == REPLAY:
            alike = all(p.difference.other_token is None for p in pairs[name])
            judge = replace(judge, draws=alike)
    yield from (found(name) for name in asked if name in RELATIONS and name != ORDER)
    for name in (DRAWS, UPDATE, ORDER):
        if name not in asked:
            continue
        try:
            if name == DRAWS:
                yield draws(watched(name), cases)
            elif name == UPDATE:
                yield _update(judge, cases, pairs, options)
            else:
                pairs[name] = watched(name).measured(
                    RELATIONS[name], RELATIONS[name].requests(cases)
                )
                yield found(name)
        except MeasurementError as error:
            yield _of_error(subject, name, error)
            if subject.stopped():
                return


def _judged(
    name: str,
    judge: Judge,
    pairs: Mapping[str, list[Pair]],
    cases: Cases,
    options: Options,
) -> Finding:
    """The answer of a relation that was measured."""
    relation, subject = RELATIONS[name], judge.subject
    if why := relation.refusal(subject):
        return Finding(name, "untestable", why)

    def more() -> list[Pair]:
        fresh = replace(cases, seed=cases.seed + 10_007, round=cases.round + 1)
        return judge.measured(relation, relation.requests(fresh))

    # replays that draw other tokens are the violation of the relation replay
    one = replace(judge, draws=True) if name == REPLAY else judge
    limit = _limit(name, pairs, subject, options)
    found = one.judged(relation, pairs[name], limit, None if cases.given is not None else more)
    if name == CACHE and subject.claimed and found.outcome != "violated":
        prompt, tokens = max(subject.claimed.items(), key=lambda one: one[1])
        why = f"{tokens} of the {len(prompt)} tokens of a request under a salt of its own are said "
        why += "to be read from the cache"
        example = Request(prompt, 1, seed=cases.seed)
        return replace(found, outcome="violated", answer=why, example=example)
    return found


def _limit(
    name: str, pairs: Mapping[str, Sequence[Pair]], subject: Subject, options: Options
) -> Limit:
    measured = {key: Measured.of(value) for key, value in pairs.items()}
    rounding = options.rounding or rounding_of(subject)
    return limit_of(name, measured, rounding, options.limit)


def rounding_of(subject: Subject) -> Rounding | None:
    """The rounding of the kernel's number format; None of a server that does not say it."""
    kernel, facts = subject.kernel, subject.engine.describe().fingerprint
    dtype, formats = kernel.dtype, (kernel.quantization, kernel.kv_cache)
    if subject.remote:
        told = [facts.get(f"kernel.{key}") or facts.get(key) for key in _FORMAT]
        if told[0] is None:
            return None
        dtype, formats = told[0], (*told[1:],)
    # weights alone are rounded once, and then the same for every request
    text = " ".join(name for name in formats if name and not re.search(_WEIGHTS_ALONE, name))
    if re.search("(int|fp|w|q)4", text):
        return "4-bit"
    if re.search("(int|fp|w|q)8", text):
        return "8-bit"
    return "float32" if dtype in ("float32", "float64") else "16-bit"


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
    return Finding(name, "violated", f"{what} {answer}", answers=1, example=request)


def _update(
    judge: Judge, cases: Cases, measured: Mapping[str, list[Pair]], options: Options
) -> Finding:
    """Before and after the command, with an empty cache and with the cache of before."""
    if options.update is None:
        why = "name the command that updates the server with its own weights: --update COMMAND"
        return Finding(UPDATE, "untestable", why)
    cache, subject = RELATIONS[CACHE], judge.subject
    requests = cache.requests(cases)
    cached = not cache.refusal(subject)
    before = [subject.alone(request) for request in requests]
    salts = [subject.fill(request) if cached else None for request in requests]
    done = subprocess.run(options.update, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(
            f"the command of --update ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-300:]}",
            hint="run it by itself; it has to end with 0 once the weights are in place",
        )
    pairs = []
    for request, plain, salt in zip(requests, before, salts, strict=True):
        pairs.append(Pair(request, plain, subject.answer(request), "after the update"))
        if salt is not None:
            # an update may empty the cache: that nothing was read is no gap of the test
            where = "after the update, from what was cached before it"
            pairs.append(Pair(request, plain, subject.warm(request, salt), where))
    limit = _limit(UPDATE, measured, subject, options)
    found = judge.judged(RELATIONS[REPLAY], pairs, limit, small=False)
    return replace(found, relation=UPDATE)
