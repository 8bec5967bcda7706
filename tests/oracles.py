# Slow, obvious and exact: what the tests hold the house against.

import math
from contextlib import contextmanager
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import accumulate

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


# The bets, written down here a second time: what is fixed for ever is not imported from the code
# that it is held against.
NEG = (*(-0.002 * 450 ** (i / 13) for i in range(14)), -0.95, -0.99)
POS = tuple(0.01 * 10 ** (i / 4) for i in range(33))


def grown(xs, bets, limit):
    """log of each bet's product over xs, nats, [J]."""
    return [math.fsum(math.log1p(t * x) - math.log1p(t * limit) for x in xs) for t in bets]


def weights(bets, limit, best=0.0):
    """A fifth of the weight on all bets, the rest on those that grow fast against the limit."""

    def optimal(mean):  # of (1 + t x) / (1 + t limit), for x in {0, 1}
        return (mean - limit) / (limit * (1 - mean))

    away = limit - best
    if bets == NEG:
        ranges = [(1.0, -1.0, optimal(limit - away / 10))]
    else:
        near = optimal(min(limit + 3 * away / 20, (1 + 3 * limit) / 4))
        far = optimal(min(limit + 5 * away, (1 + limit) / 2))
        ranges = [(0.6, near, far), (0.4, 0.03 / limit, 3 / limit)]
    inside = [(share, [low <= t <= high for t in bets]) for share, low, high in ranges]
    parts = [[0.8 * share * i / sum(of) for i in of] for share, of in inside]
    return [0.2 / len(bets) + sum(column) for column in zip(*parts, strict=True)]


def mixed(growth, weight=None):
    """log of the mean of the products, whatever their size."""
    top = max(growth)
    weight = weight or [1 / len(growth)] * len(growth)
    return top + math.log(
        math.fsum(w * math.exp(g - top) for g, w in zip(growth, weight, strict=True))
    )


def most(rounds, bets, limit, weight=None):
    """The largest log e-value of the mixture after any of the rounds."""
    so_far = accumulate(np.array(grown(xs, bets, limit)) for xs in rounds)
    weight = weight or weights(bets, limit)
    return max(mixed(growth.tolist(), weight) for growth in so_far)


def bernoulli_ends(ones, n, alpha):
    """The two ends of the mean of n values of which so many are 1 and the others 0."""
    neg, pos = np.array(NEG), np.array(POS)

    def at(bets, limit):
        return mixed((ones * np.log1p(bets) - n * np.log1p(bets * limit)).tolist())

    ends = []
    for bets, proved, open_ in ((pos, 0.0, 1.0), (neg, 1.0, 0.0)):
        if at(bets, proved) >= math.log(1 / alpha):
            for _ in range(50):
                middle = (proved + open_) / 2
                if at(bets, middle) >= math.log(1 / alpha):
                    proved = middle
                else:
                    open_ = middle
        ends.append(proved)
    return tuple(ends)


# Divergences by their textbook definitions, on probabilities of any exact type: Fractions
# and Decimals lose nothing that floats would.  p is train, q is infer.
def _log(x):
    return x.ln() if isinstance(x, Decimal) else math.log(x)


def _sqrt(x):
    return x.sqrt() if isinstance(x, Decimal) else math.sqrt(x)


def _kl(p, q):
    return sum(a * _log(a / b) if b else math.inf for a, b in zip(p, q, strict=True) if a)


def _js(p, q):
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (_kl(p, m) + _kl(q, m)) / 2


def _chi2(p, q):
    parts = ((a - b) ** 2 / b if b else math.inf for a, b in zip(p, q, strict=True) if a or b)
    return sum(parts)


def _le_cam(p, q):
    return sum((a - b) ** 2 / (a + b) for a, b in zip(p, q, strict=True) if a or b) / 2


def entropy(p):
    return -sum(a * _log(a) for a in p if a)


EXACT = {
    "tv": lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "kl_nats": lambda p, q: _kl(q, p),
    "kl_reverse_nats": _kl,
    "chi2": _chi2,
    "js_nats": _js,
    "hellinger2": lambda p, q: 1 - sum(_sqrt(a * b) for a, b in zip(p, q, strict=True)),
    "le_cam": _le_cam,
    "entropy_nats": lambda p, q: abs(entropy(p) - entropy(q)),
    "abs_log_ratio_nats": lambda p, q: max(
        abs(_log(a / b)) if a and b else math.inf for a, b in zip(p, q, strict=True) if a or b
    ),
}
# these three with shared support only
EXACT["k3_nats"] = EXACT["kl_nats"]
EXACT["logit_osc_nats"] = lambda p, q: _log(
    max(a / b for a, b in zip(p, q, strict=True)) / min(a / b for a, b in zip(p, q, strict=True))
)
EXACT["logit_linf_nats"] = lambda p, q: EXACT["logit_osc_nats"](p, q) / 2


@contextmanager
def _digits(n):
    with localcontext() as context:
        context.prec = n
        yield


def decimal_softmax(logits, digits=50):
    """Probabilities of one row of logits, as Decimals of so many digits."""
    with _digits(digits):
        mass = [Decimal(float(z)).exp() for z in logits]
        whole = sum(mass)
        return [m / whole for m in mass]


def exactly(name, train_logits, infer_logits, digits=50):
    """A metric of two rows of logits, by its definition in Decimals."""
    p, q = (decimal_softmax(row, digits) for row in (train_logits, infer_logits))
    with _digits(digits):
        return EXACT[name](p, q)


def calibration_error(conf, hit, bins=15):
    """Expected calibration error, one bin and one position at a time."""
    total = Fraction(0)
    for i in range(bins):
        inside = [
            n for n, c in enumerate(conf) if i / bins < c <= (i + 1) / bins or (c == 0 and i == 0)
        ]
        total += abs(sum(Fraction(float(conf[n])) - Fraction(int(hit[n])) for n in inside))
    return float(total / len(conf))


def rejection_sampled(target, believed, drafted):
    """The law of a token under speculation, every draft and decision enumerated.

    Args:
        target: probabilities of the next token; believed: those that drafts are accepted by;
            drafted: those that they are drawn by.
    """
    rest = [max(p - q, 0.0) for p, q in zip(target, believed, strict=True)]
    law = [0.0] * len(target)
    for x, chance in enumerate(drafted):
        accepted = min(1.0, target[x] / believed[x]) if believed[x] else 0.0
        law[x] += chance * accepted
        for y, share in enumerate(rest if sum(rest) else target):
            law[y] += chance * (1 - accepted) * share / (sum(rest) or 1.0)
    return law
