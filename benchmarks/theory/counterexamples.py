# Escapes: is there a run whose ratio drift is bounded, and whose gradient bias is not?
#
# Every escape holds the drift of each token that infer draws within a given |log w|, leaves out
# one assumption of the bound advantage x score norm x D_psi, and grows a scale.  `said` is what
# the bound gives when the assumption is forgotten, `exact` the bias by enumeration.  Where said
# stays and exact grows, or the other way round, ratio drift does not bound the bias.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.theory.random_kernels import Floats
from servanda.registry import Registry
from servanda.theory.bounds.importance_weights import PSI, weight_gap


@dataclass(frozen=True)
class Point:
    """One kernel pair of an escape, enumerated.

    Args:
        drift: the largest |log w| of a token that infer draws, nats.
        said: the bias that is left over as the ratios tell, the assumption forgotten.
        exact: the bias.
    """

    drift: float
    said: float
    exact: float

    @property
    def ratio(self) -> float:
        """How often the bias holds what was said of it; inf where that was nothing."""
        return self.exact / self.said if self.said > 0 else math.inf


@dataclass(frozen=True)
class Escape:
    """A way out of the bound.

    Args:
        scale: what is grown.
        assumption: of bounds.ASSUMPTIONS, which breaks; "" where the bound itself holds, and is
            read as what it is not.
        about: the run, in a sentence; instead: what bounds the bias all the same.
        at: (largest |log w|, scale) -> the pair.
    """

    name: str
    scale: str
    assumption: str
    about: str
    instead: str
    at: Callable[[float, int], Point]


ESCAPES: Registry[Escape] = Registry("escape")


def _escape(
    name: str, *, scale: str, assumption: str, about: str, instead: str
) -> Callable[[Callable[[float, int], Point]], Callable[[float, int], Point]]:
    def decorate(at: Callable[[float, int], Point]) -> Callable[[float, int], Point]:
        ESCAPES.add(name, Escape(name, scale, assumption, about, instead, at))
        return at

    return decorate


def _two_tokens(p: float, drift: float) -> tuple[Floats, Floats, Floats]:
    """(p, q, scores of one logit) of a token of mass p and the rest; infer draws it more often."""
    q = p * math.exp(drift)
    return np.array([p, 1 - p]), np.array([q, 1 - q]), np.array([1 - p, -p])


def _naive(p_V: Floats, q_V: Floats) -> tuple[float, float]:
    """(largest |log w|, D of no correction)."""
    log_ratio_V = np.log(p_V) - np.log(q_V)
    gap_V = weight_gap(log_ratio_V, PSI["naive"]())
    return float(np.abs(log_ratio_V).max()), float(q_V @ gap_V)


@_escape(
    "heavy advantages",
    scale="1 / mass of the rewarded token",
    assumption="advantage",
    about="one rare token is rewarded, and advantages are divided by their standard deviation: "
    "the rarer it is, the larger its advantage",
    instead="clip advantages, or declare the group: of n answers none exceeds (n - 1)/sqrt n",
)
def _advantages(drift: float, scale: int) -> Point:
    p_V, q_V, g_V = _two_tokens(1 / scale, drift)
    reward_V = np.array([1.0, 0.0])
    mean = p_V @ reward_V
    advantage_V = (reward_V - mean) / math.sqrt(p_V @ (reward_V - mean) ** 2)
    largest, gap = _naive(p_V, q_V)
    exact = abs(float((q_V - p_V) @ (advantage_V * g_V)))
    return Point(largest, gap, exact)


@_escape(
    "steep scores",
    scale="norm of grad log p",
    assumption="score_norm",
    about="the same two kernels, and a network whose logits are ever steeper in its weights",
    instead="contract on D_psi itself, or clip the gradient of each sample",
)
def _scores(drift: float, scale: int) -> Point:
    p_V, q_V, g_V = _two_tokens(0.5, drift)
    largest, gap = _naive(p_V, q_V)
    advantage_V = np.array([1.0, 0.0])
    return Point(largest, gap, abs(float((q_V - p_V) @ (advantage_V * scale * g_V))))


@_escape(
    "missing support",
    scale="tokens of an answer",
    assumption="support",
    about="the infer kernel never samples some tokens, so every sampled token has the same ratio, "
    "importance weights match it exactly, and sampled ratios show nothing",
    instead="D_psi includes mass that infer cannot sample (E w falls below 1): promise weight_gap "
    "with a bounded weighting, or support_mass",
)
def _support(drift: float, scale: int) -> Point:
    missing = -math.expm1(-drift)  # so that log w of every drawn token is -drift
    p_V, g_V = np.array([missing, 1 - missing]), np.array([1 - missing, -missing])
    # psi = w: of what is drawn nothing is left over, and what is missing is not drawn
    weighed_V = np.array([0.0, p_V[1]])
    advantage_V = np.array([1.0, 0.0])
    of_token = abs(float((weighed_V - p_V) @ (advantage_V * g_V)))
    return Point(abs(math.log(p_V[1])), 0.0, scale * of_token)


@_escape(
    "answers divided by their own length",
    scale="tokens of the long answer",
    assumption="constant_divisor",
    about="the first token decides between an answer of one token and a long one, and is the only "
    "token on which the kernels differ: the mean over tokens forgets it",
    instead="loss: sequence_mean counts the t-th token 1/t; or divide by a constant",
)
def _length(drift: float, scale: int) -> Point:
    p_V, q_V, g_V = _two_tokens(0.5, drift)  # short, long
    length_V = np.array([1.0, scale])
    largest, gap = _naive(p_V, q_V)
    mean_gap = gap / float(q_V @ length_V)  # of all tokens drawn, one of each answer differs
    advantage_V = np.array([1.0, -1.0])
    return Point(largest, mean_gap, abs(float((q_V - p_V) @ (advantage_V * g_V / length_V))))


@_escape(
    "long answers, corrected token by token",
    scale="tokens of an answer",
    assumption="token_level",
    about="each token is weighted by its own ratio, exactly, and the reward is that of the whole "
    "answer: the tokens before and after were still sampled by infer",
    instead="the trajectory bounds (sequence TV, chi2), or weights of whole answers; for long "
    "answers reward_gap",
)
def _horizon(drift: float, scale: int) -> Point:
    p, q = 0.5, 0.5 * math.exp(drift)
    # answers of T coin flips with one logit: those of the other T - 1 are binomial
    others_K = _binomial(scale - 1, q) - _binomial(scale - 1, p)
    # sum over t of E[R w_t g_t] under infer minus under train is sum_k R(k) term_k
    term_K = scale * p * (1 - p) * (np.r_[0.0, others_K] - np.r_[others_K, 0.0])
    # the reward in [-1, 1] that makes it largest; D_psi of psi = w is 0
    return Point(max(drift, abs(math.log((1 - p) / (1 - q)))), 0.0, float(np.abs(term_K).sum()))


@_escape(
    "the direction of a small gradient",
    scale="1 / norm of the gradient",
    assumption="",
    about="the bound holds, but it bounds the bias, not the bias relative to the gradient: where "
    "the true gradient is small, a bounded drift reverses it",
    instead="centre rewards before anything else; the direction is kept where a lower bound of the "
    "gradient's norm exceeds that of the bias (`gradient_direction`)",
)
def _direction(drift: float, scale: int) -> Point:
    p_V, q_V, g_V = _two_tokens(0.5, drift)
    advantage_V = np.array([1.0 - 4.0 / scale, 1.0])  # of true gradient -1 / scale
    largest, _ = _naive(p_V, q_V)
    gradient = float(p_V @ (advantage_V * g_V))
    return Point(largest, abs(gradient), abs(float((q_V - p_V) @ (advantage_V * g_V))))


def _binomial(n: int, p: float) -> Floats:
    """P(k successes of n), [n + 1]."""
    k = np.arange(n + 1)
    log_fact = np.r_[0.0, np.cumsum(np.log(np.arange(1, n + 1)))]
    log_p = log_fact[n] - log_fact - log_fact[::-1] + k * math.log(p) + (n - k) * math.log1p(-p)
    return np.exp(log_p)
