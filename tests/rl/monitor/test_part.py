# What ranks send, in any order, against one process that has all of their tokens.

import copy
import operator
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import permutations

import numpy as np
import pytest

from servanda.rl import Monitor
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.ranks import (
    Overlaps,
    Part,
    RankMessage,
    added,
    drafts_of,
    extras_of,
    groups_of,
    part_of,
    rollouts_of,
    weighed_of,
)
from servanda.rl.monitor.statistics import overlaps
from servanda.rl.monitor.step import metrics_of
from servanda.rl.steps.blocks import paired
from servanda.rl.steps.contract import Counts
from servanda.theory.bounds.applied_weights import Fits
from tests.kit import parse
from tests.rl.monitor.made import step
from tests.rl.monitor.test_monitor import BARE, TV
from tests.theory.stats.test_draft_counts import counted as accepted_drafts

RANKS = 4
SUMS = ("agreement", "drafts", "scalars", "gross", "rules", "lags")  # of a part
LOSS = """slices:
  - {name: env, split: labels.env}
  - {name: late, match: {context.position: {gte: 20}}}
  - {name: stale, match: {outcome.staleness: {gte: 1}}}
gradient: {weighting: {tis: 1.5}}
observability:
  clauses:
    - {id: finite, metric: valid_ratio, at_least: 0.9}
    - {id: coherent, metric: weight_mean_check}
    - {id: mean, metric: mean_weight_ratio, at_least: 0.5, slices: [all, late]}
"""


def arguments(rank, width=48):
    """Ranks differ in size and in what they have: versions, raw logprobs, copies, or no logprob."""
    rng, shape = np.random.default_rng(rank), (16 - 2 * rank, width)
    infer = -rng.exponential(1.0, shape) - 0.06
    train = infer + rng.normal(0, 0.3, shape)
    if rank == 2:
        train[:8], train[9:, 5:], train[10:] = train[:8] + 2, infer[9:, 5:], infer[10:]
    infer[rng.random(shape) < (0, 0.03, 0.06, 1)[rank]] = np.nan
    lag_B = np.where(np.arange(shape[0]) % 8 < 7, 0.0, 2.0) if rank else np.full(shape[0], np.nan)
    older = {back: infer + rng.normal(0, 0.03, shape) for back in (1, 2)}
    return {
        "logp_train": train,
        "logp_infer": infer,
        "mask": np.arange(width) < rng.integers(8, width, (shape[0], 1)),
        "groups": np.array([f"g{(b + rank) // 4}" for b in range(shape[0])]),
        "labels": {"env": np.array([("a", "", f"of {rank}")[b % 3] for b in range(shape[0])])},
        "advantages": rng.normal(0, 1, shape[0]),
        "versions": 7 - lag_B,
        "older": older,
        "loss_weights": rng.exponential(1.0, shape),
        "selected": np.arange(shape[0]) != rank,
    }


def together(values):
    if isinstance(values[0], dict):
        return {name: together([one[name] for one in values]) for name in values[0]}
    return np.concatenate(values)


def numbers(value):
    """All numbers of a value, in the order of its fields, but what each rank fits for itself."""
    if isinstance(value, dict):
        return numbers([value[key] for key in sorted(value, key=str)])
    if is_dataclass(value) and not isinstance(value, Fits):
        return numbers([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, list | tuple | np.ndarray):
        return [n for one in value for n in numbers(one)]
    return [] if isinstance(value, str | Fits | None) else [float(value)]


@pytest.mark.parametrize("named", [True, False])  # prompt groups, which ranks then share
def test_the_parts_of_ranks_add_up_to_those_of_one_process_in_any_order(named):
    shards = [arguments(rank) for rank in range(RANKS)]
    accepted = [np.random.default_rng(rank).integers(0, rank + 2, 9) for rank in range(RANKS)]
    drafts = [accepted_drafts(of, rank + 1) for rank, of in enumerate(accepted)]
    longest = [np.repeat(rank + 1, 9) for rank in range(RANKS)]
    every = accepted_drafts(np.concatenate(accepted), RANKS, int(np.concatenate(longest).sum()))
    batches = [Batch.of(**s, weights=7) for s in (*shards, together(shards))]
    if not named:
        batches = [replace(batch, group_B=None) for batch in batches]
    contract = parse(BARE + TV + "\n" + LOSS, "run.kernelcontract.yaml", engines=[])[0]
    monitor = Monitor(contract)
    monitor._open(batches[-1])
    plan, cuts = monitor._plan, monitor._cuts
    counts = [Counts() for _ in batches]
    sent = []
    for rank, (batch, drawn) in enumerate(zip(batches, (*drafts, every), strict=True)):
        counts[rank].add(paired(rollouts_of(batch), 0))
        part = part_of(str(rank), "", contract, monitor._statistics, batch, drawn)
        sent.append((part, Overlaps(str(rank), "", 7, atoms=overlaps(cuts, batch))))

    def summed(of):
        parts, atoms = zip(*of, strict=True)
        groups = groups_of(parts)
        weighed = weighed_of(plan, parts, len(groups))
        *words, metrics = extras_of(plan, parts, 7)
        metrics |= metrics_of(parts, groups)
        sums = SUMS if named else SUMS[:-1]  # buckets of the bootstrap are by names
        if not named:
            metrics = {name: n for name, n in metrics.items() if "per_update_nats/" not in name}
        assert named or weighed.groups == weighed.sequences
        own = [reduce(operator.add, (getattr(part, name) for part in parts)) for name in sums]
        drawn = drafts_of(parts)
        return words, numbers([weighed, own, drawn, metrics, [*groups.values()], added(atoms)])

    words, whole = summed(sent[-1:])
    assert len(words[0]) == 3  # impossible weights, another weighting, and a wrong version
    for order in permutations(range(RANKS)):
        told, mine = summed([sent[rank] for rank in order])
        assert told == words
        np.testing.assert_allclose(mine, whole, rtol=1e-9, atol=1e-9)
        joined = Counts()
        for rank in order:
            joined.join(copy.deepcopy(counts[rank]))
        assert joined == counts[-1]
    names = {field.name for field in fields(Part)} - {field.name for field in fields(RankMessage)}
    for name in names - {"unsound"} if named else ():  # words, in test_ranks
        for rank in (1, 2):  # with a field of another rank the whole is another
            other = replace(sent[rank][0], **{name: getattr(sent[rank - 1][0], name)})
            parts = [(other if i == rank else part, atoms) for i, (part, atoms) in enumerate(sent)]
            told, mine = summed(parts[:RANKS])
            near = pytest.approx(whole, rel=1e-9, abs=1e-9, nan_ok=True)
            assert told != words or mine != near, f"{name} of rank {rank}"


@pytest.mark.parametrize("turns", [1, 3])
def test_the_mean_weight_leaves_out_the_first_three_tokens_of_later_turns(turns):
    batch = Batch.of(*step(np.random.default_rng(0), 8, 64, turns=turns), weights=0)
    monitor = Monitor("trl")
    monitor._open(batch)
    assert monitor._statistics.of(batch).gross.n == batch.tokens - 8 * 3 * (turns - 1)
