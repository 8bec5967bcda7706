# GRPO with a constant divisor: the loss whose bias the contract bounds.
#
#     loss = - 1/(S W) sum over answers s, tokens t of  A_s weight_st log p(token)
#
# A_s is the reward minus its group's mean over the group's standard deviation (of a sample);
# the weight is no part of the gradient.  There is one update for each batch of answers.
# Axes: S answers, W tokens of an answer.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
_TINY = 1e-6  # keeps a group of equal rewards at advantage 0


def advantages(reward_S: Floats, group_S: NDArray[np.int64]) -> Floats:
    """Rewards normalised within their group; 0 in a group that agrees.

    >>> advantages(np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1])).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    advantage_S = np.zeros_like(reward_S)
    for group in np.unique(group_S):
        own = group_S == group
        centred = reward_S[own] - reward_S[own].mean()
        advantage_S[own] = centred / (reward_S[own].std(ddof=1) + _TINY)
    return advantage_S


def mixed_share(reward_S: Floats, group_S: NDArray[np.int64]) -> float:
    """Share of groups with two different rewards."""
    groups = np.unique(group_S)
    return float(np.mean([np.ptp(reward_S[group_S == group]) > 0 for group in groups]))


def loss_of(logp_SW: Tensor, advantage_S: Floats, weight_SW: Floats, width: int) -> Tensor:
    """The loss; `weight_SW` is 0 where an answer has no token."""
    coefficient_SW = torch.from_numpy((advantage_S[:, None] * weight_SW).astype(np.float32))
    return -(coefficient_SW * logp_SW).sum() / (len(advantage_S) * width)
