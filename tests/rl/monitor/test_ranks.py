# Ranks: one verdict on all of them, whatever their order, and none where they disagree.

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from servanda.errors import EvidenceError
from servanda.rl import Monitor
from tests.rl.monitor.made import step

RANKS = 3


class Wire:
    """An all-gather between threads that passes bytes, as processes would."""

    def __init__(self, size, order=None):
        self.barrier = Barrier(size, timeout=60)
        self.sent = [b""] * size
        self.order = order or range(size)

    def of(self, rank):
        def gather(message):
            self.barrier.wait()
            self.sent[rank] = pickle.dumps(message)
            self.barrier.wait()
            return [pickle.loads(self.sent[i]) for i in self.order]

        return gather


def observed(shards, *, steps=1, order=None, contract="verl-sync", **monitor):
    """What each rank is told of its shard, at every step; an error stands for itself."""
    wire = Wire(len(shards), order)
    monitors = [Monitor(contract, gather=wire.of(r), **monitor) for r in range(len(shards))]

    def run(rank):
        try:
            return [monitors[rank].observe(**shards[rank](w)) for w in range(steps)]
        except EvidenceError as error:
            return str(error)

    with ThreadPoolExecutor(len(shards)) as pool:
        return [*pool.map(run, range(len(shards)))]


def shard(rank, size=12, **more):
    train, infer, mask = step(np.random.default_rng(rank), size, 256, 0.03 if rank else 0.3)
    labels = {"env": [f"env{rank}"] * size}
    groups = [f"g{(b + rank) // 4}" for b in range(size)]
    given = {"logp_train_BT": train, "logp_infer_BT": infer, "mask_BT": mask}
    given |= {"labels": labels, "groups": groups, **more}
    return lambda weights: {"weights": weights, **given}


def told(steps):
    return [
        (s.outcome, s.action, s.would, dict(s.metrics), s.cause, s.verdict.evidence) for s in steps
    ]


def test_every_rank_reaches_the_same_answer_about_all_tokens():
    shards = [shard(r) for r in range(RANKS)]
    ranks = observed(shards, steps=2)

    assert told(ranks[0]) == told(ranks[1]) == told(ranks[2])
    tokens = sum(int(s(0)["mask_BT"].sum()) for s in shards)
    assert ranks[0][0].verdict.tokens == tokens
    assert ranks[0][0].verdict.groups == len({g for s in shards for g in s(0)["groups"]})
    assert {c.slice for c in ranks[0][0].verdict.cells} >= {"env-env0", "env-env1", "env-env2"}


@pytest.mark.slow
def test_the_order_of_ranks_does_not_count():
    shards = [shard(r) for r in range(RANKS)]
    ranks = observed(shards, steps=7)
    turned = observed(shards, steps=7, order=[2, 0, 1])

    assert told(ranks[0]) == told(turned[0])
    assert ranks[0][6].trend == turned[0][6].trend


def test_ranks_have_weights_of_their_own_and_one_without_a_trained_token_takes_part():
    shards = [shard(0), shard(1, size=5)]
    first, second = (steps[0] for steps in observed(shards))

    assert (len(first.token_weights), len(second.token_weights)) == (12, 5)
    empty = shard(1)(0)
    shards = [shard(0), lambda w: {**empty, "weights": w, "mask_BT": np.zeros((12, 256))}]
    ranks = observed(shards)

    assert told(ranks[0]) == told(ranks[1])
    assert ranks[0][0].outcome == "violated"


def test_ranks_of_different_steps_or_of_one_process_are_refused_on_all_of_them():
    later = shard(1)
    ranks = observed([shard(0), lambda w: {**later(w), "weights": w + 4}])

    assert all("rank 0 has step 0, and rank 1 has 4" in said for said in ranks)
    ranks = observed([shard(0), shard(1)], order=[0, 0, 1])

    assert all("ranks 0 and 1 are the same process" in said for said in ranks)


def test_a_gather_that_leaves_a_rank_out_is_refused():
    sent = []
    Monitor("trl", gather=lambda m: sent.append(m) or [m]).observe(**shard(0)(0))
    with pytest.raises(EvidenceError, match="gather returned 1 ranks, without this one"):
        Monitor("trl", gather=lambda _: sent[:1]).observe(**shard(1)(0))


def test_ranks_under_different_contracts_are_refused():
    wire = Wire(2)
    monitors = [
        Monitor(name, gather=wire.of(r)) for r, name in enumerate(("verl-sync", "verl-async"))
    ]

    def run(rank):
        with pytest.raises(EvidenceError) as error:
            monitors[rank].observe(**shard(rank)(0))
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        said = [*pool.map(run, range(2))]
    assert all("rank 0 has contract" in text for text in said)


@pytest.mark.parametrize("rank", range(2))
def test_the_data_of_any_rank_can_be_wrong_and_selected(rank):
    shards = [shard(0), shard(1)]
    copy = shards[rank](0)["logp_infer_BT"]
    shards[rank] = shard(rank, logp_train_BT=copy, logp_infer_BT=copy, selected=np.arange(12) < 7)
    found = [steps[0] for steps in observed(shards)]

    for step_ in found:
        assert step_.outcome == "error" and "are one array" in step_.cause
        assert "judged on 19 of 24 sequences" in str(step_.verdict.blind_spots)


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_cannot_read_its_arrays_stops_the_others_with_its_reason(first):
    """Were it to stop alone, they would wait for it for ever."""
    whole = shard(1)

    def broken(weights):
        given = whole(weights)
        return {**given, "mask_BT": None} if first or weights else given

    ranks = observed([shard(0), broken], steps=1 if first else 2)

    assert "rank 1: step" in ranks[0]
    assert "has no mask" in ranks[0]
    assert "has no mask" in ranks[1]
