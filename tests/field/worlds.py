# Worlds: what a trainer and an engine record of one policy, drawn from a real distribution.
#
# Every token has logits over a vocabulary of 256. The engine's are the policy's and noise of its
# own, and it draws the token from its own softmax, so the mean weight is 1 as it is in a healthy
# run. Some contexts leave the next token open, others are all but certain. A bug is said as in
# its thread: a larger noise on some tokens, another transform of the sampler, or a mistake in
# what is written down.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from servanda.cli.calibrate import ALPHA
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.recorded_run import recorded_run
from servanda.rl.trend.changes import Reference

VOCABULARY = 256
NOISE = 0.02  # nats a logit: mean |log ratio| about .01, a dense model in bfloat16
PROMPT = 8
_SHARPNESS = (0.8, 4.0, 10.0)  # standard deviation of the logits: least, more on average, most


@dataclass
class Drawn:
    """One step: both sides' logprobs of the drawn tokens, [S, T]."""

    step: int
    token: Any
    train: Any
    infer: Any
    mask: Any
    labels: dict[str, list[str]] = field(default_factory=dict)
    group: int = 2  # answers to one prompt

    def but(self, **changes: Any) -> Drawn:
        return replace(self, **changes)


def log_softmax(logits):
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def nucleus(logp, top_p):
    """Logprobs of the tokens that a top-p keeps, renormalised; -inf for the others."""
    order = np.argsort(-logp, axis=-1)
    sorted_ = np.take_along_axis(logp, order, -1)
    before = np.cumsum(np.exp(sorted_), -1) - np.exp(sorted_)
    kept = np.where(before < top_p, sorted_, -np.inf)
    out = np.empty_like(logp)
    np.put_along_axis(out, order, kept, -1)
    return log_softmax(out)


def draw(
    seed,
    step,
    *,
    size=24,
    width=96,
    noise: Any = NOISE,
    temperature=1.0,
    top_p=1.0,
    reports="processed",
    scaled=False,
    labels=None,
):
    """A step of `size` sequences of `width` answer tokens.

    Args:
        noise: of the engine's logits against the trainer's, nats: a number or [S, T].
        temperature, top_p: of the engine's sampler; the trainer scores without them.
        scaled: the trainer divides its logits by the temperature, too.
        reports: "processed", the logprobs that the engine drew with; or "raw", those before
            temperature and top-p.
    """
    rng = np.random.default_rng([seed, step])
    least, more, most = _SHARPNESS
    sharpness = np.minimum(least + rng.standard_gamma(more, (size, width)), most)
    policy = sharpness.astype(np.float32)[..., None] * rng.standard_normal(
        (size, width, VOCABULARY), dtype=np.float32
    )
    noise = np.broadcast_to(np.float32(noise), (size, width))[..., None]
    engine = policy + noise * rng.standard_normal(policy.shape, dtype=np.float32)
    processed = log_softmax(engine / np.float32(temperature))
    if top_p < 1:
        processed = nucleus(processed, top_p)
    below = np.exp(processed).cumsum(-1, dtype=np.float64)
    token = (below <= rng.random((size, width, 1)) * below[..., -1:]).sum(-1)

    def at(logp):
        return np.take_along_axis(logp, token[..., None], -1)[..., 0]

    infer = at(processed if reports == "processed" else log_softmax(engine))
    named = {name: [of(s) for s in range(size)] for name, of in (labels or {}).items()}
    mask = np.ones((size, width), dtype=bool)
    scored = log_softmax(policy / np.float32(temperature if scaled else 1.0))
    return Drawn(step, token, at(scored), infer, mask, named)


def write(folder, steps, prompts=None):
    """A dump of our own format, with a prompt of PROMPT tokens before each answer."""
    writer = Writer(folder)
    for one in steps:
        size = len(one.token)
        rng = np.random.default_rng([9, one.step])
        prompt = rng.integers(0, VOCABULARY, (size, PROMPT))
        prompt = prompt[np.arange(size) // one.group]
        before = np.full((size, PROMPT), np.nan)
        writer.step(
            one.step,
            np.hstack([prompt, one.token]),
            np.hstack([np.zeros((size, PROMPT), bool), one.mask]),
            np.hstack([before, one.train]),
            np.hstack([before, one.infer]),
            groups=[f"{one.step}.{s // one.group}" for s in range(size)],
            labels=one.labels,
        )
    return folder


def reference(folder, how: Callable[[int, int], Drawn], steps=range(1, 13), runs=9):
    """The reference of some good runs, with which later ones are compared.

    Args:
        how: draws a step of a good run, how(seed, step).
    """
    seeds = range(1000, 1000 + runs)
    dumps = [run(folder / f"good-{s}", lambda step, s=s: how(s, step), steps) for s in seeds]
    path = folder / "good.reference.json"
    Reference.of([recorded_run(dump) for dump in dumps], ALPHA, recorded=runs).write(path)
    return path


def run(folder, how: Callable[[int], Drawn], steps=range(1, 13)):
    """A dump of as many steps; how(step) draws one."""
    return write(folder, map(how, steps))
