# Training runs whose engines follow the trainer, or do not: real kernels, scored after every sync.
#
# The trainer is float32, with AdamW on a policy gradient; the engine is loaded by the trainer's own
# sync.  Engines that hold whole versions (never synced, late, every other sync dropped, a stale
# replica) are read off the healthy engine's scores, which depend on its weights alone.

import functools
from typing import NamedTuple

import numpy as np
import torch

from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.weight_sync import WeightSync
from servanda.rl import Follow
from servanda.rl.follow.follow import rows_of
from servanda.rl.follow.sent_weights import SentWeights
from servanda.rl.follow.stale_parts import StaleParts
from servanda.rl.sync_drill.trainee import forward_logprobs
from tests.trainers import FOLDERS, adapt, open_engine, score, trainer

SEQUENCES, TOKENS = 16, 24  # of a batch of the training
# engines that a sync of SYNC_FAULTS loads, with its value
LOADED = {
    "one_mlp": None,
    "tied_head_stale": None,
    "norms_stale": None,
    "adapter_scaled": 2.0,
}
# engine -> the version that it holds after a sync
HELD = {
    "": lambda k: k,
    "never_synced": lambda _: 0,
    "stopped": lambda k: min(k, STOPPED),
    "late": lambda k: max(0, k - 1),
    "dropped": lambda k: k - k % 2,
}
STOPPED = 3


class Run(NamedTuple):
    """A training run.

    Args:
        kind: of model, as of tests.trainers.FOLDERS.
        rate: the learning rate of AdamW.
        moved: how far the weights are from those of the checkpoint, in standard deviations of noise
            on each; at 0 they are numbers of bfloat16, as at the start of a real run.
        faults: of LOADED, each of an engine of its own.
        quantised: engines that follow, each in a format that it rounds the weights to by itself.
        adapters: whether adapters are trained, and nothing else.
        parts: whether the trainer is also scored with each group of weights as at the start.
    """

    kind: str
    seed: int = 0
    steps: int = 6
    rate: float = 3e-6
    moved: float = 0.002
    faults: tuple = ()
    quantised: tuple = ()
    adapters: bool = False
    parts: bool = False


class Scores(NamedTuple):
    """Scores after each sync, the start included, [K, R, T], nats.

    Args:
        train: with the weights that are sent; exact: with its own ones.
        engines: fault or format -> the engine's; "" and those of a format follow.
        parts: group -> the trainer's, with that group as at the start.
    """

    train: np.ndarray
    exact: np.ndarray
    engines: dict
    parts: dict

    def engine(self, fault):
        """The scores of an engine of LOADED, HELD or a format, [K, R, T]."""
        if fault in self.engines:
            return self.engines[fault]
        healthy = self.engines[""]
        return healthy[[HELD[fault](k) for k in range(len(healthy))]]


def scored(run):
    """Train, and score both sides after every sync."""
    module = trainer(run.kind, run.seed, moved=run.moved)
    if run.adapters:
        adapt(module, fresh=True)
    sent = SentWeights(module, "bfloat16")
    rows = rows_of(module, run.seed)
    engines, syncs = {}, []
    for name in ("", *run.faults, *run.quantised):
        form = name if name in run.quantised else "bfloat16"
        engines[name] = open_engine(FOLDERS[run.kind], form, rows=64)
        WeightSync(module, engines[name])()  # both sides start with the same weights
        syncs.append(sync_of("" if name in run.quantised else name)(module, engines[name]))
    stale = StaleParts(module, sent) if run.parts else None
    train, exact, parts = [], [], []
    infer = {fault: [] for fault in engines}

    def look():
        train.append(sent(rows))
        exact.append(forward_logprobs(module, rows))
        if stale:
            parts.append(stale.scores(rows))
        for fault, engine in engines.items():
            infer[fault].append(score(engine, rows))

    look()
    for _ in updates(module, run):
        for sync in syncs:
            sync()
        look()
    groups = parts[0] if parts else ()
    return Scores(
        np.array(train),
        np.array(exact),
        {fault: np.array(looks) for fault, looks in infer.items()},
        {name: np.array([looks[name] for looks in parts]) for name in groups},
    )


def sync_of(fault):
    """The class of a sync: of SYNC_FAULTS, or one that works."""
    if not fault:
        return WeightSync
    entry = SYNC_FAULTS[fault]
    value = LOADED[fault]
    return entry.inject(WeightSync, entry.default if value is None else value)


def updates(module, run):
    """Updates of AdamW by the policy gradient of random texts, one an item."""
    noise = torch.Generator().manual_seed(run.seed)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.rate)
    size = module.config.vocab_size
    for step in range(run.steps):
        ids = torch.randint(1, size, (SEQUENCES, TOKENS), generator=noise)
        reward = (ids % 7 == 0).float().mean(dim=1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        logits = module(ids).logits[:, :-1]
        logp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-advantage[:, None] * logp).mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        yield step


kept = functools.cache(scored)


def followed(scores, fault="", *, replicas=1, parts="", exact=False):
    """The results of a Follow on recorded scores, one per sync.

    Args:
        fault: of LOADED, HELD or a format; of several replicas only the last one has it.
        parts: "violated" or "always": when the effects of groups are asked for.
        exact: whether the trainer is scored with its own weights instead of those that are sent.
    """
    train = scores.exact if exact else scores.train
    broken, healthy = scores.engine(fault), scores.engines[""]
    follow = Follow([[0] * (train.shape[2] + 1)] * train.shape[1])
    steps = []
    for k, train_RT in enumerate(train):
        engines = {f"r{i}": healthy[k] for i in range(replicas - 1)}
        groups = {name: looks[k] for name, looks in scores.parts.items()}
        given = {"": None, "violated": lambda groups=groups: groups, "always": groups}[parts]
        infer = {**engines, f"r{replicas - 1}": broken[k]}
        steps.append(follow.observe(k, train_RT, infer, parts=given))
    return steps


# fault -> its cause; None where a run of so few steps shows none
CAUSES = {
    "never_synced": "never_synced",
    "stopped": "stopped",
    "late": "late",
    "dropped": "dropped",
    "one_mlp": "part",
    "tied_head_stale": "part",
    "norms_stale": None,  # no norm has reached its next number of bfloat16
    "adapter_scaled": "scaled",
}
_QWEN = Run("qwen3", rate=3e-5)
_LOADED = ("one_mlp", "tied_head_stale", "norms_stale")
BROKEN = (
    *(_QWEN._replace(seed=seed, faults=_LOADED, parts=True) for seed in (0, 30, 31)),
    Run("llama", rate=3e-5, faults=("one_mlp",), parts=True),
    Run("qwen3", seed=100, rate=3e-4, faults=("adapter_scaled",), adapters=True),
)
