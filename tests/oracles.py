# Slow, obvious and exact: what the tests hold the house against.

import math

import numpy as np


def kl(p, q):
    """KL(p || q) in nats, by the definition, one outcome at a time."""
    return math.fsum(a * math.log(a / b) if b else math.inf for a, b in zip(p, q, strict=True) if a)


def tv(p, q):
    """Total variation, by the definition."""
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))


def softmax(logits):
    """Probabilities of one row of logits in float64, by the definition."""
    top = max(logits)
    mass = [math.exp(z - top) for z in logits]
    return [m / math.fsum(mass) for m in mass]


def nucleus(p, top_p):
    """The kept set of top-p: most likely first, while the mass before is below top_p."""
    kept, before = set(), 0.0
    for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        if before >= top_p:
            break
        kept.add(token)
        before += p[token]
    return kept


def log_moment_e(values, theta, limit):
    """One component of LogMoment, multiplied out: prod (1 + theta x) / (1 + theta limit)."""
    return math.prod((1 + theta * x) / (1 + theta * limit) for x in values)


def group_ratio_e(groups, theta, limit, capacity):
    """One component of GroupRatio: groups are lists of x, one value a token."""
    e = 1.0
    for xs in groups:
        z = limit + math.fsum(x - limit for x in xs) / capacity
        e *= (1 + theta * z) / (1 + theta * limit)
    return e


def log_mean_exp(logs):
    return math.log(np.mean(np.exp(np.array(logs))))
