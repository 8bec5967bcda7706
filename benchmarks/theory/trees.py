# Random pairs of small trees: two kernels over whole answers, every answer enumerated.
#
# Many trees of one shape at a time.  Axes: N trees, L answers (leaves), T steps, V tokens.
# Token 0 ends an answer; what follows it is no step.  Answers stop where their prefix says,
# early on one side, surely on both, or at the depth.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.random_kernels import Floats, distributions

EOS = 0
SHAPES = ((2, 1), (4, 1), (3, 2), (2, 3), (3, 3), (2, 4), (4, 4))  # (vocabulary, depth)
_LEAST = 1e-6  # mass of every token, where full support is asked for


@dataclass(frozen=True)
class Trees:
    """N pairs of kernels of one shape, with every answer they can give.

    Args:
        token_LT: the answers, EOS from their end on; live_LT: which steps are taken.
        train_NLTV, infer_NLTV: the next-token distributions at each answer's prefixes; past
            its end both give EOS for sure.

    >>> made = trees(np.random.default_rng(0), 5, tokens=3, depth=2)
    >>> made.train_NL.shape, made.train_NL.sum(axis=1).round(12).tolist()
    ((5, 7), [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    token_LT: NDArray[np.int64]
    live_LT: NDArray[np.bool_]
    train_NLTV: Floats
    infer_NLTV: Floats

    def _of_path(self, rows_NLTV: Floats) -> Floats:
        return np.take_along_axis(rows_NLTV, self.token_LT[None, :, :, None], axis=3)[..., 0]

    @cached_property
    def train_NLT(self) -> Floats:
        """p of each step's token; 1 past the end."""
        return self._of_path(self.train_NLTV)

    @cached_property
    def infer_NLT(self) -> Floats:
        """q of each step's token; 1 past the end."""
        return self._of_path(self.infer_NLTV)

    @cached_property
    def train_NL(self) -> Floats:
        """P of each answer."""
        return self.train_NLT.prod(axis=2)

    @cached_property
    def infer_NL(self) -> Floats:
        """Q of each answer."""
        return self.infer_NLT.prod(axis=2)

    @cached_property
    def log_ratio_NLT(self) -> Floats:
        """Log p - log q of each step; -inf where train gives no mass, 0 past the end.

        0 also at a token that infer never draws: such an answer has Q = 0.
        """
        drawn_NLT = self.infer_NLT > 0
        with np.errstate(divide="ignore"):
            p_NLT = np.log(self.train_NLT)
        q_NLT = np.log(np.where(drawn_NLT, self.infer_NLT, 1.0))
        return np.where(drawn_NLT, p_NLT - q_NLT, 0.0)

    @cached_property
    def weight_NLT(self) -> Floats:
        """w = p / q of each step, as `log_ratio_NLT`."""
        return np.exp(self.log_ratio_NLT)

    @cached_property
    def tv_NLT(self) -> Floats:
        """TV of the next token at each answer's prefixes; 0 past the end."""
        return 0.5 * np.abs(self.train_NLTV - self.infer_NLTV).sum(axis=3)

    @cached_property
    def tv_N(self) -> Floats:
        """TV of whole answers."""
        return 0.5 * np.abs(self.train_NL - self.infer_NL).sum(axis=1)

    @cached_property
    def length_L(self) -> NDArray[np.int64]:
        """Tokens of each answer, EOS included."""
        return self.live_LT.sum(axis=1)

    @cached_property
    def osc_N(self) -> Floats:
        """Largest max - min of log p - log q at any context; inf without equal support."""
        p, q = self.train_NLTV, self.infer_NLTV
        some = (p > 0) | (q > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_w = np.log(p) - np.log(q)
            osc_NLT = np.where(some, log_w, -np.inf).max(3) - np.where(some, log_w, np.inf).min(3)
        return osc_NLT.max(axis=(1, 2))

    def mean_infer(self, value_NL: Floats) -> Floats:
        """E_infer of a value of each answer, exactly, [N]."""
        return (self.infer_NL * value_NL).sum(axis=1)

    def mean_train(self, value_NL: Floats) -> Floats:
        """E_train of a value of each answer, exactly, [N]."""
        return (self.train_NL * value_NL).sum(axis=1)


def grove(rng: np.random.Generator, n: int, *, support: bool = False) -> Iterator[Trees]:
    """About n pairs of trees of every shape, at least one of each."""
    for tokens, depth in SHAPES:
        yield trees(rng, max(n // len(SHAPES) + 1, 1), tokens, depth, support=support)


def trees(
    rng: np.random.Generator, n: int, tokens: int, depth: int, *, support: bool = False
) -> Trees:
    """n random pairs of trees: nearly equal to unrelated, the same at some contexts.

    Args:
        tokens: the vocabulary, EOS included; depth: most steps of an answer.
        support: whether each side can draw what the other can; else either may miss tokens.
    """
    token_LT, node_LT, nodes = _shape(tokens, depth)
    one, other = (
        distributions(rng, n * nodes, tokens, zeros=not support).reshape(n, nodes, tokens)
        for _ in range(2)
    )
    if support:
        one, other = ((1 - tokens * _LEAST) * rows + _LEAST for rows in (one, other))
    share_N11 = np.minimum(10.0 ** rng.uniform(-4.0, 1.0, (n, 1, 1)), 1.0)
    drifts = rng.random((n, nodes, 1)) < rng.choice([0.5, 1.0], (n, 1, 1))
    moved = np.where(drifts, (1 - share_N11) * one + share_N11 * other, one)
    # one of the two is the mixture, whose support is the larger
    swapped_N11 = rng.random((n, 1, 1)) < 0.5
    pair = (np.where(swapped_N11, moved, one), np.where(swapped_N11, one, moved))
    end_V = np.eye(tokens)[EOS]
    stops_N = rng.random((n, nodes, 1)) < 0.1
    live_LT = node_LT >= 0
    train, infer = (
        np.where(live_LT[None, :, :, None], np.where(stops_N, end_V, rows)[:, node_LT], end_V)
        for rows in pair
    )
    return Trees(token_LT, live_LT, train, infer)


def binary(train_NC: Floats, infer_NC: Floats) -> Trees:
    """Trees of two tokens at each step, none of which ends an answer before the last step.

    Args:
        train_NC, infer_NC: mass of the second token after each prefix, the empty one first
            and then by length and value, [N, 2^T - 1].
    """
    contexts = train_NC.shape[1]
    depth = contexts.bit_length()
    path_LT = np.array([*product((0, 1), repeat=depth)])
    node_LT = np.zeros(path_LT.shape, dtype=np.int64)
    for t in range(1, depth):
        node_LT[:, t] = 2 * node_LT[:, t - 1] + 1 + path_LT[:, t - 1]
    train, infer = (
        np.stack([np.zeros_like(x_NC), 1.0 - x_NC, x_NC], axis=2)[:, node_LT]
        for x_NC in (train_NC, infer_NC)
    )
    return Trees(path_LT + 1, np.ones(path_LT.shape, dtype=bool), train, infer)


@lru_cache
def _shape(tokens: int, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(token_LT, number of each answer's prefix or -1 past its end [L, T], prefixes)."""
    nodes: dict[tuple[int, ...], int] = {}
    answers: list[tuple[int, ...]] = []
    prefixes: list[list[int]] = []
    for path in product(range(tokens), repeat=depth):
        length = path.index(EOS) + 1 if EOS in path else depth
        if any(path[length:]):
            continue  # nothing follows the end
        answers.append(path)
        numbers = [nodes.setdefault(path[:t], len(nodes)) for t in range(length)]
        prefixes.append(numbers + [-1] * (depth - length))
    return np.array(answers), np.array(prefixes), len(nodes)
