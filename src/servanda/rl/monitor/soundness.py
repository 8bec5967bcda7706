# Data quality checks of a step, before it is judged.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from servanda.rl.dumps.checks import Soundness, errors_of, of_step
from servanda.rl.dumps.checks.copies import UNSOUND
from servanda.rl.dumps.checks.valid_logprobs import Values
from servanda.rl.dumps.checks.zeros import FAR_NATS, Zeros
from servanda.rl.monitor import device_batch
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.device_batch import DeviceBatch
from servanda.traces.rollouts import Rollouts

_RARE_NATS = -14.0  # probability of a whole response: one in a million
# for example, verl's bypass mode uses the rollout engine's logprobs for the trainer's
_COPY = "logp_train and logp_infer are one array: the trainer's own logprobs were not computed"


def rollouts_of(batch: Batch, member: str = "") -> Rollouts:
    """A step in the form of a dump; every column of the arrays is a token of its sequence.

    Args:
        member: name of this rank, for sequences without a prompt group.
    """
    size, width = batch.mask_BT.shape
    own = tuple(f"{b}@{member}" for b in range(size))
    token_BT = np.full((size, width), -1)
    if batch.token_BT is not None:
        token_BT = batch.token_BT[:, batch.token_BT.shape[1] - width :]
    stale = {}
    if batch.staleness_BT is not None:
        stale_BT = np.broadcast_to(batch.staleness_BT, (size, width))
        stale["staleness"] = stale_BT.ravel().astype(np.float64)
    return Rollouts(
        batch.weights,
        np.full(size, width),
        token_BT.ravel(),
        batch.mask_BT.ravel(),
        batch.logp_train_BT.ravel().astype(np.float64),
        batch.logp_infer_BT.ravel().astype(np.float64),
        batch.group_B or own,
        tuple(f"sequence {b}" for b in range(size)),
        batch.labels,
        {},
        stale,
    )


def problems(batch: Batch) -> tuple[str, ...]:
    """The reasons why a step cannot be evidence: both logprobs are one array, some are above 0, or
    missing ones were filled with 0.
    """
    copied = [_COPY] if batch.one_array else []
    if isinstance(batch, DeviceBatch) and device_batch.is_clean(batch, _RARE_NATS):
        return tuple(copied)
    batch = batch.on_host
    problems = [*copied, *_repeated(batch)]
    if _suspicious(batch):
        rollouts, checks = rollouts_of(batch), (Values(), Zeros())
        for check in checks:
            check.add(rollouts)
        problems += errors_of(check.finding() for check in checks)
    return tuple(problems)


def of_sample(parts: Iterable[Rollouts]) -> tuple[str, ...]:
    """The reasons why a red step is no evidence: a dump's checks, on some of its tokens."""
    sound = Soundness(alone=True)
    for part in parts:
        sound.add(part)
    return errors_of(map(of_step, sound.findings()))


def _repeated(batch: Batch) -> list[str]:
    """Repeated responses that are too unlikely to be sampled twice.

    Two samples with bitwise equal logprobs are one response.  Its probability of being sampled
    again is its own probability, so a nearly certain response may repeat.
    """
    infer_BT = np.where(batch.mask_BT, batch.logp_infer_BT, 0.0)
    sum_B = infer_BT.sum(axis=1, dtype=np.float64)
    rare_R = np.flatnonzero(sum_B < _RARE_NATS)  # -inf and NaN are not sampled responses
    rare_R = rare_R[np.isfinite(sum_B[rare_R])]
    if len(rare_R) == len(np.unique(sum_B[rare_R])):
        return []
    firsts: dict[bytes, int] = {}
    repeated, elsewhere = 0, 0
    for row in rare_R.tolist():
        first = firsts.setdefault(infer_BT[row][batch.mask_BT[row]].tobytes(), row)
        if first != row:
            repeated += 1
            elsewhere += batch.group_B is not None and batch.group_B[first] != batch.group_B[row]
    if repeated <= UNSOUND * len(rare_R):
        return []
    return [
        f"{repeated:,} of {batch.selected:,} sequences repeat the logprobs of another to the last "
        f"bit ({elsewhere:,} under another prompt group), and none was likely to be sampled twice: "
        "the sampler repeats itself (deterministic, or seeded alike for every sample of a prompt), "
        "or rows were copied; they are not independent samples"
    ]


def _suspicious(batch: Batch) -> bool:
    """Whether a detailed check is needed; untrained tokens may be the reason."""
    train_BT, infer_BT = batch.logp_train_BT, batch.logp_infer_BT
    highest = (np.fmax.reduce(logp, axis=None, initial=0.0) for logp in (train_BT, infer_BT))
    filled = (
        ((own == 0) & (other < FAR_NATS)).any()
        for own, other in ((train_BT, infer_BT), (infer_BT, train_BT))
    )
    return any(high > 0 for high in highest) or any(filled)
