# Syncs that are broken, and engines of several replicas, around the toys.

import copy

from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.rl.sync_drill.toys import Toy


class Copies:
    """An engine of several copies of a module; `take` says what a sync puts into them."""

    def __init__(self, module, take, replicas=1, by_call=False):
        self.trainer, self.take, self.by_call = module, take, by_call
        self.models = [copy.deepcopy(module).eval() for _ in range(replicas)]
        self.sent, self.calls = [], 0

    @property
    def syncs(self):
        return len(self.sent)

    def sync(self):
        self.sent.append({k: v.detach().clone() for k, v in self.trainer.state_dict().items()})
        self.take(self)

    def score(self, rows):
        self.calls += 1
        if self.by_call:
            return forward_logprobs(self.models[self.calls % len(self.models)], rows)
        one_by_one = [self.models[i % len(self.models)] for i in range(len(rows))]
        if len(self.models) == 1:
            return forward_logprobs(self.models[0], rows)
        return [forward_logprobs(m, [row])[0] for m, row in zip(one_by_one, rows, strict=True)]


def load(engine, changed=lambda _: None, ago=0, only=None):
    """Weights of a sync, or of one some syncs ago, into the replicas; None is left out."""
    if engine.syncs <= ago:
        return
    weights = {k: v.clone() for k, v in engine.sent[-1 - ago].items()}
    changed(weights)
    for number in range(len(engine.models)) if only is None else only:
        mine = engine.models[number].state_dict()
        for name, value in weights.items():
            if value is not None:
                mine[name].copy_(value)


def without(*parts):
    """Leaves out the tensors whose names have one of these parts."""

    def changed(weights):
        for name in weights:
            if any(part in name for part in parts):
                weights[name] = None

    return lambda engine: load(engine, changed)


def late(*parts, ago=1):
    """Sends these tensors of some syncs ago, and all others at once."""

    def take(engine):
        without(*parts)(engine)
        old = lambda w: w.update({n: None for n in w if not any(p in n for p in parts)})  # noqa: E731
        load(engine, old, ago=ago)

    return take


def without_rows(low, high, name="embed.weight"):
    """Leaves out some rows of the vocabulary."""

    def take(engine):
        embed = engine.models[0].state_dict()[name]
        old = embed[low:high].clone()
        load(engine)
        embed[low:high] = old

    return take


def without_columns(low, high, name):
    """Leaves out some columns of a matrix."""

    def take(engine):
        matrix = engine.models[0].state_dict()[name]
        old = matrix[:, low:high].clone()
        load(engine)
        matrix[:, low:high] = old

    return take


def swapped(a, b):
    return lambda engine: load(engine, lambda w: w.update({a: w[b], b: w[a]}))


def transposed(name):
    return lambda engine: load(engine, lambda w: w.update({name: w[name].t().clone()}))


def times(factor, part):
    changed = lambda w: w.update({n: factor * w[n] for n in w if part in n})  # noqa: E731
    return lambda engine: load(engine, changed)


def unless(dropped):
    """Drops the syncs of some numbers."""
    return lambda engine: None if dropped(engine.syncs) else load(engine)


def differences(place):
    """Sends only the values that changed since the last sync.

    Args:
        place: (index, share of the values that changed) -> the index at which it is written.
    """
    known = {}

    def take(engine):
        mine = engine.models[0].state_dict()
        for name, value in engine.sent[-1].items():
            new = value.reshape(-1)
            changed = new != known.get(name, new + 1)
            share = float(changed.double().mean())
            at = changed.nonzero()[:, 0]
            mine[name].view(-1)[[place(int(k), share) % len(new) for k in at]] = new[at]
            known[name] = new.clone()

    return take


def trainee(take, replicas=1, by_call=False, **options):
    """A trainee, and the engine behind it."""
    module = Toy(**options)
    engine = Copies(module, take, replicas, by_call)
    return Trainee(module, engine.sync, engine.score), engine
