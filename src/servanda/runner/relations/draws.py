# The relation draws: tokens against the logprobs that are reported with them.
#
# An e-value rejects it at any time.  That it was not rejected says little by itself: it holds once
# so many tokens were drawn that a temperature off by a fifth would have been rejected.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from servanda.judgement.clauses.strength import positions_of
from servanda.runner.relations.judge import Finding, Judge
from servanda.runner.relations.observation import Observation
from servanda.runner.relations.relation import Cases
from servanda.theory.sampling import uniforms
from servanda.theory.stats.likelihood_ratio import LikelihoodRatio
from servanda.theory.stats.pit import log_densities
from servanda.theory.stats.refutation import Refutation

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
        if evidence.log_e >= -math.log(judge.alpha):
            why = f"the tokens do not follow the logprobs reported with them ({e})"
            return replace(known, outcome="violated", answer=why)
        off = _seen(seen, judge.alpha)
        if off is not None and off <= _OFF + 1e-9:
            why = f"as reported, with a temperature within {100 * off:.3g} % ({e})"
            return replace(known, outcome="holds", answer=why)
        e += f", rejected from {1 / judge.alpha:.0f}"
        known = replace(known, answer=f"not rejected ({e}), and {_strength(off)}")
    return known


def _strength(off: float | None) -> str:
    if off is None:
        return "so few tokens show no temperature, or their logprobs do not tell"
    return f"so few tokens show only a temperature that is off by {100 * off:.3g} % or more"


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
    reached = positions_of(np.exp(best_NK), {}, by_rank=by_rank).reached(-math.log(alpha))
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
