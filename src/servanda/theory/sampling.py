# The sampling transform of a kernel, and random numbers that do not depend on batching.
#
# Temperature, top-k, top-p and min-p are part of the kernel (law 7): a logprob is "processed" if it
# is the log of the probability with which the token was sampled. Order of the filters: temperature,
# top-k, top-p on the rest, min-p on the rest.  Axes: R rows (positions), V vocabulary.  Ranks order
# tokens by probability, ties by id.

from __future__ import annotations

import hashlib
import threading

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BEST = 16  # number of top-k tokens recorded per position


class Sampling(BaseModel):
    """The transform from logits to a sampling distribution."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    temperature: float = Field(1.0, gt=0.0, le=100.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)

    @property
    def filters(self) -> bool:
        """Whether a filter may remove tokens."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0


def log_softmax(logits_RV: NDArray[np.floating]) -> Floats:
    """Logits to logprobs in float64, [R, V], nats; a -inf logit stays -inf."""
    z_RV = np.asarray(logits_RV, dtype=np.float64)
    z_RV = z_RV - z_RV.max(axis=-1, keepdims=True)
    return z_RV - np.log(np.exp(z_RV).sum(axis=-1, keepdims=True))


def processed_logprobs(logits_RV: NDArray[np.floating], sampling: Sampling) -> Floats:
    """Logprobs after the sampling transform.

    Args:
        logits_RV: raw logits or raw logprobs, [R, V], nats.
        sampling: the transform.

    Returns:
        [R, V], nats; -inf for tokens removed by a filter.
    """
    logp_RV = log_softmax(np.asarray(logits_RV, dtype=np.float64) / sampling.temperature)
    if not sampling.filters:
        return logp_RV
    order_RV = np.argsort(-logp_RV, axis=-1, kind="stable")
    sorted_RV = np.take_along_axis(logp_RV, order_RV, axis=-1)
    keep_RV = np.isfinite(sorted_RV)
    if sampling.top_k is not None:
        keep_RV[..., sampling.top_k :] = False
    if sampling.top_p < 1.0:
        p_RV = np.exp(log_softmax(np.where(keep_RV, sorted_RV, -np.inf)))
        # a token is kept if the mass before it is below top_p, so the first is always kept
        keep_RV &= p_RV.cumsum(axis=-1) - p_RV < sampling.top_p
    if sampling.min_p > 0.0:
        keep_RV &= sorted_RV >= sorted_RV[..., :1] + np.log(sampling.min_p)
    kept_RV = np.empty_like(keep_RV)
    np.put_along_axis(kept_RV, order_RV, keep_RV, axis=-1)
    return log_softmax(np.where(kept_RV, logp_RV, -np.inf))


_generators = threading.local()
_ZEROS = np.zeros(4, dtype=np.uint64)


def uniforms(seed: int, stream: str, sequence: int, n: int) -> Floats:
    """The first n uniforms of one stream of one sequence, in [0, 1).

    Keyed by (seed, stream, sequence) and indexed by position, so that resume, re-batching and
    sharding sample the same tokens.  Streams ("draw", "pit", "prompt") are independent.
    """
    key = hashlib.blake2b(f"{seed}|{stream}|{sequence}".encode(), digest_size=16).digest()
    # reuse a generator: creating one reads entropy from the operating system
    if not hasattr(_generators, "philox"):
        _generators.philox = np.random.Philox(key=0)
    high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
    _generators.philox.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": np.array([low, high], dtype=np.uint64)},
        "buffer": _ZEROS,
        "buffer_pos": len(_ZEROS),
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(_generators.philox).random(n)


def seed_of(seed: int, stream: str, sequence: int, bits: int = 63) -> int:
    """The seed of one request to an external sampler, keyed like `uniforms`.

    Two of ten thousand 31-bit seeds are equal in one of fifty runs; then responses to equal prompts
    are equal.

    >>> seed_of(7, "draw", 0) == seed_of(7, "draw", 0) != seed_of(7, "draw", 1)
    True
    """
    key = hashlib.blake2b(f"{seed}|{stream}|{sequence}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "big") % 2**bits


def draw(logp_RV: Floats, uniform_R: Floats) -> Ints:
    """Sample one token per row by inversion of the distribution function, in the order of ids.

    Returns:
        [R] token ids; never one with a logprob of -inf.
    """
    cdf_RV = np.exp(logp_RV).cumsum(axis=-1)
    target_R1 = (uniform_R * cdf_RV[:, -1])[:, None]
    # the first id whose cumulative mass exceeds the target has positive mass
    token_R = (cdf_RV <= target_R1).sum(axis=-1)
    # the product may round up to the whole mass: then it is the last id with mass
    last_R = logp_RV.shape[-1] - 1 - np.isfinite(logp_RV)[:, ::-1].argmax(axis=-1)
    return np.minimum(token_R, last_R).astype(np.int64)


def standing(logp_RV: Floats, token_R: Ints, p_RV: Floats | None = None) -> tuple[Floats, Floats]:
    """The number of tokens that rank before the given one, and their probability, each [R].

    Together with the token's own probability, the latter gives the randomised PIT of the sample.
    """
    p_RV = np.exp(logp_RV) if p_RV is None else p_RV
    own_R1 = np.take_along_axis(logp_RV, token_R[:, None], axis=-1)
    ids_V = np.arange(logp_RV.shape[-1])
    before_RV = (logp_RV > own_R1) | ((logp_RV == own_R1) & (ids_V < token_R[:, None]))
    mass_R = (p_RV * before_RV).sum(axis=-1)
    return before_RV.sum(axis=-1).astype(np.float64), mass_R


def entropy_nats(logp_RV: Floats, p_RV: Floats | None = None) -> Floats:
    """Shannon entropy of each row, [R], nats; p_RV: the probabilities, if known."""
    p_RV = np.exp(logp_RV) if p_RV is None else p_RV
    # a token without mass adds 0; the product would be 0 * -inf
    return -(p_RV * np.maximum(logp_RV, -1e300)).sum(axis=-1)


def likeliest(logp_RV: Floats, best: int) -> dict[str, Floats]:
    """The `best` most likely tokens of each row as columns of a trace, best first, ties by id.

    >>> likeliest(np.log([[0.25, 0.5, 0.25]]), 2)["id.1"].tolist()
    [0.0]
    """
    size = logp_RV.shape[-1]
    best = min(best, size)
    if not best:
        return {}
    # `best` blocks have a token at least as likely as the smallest block maximum: skip the others
    starts = np.arange(0, size, max(1, size // (8 * best)))
    largest_RB = np.maximum.reduceat(logp_RV, starts, axis=-1)
    least_R = -np.partition(-largest_RB, best - 1, axis=-1)[:, best - 1]
    id_RK = np.empty((len(logp_RV), best), dtype=np.int64)
    for row, (logp_V, least) in enumerate(zip(logp_RV, least_R, strict=True)):
        ids = np.flatnonzero(logp_V >= least if least > -np.inf else logp_V > -np.inf)
        if len(ids) < best:  # filters kept fewer tokens
            ids = np.concatenate([ids, np.setdiff1d(np.arange(min(2 * best, size)), ids)])
        id_RK[row] = ids[np.argsort(-logp_V[ids], kind="stable")][:best]
    return best_columns(id_RK, np.take_along_axis(logp_RV, id_RK, axis=-1))


def best_columns(ids_NK: NDArray[np.generic], logp_NK: NDArray[np.generic]) -> dict[str, Floats]:
    """The columns that `Trace.best` reads: "id.0", "logp.0", "id.1", ..., best first.

    >>> sorted(best_columns(np.array([[3, 1]]), np.array([[-0.5, -2.0]])))
    ['id.0', 'id.1', 'logp.0', 'logp.1']
    """
    columns: dict[str, Floats] = {}
    for k in range(ids_NK.shape[1]):
        columns[f"id.{k}"] = ids_NK[:, k].astype(np.float64)
        columns[f"logp.{k}"] = logp_NK[:, k].astype(np.float64)
    return columns


def observe(
    logits_RV: NDArray[np.floating], token_R: Ints, sampling: Sampling
) -> dict[str, Floats]:
    """The record of a kernel at each position: `columns_of` its processed logprobs."""
    return columns_of(processed_logprobs(logits_RV, sampling), token_R)


def columns_of(logp_RV: Floats, token_R: Ints) -> dict[str, Floats]:
    """Columns of a Trace, each [R], from processed logprobs.

    `logp` is the processed logprob of the sampled or given token, `rank` the number of tokens that
    rank before it and `mass_before` their probability; `top1`, `entropy_nats` and `p_max` describe
    its distribution, and so do `id.0`, `logp.0`, ...: the BEST most likely tokens, which give the
    mass of sets of ids that are defined by earlier text.
    """
    p_RV = np.exp(logp_RV)
    top1_R = logp_RV.argmax(axis=-1)
    rows_R = np.arange(len(token_R))
    rank_R, mass_before_R = standing(logp_RV, token_R, p_RV)
    return {
        "logp": logp_RV[rows_R, token_R],
        "top1": top1_R.astype(np.float64),
        "rank": rank_R,
        "entropy_nats": entropy_nats(logp_RV, p_RV),
        "p_max": p_RV[rows_R, top1_R],
        "mass_before": mass_before_R,
        **likeliest(logp_RV, BEST),
    }
