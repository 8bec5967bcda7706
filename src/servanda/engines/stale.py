# Which tensors a weight sync left behind, told from logprobs alone.

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from servanda.sampling import Floats


def stale_group(logp_N: Floats, candidates: Mapping[str, Floats], atol: float) -> str | None:
    """The group of tensors that a kernel still has from before the sync.

    Args:
        logp_N: logprobs of given tokens, as the kernel gives them after the sync, nats.
        candidates: group -> the same logprobs by a trusted kernel whose weights are the new ones,
            but for that group, which is the old one; "" for all new ones.
        atol: how far two kernels of equal weights may be apart on a token, nats.

    Returns:
        The one candidate that agrees; None where none does, or more than one: weights that differ
        too little to tell, or tokens that say too little.

    >>> new, old_head = np.array([-1.0, -2.0]), np.array([-1.2, -1.9])
    >>> stale_group(np.array([-1.20001, -1.9]), {"": new, "lm_head": old_head}, atol=1e-4)
    'lm_head'
    >>> stale_group(np.array([-1.5, -1.5]), {"": new, "lm_head": old_head}, atol=1e-4) is None
    True
    """
    agree = [
        group for group, logp in candidates.items() if np.abs(logp_N - logp).max(initial=0) <= atol
    ]
    return agree[0] if len(agree) == 1 else None
