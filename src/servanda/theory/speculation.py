# Speculative sampling: with which probability a drafted token is accepted, and what replaces it.
#
# A draft q proposes x; the target p accepts it with probability min(1, p(x) / q(x)), or draws a
# replacement from max(p - q, 0), normalised.  Then the token follows p, and it is the draft's own
# with probability sum min(p, q) = 1 - TV(p, q).  A draft that is certain of its token (prompt
# lookup, the most likely token) has q(x) = 1: then x is accepted with probability p(x).
# Axes: V vocabulary.
#
# Source: Leviathan, Kalman, Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from servanda.theory.sampling import Floats, log_softmax


@dataclass(frozen=True)
class Verification:
    """How the target decides on a draft; the defaults leave its law as it is.

    Args:
        accepts: by the ratio of both probabilities; by the target's alone, which never accepts
            more; or a match: the target draws, and what is equal to the draft needs no new
            forward (llama.cpp).
        replaces: a rejected token from the difference max(p - q, 0) normalised; from the target
            without the token; from the target itself; or from the difference as it is, so that
            what is missing of 1 goes to the last id.
        bonus: the token after a draft that was accepted as a whole: from the target, or from the
            draft; or none, and the next draft begins there.
        drawn_at: the draft is drawn at this multiple of its temperature, which the rule does not
            know of.
        read_at: the target's probabilities of drafted tokens are taken at this multiple of its
            temperature; those of a bonus are not.
    """

    accepts: Literal["ratio", "target", "match"] = "ratio"
    replaces: Literal["difference", "others", "target", "unnormalised"] = "difference"
    bonus: Literal["target", "draft", "none"] = "target"
    drawn_at: float = 1.0
    read_at: float = 1.0

    def target(self, logp_V: Floats) -> Floats:
        """The target's logprobs as the rule takes them for drafted tokens, [V], nats."""
        return logp_V if self.read_at == 1.0 else log_softmax(logp_V / self.read_at)


def acceptance(rule: Verification, logp_V: Floats, logq_V: Floats, token: int) -> float:
    """The probability that a drafted token is accepted.

    Args:
        logp_V, logq_V: the target's and the draft's logprobs, [V], nats.  Of a match, the
            probability is that of the target's own draw.
    """
    if rule.accepts == "ratio":
        return float(np.exp(min(0.0, logp_V[token] - logq_V[token])))
    return float(np.exp(logp_V[token]))


def replacement(rule: Verification, logp_V: Floats, logq_V: Floats, token: int) -> Floats:
    """The law of the token in a rejected one's place: logprobs, [V], nats; they may be unnormalised
    by a rule that is wrong."""
    if rule.replaces == "target":
        return logp_V
    if rule.replaces == "others" or rule.accepts == "match":
        rest_V = np.exp(logp_V)
        rest_V[token] = 0.0
    else:
        rest_V = np.maximum(np.exp(logp_V) - np.exp(logq_V), 0.0)
    mass = rest_V.sum()
    if not mass > 0.0:  # two laws that are equal up to rounding reject nothing
        return logp_V
    if rule.replaces == "unnormalised":
        last = int(np.flatnonzero(np.isfinite(logp_V))[-1])
        rest_V[last] += 1.0 - mass
        mass = 1.0
    with np.errstate(divide="ignore"):
        return np.log(rest_V / mass)


def expected_acceptance(logp_V: Floats, logq_V: Floats) -> float:
    """sum min(p, q) = 1 - TV(p, q): the share of drafted tokens that the exact rule accepts.

    >>> round(expected_acceptance(np.log([0.5, 0.5]), np.log([0.8, 0.2])), 6)
    0.7
    """
    return float(np.minimum(np.exp(logp_V), np.exp(logq_V)).sum())
