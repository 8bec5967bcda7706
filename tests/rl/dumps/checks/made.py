# Dumps whose faults are known, because they were put there.

import numpy as np

from servanda.traces.rollouts import Rollouts


def rollouts(
    mask=None, *, sequences=20, tokens=60, prompt=10, noise=0.02, seed=0, step=1, **columns
):
    """Sequences of equal length: a prompt, then trained tokens; logprobs like those of a text."""
    rng = np.random.default_rng(seed)
    n = sequences * tokens
    mask_N = np.tile(np.arange(tokens) >= prompt, sequences) if mask is None else np.array(mask)
    infer_N = -rng.exponential(1.5, n)
    made = {
        "step": step,
        "length_S": np.full(sequences, tokens),
        "token_N": rng.integers(0, 1000, n),
        "mask_N": mask_N,
        "logp_train_N": np.minimum(infer_N + noise * rng.normal(size=n), -1e-6),
        "logp_infer_N": infer_N,
        "group_S": tuple(f"g{s // 4}" for s in range(sequences)),
        "source_S": tuple(f"dump.jsonl:{s + 1}" for s in range(sequences)),
    }
    return Rollouts(**{**made, **columns})


def shifted(logp_N, by):
    """What stands at i + by is what belongs at i."""
    return np.roll(logp_N, by)
