# Version fit: whether an engine's logprobs are those of the weights that it claims.
#
# The engine's logprob of a token is the trainer's under the version that sampled it, plus the
# kernels' own noise.  Per sequence, the version that is nearer gets the sign.  If the claim is true
# and the noise is symmetric, another version is nearer with a probability of at most 1/2: for noise
# e and change c, |e + c| + |-e + c| >= 2 |e| in each token, so it cannot be nearer under both e and
# -e.  Sequences are independent, so the signs are a binomial test.

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionFit:
    """Sequences of one replica, compared under another version; `+` adds disjoint ones.

    Args:
        nearer: sequences nearer to the other version; farther: to the claimed one.
        other, claimed: sums of |difference| to each over their tokens, nats.
        lags: smallest and largest claimed lag, updates.
    """

    nearer: int = 0
    farther: int = 0
    other: float = 0.0
    claimed: float = 0.0
    lags: tuple[float, float] = (math.inf, -math.inf)

    def __add__(self, more: VersionFit) -> VersionFit:
        return VersionFit(
            self.nearer + more.nearer,
            self.farther + more.farther,
            self.other + more.other,
            self.claimed + more.claimed,
            (min(self.lags[0], more.lags[0]), max(self.lags[1], more.lags[1])),
        )

    @property
    def n(self) -> int:
        return self.nearer + self.farther

    @property
    def p(self) -> float:
        """A bound of the probability of such signs, or clearer ones, if the claim is true."""
        return sign_bound(self.nearer, self.n)


def sign_bound(heads: int, n: int) -> float:
    """At most this is the probability of `heads` or more in n fair tosses (Chernoff).

    >>> sign_bound(10, 10) == 2.0**-10, sign_bound(5, 10)
    (True, 1.0)
    """
    if 2 * heads <= n:
        return 1.0
    parts = (share * math.log(2 * share) for share in (heads / n, 1 - heads / n) if share > 0)
    return 2.0**-n if heads == n else math.exp(-n * math.fsum(parts))
