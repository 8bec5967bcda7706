# A healthy training run under every preset: two hundred steps, none of them red.
#
# Tokens are drawn from the sampler's own softmax, and the trainer's logits are the same with the
# noise of a change of precision, so that every identity that a guard tests is true.

import numpy as np
import pytest

from servanda.rl import Monitor

STEPS = 200
VOCABULARY = 64
NOISE = 0.02  # standard deviation of a logit: bfloat16 against float32
PRESETS = ("verl-sync", "verl-async", "trl", "nemo-grpo", "prime-rl", "slime")


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def healthy(rng):
    """A step of four prompts with four responses each: both logprobs, the mask, the rest."""
    size, width = 16, int(rng.integers(64, 384))
    sharpness_BT1 = rng.choice([0.3, 1.0, 6.0], (size, width, 1), p=[0.1, 0.3, 0.6])
    logits_BTV = sharpness_BT1 * rng.normal(size=(size, width, VOCABULARY))
    infer_BTV = log_softmax(logits_BTV)
    train_BTV = log_softmax(logits_BTV + NOISE * rng.normal(size=logits_BTV.shape))
    drawn_BT1 = (infer_BTV + rng.gumbel(size=infer_BTV.shape)).argmax(-1)[..., None]
    columns = (np.take_along_axis(x, drawn_BT1, -1)[..., 0] for x in (train_BTV, infer_BTV))
    train_BT, infer_BT = (column.astype(np.float32) for column in columns)
    length_B = rng.integers(16, width + 1, size)
    mask_BT = np.arange(width) < length_B[:, None]
    groups = [f"prompt {b // 4}" for b in range(size)]
    labels = {"env": [("math", "code", "tools", "tools")[b // 4] for b in range(size)]}
    return train_BT, infer_BT, mask_BT, {"groups": groups, "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_two_hundred_healthy_steps_are_never_red(preset):
    rng = np.random.default_rng(PRESETS.index(preset))
    monitor = Monitor(preset)
    asynchronous = preset in ("verl-async", "prime-rl")

    found = []
    for number in range(STEPS):
        train_BT, infer_BT, mask_BT, more = healthy(rng)
        if asynchronous:
            more["staleness"] = np.broadcast_to(rng.integers(0, 3, (16, 1)), mask_BT.shape)
        found.append(monitor.observe(train_BT, infer_BT, mask_BT, weights=number, **more))

    assert not [(s, step.outcome) for s, step in enumerate(found) if step.exit_code in (1, 4)]
    assert not {step.cause for step in found} - {""}
