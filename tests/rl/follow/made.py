# Runs with a known truth: a trainer that walks at random, and engines that hold a version of it.

import numpy as np

from servanda.rl import Follow

ROWS, TOKENS = 64, 10
PROBES = [[0] * (TOKENS + 1)] * ROWS
# what an engine holds after a sync
HELD = {
    "": lambda k: k,
    "never_synced": lambda _: 0,
    "stopped": lambda k: min(k, 5),
    "late 1": lambda k: max(0, k - 1),
    "late 2": lambda k: max(0, k - 2),
    "dropped": lambda k: k - k % 2,
    "dropped, odd": lambda k: max(0, k - (k + 1) % 2),
}


class Walk:
    """Scores of a trainer that moves on with momentum, and the noise of its engine's kernel.

    Args:
        step, noise: spread of a token's change per update, and of the engine's rounding, nats.
    """

    def __init__(self, seed=0, looks=16, step=0.06, noise=0.02):
        self.rng = np.random.default_rng(seed)
        shape = (ROWS, TOKENS)
        self.train = [-3 - self.rng.exponential(3, shape)]
        self.part = [self.train[0]]  # the same without the change of some weights
        speed = np.zeros(shape)
        some = self.rng.random(shape) < 0.4
        for _ in range(looks - 1):
            speed = 0.7 * speed + self.rng.normal(0, step / 2, shape)
            self.train.append(np.minimum(self.train[-1] + speed, 0))
            self.part.append(self.part[-1] + np.where(some, 0.2, 1.0) * speed)
        # the kernel's rounding depends on the weights: those of one version round alike
        self.rounding = [self.rng.normal(0, noise, shape) for _ in range(looks)]

    def engine(self, held, factor=1.0):
        """An engine's scores after each sync."""
        start = self.train[0]
        versions = map(held, range(len(self.train)))
        return [
            np.minimum(start + factor * (self.train[v] - start) + self.rounding[v], 0)
            for v in versions
        ]

    def follow(self, infer, follow=None, parts=None, **settings):
        """The results of all syncs."""
        follow = follow or Follow(PROBES, **settings)
        return [
            follow.observe(
                k, self.train[k], infer(k) if callable(infer) else infer[k],
                parts=parts(k) if parts else None,
            )
            for k in range(len(self.train))
        ]  # fmt: skip
