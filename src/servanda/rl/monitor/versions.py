# Versions: the weights that an engine claims against those that its logprobs fit.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.rl.monitor.batch import Batch
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.lag_split import LagSplit
from servanda.theory.stats.version_fit import VersionFit

Array = NDArray[Any]

REPLICA = "replica"  # the label that separates engines
Key = tuple[str, int]  # (replica, updates from the claimed version back to the other one)


def fits_of(batch: Batch) -> dict[Key, VersionFit]:
    """Each replica's sequences under each other version; {} without `older`."""
    if not batch.older:
        return {}
    batch = batch.on_host
    logp = {0: batch.logp_train_BT, **batch.older}
    stale_BT = 0.0 if batch.staleness_BT is None else batch.staleness_BT
    lag_BT = np.broadcast_to(stale_BT, batch.mask_BT.shape)
    claimed_BT = _under(logp, lag_BT)
    names = batch.labels.get(REPLICA, ("",) * batch.sequences)
    found: dict[Key, VersionFit] = {}
    for back in sorted({k - own for k in logp for own in logp} - {0}):
        fits_B = _by_sequence(batch, claimed_BT, _under(logp, lag_BT + back), lag_BT)
        for name, fit in zip(names, fits_B, strict=True):
            if fit.n:
                found[name, back] = found.get((name, back), VersionFit()) + fit
    return found


def _under(logp: Mapping[int, Array], lag_BT: Array) -> Array:
    """The trainer's logprob of each token under the version of its lag; NaN if not given."""
    under_BT = np.full(lag_BT.shape, np.nan)
    for back, logp_BT in logp.items():
        np.copyto(under_BT, logp_BT, where=lag_BT == back)
    return under_BT


def _by_sequence(
    batch: Batch, claimed_BT: Array, other_BT: Array, lag_BT: Array
) -> list[VersionFit]:
    """The comparison of each sequence, on the tokens with all three logprobs."""
    with np.errstate(invalid="ignore"):
        gaps = (np.abs(batch.logp_infer_BT - of_BT) for of_BT in (other_BT, claimed_BT))
        other_BT, claimed_BT = gaps
    used_BT = batch.mask_BT & np.isfinite(other_BT) & np.isfinite(claimed_BT)
    other_B, claimed_B = (
        np.where(used_BT, of_BT, 0.0).sum(axis=1) for of_BT in (other_BT, claimed_BT)
    )
    low_B = np.where(used_BT, lag_BT, np.inf).min(axis=1, initial=np.inf)
    high_B = np.where(used_BT, lag_BT, -np.inf).max(axis=1, initial=-np.inf)
    columns = (of.tolist() for of in (other_B, claimed_B, low_B, high_B))
    return [
        VersionFit(int(other < claimed), int(other > claimed), other, claimed, (low, high))
        for other, claimed, low, high in zip(*columns, strict=True)
    ]


def joined(parts: Sequence[Mapping[Key, VersionFit]]) -> dict[Key, VersionFit]:
    """The comparisons of all ranks."""
    whole: dict[Key, VersionFit] = {}
    for part in parts:
        for key, fit in part.items():
            whole[key] = whole.get(key, VersionFit()) + fit
    return dict(sorted(whole.items()))


def wrong(fits: Mapping[Key, VersionFit], weights: int, alpha: float) -> dict[str, str]:
    """Replica -> the sentence about a claim that its logprobs refute.

    Args:
        weights: the trainer's version; alpha: error probability, shared by all comparisons.
    """
    found: dict[str, tuple[float, str]] = {}
    for (name, back), fit in fits.items():
        if fit.p > shared(alpha, len(fits)) or fit.other >= fit.claimed:
            continue
        share = fit.other / fit.claimed  # the other version that explains most is named
        if name not in found or share < found[name][0]:
            found[name] = share, _sentence(name, back, fit, weights)
    return {name: text for name, (_, text) in found.items()}


def _sentence(name: str, back: int, fit: VersionFit, weights: int) -> str:
    who = f"replica {name}" if name else "the engine"
    first, last = fit.lags
    if first == last:
        own = weights - int(first)
        claim = f"{who} claims version {own} and samples from {own - back}"
    else:
        word = "behind" if back > 0 else "ahead of"
        claim = f"{who} is {abs(back)} updates {word} the versions that it claims"
    return (
        f"{claim}: its logprobs are nearer to the trainer's under that version in "
        f"{fit.nearer:,} of {fit.n:,} sequences (probability at most {fit.p:.1e} if the claim is "
        "true and the kernels' noise is symmetric)"
    )


def lag_split(batch: Batch) -> LagSplit:
    """The sums of |log ratio| against staleness, if versions were given."""
    if batch.version_BT is None or batch.staleness_BT is None:
        return LagSplit()
    batch = batch.on_host
    assert batch.staleness_BT is not None
    lag_BT = np.broadcast_to(batch.staleness_BT, batch.mask_BT.shape)
    with np.errstate(invalid="ignore"):
        drift_BT = np.abs(batch.logp_train_BT.astype(np.float64) - batch.logp_infer_BT)
    names = batch.group_B or tuple(map(str, range(batch.sequences)))
    at_N = np.nonzero(batch.mask_BT)[0]
    return LagSplit.of(drift_BT[batch.mask_BT], lag_BT[batch.mask_BT], at_N, names)
