# p and q of the same tokens, and shared quantities of divergences.
#
# p is train's probability of a token, q is infer's, and log_weight is log(p / q), more exact than
# the difference of the two logprobs.  Symmetric quantities are computed from the larger of the two
# and the relative difference of the other: this avoids overflow, and two nearly equal kernels keep
# their digits.

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Pairs:
    """Tokens with two probabilities each; arrays of one shape, element by element.

    Args:
        train_logp, infer_logp: nats; -inf without mass.
        log_weight: log(p / q), nats; +inf only train has the token, -inf only infer has it,
            0 neither has it.
    """

    def __init__(self, train_logp: Floats, infer_logp: Floats, log_weight: Floats) -> None:
        self.train_logp = train_logp
        self.infer_logp = infer_logp
        self.log_weight = log_weight

    @cached_property
    def train_more(self) -> NDArray[np.bool_]:
        """The mask p > q."""
        return self.log_weight > 0

    @cached_property
    def larger(self) -> Floats:
        """max(p, q)."""
        return np.exp(np.where(self.train_more, self.train_logp, self.infer_logp))

    @cached_property
    def gap(self) -> Floats:
        """log(min / max) of the two, <= 0; -inf if one side has no mass."""
        return -np.abs(self.log_weight)

    @cached_property
    def fall(self) -> Floats:
        """min / max - 1, in [-1, 0]."""
        return np.expm1(self.gap)

    @cached_property
    def difference(self) -> Floats:
        """p - q."""
        apart = self.larger * self.fall
        return np.where(self.train_more, -apart, apart)

    @cached_property
    def down(self) -> Floats:
        """max (e^u - 1 - u) with u the gap: a term of KL(larger || smaller) in Bregman form.

        >= 0; inf if the smaller is 0.
        """
        return np.where(np.isneginf(self.gap), np.inf, self.larger * (self.fall - self.gap))

    @cached_property
    def up(self) -> Floats:
        """max (u e^u - e^u + 1): the same for KL(smaller || larger), in [0, larger]."""
        # a logit masked by a large finite number: 1 is not lost beside its gap
        gap = np.maximum(self.gap, -1000.0)
        return self.larger * (gap * self.fall - (self.fall - gap))
