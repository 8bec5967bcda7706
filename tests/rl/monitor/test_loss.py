# What the loss used and which versions sampled, as inputs of the monitor.

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError
from servanda.rl import Monitor
from servanda.rl.dumps.formats import open_dump
from tests.kit import parse

CONTRACT = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: run}
kernels:
  train: {engine: external}
  infer: {engine: external}
weights: {changes: every_step}
claim: realised
workload: {source: trainer, sampling: {max_new_tokens: 4096}}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.3, slices: [all]}
  - {id: left, metric: weight_gap, at_most: 0.5, slices: [all]}
"""
TIS = "gradient: {weighting: {tis: 1.5}}\n"
CLAUSES = """observability:
  clauses:
    - {id: used, metric: declared_weight_ratio, at_least: 0.999}
    - {id: kept, metric: loss_kept_ratio, at_least: 0.9}
    - {id: mean, metric: mean_weight_ratio, at_least: 0.5}
    - {id: ess, metric: effective_ratio, at_least: 0.3}
"""
SIZE, WIDTH = 32, 96


def contract(more=""):
    return parse(CONTRACT + more, "run.kernelcontract.yaml", engines=["table"])[0]


def batch(seed=0, noise=0.2, size=SIZE):
    """float32 logprobs and the mask; sequences of 32 tokens and more."""
    rng = np.random.default_rng(seed)
    infer_BT = -rng.exponential(1.0, (size, WIDTH)).astype(np.float32)
    train_BT = infer_BT + rng.normal(-(noise**2) / 2, noise, infer_BT.shape).astype(np.float32)
    mask_BT = np.arange(WIDTH) < rng.integers(32, WIDTH, (size, 1))
    return np.minimum(train_BT, 0), infer_BT, mask_BT


def observed(more, loss, seed=0, **given):
    train_BT, infer_BT, mask_BT = batch(seed)
    w_BT = np.exp(train_BT - infer_BT)
    weights = {} if loss is None else {"loss_weights": loss(w_BT, mask_BT)}
    monitor = Monitor(contract(more))
    return monitor.observe(train_BT, infer_BT, mask_BT, weights=0, **weights, **given)


def declared(w_BT, mask_BT):
    return np.minimum(w_BT, np.float32(1.5))


def of_sequences(w_BT, mask_BT):
    """The product over a sequence, cut at 1.5: [B]."""
    return np.minimum(np.where(mask_BT, w_BT, 1.0).prod(axis=1), 1.5)


def cells(step):
    return {cell.clause: cell for cell in step.verdict.cells}


def test_the_declared_weights_hold_and_are_logged():
    step = observed(TIS + CLAUSES, declared)
    train_BT, infer_BT, mask_BT = batch()
    a_N = np.minimum(np.exp(train_BT - infer_BT), 1.5)[mask_BT].astype(np.float64)

    assert step.outcome == "holds"
    assert {name: cells(step)[name].value for name in ("used", "kept", "mean", "ess")} == {
        "used": 1.0,
        "kept": 1.0,
        "mean": pytest.approx(a_N.mean(), rel=1e-6),
        "ess": pytest.approx(a_N.sum() ** 2 / (len(a_N) * (a_N**2).sum()), rel=1e-6),
    }
    assert step.metrics["servanda/loss/mean_weight"] == cells(step)["mean"].value
    assert step.metrics["servanda/loss/declared"] == 1.0


FAULTS = {
    "sequence": (of_sequences, "the product of w over the sequence, at most 1.5"),
    "nothing": (lambda w, _: np.ones_like(w), "all 1: no correction was applied"),
    "masks": (
        lambda w, _: np.where(w <= 1.3, w, 0.0),
        "were dropped by the loss; its weights are the token's own w, and 0 outside",
    ),
    "shifted": (
        lambda w, _: np.minimum(np.roll(w, 1, axis=1), 1.5),
        "w of the previous token: shifted by one",
    ),
    "other": (
        lambda w, _: w * np.random.default_rng(0).uniform(0.9, 1.0, w.shape),
        "no known weighting fits",
    ),
}


@pytest.mark.parametrize("fault", [*FAULTS])
@pytest.mark.parametrize("limited", [True, False])
def test_other_weights_than_declared_are_red_and_named(fault, limited):
    """With a clause it is violated; without one it contradicts the declaration: an error."""
    loss, words = FAULTS[fault]

    step = observed(TIS + CLAUSES if limited else TIS, loss)

    assert step.outcome == ("violated" if limited else "error")
    assert "the loss did not use the declared weighting (tis 1.5)" in step.cause
    assert words in step.cause
    if limited:  # the gap that the declared weights would leave is no promise of this loss
        assert (cells(step)["left"].outcome, cells(step)["tv"].outcome) == ("inconclusive", "holds")


def test_a_few_tokens_beyond_the_cap_are_counted():
    train_BT, infer_BT, mask_BT = batch()
    beyond = (np.exp(train_BT - infer_BT) > 1.5)[mask_BT].sum()

    step = observed(TIS + CLAUSES, lambda w, _: w)

    assert 0 < beyond < 0.05 * mask_BT.sum()
    assert cells(step)["used"].value == pytest.approx(1 - beyond / mask_BT.sum())
    assert f"on {beyond} of {mask_BT.sum():,} tokens" in step.cause


def test_weights_that_nobody_declared_are_described():
    step = observed("", of_sequences)

    assert step.outcome == "holds"
    (note,) = (n for n in step.notes if "declares no weighting" in n)
    assert "the product of w over the sequence" in note


def test_tiny_weights_of_whole_sequences_violate_their_mean():
    """As in a run whose mean weight was .0596: a batch counts a seventeenth."""
    clause = "observability: {clauses: [{id: mean, metric: mean_weight_ratio, at_least: 0.5}]}"
    step = observed(clause, lambda w, m: of_sequences(w, m) * 0.0596)

    assert (step.outcome, cells(step)["mean"].outcome) == ("violated", "violated")
    assert "times less than its tokens" in cells(step)["mean"].note


@pytest.mark.parametrize(("value", "word"), [(np.inf, "infinite"), (-1.0, "negative")])
def test_an_impossible_weight_is_an_error(value, word):
    def loss(w_BT, mask_BT):
        w_BT = w_BT.copy()
        w_BT[3, 0] = value
        return w_BT

    step = observed("", loss)

    assert step.outcome == "error"
    assert step.cause.startswith("the loss weight of 1 of ")
    assert step.cause.endswith(word)


def test_clauses_about_a_loss_that_was_not_handed_over_are_not_decided():
    step = observed(TIS + CLAUSES, None)

    assert step.outcome == "inconclusive"
    assert {cells(step)[n].outcome for n in ("used", "kept", "mean", "ess")} == {"inconclusive"}
    assert "no weight of the loss was recorded" in cells(step)["mean"].note
    assert not [name for name in step.metrics if name.startswith("servanda/loss")]


def test_missing_weights_count_against_the_promise():
    def loss(w_BT, mask_BT):
        found = declared(w_BT, mask_BT)
        found[: SIZE // 8] = np.nan
        return found

    step = observed(TIS + CLAUSES, loss)

    used = cells(step)["used"]
    assert (used.value, used.outcome) == (1.0, "inconclusive")
    assert used.missing == batch()[2][: SIZE // 8].sum()
    assert cells(step)["ess"].outcome == "inconclusive"


def test_a_mask_of_the_loss_is_what_it_kept_and_may_not_leave_the_mask():
    _, _, mask_BT = batch()
    kept_BT = mask_BT & (np.arange(WIDTH) < 28)  # a filter that cuts answers short
    clauses = "observability: {clauses: [{id: kept, metric: loss_kept_ratio, at_least: 0.9}]}"

    step = observed(clauses, None, loss_mask=kept_BT)
    beyond = observed("", None, loss_mask=np.ones((SIZE, WIDTH)))

    assert cells(step)["kept"].value == pytest.approx(kept_BT.sum() / mask_BT.sum())
    assert cells(step)["kept"].outcome == "violated"
    assert "servanda/loss/mean_weight" not in step.metrics
    assert beyond.outcome == "error"
    assert "outside of the mask: prompts, tools or padding" in beyond.cause


def test_the_inputs_change_no_other_cell():
    plain, more = observed(TIS, None), observed(TIS, declared)

    assert plain.verdict.to_dict() == more.verdict.to_dict()
    assert {**plain.metrics} == {k: v for k, v in more.metrics.items() if "/loss/" not in k}


def test_a_slice_has_counts_of_its_own():
    rule = "slices: [{name: late, match: {context.position: {gte: 48}}}]\n"

    def loss(w_BT, mask_BT):
        return np.where(np.arange(WIDTH) >= 48, 1.0, declared(w_BT, mask_BT))

    clauses = CLAUSES.replace("0.999}", "0.999, slices: [all, late]}")
    step = observed(TIS + rule + clauses, loss)
    used = {c.slice: c for c in step.verdict.cells if c.clause == "used"}

    assert used["late"].n == batch()[2][:, 48:].sum()
    assert used["late"].value < 0.5 < used["all"].value < 1


def test_ranks_find_what_one_process_finds():
    train_BT, infer_BT, mask_BT = batch()
    w_BT = of_sequences(np.exp(train_BT - infer_BT), mask_BT)
    halves = (slice(0, SIZE // 2), slice(SIZE // 2, SIZE))
    barrier, sent = Barrier(2), [None, None]

    def rank(at):
        def gather(message):
            sent[at] = message
            barrier.wait()
            found = [*sent]
            barrier.wait()
            return found

        rows = halves[at]
        return Monitor(contract(TIS + CLAUSES), gather=gather).observe(
            train_BT[rows],
            infer_BT[rows],
            mask_BT[rows],
            weights=0,
            groups=[str(b) for b in range(SIZE)[rows]],
            loss_weights=w_BT[rows],
        )

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(rank, range(2))
    alone = observed(TIS + CLAUSES, of_sequences, groups=[str(b) for b in range(SIZE)])

    assert one.cause == two.cause == alone.cause
    for name in ("used", "kept", "mean", "ess"):
        assert cells(one)[name] == cells(two)[name] == cells(alone)[name]


def test_a_comparison_needs_a_declaration_and_a_contract_of_engines_has_no_loss():
    with pytest.raises(ContractError, match="compares with the declared weighting, and none is"):
        contract(CLAUSES)
    text = CONTRACT.replace("workload: {source: trainer,", "workload: {prompts: p.jsonl,")
    text = text.replace("claim: realised", "claim: population").replace(
        "{engine: external}", "{engine: table}"
    )
    with pytest.raises(ContractError, match="is about a trainer's loss, and engines have none"):
        parse(text + TIS + CLAUSES, "run.kernelcontract.yaml", engines=["table"])


# versions


def fleet(seed, behind=None, *, size=48, kernel=0.02, update=0.03):
    """Replicas r0..r5 that all claim the trainer's version 12; `behind` samples from 11."""
    rng = np.random.default_rng(seed)
    shape = (size, WIDTH)
    now_BT = -rng.exponential(1.0, shape) - 0.05
    before_BT = now_BT + rng.normal(0, update, shape)
    late_B1 = (np.arange(size) % 6 == behind)[:, None] if behind is not None else False
    infer_BT = np.where(late_B1, before_BT, now_BT) + rng.normal(0, kernel, shape)
    labels = {"replica": [f"r{b % 6}" for b in range(size)]}
    given = {"labels": labels, "older": {1: before_BT}, "versions": [12] * size}
    return (now_BT, np.minimum(infer_BT, 0), np.ones(shape, dtype=bool)), given


def test_a_replica_that_samples_from_an_older_version_is_named():
    arrays, given = fleet(1, behind=3)

    step = Monitor("verl-async").observe(*arrays, weights=12, **given)

    assert step.outcome == "error"
    assert step.cause.startswith("replica r3 claims version 12 and samples from 11: its logprobs")
    assert "in 8 of 8 sequences" in step.cause
    assert step.metrics["servanda/version/wrong_replicas"] == 1.0


def test_forty_healthy_fleets_give_no_alarm():
    """At 4.5 % a step, two are expected at most; symmetric noise gives none on these seeds."""
    for seed in range(40):
        arrays, given = fleet(100 + seed, size=24)
        step = Monitor("verl-async").observe(*arrays, weights=12, **given)
        assert step.metrics["servanda/version/wrong_replicas"] == 0.0


def test_a_counter_that_rises_while_nothing_is_synced_is_found():
    """All replicas claim 12 and hold 10: the older version that explains most is named."""
    (now_BT, _, mask_BT), given = fleet(2)
    rng = np.random.default_rng(3)
    oldest_BT = given["older"][1] + rng.normal(0, 0.03, now_BT.shape)
    infer_BT = np.minimum(oldest_BT + rng.normal(0, 0.02, now_BT.shape), 0)
    older = {1: given["older"][1], 2: oldest_BT}

    step = Monitor("verl-async").observe(
        now_BT, infer_BT, mask_BT, weights=12, versions=[12] * len(now_BT), older=older
    )

    assert step.cause.startswith("the engine claims version 12 and samples from 10")


def test_versions_are_staleness_and_its_split():
    rng = np.random.default_rng(5)
    size = 64
    lag_B = rng.integers(0, 4, size)
    infer_BT = -rng.exponential(1.0, (size, WIDTH)) - 0.5
    scale = (0.02 + 0.01 * lag_B)[:, None] * np.sqrt(np.pi / 2)
    train_BT = infer_BT + rng.normal(0, scale, infer_BT.shape)
    mask_BT = np.ones(infer_BT.shape, dtype=bool)

    step = Monitor("verl-async").observe(
        np.minimum(train_BT, 0), infer_BT, mask_BT, weights=9, versions=9 - lag_B
    )
    stale = Monitor("verl-async").observe(
        np.minimum(train_BT, 0), infer_BT, mask_BT, weights=9, staleness=lag_B
    )

    assert step.metrics["servanda/staleness/mean"] == lag_B.mean()
    assert step.metrics["servanda/lag/gap_nats"] == pytest.approx(0.02, abs=0.002)
    low, high = (step.metrics[f"servanda/lag/per_update_nats/{end}"] for end in ("low", "high"))
    assert low < 0.01 < high
    assert step.verdict.to_dict() == stale.verdict.to_dict()


def test_a_version_of_the_future_and_a_contradiction_are_refused():
    train_BT, infer_BT, mask_BT = batch()
    monitor = Monitor("verl-async")
    with pytest.raises(EvidenceError, match="a token is -5 updates old"):
        monitor.observe(train_BT, infer_BT, mask_BT, weights=12, versions=[17] * SIZE)
    with pytest.raises(EvidenceError, match="staleness and versions disagree at step 12"):
        monitor.observe(
            train_BT, infer_BT, mask_BT, weights=12, versions=[11] * SIZE, staleness=[0] * SIZE
        )
    with pytest.raises(EvidenceError, match="older has the key 0"):
        monitor.observe(train_BT, infer_BT, mask_BT, weights=12, older={0: train_BT})


def test_a_sample_keeps_what_the_loss_used_and_the_versions(tmp_path):
    train_BT, infer_BT, mask_BT = batch()
    weight_BT = declared(np.exp(train_BT - infer_BT), mask_BT)

    Monitor(contract(TIS), dump=tmp_path, sample=1.0).observe(
        train_BT,
        infer_BT,
        mask_BT,
        weights=4,
        tokens=np.ones(mask_BT.shape, dtype=int),
        loss_weights=weight_BT,
        loss_mask=mask_BT,
        versions=[3] * SIZE,
    )

    (kept,) = open_dump(tmp_path).read()
    own = {name: column[kept.trained_K] for name, column in kept.per_token.items()}
    np.testing.assert_array_equal(own["loss_weight"], weight_BT[mask_BT])
    assert set(own["loss_mask"]) == {1.0}
    assert (set(own["weight_version"]), set(own["staleness"])) == ({3.0}, {1.0})
