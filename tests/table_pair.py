# Two tables of next-token probabilities, and what is exactly true of the pair.
#
# Expectations are exact sums over contexts or over whole sequences, never samples: the oracle
# for everything sampled.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.engines.table import Table
from servanda.theory.bounds.gradient import Loss
from servanda.theory.sampling import Sampling, processed_logprobs

Floats = NDArray[np.float64]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class TablePair:
    """Two tables and their transforms; exact expectations under the infer side."""

    train: Table
    infer: Table
    train_sampling: Sampling = Sampling()  # type: ignore[call-arg]
    infer_sampling: Sampling = Sampling()  # type: ignore[call-arg]

    @cached_property
    def _p_CV(self) -> Floats:
        return _probabilities(self.train, self.train_sampling)

    @cached_property
    def _q_CV(self) -> Floats:
        return _probabilities(self.infer, self.infer_sampling)

    def rows(self, prefix: Sequence[int]) -> tuple[Floats, Floats]:
        """(p, q) after a prefix."""
        return self._p_CV[self.train.row_of(prefix)], self._q_CV[self.infer.row_of(prefix)]

    def token_tv(self, prefix: Sequence[int]) -> float:
        """Exact TV of the next token after a prefix."""
        p_V, q_V = self.rows(prefix)
        return 0.5 * math.fsum(np.abs(p_V - q_V).tolist())

    def visits(self, prompt: Ids, width: int) -> Iterator[tuple[int, Ids, float]]:
        """(position, context, probability under infer) of everything a prompt can reach.

        Contexts are merged when no table can tell them apart, so long widths stay cheap.
        """
        keep = max(self.train.order, self.infer.order)
        state: dict[Ids, float] = {prompt[-keep:] if keep else (): 1.0}
        for position in range(width):
            following: dict[Ids, float] = {}
            for context, mass in state.items():
                yield position, context, mass
                _, q_V = self.rows(context)
                for token in np.flatnonzero(q_V):
                    if token != self.infer.eos:
                        nxt = (*context, int(token))[-keep:] if keep else ()
                        following[nxt] = following.get(nxt, 0.0) + mass * float(q_V[token])
            state = following

    def expected(self, prompt: Ids, width: int, value: Callable[[Ids], float]) -> float:
        """E_infer of the sum over tokens of value(context)."""
        return math.fsum(mass * value(c) for _, c, mass in self.visits(prompt, width))

    def mean_tv(self, prompts: Sequence[Ids], width: int) -> float:
        """Token-weighted mean TV over prompts drawn uniformly: what `population` concerns."""
        return self.by_loss(prompts, width, self.token_tv)

    def by_loss(
        self,
        prompts: Sequence[Ids],
        width: int,
        value: Callable[[Ids], float],
        loss: Loss = "token_mean",
    ) -> float:
        """What a loss makes of value(context), over prompts drawn uniformly.

        token_mean: the mean over tokens.  sequence_sum: the mean over answers of the sum over
        an answer's tokens.  sequence_mean: the same, token t counting 1/t.
        """
        counts = 1.0 / np.arange(1, width + 1) if loss == "sequence_mean" else np.ones(width)
        total = math.fsum(
            mass * counts[position] * value(context)
            for prompt in prompts
            for position, context, mass in self.visits(prompt, width)
        )
        if loss != "token_mean":
            return total / len(prompts)
        return total / math.fsum(self.expected(p, width, lambda _: 1.0) for p in prompts)

    def token_gap(self, prefix: Ids, psi: Callable[[Floats], Floats]) -> float:
        """Exact D_psi = sum |p - q psi(p/q)| of the next token after a prefix."""
        p_V, q_V = self.rows(prefix)
        drawn_V = q_V > 0
        weight_V = np.divide(p_V, q_V, out=np.zeros_like(p_V), where=drawn_V)
        return math.fsum(np.abs(p_V - np.where(drawn_V, q_V * psi(weight_V), 0.0)).tolist())

    def weight_gap(self, prompt: Ids, width: int, psi: Callable[[Floats], Floats]) -> float:
        """Token-weighted mean of D_psi (the bias of a correction)."""
        return self.by_loss([prompt], width, lambda context: self.token_gap(context, psi))

    def sequences(self, prompt: Ids, width: int) -> Iterator[tuple[Ids, float, float]]:
        """(new tokens, probability under train, under infer) of every sequence; width small."""
        stack: list[tuple[Ids, float, float]] = [((), 1.0, 1.0)]
        while stack:
            new, big_p, big_q = stack.pop()
            if len(new) == width or (new and new[-1] == self.infer.eos):
                yield new, big_p, big_q
                continue
            p_V, q_V = self.rows((*prompt, *new))
            stack += [
                ((*new, int(token)), big_p * float(p_V[token]), big_q * float(q_V[token]))
                for token in np.flatnonzero((p_V > 0) | (q_V > 0))
            ]

    def sequence_tv(self, prompt: Ids, width: int) -> float:
        """Exact TV between the two laws of whole sequences."""
        return 0.5 * math.fsum(abs(p - q) for _, p, q in self.sequences(prompt, width))

    def reward_drift(self, prompt: Ids, width: int, reward: Callable[[Ids], float]) -> float:
        """E_train R - E_infer R, exactly."""
        return math.fsum((p - q) * reward(y) for y, p, q in self.sequences(prompt, width))


def _probabilities(table: Table, sampling: Sampling) -> Floats:
    """Of every row after the sampling transform, [C, V]."""
    return np.exp(processed_logprobs(table.logits_CV, sampling))
