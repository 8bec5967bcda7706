# Staleness is known only once an answer is trained on: a slice by it selects what diverged.

import numpy as np
import pytest

from servanda.errors import ContractError
from servanda.rl import Monitor
from tests.kit import parse

TV, Q = 0.05, 0.5
TOKENS, ANSWERS = 16, 1500

CONTRACT = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: stale}
kernels: {train: {engine: external}, infer: {engine: external}}
weights: {changes: every_step}
claim: realised
workload: {source: trainer, sampling: {max_new_tokens: 64}}
slices: [{name: old, match: {FIELD: {gte: 1}}}]
statistical: [{id: tv, metric: METRIC, aggregate: mean, clip: 1.0, at_most: 0.05}]
"""


def contract(field, metric="tv"):
    text = CONTRACT.replace("FIELD", field).replace("METRIC", metric)
    return parse(text, "stale.kernelcontract.yaml", engines=[])[0]


def step(rng):
    """TV .05 in every context; an answer whose first token diverged grows long, and is old.

    infer draws token 0 with probability 1/2, and train gives it .05 less.  The answers that begin
    with it have sixteen tokens, of which the first eight are one update old; the others have two.
    """
    first_BT = rng.random((ANSWERS, TOKENS)) < Q
    infer_BT = np.full((ANSWERS, TOKENS), np.log(Q))
    train_BT = np.where(first_BT, np.log(Q - TV), np.log(Q + TV))
    long_B = first_BT[:, 0]
    mask_BT = np.arange(TOKENS) < np.where(long_B, TOKENS, 2)[:, None]
    stale_BT = (long_B[:, None] & (np.arange(TOKENS) < 2)).astype(float)
    return train_BT, infer_BT, mask_BT, stale_BT


def test_a_mean_over_stale_tokens_is_beyond_a_limit_that_every_context_keeps():
    """What the old slice averaged: .05 in each context, and more than that on what was selected."""
    rng = np.random.default_rng(0)
    train_BT, infer_BT, mask_BT, stale_BT = step(rng)
    x_BT = np.maximum(-np.expm1(train_BT - infer_BT), 0)
    assert x_BT[mask_BT & (stale_BT > 0)].mean() > 1.4 * TV
    assert x_BT[mask_BT].mean() == pytest.approx(TV, abs=0.005)


@pytest.mark.slow
def test_no_step_is_violated_by_when_its_answers_were_done():
    """Of 40 steps at the limit; a slice by context.staleness was violated in nearly all."""
    rng, monitor = np.random.default_rng(1), Monitor("verl-async")
    assert {c.id: c.at_most for c in monitor.contract.statistical}["gradient"] == TV
    told = [
        monitor.observe(train, infer, mask, staleness=stale, weights=i)
        for i, (train, infer, mask, stale) in enumerate(step(rng) for _ in range(40))
    ]
    assert any(rule.name.startswith("stale") for rule in monitor.contract.slices)
    cells = [c for s in told for c in s.verdict.cells if c.clause == "gradient"]
    violated = [c for c in cells if c.outcome == "violated"]
    assert not [c for c in violated if c.slice.startswith("stale")]
    assert sum(c.slice == "all" for c in violated) <= 1


def test_the_old_name_is_an_error_with_its_replacement():
    with pytest.raises(ContractError) as refused:
        contract("context.staleness")
    said = str(refused.value)
    assert "context.staleness is known only once the answer is trained on" in said
    assert "hint: write outcome.staleness, and promise tv_contribution there instead of tv" in said


def test_a_mean_on_the_new_name_is_refused_and_a_contribution_is_not():
    with pytest.raises(ContractError, match="known only after the token"):
        parse(
            CONTRACT.replace("FIELD", "outcome.staleness")
            .replace("METRIC", "tv")
            .replace("at_most: 0.05", "at_most: 0.05, slices: [old]"),
            "stale.kernelcontract.yaml",
            engines=[],
        )
    monitor = Monitor(contract("outcome.staleness", "tv_contribution"))
    told = monitor.observe(*step(np.random.default_rng(2))[:3], weights=0)
    cell = next(c for c in told.verdict.cells if c.slice == "old")
    assert cell.outcome == "not applicable"
    assert "tv_contribution cannot be computed" in cell.note
