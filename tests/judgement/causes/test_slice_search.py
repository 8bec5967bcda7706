# Slices that nobody named: they are found, are what a contract means, and are not seen in noise.

import math

import numpy as np
import pytest

from servanda.contract.clause import SliceRule
from servanda.contract.model import Contract
from servanda.judgement.causes.slice_search import (
    ALPHA,
    find_sequences,
    find_slices,
    halves,
    mask_of,
    round_between,
)
from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import cuts_of
from servanda.rl.steps.contract import contract_of, corpus_of
from servanda.traces.corpus import Prompt
from tests import oracles
from tests.judgement.causes.gaps import pairs, table

LIMIT = 0.025
BLOCK = np.array([65, 129, 193, 64, 100, 77, 90, 66, 128, 200, 300, 257])

# what is wrong, how it is drawn, and the match that is expected
FOUND = {
    "one row in twenty-four": (
        {"steps": 12, "wrong": lambda row, *_: row == 7},
        {"context.row": 7},
    ),
    "the first token of prompts of 64 k + 1 tokens": (
        {
            "steps": 24,
            "lengths": lambda rng: rng.choice(BLOCK, 24),
            "wrong": lambda _, length, position, *__: (position == 0) & (length % 64 == 1),
        },
        {"context.position": 0, "request.prompt_tokens": 65},
    ),
    "ids from 151,000 on": (
        {"steps": 40, "wrong": lambda _, __, ___, token, ____: token >= 151_000},
        {"outcome.token_id": 151_500},
    ),
    "one replica of four": (
        {"labels": {"replica": lambda s: f"r{s % 4}"}, "wrong": lambda row, *_: row % 4 == 3},
        {"labels.replica": "r3"},
    ),
    "the end of the responses": (
        {"wrong": lambda _, __, position, *___: position >= 60},
        {"context.position": 62},
    ),
    "the edges of blocks": (
        {"wrong": lambda _, length, position, *__: (length + position) % 16 == 0},
        {"context.length": 160},
    ),
    "contexts of 256 tokens and more": (
        {"wrong": lambda _, length, position, *__: length + position >= 256},
        {"context.length": 300},
    ),
}


@pytest.mark.parametrize("name", [*FOUND])
def test_a_slice_is_found_without_being_named(name):
    how, inside = FOUND[name]

    (found, *others) = find_slices(table(7, **how), LIMIT)

    assert others == []
    assert found.share > 0.8 and found.inside > 5 * found.outside
    assert {field.split(" %")[0] for field in found.match} == {*inside}
    assert all(_meets(f, c, inside[f.split(" %")[0]]) for f, c in found.match.items())


def _meets(field, conditions, value):
    if " % " in field:
        value %= int(field.split(" % ")[1])
    ops = {"gte": float.__ge__, "lt": float.__lt__}
    return all(
        value in other if op == "in" else ops[op](float(value), float(other))
        for op, other in conditions.items()
    )


@pytest.mark.parametrize("name", [*FOUND])
def test_a_found_slice_is_a_slice_of_a_contract_and_selects_the_wrong_tokens(name):
    how, _ = FOUND[name]
    (found,) = find_slices(table(6, **how), LIMIT)
    rule = SliceRule(name="found", match=found.match)

    text, contract = contract_of("verl-sync", "found", [rule])  # read and checked by the linter
    (cut,) = cuts_of(contract.slices, corpus_of("dump", ()))["found"]

    assert isinstance(contract, Contract) and "found" in text
    apart = 0
    for _, pair, _ in pairs(6, **how):
        own = [Prompt(1, labels={n: v[s] for n, v in pair.labels.items()}) for s in range(24)]
        inside_N = cut.mask(columns(pair, own, cut.fields), len(pair.infer.token_N))
        ratio_N = np.abs(pair.train.columns["logp"] - pair.infer.columns["logp"])
        assert 0 < inside_N.sum() < len(inside_N) or name.startswith("ids")
        apart += ratio_N[inside_N].sum() - (ratio_N[~inside_N] > 1.2).sum()
    assert apart > 0  # hardly a large difference is outside


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("noise", [0.02, 0.15, 0.8])
def test_noise_of_any_size_and_sequences_of_differing_noise_have_no_slice(noise, spread):
    labels = {"replica": lambda s: f"r{s % 4}", "env": lambda s: f"e{s % 3}"}
    for seed in range(5):
        drawn = table(seed, noise=noise, spread=spread, labels=labels)
        assert find_slices(drawn, LIMIT) == ()
        assert find_sequences(drawn, LIMIT) is None


def test_a_few_sequences_without_a_mark_are_found_one_by_one():
    rng = np.random.default_rng(0)
    drawn = table(8, wrong=lambda row, *_: np.isin(row, rng.integers(0, 24, 1)))

    odd = find_sequences(drawn, LIMIT)

    assert find_slices(drawn, LIMIT) == ()
    assert odd is not None and len(odd.index) == 6 and odd.share > 0.8
    assert all(place.startswith("step ") for place in odd.worst)


def test_two_slices_are_both_found():
    def wrong(row, _, position, *__):
        return (row == 3) | (position >= 60)

    found = find_slices(table(9, steps=24, wrong=wrong), LIMIT)

    assert {field.split(" ")[0] for f in found for field in f.match} == {
        "context.row",
        "context.position",
    }


def test_the_half_that_chooses_does_not_test():
    """A slice that is wrong in the chosen half alone is not confirmed."""
    drawn = table(10)
    chosen_K, _ = halves(drawn)
    wrong_K = chosen_K & (drawn.numbers["context.position"] < 4)
    drawn.train_K[wrong_K] = drawn.infer_K[wrong_K] - 2

    assert find_slices(drawn, LIMIT) == ()


@pytest.mark.parametrize(("steps", "size"), [(60, 1), (30, 2), (4, 24)])
def test_of_steps_of_any_size_some_sequences_choose_and_others_test(steps, size):
    drawn = table(10, steps=steps, size=size)
    chosen_K, tested_K = halves(drawn)
    chosen = len({*drawn.sequence_K[chosen_K]})
    assert abs(chosen - 0.4 * steps * size) < 1
    assert not {*drawn.sequence_K[chosen_K]} & {*drawn.sequence_K[tested_K]}
    if size > 2:  # each step in both
        assert {*drawn.step_K[chosen_K]} == {*drawn.step_K[tested_K]} == {*drawn.step_K}


def test_edges_are_round_numbers():
    assert (round_between(150_991, 151_003), round_between(12, 12)) == (151_000, 12)


# the price of an answer


@pytest.mark.parametrize("name", ["one replica of four", "one row in twenty-four"])
def test_a_slice_costs_three_over_alpha_on_the_sequences_that_did_not_choose(name):
    drawn = table(5, **FOUND[name][0])
    (found,) = find_slices(drawn, LIMIT)
    chosen_K, tested_K = halves(drawn)
    assert not {*drawn.sequence_K[chosen_K]} & {*drawn.sequence_K[tested_K]}
    inside_K = mask_of(found.match, drawn)
    gap_K = np.abs(np.expm1(drawn.log_ratio_K)) / (np.exp(drawn.log_ratio_K) + 1)
    tested = sorted({*drawn.sequence_K[tested_K & inside_K]})
    means = [gap_K[tested_K & inside_K & (drawn.sequence_K == q)].mean() for q in tested]
    chosen = drawn.taken(chosen_K)
    outside = chosen.expected(~inside_K[chosen_K])[inside_K[chosen_K]].mean()

    assert found.bound == pytest.approx(2 * outside) and found.sequences == len(tested)
    log_e = oracles.most([means], oracles.POS, found.bound)
    assert found.log_e == pytest.approx(log_e, rel=1e-6)
    assert ALPHA == 0.01
    price = 3 * math.exp(-found.log_e)
    assert find_slices(drawn, LIMIT, price * (1 + 1e-9)) == (found,)
    assert find_slices(drawn, LIMIT, price * (1 - 1e-9)) == ()


def test_odd_sequences_cost_one_over_alpha_on_average_and_each():
    """The limit is far above the other sequences, so it is the bound of every token."""
    limit = 0.15
    drawn = table(9, noise=0.01, wrong=lambda row, *_: row % 24 == 5)
    _, tested_K = halves(drawn)
    gap_K = np.abs(np.expm1(drawn.log_ratio_K)) / (np.exp(drawn.log_ratio_K) + 1)
    log_e = [
        oracles.mixed(oracles.grown(gap_K[drawn.sequence_K == q], oracles.POS, limit))
        for q in range(drawn.sequence_K.max() + 1)
    ]
    tested = sorted({*drawn.sequence_K[tested_K]})
    mean = oracles.mixed([log_e[q] for q in tested])

    odd = find_sequences(drawn, limit)
    assert odd.log_e == pytest.approx(mean, rel=1e-9) and len(odd.index) == 6
    least = min(log_e[q] for q in odd.index)
    for price, near in ((odd.log_e, 1e-9), (odd.log_e, -1e-9), (least, 1e-9), (least, -1e-9)):
        found = find_sequences(drawn, limit, math.exp(-price + near))
        paid = [q for q, e in enumerate(log_e) if e > price - near]
        assert (found is None) == (mean < price - near)
        assert found is None or {*found.index} == {*paid}
