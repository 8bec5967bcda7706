"""What the correction with the smallest bound does to the true error of a policy gradient.

    python -m benchmarks.corrections      ten minutes on a core

900 decision processes, 100 of each drift: 9 states, 8 tokens, a next state for each of both, four
tokens to a response, and a random reward for each response's states and tokens.  From 1,024
responses the formula of `servanda check` names the correction with the smallest bound.  Its true
error, and that without a correction, are those of the policy gradient of the expected reward in the
logits, with the reward less its mean as the advantage: the root of bias^2 + variance / 1,024, from
32,768 further responses, whose own noise is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servanda.theory.bounds.corrections import CORRECTIONS, token_errors

Array = NDArray[np.float64]
STATES, VOCABULARY, LENGTH = 9, 8, 4
RESPONSES, LARGE, CASES = 1024, 1 << 15, 100
WORSE = 1.05

Drift = Callable[[np.random.Generator, Array], Array]


def _gaussian(size: float) -> Drift:
    return lambda rng, z: z + size * rng.normal(size=z.shape)


def _tailed(size: float) -> Drift:
    return lambda rng, z: z + size * rng.standard_t(2, z.shape)


def _temperature(size: float) -> Drift:
    return lambda _, z: z / (1 + size)


DRIFTS: dict[str, Drift] = {
    f"{name}, {size:g}": kind(size)
    for name, kind in (("Gaussian", _gaussian), ("t tails", _tailed), ("temperature", _temperature))
    for size in (0.05, 0.3, 1.0)
}


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Process:
    """Policies p and q, [states, tokens]; the next state and the reward of each, the same."""

    p: Array
    q: Array
    following: NDArray[np.int64]
    reward: Array

    def drawn(self, rng: np.random.Generator, n: int) -> tuple[NDArray, NDArray, Array]:
        """States and tokens of responses by q, [n, LENGTH], and their rewards, [n]."""
        state, states, tokens = rng.integers(0, STATES, n), [], []
        for _ in range(LENGTH):
            below = self.q.cumsum(axis=1)[state] < rng.random(n)[:, None]
            token = np.minimum(below.sum(axis=1), VOCABULARY - 1)
            states.append(state)
            tokens.append(token)
            state = self.following[state, token]
        state_NT, token_NT = np.stack(states, axis=1), np.stack(tokens, axis=1)
        return state_NT, token_NT, self.reward[state_NT, token_NT].sum(axis=1)

    def gradient(self) -> Array:
        """Of the expected reward under p, by the logits, [states, tokens]: exact."""
        value, gradient = np.zeros((LENGTH + 1, STATES)), np.zeros((STATES, VOCABULARY))
        reach, values = np.full(STATES, 1 / STATES), []
        for t in range(LENGTH - 1, -1, -1):
            of = self.reward + value[t + 1][self.following]
            value[t] = (self.p * of).sum(axis=1)
            values.append(of - value[t][:, None])
        for advantage in values[::-1]:
            gradient += reach[:, None] * self.p * advantage
            moved = reach[:, None] * self.p
            reach = np.bincount(self.following.ravel(), moved.ravel(), minlength=STATES)
        return gradient

    def log_ratio(self, state: NDArray, token: NDArray) -> Array:
        return np.log(self.p[state, token] / self.q[state, token]).ravel()


def true_errors(rng: np.random.Generator, of: Process) -> dict[str, float]:
    """The error of the estimated gradient under each correction."""
    state, token, reward = of.drawn(rng, LARGE)
    ratio, length = of.log_ratio(state, token), np.full(LARGE, LENGTH)
    score = np.eye(VOCABULARY)[token] - of.p[state]
    advantage = (reward - reward.mean())[:, None, None]
    exact, found = of.gradient(), {}
    for name, correction in CORRECTIONS.items():
        psi = correction.weights(ratio, length).reshape(LARGE, LENGTH, 1)
        own = np.zeros((LARGE, STATES, VOCABULARY))
        np.add.at(own, (np.arange(LARGE)[:, None], state), psi * advantage * score)
        variance = float(own.var(axis=0).sum())
        bias = float(((own.mean(axis=0) - exact) ** 2).sum()) - variance / LARGE
        found[name] = float(np.sqrt(max(bias, 0.0) + variance / RESPONSES))
    return found


def smallest_bound(rng: np.random.Generator, of: Process) -> str:
    """The correction whose bound of the error is the smallest, from sampled tokens."""
    state, token, _ = of.drawn(rng, RESPONSES)
    ratio, length = of.log_ratio(state, token), np.full(RESPONSES, LENGTH)

    def bound(name: str) -> float:
        errors = token_errors(CORRECTIONS[name], ratio, length)
        return float(max(errors.surrogate.mean(), 0.0) ** 2 + errors.square.mean() / len(ratio))

    return min(CORRECTIONS, key=bound)


def main() -> None:
    print("| drift of the logits | lowers the error by 5 % | raises it by 5 % | raises it at all |")
    print("|---|---|---|---|")
    for name, drift in DRIFTS.items():
        rng, ratios = np.random.default_rng(sum(map(ord, name))), []
        for _ in range(CASES):
            z = rng.normal(0, 1.5, (STATES, VOCABULARY))
            of = Process(
                softmax(z),
                softmax(drift(rng, z)),
                rng.integers(0, STATES, z.shape),
                rng.normal(size=z.shape),
            )
            errors = true_errors(rng, of)
            ratios.append(errors[smallest_bound(rng, of)] / errors["none"])
        r = np.array(ratios)
        counts = (r < 1 / WORSE).sum(), (r > WORSE).sum(), (r > 1 + 1e-9).sum()
        print(f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} |", flush=True)


if __name__ == "__main__":
    main()
