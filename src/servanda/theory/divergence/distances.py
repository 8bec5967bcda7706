# Distances of two next-token distributions, by rows of logits and by sampled tokens.

from __future__ import annotations

import math

import numpy as np

from servanda.theory.divergence.base import LogitRows, divergence, log_ratio
from servanda.theory.divergence.pairs import Floats, Pairs

# Total variation: half the L1 distance.

_SPAN = (0.0, 1.0)


def tv_terms(pairs: Pairs) -> Floats:
    """|p - q| / 2 of each token, without loss of digits if p and q are nearly equal."""
    return -0.5 * pairs.larger * pairs.fall


@divergence(
    "tv", needs="logits", unit="", span=_SPAN, source="definition", of_sums=lambda sums: sums.tv
)
def tv_exact(rows: LogitRows) -> Floats:
    """TV(train, infer) of each row, [R], in [0, 1]."""
    return np.minimum(tv_terms(rows.pairs).sum(axis=-1), 1.0)


@divergence("tv", needs="logprob", unit="", span=_SPAN, source="TV = E_infer (1 - w)^+")
def tv_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(1 - w)^+ of each sampled token, [N], in [0, 1]; its mean under infer is the TV.

    Unbiased without any support assumption: mass that infer can never sample is counted, because
    the sampled tokens then have a mean weight below 1.

    >>> tv_sampled(np.log([0.25]), np.log([0.5])).tolist()
    [0.5]
    """
    return -np.expm1(np.minimum(log_ratio(logp_train_N, logp_infer_N), 0.0))


# |log p_train/p_infer| of the sampled token, and its largest value over a row.


@divergence("abs_log_ratio_nats", needs="logprob", unit="nat", source="definition")
def abs_log_ratio(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """|log w| of each sampled token, [N], nats; inf without mass under train.

    Known elsewhere as train_rollout_logprob_abs_diff (slime) and
    sampling_logp_difference (TRL).

    >>> abs_log_ratio(np.log([0.25]), np.log([0.5])).round(3).tolist()
    [0.693]
    """
    return np.abs(log_ratio(logp_train_N, logp_infer_N))


@divergence(
    "abs_log_ratio_nats",
    needs="logits",
    unit="nat",
    source="definition",
    of_sums=lambda sums: np.maximum(sums.high - sums.shift, sums.shift - sums.low),
)
def abs_log_ratio_exact(rows: LogitRows) -> Floats:
    """max over the vocabulary of |log p/q|, [R], nats."""
    return -rows.pairs.gap.min(axis=-1)


# Contributions of a slice of outcomes to the total variation, and to a shift of mass.
#
# A slice S of outcomes consists of sampled tokens, such as all rare ones.  On it only two
# quantities are defined: half the sum over S of |p - q|, and p(S) - q(S).  Both are means under
# infer over *all* tokens, of a value that is 0 outside S.


@divergence(
    "tv_contribution",
    needs="logprob",
    unit="",
    source="E_infer of 1_S |w - 1| / 2 = sum over S of |p - q| / 2",
    outcome=True,
)
def tv_contribution(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """|w - 1| / 2 of each sampled token, [N], >= 0: the contribution of its outcome to the TV.

    On a slice S of outcomes, the sum over the tokens of S divided by the number of all
    tokens estimates half the sum over S of |p - q|.  (1 - w)^+ would be 0 if train gives S more
    mass, hence this separate metric.  Unbounded: a clause clips it.  Mass of outcomes that infer
    can never sample is not detected.

    >>> tv_contribution(np.log([0.75, 0.25]), np.log([0.5, 0.5])).round(6).tolist()
    [0.25, 0.25]
    """
    return np.abs(np.expm1(log_ratio(logp_train_N, logp_infer_N))) / 2


@divergence(
    "mass_gap",
    needs="logprob",
    unit="",
    span=(-1.0, math.inf),
    source="E_infer of 1_S (w - 1) = p(S) - q(S)",
    outcome=True,
)
def mass_gap(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """w - 1 of each sampled token, [N], >= -1; signed.

    On a slice S of outcomes, the sum over the tokens of S divided by the number of all
    tokens estimates p(S) - q(S), minus train's mass of tokens of S that infer can never sample.
    Over all outcomes it is 0 if the supports agree.

    >>> mass_gap(np.log([0.75, 0.25]), np.log([0.5, 0.5])).round(6).tolist()
    [0.5, -0.5]
    """
    return np.expm1(log_ratio(logp_train_N, logp_infer_N))


# Squared Hellinger distance: the one that multiplies over the tokens of a sequence.


def hellinger2_terms(pairs: Pairs) -> Floats:
    """(sqrt p - sqrt q)^2 / 2 of each token."""
    return 0.5 * pairs.larger * np.expm1(pairs.gap / 2) ** 2


@divergence(
    "hellinger2",
    needs="logits",
    unit="",
    span=(0.0, 1.0),
    source="Hellinger 1909; H^2 = 1 - sum sqrt(p q), 1 - H^2 multiplies over tokens",
    of_sums=lambda sums: sums.hellinger2,
)
def hellinger2_exact(rows: LogitRows) -> Floats:
    """H^2 = 1 - sum sqrt(p q) of each row, [R], in [0, 1]; 1 for disjoint supports.

    Computed as sum (sqrt p - sqrt q)^2 / 2: 1 - sum sqrt(p q) loses all digits for two similar
    kernels.
    """
    return np.minimum(hellinger2_terms(rows.pairs).sum(axis=-1), 1.0)


# Le Cam's distance: bounded, smooth, and unbiased from sampled tokens alone.


def le_cam_terms(pairs: Pairs) -> Floats:
    """(p - q)^2 / (p + q) / 2 of each token."""
    return 0.5 * pairs.larger * pairs.fall**2 / (2 + pairs.fall)


@divergence(
    "le_cam",
    needs="logits",
    unit="",
    span=(0.0, 1.0),
    source="Le Cam 1986; Vincze 1981",
    of_sums=lambda sums: sums.le_cam,
)
def le_cam_exact(rows: LogitRows) -> Floats:
    """sum (p - q)^2 / (p + q) / 2 of each row, [R], in [0, 1].

    With D = 2 le_cam: hellinger2 lies in [D/4, D/2] and js_nats in [D/4, (log 2 / 2) D].
    1 for disjoint supports.
    """
    return np.minimum(le_cam_terms(rows.pairs).sum(axis=-1), 1.0)


@divergence(
    "le_cam",
    needs="logprob",
    unit="",
    span=(-1.0, 1.0),
    source="E_infer of f(w) - f'(inf)(w - 1) with f(w) = (w - 1)^2 / (w + 1) / 2",
)
def le_cam_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(1 - w) / (1 + w) of each sampled token, [N], in [-1, 1]; signed.

    Its mean under infer is Le Cam's distance without any support assumption: tokens that infer can
    never sample are counted, because the sampled ones then have a smaller mean weight.

    >>> le_cam_sampled(np.log([0.25]), np.log([0.5])).round(3).tolist()
    [0.333]
    """
    return -np.tanh(log_ratio(logp_train_N, logp_infer_N) / 2)


# chi^2(train || infer): the variance of the importance weight.


_SOURCE = "Pearson 1900; E_infer (w - 1)^2, where infer has every token of train"


def chi2_terms(pairs: Pairs) -> Floats:
    """(p - q)^2 / q of each token; inf if only train has the token."""
    # larger^2 / q, formed before exp: neither p^2 nor 1/q may leave the range of floats
    log_scale = pairs.infer_logp + 2 * np.maximum(pairs.log_weight, 0.0)
    terms = np.exp(log_scale) * pairs.fall**2
    return np.where(np.isposinf(pairs.log_weight), np.inf, terms)


@divergence("chi2", needs="logits", unit="", source=_SOURCE, of_sums=lambda sums: sums.chi2)
def chi2_exact(rows: LogitRows) -> Floats:
    """chi^2(train || infer) of each row, [R]; inf if infer lacks a token of train."""
    return chi2_terms(rows.pairs).sum(axis=-1)


@divergence("chi2", needs="logprob", unit="", source=_SOURCE)
def chi2_sampled(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """(w - 1)^2 of each sampled token, [N], >= 0.

    Its mean under infer is chi^2(train || infer) only if infer can sample every token of train. The
    mean converges slowly: rare large weights dominate it.

    >>> chi2_sampled(np.log([0.75]), np.log([0.5])).round(6).tolist()
    [0.25]
    """
    return np.expm1(log_ratio(logp_train_N, logp_infer_N)) ** 2
