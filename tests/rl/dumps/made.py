# Made rollouts with known truth: every context has two tokens, so the TV is what was moved.
#
# infer draws token 0 with probability Q; train gives it Q - tv.  So TV(train, infer) = tv in
# every context, and (1 - w)^+ is tv / Q where token 0 was drawn, else 0.

from dataclasses import replace

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer
from servanda.traces.rollouts import Rollouts

Q = 0.6
PROMPT, TOOL = 8, 4


def drawn(rng, tv_K):
    """Tokens and both logprobs of contexts whose TV is known, [K] each."""
    first_K = rng.random(len(tv_K)) < Q
    infer_K = np.where(first_K, np.log(Q), np.log(1 - Q))
    train_K = np.where(first_K, np.log(Q - tv_K), np.log(1 - Q + tv_K))
    return np.where(first_K, 0, 1), train_K, infer_K


def sequence(rng, turns, turn_tokens, tv):
    """One sequence: prompt, then turns with a tool's words between; tv(turn, position)."""
    parts = [(PROMPT, None)]
    for turn in range(1, turns + 1):
        parts += [(turn_tokens, turn)] + ([(TOOL, None)] if turn < turns else [])
    columns = [[], [], [], []]
    for size, turn in parts:
        if turn is None:
            made = np.full(size, 2), np.full(size, np.nan), np.full(size, np.nan)
            mask = np.zeros(size, dtype=bool)
        else:
            made = drawn(rng, np.array([tv(turn, i) for i in range(size)]))
            mask = np.ones(size, dtype=bool)
        for column, values in zip(columns, (*made, mask), strict=True):
            column.append(values)
    token, train, infer, mask = map(np.concatenate, columns)
    return token, train, infer, mask


def rollouts(rng, step, n, *, turns=1, turn_tokens=32, tv=0.005, labels=None, staleness=None):
    """n sequences of one step, two to a prompt group; tv: a number or tv(step, s, turn, i)."""
    found = []
    for s in range(n):
        at = (lambda turn, i, s=s: tv(step, s, turn, i)) if callable(tv) else lambda *_: tv
        found.append(sequence(rng, turns, turn_tokens, at))
    token, train, infer, mask = (np.concatenate(c) for c in zip(*found, strict=True))
    length_S = np.array([len(t) for t, *_ in found])
    per_token = {}
    if staleness is not None:
        per_token["staleness"] = np.repeat([float(staleness(s)) for s in range(n)], length_S)
    return Rollouts(
        step,
        length_S,
        token,
        mask,
        train,
        infer,
        tuple(f"{step}.{s // 2}" for s in range(n)),
        tuple(f"made:{step}:{s}" for s in range(n)),
        {name: tuple(of(s) for s in range(n)) for name, of in (labels or {}).items()},
        {},
        per_token,
    )


def write(folder, seed=1, steps=range(1, 13), n=24, **how):
    """A dump of our own format in a folder; returns the folder."""
    rng, writer = np.random.default_rng(seed), Writer(folder)
    for step in steps:
        store(writer, rollouts(rng, step, n, **how))
    return folder


def store(writer, r):
    """One step's rollouts to a file."""

    def split(column):
        return np.split(column, np.cumsum(r.length_S)[:-1])

    writer.step(
        r.step,
        split(r.token_N),
        split(r.mask_N),
        split(r.logp_train_N),
        split(r.logp_infer_N),
        groups=r.group_S,
        labels=r.labels,
        staleness=split(r.per_token["staleness"]) if "staleness" in r.per_token else None,
    )


def bad_starts(step, s, turn, i, *, since=14, high=0.15, low=0.005):
    """The first three tokens of turns 3 and 4 are off from a step on."""
    return high if step >= since and turn in (3, 4) and i < 3 else low


def natural(rng, r, noise=0.02):
    """The rollouts with logprobs as models have them, and noise between the two sides, nats."""
    size = len(r.mask_N)
    infer_N = np.where(r.mask_N, np.log(np.clip(rng.beta(2, 1, size), 1e-4, 0.999)), np.nan)
    less_N = 1 - np.exp(infer_N)  # a token that is all but certain hardly moves
    train_N = infer_N + rng.normal(0, noise, size) * less_N - 0.5 * noise**2
    token_N = rng.integers(0, 50_000, size)
    train_N = np.minimum(train_N, -1e-6)
    return replace(r, logp_infer_N=infer_N, logp_train_N=train_N, token_N=token_N)


def without(r, gone_S):
    """The rollouts once a filter of the trainer has masked some sequences, both logprobs kept."""
    return replace(r, mask_N=r.mask_N & ~np.repeat(gone_S, r.length_S))


def each(folder, change, seed=3, steps=range(1, 13), n=24, **how):
    """A dump of natural rollouts that are changed step by step: change(rng, rollouts)."""
    rng, writer = np.random.default_rng(seed), Writer(folder)
    for step in steps:
        store(writer, change(rng, natural(rng, rollouts(rng, step, n, **how))))
    return folder
