# Intervals from the top-k tokens of both kernels that contain the exact value.
#
# I, A and B are the tokens that both, only train and only infer returned, as in topk_rows.py. If
# the whole vocabulary was returned, both ends are equal.

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from servanda.theory.divergence.base import DIVERGENCES, Span, divergence
from servanda.theory.divergence.distances import (
    chi2_terms,
    hellinger2_terms,
    le_cam_terms,
    tv_terms,
)
from servanda.theory.divergence.kl import js_terms, kl_reverse_terms, kl_terms
from servanda.theory.divergence.pairs import Floats, Pairs
from servanda.theory.divergence.topk_rows import TopRows

Terms = Callable[[Pairs], Floats]
Slope = Callable[[Floats], Floats]


def interval(name: str, rows: TopRows) -> Floats:
    """[lower, upper] of a metric at each position, [R, 2]; NaN for unusable rows.

    It contains the exact value for any kernels that return these tokens, up to the precision of the
    logprobs; an infinite upper end means that no top k bounds the metric.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        ends_R2 = DIVERGENCES[name].forms["topk"](rows)
    return np.where(rows.usable_R[:, None], ends_R2, np.nan)


def _known(logs: tuple[Floats, Floats]) -> Pairs:
    train, infer = logs
    return Pairs(
        train, infer, np.where(np.isneginf(train) & np.isneginf(infer), 0.0, train - infer)
    )


def _least(rows: TopRows, terms: Terms, of_train: Slope, of_infer: Slope) -> Floats:
    """The lower bound of a divergence, [R].

    Args:
        of_train, of_infer: slopes of a term in p and in q, as functions of log p/q.

    A term f(p, q) is convex and homogeneous, so it is above each of its tangents through 0. With
    the tangent slopes as prices of the two tails, the unknown masses of A, B and the rest are
    placed at the smallest cost; this is a lower bound at any prices (so the bisection need not be
    exact), and the best one is attained.
    """
    at_a_R1, at_b_R1 = rows.log_ratios
    price_p_R1, price_q_R1 = of_train(at_b_R1), of_infer(at_a_R1)
    hidden_q, hidden_p = rows.hidden_infer(at_a_R1), rows.hidden_train(at_b_R1)
    a = _known((np.log(rows.only_train_RK), np.log(hidden_q)))
    b = _known((np.log(hidden_p), np.log(rows.only_infer_RK)))
    outside_R = (
        (terms(a) - price_q_R1 * hidden_q).sum(axis=-1)
        + (terms(b) - price_p_R1 * hidden_p).sum(axis=-1)
        + price_p_R1[:, 0] * rows.train.tail_R
        + price_q_R1[:, 0] * rows.infer.tail_R
    )
    return terms(rows.pairs).sum(axis=-1) + np.maximum(outside_R, 0.0)


def _bracket(rows: TopRows, lower_R: Floats, upper_R: Floats, span: Span) -> Floats:
    """Both ends within the range; equal if nothing is unknown."""
    lower_R = np.clip(lower_R, *span)
    upper_R = np.where(rows.unmatched_R == 0, lower_R, np.clip(upper_R, *span))
    return np.stack([np.minimum(lower_R, upper_R), upper_R], axis=-1)


def _form(name: str, source: str) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    metric = DIVERGENCES[name]
    span = metric.span_of("logits")
    return divergence(name, needs="topk", unit=metric.unit, span=span, source=source)


@_form("tv", "overlap of the returned tokens, and the most that the tails can add to it")
def tv_interval(rows: TopRows) -> Floats:
    """[lower, upper] of the TV, [R, 2].

    Both ends are sharp: some pair of rows with the same returned tokens attains each, the upper one
    if the vocabulary has room for two disjoint tails.
    """
    upper_R = tv_terms(rows.pairs).sum(axis=-1) + 0.5 * rows.unmatched_R
    tail_p_R, tail_q_R = rows.train.tail_R, rows.infer.tail_R
    least_p_R1, least_q_R1 = rows.train.least_R1, rows.infer.least_R1
    in_a_R = np.minimum(tail_q_R, np.minimum(rows.only_train_RK, least_q_R1).sum(axis=-1))
    in_b_R = np.minimum(tail_p_R, np.minimum(rows.only_infer_RK, least_p_R1).sum(axis=-1))
    rest_R = rows.unnamed_R * np.minimum(least_p_R1, least_q_R1)[:, 0]
    hidden_R = np.minimum(tail_p_R + in_a_R, tail_q_R + in_b_R)
    hidden_R = np.minimum(hidden_R, in_a_R + in_b_R + rest_R)
    return _bracket(rows, upper_R - hidden_R, upper_R, (0.0, 1.0))


@_form("le_cam", "tangents of f at the least favourable ratio; f(1, 0) + f(0, 1) = 1")
def le_cam_interval(rows: TopRows) -> Floats:
    """[lower, upper] of Le Cam's distance, [R, 2].

    Sharp if the vocabulary has room; if the tokens that neither side returned cannot hold the
    tails, it is valid, but not proved to be the tightest.
    """
    lower_R = _least(
        rows,
        le_cam_terms,
        lambda r: 0.5 * np.tanh(r / 2) * (2 - np.tanh(r / 2)),
        lambda r: -0.5 * np.tanh(r / 2) * (2 + np.tanh(r / 2)),
    )
    upper_R = le_cam_terms(rows.pairs).sum(axis=-1) + 0.5 * rows.unmatched_R
    return _bracket(rows, lower_R, upper_R, (0.0, 1.0))


@_form("js_nats", "tangents of f at the least favourable ratio; f(1, 0) = f(0, 1) = log(2) / 2")
def js_interval(rows: TopRows) -> Floats:
    """[lower, upper] of the Jensen-Shannon divergence, [R, 2], nats; sharp like `le_cam`."""
    lower_R = _least(
        rows,
        js_terms,
        lambda r: 0.5 * (math.log(2) - np.log1p(np.exp(-r))),
        lambda r: 0.5 * (math.log(2) - np.log1p(np.exp(r))),
    )
    upper_R = js_terms(rows.pairs).sum(axis=-1) + 0.5 * math.log(2) * rows.unmatched_R
    return _bracket(rows, lower_R, upper_R, (0.0, math.log(2)))


@_form("hellinger2", "tangents of f at the least favourable ratio; f(1, 0) = f(0, 1) = 1/2")
def hellinger2_interval(rows: TopRows) -> Floats:
    """[lower, upper] of H^2, [R, 2]; sharp like `le_cam`."""
    lower_R = _least(
        rows,
        hellinger2_terms,
        lambda r: -0.5 * np.expm1(-r / 2),
        lambda r: -0.5 * np.expm1(r / 2),
    )
    upper_R = hellinger2_terms(rows.pairs).sum(axis=-1) + 0.5 * rows.unmatched_R
    return _bracket(rows, lower_R, upper_R, (0.0, 1.0))


def _from_below(rows: TopRows, lower_R: Floats) -> Floats:
    """No top k bounds these from above: a token outside it may have any ratio."""
    return _bracket(rows, lower_R, np.full(len(lower_R), np.inf), (0.0, np.inf))


@_form("kl_nats", "tangents of q log(q/p) - q + p at the least favourable ratio")
def kl_interval(rows: TopRows) -> Floats:
    """[lower, inf] of KL(infer || train), [R, 2], nats; exact if all is returned."""
    return _from_below(rows, _least(rows, kl_terms, lambda r: -np.expm1(-r), lambda r: -r))


@_form("kl_reverse_nats", "tangents of p log(p/q) - p + q at the least favourable ratio")
def kl_reverse_interval(rows: TopRows) -> Floats:
    """[lower, inf] of KL(train || infer), [R, 2], nats; exact if all is returned."""
    return _from_below(rows, _least(rows, kl_reverse_terms, lambda r: r, lambda r: -np.expm1(r)))


@_form("chi2", "tangents of (p - q)^2 / q at the least favourable ratio")
def chi2_interval(rows: TopRows) -> Floats:
    """[lower, inf] of chi^2(train || infer), [R, 2]; exact if all is returned."""
    slopes = (lambda r: 2 * np.expm1(r), lambda r: -np.expm1(2 * r))
    return _from_below(rows, _least(rows, chi2_terms, *slopes))
