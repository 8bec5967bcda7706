# Gaps that are drawn: two kernels on the tokens of a few steps, wrong in a known place.

import numpy as np

from servanda.judgement.causes.token_table import TokenTable
from servanda.traces.trace import pair

VOCABULARY = 152_000
SIZE, WIDTH = 24, 64


def pairs(seed, steps=6, size=SIZE, noise=0.15, wrong=None, lengths=None, labels=None, spread=0.0):
    """A pair of each step, two answers to a prompt.

    Args:
        noise: of the log ratio, nats, a number or one for each step; rare tokens have more.
        wrong: (row [S, 1], prompt tokens [S, 1], position [T], token [S, T], rng) -> where the
            noise is 2 nats, [S, T].
        lengths: rng -> tokens of each prompt, [S].
        spread: of the noise between sequences, as the standard deviation of its logarithm.
    """
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        length_S = rng.integers(20, 400, size) if lengths is None else lengths(rng)
        token_ST = (rng.pareto(0.4, (size, WIDTH)) * 50).astype(int) % VOCABULARY
        infer_ST = -rng.exponential(0.8, token_ST.shape) * rng.choice([0.1, 1, 3], token_ST.shape)
        own = noise(step) if callable(noise) else noise
        noise_ST = own * (1 - np.exp(infer_ST)) * np.exp(spread * rng.standard_normal((size, 1)))
        position_T = np.arange(WIDTH)
        if wrong is not None:
            row_S1 = np.arange(size)[:, None]
            bad_ST = wrong(row_S1, length_S[:, None], position_T, token_ST, rng)
            noise_ST = np.where(bad_ST, 2.0, noise_ST)
        train_ST = np.minimum(infer_ST + noise_ST * rng.standard_normal(token_ST.shape), 0)
        at = length_S[:, None] + position_T
        columns = np.zeros((4, size, int(length_S.max()) + WIDTH))
        for column, values in zip(columns, (token_ST, True, train_ST, infer_ST), strict=True):
            np.put_along_axis(column, at, np.broadcast_to(values, token_ST.shape), -1)
        token, mask, train, infer = columns
        yield (
            step,
            pair(
                train,
                infer,
                mask,
                groups=[f"{s // 2}" for s in range(size)],
                tokens=token,
                labels={n: [of(s) for s in range(size)] for n, of in (labels or {}).items()},
            ),
            [f"step {step}, row {s}" for s in range(size)],
        )


def table(seed, **how):
    found = TokenTable.of(pairs(seed, **how))
    assert found is not None
    return found
