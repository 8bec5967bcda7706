# Corrections: the weights and filters of trainers, and the error that each leaves on some tokens.
#
# A trainer multiplies the gradient of each sampled token by psi, a function of importance weights:
# of the token's own w, of W, the product over its response, or of its geometric mean.  Whatever it
# is, in units of advantage x score norm
#
#     |E_infer psi A g - E_infer w A g| <= E_infer |psi - w|,
#
# for any A and psi that may depend on the whole response; with the mass that infer cannot draw it
# is the mean of `gap`.  With w, over tokens, it bounds the bias of the token-level surrogate, whose
# contexts are infer's.  With W, over responses, it bounds that of the gradient of the expected
# reward, each response's sum divided by its length; over tokens it would bound nothing, since
# E_infer (1 - W) L may be negative.  The noise is the root of the mean of psi^2 over the number of
# tokens of an update, for scores that are uncorrelated between tokens.
#
# Axes: N tokens; S responses.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from servanda.theory.bounds.importance_weights import PSI, Psi, gap
from servanda.theory.bounds.theorem import Floats, lengths, log_ratios, over_sequences

Base = Literal["token", "sequence", "mean"]
_LARGEST = 700.0  # nats: exp of more exceeds float64


@dataclass(frozen=True)
class Correction:
    """A way to weigh tokens.

    Args:
        text: its name for people, with its thresholds.
        psi: applied to the weights of `base`.
        base: "token": w of each token; "sequence": the product over its response; "mean": its
            geometric mean.
        kept: a filter on the geometric mean beside it; None: none.
    """

    text: str
    psi: Psi
    base: Base = "token"
    kept: Psi | None = None

    def weights(self, log_ratio_N: ArrayLike, length_S: ArrayLike) -> Floats:
        """The weight that each token gets, [N], >= 0.

        Args:
            log_ratio_N: log p - log q of the sampled tokens, one response after another, nats; -inf
                where train gives no mass.
            length_S: tokens of each response.

        Raises:
            EvidenceError: a log ratio is NaN or +inf, or the lengths do not fit.

        >>> tis = Correction("sequence TIS at 2", PSI["tis"](2.0), "sequence")
        >>> tis.weights(np.log([2.0, 2.0, 0.5]), [2, 1]).round(6).tolist()
        [2.0, 2.0, 0.5]
        """
        log_ratio_N = log_ratios(log_ratio_N)
        length_S = lengths(length_S, len(log_ratio_N))
        psi_N = self.psi.weight(_weights(log_ratio_N, length_S, self.base))
        if self.kept is not None:
            psi_N = psi_N * (self.kept.weight(_weights(log_ratio_N, length_S, "mean")) > 0)
        return np.asarray(psi_N, dtype=np.float64)


def _weights(log_ratio_N: Floats, length_S: np.ndarray, base: Base) -> Floats:
    if base == "token":
        return np.exp(np.minimum(log_ratio_N, _LARGEST))
    log_S = over_sequences(log_ratio_N, length_S)
    if base == "mean":
        log_S = log_S / np.maximum(length_S, 1)
    return np.repeat(np.exp(np.minimum(log_S, _LARGEST)), length_S)


@dataclass(frozen=True)
class TokenErrors:
    """What a correction leaves; means of these are reported, bias in units of advantage x score
    norm.

    Args:
        surrogate: `gap` of each token to its w, [N]; its mean bounds the bias of the token-level
            surrogate.
        response: the mean over each response of `gap` to its W, [S]; its mean bounds the bias of
            the gradient of the expected reward.
        square: psi^2, [N].
        masked: whether psi is 0, [N].
    """

    surrogate: Floats
    response: Floats
    square: Floats
    masked: Floats


def token_errors(
    correction: Correction, log_ratio_N: ArrayLike, length_S: ArrayLike
) -> TokenErrors:
    """What a correction leaves at each token of some responses.

    Raises:
        EvidenceError: as `Correction.weights`.

    >>> none = Correction("none", PSI["naive"]())
    >>> token_errors(none, np.log([0.5, 4.0]), [2]).response.tolist()
    [0.0]
    """
    log_ratio_N = log_ratios(log_ratio_N)
    length_S = lengths(length_S, len(log_ratio_N))
    psi_N = correction.weights(log_ratio_N, length_S)
    response_N = gap(_weights(log_ratio_N, length_S, "sequence"), psi_N)
    return TokenErrors(
        gap(_weights(log_ratio_N, length_S, "token"), psi_N),
        over_sequences(response_N, length_S) / np.maximum(length_S, 1),
        psi_N * psi_N,
        (psi_N == 0.0) * 1.0,
    )


# as trainers offer them, at the thresholds of their documentation
CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction("no correction", PSI["naive"]()),
    "tis": Correction("token TIS at 2", PSI["tis"](2.0)),
    "icepop": Correction("token mask (MIS, IcePop) at 0.5 to 5", PSI["icepop"]((0.5, 5.0))),
    "reject": Correction("token rejection at 0.5 to 2", PSI["reject"]((0.5, 2.0))),
    "clip": Correction("token clip at 0.8 to 1.2", PSI["clip"](0.2)),
    "seq_tis": Correction("sequence TIS at 2", PSI["tis"](2.0), "sequence"),
    "seq_mis": Correction("sequence mask (MIS) at 0.5 to 2", PSI["mis"]((0.5, 2.0)), "sequence"),
    "geometric": Correction(
        "geometric rejection at 0.999 to 1.001", PSI["reject"]((0.999, 1.001)), "mean"
    ),
    "geometric_tis": Correction(
        "token TIS at 2, geometric mask at 0.999 to 1.002",
        PSI["tis"](2.0),
        kept=PSI["reject"]((0.999, 1.002)),
    ),
}
